"""`trainshed run`: the whole line of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.line import RunStart
    from trainshed.recipe import Cluster, Recipe


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
    from trainshed.cli.console import reporter
    from trainshed.cli.train import worker_arguments
    from trainshed.errors import InputError
    from trainshed.launch.run_lock import only_start
    from trainshed.line import check_goes_on, check_trainable, find_start, note_other_runs, store_options
    from trainshed.plan import parse_layout
    from trainshed.recipe import load_cluster, load_recipe, split_overrides

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
    loaded = load_recipe(recipe, for_recipe)
    check_trainable(loaded, cluster, keys=parse_layout(layout) if layout else None)
    start = find_start(loaded, cluster, id)
    check_goes_on(start, loaded.train.steps, store_options(cluster))
    with only_start(start.folder, start.run):
        note_other_runs(start, reporter())
        return _run_here(loaded, cluster, start, layout, workers, worker_arguments(on, for_cluster), output)


def _run_here(
    recipe: Recipe,
    cluster: Cluster,
    start: RunStart,
    layout: str | None,
    workers: int | None,
    for_ranks: Sequence[str],
    output: Output,
) -> int:
    """Prepare, train and export a run that this process holds, and report it."""
    from trainshed.cli.console import human, print_report, reporter
    from trainshed.cli.train import exit_code, train_stage, training_text
    from trainshed.line import run_line, store_options

    prepared = run_line(recipe, cluster, id=start.id, workers=workers, reporter=reporter())
    budget = prepared.order.budget(prepared.steps)
    data = {
        "schema": "trainshed.run/1",
        "name": prepared.recipe.name,
        "id": prepared.id,
        "folder": str(prepared.folder),
        "steps": prepared.steps,
        "tokenizer": prepared.tokenizer and prepared.tokenizer.address,
        "sources": [
            {
                "name": source.name,
                "prefixes": list(source.prefixes),
                "documents": source.documents,
                "tokens": source.tokens,
                "reused": source.reused,
            }
            for source in prepared.sources
        ],
        "epochs": {each.name: each.epochs for each in budget},
    }
    lines = [f"run {prepared.recipe.name}/{prepared.id} in {prepared.folder}"]
    for source, share in zip(prepared.sources, budget, strict=False):
        files = f"{source.prefixes[0]}.bin" if len(source.prefixes) == 1 else f"{len(source.prefixes)} shards"
        lines.append(
            f"  {source.name}: {source.documents:,} documents, {source.tokens:,} tokens, proven"
            f"{' (already there)' if source.reused else ''}; {share.epochs or 0:.2f} epochs in {prepared.steps:,} steps"
            f"\n    {files}"
        )
    if prepared.tokenizer is not None:
        lines.append(f"  tokenizer: {prepared.tokenizer.vocab_size:,} tokens, {prepared.tokenizer.address}")
    if prepared.sources:
        size = sum(each.tokens for each in budget)
        lines.append(
            f"  order: ready for {prepared.steps:,} steps ({human(size, 'tokens')}), independent of any layout"
        )
    data["training"] = training = train_stage(prepared, layout, for_ranks, cluster)
    lines.append(training_text(training))
    if prepared.recipe.export is not None and training["step"] == training["steps"]:
        from trainshed.line.stages import export_run

        data["export"] = export_run(
            prepared.recipe,
            prepared.folder,
            reporter(),
            tokenizer=prepared.tokenizer,
            options=store_options(cluster),
        )
        lines.append(f"  exported and proven: {data['export']}")
        if prepared.recipe.serve is not None:
            from trainshed.line.serving import local_command

            data["serve"] = local_command(prepared.recipe, data["export"])
            lines.append(f"  serve it here with: {data['serve']}")
    print_report(data, output, "\n".join(lines))
    return exit_code(training)
