"""A plan in the terminal: the headline, memory against the card, the step's time, the pipeline, the other layouts."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rich.text import Text

from trainshed.cli.plan.bars import memory_bars, time_bar, timeline_rows
from trainshed.cli.plan.curve import scaling_rows
from trainshed.plan.report.answer import layout_flag, layout_words
from trainshed.plan.report.explain import differences, seconds
from trainshed.plan.report.run_words import run_words
from trainshed.plan.report.timeline import timeline

if TYPE_CHECKING:
    from rich.console import Console

    from trainshed.plan.budget.budget import Budget
    from trainshed.plan.performance.prediction import Prediction
    from trainshed.plan.report.answer import Answer

WIDEST = 128


def picture(answer: Answer, console: Console, *, top: int) -> str:
    """Draw an answer as wide as the console, in its colours if it has any."""
    width, colours = min(console.width, WIDEST), console.color_system is not None
    chosen = answer.chosen
    job = answer.question.job
    drawn = timeline(chosen, job.global_batch)
    capacity = chosen.memory.capacity
    blocks = [
        _headline(answer),
        [_title(f"memory by pipeline stage, GiB of {capacity:.1f}"), *memory_bars(chosen, width, colours=colours)]
        if len(chosen.stages) > 1
        else [_title(f"memory, GiB of {capacity:.1f}"), *memory_bars(chosen, width, colours=colours)],
        [_title(f"one step, {seconds(chosen.step_seconds)}"), *time_bar(chosen, width, colours=colours)],
        [_title(_timeline_title(drawn.shown, drawn.micro_batches)), *timeline_rows(drawn, width, colours=colours)],
    ]
    if answer.runners_up:
        blocks.append([_title(f"the best of {answer.considered:,} layouts"), *_table(answer, width, top)])
    if answer.budget is not None:
        blocks.append([_title("the run"), *_run(answer.budget, width)])
    if answer.scaling is not None:
        blocks.append([_title("scaling: the best layout at each number of GPUs"), *scaling_rows(answer.scaling, width)])
    for name, lines in (("rejected", _rejected(answer, top)), ("why", answer.explanation), ("notes", answer.notes)):
        if lines:
            blocks.append([_title(name), *(line for text in lines for line in _wrapped(text, width))])
    if answer.searched:
        blocks.append([Text.assemble(("use it  ", "bold"), f"--layout {layout_flag(chosen.layout)}")])
    with console.capture() as captured:
        for number, block in enumerate(blocks):
            if number:
                console.print()
            for line in block:
                console.print(line, soft_wrap=True)
    return captured.get()


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _headline(answer: Answer) -> list[Text]:
    chosen, job = answer.chosen, answer.question.job
    hardware = job.hardware
    where = f"{job.gpus:,} × {hardware.gpu_name}" + (f" ({hardware.machine})" if hardware.machine else "")
    asked = (
        f"{job.sequence_length:,} tokens × {job.global_batch:,} sequences a step, "
        f"{job.precision}, {answer.question.engine}" + ("" if answer.searched else ", layout as given")
    )
    memory = chosen.memory
    fits = Text(f"fits: {memory.total:.1f} of {memory.capacity:.1f} GiB", style="green")
    if not chosen.fits:
        fits = Text(f"DOES NOT FIT: {memory.total:.1f} of {memory.capacity:.1f} GiB", style="bold red")
    return [
        Text.assemble((answer.question.name, "bold"), f" on {where}"),
        Text(f"  {asked}", style="dim"),
        Text.assemble("  layout  ", (layout_words(chosen.layout), "bold cyan")),
        Text.assemble(
            "  step    ",
            (seconds(chosen.step_seconds), "bold"),
            _range(answer),
            f"   {chosen.mfu:.1%} MFU   {chosen.tokens_per_second_per_gpu:,.0f} tokens/s/GPU   "
            f"{chosen.tflops_per_gpu:,.0f} TFLOP/s/GPU",
        ),
        Text("  memory  ").append_text(fits),
    ]


def _range(answer: Answer) -> str:
    """What the step may be, from errors on models that no constant was fitted to."""
    between = answer.evidence.seconds if answer.evidence is not None else None
    return f" ({seconds(between[0])} to {seconds(between[1])})" if between is not None else ""


def _timeline_title(shown: int, count: int) -> str:
    if shown == count:
        return "the step in time" if count == 1 else f"the step in time, {count} micro-batches"
    return f"the step in time, {shown} of {count:,} micro-batches drawn: the middle repeats"


def _table(answer: Answer, width: int, top: int) -> list[Text]:
    shown = [answer.chosen, *answer.runners_up[: max(0, top - 1)]]
    layouts = [str(each.layout) for each in shown]
    room = max(len("layout"), *map(len, layouts))
    head = f"{'layout':<{room}}  {'micro':>5}  {'recompute':<9}  {'step':>7}  {'MFU':>5}  {'GiB':>5}"
    rows = []
    for each in shown:
        layout = each.layout
        figures = (
            f"{layout!s:<{room}}  {layout.micro_batch:>5}  {layout.recompute:<9}  "
            f"{seconds(each.step_seconds):>7}  {each.mfu:>5.1%}  {each.memory.total:>5.1f}"
        )
        rows.append((figures, _loses(each, answer.chosen)))
    # All reasons beside their layouts, or all below them.
    beside = all(len(figures) + len(loses) + 6 <= width for figures, loses in rows[1:])
    lines = [Text(f"    {head}", style="dim"), Text(f"  ▸ {rows[0][0]}", style="bold cyan")]
    for figures, loses in rows[1:]:
        line = Text(f"    {figures}")
        lines += [line.append(f"  {loses}", style="dim")] if beside else [line, Text(f"      {loses}", style="dim")]
    return lines


def _loses(other: Prediction, chosen: Prediction) -> str:
    change = other.step_seconds / chosen.step_seconds - 1
    why = differences(chosen.times, other.times, word="word")
    return f"{change:+.1%}".replace("-", "−") + (f": {why}" if why else "")


def _run(found: Budget, width: int) -> list[Text]:
    lines = []
    for label, words in run_words(found):
        wrapped = textwrap.wrap(words, width - 17, break_long_words=False)
        lines += [Text(f"    {label if not number else '':<12} {line}") for number, line in enumerate(wrapped)]
    return lines


def _rejected(answer: Answer, top: int) -> list[str]:
    lines = []
    for each in answer.rejected[:top]:
        alike = f" ({each.alike:,} such layouts)" if each.alike > 1 else ""
        lines.append(f"{each.layout}: {each.reason}{alike}")
    return lines


def _wrapped(text: str, width: int) -> list[Text]:
    lines = textwrap.wrap(text, width - 4, break_long_words=False, break_on_hyphens=False)
    return [Text(f"  {'· ' if not number else '  '}{line}") for number, line in enumerate(lines)]
