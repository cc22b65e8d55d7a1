"""The status of a run, from its events or its log: the step, the time left, the last error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from trainshed.observe.event_log import completed_steps, read_events
from trainshed.observe.event_text import RECENT_STEPS, format_duration
from trainshed.storage import Store

_STEP_LINE = re.compile(
    r"step (?P<step>\d+)/(?P<steps>\d+) .*ETA (?P<eta>[\d.]+ s|\d+:\d\d:\d\d)  loss (?:(?P<loss>[\d.]+)|not finite)"
    r".*  (?P<rate>[\d,]+) tokens/s/GPU(?:  MFU (?P<mfu>[\d.]+)%)?"
)


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
    return run_status_from_events(read_events(store, folder), steps)


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
    recent = [step["step_seconds"] for step in done[-RECENT_STEPS:]]
    left = steps - last["step"] - 1 if steps else None
    return RunStatus(
        attempt=attempt,
        step=last["step"] + 1,
        steps=steps,
        eta_seconds=left * sum(recent) / len(recent) if left and ended is None else None,
        loss=last["loss"],
        mfu=last["mfu"],
        tokens_per_second_per_gpu=last["tokens_per_second_per_gpu"],
        phase=phase,
        last_error=error,
        ended=ended,
        early_stop=early_stop,
    )


def run_status_from_log(lines: Iterable[str], steps: int | None = None) -> RunStatus:
    """Return the status of a run by the lines of its log (`event_text.py`), for when its events cannot be read."""
    last: re.Match[str] | None = None
    for line in lines:
        last = _STEP_LINE.search(line) or last
    if last is None:
        return RunStatus(steps=steps)

    def figure(name: str) -> float | None:
        return float(last[name].replace(",", "")) if last[name] else None

    mfu = figure("mfu")
    return RunStatus(
        step=int(last["step"]),
        steps=int(last["steps"]),
        eta_seconds=_parse_duration(last["eta"]),
        loss=figure("loss"),
        mfu=None if mfu is None else mfu / 100,
        tokens_per_second_per_gpu=figure("rate"),
    )


def _parse_duration(text: str) -> float:
    if text.endswith(" s"):
        return float(text.removesuffix(" s"))
    hours, minutes, seconds = map(int, text.split(":"))
    return 3600.0 * hours + 60 * minutes + seconds
