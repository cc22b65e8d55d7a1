"""A prepared run made ready for its ranks: its layout, filled in and checked, and what each rank is asked."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trainshed.catalog.models import architecture
from trainshed.errors import MissingExtra, RecipeError
from trainshed.line.planning import planned_model, weights_architecture
from trainshed.line.preparing import PreparedRun
from trainshed.line.runnable import check_ranks, check_runnable
from trainshed.plan import RankLayout, layout_problems, layout_warnings, resolve_layout
from trainshed.plan.performance.hardware import Hardware
from trainshed.plan.searching.automatic import (
    Chosen,
    choose_for_cpu,
    choose_for_gpus,
    local_hardware,
    machine_memory_gib,
    uncalibrated,
)
from trainshed.recipe import Cluster, Layout, Recipe, load_cluster
from trainshed.recipe.messages import as_recipe_error, validate
from trainshed.recipe.places import Document, Places
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import LocalStore, Store, StoreOptions, open_store, parse

if TYPE_CHECKING:
    from trainshed.engines.torch.job import TrainJob


def check_trainable(recipe: Recipe, cluster: Cluster, *, keys: dict[str, object] | None = None) -> None:
    """Refuse what could not train here before anything is fetched or prepared; `keys` are those of `--layout`."""
    check_runnable(recipe, cluster)
    if find_spec("torch") is None:
        raise MissingExtra.named("train", "training")
    try:
        config = architecture(recipe) or weights_architecture(recipe, cluster)
    except RecipeError:
        return  # weights in a format that only they themselves explain: the layout is checked once they are here
    model = recipe.model.model_copy(update={"config": config, "preset": None})
    planned_layout(recipe.model_copy(update={"model": model}), cluster, keys=keys)


def _local_hardware() -> Hardware | None:
    """The GPUs that `layout: auto` would plan for, None without any; those that are not in the catalog are an error."""
    from trainshed.engines.torch.place import gpu_count, gpu_device_name

    gpus = gpu_count()
    return local_hardware(gpu_device_name(), gpus) if gpus else None


def automatic_layout(recipe: Recipe, cluster: Cluster | None = None, *, world_size: int | None = None) -> Chosen:
    """Choose the layout of a run on this machine: on all its GPUs, or on one CPU process; or on `world_size` ranks."""
    cluster = cluster or load_cluster()
    model = planned_model(recipe, cluster)
    hardware = _local_hardware()
    if hardware is None:
        chosen = choose_for_cpu(model, world_size or 1, machine_memory_gib())
        return replace(chosen, reasons=(*chosen.reasons, *uncalibrated(cluster)))
    return choose_for_gpus(model, hardware, world_size or hardware.gpus_per_node, cluster, recipe)


def run_layout(
    run: PreparedRun,
    cluster: Cluster | None = None,
    *,
    keys: dict[str, object] | None = None,
    world_size: int | None = None,
    reporter: Reporter = SILENT,
) -> RankLayout:
    """Return the layout a run trains on, filled in and checked: the recipe's with `keys` over it, or the planner's."""
    return planned_layout(run.recipe, cluster, keys=keys, world_size=world_size, reporter=reporter).layout


def planned_layout(
    recipe: Recipe,
    cluster: Cluster | None = None,
    *,
    keys: dict[str, object] | None = None,
    world_size: int | None = None,
    reporter: Reporter = SILENT,
) -> Chosen:
    """Return the layout a recipe trains on here, filled in and checked, with the planner's reasons where it chose.

    `cluster` is where the run is started, and may name a calibration; None: `local` as it is shipped.
    """
    cluster = cluster or load_cluster()
    model, written = planned_model(recipe, cluster), recipe.layout
    if isinstance(written, str) and not keys:
        chosen = automatic_layout(recipe, cluster, world_size=world_size)
    else:
        plain = {} if isinstance(written, str) else written.model_dump(exclude_unset=True)
        wanted = validate(Layout, Document(plain | (keys or {}), Places("--layout")))
        chosen = Chosen(resolve_layout(wanted, model.config, world_size=world_size))
    for reason in chosen.reasons:
        reporter.note(reason)
    asked = {"sequence_length": model.sequence_length, "batch_sizes": model.batch_sizes}
    problems = layout_problems(chosen.layout, model.config, **asked)
    if problems:
        raise as_recipe_error(problems, recipe.places)
    check_ranks(recipe, chosen.layout.world_size)
    for warning in layout_warnings(chosen.layout, model.config, **asked):
        reporter.warn(warning)
    return chosen


def checkpoint_home(run: PreparedRun, options: StoreOptions | None = None) -> tuple[Store, str] | None:
    """Return where the run's checkpoints are kept apart from it, as store and folder; None: in its own folder."""
    if run.recipe.checkpoint.to is None:
        return None
    store, path = open_store(parse(run.recipe.checkpoint.to), options)
    return store, f"{path}/{run.recipe.name}/{run.id}".lstrip("/")


def train_job(run: PreparedRun, layout: RankLayout, options: StoreOptions | None = None) -> TrainJob:
    """Return what a rank of this run is asked to train."""
    from trainshed.engines.torch.job import TrainJob

    return TrainJob(
        recipe=run.recipe,
        config=run.config,
        layout=layout,
        name=run.id,
        steps=run.steps,
        order=run.order,
        validation=run.validation,
        store=LocalStore(run.folder),
        folder="",
        base=run.base,
        checkpoint_home=checkpoint_home(run, options),
    )
