"""The status of a run, from its events or its log: the step, the time left, the last error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainshed.observe.engine_logs.reader import read_lines
from trainshed.observe.engine_logs.run_logs import read_run_events
from trainshed.observe.event_log import completed_steps
from trainshed.observe.event_text import RECENT_STEPS, format_duration
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
    phase: str | None = None
    last_error: str | None = None
    ended: str | None = None
    early_stop: str | None = None
    """Why the run ended before its last step, where it is done all the same."""

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """One line for people; empty before anything has happened."""
        if self.step is None:
            return f"in {self.phase}" if self.phase else ""
        total = f" of {self.steps:,}" if self.steps else ""
        parts = [f"step {self.step:,}{total}"]
        if self.eta_seconds:
            parts.append(f"{format_duration(self.eta_seconds)} left")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.tokens_per_second_per_gpu is not None:
            parts.append(f"{self.tokens_per_second_per_gpu:,.0f} tokens/s/GPU")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        if self.early_stop is not None:
            parts.append(f"stopped early: {self.early_stop}")
        return ", ".join(parts)


def read_run_status(store: Store, folder: str, steps: int | None = None) -> RunStatus:
    """Read the status of the run in `folder` of a store."""
    return run_status_from_events(read_run_events(store, folder), steps)


def run_status_from_events(events: Iterable[dict[str, Any]], steps: int | None = None) -> RunStatus:
    """Return the status of a run by its events, in the order they were written."""
    events = list(events)
    done = completed_steps(events)
    attempt = phase = error = ended = early_stop = None
    for event in events:
        attempt = max(attempt or 0, event["attempt"])
        kind = event["kind"]
        if kind == "step":
            phase = None
        elif kind == "start":
            ended = early_stop = None
        elif kind == "early_stop":
            early_stop = event["reason"]
        elif kind == "phase":
            phase = event["name"]
        elif kind == "failure":
            error, ended = event["what"], "failed"
        elif kind == "end" and event.get("rank") in (0, None):
            ended = event["reason"]
            error = error if ended == "failed" else None
    if not done:
        return RunStatus(attempt=attempt, steps=steps, phase=phase, last_error=error, ended=ended)
    last = done[-1]
    recent = [step["step_seconds"] for step in done[-RECENT_STEPS:] if step["step_seconds"] is not None]
    left = steps - last["step"] - 1 if steps else None
    return RunStatus(
        attempt=attempt,
        step=last["step"] + 1,
        steps=steps,
        eta_seconds=left * sum(recent) / len(recent) if left and recent and ended is None else None,
        loss=last["loss"],
        mfu=last["mfu"],
        tokens_per_second_per_gpu=last["tokens_per_second_per_gpu"],
        phase=phase,
        last_error=error,
        ended=ended,
        early_stop=early_stop,
    )


def run_status_from_log(lines: Iterable[str], steps: int | None = None) -> RunStatus:
    """Return the status of a run by the lines of its log, of whichever engine, for when its events cannot be read."""
    events, reader = read_lines(lines)
    facts = reader.facts
    status = run_status_from_events((event | {"attempt": 1} for event in events), facts.steps or steps)
    eta_seconds = facts.eta_seconds if facts.eta_seconds is not None else status.eta_seconds
    return replace(status, attempt=None, eta_seconds=eta_seconds)
