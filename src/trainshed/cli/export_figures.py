"""A run's figures for another tool, when it has ended; and the dashboard for those that Prometheus reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RunName
from trainshed.cli.console import Output, print_report

Tool = Literal["tensorboard", "dllogger", "wandb", "mlflow", "trackio"]


def export_figures(
    run: RunName,
    /,
    *overrides: str,
    to: Tool,
    out: Path | None = None,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> None:
    """Write the figures of a run for TensorBoard, DLLogger, Weights & Biases, MLflow or trackio.

    For a step that was done twice the later attempt counts. A tracker that has steps of the run is sent the others.

    Parameters
    ----------
    run
        The run: its name, name/id, or folder.
    overrides
        The tool's options, as observe.wandb.project=NAME; left out: those of the run's recipe.
    to
        The tool.
    out
        The folder of files that are written; left out: the run's own.
    on
        The cluster in whose store the run is.
    output
        `json` for programs.
    """
    from dataclasses import asdict

    from trainshed.errors import InputError
    from trainshed.observe.exporters import ExportedRun
    from trainshed.observe.exporters.export_run import export_run
    from trainshed.plugins import plugins_not_run
    from trainshed.recipe import load_cluster, parse_recipe, to_plain
    from trainshed.recipe.phase_spans import written_steps
    from trainshed.run_folder import RECIPE_FILE
    from trainshed.storage import open_store
    from trainshed.workflow import store_options
    from trainshed.workflow.known_runs import find_run

    if foreign := next((word for word in overrides if not word.startswith("observe.")), None):
        raise InputError(f"`{foreign}` is not an option of a tool", hint=f"write observe.{to}.KEY=VALUE")
    known = find_run(run, on=on)
    store, folder = open_store(known.address, store_options(load_cluster(on)))
    with plugins_not_run():
        recipe = parse_recipe(store.read(f"{folder}/{RECIPE_FILE}".lstrip("/")).decode(), overrides)
    if known.folder is None and out is None:
        raise InputError(
            f"the run {known.run} is not on a disk of this machine", where=known.address, hint="write --out DIR"
        )
    config = recipe.model.config
    exported = ExportedRun(
        known.name,
        known.id,
        known.folder or out or Path(),
        sequence_length=recipe.data.sequence_length or (config.max_positions if config is not None else 1),
        steps=written_steps(recipe),
        config=to_plain(recipe, defaults=False),
    )
    report = export_run(store, folder, to, recipe.observe, exported, out=out)
    data = {"schema": "trainshed.export-figures/1", "run": known.run, **asdict(report)}
    already = "" if report.written else "; it had all of them already"
    text = f"{known.run}: {report.written} points of {report.steps} steps written to {to}: {report.to}{already}"
    print_report(data, output, text)


def grafana(*, out: Path | None = None) -> None:
    """Print the Grafana dashboard of the figures that `observe.prometheus` serves.

    Import it in Grafana: Dashboards, New, Import; it asks for the Prometheus to read.

    Parameters
    ----------
    out
        A new file to write it to; left out: standard output.
    """
    import sys

    from trainshed.errors import InputError
    from trainshed.observe.exporters.prometheus import grafana_dashboard

    text = grafana_dashboard().read_text(encoding="utf-8")
    if out is None:
        sys.stdout.write(text)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(out), hint="name a new file") from None
