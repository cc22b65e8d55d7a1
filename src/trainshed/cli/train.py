"""`trainshed train`: the train stage of a recipe, on this machine."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.recipe import Cluster
    from trainshed.workflow import PreparedRun, TrainedRun


def train(
    recipe: str,
    *overrides: str,
    layout: str | None = None,
    on: str = "local",
    id: str | None = None,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Train a recipe whose data is prepared; goes on from the last checkpoint where there is one.

    Starts one process per rank of the layout. Under torchrun, or wherever RANK and WORLD_SIZE are set, this process is
    one rank.

    Parameters
    ----------
    recipe
        A recipe file, or the name of a shipped one (`trainshed recipes`).
    overrides
        Keys to change, as key.sub=value (train.steps=100, cluster.store=/data).
    layout
        Keys of the layout to change, as tp=2,pp=2,dp=2.
    on
        The cluster file that says where to run.
    id
        The id of the run, where it is not the recipe's own.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.cli.progress import training_progress
    from trainshed.plan import parse_layout
    from trainshed.recipe import load_cluster, load_recipe, split_overrides
    from trainshed.workflow import check_runnable, open_run
    from trainshed.workflow import train as train_here

    for_recipe, for_cluster = split_overrides(overrides)
    cluster = load_cluster(on, for_cluster)
    loaded = load_recipe(recipe, for_recipe)
    keys = parse_layout(layout) if layout else None
    if is_a_rank():
        check_runnable(loaded, cluster)
        return train_as_rank(open_run(loaded, cluster, id=id), keys, cluster)
    trained = train_here(loaded, cluster, id=id, layout=keys, reporter=reporter(), watch=training_progress)
    data = training_report(trained)
    print_report(data, output, training_text(data))
    return trained.exit_code


def is_a_rank() -> bool:
    """Whether somebody (torchrun, a scheduler) has started this process as one rank of many."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def train_as_rank(run: PreparedRun, keys: dict[str, object] | None, cluster: Cluster) -> int:
    """Train as the rank that the environment says."""
    from trainshed.cli.progress import training_progress
    from trainshed.engines.torch.place import Place
    from trainshed.engines.torch.rank import train_rank
    from trainshed.launch.run_lock import only_start
    from trainshed.workflow import RunStart, check_goes_on, keep_run, run_layout, store_options, train_job

    place = Place.from_environment()
    layout = run_layout(run, cluster, keys=keys, world_size=place.world_size)
    with ExitStack() as stack:
        if place.rank == 0:
            stack.enter_context(only_start(run.folder, f"{run.recipe.name}/{run.id}"))
            check_goes_on(RunStart(run.recipe, run.id, run.folder), run.steps, store_options(cluster))
            keep_run(run)
        on_event = stack.enter_context(training_progress(run.steps))
        job = train_job(run, layout, store_options(cluster))
        return train_rank(job, run_folder=run.folder, listener=on_event)


def training_report(trained: TrainedRun) -> dict[str, Any]:
    """Return what programs are told of a training."""
    run, last = trained.prepared, trained.last_step
    return {
        "schema": "trainshed.train/1",
        "name": run.recipe.name,
        "id": run.id,
        "folder": str(run.folder),
        "layout": str(trained.layout),
        "attempt": trained.attempt,
        "steps": run.steps,
        "step": trained.steps_done,
        "loss": last and last["loss"],
        "grad_norm": last and last["grad_norm"],
        "validation_loss": trained.validation_loss,
        "tokens": last["tokens"] if last else 0,
        "tokens_per_second_per_gpu": last and last["tokens_per_second_per_gpu"],
        "mfu": last and last["mfu"],
        "checkpoint": trained.checkpoint,
        "stopped_by_signal": trained.exit_code - 128 if trained.exit_code > 128 else None,
    }


def training_text(data: dict[str, Any]) -> str:
    """Write a training's report for people."""
    ended = "trained" if data["step"] == data["steps"] else "stopped"
    lines = [
        f"{ended} {data['name']}/{data['id']} on {data['layout']}: step {data['step']:,} of {data['steps']:,}, "
        f"{data['tokens']:,} tokens"
    ]
    if data["loss"] is not None:
        measured = f", validation loss {data['validation_loss']:.4f}" if data["validation_loss"] is not None else ""
        lines.append(f"  loss {data['loss']:.4f}{measured}")
    if data["checkpoint"] is not None:
        lines.append(f"  checkpoint: {data['checkpoint']}")
    return "\n".join(lines)
