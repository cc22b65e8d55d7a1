"""Plans in the terminal: one with its memory, time, pipeline and other layouts; several side by side.

Bars are blocks of colour, or letters where there are no colours.
"""

from __future__ import annotations

import textwrap
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from trainshed.cli.console import Output, print_report
from trainshed.errors import InputError
from trainshed.plan.layout import describe_layout, format_layout
from trainshed.plan.performance.memory import GpuMemory
from trainshed.plan.performance.prediction import LayoutPrediction, StagePrediction
from trainshed.plan.planner import Plan, make_plan
from trainshed.plan.report.charts import StepTimeline, TimelineBox, step_timeline
from trainshed.plan.report.text import (
    MEMORY_PARTS,
    TIME_PARTS,
    BarPart,
    describe_run,
    describe_trained,
    format_hours,
    format_seconds,
    format_share,
    part_amounts,
    share_cells,
    time_differences,
)
from trainshed.plan.search.scaling import BREAKS_BELOW, ScalingCurve, ScalingPoint
from trainshed.workflow.plan_request import PlanFlags, request_from_flags

if TYPE_CHECKING:
    from trainshed.plan.budget.budget import RunBudget


IDLE = "·"
MOST_STAGES = 12
"""Stages that get a line of their own; of more, some in the middle are left out, and that is said."""
_NUMBERED_CELLS = 2.0
"""Cells of the shortest box from which boxes carry the number of their micro-batch."""
_BOX_COLOURS = {
    "forward": ("#4269d0", "#6f8de0"),
    "backward": ("#3ca951", "#6fc57f"),
    "weights": ("#efb118", "#f5cc66"),
    "reduce": ("#ff725c", "#ff725c"),
    "optimizer": ("#9c6b4e", "#9c6b4e"),
}
_BOX_LETTERS = {
    "forward": ("▒", "░"),
    "backward": ("█", "▓"),
    "weights": ("w", "w"),
    "reduce": ("=", "="),
    "optimizer": ("+", "+"),
}
BOX_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "weights": "weight gradients",
    "reduce": "gradients reduced",
    "optimizer": "optimizer",
}


def _part_cells(part: BarPart, count: int, *, colours: bool) -> Text:
    return Text("█" * count, Style(color=part.colour)) if colours else Text(part.symbol * count)


def _swatch(part: BarPart, *, colours: bool) -> Text:
    return Text("■", Style(color=part.colour)) if colours else Text(part.symbol)


def legend(entries: list[tuple[Text, str]], width: int, *, indent: int = 4) -> list[Text]:
    """Set marks and their labels in as many lines as they need."""
    lines, line = [], Text(" " * indent)
    for mark, words in entries:
        if line.cell_len > indent and line.cell_len + len(words) + 4 > width:
            lines.append(line)
            line = Text(" " * indent)
        if line.cell_len > indent:
            line.append("   ")
        line = line.append_text(mark).append(f" {words}")
    return [*lines, line]


def time_bar(prediction: LayoutPrediction, width: int, *, colours: bool) -> list[Text]:
    """The step as one bar, and below it what each part takes."""
    parts = part_amounts(prediction.times, TIME_PARTS)
    bar = Text("    ")
    for (part, _), cells in zip(parts, share_cells([share for _, share in parts], width - 6), strict=True):
        bar.append_text(_part_cells(part, cells, colours=colours))
    total = prediction.times.total
    entries = [
        (_swatch(part, colours=colours), f"{part.label} {format_seconds(share)} {format_share(share / total)}")
        for part, share in parts
    ]
    return [bar, *legend(entries, width)]


def memory_bars(prediction: LayoutPrediction, width: int, *, colours: bool) -> list[Text]:
    """A bar for every stage, against what the card has."""
    capacity = prediction.memory.capacity
    longest = max(capacity, prediction.memory.total)
    room = width - 22
    lines: list[Text] = []
    for stage in _shown_stages(prediction):
        if stage is None:
            lines.append(Text("     ⋮", style="dim"))
            continue
        lines.append(_memory_bar(stage, room / longest, colours=colours))
    present = {part.key for stage in prediction.stages for part, _ in part_amounts(stage.memory, MEMORY_PARTS)}
    fullest = dict(part_amounts(prediction.memory, MEMORY_PARTS))
    entries = [
        # The figures are the fullest stage's, so that they add up to its bar.
        (_swatch(part, colours=colours), f"{part.label} {fullest[part]:.1f}" if part in fullest else part.label)
        for part in MEMORY_PARTS
        if part.key in present
    ]
    return [*lines, *legend(entries, width)]


def _shown_stages(prediction: LayoutPrediction) -> list[StagePrediction | None]:
    stages = list(prediction.stages)
    if len(stages) <= MOST_STAGES:
        return [*stages]
    fullest = max(stages, key=lambda stage: stage.memory.total)
    kept = sorted({*range(MOST_STAGES // 2), fullest.stage, *range(len(stages) - 3, len(stages))})
    shown: list[StagePrediction | None] = []
    for before, place in zip([-1, *kept], kept, strict=False):
        if place > before + 1:
            shown.append(None)
        shown.append(stages[place])
    return shown


def _memory_bar(stage: StagePrediction, cells_per_gib: float, *, colours: bool) -> Text:
    memory: GpuMemory = stage.memory
    parts = part_amounts(memory, MEMORY_PARTS)
    filled = max(1, round(memory.total * cells_per_gib))
    bar = Text()
    for (part, _), cells in zip(parts, share_cells([share for _, share in parts], filled), strict=True):
        bar.append_text(_part_cells(part, cells, colours=colours))
    edge = round(memory.capacity * cells_per_gib)
    if filled <= edge:
        bar.append(IDLE * (edge - filled), style="dim").append("│")
        figure = Text(f" {memory.total:5.1f}")
    else:
        bar = bar[:edge].append("│", style="bold red").append_text(bar[edge:])
        figure = Text(f" {memory.total:5.1f} +{memory.total - memory.capacity:.1f} GiB", style="bold red")
    return Text(f"{stage.stage:>5} ").append_text(bar).append_text(figure)


def timeline_rows(drawn: StepTimeline, width: int, *, colours: bool) -> list[Text]:
    """A line for every rank, time from left to right."""
    room = width - 8
    ranks = range(drawn.ranks)
    if drawn.ranks > MOST_STAGES:
        ranks = range(0, drawn.ranks, -(-drawn.ranks // MOST_STAGES))
    counted = [box for box in drawn.boxes if box.kind in ("forward", "backward", "weights")]
    # Numbers in all boxes or in none: in some of them they would look like a pattern.
    numbered = min(box.end - box.start for box in counted) / drawn.seconds * room >= _NUMBERED_CELLS
    by_chunk = any(box.chunk for box in counted)
    lines = []
    for rank in ranks:
        boxes = sorted((box for box in drawn.boxes if box.rank == rank), key=lambda box: box.start)
        row = _timeline_row(boxes, drawn.seconds, room, colours=colours, numbered=numbered, by_chunk=by_chunk)
        lines.append(Text(f"{rank:>5} ").append_text(row))
    kinds = dict.fromkeys(box.kind for box in drawn.boxes)
    entries = [(_box_mark(kind, colours=colours), BOX_WORDS[kind]) for kind in BOX_WORDS if kind in kinds]
    return [*lines, *legend([*entries, (Text(IDLE, style="dim"), "waiting")], width)]


def _box_mark(kind: str, *, colours: bool) -> Text:
    return Text("■", Style(color=_BOX_COLOURS[kind][0])) if colours else Text(_BOX_LETTERS[kind][0])


def _timeline_row(
    boxes: list[TimelineBox], total: float, room: int, *, colours: bool, numbered: bool, by_chunk: bool
) -> Text:
    starts = [box.start for box in boxes]
    covering: list[TimelineBox | None] = []
    for cell in range(room):
        middle = (cell + 0.5) / room * total
        place = bisect_right(starts, middle) - 1
        covering.append(boxes[place] if place >= 0 and middle < boxes[place].end else None)
    row = Text()
    cell = 0
    while cell < room:
        box, end = covering[cell], cell + 1
        while end < room and covering[end] is box:
            end += 1
        row.append_text(_box_text(box, end - cell, colours=colours, numbered=numbered, by_chunk=by_chunk))
        cell = end
    return row


def _box_text(box: TimelineBox | None, cells: int, *, colours: bool, numbered: bool, by_chunk: bool) -> Text:
    if box is None:
        return Text(IDLE * cells, style="dim")
    shade = (box.chunk if by_chunk else box.micro_batch) % 2
    if not colours:
        return Text(_BOX_LETTERS[box.kind][shade] * cells)
    number = str(box.micro_batch) if numbered and box.kind in ("forward", "backward", "weights") else ""
    shown = number if len(number) < cells else ""
    return Text(f"{shown:<{cells}}", Style(color="#000000", bgcolor=_BOX_COLOURS[box.kind][shade]))


_BAR, _LEAST_BAR = 20, 8
_FIGURE_CELLS = 45
"""Cells that everything but the layout and the bar takes."""
_SCALING_LINE = "{gpus:>7}  {layout:<{room}}  {step:>7}  {mfu:>5}  {rate:>10}  "


def scaling_rows(curve: ScalingCurve, width: int) -> list[Text]:
    """Draw a scaling curve: efficiency against the smallest number of GPUs that fits, and where it breaks."""
    longest = max((len(str(point.prediction.layout)) for point in curve.points if point.prediction), default=6)
    bar = max(_LEAST_BAR, min(_BAR, width - _FIGURE_CELLS - longest))
    room = min(longest, width - _FIGURE_CELLS - bar)
    head = _SCALING_LINE.format(gpus="GPUs", layout="layout", room=room, step="step", mfu="MFU", rate="tokens/s")
    lines = [Text(f"{head}efficiency", style="dim")]
    lines += [_scaling_row(point, room, bar, width, broken=point.gpus == curve.breaks_at) for point in curve.points]
    if curve.breaks_at is not None:
        words = f"below {BREAKS_BELOW:.0%} from {curve.breaks_at:,} GPUs on: {curve.reason}"
        lines += [Text(f"    {line}", style="yellow") for line in textwrap.wrap(words, width - 4)]
    return lines


def _scaling_row(point: ScalingPoint, room: int, bar: int, width: int, *, broken: bool) -> Text:
    best = point.prediction
    if best is None or point.efficiency is None or point.tokens_per_second is None:
        words = f"{point.gpus:>7,}  no layout: {point.reason}"
        return Text(words if len(words) <= width else f"{words[: width - 1]}…", style="dim")
    layout = str(best.layout)
    figures = _SCALING_LINE.format(
        gpus=f"{point.gpus:,}",
        layout=layout if len(layout) <= room else f"{layout[: room - 1]}…",
        room=room,
        step=format_seconds(best.step_seconds),
        mfu=f"{best.mfu:.1%}",
        rate=f"{point.tokens_per_second:,.0f}",
    )
    cells = min(bar, round(point.efficiency * bar))
    style = "yellow" if broken else ""
    return Text(figures).append("█" * cells, style=style or "cyan").append(f" {point.efficiency:.0%}", style=style)


WIDEST = 128


def picture(answer: Plan, console: Console, *, top: int) -> str:
    """Draw an answer as wide as the console, in its colours if it has any."""
    width, colours = min(console.width, WIDEST), console.color_system is not None
    chosen = answer.chosen
    training = answer.request.training
    drawn = step_timeline(chosen, training.global_batch)
    capacity = chosen.memory.capacity
    blocks = [
        _headline(answer),
        [_title(f"memory by pipeline stage, GiB of {capacity:.1f}"), *memory_bars(chosen, width, colours=colours)]
        if len(chosen.stages) > 1
        else [_title(f"memory, GiB of {capacity:.1f}"), *memory_bars(chosen, width, colours=colours)],
        [_title(f"one step, {format_seconds(chosen.step_seconds)}"), *time_bar(chosen, width, colours=colours)],
        [_title(_timeline_title(drawn.shown, drawn.micro_batches)), *timeline_rows(drawn, width, colours=colours)],
    ]
    if answer.runners_up:
        blocks.append([_title(f"the best of {answer.considered:,} layouts"), *_layouts_table(answer, width, top)])
    if answer.budget is not None:
        blocks.append([_title("the run"), *_run_lines(answer.budget, width)])
    if answer.scaling is not None:
        blocks.append([_title("scaling: the best layout at each number of GPUs"), *scaling_rows(answer.scaling, width)])
    for name, lines in (("rejected", _rejected(answer, top)), ("why", answer.explanation), ("notes", answer.notes)):
        if lines:
            blocks.append([_title(name), *(line for text in lines for line in _wrapped(text, width))])
    if answer.searched:
        blocks.append([Text.assemble(("use it  ", "bold"), f"--layout {format_layout(chosen.layout)}")])
    with console.capture() as captured:
        for number, block in enumerate(blocks):
            if number:
                console.print()
            for line in block:
                for part in _folded(line, console, width):
                    console.print(part, soft_wrap=True)
    return captured.get()


def _folded(line: Text, console: Console, width: int) -> list[Text]:
    """A line in as many as a narrow terminal needs, cut between words, the others indented below the first."""
    if line.cell_len <= width:
        return [line]
    # A title stands at the margin, and so does the rest of it.
    indent = _FOLDED_INDENT if line.plain.startswith(" ") else 0
    first, *others = line.wrap(console, width - indent)
    return [first, *(Text(" " * indent).append_text(part) for part in others)]


_FOLDED_INDENT = len("  layout  ")


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _headline(answer: Plan) -> list[Text]:
    chosen, training = answer.chosen, answer.request.training
    hardware = training.hardware
    where = f"{training.gpus:,} × {hardware.gpu_name}" + (f" ({hardware.machine})" if hardware.machine else "")
    asked = (
        f"{training.sequence_length:,} tokens × {training.global_batch:,} sequences a step, "
        f"{training.precision}, {answer.request.engine}" + ("" if answer.searched else ", layout as given")
    )
    memory = chosen.memory
    fits = Text(f"fits: {memory.total:.1f} of {memory.capacity:.1f} GiB", style="green")
    if not chosen.fits:
        fits = Text(f"DOES NOT FIT: {memory.total:.1f} of {memory.capacity:.1f} GiB", style="bold red")
    trained = describe_trained(training, memory)
    return [
        Text.assemble((answer.request.name, "bold"), f" on {where}"),
        Text(f"  {asked}", style="dim"),
        Text.assemble("  layout  ", (describe_layout(chosen.layout), "bold cyan")),
        Text.assemble(
            "  step    ",
            (format_seconds(chosen.step_seconds), "bold"),
            _range(answer),
            f"   {chosen.mfu:.1%} MFU   {chosen.tokens_per_second_per_gpu:,.0f} tokens/s/GPU   "
            f"{chosen.tflops_per_gpu:,.0f} TFLOP/s/GPU",
        ),
        Text("  memory  ").append_text(fits),
        *([] if trained is None else [Text(f"  trains  {trained}")]),
    ]


def _range(answer: Plan) -> str:
    """What the step may be, from errors on models that no constant was fitted to."""
    between = answer.evidence.seconds if answer.evidence is not None else None
    return f" ({format_seconds(between[0])} to {format_seconds(between[1])})" if between is not None else ""


def _timeline_title(shown: int, count: int) -> str:
    if shown == count:
        return "the step in time" if count == 1 else f"the step in time, {count} micro-batches"
    return f"the step in time, {shown} of {count:,} micro-batches drawn: the middle repeats"


def _layouts_table(answer: Plan, width: int, top: int) -> list[Text]:
    shown = [answer.chosen, *answer.runners_up[: max(0, top - 1)]]
    layouts = [str(prediction.layout) for prediction in shown]
    room = max(len("layout"), *map(len, layouts))
    head = f"{'layout':<{room}}  {'micro':>5}  {'recompute':<9}  {'step':>7}  {'MFU':>5}  {'GiB':>5}"
    rows = []
    for prediction in shown:
        layout = prediction.layout
        figures = (
            f"{layout!s:<{room}}  {layout.micro_batch:>5}  {layout.recompute:<9}  "
            f"{format_seconds(prediction.step_seconds):>7}  {prediction.mfu:>5.1%}  {prediction.memory.total:>5.1f}"
        )
        rows.append((figures, _loses(prediction, answer.chosen)))
    # All reasons beside their layouts, or all below them.
    beside = all(len(figures) + len(loses) + 6 <= width for figures, loses in rows[1:])
    lines = [Text(f"    {head}", style="dim"), Text(f"  ▸ {rows[0][0]}", style="bold cyan")]
    for figures, loses in rows[1:]:
        line = Text(f"    {figures}")
        lines += [line.append(f"  {loses}", style="dim")] if beside else [line, Text(f"      {loses}", style="dim")]
    return lines


def _loses(other: LayoutPrediction, chosen: LayoutPrediction) -> str:
    change = other.step_seconds / chosen.step_seconds - 1
    why = time_differences(chosen.times, other.times, name="label")
    return f"{change:+.1%}".replace("-", "−") + (f": {why}" if why else "")


def _run_lines(budget: RunBudget, width: int) -> list[Text]:
    lines = []
    for label, words in describe_run(budget):
        wrapped = textwrap.wrap(words, width - 17, break_long_words=False)
        lines += [Text(f"    {label if not number else '':<12} {line}") for number, line in enumerate(wrapped)]
    return lines


def _rejected(answer: Plan, top: int) -> list[str]:
    lines = []
    for rejected in answer.rejected[:top]:
        alike = f" ({rejected.alike:,} such layouts)" if rejected.alike > 1 else ""
        lines.append(f"{rejected.layout}: {rejected.reason}{alike}")
    return lines


def _wrapped(text: str, width: int) -> list[Text]:
    lines = textwrap.wrap(text, width - 4, break_long_words=False, break_on_hyphens=False)
    return [Text(f"  {'· ' if not number else '  '}{line}") for number, line in enumerate(lines)]


COMPARISON_SCHEMA = "trainshed.plan-comparison/1"
_COMPARISON_HEAD = (
    "",
    "GPU",
    "GPUs",
    "layout",
    "micro",
    "recompute",
    "step",
    "MFU",
    "tokens/s",
    "GiB",
    "length",
    "cost",
)


@dataclass(frozen=True)
class ComparedPlan:
    """One GPU: its plan, or why it has none."""

    gpu: str
    plan: Plan | None = None
    refused: InputError | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the report of the plan, or the error, as JSON has it."""
        error = None if self.refused is None else {"what": self.refused.what, "hint": self.refused.hint}
        return {"gpu": self.gpu, "plan": None if self.plan is None else self.plan.to_plain(), "error": error}


def compare_gpus(
    flags: PlanFlags, gpus: tuple[str, ...], report: Path | None, *, top: int, explained: bool, output: Output
) -> int:
    """Plan for each GPU and show the plans together; an error only where no GPU has one."""
    if report is not None:
        raise InputError("a report is of one plan", where="--report", hint="name one --gpu, or write -o json")
    if flags.machine is not None:
        raise InputError(
            "a machine has one kind of GPU", where="--machine", hint="leave it out: each --gpu has a machine of its own"
        )
    flags.check()
    compared = [_plan_for_gpu(replace(flags, gpu=gpu), gpu, top, explained) for gpu in gpus]
    if all(entry.plan is None for entry in compared):
        assert compared[0].refused is not None
        raise compared[0].refused
    print_report(
        {"schema": COMPARISON_SCHEMA, "plans": [entry.to_plain() for entry in compared]},
        output,
        "" if output == "json" else comparison_text(compared, min(Console().width, WIDEST)),
    )
    return 0


def _plan_for_gpu(flags: PlanFlags, gpu: str, top: int, explained: bool) -> ComparedPlan:
    try:
        return ComparedPlan(gpu, make_plan(request_from_flags(flags), top=top, explained=explained))
    except InputError as refused:
        if refused.where in ("--gpu", "--model", "--tokens", "--seq", "--calibration"):
            # What is wrong for every GPU, or no GPU at all, is not a row of a table.
            raise
        return ComparedPlan(gpu, refused=refused)


def comparison_text(compared: list[ComparedPlan], width: int) -> str:
    """Write the plans as a table, the fastest marked, then the notes on all or on one."""
    plans = [(entry.gpu, entry.plan) for entry in compared if entry.plan is not None]
    fastest = max(plans, key=lambda named: _tokens_per_second(named[1]))[1]
    first = plans[0][1]
    training = first.request.training
    rows = [_COMPARISON_HEAD, *(_comparison_cells(plan, plan is fastest) for _, plan in plans)]
    used = [column for column in range(len(_COMPARISON_HEAD)) if column == 0 or any(row[column] for row in rows[1:])]
    widths = {column: max(len(row[column]) for row in rows) for column in used}
    lines = [
        f"{first.request.name}: {training.sequence_length:,} tokens × {training.global_batch:,} sequences a step, "
        f"{training.precision}, {first.request.engine}",
        "",
    ]
    for row in rows:
        cells = [f"{row[column]:{'<' if column in (0, 1, 3, 5) else '>'}{widths[column]}}" for column in used]
        lines.append("  ".join(cells).rstrip())
    for entry in compared:
        if entry.refused is not None:
            lines += textwrap.wrap(f"  {entry.gpu}: {entry.refused.what}", width, subsequent_indent="    ")
    lines += ["", "notes", *_comparison_notes(plans, width)]
    return "\n".join(lines)


def _comparison_cells(plan: Plan, fastest: bool) -> tuple[str, ...]:
    chosen, training = plan.chosen, plan.request.training
    run = plan.budget.run if plan.budget is not None else None
    return (
        "▸" if fastest else "",
        training.hardware.gpu_name,
        f"{training.gpus:,}",
        str(chosen.layout),
        str(chosen.layout.micro_batch),
        chosen.layout.recompute,
        format_seconds(chosen.step_seconds),
        f"{chosen.mfu:.1%}",
        f"{_tokens_per_second(plan):,.0f}",
        f"{chosen.memory.total:.1f} of {chosen.memory.capacity:.1f}",
        "" if run is None else format_hours(run.hours),
        "" if run is None or run.cost is None else f"${run.cost:,.0f}",
    )


def _tokens_per_second(plan: Plan) -> float:
    return plan.chosen.tokens_per_second_per_gpu * plan.request.training.gpus


def _comparison_notes(plans: list[tuple[str, Plan]], width: int) -> list[str]:
    """Notes of all plans once, then those of some with the GPUs they are of."""
    notes: dict[str, list[str]] = {}
    for _, plan in plans:
        for note in plan.notes:
            notes.setdefault(note, []).append(plan.request.training.hardware.gpu_name)
    shared = [note for note, whose in notes.items() if len(whose) == len(plans)]
    own = [f"{', '.join(whose)}: {note}" for note, whose in notes.items() if len(whose) < len(plans)]
    return [
        line
        for note in (*shared, *own)
        for line in textwrap.wrap(f"  · {note}", width, subsequent_indent="    ", break_long_words=False)
    ]
