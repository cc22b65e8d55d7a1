"""The stages of the workflow as events: written where a stage runs, read by `status`, `watch` and the page.

They are the events of attempt 0 (`events/attempt-0000/`), since they belong to no attempt of the training. A stage that
a kill has ended is left as `started`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainshed.errors import StorageError, TrainshedError
from trainshed.observe.events import EventWriter
from trainshed.redaction import redacted
from trainshed.storage import Store

NO_ATTEMPT = 0
"""The attempt of events that belong to no attempt."""

StageRecordState = Literal["started", "done", "skipped", "failed"]


@dataclass
class StageOutcome:
    """What a stage says of itself before it ends."""

    what: str | None = None
    """What came out, or why nothing had to be done."""
    skipped: bool = False


class StageRecorder:
    """Writes the stages of one run, in the folder of a store; without a store it writes nothing."""

    def __init__(self, store: Store | None, folder: str = "") -> None:
        self._store, self._folder = store, folder

    @contextmanager
    def stage(self, name: str) -> Iterator[StageOutcome]:
        """Record a stage: that it has started, and how it ended."""
        began = time.monotonic()
        outcome = StageOutcome()
        self.emit(name, "started")
        try:
            yield outcome
        except BaseException as error:
            self.emit(name, "failed", seconds=time.monotonic() - began, what=_error_text(error))
            raise
        state: StageRecordState = "skipped" if outcome.skipped else "done"
        self.emit(name, state, seconds=time.monotonic() - began, what=outcome.what)

    def emit(
        self, name: str, state: StageRecordState, *, seconds: float | None = None, what: str | None = None
    ) -> None:
        """Write one event; a store that cannot take it does not fail the stage, which meets the same store itself."""
        if self._store is None:
            return
        what = redacted(what) if what else None
        with (
            suppress(StorageError, OSError),
            EventWriter(self._store, self._folder, attempt=NO_ATTEMPT, rank=None) as events,
        ):
            events.emit("stage", name=name, state=state, seconds=seconds, what=what)


UNRECORDED = StageRecorder(None)


def recorded_stage(stage: str, part: int, parts: int) -> str:
    """Return what a stage is called in the events of its run: each part of a stage that is cut into parts by itself."""
    return f"{stage} {part + 1}/{parts}" if parts > 1 else stage


def _error_text(error: BaseException) -> str:
    if isinstance(error, TrainshedError):
        return error.what
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class StageRecord:
    """A stage as its last events tell it; times are in seconds since 1970."""

    name: str
    state: StageRecordState
    started: float
    ended: float | None = None
    seconds: float | None = None
    what: str | None = None

    def text(self) -> str:
        """The stage in a line: `prepare done in 12.0 s: 1,234 tokens`."""
        from trainshed.observe.event_text import format_duration

        took = f" in {format_duration(self.seconds)}" if self.seconds is not None and self.state != "skipped" else ""
        return f"{self.name} {self.state}{took}" + (f": {self.what}" if self.what else "")


class StageTable:
    """The stages of a run from its events, each as it was last run, in the order in which they were started."""

    def __init__(self) -> None:
        self._by_name: dict[str, StageRecord] = {}

    def add(self, event: dict[str, Any]) -> None:
        """Take a `stage` event."""
        name, state, at = event["name"], event["state"], event.get("time", 0.0)
        before = self._by_name.pop(name, None)
        if state == "started" or before is None:
            ended = None if state == "started" else at
            record = StageRecord(name, state, at, ended, event.get("seconds"), event.get("what"))
        else:
            record = replace(before, state=state, ended=at, seconds=event.get("seconds"), what=event.get("what"))
        self._by_name[name] = record

    @property
    def records(self) -> list[StageRecord]:
        """All stages, the one that was started first at the front."""
        return sorted(self._by_name.values(), key=lambda record: record.started)

    @property
    def last(self) -> StageRecord | None:
        """The stage of the newest event."""
        return max(self._by_name.values(), key=lambda record: record.ended or record.started, default=None)


def stage_records(events: Iterable[dict[str, Any]]) -> list[StageRecord]:
    """Return the stages that events tell of."""
    table = StageTable()
    for event in events:
        if event["kind"] == "stage":
            table.add(event)
    return table.records
