"""A plan in pictures: memory by stage, the step's seconds, the pipeline in time, layouts side by side, scaling.

Charts are a few SVG elements (`SvgDrawing`), without a plotting library. The timeline uses the prediction's own
schedule (`performance/pipeline.py`); the chunks of a rank are assumed to be equal. A long step repeats itself in the
middle, so a picture has fewer micro-batches than the step: enough to fill the pipeline and to drain it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from math import log2
from pathlib import Path
from typing import Literal

from trainshed.plan.layout import RankLayout, describe_layout
from trainshed.plan.performance import pipeline
from trainshed.plan.performance.prediction import LayoutPrediction, StepTimes
from trainshed.plan.report.text import (
    MEMORY_PARTS,
    TIME_PARTS,
    BarPart,
    format_seconds,
    format_share,
    part_amounts,
    time_differences,
)
from trainshed.plan.search.scaling import BREAKS_BELOW, ScalingCurve

DRAWING_WIDTH = 960
"""Width of every chart, in pixels."""
_CHARACTER_WIDTH = 7.5
"""Mean width of a character at 13 pixels, rounded up: text is measured by the browser, legends are laid out here."""

DRAWING_STYLE = Path(__file__).with_name("drawing.css").read_text(encoding="utf-8")
"""Colours follow the reader's choice of light or dark."""


def coord(value: float) -> str:
    """Write a coordinate with a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass
class SvgDrawing:
    """Elements one below the other; `height` grows as they are added."""

    width: float = DRAWING_WIDTH
    height: float = 0.0
    elements: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, *, fill: str = "", css: str = "", tip: str = ""
    ) -> None:
        """Draw a box, with a text that shows when it is pointed at."""
        look = f' fill="{fill}"' if fill else ""
        look += f' class="{css}"' if css else ""
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        box = f'x="{coord(x)}" y="{coord(y)}" width="{coord(width)}" height="{coord(height)}"'
        self.elements.append(f"<rect {box}{look}>{inside}</rect>" if inside else f"<rect {box}{look}/>")

    def text(self, x: float, y: float, words: str, css: str = "", anchor: str = "") -> None:
        """Write words with their baseline at y."""
        look = f' class="{css}"' if css else ""
        look += f' text-anchor="{anchor}"' if anchor else ""
        self.elements.append(f'<text x="{coord(x)}" y="{coord(y)}"{look}>{escape(words)}</text>')

    def path(self, points: list[tuple[float, float]], css: str = "line") -> None:
        """Draw a line through points."""
        steps = " ".join(f"{'M' if not place else 'L'}{coord(x)} {coord(y)}" for place, (x, y) in enumerate(points))
        self.elements.append(f'<path d="{steps}" class="{css}"/>')

    def dot(self, x: float, y: float, tip: str) -> None:
        """Draw a point of a curve."""
        self.elements.append(
            f'<circle cx="{coord(x)}" cy="{coord(y)}" r="4.5" class="dot"><title>{escape(tip)}</title></circle>'
        )

    def legend(self, y: float, entries: list[tuple[str, str]], *, left: float = 0.0) -> float:
        """Set swatches of colour and their words; return the y below them."""
        x = left
        for colour, words in entries:
            wide = 18 + len(words) * _CHARACTER_WIDTH
            if x > left and x + wide > self.width:
                x, y = left, y + 20
            self.rect(x, y - 10, 11, 11, fill=colour)
            self.text(x + 16, y, words, "soft")
            x += wide + 16
        return y + 12

    def place(self, other: SvgDrawing, x: float, y: float) -> None:
        """Put another drawing in at a place."""
        self.elements.append(f'<g transform="translate({coord(x)} {coord(y)})">')
        self.elements += other.elements
        self.elements.append("</g>")

    def svg(self, *, style: str = "", label: str) -> str:
        """Return the drawing as an SVG element; with a style it stands alone as a file."""
        size = f'viewBox="0 0 {coord(self.width)} {coord(self.height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} width="{coord(self.width)}" role="img"'
        look = f"<style>\n{style}\n</style>\n" if style else ""
        return f'{head} aria-label="{escape(label)}">\n{look}' + "\n".join(self.elements) + "\n</svg>\n"


BoxKind = pipeline.PassKind | Literal["reduce", "optimizer"]
"""What a pipeline rank does; `reduce`: data-parallel communication that is not hidden."""
_SHOWN_AT_LEAST = 6
_MOST_BOXES = 3000


@dataclass(frozen=True)
class TimelineBox:
    """One pass, or another part of a step, on one pipeline rank."""

    rank: int
    kind: BoxKind
    start: float
    end: float
    chunk: int = 0
    """Which of the rank's model chunks, from 0."""
    micro_batch: int = 0


@dataclass(frozen=True)
class StepTimeline:
    """A step, or the beginning and the end of one."""

    boxes: tuple[TimelineBox, ...]
    ranks: int
    seconds: float
    micro_batches: int
    """How many the step has."""
    shown: int
    """How many are timeline."""

    @property
    def is_whole(self) -> bool:
        """Whether all micro-batches are timeline."""
        return self.shown == self.micro_batches


def step_timeline(prediction: LayoutPrediction, global_batch: int) -> StepTimeline:
    """Lay the boxes of a step out, with fewer micro-batches than it has where it is long."""
    layout = prediction.layout
    count = layout.micro_batches(global_batch)
    shown = _micro_batches_shown(layout, count)
    boxes = _pipeline_boxes(prediction, shown)
    end = max(box.end for box in boxes)
    # The end of the step is scaled with the passes, of which only some are drawn.
    tail = (("reduce", prediction.times.dp_exposed), ("optimizer", prediction.times.optimizer))
    for kind, seconds in ((kind, seconds * shown / count) for kind, seconds in tail):
        if seconds > 0:
            boxes += [TimelineBox(rank, kind, end, end + seconds) for rank in range(layout.pp)]
            end += seconds
    return StepTimeline(tuple(boxes), layout.pp, end, count, shown)


def _micro_batches_shown(layout: RankLayout, count: int) -> int:
    if layout.vp > 1:
        size = pipeline.round_size(layout.pp, count)
        # One round only fills and drains the pipeline; two of a very deep one would be too many boxes to see.
        rounds = 2 if 2 * size * 2 * layout.pp * layout.vp <= _MOST_BOXES else 1
        return min(count, rounds * size)
    return min(count, max(_SHOWN_AT_LEAST, 2 * layout.pp))


def _pipeline_boxes(prediction: LayoutPrediction, count: int) -> list[TimelineBox]:
    layout = prediction.layout
    chunk_stages = [prediction.stages[chunk % layout.pp] for chunk in range(layout.pp * layout.vp)]
    passes = pipeline.PipelinePasses.of(
        [stage.forward_seconds / layout.vp for stage in chunk_stages],
        [stage.backward_seconds / layout.vp for stage in chunk_stages],
        layout.pp,
        schedule=layout.schedule,
    )
    return [
        TimelineBox(slot.rank, slot.kind, slot.start, slot.end, slot.chunk // layout.pp, slot.micro_batch)
        for slot in pipeline.pipeline_timeline(passes, count)
    ]


_LABEL_WIDTH = 64.0
"""Room for a stage's name, left of its bar."""
_BOX_COLOURS: dict[BoxKind, tuple[str, str]] = {
    "forward": ("#5b7fe0", "#8aa5ec"),
    "backward": ("#4cb763", "#83d093"),
    "weights": ("#efb118", "#f5cc66"),
    "reduce": ("#ff725c", "#ff725c"),
    "optimizer": ("#9c6b4e", "#9c6b4e"),
}
_BOX_WORDS: dict[BoxKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "weights": "weight gradients",
    "reduce": "gradients reduced",
    "optimizer": "optimizer",
}


def _draw_stacked_bar(
    drawing: SvgDrawing, x: float, y: float, height: float, scale: float, parts: list[tuple[BarPart, float]], unit: str
) -> float:
    """Draw the parts of a bar from left to right; return where it ends."""
    for part, amount in parts:
        figure = format_seconds(amount) if unit == "s" else f"{amount:.1f} {unit}"
        drawing.rect(x, y, amount * scale, height, fill=part.colour, tip=f"{part.label}: {figure}")
        x += amount * scale
    return x


def memory_chart(prediction: LayoutPrediction) -> SvgDrawing:
    """A bar for every stage, compared with the memory of the GPU."""
    drawing = SvgDrawing()
    capacity = prediction.memory.capacity
    room = drawing.width - _LABEL_WIDTH - 96
    scale = room / max(capacity, prediction.memory.total)
    height, gap = (22, 6) if len(prediction.stages) <= 16 else (12, 3)
    y = 0.0
    for stage in prediction.stages:
        memory = stage.memory
        drawing.text(0, y + height - 5, f"stage {stage.stage}", "soft")
        drawing.rect(_LABEL_WIDTH, y, capacity * scale, height, css="track")
        end = _draw_stacked_bar(drawing, _LABEL_WIDTH, y, height, scale, part_amounts(memory, MEMORY_PARTS), "GiB")
        over = memory.total - capacity
        figure = f"{memory.total:.1f} GiB" if over <= 0 else f"{memory.total:.1f} (+{over:.1f})"
        at = max(end, _LABEL_WIDTH + capacity * scale) + 8
        drawing.text(at, y + height - 5, figure, "bad" if over > 0 else "")
        y += height + gap
    edge = _LABEL_WIDTH + capacity * scale
    drawing.path([(edge, -4), (edge, y)], "edge")
    drawing.text(edge, y + 13, f"{capacity:.1f} GiB on the card", "small", "end")
    present = {part for stage in prediction.stages for part, _ in part_amounts(stage.memory, MEMORY_PARTS)}
    fullest = dict(part_amounts(prediction.memory, MEMORY_PARTS))
    words = [
        (part.colour, f"{part.label} {fullest[part]:.1f}" if part in fullest else part.label)
        for part in MEMORY_PARTS
        if part in present
    ]
    drawing.height = drawing.legend(y + 36, words, left=_LABEL_WIDTH)
    return drawing


def step_chart(prediction: LayoutPrediction) -> SvgDrawing:
    """The step's seconds as one bar."""
    drawing = SvgDrawing()
    parts = part_amounts(prediction.times, TIME_PARTS)
    total = prediction.times.total
    _draw_stacked_bar(drawing, 0, 0, 30, drawing.width / total, parts, "s")
    words = [
        (part.colour, f"{part.label} {format_seconds(amount)} ({format_share(amount / total)})")
        for part, amount in parts
    ]
    drawing.height = drawing.legend(52, words)
    return drawing


def timeline_chart(timeline: StepTimeline) -> SvgDrawing:
    """A line for every pipeline rank, time from left to right."""
    drawing = SvgDrawing()
    height = 26 if timeline.ranks <= 8 else 16
    scale = (drawing.width - _LABEL_WIDTH) / timeline.seconds
    for rank in range(timeline.ranks):
        y = rank * (height + 4)
        drawing.text(0, y + height - 7, f"stage {rank}", "soft")
        drawing.rect(_LABEL_WIDTH, y, drawing.width - _LABEL_WIDTH, height, css="track")
    by_chunk = any(box.chunk for box in timeline.boxes)
    for box in timeline.boxes:
        shade = (box.chunk if by_chunk else box.micro_batch) % 2
        x, y, wide = _LABEL_WIDTH + box.start * scale, box.rank * (height + 4), (box.end - box.start) * scale
        tip = f"{_BOX_WORDS[box.kind]}: {format_seconds(box.end - box.start)}"
        counted = box.kind in ("forward", "backward", "weights")
        if counted:
            tip = f"micro-batch {box.micro_batch}, chunk {box.chunk}, {tip}"
        # A little narrower than it is: gaps separate micro-batches.
        drawing.rect(x, y, max(wide - 0.6, 0.6), height, fill=_BOX_COLOURS[box.kind][shade], tip=tip)
        if counted and wide >= 15:
            drawing.text(x + wide / 2, y + height / 2 + 3.5, str(box.micro_batch), "number", "middle")
    present = {box.kind for box in timeline.boxes}
    words = [(_BOX_COLOURS[kind][0], word) for kind, word in _BOX_WORDS.items() if kind in present]
    drawing.height = drawing.legend(timeline.ranks * (height + 4) + 20, words, left=_LABEL_WIDTH)
    return drawing


def layouts_chart(shown: list[LayoutPrediction]) -> SvgDrawing:
    """Layouts side by side: the seconds of each by part, and what it loses to the first."""
    drawing = SvgDrawing()
    chosen = shown[0]
    room = drawing.width - 230
    scale = room / max(prediction.times.total for prediction in shown)
    y = 14.0
    for prediction in shown:
        first = prediction is chosen
        drawing.text(0, y, describe_layout(prediction.layout), "accent" if first else "bold")
        figures = f"{prediction.mfu:.1%} MFU · {prediction.memory.total:.1f} GiB"
        drawing.text(drawing.width, y, figures, "soft", "end")
        end = _draw_stacked_bar(drawing, 0, y + 7, 16, scale, part_amounts(prediction.times, TIME_PARTS), "s")
        change = prediction.step_seconds / chosen.step_seconds - 1
        lost = "" if first else f"  {change:+.1%}".replace("-", "−")
        drawing.text(end + 8, y + 20, f"{format_seconds(prediction.step_seconds)}{lost}")
        y += 27
        if not first:
            y += 13
            drawing.text(0, y, _lost_words(chosen.times, prediction.times), "small")
        y += 26
    present = {part for prediction in shown for part, _ in part_amounts(prediction.times, TIME_PARTS)}
    drawing.height = drawing.legend(y, [(part.colour, part.label) for part in TIME_PARTS if part in present])
    return drawing


def _lost_words(times: StepTimes, other: StepTimes) -> str:
    return time_differences(times, other, most=3, name="label")


def scaling_chart(curve: ScalingCurve) -> SvgDrawing:
    """Efficiency over the number of GPUs, which doubles from left to right."""
    drawing = SvgDrawing()
    left, right, top, bottom = 48.0, drawing.width - 30, 24.0, 204.0
    first, last = curve.points[0].gpus, curve.points[-1].gpus
    span = log2(last / first) or 1.0
    # Efficiency may be above 1: with more GPUs a layout may not need to recompute.
    highest = max(1.0, *(point.efficiency or 0.0 for point in curve.points))

    def at(gpus: int, reached: float) -> tuple[float, float]:
        x = left + 40 + log2(gpus / first) / span * (right - left - 40)
        return x, bottom - reached / highest * (bottom - top)

    for level in (0.0, 0.5, 1.0):
        y = at(first, level)[1]
        drawing.path([(left, y), (right, y)])
        drawing.text(left - 8, y + 4, f"{level:.0%}", "small", "end")
    y = at(first, BREAKS_BELOW)[1]
    drawing.path([(left, y), (right, y)], "broken")
    drawing.text(left - 8, y + 4, f"{BREAKS_BELOW:.0%}", "small", "end")
    drawing.path([at(point.gpus, point.efficiency) for point in curve.points if point.efficiency is not None], "curve")
    for point in curve.points:
        x, y = at(point.gpus, point.efficiency or 0.0)
        drawing.text(x, bottom + 20, f"{point.gpus:,}", "bold", "middle")
        if point.prediction is None or point.efficiency is None or point.tokens_per_second is None:
            drawing.text(x, bottom - 8, "no layout", "bad", "middle")
            continue
        drawing.dot(x, y, f"{point.gpus:,} GPUs: {describe_layout(point.prediction.layout)}")
        drawing.text(x, y - 10, f"{point.efficiency:.0%}", "bold" if point.gpus != curve.breaks_at else "bad", "middle")
        drawing.text(x, bottom + 36, f"{_thousands(point.tokens_per_second)} tok/s", "small", "middle")
        drawing.text(x, bottom + 51, f"{point.prediction.mfu:.1%} MFU", "small", "middle")
    drawing.height = bottom + 64
    if curve.breaks_at is not None:
        drawing.text(left, bottom + 78, f"Efficiency breaks at {curve.breaks_at:,} GPUs: {curve.reason}.", "soft")
        drawing.height += 24
    return drawing


def _thousands(amount: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if amount >= size:
            return f"{amount / size:.3g}{letter}"
    return f"{amount:.0f}"
