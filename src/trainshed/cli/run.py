"""`trainshed run`: the whole workflow of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.workflow import TrainedRun


def run(
    recipe: str,
    *overrides: str,
    on: str = "local",
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
    from trainshed.cli.console import print_report, reporter
    from trainshed.cli.progress import training_progress
    from trainshed.errors import InputError
    from trainshed.plan import parse_layout
    from trainshed.recipe import load_cluster, load_recipe, split_overrides
    from trainshed.workflow import run as run_here

    if workers is not None and workers < 1:
        raise InputError(f"--workers {workers} is less than one", hint="write --workers 1 or more, or leave it out")
    for_recipe, for_cluster = split_overrides(overrides)
    cluster = load_cluster(on, for_cluster)
    if cluster.target != "local":
        from trainshed.cli.launch.follow import run_elsewhere

        if layout is not None or workers is not None:
            raise InputError("--layout and --workers are for this machine", hint="write layout.tp=2 …, or `--on local`")
        return run_elsewhere(recipe, overrides, on, id, nodes, output)
    if nodes is not None:
        raise InputError("--nodes is for other clusters: here the layout says how many ranks", hint="write --layout")
    finished = run_here(
        load_recipe(recipe, for_recipe),
        cluster,
        id=id,
        layout=parse_layout(layout) if layout else None,
        workers=workers,
        reporter=reporter(),
        watch=training_progress,
    )
    data = _report(finished)
    print_report(data, output, _text(data, finished))
    return finished.exit_code


def _report(finished: TrainedRun) -> dict[str, Any]:
    from trainshed.cli.train import training_report
    from trainshed.workflow.serve import local_command

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
        "epochs": {each.name: each.epochs for each in run.order.budget(run.steps)},
        "training": training_report(finished),
    }
    if finished.export is not None:
        data["export"] = finished.export
        if run.recipe.serve is not None:
            data["serve"] = local_command(run.recipe, finished.export)
    return data


def _text(data: dict[str, Any], finished: TrainedRun) -> str:
    from trainshed.cli.console import human
    from trainshed.cli.train import training_text

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
        size = human(sum(each.tokens for each in budget), "tokens")
        lines.append(f"  order: ready for {run.steps:,} steps ({size}), independent of any layout")
    lines.append(training_text(data["training"]))
    if "export" in data:
        lines.append(f"  exported and proven: {data['export']}")
    if "serve" in data:
        lines.append(f"  serve it here with: {data['serve']}")
    return "\n".join(lines)
