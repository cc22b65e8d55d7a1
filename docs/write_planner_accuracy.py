"""Write the figures of docs/planner.md, "How accurate", from the shipped measurements: the table and the plot.

    python docs/write_planner_accuracy.py

Only what stands between the two marks is written; the words around it are a person's.
"""

from __future__ import annotations

from pathlib import Path

from trainshed.plan.published.plot import accuracy_svg, short_source
from trainshed.plan.published.rows import read_tables, shipped_tables
from trainshed.plan.published.validation import PlannerValidation, ValidationScores, validate_rows

PAGE = Path(__file__).with_name("planner.md")
PICTURE = Path(__file__).parent / "images" / "planner-accuracy.svg"
BEGIN, END = "<!-- figures: python docs/write_planner_accuracy.py -->", "<!-- end of figures -->"
HEADING = "## How accurate"
FEWEST_ROWS = 5


def figures(validation: PlannerValidation) -> str:
    """Return what stands between the marks."""
    everything = validation.scores()
    by_source = validation.scores_by(lambda row: short_source(row.source))
    shown = {
        name: scores
        for name, scores in by_source.items()
        if max(scores.step_time.count, scores.memory.count) >= FEWEST_ROWS
    }
    fast, fit, regret = everything.above_10_percent_mfu, everything.out_of_memory, everything.regret
    lines = [
        BEGIN,
        f"{everything.rows:,} published rows, {everything.skipped:,} skipped (each with its reason: "
        "`trainshed plan validate`). Errors are |predicted / measured − 1|, averaged; *null* is a constant TFLOP/s per "
        "GPU, the median of the same rows. These are the rows that come with Trainshed, among them those that its "
        "constants were fitted to.",
        "",
        "| source | rows | step time | median | bias | null | memory rows | memory | bias |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(_line(name, scores) for name, scores in shown.items()),
        _line("**everything**", everything),
        "",
        f"Rows above 10% MFU: step time {_percent(fast.mape)} (null {_percent(fast.null_mape)}) over {fast.count:,}. "
        f"Out of memory: balanced accuracy {_number(fit.balanced_accuracy)}, precision {_number(fit.precision)}, "
        f"recall {_number(fit.recall)} over {fit.positives:,} that ran out and {fit.negatives:,} that ran. "
        f"Regret over {regret.groups} groups of measured layouts: our first choice {_percent(regret.top1_mean)} slower "
        f"than the best on average ({_percent(regret.top1_worst)} at worst), the best of our first three "
        f"{_percent(regret.top3_mean)} ({_percent(regret.top3_worst)} at worst).",
        "",
        "![Predicted against measured, step time and memory](images/planner-accuracy.svg)",
        END,
    ]
    return "\n".join(lines)


def placed(page: str, block: str) -> str:
    """Return the page with the figures in place of the old ones, else at the end of their section."""
    if BEGIN in page and END in page:
        before, _, rest = page.partition(BEGIN)
        return before + block + rest.partition(END)[2]
    if HEADING not in page:
        return f"{page.rstrip()}\n\n{HEADING}\n\n{block}\n"
    before, _, rest = page.partition(HEADING)
    section, mark, after = rest.partition("\n## ")
    return f"{before}{HEADING}{section.rstrip()}\n\n{block}\n{mark}{after}"


def _line(name: str, scores: ValidationScores) -> str:
    time, memory = scores.step_time, scores.memory
    cells = [str(time.count or ""), *map(_percent, (time.mape, time.median)), _percent(time.bias, signed=True)]
    cells += [_percent(time.null_mape), str(memory.count or ""), _percent(memory.mape)]
    return f"| {name} | {' | '.join([*cells, _percent(memory.bias, signed=True)])} |"


def _percent(value: float | None, *, signed: bool = False) -> str:
    return "" if value is None else f"{value:{'+' if signed else ''}.1%}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    found = validate_rows(read_tables(shipped_tables()))
    PICTURE.write_text(accuracy_svg(found), encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# The planner\n"
    PAGE.write_text(placed(page, figures(found)), encoding="utf-8")
