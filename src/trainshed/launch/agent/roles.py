"""Which node of an allocation does what: nodes that train, spares that wait, bad ones that are left out."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from trainshed.data.sampling.schedule import BatchSchedule, RampUp
from trainshed.launch.job import JobFile, Stage
from trainshed.plan import RankLayout
from trainshed.plan.shrinking_nodes import layout_for_nodes
from trainshed.recipe import load_recipe


def first_roles(stage: Stage) -> tuple[int, ...]:
    """Return the slots that train when all nodes are well: the first ones, in the scheduler's order."""
    return tuple(range(stage.nodes))


def stand_in(training: tuple[int, ...], slots: int, bad: Collection[int]) -> tuple[int, ...] | None:
    """Return who trains when the bad nodes are left out, spares in their places; None where too few are well.

    Ranks are static: every node that is well keeps its place.
    """
    free = [slot for slot in range(slots) if slot not in bad and slot not in training]
    replaced = [slot if slot not in bad else (free.pop(0) if free else None) for slot in training]
    found = tuple(slot for slot in replaced if slot is not None)
    return found if len(found) == len(training) else None


def fewer_nodes(
    job: JobFile, stage: Stage, folder: Path, layout: RankLayout, bad: Collection[int]
) -> tuple[tuple[int, ...], RankLayout] | str:
    """Plan anew for the nodes that are left; returns who trains and on what layout, or why nobody does."""
    well = [slot for slot in range(stage.nodes + stage.spares) if slot not in bad]
    left = f"{len(well)} of {stage.nodes + stage.spares} nodes are left"
    if job.min_nodes is None:
        return f"{left}, and {stage.nodes} are needed"
    if len(well) < job.min_nodes:
        return f"{left}, and elastic.min_nodes asks for {job.min_nodes}"
    kept = Path(job.run) / "recipe.yaml"  # with the architecture written out; the job's may leave it to base weights
    recipe = load_recipe(str(kept if kept.is_file() else folder / "recipe.yaml"))
    config = recipe.model.config
    if config is None:
        return f"{left}, and the architecture to plan them for is not known"
    ramp = recipe.train.batch_ramp
    schedule = BatchSchedule(
        recipe.train.global_batch, RampUp(ramp.start, ramp.increment, ramp.samples) if ramp is not None else None
    )
    found = layout_for_nodes(
        layout,
        config,
        nodes=min(len(well), stage.nodes),
        min_nodes=job.min_nodes,
        ranks_per_node=stage.ranks_per_node,
        sequence_length=recipe.data.sequence_length or config.max_positions,
        batch_sizes=schedule.sizes,
    )
    if isinstance(found, str):
        return f"{left}, and {found}"
    smaller, count = found
    return tuple(well[:count]), smaller
