"""`trainshed data blend`: how much of each source a run sees."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.data.order import Budget


def blend(
    recipe: str,
    *overrides: str,
    on: str = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Show how many samples, tokens and epochs of each source a recipe's run will see.

    The recipe's data must be prepared (`trainshed run RECIPE`); nothing is made or changed.

    Parameters
    ----------
    recipe
        A recipe file, or the name of a shipped one.
    overrides
        Keys to change, as key.sub=value (train.steps=100).
    on
        The cluster file that says where the store is.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.recipe import load_cluster, load_recipe, split_overrides
    from trainshed.workflow import open_run

    for_recipe, for_cluster = split_overrides(overrides)
    run = open_run(load_recipe(recipe, for_recipe), load_cluster(on, for_cluster))
    budgets = run.order.budget(run.steps)
    sizes = [source.tokens for source in run.order.sources]
    data = {
        "schema": "trainshed.data.sampling.blend/1",
        "steps": run.steps,
        "samples": sum(budget.samples for budget in budgets),
        "sequence_length": run.order.sequence_length,
        "sources": [asdict(budget) | {"source_tokens": size} for budget, size in zip(budgets, sizes, strict=True)],
    }
    print_report(data, output, _table(run.steps, budgets, sizes))
    return 0


def _table(steps: int, budgets: list[Budget], sizes: list[int | None]) -> str:
    rows = [("source", "tokens", "weight", "samples", "tokens drawn", "epochs")]
    for budget, size in zip(budgets, sizes, strict=True):
        rows.append(
            (
                budget.name,
                "endless" if size is None else f"{size:,}",
                f"{budget.weight:.2%}",
                f"{budget.samples:,}",
                f"{budget.tokens:,}",
                "none" if budget.epochs is None else f"{budget.epochs:.2f}",
            )
        )
    samples, tokens = sum(budget.samples for budget in budgets), sum(budget.tokens for budget in budgets)
    rows.append((f"{steps:,} steps", "", "", f"{samples:,}", f"{tokens:,}", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = []
    for name, *figures in rows:
        cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
