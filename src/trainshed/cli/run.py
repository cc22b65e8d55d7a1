"""`trainshed run` and `trainshed train`: all stages of a recipe, or the train stage alone, on this machine."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RecipeName
from trainshed.cli.console import Output
from trainshed.run_folder import REPORT

if TYPE_CHECKING:
    from trainshed.recipe import Cluster
    from trainshed.workflow import PreparedRun, TrainedRun


def run(
    recipe: RecipeName,
    *overrides: str,
    on: ClusterName = "local",
    id: str | None = None,
    layout: str | None = None,
    workers: int | None = None,
    nodes: int | None = None,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Carry a recipe through every stage; what is already made and proven is not made again.

    Fetches and proves base weights, prepares, verifies and indexes the data, trains, and exports; a rerun goes on where
    it was. On another cluster it submits the same stages and follows them to their end.

    Parameters
    ----------
    recipe
        A recipe file, or the name of a shipped one (`trainshed recipes`).
    overrides
        Keys to change, as key.sub=value (train.steps=100, cluster.store=/data).
    on
        The cluster file that says where to run.
    id
        Start another run of the same recipe under this id.
    layout
        Keys of the layout to change, as tp=2,pp=2,dp=2.
    workers
        How many cores to tokenise on (default: all).
    nodes
        How many nodes of another cluster (default: the recipe's, or the cluster's).
    output
        Report as text or json.
    """
    from trainshed import api
    from trainshed.cli.console import print_report, reporter, training_progress
    from trainshed.recipe import load_cluster, split_overrides

    for_recipe, for_cluster = split_overrides(overrides)
    cluster = load_cluster(on, for_cluster)
    if cluster.target != "local" and layout is None and workers is None:
        from trainshed.cli.submit import run_on_cluster

        return run_on_cluster(recipe, overrides, on, id, nodes, output)
    done = api.run(
        recipe,
        *for_recipe,
        on=cluster,
        id=id,
        layout=layout,
        workers=workers,
        nodes=nodes,
        reporter=reporter(),
        watch=training_progress,
    )
    finished = done.trained
    assert finished is not None, "it was trained here"
    data = _run_report(finished) | {"next": look_further(finished, cluster)}
    print_report(data, output, _run_text(data, finished))
    return finished.exit_code


def _run_report(finished: TrainedRun) -> dict[str, Any]:
    from trainshed.workflow.serve import local_serve_command

    run = finished.prepared
    data = {
        "schema": "trainshed.run/1",
        "name": run.recipe.name,
        "id": run.id,
        "folder": str(run.folder),
        "steps": run.steps,
        "tokenizer": run.tokenizer and run.tokenizer.address,
        "sources": [
            {
                "name": source.name,
                "prefixes": list(source.prefixes),
                "documents": source.documents,
                "tokens": source.tokens,
                "reused": source.reused,
            }
            for source in run.sources
        ],
        "epochs": {source.name: source.epochs for source in run.order.budget(run.steps)},
        "training": training_report(finished),
    }
    if finished.export is not None:
        data["export"] = finished.export
        if run.recipe.serve is not None:
            data["serve"] = local_serve_command(run.recipe, finished.export)
    if finished.evaluation is not None:
        data["evaluations"] = [record.to_plain() for record in finished.evaluation.records]
    return data


def _run_text(data: dict[str, Any], finished: TrainedRun) -> str:
    from trainshed.cli.console import format_amount

    run = finished.prepared
    budget = run.order.budget(run.steps)
    lines = [f"run {run.recipe.name}/{run.id} in {run.folder}"]
    for source, share in zip(run.sources, budget, strict=False):
        files = f"{source.prefixes[0]}.bin" if len(source.prefixes) == 1 else f"{len(source.prefixes)} shards"
        lines.append(
            f"  {source.name}: {source.documents:,} documents, {source.tokens:,} tokens, proven"
            f"{' (already there)' if source.reused else ''}; {share.epochs or 0:.2f} epochs in {run.steps:,} steps"
            f"\n    {files}"
        )
    if run.tokenizer is not None:
        lines.append(f"  tokenizer: {run.tokenizer.vocab_size:,} tokens, {run.tokenizer.address}")
    if run.sources:
        size = format_amount(sum(entry.tokens for entry in budget), "tokens")
        lines.append(f"  order: ready for {run.steps:,} steps ({size}), independent of any layout")
    lines.append(training_text(data["training"]))
    if "export" in data:
        lines.append(f"  exported and proven: {data['export']}")
    if finished.evaluation is not None:
        lines += [f"  {record.label}: {record.scores_text()}" for record in finished.evaluation.records]
    if "serve" in data:
        lines.append(f"  serve it here with: {data['serve']}")
    if data["next"]:
        lines += ["look further:", *(f"  {command}" for command in data["next"])]
    return "\n".join(lines)


def look_further(finished: TrainedRun, cluster: Cluster) -> list[str]:
    """Return the commands that show more of a run that is done: those there are for what it has made."""
    import shlex

    from trainshed.cli import VERBS
    from trainshed.recipe.cluster.schema import LOCAL_STORE

    if not finished.is_complete:
        return []
    run = finished.prepared
    # By its name it is found in the store that is looked through by itself.
    is_found_by_name = run.recipe.store is None and cluster.store_root == LOCAL_STORE
    name = f"{run.recipe.name}/{run.id}" if is_found_by_name else str(run.folder)
    shown = shlex.quote(name)
    commands = [f"trainshed {'dash' if 'dash' in VERBS else 'watch'} {shown}"]
    if finished.checkpoint is not None and run.tokenizer is not None:
        asked = "--chat --prompt 'Who are you?'" if run.recipe.train.mode != "pretrain" else "--prompt 'The '"
        commands.append(f"trainshed generate {shown} {asked}")
    if "metrics" in VERBS:
        commands.append(" ".join(["trainshed", "metrics", shown]))
    return commands


def train(
    recipe: RecipeName,
    *overrides: str,
    layout: str | None = None,
    on: ClusterName = "local",
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
    from trainshed import api
    from trainshed.cli.console import print_report, reporter, training_progress
    from trainshed.plan import parse_layout
    from trainshed.recipe import load_cluster, load_recipe, split_overrides
    from trainshed.workflow import check_runnable, open_run

    if is_rank():
        for_recipe, for_cluster = split_overrides(overrides)
        cluster, loaded = load_cluster(on, for_cluster), load_recipe(recipe, for_recipe)
        check_runnable(loaded, cluster)
        keys = parse_layout(layout) if layout else None
        return train_as_rank(open_run(loaded, cluster, id=id), keys, cluster)
    trained = api.train(
        recipe, *overrides, on=on, id=id, layout=layout, reporter=reporter(), watch=training_progress
    ).trained
    assert trained is not None, "it was trained here"
    data = training_report(trained)
    print_report(data, output, training_text(data))
    return trained.exit_code


def is_rank() -> bool:
    """Whether somebody (torchrun, a scheduler) has started this process as one rank of many."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def train_as_rank(run: PreparedRun, keys: dict[str, object] | None, cluster: Cluster) -> int:
    """Train as the rank that the environment says."""
    from trainshed.cli.console import training_progress
    from trainshed.engines.torch.rank import train_rank
    from trainshed.engines.torch.rank_env import RankEnv
    from trainshed.launch.local import lock_run
    from trainshed.workflow import RunStart, check_resumable, run_layout, save_run, store_options, train_job

    place = RankEnv.from_environment()
    layout = run_layout(run, cluster, keys=keys, world_size=place.world_size)
    with ExitStack() as stack:
        if place.rank == 0:
            stack.enter_context(lock_run(run.folder, f"{run.recipe.name}/{run.id}"))
            check_resumable(RunStart(run.recipe, run.id, run.folder), run.steps, store_options(cluster))
            save_run(run)
        on_event = stack.enter_context(training_progress(run.steps))
        job = train_job(run, layout, store_options(cluster))
        return train_rank(job, run_folder=run.folder, listener=on_event)


def training_report(trained: TrainedRun) -> dict[str, Any]:
    """Return the report of a training, for programs."""
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
        "best": trained.best,
        "report": str(run.folder / REPORT) if (run.folder / REPORT).is_file() else None,
        "stopped_early": trained.early_stop,
        "stopped_by_signal": trained.exit_code - 128 if trained.exit_code > 128 else None,
    }


def training_text(data: dict[str, Any]) -> str:
    """Write a training's report for people."""
    ended = "trained" if data["step"] == data["steps"] or data["stopped_early"] else "stopped"
    lines = [
        f"{ended} {data['name']}/{data['id']} on {data['layout']}: step {data['step']:,} of {data['steps']:,}, "
        f"{data['tokens']:,} tokens"
    ]
    if data["loss"] is not None:
        measured = f", validation loss {data['validation_loss']:.4f}" if data["validation_loss"] is not None else ""
        lines.append(f"  loss {data['loss']:.4f}{measured}")
    if data["stopped_early"] is not None:
        lines.append(f"  stopped early: {data['stopped_early']}; raise train.early_stop.patience to go on")
    if data["checkpoint"] is not None:
        lines.append(f"  checkpoint: {data['checkpoint']}")
    if (best := data["best"]) is not None:
        lines.append(f"  best: step {best['step']:,}, validation loss {best['loss']:.4f}")
    if data["report"] is not None:
        lines.append(f"  report: {data['report']}")
    return "\n".join(lines)
