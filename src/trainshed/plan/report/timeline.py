"""The step as boxes in time: what each pipeline rank does when, from its forward and backward seconds.

This draws; the prediction's own seconds come from `performance/predict.py`. A long step repeats itself in the middle,
so a picture is of fewer micro-batches than the step has: enough to fill the pipeline and to drain it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainshed.plan.layout import RankLayout
from trainshed.plan.performance.prediction import Prediction

Kind = Literal["forward", "backward", "weights", "reduce", "optimizer"]
"""`weights`: the weight gradients that a zero-bubble pipeline puts off; `reduce`: exposed data-parallel traffic."""
_SHOWN_AT_LEAST = 6
_MOST_BOXES = 3000


@dataclass(frozen=True)
class Box:
    """One rank at one thing."""

    rank: int
    kind: Kind
    start: float
    end: float
    chunk: int = 0
    """Which of the rank's model chunks, from 0."""
    micro_batch: int = 0


@dataclass(frozen=True)
class Timeline:
    """A step, or the beginning and the end of one."""

    boxes: tuple[Box, ...]
    ranks: int
    seconds: float
    micro_batches: int
    """How many the step has."""
    shown: int
    """How many are drawn."""

    @property
    def is_whole(self) -> bool:
        """Whether all micro-batches are drawn."""
        return self.shown == self.micro_batches


def timeline(prediction: Prediction, global_batch: int) -> Timeline:
    """Lay the boxes of a step out, with fewer micro-batches than it has where it is long."""
    layout = prediction.layout
    count = layout.micro_batches(global_batch)
    shown = _shown(layout, count)
    boxes = _pipeline(prediction, shown)
    end = max(box.end for box in boxes)
    for kind, seconds in (("reduce", prediction.times.dp_exposed), ("optimizer", prediction.times.optimizer)):
        if seconds > 0:
            boxes += [Box(rank, kind, end, end + seconds) for rank in range(layout.pp)]
            end += seconds
    return Timeline(tuple(boxes), layout.pp, end, count, shown)


def _shown(layout: RankLayout, count: int) -> int:
    if layout.vp > 1:
        size = _round_size(layout, count)
        # With one round a pipeline only fills and drains; of a very deep one two would be too many boxes to see.
        rounds = 2 if 2 * size * 2 * layout.pp * layout.vp <= _MOST_BOXES else 1
        return min(count, rounds * size)
    return min(count, max(_SHOWN_AT_LEAST, 2 * layout.pp))


def _round_size(layout: RankLayout, count: int) -> int:
    """Micro-batches that one chunk takes before the next chunk of the rank has its turn: pp, or a few more."""
    return max(1, count // max(1, count // layout.pp))


@dataclass(frozen=True)
class _Pass:
    forward: bool
    chunk: int
    """Of the whole model: chunk i sits on rank i % pp."""
    micro_batch: int


def _pipeline(prediction: Prediction, count: int) -> list[Box]:
    layout = prediction.layout
    last_chunk = layout.pp * layout.vp - 1
    waiting = [list(_order(layout, count, rank)) for rank in range(layout.pp)]
    places, free, ended = [0] * layout.pp, [0.0] * layout.pp, {}
    put_off: list[list[_Pass]] = [[] for _ in range(layout.pp)]
    boxes: list[Box] = []

    def lay(rank: int, kind: Kind, start: float, seconds: float, done: _Pass) -> None:
        boxes.append(Box(rank, kind, start, start + seconds, done.chunk // layout.pp, done.micro_batch))
        free[rank] = start + seconds

    def ready_at(wanted: _Pass) -> float | None:
        if wanted.forward:
            before = _Pass(True, wanted.chunk - 1, wanted.micro_batch) if wanted.chunk else None
        elif wanted.chunk < last_chunk:
            before = _Pass(False, wanted.chunk + 1, wanted.micro_batch)
        else:
            before = _Pass(True, wanted.chunk, wanted.micro_batch)
        return 0.0 if before is None else ended.get(before)

    moved = True
    while moved:
        moved = False
        for rank, passes in enumerate(waiting):
            forward, backward, weights = _seconds(prediction, rank)
            while places[rank] < len(passes) and (ready := ready_at(passes[places[rank]])) is not None:
                done = passes[places[rank]]
                while put_off[rank] and ready >= free[rank] + weights:
                    lay(rank, "weights", free[rank], weights, put_off[rank].pop(0))
                lay(
                    rank,
                    "forward" if done.forward else "backward",
                    max(ready, free[rank]),
                    forward if done.forward else backward,
                    done,
                )
                ended[done] = free[rank]
                if weights and not done.forward:
                    put_off[rank].append(done)
                places[rank] += 1
                moved = True
    for rank, passes in enumerate(put_off):
        for done in passes:
            lay(rank, "weights", free[rank], _seconds(prediction, rank)[2], done)
    return boxes


def _seconds(prediction: Prediction, rank: int) -> tuple[float, float, float]:
    """One chunk's forward, backward, and weight gradients where the schedule puts them off."""
    stage, chunks = prediction.stages[rank], prediction.layout.vp
    forward, backward = stage.forward_seconds / chunks, stage.backward_seconds / chunks
    if prediction.layout.schedule == "zero_bubble":
        return forward, backward / 2, backward / 2
    return forward, backward, 0.0


def _order(layout: RankLayout, count: int, rank: int) -> Iterator[_Pass]:
    """The passes of a rank: some forwards to fill the pipeline, then one forward and one backward in turn."""
    forwards = [_virtual(layout, count, number, rank, forward=True) for number in range(count * layout.vp)]
    backwards = [_virtual(layout, count, number, rank, forward=False) for number in range(count * layout.vp)]
    if layout.schedule == "gpipe":
        filling = len(forwards)
    elif layout.vp > 1:
        filling = 2 * (layout.pp - rank - 1) + (layout.vp - 1) * _round_size(layout, count)
    else:
        filling = layout.pp - rank - 1
    filling = min(filling, len(forwards))
    yield from forwards[:filling]
    for forward, backward in zip(forwards[filling:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - filling :]


def _virtual(layout: RankLayout, count: int, number: int, rank: int, *, forward: bool) -> _Pass:
    """The n-th pass of a rank in one direction, as Narayanan et al. 2021 (figure 4) order interleaved chunks."""
    size = _round_size(layout, count)
    whole, within = divmod(number, size * layout.vp)
    turn = within // size
    chunk = turn if forward else layout.vp - 1 - turn
    return _Pass(forward, chunk * layout.pp + rank, whole * size + within % size)
