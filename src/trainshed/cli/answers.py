"""`trainshed status RUN --answers`: what the model said to the prompts of its recipe, step by step, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainshed.workflow.known_runs import KnownRun

SHOWN_STEPS = 4
"""Columns of the table: the first step, and the last ones."""


def answers_report(known: KnownRun) -> dict[str, Any]:
    """Return every answer of a run, by step; raises where it has none, or where its folder is not seen here."""
    from trainshed.data.prompts import read_answers
    from trainshed.errors import NotFound
    from trainshed.run_folder import ANSWERS
    from trainshed.storage import join

    store = known.store()
    steps = read_answers(store, "")
    if not steps:
        raise NotFound(
            "this run has stored no answers",
            where=join(store.url, ANSWERS),
            hint="write `data: {validation: {prompts: [...]}}`: they are answered at each validation",
        )
    return {
        "schema": "trainshed.answers/1",
        "run": known.run,
        "folder": known.home,
        "steps": [{"step": step.step, "answers": [dict(answer) for answer in step.answers]} for step in steps],
    }


def answers_text(data: dict[str, Any], width: int | None = None) -> str:
    """Write the answers as a table: a row for each prompt, a column for each step."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    steps = data["steps"]
    shown = steps if len(steps) <= SHOWN_STEPS else [steps[0], *steps[1 - SHOWN_STEPS :]]
    table = Table(show_lines=True)
    table.add_column("prompt")
    for step in shown:
        table.add_column(f"after step {step['step']:,}")
    prompts = list(dict.fromkeys(answer["prompt"] for step in shown for answer in step["answers"]))
    for prompt in prompts:
        cells = [_cell(step["answers"], prompt) for step in shown]
        table.add_row(*(Text(cell) for cell in (prompt, *cells)))
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        count = f"{len(prompts)} prompt{'s' if len(prompts) != 1 else ''}"
        times = f"at {len(steps)} step{'s' if len(steps) != 1 else ''}"
        console.print(f"{data['run']}: {count}, answered {times}", soft_wrap=True)
        console.print(table)
    hidden = len(steps) - len(shown)
    more = f"{hidden} more in {data['folder']}/answers; -o json shows them\n" if hidden else ""
    return capture.get() + more


def _cell(answers: list[dict[str, Any]], prompt: str) -> str:
    """Return an answer as a cell; it ends with … where the model had not ended it."""
    answer = next((answer for answer in answers if answer["prompt"] == prompt), None)
    if answer is None:
        return ""
    text = answer["answer"] if answer["answer"] is not None else f"tokens {answer['tokens']}"
    return text if answer["ended"] else f"{text}…"
