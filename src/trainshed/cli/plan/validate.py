"""`trainshed plan validate`: the planner against published measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.plan.published.validation import Scores, Validation

_MOST_SOURCES = 14


def validate(
    *tables: str,
    plot: Path | None = None,
    worst: int = 0,
    columns: Annotated[bool, Parameter(negative="")] = False,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Predict published measurements and say how far off the predictions are.

    Parameters
    ----------
    tables
        CSV files of measurements, or of runs that ran out of memory (default: those that come with Trainshed).
    plot
        Draw predicted against measured into this SVG file.
    worst
        Show this many of the rows that were predicted worst.
    columns
        Show the columns that a table has, and predict nothing.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.plan.published.rows import all_rows, column_names, shipped_tables
    from trainshed.plan.published.validation import validate as validate_rows

    if columns:
        names = column_names()
        print_report({"schema": "trainshed.plan.columns/1", "columns": names}, output, ",".join(names))
        return 0
    files = list(tables) or [str(path) for path in shipped_tables()]
    found = validate_rows(all_rows(files))
    if plot is not None:
        _draw(found, plot)
    data = {
        "schema": "trainshed.plan.validation/1",
        "tables": [Path(file).name for file in files],
        **found.to_plain(),
    }
    if worst:
        data["worst"] = [one.to_plain() for one in found.worst(worst)]
    print_report(data, output, _text(found, worst, shipped=not tables))
    return 0


def _draw(found: Validation, plot: Path) -> None:
    from trainshed.errors import InputError
    from trainshed.plan.published.plot import accuracy_svg

    if plot.suffix.lower() != ".svg":
        raise InputError("plots are drawn as SVG", where=str(plot), hint=f"write --plot {plot.with_suffix('.svg')}")
    if not plot.absolute().parent.is_dir():
        raise InputError("there is no such folder", where=str(plot.parent), hint="make it first")
    plot.write_text(accuracy_svg(found), encoding="utf-8")


def _text(found: Validation, worst: int, *, shipped: bool) -> str:
    from trainshed.plan.published.plot import short_source

    everything = found.scores()
    by_source = found.scores_by(lambda row: short_source(row.source))
    by_source = {name: scores for name, scores in by_source.items() if scores.rows > scores.skipped}
    shown = list(by_source.items())[:_MOST_SOURCES]
    width = max(len(name) for name, _ in [("everything", None), *shown])
    lines = [
        f"{everything.rows:,} rows, {everything.rows - everything.skipped:,} predicted, {everything.skipped:,} skipped",
        "",
        f"{'':<{width}}  {'step time':^37}  {'memory':^20}  {'out of memory':^13}  {'regret':^13}",
        f"{'':<{width}}  {'rows':>5} {'mean':>7} {'median':>7} {'bias':>7} {'null':>7}"
        f"  {'rows':>5} {'mean':>6} {'bias':>7}  {'balanced':>13}  {'top 1':>6} {'top 3':>6}",
        *(_line(name, scores, width) for name, scores in shown),
    ]
    if len(by_source) > len(shown):
        lines.append(f"{f'({len(by_source) - len(shown)} more: -o json)':<{width}}")
    lines += [_line("everything", everything, width), "", *_words(everything)]
    if shipped:
        lines.append("these rows come with Trainshed: its constants were fitted to some of them")
    if everything.skipped:
        lines += ["", "skipped"]
        lines += [f"  {count:>5}  {reason}" for reason, count in found.reasons().items()]
    if worst:
        lines += ["", "predicted worst (predicted / measured)"]
        for one in found.worst(worst):
            place = f"{short_source(one.row.source)}, row {one.row.number}"
            lines.append(f"  {one.prediction.step_seconds:>9.3f} / {one.step_seconds:<9.3f} s  {place}: {one.words}")
    return "\n".join(lines)


def _line(name: str, scores: Scores, width: int) -> str:
    time, memory, fit, regret = scores.step_time, scores.memory, scores.out_of_memory, scores.regret
    balanced = "" if fit.balanced_accuracy is None else f"{fit.balanced_accuracy:.3f}"
    return (
        f"{name:<{width}}  {time.count or '':>5} {_percent(time.mape)} {_percent(time.median)} "
        f"{_percent(time.bias, signed=True)} {_percent(time.null_mape)}  {memory.count or '':>5} "
        f"{_percent(memory.mape, 6)} {_percent(memory.bias, signed=True)}  {balanced:>13}  "
        f"{_percent(regret.top1_mean, 6)} {_percent(regret.top3_mean, 6)}"
    ).rstrip()


def _words(scores: Scores) -> list[str]:
    """What the table has no room for."""
    fast, fit, regret = scores.above_10_percent_mfu, scores.out_of_memory, scores.regret
    lines: list[str] = []
    if fast.count:
        lines.append(
            f"above 10% MFU: step time off by {fast.mape:.1%} on {fast.count:,} rows, the null model by "
            f"{fast.null_mape:.1%}"
        )
    if fit.recall is not None:
        caught = f"{fit.recall:.1%} of {fit.positives:,} runs that ran out of memory were predicted to"
        right = "none was predicted" if fit.precision is None else f"{fit.precision:.1%} of such predictions were right"
        lines.append(f"{caught}; {right}")
    if regret.top1_worst is not None and regret.top3_worst is not None:
        lines.append(
            f"regret over {regret.groups} groups of measured layouts: worst {regret.top1_worst:.1%} for our first "
            f"choice, {regret.top3_worst:.1%} for the best of our first three"
        )
    lines.append("null: a constant TFLOP/s per GPU, the median of the same source, GPU and precision")
    return lines


def _percent(value: float | None, width: int = 7, *, signed: bool = False) -> str:
    return f"{'':>{width}}" if value is None else f"{value:>{'+' if signed else ''}{width}.1%}"
