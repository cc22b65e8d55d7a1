"""A profile of some steps, as the recipe's `observe.profile` asks: a Chrome trace per rank in the run's folder."""

from __future__ import annotations

from pathlib import Path

import torch

from trainshed.recipe.execution import Profile


class StepProfiler:
    """Starts and stops PyTorch's profiler around the steps that were asked for; does nothing on other ranks."""

    def __init__(self, wanted: Profile | None, rank: int, first: int, folder: Path) -> None:
        """`first` is how many steps were done before: where the profile's steps are past, nothing is profiled."""
        self._steps = range(0)
        if wanted is not None and rank in wanted.ranks:
            self._steps = range(max(wanted.steps_before, first), wanted.steps_before + wanted.steps)
        self._path = folder / f"rank-{rank:05d}.json"
        self._running: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Call before each step."""
        if self._steps and step == self._steps.start:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._running = torch.profiler.profile(activities=activities)
            self._running.start()

    def after(self, step: int, *, last: bool = False) -> Path | None:
        """Call after each step; returns the trace's file when it is written."""
        if self._running is None or not (last or step + 1 >= self._steps.stop):
            return None
        self._running.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(self._path))
        self._running = None
        return self._path
