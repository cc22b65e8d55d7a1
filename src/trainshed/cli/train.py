"""`trainshed train`: the train stage of a recipe, on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.line import PreparedRun
    from trainshed.recipe import Cluster


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
    from trainshed.launch.run_lock import only_start
    from trainshed.line import (
        check_goes_on,
        check_runnable,
        check_trainable,
        find_start,
        note_other_runs,
        open_run,
        store_options,
    )
    from trainshed.plan import parse_layout
    from trainshed.recipe import load_cluster, load_recipe, split_overrides

    for_recipe, for_cluster = split_overrides(overrides)
    cluster = load_cluster(on, for_cluster)
    loaded = load_recipe(recipe, for_recipe)
    if is_a_rank():
        check_runnable(loaded, cluster)
        return train_as_rank(open_run(loaded, cluster, id=id), layout, cluster)
    check_trainable(loaded, cluster, keys=parse_layout(layout) if layout else None)
    start = find_start(loaded, cluster, id)
    check_goes_on(start, loaded.train.steps, store_options(cluster))
    run = open_run(loaded, cluster, id=start.id)
    with only_start(start.folder, start.run):
        note_other_runs(start, reporter())
        data = train_stage(run, layout, worker_arguments(on, for_cluster), cluster)
    print_report(data, output, training_text(data))
    return exit_code(data)


def is_a_rank() -> bool:
    """Whether somebody (torchrun, a scheduler) has started this process as one rank of many."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def worker_arguments(on: str, for_cluster: Sequence[str]) -> list[str]:
    """What tells each rank which cluster it is on."""
    return ["--on", on, *(f"cluster.{each}" for each in for_cluster)]


def train_as_rank(run: PreparedRun, layout_text: str | None, cluster: Cluster) -> int:
    """Train as the rank that the environment says."""
    from trainshed.cli.progress import training_progress
    from trainshed.engines.torch.place import Place
    from trainshed.engines.torch.rank import train_rank
    from trainshed.launch.run_lock import only_start
    from trainshed.line import RunStart, check_goes_on, keep_run, run_layout, store_options, train_job
    from trainshed.plan import parse_layout

    place = Place.from_environment()
    keys = parse_layout(layout_text) if layout_text else None
    layout = run_layout(run, cluster, keys=keys, world_size=place.world_size)
    with ExitStack() as stack:
        if place.rank == 0:
            stack.enter_context(only_start(run.folder, f"{run.recipe.name}/{run.id}"))
            check_goes_on(RunStart(run.recipe, run.id, run.folder), run.steps, store_options(cluster))
            keep_run(run)
        on_event = stack.enter_context(training_progress(run.steps))
        job = train_job(run, layout, store_options(cluster))
        return train_rank(job, run_folder=run.folder, listener=on_event)


def train_stage(
    run: PreparedRun, layout_text: str | None, for_ranks: Sequence[str], cluster: Cluster
) -> dict[str, Any]:
    """Train a prepared run with all its ranks here, show it, and return its report."""
    from trainshed.cli.console import reporter
    from trainshed.cli.progress import training_progress
    from trainshed.launch.here import train_here
    from trainshed.line import RunStart, check_goes_on, keep_run, planned_layout, store_options
    from trainshed.plan import parse_layout

    check_goes_on(RunStart(run.recipe, run.id, run.folder), run.steps, store_options(cluster))
    keys = parse_layout(layout_text) if layout_text else None
    chosen = planned_layout(run.recipe, cluster, keys=keys, reporter=reporter())
    keep_run(run)
    with training_progress(run.steps) as on_event:
        trained = train_here(
            run.folder,
            chosen.layout,
            precision=run.recipe.train.precision,
            reasons=chosen.reasons,
            calibration=chosen.calibration,
            worker_arguments=for_ranks,
            on_event=on_event,
        )
    return _report(run, str(chosen.layout), trained.attempt, trained.exit_code)


def exit_code(data: dict[str, Any]) -> int:
    """0, or 128 + the signal that asked for a stop."""
    return 128 + data["stopped_by_signal"] if data["stopped_by_signal"] else 0


def _report(run: PreparedRun, layout: str, attempt: int, code: int) -> dict[str, Any]:
    from trainshed.observe.reading import done_steps, read_events
    from trainshed.storage import LocalStore

    events = list(read_events(LocalStore(run.folder), ""))
    done = done_steps(events)
    measured = [event for event in events if event["kind"] == "validation"]
    saved = [event for event in events if event["kind"] == "checkpoint" and event["phase"] == "committed"]
    last = done[-1] if done else None
    return {
        "schema": "trainshed.train/1",
        "name": run.recipe.name,
        "id": run.id,
        "folder": str(run.folder),
        "layout": layout,
        "attempt": attempt,
        "steps": run.steps,
        "step": last["step"] + 1 if last else 0,
        "loss": last and last["loss"],
        "grad_norm": last and last["grad_norm"],
        "validation_loss": measured[-1]["loss"] if measured else None,
        "tokens": last["tokens"] if last else 0,
        "tokens_per_second_per_gpu": last and last["tokens_per_second_per_gpu"],
        "mfu": last and last["mfu"],
        "checkpoint": saved[-1]["path"] if saved else None,
        "stopped_by_signal": code - 128 if code > 128 else None,
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
