"""The driver: runs in a small pod, and creates each stage when the one before it has succeeded.

It may be killed and restarted at any moment: it leaves existing objects as they are, and does not wait for stages
that have succeeded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.kubernetes.api import ApiForbidden, KubeApi
from trainshed.launch.kubernetes.conditions import deadline_exceeded, object_status, should_recreate
from trainshed.launch.kubernetes.objects import (
    DEPLOYMENT,
    INSTANCE_LABEL,
    JOB,
    MAX_RESTARTS_ANNOTATION,
    POD,
    RESTARTED_UID_ANNOTATION,
    RESTARTS_ANNOTATION,
    SERVICE,
    KubeObject,
    read_documents,
    split_documents,
)
from trainshed.launch.kubernetes.status import is_placed, list_job_objects, stage_states
from trainshed.reporting import SILENT, Reporter

POLL_SECONDS = 15.0
API_RETRY_SECONDS = 900.0
"""How long the API server may not answer: an upgrade of the control plane takes minutes."""
T = TypeVar("T")


def drive(
    api: KubeApi,
    manifests: Path,
    *,
    reporter: Reporter = SILENT,
    poll_seconds: float = POLL_SECONDS,
    patience_seconds: float = API_RETRY_SECONDS,
) -> None:
    """Create the stages of a folder of manifests in the order of their names; raises what ended one."""
    patient = _ApiRetry(patience_seconds, poll_seconds, reporter)
    for file in sorted(manifests.glob("*.yaml")):
        stage = file.stem.partition("-")[2]
        text = file.read_text(encoding="utf-8")
        stage_documents = split_documents(text)
        written = [patient.try_to(api.apply, document) for document in stage_documents]
        job = read_documents(text)[-1]["metadata"]["labels"][INSTANCE_LABEL]
        reporter.note(f"{stage}: {written[-1]} is created")
        remaking = _JobRestarter(api, stage, stage_documents[-1], patient, reporter, poll_seconds)
        _wait_for_stage(api, job, stage, written[-1], patient, reporter, poll_seconds, remaking)
        reporter.note(f"{stage}: {'serves' if written[-1].startswith(DEPLOYMENT.name) else 'done'}")


def _wait_for_stage(
    api: KubeApi,
    job: str,
    stage: str,
    written: str,
    patient: _ApiRetry,
    reporter: Reporter,
    poll_seconds: float,
    remaking: _JobRestarter,
) -> None:
    """Wait for the end of a stage, or until a server answers, and tell what it waits for whenever that changes."""
    ids = {stage: written}
    told, placed_since = "", None
    pause = min(1.0, poll_seconds)  # a stage that skips everything is over in seconds, others take hours
    while True:
        # One look decides: between two the stage may fail, and what is to be made anew would be taken for the end.
        listing = patient.try_to(list_job_objects, api, job, ids)
        found = listing.stages[stage]
        if found is None:
            raise TrainshedError(f"{stage}: {written} was deleted before its end", where=f"namespace {api.namespace}")
        if object_status(found).phase in ("done", "serving"):
            return
        if remaking.is_due(found):
            remaking.make_anew(found)
            told = ""
            continue
        (state,) = stage_states(ids, listing)
        where = f"namespace {api.namespace}, {written}"
        if state.state == "failed":
            raise TrainshedError(
                f"{stage} failed: {state.reason}",
                where=where,
                hint="later stages are not created; the same `trainshed submit` goes on from what is done",
            )
        if found["kind"] == DEPLOYMENT.name and is_placed(stage, found, listing):
            # Counted from here: the controller's own clock also runs while Kueue or the scheduler has no node for it.
            placed_since = placed_since or time.monotonic()
            if time.monotonic() - placed_since > found["spec"]["progressDeadlineSeconds"]:
                raise TrainshedError(
                    f"{stage} was not ready within {found['spec']['progressDeadlineSeconds']} s: {state.reason}",
                    where=where,
                    hint="it goes on trying: `trainshed status` says how it stands, `trainshed cancel` ends it",
                )
        if state.reason and state.reason != told:
            told = state.reason
            reporter.note(f"{stage}: {told}")
        time.sleep(pause)
        pause = min(pause * 1.5, poll_seconds)


class _JobRestarter:
    """Makes a plain Job anew that has failed: all its pods end before the first of the next starts.

    Its Service outlives it and keeps the count, so that a driver which is killed in between goes on counting.
    """

    def __init__(
        self, api: KubeApi, stage: str, document: str, patient: _ApiRetry, reporter: Reporter, poll_seconds: float
    ) -> None:
        self._api, self._stage, self._document = api, stage, document
        self._patient, self._reporter, self._poll_seconds = patient, reporter, poll_seconds

    def is_due(self, found: KubeObject) -> bool:
        """Whether a failed object is to be made anew."""
        if not should_recreate(found, restarts=0):
            return False
        count, last = self._counted(found)
        return last == found["metadata"]["uid"] or should_recreate(found, restarts=count)

    def make_anew(self, found: KubeObject) -> None:
        """Count it, delete it, wait for the last of its pods, and create it again as it was rendered."""
        name, uid = found["metadata"]["name"], found["metadata"]["uid"]
        count, last = self._counted(found)
        if last != uid and not deadline_exceeded(found):
            count += 1
        most = found["metadata"]["annotations"][MAX_RESTARTS_ANNOTATION]
        why = "its time was up" if deadline_exceeded(found) else f"it failed ({count} of {most} restarts)"
        self._reporter.note(f"{self._stage}: {why}; it is made anew")
        self._patient.try_to(
            self._api.annotate, SERVICE, name, {RESTARTS_ANNOTATION: str(count), RESTARTED_UID_ANNOTATION: uid}
        )
        self._patient.try_to(self._api.delete, JOB, name)
        # Two pods of one rank would answer to one name.
        while self._is_there(name, uid):
            time.sleep(min(1.0, self._poll_seconds))
        self._patient.try_to(self._api.apply, self._document)
        self._patient.try_to(self._api.annotate, JOB, name, {RESTARTS_ANNOTATION: str(count)})

    def _counted(self, found: KubeObject) -> tuple[int, str]:
        service = self._patient.try_to(self._api.get, SERVICE, found["metadata"]["name"]) or {"metadata": {}}
        annotations = service["metadata"].get("annotations") or {}
        return int(annotations.get(RESTARTS_ANNOTATION, 0)), annotations.get(RESTARTED_UID_ANNOTATION, "")

    def _is_there(self, name: str, uid: str) -> bool:
        found = self._patient.try_to(self._api.get, JOB, name)
        if found is not None and found["metadata"]["uid"] == uid:
            return True
        return bool(self._patient.try_to(self._api.list, POD, f"batch.kubernetes.io/controller-uid={uid}"))


class _ApiRetry:
    """Tries again where the API server does not answer or fails; what it refuses is final."""

    def __init__(self, seconds: float, poll_seconds: float, reporter: Reporter) -> None:
        self._seconds = seconds
        self._poll_seconds = poll_seconds
        self._reporter = reporter

    def try_to(self, ask: Callable[..., T], *arguments: object) -> T:
        """Call until it answers."""
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                return ask(*arguments)
            except (InputError, ApiForbidden):
                raise
            except TrainshedError as error:
                if time.monotonic() > deadline:
                    raise
                self._reporter.warn(f"{error.what}; asking again")
                time.sleep(self._poll_seconds)
