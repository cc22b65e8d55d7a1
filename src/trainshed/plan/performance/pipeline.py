"""A simulation of the pipeline: when each rank starts and ends each pass, with chunks of unequal time.

Once every stage is busy the schedule repeats itself. So a few rounds of a long step are simulated, and the last round
is counted as often as it repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from trainshed.recipe.layout import PipelineSchedule

PassKind = Literal["forward", "backward", "weights"]
"""`weights`: the gradients of weights, which a zero-bubble schedule computes where a rank would wait."""
_ROUNDS = 1
"""Rounds that are simulated beyond the first before the rest is extrapolated."""
_FORWARD, _BACKWARD = 0, 1


@dataclass(frozen=True)
class PipelineSlot:
    """One pass of one micro-batch through one chunk of the model."""

    rank: int
    chunk: int
    """Of the whole model: chunk i sits on rank i % pp."""
    micro_batch: int
    kind: PassKind
    start: float
    end: float


@dataclass(frozen=True)
class PipelinePasses:
    """What is scheduled: seconds of each of the pp · vp chunks, and of a send to another rank (`hop`)."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    pp: int
    hop: float
    schedule: PipelineSchedule | None

    @classmethod
    def of(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        pp: int,
        *,
        hop: float = 0.0,
        schedule: PipelineSchedule | None = None,
    ) -> PipelinePasses:
        """Return the passes of chunks with these seconds."""
        return cls(tuple(forward), tuple(backward), pp, hop, schedule)

    @property
    def vp(self) -> int:
        """Chunks of a rank."""
        return len(self.forward) // self.pp


def round_size(pp: int, micro_batches: int) -> int:
    """Return how many micro-batches a chunk takes before the next chunk of its rank: pp, or a few more."""
    return max(1, micro_batches // max(1, micro_batches // pp))


def pipeline_seconds(passes: PipelinePasses, micro_batches: int) -> float:
    """Return when the last rank is done."""
    if passes.pp == 1:
        return micro_batches * (sum(passes.forward) + sum(passes.backward))
    size = round_size(passes.pp, micro_batches)
    if passes.vp > 1 and micro_batches % size:
        # No schedule has such rounds; a published row may still say so.
        whole = micro_batches - micro_batches % size
        return pipeline_seconds(passes, whole) * micro_batches / whole
    enough = (1 + _ROUNDS) * size
    if passes.schedule == "gpipe" or micro_batches <= enough + size:
        return _makespan(passes, micro_batches, size)
    rounds, odd = divmod(micro_batches - enough, size)
    first, second = _makespan(passes, enough + odd, size), _makespan(passes, enough + odd + size, size)
    return first + (second - first) * rounds


def pipeline_timeline(passes: PipelinePasses, micro_batches: int) -> list[PipelineSlot]:
    """Return every pass with its start and end."""
    slots: list[PipelineSlot] = []
    _simulate(passes, micro_batches, round_size(passes.pp, micro_batches), slots)
    return slots


@lru_cache(maxsize=4096)
def _makespan(passes: PipelinePasses, micro_batches: int, size: int) -> float:
    return _simulate(passes, micro_batches, size, None)


@lru_cache(maxsize=1024)
def _orders(
    pp: int, vp: int, micro_batches: int, size: int, fill_first: bool
) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    return tuple(_order(rank, pp, vp, micro_batches, size, fill_first) for rank in range(pp))


def _order(
    rank: int, pp: int, vp: int, micro_batches: int, size: int, fill_first: bool
) -> tuple[tuple[int, int, int], ...]:
    """Return what a rank does, in order, as (chunk, micro-batch, forward or backward).

    Some forward passes fill the pipeline, then one forward and one backward pass take turns (Narayanan et al. 2021,
    figure 4); with several chunks a rank fills 2 · (pp - rank - 1) + (vp - 1) rounds, as Megatron does.
    """
    count = micro_batches * vp
    forwards = [_pass_at(index, rank, pp, vp, size, _FORWARD) for index in range(count)]
    backwards = [_pass_at(index, rank, pp, vp, size, _BACKWARD) for index in range(count)]
    if fill_first:
        filling = count
    elif vp == 1:
        filling = min(count, pp - rank - 1)
    else:
        filling = min(count, 2 * (pp - rank - 1) + (vp - 1) * size)
    order = forwards[:filling]
    for index in range(filling, count):
        order += [forwards[index], backwards[index - filling]]
    return tuple(order + backwards[count - filling :])


def _pass_at(index: int, rank: int, pp: int, vp: int, size: int, way: int) -> tuple[int, int, int]:
    if vp == 1:
        return rank, index, way
    whole, within = divmod(index, size * vp)
    turn, place = divmod(within, size)
    chunk = vp - 1 - turn if way == _BACKWARD else turn
    return chunk * pp + rank, whole * size + place, way


def _simulate(passes: PipelinePasses, micro_batches: int, size: int, slots: list[PipelineSlot] | None) -> float:
    """Start every pass as soon as its rank is free and its inputs are there; return when the last pass ends."""
    pp, chunks, hop = passes.pp, len(passes.forward), passes.hop
    orders = _orders(pp, chunks // pp, micro_batches, size, passes.schedule == "gpipe")
    # A zero-bubble schedule computes the second half of backward where a rank would wait.
    halved = passes.schedule == "zero_bubble"
    seconds = (passes.forward, [duration / 2 for duration in passes.backward] if halved else passes.backward)
    ended = ([[-1.0] * micro_batches for _ in range(chunks)], [[-1.0] * micro_batches for _ in range(chunks)])
    at, clock, left, last = [0] * pp, [0.0] * pp, sum(map(len, orders)), chunks - 1
    put_off: list[list[tuple[int, int]]] = [[] for _ in range(pp)]

    def note(rank: int, chunk: int, micro: int, kind: PassKind, start: float, end: float) -> None:
        if slots is not None:
            slots.append(PipelineSlot(rank, chunk, micro, kind, start, end))

    while left:
        before = left
        for rank in range(pp):
            order, position, now, waiting = orders[rank], at[rank], clock[rank], put_off[rank]
            while position < len(order):
                chunk, micro, way = order[position]
                if way == _FORWARD:
                    ready = 0.0 if chunk == 0 else ended[_FORWARD][chunk - 1][micro]
                    handed = chunk > 0
                else:
                    ready = ended[_FORWARD][chunk][micro] if chunk == last else ended[_BACKWARD][chunk + 1][micro]
                    handed = chunk < last
                if ready < 0:
                    break
                ready += hop if handed else 0.0
                while waiting and ready >= now + seconds[_BACKWARD][waiting[0][0]]:
                    done, of = waiting.pop(0)
                    note(rank, done, of, "weights", now, now + seconds[_BACKWARD][done])
                    now += seconds[_BACKWARD][done]
                start = max(ready, now)
                now = start + seconds[way][chunk]
                ended[way][chunk][micro] = now
                note(rank, chunk, micro, "backward" if way else "forward", start, now)
                if halved and way == _BACKWARD:
                    waiting.append((chunk, micro))
                position += 1
                left -= 1
            at[rank], clock[rank] = position, now
        assert left < before, "the schedule waits for itself"
    for rank, waiting in enumerate(put_off):
        for chunk, micro in waiting:
            note(rank, chunk, micro, "weights", clock[rank], clock[rank] + seconds[_BACKWARD][chunk])
            clock[rank] += seconds[_BACKWARD][chunk]
    return max(clock)
