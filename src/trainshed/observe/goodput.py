"""Goodput: the share of a run's time in which it did steps that count, and where the rest went.

The time is that of the attempts, from the start of the first to the end of the last, with the waiting between them;
stages before it hold no GPU. Between an attempt that finished all steps and one that was asked for more nobody waits,
and an attempt that finds nothing to do does not count. A step counts if no later attempt did it again and it updated
the weights. A step that was stalled, and the first one of an attempt, count as much as a usual step takes: the rest of
their time is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from trainshed.observe.event_log import completed_steps

_BEFORE_AGENT = ("install", "image", "meeting")
"""Phases that are over when the first event of an attempt is written, one after the other."""


@dataclass(frozen=True)
class LostTime:
    """Time that went into something other than steps that count."""

    reason: str
    seconds: float
    count: int
    """How often."""


@dataclass(frozen=True)
class RunGoodput:
    """Where the time of a run went."""

    wall_seconds: float
    productive_seconds: float
    steps: int
    attempts: int
    lost: tuple[LostTime, ...]
    """The largest first."""

    @property
    def goodput(self) -> float:
        """The share of the time that went into steps that count, 0 to 1."""
        return min(1.0, self.productive_seconds / self.wall_seconds) if self.wall_seconds > 0 else 0.0

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return {**asdict(self), "goodput": self.goodput, "lost": [asdict(lost) for lost in self.lost]}


def measure_goodput(events: Iterable[dict[str, Any]]) -> RunGoodput | None:
    """Return where the time of a run went; None where no step has its time, or the time is only an estimate."""
    of_attempts = [event for event in events if event.get("attempt", 1) > 0 and event.get("time") is not None]
    if any(event.get("time_estimated") for event in of_attempts if event["kind"] == "step"):
        return None
    counting = {
        id(step)
        for step in completed_steps(of_attempts)
        if step["step_seconds"] is not None and not step.get("skipped")
    }
    usual = _usual_seconds(of_attempts, counting)
    if usual is None:
        return None
    by_attempt: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in of_attempts:
        by_attempt[event.get("attempt", 1)].append(event)
    accounts = [
        _account(by_attempt[attempt], counting, usual)
        for attempt in sorted(by_attempt)
        if not _found_nothing_to_do(by_attempt[attempt])
    ]
    lost: dict[str, list[float]] = defaultdict(list)
    unasked_seconds = 0.0
    for earlier, later in pairwise(accounts):
        gap = max(0.0, later.began - earlier.ended)
        if earlier.finished:
            unasked_seconds += gap
        elif gap:
            lost["waiting between attempts"].append(gap)
    for account in accounts:
        for reason, seconds in account.lost:
            lost[reason].append(seconds)
    entries = [LostTime(reason, sum(seconds), len(seconds)) for reason, seconds in lost.items() if sum(seconds) > 0]
    return RunGoodput(
        wall_seconds=accounts[-1].ended - accounts[0].began - unasked_seconds,
        productive_seconds=sum(account.productive for account in accounts),
        steps=sum(account.steps for account in accounts),
        attempts=len(accounts),
        lost=tuple(sorted(entries, key=lambda entry: -entry.seconds)),
    )


def _usual_seconds(events: Sequence[dict[str, Any]], counting: set[int]) -> float | None:
    """The median of the steps that count; the first one of an attempt only where there is no other."""
    seen: set[int] = set()
    first, later = [], []
    for event in events:
        if event["kind"] == "step" and id(event) in counting:
            (later if event.get("attempt", 1) in seen else first).append(event["step_seconds"])
            seen.add(event.get("attempt", 1))
    return median(later or first) if later or first else None


@dataclass
class _AttemptAccount:
    began: float
    ended: float
    productive: float
    steps: int
    lost: list[tuple[str, float]]
    finished: bool


def _account(events: Sequence[dict[str, Any]], counting: set[int], usual: float) -> _AttemptAccount:
    """Account for the time of one attempt."""
    lost: list[tuple[str, float]] = []
    productive, steps = 0.0, 0
    began, ended = _span(events)
    first_step_began = ended
    staged_at = saved_at = None
    last_step, last_took = None, 0.0
    stalled = False
    first = True
    last_work = began
    for event in events:
        kind, seconds = event["kind"], event.get("seconds")
        if kind == "step" and event["step_seconds"] is not None:
            covered = event.get("steps") or 1
            took = event["step_seconds"] * covered
            if last_step is not None and event["step"] - covered < last_step:
                # Megatron's second line is the mean of the first step too, which has a line of its own.
                covered, took = max(1, event["step"] - last_step), max(0.0, took - last_took)
            last_step, last_took = event["step"], took
            step_began = event["time"] - took
            if first:
                first_step_began = min(first_step_began, step_began)
            if staged_at is not None and saved_at is not None:
                # Written while training waited, unless the step went on beside it.
                lost.append(("checkpoints", min(saved_at, step_began) - staged_at))
            staged_at = saved_at = None
            if id(event) not in counting:
                lost.append(("skipped steps" if event.get("skipped") else "steps done again", took))
            else:
                useful = min(took, usual * covered) if first or stalled else took
                productive, steps = productive + useful, steps + covered
                if took > useful:
                    lost.append(("first steps" if first else "stalls", took - useful))
            first = stalled = False
        elif kind == "stall":
            stalled = True
        elif kind in ("validation", "answers") and seconds:
            lost.append(("validation", seconds))
        elif kind == "checkpoint":
            if event.get("stall_seconds"):
                lost.append(("checkpoints", event["stall_seconds"]))
            if event["phase"] == "staged":
                staged_at = event["time"]
            elif event["phase"] == "committed":
                saved_at = event["time"]
        elif kind == "phase" and event["name"] != "first_step":
            lost.append((f"start: {event['name']}", event["seconds"]))
        if kind in ("step", "validation", "checkpoint", "answers"):
            last_work = event["time"]
    if staged_at is not None and saved_at is not None:
        lost.append(("checkpoints", saved_at - staged_at))
    failed = any(event["kind"] == "failure" for event in events)
    if failed and not first:
        lost.append(("from the last step to the end of a failed attempt", max(0.0, ended - last_work)))
    lost = [(reason, seconds) for reason, seconds in lost if seconds > 0]
    before = sum(seconds for reason, seconds in lost if reason.startswith("start: "))
    lost.append(("start: other", max(0.0, first_step_began - began - before)))
    rest = (ended - began) - productive - sum(seconds for _, seconds in lost)
    lost.append(("other", max(0.0, rest)))
    lost = [(why, seconds) for why, seconds in lost if seconds > 0]
    return _AttemptAccount(began, ended, productive, steps, lost, _finished(events))


def _finished(events: Sequence[dict[str, Any]]) -> bool:
    return any(event["kind"] == "end" and event.get("reason") == "finished" for event in events)


def _found_nothing_to_do(events: Sequence[dict[str, Any]]) -> bool:
    """Whether the run was started again after its last step: such an attempt ends as soon as it has loaded."""
    return _finished(events) and not any(event["kind"] == "step" for event in events)


def _span(events: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return when an attempt began and ended; what was done before its first event counts too."""
    times = [event["time"] for event in events]
    before = [event for event in events if event["kind"] == "phase" and event["name"] in _BEFORE_AGENT]
    began = min(times) - sum(event["seconds"] for event in before)
    firsts = [event for event in events if event["kind"] == "step" and event["step_seconds"] is not None][:1]
    for event in firsts:
        began = min(began, event["time"] - event["step_seconds"] * (event.get("steps") or 1))
    return began, max(times)
