"""The status of a run, from its events or its log: the step, the time left, the last error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainshed.observe.engine_logs.reader import read_lines
from trainshed.observe.engine_logs.run_logs import read_run_events
from trainshed.observe.event_log import add_completed_step, follow_events
from trainshed.observe.event_text import RECENT_STEPS, format_duration, rate_unit
from trainshed.observe.stages import StageRecord, StageTable
from trainshed.storage import Store


@dataclass(frozen=True)
class RunStatus:
    """How far a run has got; None for what is not known yet."""

    attempt: int | None = None
    step: int | None = None
    """Steps that are done."""
    steps: int | None = None
    eta_seconds: float | None = None
    loss: float | None = None
    mfu: float | None = None
    tokens_per_second_per_gpu: float | None = None
    device: str | None = None
    """What a rank computes on: the name of a GPU, or `cpu`."""
    phase: str | None = None
    train_phase: str | None = None
    """The part of `train.phases` that the last step belongs to."""
    last_error: str | None = None
    ended: str | None = None
    early_stop: str | None = None
    """Why the run ended before its last step, where it is done all the same."""
    stage: str | None = None
    """The stage before or after training that goes on or has failed, in words."""
    last_event_time: float | None = None
    """When the newest event was written, in seconds since 1970."""

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """One line for people; empty before anything has happened."""
        if self.step is None:
            return self.stage or (f"in {self.phase}" if self.phase else "")
        total = f" of {self.steps:,}" if self.steps else ""
        parts = [f"step {self.step:,}{total}", *([f"phase {self.train_phase}"] if self.train_phase else [])]
        if self.eta_seconds:
            parts.append(f"{format_duration(self.eta_seconds)} left")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.tokens_per_second_per_gpu is not None:
            parts.append(f"{self.tokens_per_second_per_gpu:,.0f} {rate_unit(self.device)}")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        if self.early_stop is not None:
            parts.append(f"stopped early: {self.early_stop}")
        if self.stage is not None:
            parts.append(self.stage)
        return ", ".join(parts)


def read_run_status(
    store: Store, folder: str, steps: int | None = None, *, newest_segments: int | None = None
) -> RunStatus:
    """Read the status of the run in `folder` of a store, of whichever engine.

    Of a run in a bucket only the newest segments are read, as many as `newest_segments` says.
    """
    if newest_segments is not None:
        events = follow_events(store, folder, newest_segments=newest_segments).poll()
        if events:
            return run_status_from_events(events, steps)
    return run_status_from_events(read_run_events(store, folder), steps)


class StatusTracker:
    """Follows the status of a run, event by event."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        """The steps that count (see `completed_steps`)."""
        self.stages = StageTable()
        self._values: dict[str, Any] = {}

    def add(self, event: dict[str, Any]) -> None:
        """Take the next event; those of stages belong to no attempt."""
        values, kind = self._values, event["kind"]
        values["last_event_time"] = max(values.get("last_event_time") or 0.0, event.get("time") or 0.0) or None
        if kind == "stage":
            self.stages.add(event)
            return
        values["attempt"] = max(values.get("attempt") or 0, event["attempt"])
        add_completed_step(self.done, event)
        if kind == "step":
            values["phase"] = None
        elif kind == "start":
            values["ended"] = values["early_stop"] = None
            values["device"] = event.get("device")
        elif kind == "early_stop":
            values["early_stop"] = event["reason"]
        elif kind == "phase":
            values["phase"] = event["name"]
        elif kind == "train_phase":
            values["train_phase"] = event["name"]
        elif kind == "failure":
            values["last_error"], values["ended"] = event["what"], "failed"
        elif kind == "end" and event.get("rank") in (0, None):
            values["ended"] = event["reason"]
            if event["reason"] != "failed":
                values["last_error"] = None

    def status(self, steps: int | None = None) -> RunStatus:
        """Return how the run stands after the events so far."""
        status = RunStatus(steps=steps, **self._values)
        if (stage := self._stage_outside_training()) is not None:
            status = replace(status, stage=stage.text())
            if stage.state == "failed":
                status = replace(status, last_error=f"{stage.name} failed: {stage.what or 'without a word'}")
        if not self.done:
            return replace(status, early_stop=None)
        last = self.done[-1]
        recent = [step["step_seconds"] for step in self.done[-RECENT_STEPS:] if step["step_seconds"] is not None]
        left = steps - last["step"] - 1 if steps else None
        return replace(
            status,
            step=last["step"] + 1,
            eta_seconds=left * sum(recent) / len(recent) if left and recent and status.ended is None else None,
            loss=last["loss"],
            mfu=last["mfu"],
            tokens_per_second_per_gpu=last["tokens_per_second_per_gpu"],
        )

    def _stage_outside_training(self) -> StageRecord | None:
        """The stage that a person asks about: one that goes on or has failed, and no training came after it."""
        stage = self.stages.last
        if stage is None or stage.state in ("done", "skipped"):
            return None
        since = self._values.get("last_event_time") or 0.0
        return stage if (stage.ended or stage.started) >= since else None


def run_status_from_events(events: Iterable[dict[str, Any]], steps: int | None = None) -> RunStatus:
    """Return the status of a run by its events, in the order they were written."""
    tracker = StatusTracker()
    for event in events:
        tracker.add(event)
    return tracker.status(steps)


def run_status_from_log(lines: Iterable[str], steps: int | None = None) -> RunStatus:
    """Return the status of a run by the lines of its log, of whichever engine, for when its events cannot be read."""
    events, reader = read_lines(lines)
    facts = reader.facts
    status = run_status_from_events((event | {"attempt": 1} for event in events), facts.steps or steps)
    eta_seconds = facts.eta_seconds if facts.eta_seconds is not None else status.eta_seconds
    return replace(status, attempt=None, eta_seconds=eta_seconds)
