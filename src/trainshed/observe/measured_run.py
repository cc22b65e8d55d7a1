"""Step times of a run: of one of ours, or of one that has a log of Megatron-LM, NeMo or DLLogger.

The figure is the median over the steps after the warm-up that have the final batch size. Compilation, cold caches and a
batch that still grows would distort it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from trainshed.errors import InputError
from trainshed.observe.event_log import read_events
from trainshed.storage import Store

WARM_UP_STEPS = 5
FEWEST_STEPS = 3
"""A median of fewer means little."""
_MEGATRON = re.compile(r"iteration\s+(\d+)\s*/.*?elapsed time per iteration \(ms\):\s*([\d.]+)")
_BATCH = re.compile(r"global[ _]batch[ _]size:\s*(\d+)")
_NEMO = re.compile(r"train_step_timing in s[\"']?\s*[:=]\s*([\d.]+)")
_MEMORY_MB = re.compile(r"max allocated:\s*([\d.]+)")
_DAY = re.compile(r"\b(20\d\d-[01]\d-[0-3]\d)\b")
_DLLOGGER = "DLLL"
_STEP_KEYS = ("train_step_timing in s", "train_step_timing", "step_time", "train_step_time")
"""Keys for the seconds of a step in DLLogger lines: NeMo's key first."""


@dataclass(frozen=True)
class MeasuredRun:
    """The steps of one run."""

    kind: str
    """What wrote the log: torch (ours), megatron, nemo or dllogger."""
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
    """Measure a run by the log that Megatron-LM, NeMo or DLLogger wrote."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    for kind, parse in (("dllogger", _parse_dllogger), ("megatron", _parse_megatron), ("nemo", _parse_nemo)):
        seconds, batches = parse(lines)
        if seconds:
            return _measured_log(kind, seconds, batches, lines, path)
    raise InputError(
        "this log has no step times",
        where=str(path),
        hint='read are Megatron-LM\'s "elapsed time per iteration (ms)", NeMo\'s "train_step_timing in s" and DLLogger',
    )


def _measured_log(kind: str, seconds: list[float], batches: list[int], lines: list[str], path: Path) -> MeasuredRun:
    if len(batches) == len(seconds):
        seconds = [value for value, batch in zip(seconds, batches, strict=True) if batch == batches[-1]]
    steady = _after_warm_up(seconds)
    if len(steady) < FEWEST_STEPS:
        raise _too_few(len(seconds), str(path))
    memory = [float(match[1]) / 1024 for line in lines if (match := _MEMORY_MB.search(line))]
    days = [match[1] for line in lines if (match := _DAY.search(line))]
    return MeasuredRun(
        kind=kind,
        step_seconds=median(steady),
        steps=len(steady),
        memory_gib=max(memory, default=None),
        global_batch=batches[-1] if batches else None,
        day=days[-1] if days else None,
    )


def _parse_megatron(lines: Iterable[str]) -> tuple[list[float], list[int]]:
    """Megatron-LM prints the mean over the iterations since its last line."""
    matches = [(line, match) for line in lines if (match := _MEGATRON.search(line))]
    batches = [int(batch[1]) for line, _ in matches if (batch := _BATCH.search(line))]
    return [float(match[2]) / 1000 for _, match in matches], batches


def _parse_nemo(lines: Iterable[str]) -> tuple[list[float], list[int]]:
    matches = [(line, match) for line in lines if (match := _NEMO.search(line))]
    batches = [int(batch[1]) for line, _ in matches if (batch := _BATCH.search(line))]
    return [float(match[1]) for _, match in matches], batches


def _parse_dllogger(lines: Iterable[str]) -> tuple[list[float], list[int]]:
    seconds: list[float] = []
    for line in lines:
        if not line.startswith(_DLLOGGER):
            continue
        try:
            data = orjson.loads(line[len(_DLLOGGER) :]).get("data")
        except (orjson.JSONDecodeError, AttributeError):
            continue  # a line that was cut off by a kill, or of another program
        value = next((data[key] for key in _STEP_KEYS if key in data), None) if isinstance(data, dict) else None
        if isinstance(value, int | float) and value > 0:
            seconds.append(float(value))
    return seconds, []


def _too_few(steps: int, where: str) -> InputError:
    return InputError(
        f"{steps} steps are too few to measure by",
        where=where,
        hint=f"let it run for {2 * WARM_UP_STEPS + FEWEST_STEPS} steps or more: the first {WARM_UP_STEPS} do not count",
    )
