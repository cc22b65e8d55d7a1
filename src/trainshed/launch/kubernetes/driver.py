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
from trainshed.launch.kubernetes.kinds import DEPLOYMENT, kind_named
from trainshed.launch.kubernetes.live.api import Api, Forbidden
from trainshed.launch.kubernetes.live.listing import list_job
from trainshed.launch.kubernetes.live.serving import is_placed
from trainshed.launch.kubernetes.live.standing import standing
from trainshed.launch.kubernetes.live.status import stage_states
from trainshed.launch.kubernetes.manifests.naming import INSTANCE
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
        written = [patient.try_to(api.apply, document) for document in documents(text)]
        job = read_documents(text)[-1]["metadata"]["labels"][INSTANCE]
        reporter.note(f"{stage}: {written[-1]} is created")
        _wait(api, job, stage, written[-1], patient, reporter, poll_seconds)
        reporter.note(f"{stage}: {'serves' if written[-1].startswith(DEPLOYMENT.name) else 'done'}")


def _wait(
    api: Api, job: str, stage: str, written: str, patient: _Patience, reporter: Reporter, poll_seconds: float
) -> None:
    """Wait for the end of a stage, or until a server answers, and tell what it waits for whenever that changes."""
    kind, _, name = written.partition("/")
    told, placed_since = "", None
    pause = min(1.0, poll_seconds)  # a stage that skips everything is over in seconds, others take hours
    while True:
        found = patient.try_to(api.get, kind_named(kind), name)
        if found is None:
            raise TrainshedError(f"{stage}: {written} was deleted before its end", where=f"namespace {api.namespace}")
        if standing(found).phase in ("done", "serving"):
            return
        ids = {stage: written}
        listing = patient.try_to(list_job, api, job, ids)
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
