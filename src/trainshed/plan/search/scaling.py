"""The scaling curve: the best layout at each number of GPUs with the same global batch, and where efficiency breaks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout
from trainshed.plan.performance.prediction import LayoutPrediction
from trainshed.plan.search.search import best_fitting_layout, search_layouts
from trainshed.plan.training_shape import Hardware, TrainingShape

BREAKS_BELOW = 0.8
"""Efficiency below which a curve counts as broken: a fifth of the GPUs add nothing."""
_ABOVE_FULL = 1.005
"""Efficiency from which a point is reported as above 100%: it would be printed so."""
_ENDLESS_GIB = 1e6
_PART_PHRASES = {
    "compute": "kernels on smaller pieces",
    "tp": "exchanges of tensor parallel ranks",
    "cp": "exchanges of context parallel ranks",
    "ep": "tokens on their way to experts",
    "pp_bubble": "waiting for other pipeline stages",
    "dp_exposed": "reducing gradients and gathering weights",
    "optimizer": "the optimiser",
    "other": "what a step costs whatever its size",
}


@dataclass(frozen=True)
class ScalingPoint:
    """One number of GPUs; `prediction` is None where no layout is legal or none fits, and `reason` says why."""

    gpus: int
    prediction: LayoutPrediction | None
    efficiency: float | None
    """Tokens per second and GPU, relative to the smallest number of GPUs that fits."""
    reason: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Of all GPUs together."""
        return None if self.prediction is None else self.gpus * self.prediction.tokens_per_second_per_gpu


@dataclass(frozen=True)
class ScalingCurve:
    """Points by number of GPUs; `breaks_at` is the first whose efficiency is below 80%, `reason` what grew.

    `above` says why some number of GPUs has an efficiency above 100%; None where none has.
    """

    points: tuple[ScalingPoint, ...]
    breaks_at: int | None
    reason: str | None
    above: str | None = None


def scaling_curve(
    training: TrainingShape,
    gpus: Iterable[int],
    *,
    engine: str,
    fixed: Mapping[str, Any] | None = None,
    batch_sizes: Iterable[int] = (),
) -> ScalingCurve:
    """Search the best layout at each number of GPUs."""
    sizes, base, points = tuple(batch_sizes), None, []
    for count in sorted(set(gpus)):
        try:
            best = search_layouts(
                replace(training, gpus=count), engine=engine, fixed=fixed, batch_sizes=sizes, top=1
            ).chosen
        except InputError as refused:
            points.append(ScalingPoint(count, None, None, refused.what))
            continue
        base = base or best
        points.append(ScalingPoint(count, best, best.tokens_per_second_per_gpu / base.tokens_per_second_per_gpu))
    broken = next((point for point in points if point.efficiency is not None and point.efficiency < BREAKS_BELOW), None)
    reason = None
    if broken is not None and broken.prediction is not None and base is not None:
        reason = _what_grew(base, broken.prediction, broken.gpus)
    best = max(points, key=lambda point: point.efficiency or 0.0, default=None)
    above = None
    if base is not None and best is not None and best.prediction is not None and (best.efficiency or 0) > _ABOVE_FULL:
        roomy = replace(training, gpus=base.layout.world_size, hardware=_with_endless_memory(training.hardware))
        free = best_fitting_layout(roomy, engine=engine, fixed=fixed, batch_sizes=sizes)
        above = _why_above(base, best.prediction, best.gpus, free)
    return ScalingCurve(tuple(points), broken and broken.gpus, reason, above)


def doubling_counts(first: int, last: int) -> list[int]:
    """Return first, twice that, and so on up to last, which is always there: `8..4096`."""
    if not 1 <= first <= last:
        raise InputError(
            f"{first}..{last} is not a range of GPU counts", where="--gpus", hint="write for example 8..4096"
        )
    counts = [first]
    while counts[-1] * 2 <= last:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == last else [*counts, last]


def _what_grew(base: LayoutPrediction, broken: LayoutPrediction, gpus: int) -> str:
    """Name the part of a step whose GPU-seconds grew the most; at equal efficiency none grows."""
    before = _gpu_seconds(base, base.layout.world_size)
    after = _gpu_seconds(broken, gpus)
    grown = {name: after[name] - before[name] for name in after}
    most = max(grown, key=lambda name: grown[name])
    share = after[most] / sum(after.values())
    earlier = before[most] / sum(before.values())
    return (
        f"{_PART_PHRASES[most]} ({most}) took {earlier:.0%} of a step on {base.layout.world_size} GPUs and takes "
        f"{share:.0%} on {gpus}"
    )


def _with_endless_memory(hardware: Hardware) -> Hardware:
    return replace(hardware, gpu=hardware.gpu.model_copy(update={"memory_gib": _ENDLESS_GIB}))


def _why_above(base: LayoutPrediction, best: LayoutPrediction, gpus: int, free: LayoutPrediction | None) -> str:
    """Say why a GPU does more work when there are more of them: what slows down the fewest that fit."""
    fewest = base.layout.world_size
    gained = best.tokens_per_second_per_gpu / base.tokens_per_second_per_gpu - 1
    held_back = 0.0 if free is None else free.tokens_per_second_per_gpu / base.tokens_per_second_per_gpu - 1
    why = "; with more GPUs another layout is possible: "
    if held_back >= gained / 2:
        why = f", and memory holds them back by {held_back:.0%}; with more GPUs each holds less of the model: "
    before, after = _gpu_seconds(base, fewest), _gpu_seconds(best, gpus)
    most = max(after, key=lambda name: before[name] - after[name])
    return (
        f"it is counted against {fewest} GPUs, the fewest asked about that fit{why}{_named(base.layout)} on {fewest}, "
        f"{_named(best.layout)} on {gpus}, where a token takes {gained / (1 + gained):.0%} less of a GPU's time, most "
        f"of it saved in {most}"
    )


def _named(layout: RankLayout) -> str:
    return f"{layout} with micro_batch {layout.micro_batch} and recompute {layout.recompute}"


def _gpu_seconds(prediction: LayoutPrediction, gpus: int) -> dict[str, float]:
    return {part.name: gpus * getattr(prediction.times, part.name) for part in fields(prediction.times)}
