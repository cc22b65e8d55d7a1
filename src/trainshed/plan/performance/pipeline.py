"""The pipeline, simulated: who waits for whom, with chunks of unequal time.

Once every stage is busy the schedule repeats itself, so a long step is simulated over a few rounds and the rest is as
many times the last round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_ROUNDS = 1
"""Rounds of pp micro-batches that are simulated beyond the first before the rest is extrapolated."""


@dataclass(frozen=True)
class Slot:
    """One pass of one micro-batch through one chunk."""

    rank: int
    chunk: int
    micro_batch: int
    backward: bool
    start: float
    end: float


def pipeline_seconds(
    forward: Sequence[float], backward: Sequence[float], pp: int, micro_batches: int, *, hop: float, fill_first: bool
) -> float:
    """Return when the last rank is done; `forward` and `backward` are the seconds of each of the pp · vp chunks.

    `hop` is what handing over to another rank costs; `fill_first` is GPipe: all forward passes before any backward.
    """
    chunks = len(forward)
    if pp == 1:
        return micro_batches * (sum(forward) + sum(backward))
    vp = chunks // pp
    round_length = pp
    enough = (1 + _ROUNDS) * round_length
    if fill_first or micro_batches <= enough + round_length:
        return _makespan(tuple(forward), tuple(backward), pp, micro_batches, hop, fill_first)
    rest = micro_batches - enough
    rounds, odd = divmod(rest, round_length)
    base = enough + odd if vp == 1 else enough
    first = _makespan(tuple(forward), tuple(backward), pp, base, hop, fill_first)
    second = _makespan(tuple(forward), tuple(backward), pp, base + round_length, hop, fill_first)
    return first + (second - first) * (rounds if vp == 1 else rest / round_length)


def timeline(
    forward: Sequence[float], backward: Sequence[float], pp: int, micro_batches: int, *, hop: float, fill_first: bool
) -> list[Slot]:
    """Return every pass with its start and end, rank by rank."""
    slots: list[Slot] = []
    _run(tuple(forward), tuple(backward), pp, micro_batches, hop, fill_first, slots)
    return slots


@lru_cache(maxsize=4096)
def _makespan(
    forward: tuple[float, ...], backward: tuple[float, ...], pp: int, micro_batches: int, hop: float, fill_first: bool
) -> float:
    return _run(forward, backward, pp, micro_batches, hop, fill_first, None)


@lru_cache(maxsize=1024)
def _orders(pp: int, vp: int, micro_batches: int, fill_first: bool) -> tuple[tuple[tuple[int, int, bool], ...], ...]:
    return tuple(_order(rank, pp, vp, micro_batches, fill_first) for rank in range(pp))


def _order(rank: int, pp: int, vp: int, micro_batches: int, fill_first: bool) -> tuple[tuple[int, int, bool], ...]:
    """Return what a rank does, in order: (chunk, micro-batch, backward?)."""
    passes = micro_batches * vp
    forwards = [_place(index, rank, pp, vp, micro_batches, backward=False) for index in range(passes)]
    backwards = [_place(index, rank, pp, vp, micro_batches, backward=True) for index in range(passes)]
    if fill_first:
        warm = passes
    elif vp == 1:
        warm = min(passes, pp - rank - 1)
    else:
        # Megatron's interleaved 1F1B: (pp - rank - 1) · 2 + (vp - 1) · pp.
        warm = passes if micro_batches == pp else min(passes, (pp - rank - 1) * 2 + (vp - 1) * pp)
    order = forwards[:warm]
    for index in range(warm, passes):
        order += [forwards[index], backwards[index - warm]]
    return tuple(order + backwards[passes - warm :])


def _place(index: int, rank: int, pp: int, vp: int, micro_batches: int, *, backward: bool) -> tuple[int, int, bool]:
    if vp == 1:
        return rank, index, backward
    group, within = divmod(index, pp * vp)
    size = min(pp, micro_batches - group * pp)
    turn, place = divmod(within, size) if size < pp else divmod(within, pp)
    turn = min(turn, vp - 1)
    chunk = (vp - 1 - turn if backward else turn) * pp + rank
    return chunk, group * pp + place, backward


def _run(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    pp: int,
    micro_batches: int,
    hop: float,
    fill_first: bool,
    slots: list[Slot] | None,
) -> float:
    chunks = len(forward)
    orders = _orders(pp, chunks // pp, micro_batches, fill_first)
    done_forward = [[-1.0] * micro_batches for _ in range(chunks)]
    done_backward = [[-1.0] * micro_batches for _ in range(chunks)]
    at, clock = [0] * pp, [0.0] * pp
    left = sum(map(len, orders))
    last = chunks - 1
    while left:
        before = left
        for rank in range(pp):
            order, position, now = orders[rank], at[rank], clock[rank]
            while position < len(order):
                chunk, micro, is_backward = order[position]
                if is_backward:
                    ready = done_forward[chunk][micro] if chunk == last else done_backward[chunk + 1][micro]
                else:
                    ready = 0.0 if chunk == 0 else done_forward[chunk - 1][micro]
                if ready < 0:
                    break
                if (is_backward and chunk != last) or (not is_backward and chunk):
                    ready += hop
                start = ready if ready > now else now
                now = start + (backward[chunk] if is_backward else forward[chunk])
                (done_backward if is_backward else done_forward)[chunk][micro] = now
                if slots is not None:
                    slots.append(Slot(rank, chunk, micro, is_backward, start, now))
                position += 1
                left -= 1
            at[rank], clock[rank] = position, now
        assert left < before, "the schedule waits for itself"
    return max(clock)
