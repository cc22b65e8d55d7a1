"""Bars and boxes of a plan in a terminal: blocks of colour, or letters where there are no colours."""

from __future__ import annotations

from bisect import bisect_right

from rich.style import Style
from rich.text import Text

from trainshed.plan.performance.prediction import Memory, Prediction, StagePrediction
from trainshed.plan.report.explain import seconds, share
from trainshed.plan.report.parts import MEMORY_PARTS, TIME_PARTS, Part, amounts, shared_out
from trainshed.plan.report.timeline import Box, Timeline

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


def _cells(part: Part, count: int, *, colours: bool) -> Text:
    return Text("█" * count, Style(color=part.colour)) if colours else Text(part.letter * count)


def _swatch(part: Part, *, colours: bool) -> Text:
    return Text("■", Style(color=part.colour)) if colours else Text(part.letter)


def legend(entries: list[tuple[Text, str]], width: int, *, indent: int = 4) -> list[Text]:
    """Set marks and their words in as many lines as they need."""
    lines, line = [], Text(" " * indent)
    for mark, words in entries:
        if line.cell_len > indent and line.cell_len + len(words) + 4 > width:
            lines.append(line)
            line = Text(" " * indent)
        if line.cell_len > indent:
            line.append("   ")
        line = line.append_text(mark).append(f" {words}")
    return [*lines, line]


def time_bar(prediction: Prediction, width: int, *, colours: bool) -> list[Text]:
    """The step as one bar, and below it what each part takes."""
    parts = amounts(prediction.times, TIME_PARTS)
    bar = Text("    ")
    for (part, _), cells in zip(parts, shared_out([each for _, each in parts], width - 6), strict=True):
        bar.append_text(_cells(part, cells, colours=colours))
    total = prediction.times.total
    entries = [
        (_swatch(part, colours=colours), f"{part.word} {seconds(each)} {share(each / total)}") for part, each in parts
    ]
    return [bar, *legend(entries, width)]


def memory_bars(prediction: Prediction, width: int, *, colours: bool) -> list[Text]:
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
    present = {part.key for stage in prediction.stages for part, _ in amounts(stage.memory, MEMORY_PARTS)}
    fullest = dict(amounts(prediction.memory, MEMORY_PARTS))
    entries = [
        # The figures are the fullest stage's, so that they add up to its bar.
        (_swatch(part, colours=colours), f"{part.word} {fullest[part]:.1f}" if part in fullest else part.word)
        for part in MEMORY_PARTS
        if part.key in present
    ]
    return [*lines, *legend(entries, width)]


def _shown_stages(prediction: Prediction) -> list[StagePrediction | None]:
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
    memory: Memory = stage.memory
    parts = amounts(memory, MEMORY_PARTS)
    filled = max(1, round(memory.total * cells_per_gib))
    bar = Text()
    for (part, _), cells in zip(parts, shared_out([each for _, each in parts], filled), strict=True):
        bar.append_text(_cells(part, cells, colours=colours))
    edge = round(memory.capacity * cells_per_gib)
    if filled <= edge:
        bar.append(IDLE * (edge - filled), style="dim").append("│")
        figure = Text(f" {memory.total:5.1f}")
    else:
        bar = bar[:edge].append("│", style="bold red").append_text(bar[edge:])
        figure = Text(f" {memory.total:5.1f} +{memory.total - memory.capacity:.1f} GiB", style="bold red")
    return Text(f"{stage.stage:>5} ").append_text(bar).append_text(figure)


def timeline_rows(drawn: Timeline, width: int, *, colours: bool) -> list[Text]:
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
        row = _row(boxes, drawn.seconds, room, colours=colours, numbered=numbered, by_chunk=by_chunk)
        lines.append(Text(f"{rank:>5} ").append_text(row))
    kinds = dict.fromkeys(box.kind for box in drawn.boxes)
    entries = [(_box_mark(kind, colours=colours), BOX_WORDS[kind]) for kind in BOX_WORDS if kind in kinds]
    return [*lines, *legend([*entries, (Text(IDLE, style="dim"), "waiting")], width)]


def _box_mark(kind: str, *, colours: bool) -> Text:
    return Text("■", Style(color=_BOX_COLOURS[kind][0])) if colours else Text(_BOX_LETTERS[kind][0])


def _row(boxes: list[Box], total: float, room: int, *, colours: bool, numbered: bool, by_chunk: bool) -> Text:
    starts = [box.start for box in boxes]
    covering: list[Box | None] = []
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


def _box_text(box: Box | None, cells: int, *, colours: bool, numbered: bool, by_chunk: bool) -> Text:
    if box is None:
        return Text(IDLE * cells, style="dim")
    shade = (box.chunk if by_chunk else box.micro_batch) % 2
    if not colours:
        return Text(_BOX_LETTERS[box.kind][shade] * cells)
    number = str(box.micro_batch) if numbered and box.kind in ("forward", "backward", "weights") else ""
    shown = number if len(number) < cells else ""
    return Text(f"{shown:<{cells}}", Style(color="#000000", bgcolor=_BOX_COLOURS[box.kind][shade]))
