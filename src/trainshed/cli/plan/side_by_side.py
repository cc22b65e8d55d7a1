"""`trainshed plan` with several GPUs: one plan for each, side by side."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from trainshed.cli.console import Output, print_report
from trainshed.cli.plan.asking import ask
from trainshed.cli.plan.flags import Flags
from trainshed.cli.plan.picture import WIDEST
from trainshed.errors import InputError
from trainshed.plan.planner import answer
from trainshed.plan.report.answer import Answer
from trainshed.plan.report.explain import seconds
from trainshed.plan.report.run_words import hours

SCHEMA = "trainshed.plan-comparison/1"
_HEAD = ("", "GPU", "GPUs", "layout", "micro", "recompute", "step", "MFU", "tokens/s", "GiB", "length", "cost")


@dataclass(frozen=True)
class Compared:
    """One GPU: its plan, or why it has none."""

    gpu: str
    plan: Answer | None = None
    refused: InputError | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the report of the plan, or the error, as JSON has it."""
        error = None if self.refused is None else {"what": self.refused.what, "hint": self.refused.hint}
        return {"gpu": self.gpu, "plan": None if self.plan is None else self.plan.to_plain(), "error": error}


def compare(
    flags: Flags, gpus: tuple[str, ...], report: Path | None, *, top: int, explained: bool, output: Output
) -> int:
    """Plan for each GPU and show the plans together; an error only where no GPU has one."""
    if report is not None:
        raise InputError("a report is of one plan", where="--report", hint="name one --gpu, or write -o json")
    if flags.machine is not None:
        raise InputError(
            "a machine has one kind of GPU", where="--machine", hint="leave it out: each --gpu has a machine of its own"
        )
    flags.check()
    found = [_planned(replace(flags, gpu=gpu), gpu, top, explained) for gpu in gpus]
    if all(each.plan is None for each in found):
        assert found[0].refused is not None
        raise found[0].refused
    print_report(
        {"schema": SCHEMA, "plans": [each.to_plain() for each in found]},
        output,
        "" if output == "json" else side_by_side(found, min(Console().width, WIDEST)),
    )
    return 0


def _planned(flags: Flags, gpu: str, top: int, explained: bool) -> Compared:
    try:
        return Compared(gpu, answer(ask(flags), top=top, explained=explained))
    except InputError as refused:
        if refused.where in ("--gpu", "--model", "--tokens", "--seq", "--calibration"):
            # What is wrong for every GPU, or no GPU at all, is not a row of a table.
            raise
        return Compared(gpu, refused=refused)


def side_by_side(found: list[Compared], width: int) -> str:
    """Write the plans as a table, the fastest marked, then what is to be said of all or of one."""
    plans = [(each.gpu, each.plan) for each in found if each.plan is not None]
    fastest = max(plans, key=lambda each: _tokens_per_second(each[1]))[1]
    first = plans[0][1]
    job = first.question.job
    rows = [_HEAD, *(_cells(plan, plan is fastest) for _, plan in plans)]
    used = [column for column in range(len(_HEAD)) if column == 0 or any(row[column] for row in rows[1:])]
    widths = {column: max(len(row[column]) for row in rows) for column in used}
    lines = [
        f"{first.question.name}: {job.sequence_length:,} tokens × {job.global_batch:,} sequences a step, "
        f"{job.precision}, {first.question.engine}",
        "",
    ]
    for row in rows:
        cells = [f"{row[column]:{'<' if column in (0, 1, 3, 5) else '>'}{widths[column]}}" for column in used]
        lines.append("  ".join(cells).rstrip())
    for each in found:
        if each.refused is not None:
            lines += textwrap.wrap(f"  {each.gpu}: {each.refused.what}", width, subsequent_indent="    ")
    lines += ["", "notes", *_notes(plans, width)]
    return "\n".join(lines)


def _cells(plan: Answer, fastest: bool) -> tuple[str, ...]:
    chosen, job = plan.chosen, plan.question.job
    run = plan.budget.run if plan.budget is not None else None
    return (
        "▸" if fastest else "",
        job.hardware.gpu_name,
        f"{job.gpus:,}",
        str(chosen.layout),
        str(chosen.layout.micro_batch),
        chosen.layout.recompute,
        seconds(chosen.step_seconds),
        f"{chosen.mfu:.1%}",
        f"{_tokens_per_second(plan):,.0f}",
        f"{chosen.memory.total:.1f} of {chosen.memory.capacity:.1f}",
        "" if run is None else hours(run.hours),
        "" if run is None or run.cost is None else f"${run.cost:,.0f}",
    )


def _tokens_per_second(plan: Answer) -> float:
    return plan.chosen.tokens_per_second_per_gpu * plan.question.job.gpus


def _notes(plans: list[tuple[str, Answer]], width: int) -> list[str]:
    """Notes of all plans once, then those of some with the GPUs they are of."""
    said: dict[str, list[str]] = {}
    for _, plan in plans:
        for note in plan.notes:
            said.setdefault(note, []).append(plan.question.job.hardware.gpu_name)
    shared = [note for note, whose in said.items() if len(whose) == len(plans)]
    own = [f"{', '.join(whose)}: {note}" for note, whose in said.items() if len(whose) < len(plans)]
    return [
        line
        for note in (*shared, *own)
        for line in textwrap.wrap(f"  · {note}", width, subsequent_indent="    ", break_long_words=False)
    ]
