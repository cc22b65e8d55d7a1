"""How many samples a step takes and which ones: batch size, its ramp-up, and the samples that are skipped.

The ramp-up is Megatron's `--rampup-batch-size START INCREMENT SAMPLES`: a step's batch grows by INCREMENT
each time SAMPLES / ((global - START) / INCREMENT) more samples have been consumed. Two differences, both
needed for a data order that depends on nothing but the recipe: boundaries are compared in whole numbers
(Megatron divides floats), and a batch is never rounded down to a multiple of micro batch x data-parallel
size; a layout that does not divide every size in `sizes` must be refused instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trainshed.errors import InputError


@dataclass(frozen=True)
class BatchRampUp:
    """Start at a batch of `start`, grow by `increment`, over the first `samples` samples."""

    start: int
    increment: int
    samples: int


@dataclass(frozen=True)
class ScheduleStart:
    """Where the steps of a phase begin (`train.phases`): at `step` of the run and at `sample` of its data.

    `run_samples` and `run_tokens` are what the run has taken of any data before.
    """

    step: int = 0
    sample: int = 0
    run_samples: int = 0
    run_tokens: int = 0


class BatchSchedule:
    """Global batch size by step. That of a phase is for the steps of the run from `start` on, without a ramp-up."""

    def __init__(
        self, global_batch: int, ramp_up: BatchRampUp | None = None, *, start: ScheduleStart | None = None
    ) -> None:
        if global_batch < 1:
            raise InputError(f"a batch of {global_batch} samples", where="train.global_batch", hint="1 or more")
        self.global_batch = global_batch
        # Stages of constant batch size: the step and the consumed samples each begins with.
        self.start = start or ScheduleStart()
        self._steps, self._consumed, self._sizes = [self.start.step], [self.start.sample], [global_batch]
        if ramp_up is not None:
            self._ramp(ramp_up)

    @property
    def sizes(self) -> list[int]:
        """All batch sizes that occur, in order."""
        return list(self._sizes)

    def batch_size(self, step: int) -> int:
        """Return how many samples a step takes; steps count from 0."""
        return self._sizes[bisect_right(self._steps, step) - 1]

    def consumed(self, step: int) -> int:
        """Return how many samples were taken before a step."""
        stage = bisect_right(self._steps, step) - 1
        return self._consumed[stage] + (step - self._steps[stage]) * self._sizes[stage]

    def steps_for(self, samples: int) -> int:
        """Return the least number of steps that take at least `samples` samples."""
        stage = bisect_right(self._consumed, samples) - 1
        return self._steps[stage] + -(-(samples - self._consumed[stage]) // self._sizes[stage])

    def _ramp(self, ramp: BatchRampUp) -> None:
        growth = self.global_batch - ramp.start
        if ramp.start < 1 or ramp.increment < 1 or ramp.samples < 0 or growth < 0 or growth % ramp.increment:
            raise InputError(
                f"a ramp-up from {ramp.start} by {ramp.increment} over {ramp.samples} samples does not reach "
                f"the global batch of {self.global_batch}",
                where="train.batch_ramp",
                hint="start + a whole number of increments must be train.global_batch",
            )
        increments = growth // ramp.increment
        if increments == 0 or ramp.samples == 0:
            return
        self._steps, self._consumed, self._sizes = [], [], []
        step = consumed = stage = 0
        while stage < increments:
            size = ramp.start + stage * ramp.increment
            self._steps.append(step)
            self._consumed.append(consumed)
            self._sizes.append(size)
            # The stage ends with the first step at which consumed * increments >= (stage + 1) * samples.
            boundary = -(-(stage + 1) * ramp.samples // increments)
            taken = -(-(boundary - consumed) // size)
            step, consumed = step + taken, consumed + taken * size
            stage = min(increments, consumed * increments // ramp.samples)
        self._steps.append(step)
        self._consumed.append(consumed)
        self._sizes.append(self.global_batch)


class SkipList:
    """Samples that are left out: sample k of the run is the k-th that is not skipped.

    Ranges [start, stop) count samples of the stream as it is without skips, so adding a range changes nothing
    before its start.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        merged: list[list[int]] = []
        for start, stop in sorted((int(start), int(stop)) for start, stop in ranges):
            if not 0 <= start < stop:
                raise InputError(
                    f"the range {start} to {stop} holds no samples",
                    where="data.skip",
                    hint="write [first, end)",
                )
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], stop)
            else:
                merged.append([start, stop])
        self.ranges = [(start, stop) for start, stop in merged]
        lengths = np.array([stop - start for start, stop in self.ranges], np.int64)
        self._removed = np.concatenate(([0], np.cumsum(lengths)))
        # The sample of the run from which a range shifts everything.
        self._from = np.array([start for start, _ in self.ranges], np.int64) - self._removed[:-1]

    def to_stream(self, samples: np.ndarray) -> np.ndarray:
        """Map samples of the run to samples of the stream."""
        return samples + self._removed[np.searchsorted(self._from, samples, "right")]

    def stream_end(self, samples: int) -> int:
        """Return the end of the stream that the first `samples` samples of the run are drawn from."""
        return int(self.to_stream(np.array([samples - 1]))[0]) + 1 if samples else 0
