"""`trainshed sweep`: many runs of one recipe, priced first, with one table and one page at their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RecipeName
from trainshed.cli.console import Flag, Output

if TYPE_CHECKING:
    from trainshed.workflow.sweeps.sweep import PlannedSweep


def sweep(
    recipe: RecipeName,
    *overrides: str,
    on: ClusterName = "local",
    parallel: int | None = None,
    random: int | None = None,
    seed: int = 0,
    dry_run: Flag = False,
    yes: Annotated[bool, Parameter(name=["-y", "--yes"], negative="")] = False,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Run a recipe once for each combination of the values that keys are given, and compare the runs.

    All runs are checked and priced before the first starts. Finished runs are not repeated, also those that
    `trainshed run` with the same keys has made; after a stop the same command goes on.

    Parameters
    ----------
    recipe
        A recipe file, or the name of a shipped one (`trainshed recipes`).
    overrides
        Keys to change, as for `run`; one with several values is swept: train.optimizer.lr=1e-4,3e-4. With --random
        also a range, drawn log-uniformly: train.optimizer.lr=1e-5..1e-3.
    on
        The cluster file that says where to run.
    parallel
        How many runs at once (default: 1 on this machine, 4 on a cluster).
    random
        Only this many runs: drawn from the grid, or from the ranges.
    seed
        What --random draws with; the same seed draws the same runs.
    dry_run
        Print the runs and what they take, and start none.
    yes
        Do not ask before jobs are sent to a cluster.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.workflow.sweeps.results import mark_text, sweep_rows
    from trainshed.workflow.sweeps.runners import runs_at_once, sweep_runner
    from trainshed.workflow.sweeps.sweep import plan_sweep, run_sweep

    planned = plan_sweep(recipe, overrides, on=on, draws=random, seed=seed, reporter=reporter())
    at_once = runs_at_once(planned, parallel)
    runner = sweep_runner(planned, at_once)
    if dry_run:
        data = {
            "schema": "trainshed.sweep.plan/1",
            "name": planned.name,
            "id": planned.id,
            "on": planned.cluster.name,
            "folder": planned.home,
            "planned": planned.totals(),
            "runs": [point.plan_plain() for point in planned.points],
        }
        print_report(data, output, _plan_text(planned))
        return 0
    reporter().note(_plan_text(planned))
    if not planned.is_here and not yes and not _confirmed(planned):
        return 1
    outcome = run_sweep(planned, runner, parallel=at_once, reporter=reporter())
    data = outcome.to_plain()
    columns, rows = sweep_rows(data)
    lines = [
        *table_lines(columns, rows),
        *filter(None, [mark_text(data)]),
        *_problems(data),
        f"report: {data['report']}",
    ]
    if outcome.exit_code > 128:
        lines.append("stopped: the same command goes on")
    print_report(data, output, "\n".join(lines))
    return outcome.exit_code


def _problems(data: dict[str, Any]) -> list[str]:
    return [
        f"{run['run']} {run['state']}: {run['why']}" for run in data["runs"] if run["why"] and run["state"] != "done"
    ]


def _plan_text(planned: PlannedSweep) -> str:
    """The runs with what they are planned to take."""
    keys = [key.rpartition(".")[2] for key, _ in planned.points[0].values]
    columns = [
        *keys,
        "steps",
        "layout",
        "GPUs" if not planned.is_here else "ranks",
        "hours",
        "GPU hours",
        "cost",
        "run",
    ]
    rows = [
        [
            *(value for _, value in point.values),
            "" if point.steps is None else f"{point.steps:,}",
            point.layout,
            str(point.gpus),
            _hours(point.hours),
            _hours(point.gpu_hours),
            _dollars(None if point.cost is None else point.cost.cost),
            point.run,
        ]
        for point in planned.points
    ]
    shown = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    lines = table_lines([columns[place] for place in shown], [[row[place] for place in shown] for row in rows])
    totals = planned.totals()
    known = [
        f"{_hours(totals['hours'])} hours one after another" if totals["hours"] is not None else "",
        f"{_hours(totals['gpu_hours'])} GPU hours" if totals["gpu_hours"] is not None else "",
        _dollars(totals["cost"]),
    ]
    sum_text = ", ".join(filter(None, known)) or "time and cost are not predicted here"
    count = len(planned.points)
    return "\n".join([*lines, f"{count} run{'s' if count > 1 else ''} on {planned.cluster.name}: {sum_text}"])


def _hours(hours: float | None) -> str:
    return "" if hours is None else f"{hours:,.1f}" if hours >= 0.1 else f"{hours:.2g}"


def _dollars(dollars: float | None) -> str:
    return "" if dollars is None else f"${dollars:,.0f}" if dollars >= 10 else f"${dollars:,.2f}"


def table_lines(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Set a table in columns, numbers to the right."""
    from trainshed.plan.report.line_chart import numeric_columns

    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    numeric = numeric_columns(len(columns), rows)

    def line(cells: list[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return [line(columns), *(line(row) for row in rows)]


def _confirmed(planned: PlannedSweep) -> bool:
    """Ask a person at a terminal; anybody else must have written --yes."""
    import sys

    from trainshed.cli.console import ask
    from trainshed.errors import InputError

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError(
            f"{len(planned.points)} jobs would be sent to {planned.cluster.name}, and nobody is here to be asked",
            hint="write --yes to send them, or --dry-run to look",
        )
    answer = ask(f"start {len(planned.points)} runs on {planned.cluster.name}? [y/N]")
    return (answer or "").lower() in ("y", "yes")
