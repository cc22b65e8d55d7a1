"""The pictures of a plan as drawings: memory by stage, the step's seconds, the pipeline in time, layouts beside it."""

from __future__ import annotations

from math import log2

from trainshed.plan.performance.prediction import Prediction, StepTimes
from trainshed.plan.report.answer import layout_words
from trainshed.plan.report.drawing import Drawing
from trainshed.plan.report.explain import differences, seconds, share
from trainshed.plan.report.parts import MEMORY_PARTS, TIME_PARTS, Part, amounts
from trainshed.plan.report.timeline import Kind, Timeline
from trainshed.plan.searching.scaling import BREAKS_BELOW, ScalingCurve

_LABEL = 64.0
"""Room for a stage's name, left of its bar."""
_BOX_COLOURS: dict[Kind, tuple[str, str]] = {
    "forward": ("#5b7fe0", "#8aa5ec"),
    "backward": ("#4cb763", "#83d093"),
    "weights": ("#efb118", "#f5cc66"),
    "reduce": ("#ff725c", "#ff725c"),
    "optimizer": ("#9c6b4e", "#9c6b4e"),
}
_BOX_WORDS: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "weights": "weight gradients",
    "reduce": "gradients reduced",
    "optimizer": "optimizer",
}


def _stacked(
    drawing: Drawing, x: float, y: float, height: float, scale: float, parts: list[tuple[Part, float]], unit: str
) -> float:
    """Draw the parts of a bar from left to right; return where it ends."""
    for part, amount in parts:
        figure = seconds(amount) if unit == "s" else f"{amount:.1f} {unit}"
        drawing.rect(x, y, amount * scale, height, fill=part.colour, tip=f"{part.word}: {figure}")
        x += amount * scale
    return x


def memory_chart(prediction: Prediction) -> Drawing:
    """A bar for every stage against what the card has."""
    drawing = Drawing()
    capacity = prediction.memory.capacity
    room = drawing.width - _LABEL - 96
    scale = room / max(capacity, prediction.memory.total)
    height, gap = (22, 6) if len(prediction.stages) <= 16 else (12, 3)
    y = 0.0
    for stage in prediction.stages:
        memory = stage.memory
        drawing.text(0, y + height - 5, f"stage {stage.stage}", "soft")
        drawing.rect(_LABEL, y, capacity * scale, height, css="track")
        end = _stacked(drawing, _LABEL, y, height, scale, amounts(memory, MEMORY_PARTS), "GiB")
        over = memory.total - capacity
        figure = f"{memory.total:.1f} GiB" if over <= 0 else f"{memory.total:.1f} (+{over:.1f})"
        at = max(end, _LABEL + capacity * scale) + 8
        drawing.text(at, y + height - 5, figure, "bad" if over > 0 else "")
        y += height + gap
    edge = _LABEL + capacity * scale
    drawing.path([(edge, -4), (edge, y)], "edge")
    drawing.text(edge, y + 13, f"{capacity:.1f} GiB on the card", "small", "end")
    present = {part for stage in prediction.stages for part, _ in amounts(stage.memory, MEMORY_PARTS)}
    fullest = dict(amounts(prediction.memory, MEMORY_PARTS))
    words = [
        (part.colour, f"{part.word} {fullest[part]:.1f}" if part in fullest else part.word)
        for part in MEMORY_PARTS
        if part in present
    ]
    drawing.height = drawing.legend(y + 36, words, left=_LABEL)
    return drawing


def step_chart(prediction: Prediction) -> Drawing:
    """The step's seconds as one bar."""
    drawing = Drawing()
    parts = amounts(prediction.times, TIME_PARTS)
    total = prediction.times.total
    _stacked(drawing, 0, 0, 30, drawing.width / total, parts, "s")
    words = [(part.colour, f"{part.word} {seconds(amount)} ({share(amount / total)})") for part, amount in parts]
    drawing.height = drawing.legend(52, words)
    return drawing


def timeline_chart(drawn: Timeline) -> Drawing:
    """A line for every pipeline rank, time from left to right."""
    drawing = Drawing()
    height = 26 if drawn.ranks <= 8 else 16
    scale = (drawing.width - _LABEL) / drawn.seconds
    for rank in range(drawn.ranks):
        y = rank * (height + 4)
        drawing.text(0, y + height - 7, f"stage {rank}", "soft")
        drawing.rect(_LABEL, y, drawing.width - _LABEL, height, css="track")
    by_chunk = any(box.chunk for box in drawn.boxes)
    for box in drawn.boxes:
        shade = (box.chunk if by_chunk else box.micro_batch) % 2
        x, y, wide = _LABEL + box.start * scale, box.rank * (height + 4), (box.end - box.start) * scale
        tip = f"{_BOX_WORDS[box.kind]}: {seconds(box.end - box.start)}"
        counted = box.kind in ("forward", "backward", "weights")
        if counted:
            tip = f"micro-batch {box.micro_batch}, chunk {box.chunk}, {tip}"
        # A little narrower than it is: the gaps part one micro-batch from the next.
        drawing.rect(x, y, max(wide - 0.6, 0.6), height, fill=_BOX_COLOURS[box.kind][shade], tip=tip)
        if counted and wide >= 15:
            drawing.text(x + wide / 2, y + height / 2 + 3.5, str(box.micro_batch), "number", "middle")
    present = {box.kind for box in drawn.boxes}
    words = [(_BOX_COLOURS[kind][0], word) for kind, word in _BOX_WORDS.items() if kind in present]
    drawing.height = drawing.legend(drawn.ranks * (height + 4) + 20, words, left=_LABEL)
    return drawing


def layouts_chart(shown: list[Prediction]) -> Drawing:
    """Layouts side by side: the seconds of each by part, and what it loses against the first."""
    drawing = Drawing()
    chosen = shown[0]
    room = drawing.width - 230
    scale = room / max(each.times.total for each in shown)
    y = 14.0
    for each in shown:
        first = each is chosen
        drawing.text(0, y, layout_words(each.layout), "accent" if first else "bold")
        figures = f"{each.mfu:.1%} MFU · {each.memory.total:.1f} GiB"
        drawing.text(drawing.width, y, figures, "soft", "end")
        end = _stacked(drawing, 0, y + 7, 16, scale, amounts(each.times, TIME_PARTS), "s")
        change = each.step_seconds / chosen.step_seconds - 1
        lost = "" if first else f"  {change:+.1%}".replace("-", "−")
        drawing.text(end + 8, y + 20, f"{seconds(each.step_seconds)}{lost}")
        y += 27
        if not first:
            y += 13
            drawing.text(0, y, _lost(chosen.times, each.times), "small")
        y += 26
    present = {part for each in shown for part, _ in amounts(each.times, TIME_PARTS)}
    drawing.height = drawing.legend(y, [(part.colour, part.word) for part in TIME_PARTS if part in present])
    return drawing


def _lost(times: StepTimes, other: StepTimes) -> str:
    return differences(times, other, most=3, word="word")


def scaling_chart(curve: ScalingCurve) -> Drawing:
    """Efficiency over the number of GPUs, which doubles from left to right."""
    drawing = Drawing()
    left, right, top, bottom = 48.0, drawing.width - 30, 24.0, 204.0
    first, last = curve.points[0].gpus, curve.points[-1].gpus
    span = log2(last / first) or 1.0
    # More than the smallest number reaches is possible: a larger one may not need to recompute.
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
        drawing.dot(x, y, f"{point.gpus:,} GPUs: {layout_words(point.prediction.layout)}")
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
