"""PyTorch's profiler around the steps of `observe.profile`: traces, memory snapshots and a summary of each trace.

    profile/attempt-0001/rank-00003.00000012.pt.trace.json.gz    Perfetto and TensorBoard's profiler plugin open it
                         rank-00003.00000012.summary.json        `observe/profile_summary.py`
                         rank-00003.00000012.memory.pickle       pytorch.org/memory_viz opens it
    tensorboard/profile/attempt-0001/…                           the traces again, where TensorBoard looks

The number is the last step that was recorded. The plugin takes it for the name of a span, and shows ranks that have the
same one side by side.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from trainshed.errors import TrainshedError
from trainshed.observe.profile_summary import TRACE_SUFFIX, summarize_trace, summary_file
from trainshed.recipe import Profile
from trainshed.run_folder import PROFILE, TENSORBOARD, attempt_folder, rank_name

# As PyTorch's own example: a snapshot of more allocations takes the viewer minutes to load.
_SNAPSHOT_ENTRIES = 100_000


@dataclass(frozen=True)
class WrittenProfile:
    """A trace that a cycle has left, or why it left none."""

    steps: int
    path: str
    """In the run's folder."""
    rank: int
    summary: dict[str, Any] | None = None
    problem: str | None = None


@dataclass(frozen=True)
class _Cycle:
    """Steps counted from 0: the profiler runs from `start` on and records `recorded`."""

    start: int
    recorded: range

    def action(self, number: int) -> torch.profiler.ProfilerAction:
        """Return what the profiler does in a step of the cycle; PyTorch's own schedules warn without a warm-up."""
        step = self.start + number
        if step < self.recorded.start:
            return torch.profiler.ProfilerAction.WARMUP
        if step + 1 < self.recorded.stop:
            return torch.profiler.ProfilerAction.RECORD
        return torch.profiler.ProfilerAction.RECORD_AND_SAVE


class StepProfiler:
    """Profiles the steps and ranks of `observe.profile`; on other ranks it only knows when a cycle ends."""

    def __init__(
        self, profile: Profile | None, rank: int, first: int, run: Path, attempt: int, *, tensorboard: bool = True
    ) -> None:
        """`first` is how many steps are already done: what is left of the cycles is profiled.

        With `tensorboard` the traces are also put where TensorBoard looks for them.
        """
        self._profile, self._rank, self._run, self._attempt = profile, rank, run, attempt
        self._tensorboard = tensorboard
        self._cycles = list(_remaining_cycles(profile, first)) if profile is not None else []
        self._running: torch.profiler.profile | None = None
        self._last_step = first - 1
        self._written: WrittenProfile | None = None

    def before(self, step: int) -> None:
        """Call before each step."""
        if not self._cycles or not self._is_profiled:
            return
        assert self._profile is not None
        cycle = self._cycles[0]
        if step == cycle.start:
            self._start(cycle)
        if step == cycle.recorded.start and self._snapshots_memory:
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)

    def ends_cycle(self, step: int) -> bool:
        """Whether a cycle ends with this step, on this rank or another."""
        return bool(self._cycles) and step + 1 == self._cycles[0].recorded.stop

    def after(self, step: int, *, last: bool = False) -> list[WrittenProfile]:
        """Call after each step; returns what a cycle has left, on rank 0 for all ranks.

        `last`: no step follows with this profiler, so the cycle ends here.
        """
        self._last_step = step
        if not self._cycles or step < self._cycles[0].start:
            return []
        ended = last or self.ends_cycle(step)
        if self._running is not None:
            if ended:
                self._running.stop()  # writes the trace, also one that is cut short
                self._running = None
            else:
                self._running.step()
        if not ended:
            return []
        cycle = self._cycles.pop(0)
        return self._collect(cycle, step) if step >= cycle.recorded.start else []

    @property
    def _is_profiled(self) -> bool:
        return self._profile is not None and self._rank in self._profile.ranks

    @property
    def _snapshots_memory(self) -> bool:
        return self._profile is not None and self._profile.memory and torch.cuda.is_available()

    def _start(self, cycle: _Cycle) -> None:
        assert self._profile is not None
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(
            activities=activities,
            schedule=cycle.action,
            on_trace_ready=lambda running: self._write(running, cycle),
            profile_memory=self._profile.memory,
            with_stack=self._profile.stacks,
            record_shapes=self._profile.shapes,
        )
        self._running.start()

    def _collect(self, cycle: _Cycle, step: int) -> list[WrittenProfile]:
        """Return this rank's own trace, and on rank 0 where those of the other ranks are."""
        assert self._profile is not None
        own, self._written = self._written, None
        steps = step + 1 - cycle.recorded.start
        others = []
        if self._rank == 0:
            # Only rank 0's events are stored as they happen: it speaks for the others, whose files have known names.
            others = [WrittenProfile(steps, self._path(rank), rank) for rank in self._profile.ranks if rank != 0]
        return [*([WrittenProfile(steps, own.path, own.rank, own.summary, own.problem)] if own else []), *others]

    def _path(self, rank: int) -> str:
        name = f"{rank_name(rank)}.{self._last_step + 1:08d}{TRACE_SUFFIX}"
        return f"{attempt_folder(PROFILE, self._attempt)}/{name}"

    def _write(self, running: torch.profiler.profile, cycle: _Cycle) -> None:
        """Write trace, snapshot and summary. A profile that cannot be written does not end the run."""
        if self._last_step < cycle.recorded.start:
            return  # a cycle that ends before the first step that it would record
        relative = self._path(self._rank)
        path = self._run / relative
        summary = problem = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}")
            running.export_chrome_trace(str(unfinished))
            unfinished.replace(path)
            if self._tensorboard:
                _link(path, self._run / TENSORBOARD / relative)
            if self._snapshots_memory:
                name = path.name.removesuffix(TRACE_SUFFIX)
                torch.cuda.memory._dump_snapshot(str(path.with_name(f"{name}.memory.pickle")))
            summary = summarize_trace(path).to_plain()
            summary_file(path).write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        except (OSError, RuntimeError, TrainshedError) as error:
            problem = f"the profile of rank {self._rank} was not written whole: {error}"
        finally:
            if self._snapshots_memory:
                torch.cuda.memory._record_memory_history(enabled=None)
        self._written = WrittenProfile(len(cycle.recorded), relative, self._rank, summary, problem)


def _remaining_cycles(profile: Profile, first: int) -> list[_Cycle]:
    """Return the cycles, or what is left of them, after `first` steps."""
    cycles = []
    for recorded in profile.recorded():
        left = range(max(recorded.start, first), recorded.stop)
        if left:
            cycles.append(_Cycle(max(first, left.start - profile.warmup_steps), left))
    return cycles


def _link(path: Path, target: Path) -> None:
    """Put a file at a second place too, without a second copy where the disk can."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(path, target)
    except OSError:  # buckets that are mounted have no links
        shutil.copyfile(path, target)
