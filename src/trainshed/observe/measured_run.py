"""The step time by which a plan is calibrated: of one of our runs, or of a log that `engine_logs/` reads.

The figure is the median over the steps after the warm-up that have the final batch size. Compilation, cold caches and a
batch that still grows would distort it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from trainshed.errors import InputError
from trainshed.observe.engine_logs.reader import READABLE
from trainshed.observe.engine_logs.run_logs import ReadLog
from trainshed.observe.event_log import read_events
from trainshed.observe.metrics import TrainingFacts, with_final_batch
from trainshed.storage import Store

WARM_UP_STEPS = 5
FEWEST_STEPS = 3
"""A median of fewer means little."""


@dataclass(frozen=True)
class MeasuredRun:
    """The steps of one run."""

    kind: str
    """What wrote the log: torch (ours), or the name of another program."""
    step_seconds: float
    """Median after the warm-up."""
    steps: int
    """Of how many steps it is the median."""
    memory_gib: float | None = None
    """Peak memory of tensors."""
    device: str | None = None
    """The GPU's name in the driver."""
    version: str | None = None
    attempt: int | None = None
    world_size: int | None = None
    global_batch: int | None = None
    """Sequences per step, where the log says so."""
    time: float | None = None
    """When its last step was, in seconds since 1970."""
    day: str | None = None
    """The last date a log names."""


def measure_run(store: Store, folder: str) -> MeasuredRun:
    """Measure one of our runs by its last attempt with enough steps; `folder` is the run's folder in the store."""
    attempts: dict[int, list[dict[str, Any]]] = {}
    starts: dict[int, dict[str, Any]] = {}
    for event in read_events(store, folder):
        if event["kind"] == "start":
            starts[event["attempt"]] = event
        elif event["kind"] == "step" and not event["skipped"]:
            attempts.setdefault(event["attempt"], []).append(event)
    most = max((len(events) for events in attempts.values()), default=0)
    enough = [number for number, events in attempts.items() if len(events) > FEWEST_STEPS and number in starts]
    if not enough:
        raise _too_few(most, folder or store.url)
    attempt = max(enough)
    events, start = attempts[attempt], starts[attempt]
    steady = _after_warm_up(_same_batch(events))
    memory = [event["memory_gib"] for event in steady if event.get("memory_gib")]
    return MeasuredRun(
        kind="torch",
        step_seconds=median(event["step_seconds"] for event in steady),
        steps=len(steady),
        memory_gib=max(memory, default=None),
        device=start["device"],
        version=start["versions"].get("trainshed"),
        attempt=attempt,
        world_size=start["world_size"],
        time=steady[-1]["time"],
    )


def _same_batch(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last steps that each added the same tokens; an attempt's first step is never among them."""
    added = [later["tokens"] - earlier["tokens"] for earlier, later in pairwise(events)]
    first = len(added)
    while first and added[first - 1] == added[-1]:
        first -= 1
    return events[first + 1 :]


def _after_warm_up(measured: list[Any]) -> list[Any]:
    """Return what comes after the warm-up; of a short run the later half."""
    return measured[min(WARM_UP_STEPS, len(measured) // 2) :]


def measure_log(path: Path) -> MeasuredRun:
    """Measure a run by the log of a program that `engine_logs/` reads."""
    if not path.is_file():
        raise InputError("there is no such file", where=str(path))
    log = ReadLog(str(path))
    steps = [event for event in log.events(TrainingFacts()) if event["kind"] == "step"]
    timed = [step for step in steps if step["step_seconds"] is not None]
    if not timed:
        raise InputError("this log has no step times", where=str(path), hint=f"read are {READABLE}")
    steady = _after_warm_up(with_final_batch(timed))
    if len(steady) < FEWEST_STEPS:
        raise _too_few(len(timed), str(path))
    facts = log.facts
    return MeasuredRun(
        kind=log.program,
        step_seconds=median(step["step_seconds"] for step in steady),
        steps=sum(step.get("steps") or 1 for step in steady),
        memory_gib=facts.memory_gib,
        global_batch=facts.global_batch,
        world_size=facts.world_size,
        day=facts.day,
    )


def _too_few(steps: int, where: str) -> InputError:
    return InputError(
        f"{steps} steps are too few to measure by",
        where=where,
        hint=f"let it run for {2 * WARM_UP_STEPS + FEWEST_STEPS} steps or more: the first {WARM_UP_STEPS} do not count",
    )
