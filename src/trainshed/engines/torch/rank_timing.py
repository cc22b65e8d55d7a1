"""What each rank computes itself in a step, and how long it waits for others: measured here, gathered rarely.

On a CPU the host waits in a collective, and a clock measures it. On a GPU the compute stream waits, and a pair of CUDA
events around the wait measures that, without the host waiting for anything. FSDP waits on streams of its own; where the
compute stream waits for these is measured. Collectives inside compiled blocks (tensor parallel on a GPU) are not seen:
the ranks of such a group have one figure.

Rank 0 decides when a window is over, by a vote in the figures of a step, so that all ranks know it at the same step.
The window's means then travel in one small all_reduce. It is apart from that of the step's figures: a longer vector
could be summed in another order, and no run may depend on the time of day.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from trainshed.engines.torch.device_clock import DeviceTimestamp

WINDOW_STEPS = 20
WINDOW_SECONDS = 30.0
"""A window lasts until both have passed."""
_RANKS_PER_WINDOW_SECOND = 8
"""Windows of many ranks are longer: their event has three numbers for each rank."""
MEASURED_EVERY = {"cuda": 10, "cpu": 5}
"""A wait costs the host some microseconds to measure, and some steps of a window tell enough."""
WINDOW_VOTE = "rank_window"
"""The name of the vote among the figures of a step."""

_HOST_WAITS: tuple[tuple[type, str], ...] = ((Work, "wait"), (AsyncCollectiveTensor, "wait"))
_STREAM_WAITS: tuple[tuple[type, str], ...] = (
    (FSDPParamGroup, "wait_for_unshard"),
    (FSDPParamGroup, "finalize_backward"),
)


class StepWaits:
    """The waits of one step; a wait within another is part of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._waits: list[tuple[DeviceTimestamp, DeviceTimestamp]] = []
        self._waiting = False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits, with its waits measured."""

        @wraps(function)
        def wait(*arguments: Any, **options: Any) -> Any:
            if self._waiting or (self._stream is not None and torch.cuda.current_stream() != self._stream):
                return function(*arguments, **options)
            self._waiting = True
            began = DeviceTimestamp(self._device)
            try:
                return function(*arguments, **options)
            finally:
                self._waits.append((began, DeviceTimestamp(self._device)))
                self._waiting = False

        return wait

    def seconds(self) -> float:
        """Return the time of all waits, once the device has reached the end of the step."""
        return sum(ended.seconds_since(began) for began, ended in self._waits)


@contextmanager
def measured_waits(device: torch.device) -> Iterator[StepWaits]:
    """Measure the waits of this rank inside the context."""
    waits = StepWaits(device)
    places = _HOST_WAITS if device.type == "cpu" else (*_HOST_WAITS, *_STREAM_WAITS)
    # From the class's own dictionary: what `getattr` gives of a C++ class could not be put back as a method.
    originals = [(owner, name, vars(owner)[name]) for owner, name in places if name in vars(owner)]
    for owner, name, _ in originals:
        setattr(owner, name, waits.timed(getattr(owner, name)))
    try:
        yield waits
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


@dataclass(frozen=True)
class RankWindow:
    """The means of a window on all ranks, one item a rank; None for a rank that has measured no step."""

    steps: int
    compute_seconds: list[float | None]
    wait_seconds: list[float | None]
    memory_gib: list[float | None] | None


class PendingWindow:
    """A window on its way to the host."""

    def __init__(self, steps: int, table: torch.Tensor) -> None:
        """`table` is float64 [ranks, 3] on the device: compute, wait, memory; already summed over the ranks."""
        self._steps, self._host = steps, table
        if table.is_cuda:
            host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._host = host.copy_(table, non_blocking=True)
        self._arrived = DeviceTimestamp(table.device)

    def read(self) -> RankWindow:
        """Wait for the table and return it."""
        self._arrived.wait()
        compute, wait, memory = ([_known(value) for value in column] for column in self._host.t().tolist())
        return RankWindow(self._steps, compute, wait, memory if any(memory) else None)


def _known(value: float) -> float | None:
    # Five decimals are enough to tell ranks apart, and keep the event of a thousand ranks short.
    return round(value, 5) if value >= 0 else None


class RankTimer:
    """Measures the steps of one rank, and gathers those of all of them; a single rank does neither."""

    def __init__(self, device: torch.device, rank: int, world_size: int) -> None:
        self._device, self._rank, self._world_size = device, rank, world_size
        self._window_seconds = max(WINDOW_SECONDS, world_size / _RANKS_PER_WINDOW_SECOND)
        self._due = False
        self._pending: tuple[int, PendingWindow] | None = None
        self._waits: dict[int, StepWaits] = {}
        self._restart()

    def _restart(self) -> None:
        self._began = time.monotonic()
        self._steps = 0
        self._measured: list[tuple[float, float]] = []

    def votes(self) -> dict[str, float]:
        """Return the vote to be summed with the figures of the next step: rank 0's clock counts."""
        if self._world_size == 1:
            return {}
        over = self._steps >= WINDOW_STEPS and time.monotonic() - self._began >= self._window_seconds
        return {WINDOW_VOTE: float(self._rank == 0 and over)}

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measure a step inside the context, if it is one of those that are measured."""
        if self._world_size == 1 or step % MEASURED_EVERY[self._device.type]:
            yield
        else:
            with measured_waits(self._device) as self._waits[step]:
                yield
        if self._due:
            self._pending = step, self._gather()
            self._due = False
            self._restart()

    def finished(self, step: int, step_seconds: float, *, window_is_over: bool) -> RankWindow | None:
        """Tell that the device has finished a step; returns the window that was gathered after it, if one was."""
        self._steps += 1
        if (waits := self._waits.pop(step, None)) is not None:
            waited = min(waits.seconds(), step_seconds)
            self._measured.append((step_seconds - waited, waited))
        # The steps that were launched before all ranks knew of it still vote.
        self._due = self._due or (window_is_over and self._steps >= WINDOW_STEPS)
        if self._pending is None or self._pending[0] != step:
            return None
        window, self._pending = self._pending[1].read(), None
        return window

    def _gather(self) -> PendingWindow:
        """Start to sum a table in which each rank has filled its own row."""
        row = [-1.0, -1.0]
        if self._measured:
            row = [sum(column) / len(self._measured) for column in zip(*self._measured, strict=True)]
        memory = torch.cuda.max_memory_allocated(self._device) / 2**30 if self._device.type == "cuda" else 0.0
        table = torch.zeros(self._world_size, 3, dtype=torch.float64)
        table[self._rank] = torch.tensor([*row, memory], dtype=torch.float64)
        if self._device.type == "cuda":
            table = table.pin_memory().to(self._device, non_blocking=True)
        dist.all_reduce(table)
        return PendingWindow(self._steps, table)
