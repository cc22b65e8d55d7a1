"""Where a run is placed on a cluster: nodes, ranks and layout, checked by the planner before anything is submitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainshed.catalog.machines import Machine, find_machine
from trainshed.errors import InputError, RecipeError
from trainshed.plan.budget.budget import Budget
from trainshed.plan.layout import RankLayout, resolve_layout
from trainshed.plan.legality import layout_problems
from trainshed.plan.performance.hardware import hardware_of
from trainshed.plan.planner import PlannedModel, answer, question
from trainshed.plan.report.answer import Answer
from trainshed.plan.searching.automatic import choose_for_cpu_nodes, uncalibrated
from trainshed.recipe import Cluster, Recipe
from trainshed.recipe.messages import as_recipe_error


@dataclass(frozen=True)
class Placement:
    """How many nodes, and how many ranks on each; no GPUs where the cluster names no machine."""

    nodes: int
    ranks_per_node: int
    machine: Machine | None

    @property
    def gpus_per_node(self) -> int:
        """GPUs taken of each node."""
        return self.ranks_per_node if self.machine is not None else 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class PlannedRun:
    """A recipe's layout on a cluster, and what the planner says of it."""

    layout: RankLayout
    placement: Placement
    save_seconds: float | None
    """How long one checkpoint is written; None where no storage is named."""
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    predicted: Mapping[str, Any] | None = None


def plan_on_cluster(
    recipe: Recipe, cluster: Cluster, model: PlannedModel, nodes: int | None, gpus: int | None, despite_memory: bool
) -> PlannedRun:
    """Choose or check the layout of a recipe on a cluster; raises `InputError` where it could not train there."""
    machine = find_machine(cluster.gpu_machine) if cluster.gpu_machine else None
    if machine is None:
        return _on_processors(recipe, cluster, model, nodes)
    placement = _placement(recipe, cluster, machine, nodes, gpus)
    asked = question(model, hardware_of(machine), (placement.world_size,), cluster, machine=machine, recipe=recipe)
    found = answer(asked)
    _refuse_too_large(recipe, found, despite_memory)
    assert found.budget is not None, "`answer` always makes one"
    return PlannedRun(
        layout=found.chosen.layout,
        placement=placement,
        save_seconds=found.budget.checkpoint.write_seconds,
        reasons=tuple(_reasons(found)),
        notes=(_headline(found, found.budget), *found.notes),
        predicted=_predicted(found, found.budget),
    )


def _placement(recipe: Recipe, cluster: Cluster, machine: Machine, nodes: int | None, gpus: int | None) -> Placement:
    if nodes is not None and gpus is not None:
        raise InputError("--nodes and --gpus say the same thing twice", hint="keep one of them")
    where = "--gpus" if gpus is not None else "--nodes"
    if gpus is not None:
        if gpus > machine.gpus and gpus % machine.gpus:
            raise InputError(
                f"{gpus} GPUs are no whole number of {machine.name} nodes with {machine.gpus} each",
                where=where,
                hint=f"write {gpus // machine.gpus * machine.gpus} or {-(-gpus // machine.gpus) * machine.gpus}",
            )
        nodes, per_node = -(-gpus // machine.gpus), min(gpus, machine.gpus)
    else:
        nodes, where = _node_count(recipe, cluster, nodes)
        per_node = machine.gpus
    refuse_too_many(cluster, nodes, where)
    return Placement(nodes, per_node, machine)


def _node_count(recipe: Recipe, cluster: Cluster, nodes: int | None) -> tuple[int, str]:
    if nodes is not None:
        return nodes, "--nodes"
    if recipe.resources.nodes is not None:
        return recipe.resources.nodes, recipe.where("resources.nodes")
    return cluster.nodes.default, cluster.where("nodes.default")


def refuse_too_many(cluster: Cluster, nodes: int, where: str) -> None:
    """Raise where a cluster does not have so many nodes; `where` says who asked."""
    if nodes < 1:
        raise InputError(f"{nodes} nodes", where=where, hint="write 1 or more")
    if cluster.nodes.max is not None and nodes > cluster.nodes.max:
        raise InputError(
            f"{nodes} nodes, and the cluster {cluster.name} has {cluster.nodes.max} at most",
            where=where,
            hint=f"write {cluster.nodes.max} or less; {cluster.where('nodes.max')} says so",
        )


def _refuse_too_large(recipe: Recipe, found: Answer, despite_memory: bool) -> None:
    chosen = found.chosen
    if chosen.fits or despite_memory:
        return
    capacity = found.question.job.hardware.memory_gib
    raise RecipeError(
        f"{chosen.layout} needs {chosen.memory.total:.0f} GiB on its fullest GPU, which has {capacity:.0f}",
        where=recipe.where("layout"),
        hint="write `layout: auto`, or more nodes; --despite-memory submits it anyway",
    )


def _on_processors(recipe: Recipe, cluster: Cluster, model: PlannedModel, nodes: int | None) -> PlannedRun:
    """A cluster without GPUs: the layout is written out, or data parallel with one rank a node."""
    count, where = _node_count(recipe, cluster, nodes)
    refuse_too_many(cluster, count, where)
    sizes = model.batch_sizes
    reasons: tuple[str, ...] = ()
    if model.layout is None:
        chosen = choose_for_cpu_nodes(model, count)
        layout, reasons = chosen.layout, chosen.reasons
    else:
        layout = resolve_layout(model.layout, model.config)
    if layout.world_size % count:
        raise InputError(
            f"the {layout.world_size} ranks of {layout} do not fill {count} nodes evenly",
            where=where,
            hint=f"write a number of nodes that divides {layout.world_size}",
        )
    problems = layout_problems(
        layout, model.config, sequence_length=model.sequence_length, batch_sizes=sizes, engine=model.engine
    )
    if problems:
        raise as_recipe_error(problems, recipe.places)
    notes = ("machine: cpu: nothing is predicted, and ranks run on processors", *uncalibrated(cluster))
    return PlannedRun(layout, Placement(count, layout.world_size // count, None), None, reasons, notes)


def _headline(found: Answer, budget: Budget) -> str:
    chosen, job = found.chosen, found.question.job
    saving = budget.checkpoint.write_seconds
    saved = f", a checkpoint in {saving:.0f} s" if saving is not None else ""
    run = budget.run
    hours = f", {run.hours:.1f} hours" if run is not None else ""
    cost = f" and {run.cost:,.0f} dollars" if run is not None and run.cost is not None else ""
    return (
        f"planned: {chosen.layout} on {job.gpus} {job.hardware.gpu_name}, {chosen.step_seconds:.3g} s a step, "
        f"{chosen.mfu:.1%} MFU, {chosen.memory.total:.0f} of {job.hardware.memory_gib:.0f} GiB{saved}{hours}{cost}"
    )


def _reasons(found: Answer) -> list[str]:
    if not found.searched:
        return []
    return [f"layout: auto chose {found.chosen.layout} among {found.considered:,} layouts"]


def _predicted(found: Answer, budget: Budget) -> dict[str, Any]:
    chosen = found.chosen
    return {
        "step_seconds": chosen.step_seconds,
        "mfu": chosen.mfu,
        "memory_gib": chosen.memory.total,
        "checkpoint": budget.checkpoint.to_plain(),
        "calibration": found.calibration,
        "step_seconds_range": found.evidence.seconds if found.evidence is not None else None,
    }
