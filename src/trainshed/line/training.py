"""A prepared run made ready for its ranks: its layout, filled in and checked, and what each rank is asked."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trainshed.errors import InputError, MissingExtra
from trainshed.line.planning import planned_model
from trainshed.line.preparing import PreparedRun
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


def check_trainable(recipe: Recipe, *, chosen: bool = False) -> None:
    """Refuse what no preparation can make trainable; `chosen` says that the command line gives a layout."""
    if find_spec("torch") is None:
        raise MissingExtra.named("train", "training")
    if recipe.engine.name != "torch":
        raise InputError(
            f"the engine {recipe.engine.name} is not ours, and runs in its own image on a cluster",
            where=recipe.where("engine"),
            hint="`trainshed submit RECIPE --on CLUSTER` sends it there; write `engine: torch` to train here",
        )
    if recipe.train.precision == "fp16":
        raise InputError(
            "our own engine does not train in fp16: it has no loss scale",
            where=recipe.where("train.precision"),
            hint="write `precision: bf16`",
        )
    if recipe.train.mode == "finetune" or recipe.train.lora is not None:
        key = "train.lora" if recipe.train.lora is not None else "train.mode"
        raise InputError("fine-tuning is not built yet", where=recipe.where(key), hint="write `mode: pretrain`")
    if recipe.data.stage != "direct":
        raise InputError(
            f"staging tokens on {recipe.data.stage} is not built yet",
            where=recipe.where("data.stage"),
            hint="write `stage: direct`",
        )
    if isinstance(recipe.layout, str) and not chosen:
        _local_hardware()


def _local_hardware() -> Hardware | None:
    """The GPUs that `layout: auto` would plan for, None without any; those that are not in the catalog are an error."""
    from trainshed.engines.torch.place import gpu_count, gpu_device_name

    gpus = gpu_count()
    return local_hardware(gpu_device_name(), gpus) if gpus else None


def automatic_layout(run: PreparedRun, cluster: Cluster | None = None, *, world_size: int | None = None) -> Chosen:
    """Choose the layout of a run on this machine: on all its GPUs, or on one CPU process; or on `world_size` ranks."""
    cluster = cluster or load_cluster()
    model = planned_model(run.recipe, cluster)
    hardware = _local_hardware()
    if hardware is None:
        chosen = choose_for_cpu(model, world_size or 1, machine_memory_gib())
        return replace(chosen, reasons=(*chosen.reasons, *uncalibrated(cluster)))
    return choose_for_gpus(model, hardware, world_size or hardware.gpus_per_node, cluster, run.recipe)


def run_layout(
    run: PreparedRun,
    cluster: Cluster | None = None,
    *,
    keys: dict[str, object] | None = None,
    world_size: int | None = None,
    reporter: Reporter = SILENT,
) -> RankLayout:
    """Return the layout a run trains on, filled in and checked: the recipe's with `keys` over it, or the planner's."""
    return planned_layout(run, cluster, keys=keys, world_size=world_size, reporter=reporter).layout


def planned_layout(
    run: PreparedRun,
    cluster: Cluster | None = None,
    *,
    keys: dict[str, object] | None = None,
    world_size: int | None = None,
    reporter: Reporter = SILENT,
) -> Chosen:
    """Return the layout a run trains on, as `run_layout` does, with the planner's reasons where it chose.

    `cluster` is where the run is started, and may name a calibration; None: `local` as it is shipped.
    """
    check_trainable(run.recipe, chosen=bool(keys))
    written = run.recipe.layout
    if isinstance(written, str) and not keys:
        chosen = automatic_layout(run, cluster, world_size=world_size)
    else:
        plain = {} if isinstance(written, str) else written.model_dump(exclude_unset=True)
        wanted = validate(Layout, Document(plain | (keys or {}), Places("--layout")))
        chosen = Chosen(resolve_layout(wanted, run.config, world_size=world_size))
    for reason in chosen.reasons:
        reporter.note(reason)
    asked = {"sequence_length": run.order.sequence_length, "batch_sizes": run.order.schedule.sizes}
    problems = layout_problems(chosen.layout, run.config, **asked)
    if problems:
        raise as_recipe_error(problems, run.recipe.places)
    for warning in layout_warnings(chosen.layout, run.config, **asked):
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
