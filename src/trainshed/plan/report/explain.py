"""Why a layout won, in sentences: it is held against its neighbours, each with the numbers that decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainshed.plan.layout import RankLayout, even_stages
from trainshed.plan.performance.predict import predict
from trainshed.plan.performance.prediction import Job, Prediction, StepTimes
from trainshed.plan.report.parts import MEMORY_PARTS, TIME_PARTS, amounts
from trainshed.recipe.layout import Recompute, Shard

_SIZES = ("tp", "pp", "vp", "cp", "ep", "micro_batch")
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_SHARDS: tuple[Shard, ...] = ("none", "zero1", "zero2", "full")
_ALIKE = 0.005
"""Step times closer than this are called equal: the prediction does not know them better."""
_WORTH_SAYING = 0.02
"""Share of a step from which a loss, or a gain, is worth a sentence."""


Complaint = Callable[[RankLayout], str | None]
"""Says why a layout is illegal for the job; None where it is not."""
BestWith = Callable[[dict[str, int | str]], Prediction | None]
"""Returns the best layout that has these keys, all others chosen anew; None where none fits."""


@dataclass(frozen=True)
class Variant:
    """A neighbour of the chosen layout: another value of one key."""

    key: str
    value: int | str
    was: int | str
    layout: RankLayout
    prediction: Prediction | None
    """None where the layout is illegal."""
    problem: str | None = None


def explain(job: Job, chosen: Prediction, complaint: Complaint, best_with: BestWith | None = None) -> list[str]:
    """Say why this layout, what limits it, what its neighbours would cost, and what would help.

    With `best_with` a neighbour is the best layout that has another value of one key: what the key itself costs, and
    not what the other keys would if they stayed. Without it all else stays as it is, for a layout that was given.
    """
    tried = variants(job, chosen.layout, complaint, best_with)
    return [
        _verdict(chosen),
        *_limits(chosen),
        *(compared(variant, chosen) for variant in tried if variant.prediction is not None),
        *_illegal(tried),
        *_remedies(job, chosen),
    ]


def variants(job: Job, layout: RankLayout, complaint: Complaint, best_with: BestWith | None = None) -> list[Variant]:
    """Return the neighbours of a layout: sizes halved and doubled, other recomputation, other sharding."""
    neighbours = []
    for key, value in _changes(layout, job):
        was = getattr(layout, key)
        # Chunks are those of a pipeline: without it, another number of them would be another question.
        fixed = {key: value} | ({"pp": layout.pp} if key == "vp" else {})
        best = best_with(fixed) if best_with is not None else None
        changed = _changed(job, layout, key, value)
        problem = None if changed is None else complaint(changed)
        alone = None if changed is None or problem or changed == layout else predict(job, changed)
        if best is not None and (alone is None or not alone.fits or best.step_seconds <= alone.step_seconds):
            neighbours.append(Variant(key, value, was, best.layout, best))
        elif changed is not None and changed != layout:
            neighbours.append(Variant(key, value, was, changed, alone, problem))
    return neighbours


def _changes(layout: RankLayout, job: Job) -> Iterator[tuple[str, int | str]]:
    for key in _SIZES:
        size = getattr(layout, key)
        if (key == "ep" and job.model.experts is None) or (key == "vp" and layout.pp == 1):
            continue
        if size > 1:
            yield key, size // 2
        yield key, size * 2
    yield from (("recompute", each) for each in _RECOMPUTES if each != layout.recompute)
    if layout.dp > 1:
        yield from (("shard", each) for each in _SHARDS if each != layout.shard)


def _changed(job: Job, layout: RankLayout, key: str, value: int | str) -> RankLayout | None:
    """The layout with one key changed and what follows from it: dp, the cut of the layers, the schedule."""
    change: dict[str, Any] = {key: value}
    other = replace(layout, **change)
    ranks = other.tp * other.pp * other.cp
    if job.gpus % ranks:
        return None
    vp = other.vp if other.pp > 1 else 1
    schedule = other.schedule
    if other.pp == 1:
        schedule = None
    elif schedule is None or {schedule, "interleaved"} == {"1f1b", "interleaved"}:
        schedule = "interleaved" if vp > 1 else "1f1b"
    stages = layout.stages
    if len(stages) != other.pp * vp:
        if job.model.layers < other.pp * vp:
            return None
        stages = even_stages(job.model.layers, other.pp * vp)
    dp = job.gpus // ranks
    replicate = other.replicate if dp % other.replicate == 0 else 1
    return replace(other, vp=vp, dp=dp, replicate=replicate, schedule=schedule, stages=stages)


def _verdict(chosen: Prediction) -> str:
    memory = chosen.memory
    fullest = max(chosen.stages, key=lambda stage: stage.memory.total).stage
    place = f" on stage {fullest}, the fullest" if len(chosen.stages) > 1 else ""
    speed = f"{chosen.layout} steps in {seconds(chosen.step_seconds)} at {chosen.mfu:.1%} MFU"
    spare = memory.capacity - memory.total
    if spare < 0:
        return f"{speed}, but does not fit: {-spare:.1f} GiB too much{place}."
    return f"{speed} and leaves {spare:.1f} of {memory.capacity:.1f} GiB free{place}."


def _limits(chosen: Prediction) -> Iterator[str]:
    total = chosen.times.total
    useful = chosen.times.compute / total
    lost = sorted(amounts(chosen.times, TIME_PARTS[1:]), key=lambda each: -each[1])
    worst = [(part, each) for part, each in lost if each / total >= _WORTH_SAYING]
    yield f"{useful:.0%} of the step is compute." if worst else f"{useful:.0%} of the step is compute: little is lost."
    if worst:
        named = [f"{part.phrase} {seconds(each)} ({each / total:.0%})" for part, each in worst[:3]]
        yield f"What it loses: {_listed(named)}."
    full = sorted(amounts(chosen.memory, MEMORY_PARTS), key=lambda each: -each[1])[:2]
    yield "Memory goes to " + _listed([f"{part.phrase} ({each:.1f} GiB)" for part, each in full]) + " first of all."


def compared(variant: Variant, chosen: Prediction) -> str:
    """Say what a neighbour would cost or gain, and where."""
    other = variant.prediction
    assert other is not None, "an illegal layout has no prediction to compare"
    named = f"{variant.key} {variant.value} instead of {variant.was}{_others(variant, chosen.layout)}"
    memory = other.memory
    if not other.fits:
        stage = max(other.stages, key=lambda each: each.memory.total)
        grown = _largest_growth(chosen, other)
        place = f" on stage {stage.stage}" if len(other.stages) > 1 else ""
        return f"{named} does not fit: {memory.total - memory.capacity:.1f} GiB too much{place}{grown}."
    change = other.step_seconds / chosen.step_seconds - 1
    if not chosen.fits:
        slower = f"{percent(change)} {'slower' if change > 0 else 'faster'}"
        return f"{named} would fit, with {memory.total:.1f} GiB, in {seconds(other.step_seconds)} a step ({slower})."
    freed = chosen.memory.total - memory.total
    room = f", and {'frees' if freed > 0 else 'needs'} {abs(freed):.1f} GiB" if abs(freed) >= 1 else ""
    if abs(change) < _ALIKE:
        return f"{named} would take as long ({seconds(other.step_seconds)}){room}."
    size = f"cost {percent(change)} more" if change > 0 else f"save {percent(change)}"
    why = differences(chosen.times, other.times)
    return f"{named} would {size} ({seconds(other.step_seconds)}): {why}{room}."


def _others(variant: Variant, layout: RankLayout) -> str:
    """The keys that another value of one is best with, where they change too; what follows from sizes is left out."""
    keys = [key for key in (*_SIZES, "replicate", "recompute", "shard") if key != variant.key]
    changed = [f"{key} {value}" for key in keys if (value := getattr(variant.layout, key)) != getattr(layout, key)]
    return f", at best with {_listed(changed)}," if changed else ""


def differences(times: StepTimes, other: StepTimes, *, most: int = 2, word: str = "phrase") -> str:
    """Name the parts that change the most: `tensor-parallel communication +1.20 s, compute -0.31 s`."""
    changes = [(part, getattr(other, part.key) - getattr(times, part.key)) for part in TIME_PARTS]
    largest = sorted(changes, key=lambda each: -abs(each[1]))[:most]
    threshold = 0.15 * abs(largest[0][1])
    named = [(part, change) for part, change in largest if change and abs(change) >= threshold]
    return ", ".join(
        f"{getattr(part, word)} {'+' if change > 0 else '−'}{seconds(abs(change))}" for part, change in named
    )


def _largest_growth(chosen: Prediction, other: Prediction) -> str:
    changes = [(part, getattr(other.memory, part.key) - getattr(chosen.memory, part.key)) for part in MEMORY_PARTS]
    part, growth = max(changes, key=lambda each: each[1])
    return f" ({part.phrase} +{growth:.1f} GiB)" if growth >= 0.1 else ""


def _illegal(tried: list[Variant]) -> Iterator[str]:
    for variant in tried:
        if variant.problem is not None:
            yield f"{variant.key} {variant.value} is not possible: {variant.problem}."


def _remedies(job: Job, chosen: Prediction) -> Iterator[str]:
    """What would help that no layout can give: a larger batch, a faster network."""
    total = chosen.times.total
    rate = chosen.tokens_per_second_per_gpu
    batch = replace(job, global_batch=2 * job.global_batch)
    gain = predict(batch, chosen.layout).tokens_per_second_per_gpu / rate - 1
    if gain >= _WORTH_SAYING:
        yield f"A global batch of {batch.global_batch:,} would give {gain:.0%} more tokens a second on this layout."
    communication = chosen.times.tp + chosen.times.cp + chosen.times.ep + chosen.times.dp_exposed
    if communication / total < _WORTH_SAYING:
        return
    hardware = job.hardware
    for words, faster in (
        ("network between the nodes", replace(hardware, network_gb_per_s=2 * hardware.network_gb_per_s)),
        ("link inside a node", replace(hardware, link_gb_per_s=2 * hardware.link_gb_per_s)),
    ):
        gain = predict(replace(job, hardware=faster), chosen.layout).tokens_per_second_per_gpu / rate - 1
        if gain >= _WORTH_SAYING:
            yield f"Twice the {words} would give {gain:.0%} more tokens a second."


def percent(change: float) -> str:
    """Write a share of a step: `9%`, a small one with a decimal."""
    return f"{abs(change):.1%}" if abs(change) < 0.02 else f"{abs(change):.0%}"


def share(part: float) -> str:
    """Write a part of a whole: `71%`, and `<1%` for what is there and rounds to nothing."""
    return f"{part:.0%}" if part >= 0.005 else "<1%"


def seconds(amount: float) -> str:
    """Write seconds with three figures: `45.8 s`, `312 ms`."""
    if amount >= 100:
        return f"{amount:,.0f} s"
    if amount >= 1:
        return f"{amount:.1f} s" if amount >= 10 else f"{amount:.2f} s"
    if amount >= 0.01:
        return f"{amount * 1e3:.0f} ms"
    return f"{amount * 1e3:.1f} ms" if amount >= 1e-4 else f"{amount * 1e6:.0f} µs"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
