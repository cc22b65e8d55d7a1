"""The driver: runs in a small pod, and creates each stage when the one before has succeeded.

It may be killed at any moment and started again: what is there already is left as it is, and what has succeeded is
not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.kubernetes.kinds import DEPLOYMENT, JOB, POD, SERVICE, Object
from trainshed.launch.kubernetes.live.api import Api, Forbidden
from trainshed.launch.kubernetes.live.listing import list_job
from trainshed.launch.kubernetes.live.serving import is_placed
from trainshed.launch.kubernetes.live.standing import is_made_anew, ran_out_of_time, standing
from trainshed.launch.kubernetes.live.status import stage_states
from trainshed.launch.kubernetes.manifests.naming import INSTANCE, MOST_RESTARTS, RESTARTED, RESTARTS
from trainshed.launch.kubernetes.manifests.yaml_text import documents, read_documents
from trainshed.reporting import SILENT, Reporter

POLL_SECONDS = 15.0
PATIENCE_SECONDS = 900.0
"""How long the API server may not answer: an upgrade of the control plane takes minutes."""
T = TypeVar("T")


def drive(
    api: Api,
    manifests: Path,
    *,
    reporter: Reporter = SILENT,
    poll_seconds: float = POLL_SECONDS,
    patience_seconds: float = PATIENCE_SECONDS,
) -> None:
    """Create the stages of a folder of manifests in the order of their names; raises what ended one."""
    patient = _Patience(patience_seconds, poll_seconds, reporter)
    for file in sorted(manifests.glob("*.yaml")):
        stage = file.stem.partition("-")[2]
        text = file.read_text(encoding="utf-8")
        stage_documents = documents(text)
        written = [patient.try_to(api.apply, document) for document in stage_documents]
        job = read_documents(text)[-1]["metadata"]["labels"][INSTANCE]
        reporter.note(f"{stage}: {written[-1]} is created")
        remaking = _Remaking(api, stage, stage_documents[-1], patient, reporter, poll_seconds)
        _wait(api, job, stage, written[-1], patient, reporter, poll_seconds, remaking)
        reporter.note(f"{stage}: {'serves' if written[-1].startswith(DEPLOYMENT.name) else 'done'}")


def _wait(
    api: Api,
    job: str,
    stage: str,
    written: str,
    patient: _Patience,
    reporter: Reporter,
    poll_seconds: float,
    remaking: _Remaking,
) -> None:
    """Wait for the end of a stage, or until a server answers, and tell what it waits for whenever that changes."""
    ids = {stage: written}
    told, placed_since = "", None
    pause = min(1.0, poll_seconds)  # a stage that skips everything is over in seconds, others take hours
    while True:
        # One look decides: between two the stage may fail, and what is to be made anew would be taken for the end.
        listing = patient.try_to(list_job, api, job, ids)
        found = listing.stages[stage]
        if found is None:
            raise TrainshedError(f"{stage}: {written} was deleted before its end", where=f"namespace {api.namespace}")
        if standing(found).phase in ("done", "serving"):
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


class _Remaking:
    """Makes a plain Job anew that has failed: all its pods end before the first of the next starts.

    Its Service outlives it and keeps the count, so that a driver which is killed in between goes on counting.
    """

    def __init__(
        self, api: Api, stage: str, document: str, patient: _Patience, reporter: Reporter, poll_seconds: float
    ) -> None:
        self._api, self._stage, self._document = api, stage, document
        self._patient, self._reporter, self._poll_seconds = patient, reporter, poll_seconds

    def is_due(self, found: Object) -> bool:
        """Whether a failed object is to be made anew."""
        if not is_made_anew(found, restarts=0):
            return False
        count, last = self._counted(found)
        return last == found["metadata"]["uid"] or is_made_anew(found, restarts=count)

    def make_anew(self, found: Object) -> None:
        """Count it, delete it, wait for the last of its pods, and create it again as it was rendered."""
        name, uid = found["metadata"]["name"], found["metadata"]["uid"]
        count, last = self._counted(found)
        if last != uid and not ran_out_of_time(found):
            count += 1
        most = found["metadata"]["annotations"][MOST_RESTARTS]
        why = "its time was up" if ran_out_of_time(found) else f"it failed ({count} of {most} restarts)"
        self._reporter.note(f"{self._stage}: {why}; it is made anew")
        self._patient.try_to(self._api.annotate, SERVICE, name, {RESTARTS: str(count), RESTARTED: uid})
        self._patient.try_to(self._api.delete, JOB, name)
        # Two pods of one rank would answer to one name.
        while self._is_there(name, uid):
            time.sleep(min(1.0, self._poll_seconds))
        self._patient.try_to(self._api.apply, self._document)
        self._patient.try_to(self._api.annotate, JOB, name, {RESTARTS: str(count)})

    def _counted(self, found: Object) -> tuple[int, str]:
        service = self._patient.try_to(self._api.get, SERVICE, found["metadata"]["name"]) or {"metadata": {}}
        annotations = service["metadata"].get("annotations") or {}
        return int(annotations.get(RESTARTS, 0)), annotations.get(RESTARTED, "")

    def _is_there(self, name: str, uid: str) -> bool:
        found = self._patient.try_to(self._api.get, JOB, name)
        if found is not None and found["metadata"]["uid"] == uid:
            return True
        return bool(self._patient.try_to(self._api.list, POD, f"batch.kubernetes.io/controller-uid={uid}"))


class _Patience:
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
            except (InputError, Forbidden):
                raise
            except TrainshedError as error:
                if time.monotonic() > deadline:
                    raise
                self._reporter.warn(f"{error.what}; asking again")
                time.sleep(self._poll_seconds)
