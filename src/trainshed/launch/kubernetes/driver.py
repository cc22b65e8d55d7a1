"""The driver: runs in a small pod, and creates each stage when the one before it has succeeded.

It may be killed and restarted at any moment: applying the same object again changes nothing, and a stage that has
succeeded is not waited for. The stages belong to the ConfigMap with their manifests, so that they are deleted with it
(`trainshed cancel`, `helm uninstall`). A stage that another such ConfigMap left (`helm upgrade`) is replaced.

It is sent as a program that runs in any image with Python 3.8 (`driver_program.py`), without a package besides.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.kubernetes.api import ApiForbidden, KubeApi, connect_in_cluster
from trainshed.launch.kubernetes.conditions import deadline_exceeded, object_status, should_recreate
from trainshed.launch.kubernetes.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    MAX_RESTARTS_ANNOTATION,
    POD,
    RESTARTED_UID_ANNOTATION,
    RESTARTS_ANNOTATION,
    SERVICE,
    STAGES_FILE,
    KubeKind,
    KubeObject,
    kind_named,
    split_documents,
)
from trainshed.launch.kubernetes.status import is_placed, list_job_objects, stage_states
from trainshed.reporting import SILENT

if TYPE_CHECKING:
    from trainshed.reporting import Reporter

POLL_SECONDS = 15.0
API_RETRY_SECONDS = 900.0
"""How long requests are repeated while the API server does not answer: a control plane upgrade takes minutes."""
T = TypeVar("T")


@dataclass(frozen=True)
class DrivenStage:
    """A stage of `STAGES_FILE`: its manifests, and the objects in them as Kind/name."""

    stage: str
    file: str
    job: str
    objects: tuple[str, ...]


def read_stages(manifests: Path) -> list[DrivenStage]:
    """Read which stages a folder of manifests holds, in their order."""
    body: list[dict[str, Any]] = json.loads((manifests / STAGES_FILE).read_text(encoding="utf-8"))
    return [DrivenStage(stage["stage"], stage["file"], stage["job"], tuple(stage["objects"])) for stage in body]


def drive(
    api: KubeApi,
    manifests: Path,
    *,
    owner: str | None = None,
    reporter: Reporter = SILENT,
    poll_seconds: float = POLL_SECONDS,
    api_retry_seconds: float = API_RETRY_SECONDS,
) -> None:
    """Create the stages of a folder of manifests in order; raises the error of one that fails.

    `owner` is the ConfigMap that the manifests are from.
    """
    retry = _ApiRetry(api_retry_seconds, poll_seconds, reporter)
    creator = _StageCreator(api, owner, retry, reporter, poll_seconds)
    for driven in read_stages(manifests):
        stage, documents = driven.stage, split_documents((manifests / driven.file).read_text(encoding="utf-8"))
        if len(documents) != len(driven.objects):
            raise TrainshedError(f"{driven.file} has {len(documents)} objects, and {STAGES_FILE} another number")
        for object_id, document in zip(driven.objects, documents):  # noqa: B905 (Python 3.8 has no `strict`)
            creator.create(stage, object_id, document)
        object_id = driven.objects[-1]
        reporter.note(f"{stage}: {object_id} is created")
        restarter = _JobRestarter(api, stage, documents[-1], retry, reporter, poll_seconds)
        _wait_for_stage(api, driven.job, stage, object_id, retry, reporter, poll_seconds, restarter)
        reporter.note(f"{stage}: {'serves' if object_id.startswith(DEPLOYMENT.name) else 'done'}")


class _StageCreator:
    """Applies the objects of stages, and gives them to their owner."""

    def __init__(
        self, api: KubeApi, owner: str | None, retry: _ApiRetry, reporter: Reporter, poll_seconds: float
    ) -> None:
        self._api, self._retry, self._reporter = api, retry, reporter
        self._poll_seconds = min(1.0, poll_seconds)
        self._owner: KubeObject | None = None
        if owner is not None:
            self._owner = retry.call(api.get, CONFIG_MAP, owner)
            if self._owner is None:
                raise TrainshedError(f"the ConfigMap {owner} is gone: the job was deleted", where=api.namespace)
            self._owner = {"apiVersion": CONFIG_MAP.api_version, "kind": CONFIG_MAP.name, **self._owner}

    def create(self, stage: str, object_id: str, document: str) -> None:
        """Apply one object; one of an earlier release is deleted first, with its pods."""
        word, _, name = object_id.partition("/")
        kind = kind_named(word)
        if self._owner is not None:
            self._remove_replaced(stage, kind, name, self._owner["metadata"]["uid"])
        self._retry.call(self._api.apply_as, kind, name, document)
        if self._owner is not None:
            self._retry.call(self._api.own, kind, name, self._owner)

    def _remove_replaced(self, stage: str, kind: KubeKind, name: str, owner_uid: str) -> None:
        reported = False
        while True:
            there = self._retry.call(self._api.get, kind, name)
            if there is None:
                return
            metadata = there["metadata"]
            owners = [reference["uid"] for reference in metadata.get("ownerReferences") or ()]
            is_ending = "deletionTimestamp" in metadata
            if not is_ending and (not owners or owner_uid in owners):
                return
            if not reported:
                self._reporter.note(f"{stage}: {kind.name}/{name} of an earlier release is replaced")
                reported = True
            if not is_ending:
                self._retry.call(self._api.delete, kind, name)
            time.sleep(self._poll_seconds)


def _wait_for_stage(
    api: KubeApi,
    job: str,
    stage: str,
    object_id: str,
    retry: _ApiRetry,
    reporter: Reporter,
    poll_seconds: float,
    restarter: _JobRestarter,
) -> None:
    """Wait until a stage ends or serves, and report what it waits for whenever that changes."""
    ids = {stage: object_id}
    last_reason, placed_since = "", None
    pause = min(1.0, poll_seconds)  # a stage that skips everything is over in seconds, others take hours
    while True:
        # One listing for all decisions: between two, a stage may fail that is to be recreated and not to end the job.
        objects = retry.call(list_job_objects, api, job, ids)
        stage_object = objects.stages[stage]
        if stage_object is None:
            raise TrainshedError(f"{stage}: {object_id} was deleted before its end", where=f"namespace {api.namespace}")
        if object_status(stage_object).phase in ("done", "serving"):
            return
        if restarter.should_restart(stage_object):
            restarter.restart(stage_object)
            last_reason = ""
            continue
        (state,) = stage_states(ids, objects)
        where = f"namespace {api.namespace}, {object_id}"
        if state.state == "failed":
            raise TrainshedError(
                f"{stage} failed: {state.reason}",
                where=where,
                hint="later stages are not created; the same `trainshed submit` goes on from what is done",
            )
        if stage_object["kind"] == DEPLOYMENT.name and is_placed(stage, stage_object, objects):
            # Counted from here: the deadline of the controller also runs while there is no node for the pods.
            placed_since = placed_since or time.monotonic()
            if time.monotonic() - placed_since > stage_object["spec"]["progressDeadlineSeconds"]:
                raise TrainshedError(
                    f"{stage} was not ready within {stage_object['spec']['progressDeadlineSeconds']} s: {state.reason}",
                    where=where,
                    hint="it goes on trying: `trainshed status` says how it stands, `trainshed cancel` ends it",
                )
        if state.reason and state.reason != last_reason:
            last_reason = state.reason
            reporter.note(f"{stage}: {last_reason}")
        time.sleep(pause)
        pause = min(pause * 1.5, poll_seconds)


class _JobRestarter:
    """Recreates a failed plain Job; all its pods end before the first pod of the next one starts.

    The number of restarts is stored in the Job's Service, which is not recreated, so that a driver which is killed in
    between counts on.
    """

    def __init__(
        self, api: KubeApi, stage: str, document: str, retry: _ApiRetry, reporter: Reporter, poll_seconds: float
    ) -> None:
        self._api, self._stage, self._document = api, stage, document
        self._retry, self._reporter, self._poll_seconds = retry, reporter, poll_seconds

    def should_restart(self, failed_job: KubeObject) -> bool:
        """Whether a failed Job is to be recreated."""
        if not should_recreate(failed_job, restarts=0):
            return False
        count, last_uid = self._restart_count(failed_job)
        return last_uid == failed_job["metadata"]["uid"] or should_recreate(failed_job, restarts=count)

    def restart(self, failed_job: KubeObject) -> None:
        """Count it, delete it, wait for the last of its pods, and create it again as it was rendered."""
        name, uid = failed_job["metadata"]["name"], failed_job["metadata"]["uid"]
        count, last_uid = self._restart_count(failed_job)
        if last_uid != uid and not deadline_exceeded(failed_job):
            count += 1
        max_restarts = failed_job["metadata"]["annotations"][MAX_RESTARTS_ANNOTATION]
        why = "its time was up" if deadline_exceeded(failed_job) else f"it failed ({count} of {max_restarts} restarts)"
        self._reporter.note(f"{self._stage}: {why}; it is made anew")
        self._retry.call(
            self._api.annotate, SERVICE, name, {RESTARTS_ANNOTATION: str(count), RESTARTED_UID_ANNOTATION: uid}
        )
        self._retry.call(self._api.delete, JOB, name)
        # Two pods of one rank would have the same DNS name.
        while self._still_exists(name, uid):
            time.sleep(min(1.0, self._poll_seconds))
        self._retry.call(self._api.apply_as, JOB, name, self._document)
        self._retry.call(self._api.annotate, JOB, name, {RESTARTS_ANNOTATION: str(count)})

    def _restart_count(self, failed_job: KubeObject) -> tuple[int, str]:
        service = self._retry.call(self._api.get, SERVICE, failed_job["metadata"]["name"]) or {"metadata": {}}
        annotations = service["metadata"].get("annotations") or {}
        return int(annotations.get(RESTARTS_ANNOTATION, 0)), annotations.get(RESTARTED_UID_ANNOTATION, "")

    def _still_exists(self, name: str, uid: str) -> bool:
        job = self._retry.call(self._api.get, JOB, name)
        if job is not None and job["metadata"]["uid"] == uid:
            return True
        return bool(self._retry.call(self._api.list, POD, f"batch.kubernetes.io/controller-uid={uid}"))


class _ApiRetry:
    """Repeats a request if the API server does not answer or fails; a refusal is final."""

    def __init__(self, seconds: float, poll_seconds: float, reporter: Reporter) -> None:
        self._seconds = seconds
        self._poll_seconds = poll_seconds
        self._reporter = reporter

    def call(self, request: Callable[..., T], *arguments: object) -> T:
        """Call `request` until the API server answers."""
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                return request(*arguments)
            except (InputError, ApiForbidden):
                raise
            except TrainshedError as error:
                if time.monotonic() > deadline:
                    raise
                self._reporter.warn(f"{error.what}; asking again")
                time.sleep(self._poll_seconds)


class _Lines:
    """Writes what the driver reports as lines of its log."""

    def note(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    warn = note
    task = SILENT.task


def main(arguments: list[str] | None = None) -> int:
    """Run the driver in its pod; returns the exit code."""
    parser = argparse.ArgumentParser(description="Creates the stages of a job one after another.")
    parser.add_argument("--manifests", type=Path, required=True, help="folder with the manifests of the stages")
    parser.add_argument("--owner", required=True, help="the ConfigMap that they are from")
    options = parser.parse_args(arguments)
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    try:
        if not host or not port:
            raise InputError("this is not a pod of a cluster", hint="`trainshed submit` makes one that runs this")
        with connect_in_cluster(host, port) as api:
            drive(api, options.manifests, owner=options.owner, reporter=_Lines())
    except TrainshedError as error:
        place = f"{error.where}: " if error.where else ""
        hint = f"\n  {error.hint}" if error.hint else ""
        sys.stderr.write(f"error: {place}{error.what}{hint}\n")
        return error.exit_code
    return 0
