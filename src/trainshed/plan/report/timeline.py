"""The step as boxes in time: what each pipeline rank does when, from its forward and backward seconds.

The schedule is the prediction's own (`performance/pipeline.py`), with the chunks of a rank taken as equal. A long step
repeats itself in the middle, so a picture is of fewer micro-batches than the step has: enough to fill the pipeline and
to drain it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainshed.plan.layout import RankLayout
from trainshed.plan.performance import pipeline
from trainshed.plan.performance.prediction import Prediction

Kind = pipeline.Kind | Literal["reduce", "optimizer"]
"""What a pipeline rank does; `reduce`: exposed data-parallel traffic."""
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
    # What ends the step is drawn as large beside the passes as it is beside all of them.
    tail = (("reduce", prediction.times.dp_exposed), ("optimizer", prediction.times.optimizer))
    for kind, seconds in ((kind, seconds * shown / count) for kind, seconds in tail):
        if seconds > 0:
            boxes += [Box(rank, kind, end, end + seconds) for rank in range(layout.pp)]
            end += seconds
    return Timeline(tuple(boxes), layout.pp, end, count, shown)


def _shown(layout: RankLayout, count: int) -> int:
    if layout.vp > 1:
        size = pipeline.round_size(layout.pp, count)
        # With one round a pipeline only fills and drains; of a very deep one two would be too many boxes to see.
        rounds = 2 if 2 * size * 2 * layout.pp * layout.vp <= _MOST_BOXES else 1
        return min(count, rounds * size)
    return min(count, max(_SHOWN_AT_LEAST, 2 * layout.pp))


def _pipeline(prediction: Prediction, count: int) -> list[Box]:
    layout = prediction.layout
    each = [prediction.stages[chunk % layout.pp] for chunk in range(layout.pp * layout.vp)]
    passes = pipeline.Passes.of(
        [stage.forward_seconds / layout.vp for stage in each],
        [stage.backward_seconds / layout.vp for stage in each],
        layout.pp,
        schedule=layout.schedule,
    )
    return [
        Box(slot.rank, slot.kind, slot.start, slot.end, slot.chunk // layout.pp, slot.micro_batch)
        for slot in pipeline.timeline(passes, count)
    ]
