"""A plan in sentences: why a layout won, what the run takes, and how amounts are written.

`explain_layout` compares the chosen layout with its neighbours and gives the numbers that decide. `describe_run` has
hours, money, checkpoints, failures, host memory and data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainshed.plan.budget.budget import RunBudget, RunCost
from trainshed.plan.budget.checkpoint_cost import format_duration
from trainshed.plan.layout import RankLayout, even_stages
from trainshed.plan.performance.memory import GpuMemory
from trainshed.plan.performance.prediction import LayoutPrediction, StepTimes, predict
from trainshed.plan.training_shape import TrainingShape
from trainshed.recipe.layout import Recompute, Shard


@dataclass(frozen=True)
class BarPart:
    """One part of a stacked bar."""

    key: str
    """The field of `GpuMemory` or `StepTimes`."""
    label: str
    """Its name in a legend."""
    phrase: str
    """Its name in a sentence."""
    symbol: str
    """The letter that draws it where there are no colours."""
    colour: str


# The colours are those of Observable's categorical palette, which are distinct on white, on black, and for most people
# who are colour-blind; idle time and unused memory are grey.
MEMORY_PARTS = (
    BarPart("weights", "weights", "weights", "W", "#4269d0"),
    BarPart("gradients", "gradients", "gradients", "G", "#3ca951"),
    BarPart("optimizer", "optimizer", "optimizer states", "O", "#97bbf5"),
    BarPart("activations", "activations", "activations", "A", "#efb118"),
    BarPart("logits", "logits", "logits and loss", "L", "#ff725c"),
    BarPart("buffers", "buffers", "buffers", "B", "#a463f2"),
    BarPart("reserve", "reserve", "the allocator's and the driver's share", "R", "#9498a0"),
)
TIME_PARTS = (
    BarPart("compute", "compute", "compute", "C", "#4269d0"),
    BarPart("tp", "tensor parallel", "tensor-parallel communication", "T", "#efb118"),
    BarPart("cp", "context parallel", "context-parallel communication", "X", "#ff8ab7"),
    BarPart("ep", "expert parallel", "expert dispatch", "E", "#a463f2"),
    BarPart("pp_bubble", "pipeline bubble", "the pipeline's bubble", "P", "#9498a0"),
    BarPart("dp_exposed", "data parallel", "data-parallel communication that nothing hides", "D", "#ff725c"),
    BarPart("optimizer", "optimizer", "the optimizer", "O", "#3ca951"),
    BarPart("other", "other", "launches and fixed costs", "F", "#9c6b4e"),
)


def part_amounts(of: GpuMemory | StepTimes, parts: tuple[BarPart, ...]) -> list[tuple[BarPart, float]]:
    """Return the parts that are above 0, in their order."""
    amounts = [(part, float(getattr(of, part.key))) for part in parts]
    return [(part, amount) for part, amount in amounts if amount > 0]


def share_cells(amounts: list[float], width: int) -> list[int]:
    """Divide `width` cells in proportion to amounts; every amount above 0 gets at least one."""
    total = sum(amounts)
    if total <= 0 or width <= 0:
        return [0] * len(amounts)
    exact = [amount / total * width for amount in amounts]
    cells = [max(1, int(share)) if share > 0 else 0 for share in exact]
    while sum(cells) != width:
        missing = 1 if sum(cells) < width else -1
        changeable = [place for place, count in enumerate(cells) if missing > 0 or count > 1]
        if not changeable:
            break
        cells[max(changeable, key=lambda place: missing * (exact[place] - cells[place]))] += missing
    return cells


_SIZES = ("tp", "pp", "vp", "cp", "ep", "micro_batch")
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_SHARDS: tuple[Shard, ...] = ("none", "zero1", "zero2", "full")
_ALIKE = 0.005
"""Step times closer than this are called equal: predictions are not that precise."""
_WORTH_SAYING = 0.02
"""Share of a step from which a loss or a gain is worth a sentence."""


FindProblem = Callable[[RankLayout], str | None]
"""Says why a layout is illegal for the training; None where it is legal."""
BestWith = Callable[[dict[str, int | str]], LayoutPrediction | None]
"""Returns the best layout with these keys, all others searched; None where none fits."""


@dataclass(frozen=True)
class LayoutVariant:
    """A neighbour of the chosen layout, with another value of one key."""

    key: str
    value: int | str
    was: int | str
    layout: RankLayout
    prediction: LayoutPrediction | None
    """None where the layout is illegal."""
    problem: str | None = None


def explain_layout(
    training: TrainingShape, chosen: LayoutPrediction, find_problem: FindProblem, best_with: BestWith | None = None
) -> list[str]:
    """Say how good a layout is, what limits it, what its neighbours would cost, and what would help.

    With `best_with` a neighbour is the best layout that has another value of one key, so the sentence is about that key
    alone. Without it the other keys stay as they are, for a layout that was given.
    """
    tried = layout_variants(training, chosen.layout, find_problem, best_with)
    return [
        _verdict(chosen),
        *_limits(chosen),
        *_savings(training, chosen),
        *(compare_variant(variant, chosen) for variant in tried if variant.prediction is not None),
        *_illegal(tried),
        *_remedies(training, chosen),
    ]


def layout_variants(
    training: TrainingShape, layout: RankLayout, find_problem: FindProblem, best_with: BestWith | None = None
) -> list[LayoutVariant]:
    """Return the neighbours of a layout: sizes halved and doubled, other recomputation, other sharding."""
    neighbours = []
    for key, value in _changes(layout, training):
        was = getattr(layout, key)
        # vp is compared within the same pipeline.
        fixed = {key: value} | ({"pp": layout.pp} if key == "vp" else {})
        best = best_with(fixed) if best_with is not None else None
        changed = _changed(training, layout, key, value)
        problem = None if changed is None else find_problem(changed)
        alone = None if changed is None or problem or changed == layout else predict(training, changed)
        if best is not None and (alone is None or not alone.fits or best.step_seconds <= alone.step_seconds):
            neighbours.append(LayoutVariant(key, value, was, best.layout, best))
        elif changed is not None and changed != layout:
            neighbours.append(LayoutVariant(key, value, was, changed, alone, problem))
    return neighbours


def _changes(layout: RankLayout, training: TrainingShape) -> Iterator[tuple[str, int | str]]:
    for key in _SIZES:
        size = getattr(layout, key)
        if (key == "ep" and training.model.experts is None) or (key == "vp" and layout.pp == 1):
            continue
        if size > 1:
            yield key, size // 2
        yield key, size * 2
    yield from (("recompute", value) for value in _RECOMPUTES if value != layout.recompute)
    if layout.dp > 1:
        yield from (("shard", value) for value in _SHARDS if value != layout.shard)


def _changed(training: TrainingShape, layout: RankLayout, key: str, value: int | str) -> RankLayout | None:
    """The layout with one key changed, and what depends on it: dp, the stages, the schedule."""
    change: dict[str, Any] = {key: value}
    other = replace(layout, **change)
    ranks = other.tp * other.pp * other.cp
    if training.gpus % ranks:
        return None
    vp = other.vp if other.pp > 1 else 1
    schedule = other.schedule
    if other.pp == 1:
        schedule = None
    elif schedule is None or {schedule, "interleaved"} == {"1f1b", "interleaved"}:
        schedule = "interleaved" if vp > 1 else "1f1b"
    stages = layout.stages
    if len(stages) != other.pp * vp:
        if training.model.layers < other.pp * vp:
            return None
        stages = even_stages(training.model.layers, other.pp * vp)
    dp = training.gpus // ranks
    replicate = other.replicate if dp % other.replicate == 0 else 1
    return replace(other, vp=vp, dp=dp, replicate=replicate, schedule=schedule, stages=stages)


def _verdict(chosen: LayoutPrediction) -> str:
    memory = chosen.memory
    fullest = max(chosen.stages, key=lambda stage: stage.memory.total).stage
    place = f" on stage {fullest}, the fullest" if len(chosen.stages) > 1 else ""
    speed = f"{chosen.layout} steps in {format_seconds(chosen.step_seconds)} at {chosen.mfu:.1%} MFU"
    spare = memory.capacity - memory.total
    if spare < 0:
        return f"{speed}, but does not fit: {-spare:.1f} GiB too much{place}."
    return f"{speed} and leaves {spare:.1f} of {memory.capacity:.1f} GiB free{place}."


def _limits(chosen: LayoutPrediction) -> Iterator[str]:
    total = chosen.times.total
    useful = chosen.times.compute / total
    lost = sorted(part_amounts(chosen.times, TIME_PARTS[1:]), key=lambda entry: -entry[1])
    worst = [(part, seconds) for part, seconds in lost if seconds / total >= _WORTH_SAYING]
    yield f"{useful:.0%} of the step is compute." if worst else f"{useful:.0%} of the step is compute: little is lost."
    if worst:
        losses = [f"{part.phrase} {format_seconds(seconds)} ({seconds / total:.0%})" for part, seconds in worst[:3]]
        yield f"What it loses: {_join_and(losses)}."
    largest = sorted(part_amounts(chosen.memory, MEMORY_PARTS), key=lambda entry: -entry[1])[:2]
    parts = [f"{part.phrase} ({gib:.1f} GiB)" for part, gib in largest]
    yield f"Memory goes to {_join_and(parts)} first of all."


def _savings(training: TrainingShape, chosen: LayoutPrediction) -> Iterator[str]:
    """What adapters, narrow weights and documents that are kept apart save, and what a reference costs."""
    lora = training.lora
    if lora is not None:
        full = predict(replace(training, lora=None), chosen.layout)
        slower = f" and take {format_percent(full.step_seconds / chosen.step_seconds - 1)} longer"
        needs = slower if full.fits else ", which the GPU does not have"
        trained, frozen = format_count(training.trained_weights), format_count(training.model.weights)
        yield (
            f"LoRA trains {trained} weights beside {frozen} frozen ones, which have no weight gradients, nothing to "
            "reduce and nothing to update. Training all of them on this layout would need "
            f"{full.memory.total - chosen.memory.total:.1f} GiB more{needs}."
        )
        if lora.quantized:
            plain = predict(replace(training, lora=replace(lora, base_bytes=None)), chosen.layout)
            cost = chosen.step_seconds / plain.step_seconds - 1
            yield (
                f"Frozen weights in {lora.base_bytes:.2g} bytes each save "
                f"{plain.memory.total - chosen.memory.total:.1f} GiB, and turning them back into 16 bits costs "
                f"{format_percent(cost)} of the step."
            )
    if training.document_length is not None and training.attended_length < training.sequence_length:
        whole = predict(replace(training, document_length=None), chosen.layout).step_seconds
        yield (
            f"Attention stays within documents of some {training.attended_length:,.0f} tokens; over whole sequences "
            f"the step would take {format_percent(whole / chosen.step_seconds - 1)} longer."
        )
    if training.preference:
        without = predict(replace(training, preference=False), chosen.layout)
        gib = chosen.memory.total - without.memory.total
        held = f", and its copy of the weights {gib:.1f} GiB" if lora is None else "; it is the base without adapters"
        yield (
            "The forward pass of the reference takes "
            f"{format_percent(1 - without.step_seconds / chosen.step_seconds)} of the step{held}."
        )


def describe_trained(training: TrainingShape, memory: GpuMemory) -> str | None:
    """Say what is trained and what it takes on the fullest GPU; None where all weights are, without a reference."""
    weights = format_count(training.model.weights)
    if training.lora is not None:
        trained = training.trained_weights
        share = trained / (trained + training.model.weights)
        return (
            f"adapters of {format_count(trained)} beside {weights} frozen weights ({share:.2%}): {memory.trained:.1f} "
            f"GiB with gradients and optimizer states, frozen {memory.frozen:.1f} GiB"
        )
    if training.preference:
        return f"all {weights} weights, beside a frozen copy of {memory.frozen:.1f} GiB as the reference"
    return None


def format_count(count: float) -> str:
    """Write a number of weights or tokens: `8.03B`, `41.9M`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def compare_variant(variant: LayoutVariant, chosen: LayoutPrediction) -> str:
    """Say what a neighbour would cost or gain, and where."""
    other = variant.prediction
    assert other is not None, "an illegal layout has no prediction to compare"
    name = f"{variant.key} {variant.value} instead of {variant.was}{_other_changes(variant, chosen.layout)}"
    memory = other.memory
    if not other.fits:
        stage = max(other.stages, key=lambda stage: stage.memory.total)
        growth = _largest_growth(chosen, other)
        place = f" on stage {stage.stage}" if len(other.stages) > 1 else ""
        return f"{name} does not fit: {memory.total - memory.capacity:.1f} GiB too much{place}{growth}."
    change = other.step_seconds / chosen.step_seconds - 1
    if not chosen.fits:
        slower = f"{format_percent(change)} {'slower' if change > 0 else 'faster'}"
        step = f"{format_seconds(other.step_seconds)} a step ({slower})"
        return f"{name} would fit, with {memory.total:.1f} GiB, in {step}."
    freed_gib = chosen.memory.total - memory.total
    room = f", and {'frees' if freed_gib > 0 else 'needs'} {abs(freed_gib):.1f} GiB" if abs(freed_gib) >= 1 else ""
    if abs(change) < _ALIKE:
        return f"{name} would take as long ({format_seconds(other.step_seconds)}){room}."
    size = f"cost {format_percent(change)} more" if change > 0 else f"save {format_percent(change)}"
    why = time_differences(chosen.times, other.times)
    return f"{name} would {size} ({format_seconds(other.step_seconds)}): {why}{room}."


def _other_changes(variant: LayoutVariant, layout: RankLayout) -> str:
    """The other keys that change too; what follows from the sizes is left out."""
    keys = [key for key in (*_SIZES, "replicate", "recompute", "shard") if key != variant.key]
    changed = [f"{key} {value}" for key in keys if (value := getattr(variant.layout, key)) != getattr(layout, key)]
    return f", at best with {_join_and(changed)}," if changed else ""


def time_differences(
    times: StepTimes, other: StepTimes, *, most: int = 2, name: Literal["label", "phrase"] = "phrase"
) -> str:
    """Name the parts that change the most: `tensor-parallel communication +1.20 s, compute -0.31 s`."""
    changes = [(part, getattr(other, part.key) - getattr(times, part.key)) for part in TIME_PARTS]
    largest = sorted(changes, key=lambda entry: -abs(entry[1]))[:most]
    threshold = 0.15 * abs(largest[0][1])
    shown = [(part, change) for part, change in largest if change and abs(change) >= threshold]
    return ", ".join(
        f"{getattr(part, name)} {'+' if change > 0 else '−'}{format_seconds(abs(change))}" for part, change in shown
    )


def _largest_growth(chosen: LayoutPrediction, other: LayoutPrediction) -> str:
    changes = [(part, getattr(other.memory, part.key) - getattr(chosen.memory, part.key)) for part in MEMORY_PARTS]
    part, growth = max(changes, key=lambda entry: entry[1])
    return f" ({part.phrase} +{growth:.1f} GiB)" if growth >= 0.1 else ""


def _illegal(tried: list[LayoutVariant]) -> Iterator[str]:
    for variant in tried:
        if variant.problem is not None:
            yield f"{variant.key} {variant.value} is not possible: {variant.problem}."


def _remedies(training: TrainingShape, chosen: LayoutPrediction) -> Iterator[str]:
    """What would help besides another layout: a larger batch, a faster network."""
    total = chosen.times.total
    rate = chosen.tokens_per_second_per_gpu
    batch = replace(training, global_batch=2 * training.global_batch)
    gain = predict(batch, chosen.layout).tokens_per_second_per_gpu / rate - 1
    if gain >= _WORTH_SAYING:
        yield f"A global batch of {batch.global_batch:,} would give {gain:.0%} more tokens a second on this layout."
    communication = chosen.times.tp + chosen.times.cp + chosen.times.ep + chosen.times.dp_exposed
    if communication / total < _WORTH_SAYING:
        return
    hardware = training.hardware
    for words, faster in (
        ("network between the nodes", replace(hardware, network_gb_per_s=2 * hardware.network_gb_per_s)),
        ("link inside a node", replace(hardware, link_gb_per_s=2 * hardware.link_gb_per_s)),
    ):
        gain = predict(replace(training, hardware=faster), chosen.layout).tokens_per_second_per_gpu / rate - 1
        if gain >= _WORTH_SAYING:
            yield f"Twice the {words} would give {gain:.0%} more tokens a second."


def format_percent(change: float) -> str:
    """Write a share of a step: `9%`, a small one with a decimal."""
    return f"{abs(change):.1%}" if abs(change) < 0.02 else f"{abs(change):.0%}"


def format_share(part: float) -> str:
    """Write a part of a whole: `71%`, and `<1%` for what rounds to 0."""
    return f"{part:.0%}" if part >= 0.005 else "<1%"


def format_seconds(amount: float) -> str:
    """Write seconds with three figures: `45.8 s`, `312 ms`."""
    if amount >= 100:
        return f"{amount:,.0f} s"
    if amount >= 1:
        return f"{amount:.1f} s" if amount >= 10 else f"{amount:.2f} s"
    if amount >= 0.01:
        return f"{amount * 1e3:.0f} ms"
    return f"{amount * 1e3:.1f} ms" if amount >= 1e-4 else f"{amount * 1e6:.0f} µs"


def _join_and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def describe_run(budget: RunBudget) -> list[tuple[str, str]]:
    """Return a label and a line for each known part of the budget."""
    return [*_length_lines(budget.run), *_checkpoint_lines(budget), *_host_lines(budget)]


def _length_lines(run: RunCost | None) -> Iterator[tuple[str, str]]:
    if run is None:
        return
    yield (
        "length",
        f"{format_hours(run.hours)} for {run.steps:,} steps: {_format_amount(run.gpu_hours)} GPU hours{_slower(run)}",
    )
    if run.cost is not None and run.price_per_gpu_hour is not None:
        yield (
            "cost",
            f"${_format_amount(run.cost)} at ${run.price_per_gpu_hour:.2f} per GPU and hour ({run.price_source})",
        )
    if run.energy_kwh is not None:
        yield "energy", f"{_format_amount(run.energy_kwh)} kWh at most: the machines' rated power, without cooling"


def _slower(run: RunCost) -> str:
    more = run.hours - run.training_hours
    return f", {format_hours(more)} of it saves, failures and restarts" if more > 0.005 * run.hours else ""


def _checkpoint_lines(budget: RunBudget) -> Iterator[tuple[str, str]]:
    cost, goodput = budget.checkpoint, budget.goodput
    words = f"{_format_bytes(cost.bytes)}, copied to the hosts in {format_seconds(cost.stage_seconds)}"
    if cost.write_seconds is not None:
        words += f", written in {format_duration(cost.write_seconds)} to {cost.storage}"
    yield "checkpoint", words
    best = f"saved every {goodput.best_interval_steps:,} steps, {goodput.best_goodput:.1%} of the time trains"
    failing = f"a failure every {format_duration(3600 * goodput.mtbf_hours)} ({goodput.mtbf_source})"
    if goodput.goodput is not None and goodput.interval_steps is not None:
        best = (
            f"saved every {goodput.interval_steps:,} steps, {goodput.goodput:.1%} of the time trains; "
            f"every {goodput.best_interval_steps:,} would be best ({goodput.best_goodput:.1%})"
        )
    yield "goodput", f"{best}; {failing}"
    if budget.volume is not None:
        yield "volume", str(budget.volume)


def _host_lines(budget: RunBudget) -> Iterator[tuple[str, str]]:
    memory, data = budget.host_memory, budget.data
    has = f" of {memory.capacity_gib:,.0f}" if memory.capacity_gib is not None else ""
    yield "host memory", f"{memory.total_gib:,.0f}{has} GiB a node"
    given = f" of {data.given_gb_per_s:.3g}" if data.given_gb_per_s is not None else ""
    yield (
        "data",
        f"{data.needed_gb_per_s:.2g}{given} GB/s to read" + (": the step waits for it" if data.limits_the_step else ""),
    )


def format_hours(amount: float) -> str:
    """Write hours, or days of them."""
    if amount >= 72:
        return f"{amount / 24:,.1f} days"
    return f"{amount:,.1f} hours" if amount >= 1.5 else format_duration(3600 * amount)


def _format_amount(amount: float) -> str:
    """Write a large number without decimals, a small one with three figures."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def _format_bytes(amount: int) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB")):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount / 1e6:.3g} MB"
