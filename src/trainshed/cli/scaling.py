"""`trainshed scaling`: a scaling law fitted to finished runs, and what it predicts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RunName
from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.plan.scaling_law import Interval, LossPoint, LossPrediction, ScalingLaw


def scaling(
    *runs: RunName,
    parameters: str | None = None,
    tokens: str | None = None,
    compute: float | None = None,
    report: Path | None = None,
    seed: int = 0,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Fit L(N, D) = E + A/N^α + B/D^β to the validation losses of runs of several sizes, and predict others.

    Says the error of every constant and prediction, and how well the largest run is predicted from the others.

    Parameters
    ----------
    runs
        Runs (name, name/id, folder), sweeps (name/id, folder), or CSV files with parameters, tokens and loss.
    parameters
        Predict the loss of a model with this many parameters (7B), with --tokens.
    tokens
        Predict the loss after this many tokens (140B), with --parameters.
    compute
        Predict the best loss of this many FLOPs (1e21), and the model and tokens that reach it.
    report
        Write the plot and the tables to this .html file.
    seed
        What the bootstrap draws with.
    on
        The cluster whose store is searched for the runs.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.errors import InputError
    from trainshed.plan.report.scaling_law_page import scaling_law_page
    from trainshed.plan.scaling_law import fit_scaling_law

    if not runs:
        raise InputError("which runs?", hint="trainshed scaling SWEEP, or several runs; `trainshed ls` lists them")
    if (parameters is None) != (tokens is None):
        raise InputError("a size is --parameters and --tokens together", hint="write both, or --compute alone")
    if compute is not None and not 1e9 <= compute <= 1e36:
        raise InputError(
            f"{compute:g} is not the FLOPs of a training", where="--compute", hint="write for example 1e21"
        )
    if report is not None and report.suffix != ".html":
        raise InputError("a report is a page", where="--report", hint=f"write {report.stem}.html")
    size: tuple[float, float] | None = None
    if parameters is not None and tokens is not None:
        size = _count(parameters, "--parameters"), _count(tokens, "--tokens")
    law = fit_scaling_law([point for text in runs for point in _points(text, on)], seed=seed)
    predictions: list[LossPrediction] = []
    if size is not None:
        predictions.append(law.predict(*size))
    best: tuple[LossPrediction, Interval] | None = None
    if compute is not None:
        best = law.predict_compute(compute)
        predictions.append(best[0])
    if report is not None:
        try:
            report.write_text(scaling_law_page(law, predictions), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", where=str(report)) from None
    data = {
        "schema": "trainshed.scaling/1",
        **law.to_plain(),
        "predictions": [one.to_plain() for one in predictions],
        "best_parameters_interval": list(best[1]) if best is not None else None,
        "report": str(report) if report is not None else None,
    }
    print_report(data, output, _text(law, predictions, best, report))
    return 0


def _points(text: str, on: str) -> list[LossPoint]:
    """The points of what a person names: a table, a sweep or a run."""
    from trainshed.errors import InputError
    from trainshed.recipe import load_cluster
    from trainshed.workflow.known_runs import find_run
    from trainshed.workflow.sweeps.scaling_points import run_point, table_points
    from trainshed.workflow.sweeps.stored import find_sweep

    if Path(text).suffix == ".csv":
        return table_points(Path(text).expanduser())
    kept = find_sweep(text, load_cluster(on)) if "://" not in text else None
    if kept is None:
        known = find_run(text, on=on)
        return [run_point(known.run, known.store())]
    unfinished = [run["run"] for run in kept.body["runs"] if run["state"] != "done"]
    if unfinished:
        raise InputError(
            f"{len(unfinished)} of its runs are not done: {', '.join(unfinished[:4])}",
            where=text,
            hint="let the sweep finish, or name the runs that are done",
        )
    return [run_point(run, find_run(run, on=on).store()) for run in kept.runs]


def _count(text: str, flag: str) -> float:
    from trainshed.errors import InputError
    from trainshed.recipe.section import parse_count

    try:
        count = float(parse_count(text))
    except (ValueError, OverflowError):
        count = 0.0
    if not 1 <= count <= 1e18:
        raise InputError(f"`{text}` is not a number from 1 to 10¹⁸", where=flag, hint="write for example 7B")
    return count


def _text(
    law: ScalingLaw,
    predictions: list[LossPrediction],
    best: tuple[LossPrediction, Interval] | None,
    report: Path | None,
) -> str:
    from trainshed.plan.report.text import format_count
    from trainshed.plan.scaling_law import LEVEL

    intervals = law.intervals
    lines = [f"L(N, D) = E + A/N^alpha + B/D^beta over {len(law.points)} runs ({LEVEL:.0%} intervals)"]
    lines += [
        f"  {name:<6} {value:>10.4g}   {intervals[name][0]:.4g} to {intervals[name][1]:.4g}"
        for name, value in law.constants.items()
    ]
    lines.append(f"  residual {law.residual:.2%} of the loss")
    if law.held_out is not None and law.held_out_error is not None:
        point, predicted = law.held_out
        lines.append(
            f"  held out: {point.name} has {point.loss:.4f}, and the others predict {predicted:.4f} "
            f"({law.held_out_error:+.2%})"
        )
    else:
        lines.append("  held out: too few runs to leave one out")
    for one in predictions:
        lines.append(
            f"{format_count(one.parameters)} parameters, {format_count(one.tokens)} tokens ({one.compute:.3g} FLOPs): "
            f"loss {one.loss:.4f} ({one.interval[0]:.4f} to {one.interval[1]:.4f})"
        )
    if best is not None:
        low, high = best[1]
        lines.append(
            f"  the best size of {best[0].compute:.3g} FLOPs is {format_count(low)} to {format_count(high)} parameters"
        )
    lines += [f"wrote {report}"] if report is not None else []
    return "\n".join(lines)
