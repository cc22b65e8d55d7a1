"""Exactly which tokens a step trains on, from (data section, seed, step, skip list) and nothing else.

Step n takes samples consumed(n) .. consumed(n + 1) of the run; skips turn them into samples of the stream;
the blend gives each a source and a number within it; the source's two keyed permutations (documents,
windows) give the tokens. Each part is closed-form, so any step costs the same to reach, and a rank may ask
for its rows only.

Shapes: B samples of a step (the global batch, ramp-up included), R rows asked for, L sequence_length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainshed.data.sampling.blend import Blend, Budget
from trainshed.data.sampling.schedule import BatchSchedule, SkipList
from trainshed.data.sampling.source import Source
from trainshed.errors import InputError


@dataclass(frozen=True)
class Location:
    """Where samples lie; every array is int64 [R]."""

    source: np.ndarray
    epoch: np.ndarray
    window: np.ndarray


class DataOrder:
    """The order of a run's samples."""

    def __init__(
        self,
        sources: Sequence[Source],
        schedule: BatchSchedule,
        *,
        weights: Sequence[float | int | None] | None = None,
        skip: SkipList | None = None,
    ) -> None:
        self.sources = list(sources)
        self.schedule = schedule
        self.skip = skip or SkipList()
        self.blend = Blend(
            [source.name for source in self.sources], weights, [source.tokens for source in self.sources]
        )
        if len({source.label for source in self.sources}) < len(self.sources):
            raise InputError("two sources would be shuffled alike", where="data.train", hint="label each apart")
        self.sequence_length = self.sources[0].sequence_length
        for source in self.sources:
            if source.sequence_length != self.sequence_length:
                raise InputError(
                    f"source '{source.name}' is cut to {source.sequence_length}, others to {self.sequence_length}",
                    where="data.sequence_length",
                )

    def consumed(self, step: int) -> int:
        """Return how many samples were taken before a step; steps count from 0."""
        return self.schedule.consumed(step)

    def batch_size(self, step: int) -> int:
        """Return how many samples a step takes."""
        return self.schedule.batch_size(step)

    def sample_indices(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows [start, stop) of a step as samples of the stream (skips applied): int64 [R]."""
        size = self.batch_size(step)
        stop = size if stop is None else stop
        if not 0 <= start <= stop <= size:
            raise IndexError(f"rows {start} to {stop} of a batch of {size}")
        before = self.consumed(step)
        return self.skip.stream(np.arange(before + start, before + stop, dtype=np.int64))

    def locate(self, samples: np.ndarray) -> Location:
        """Map samples of the stream to source, epoch and window."""
        number, draw = self.blend.locate(samples)
        epoch, window = np.empty_like(draw), np.empty_like(draw)
        for source in sorted(set(number.tolist())):
            chosen = number == source
            epoch[chosen], window[chosen] = self.sources[source].place(draw[chosen])
        return Location(number, epoch, window)

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of samples of the stream: int32 [R, L + 1], read-only."""
        number, draw = self.blend.locate(samples)
        out = np.empty((len(samples), self.sequence_length + 1), np.int32)
        used = sorted(set(number.tolist()))
        for source in used:
            if len(used) == 1:
                self.sources[source].read(draw, out)
            else:
                rows = np.flatnonzero(number == source)
                part = np.empty((len(rows), self.sequence_length + 1), np.int32)
                self.sources[source].read(draw[rows], part)
                out[rows] = part
        out.flags.writeable = False
        return out

    def rows(self, step: int, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of a step's batch, reading nothing else: int32 [R, L + 1]."""
        return self.read(self.sample_indices(step, start, stop))

    def batch(self, step: int) -> np.ndarray:
        """Return a step's whole batch: int32 [B, L + 1]; inputs are [:, :-1], labels [:, 1:]."""
        return self.read(self.sample_indices(step))

    def batch_hash(self, step: int) -> str:
        """Return 16 hex digits of the step's tokens, for events: equal on any layout, after any restart."""
        return hash_tokens(self.batch(step))

    def budget(self, steps: int) -> list[Budget]:
        """Return what each source gives to the first `steps` steps; `samples` leaves out the skipped."""
        end = self.skip.stream_end(self.consumed(steps))
        reached = self.blend.counts(end)
        drawn = np.array(reached, np.int64)
        for start, stop in self.skip.ranges:
            if start < end:
                drawn -= np.subtract(self.blend.counts(min(stop, end)), self.blend.counts(start))
        budgets: list[Budget] = []
        for source, weight, through, samples in zip(
            self.sources, self.blend.weights, reached, drawn.tolist(), strict=True
        ):
            # Skipped samples are passed by, so they count for how far into the source the run gets.
            epochs = None if source.epoch_samples is None else through / max(1, source.epoch_samples)
            tokens = samples * self.sequence_length
            budgets.append(Budget(source.name, weight, samples, tokens, epochs))
        return budgets


def hash_tokens(tokens: np.ndarray) -> str:
    """Return 16 hex digits of a whole batch of tokens [B, L + 1]."""
    return hash_text(*hash_rows(tokens, 0))


def hash_rows(tokens: np.ndarray, first_row: int) -> tuple[int, int]:
    """Return two sums of the rows' hashes; sums of all rows of a batch, whoever hashed them, make its `hash_text`.

    Each row's hash is BLAKE2b over its number in the batch and its tokens as little-endian int32, cut into two
    32-bit numbers: their sums stay exact in float64, so ranks can add them with their other figures.
    """
    low = high = 0
    for number, row in enumerate(np.ascontiguousarray(tokens, "<i4"), first_row):
        digest = hashlib.blake2b(row.data, digest_size=8, salt=number.to_bytes(8, "little")).digest()
        low += int.from_bytes(digest[:4], "little")
        high += int.from_bytes(digest[4:], "little")
    return low, high


def hash_text(low: int, high: int) -> str:
    """Write the summed hashes of a batch as 16 hex digits."""
    return f"{high % 2**32:08x}{low % 2**32:08x}"
