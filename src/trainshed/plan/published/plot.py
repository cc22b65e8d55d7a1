"""Predicted against measured, drawn as an SVG: a point on the diagonal is an exact prediction."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from trainshed.plan.published.validation import JudgedRow, PlannerValidation

# Distinct for colour-blind people (Okabe and Ito, 2008); all other sources are grey.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b5ea7")
_GREY = "#999999"
_SIDE, _MARGIN, _GAP, _TOP, _LEGEND = 380, 56, 40, 36, 20
_BAND = 0.15
"""The grey band: within 15% of what was measured."""
_STYLE = """
  svg { background: #ffffff; font: 12px system-ui, sans-serif; }
  text { fill: #222222; } .faint { fill: #777777; } .title { font-weight: 600; font-size: 14px; }
  .frame { fill: none; stroke: #999999; } .grid { stroke: #e4e4e4; } .band { fill: #88888822; }
  .equal { stroke: #777777; } .points { stroke-width: 4; stroke-linecap: round; opacity: 0.6; }
  @media (prefers-color-scheme: dark) {
    svg { background: #14171a; } text { fill: #e6e6e6; } .faint { fill: #9a9a9a; } .grid { stroke: #2b3034; }
  }
"""


@dataclass(frozen=True)
class PlotPoint:
    """One row in a panel."""

    predicted: float
    measured: float
    source: str


def short_source(source: str) -> str:
    """Name a source in a word or three: the repository, the paper, or how its text begins."""
    head = re.split(r"[:@(]", source.removeprefix("paper:"))[0].strip()
    if head.startswith("mlcommons/"):
        return "MLPerf Training"
    if "/" in head and " " not in head:
        return head.partition("/")[2]
    return " ".join(word for word in head.split()[:3] if word != "arXiv") or "(no source)"


def accuracy_svg(validation: PlannerValidation) -> str:
    """Draw step times and memory, predicted against measured, on logarithmic axes, coloured by source."""
    times = [
        _point(one, one.prediction.step_seconds, one.step_seconds) for one in validation.judged if one.step_seconds
    ]
    memory = [_point(one, one.predicted_gib, one.memory_gib) for one in validation.judged if one.memory_gib]
    counts = Counter(point.source for point in (*times, *memory))
    named = [source for source, _ in counts.most_common(len(_COLOURS))]
    colours = dict(zip(named, _COLOURS, strict=False))
    panels = [panel for panel in (("step time", "s", times), ("peak memory", "GiB", memory)) if panel[2]]
    width = _MARGIN + max(len(panels), 1) * (_SIDE + _MARGIN + _GAP)
    legend = [*named, *(["others"] if len(counts) > len(named) else [])]
    height = _TOP + _SIDE + _MARGIN + _LEGEND * (1 + len(legend) // 3 + 1)
    body = [
        part
        for number, (title, unit, points) in enumerate(panels)
        for part in _panel(title, unit, points, colours, left=_MARGIN + number * (_SIDE + _MARGIN + _GAP))
    ]
    body += _legend(legend, counts, colours, top=_TOP + _SIDE + _MARGIN + 8)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
            f"<title>Predicted against measured</title><style>{_STYLE}</style>",
            *body,
            "</svg>\n",
        ]
    )


def _point(one: JudgedRow, predicted: float, measured: float | None) -> PlotPoint:
    assert measured is not None
    return PlotPoint(predicted, measured, short_source(one.row.source))


def _panel(title: str, unit: str, points: Sequence[PlotPoint], colours: dict[str, str], *, left: int) -> list[str]:
    amounts = [amount for point in points for amount in (point.predicted, point.measured) if amount > 0]
    low, high = log10(min(amounts)) - 0.05, log10(max(amounts)) + 0.05

    def place(amount: float) -> float:
        return (log10(max(amount, 1e-12)) - low) / (high - low) * _SIDE

    def x(amount: float) -> float:
        return left + place(amount)

    def y(amount: float) -> float:
        return _TOP + _SIDE - place(amount)

    parts = [f'<text class="title" x="{left}" y="{_TOP - 12}">{escape(title)}</text>']
    for tick in _ticks(low, high):
        label = f"{tick:g}"
        parts.append(f'<path class="grid" d="M{x(tick):.1f} {_TOP}v{_SIDE}M{left} {y(tick):.1f}h{_SIDE}"/>')
        parts.append(
            f'<text class="faint" text-anchor="middle" x="{x(tick):.1f}" y="{_TOP + _SIDE + 16}">{label}</text>'
        )
        parts.append(f'<text class="faint" text-anchor="end" x="{left - 6}" y="{y(tick) + 4:.1f}">{label}</text>')
    parts.append(_band(low, high, left))
    parts.append(f'<path class="equal" d="M{left} {_TOP + _SIDE}L{left + _SIDE} {_TOP}"/>')
    # One path of dots per colour: circles would make the file ten times as large. Coloured dots are above grey ones.
    for colour in (_GREY, *colours.values()):
        dots = "".join(
            f"M{x(point.measured):.1f} {y(point.predicted):.1f}h0"
            for point in points
            if colours.get(point.source, _GREY) == colour
        )
        if dots:
            parts.append(f'<path class="points" stroke="{colour}" d="{dots}"/>')
    middle = left + _SIDE / 2
    parts += [
        f'<rect class="frame" x="{left}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}"/>',
        f'<text text-anchor="middle" x="{middle}" y="{_TOP + _SIDE + 34}">measured, {unit}</text>',
        f'<text text-anchor="middle" transform="translate({left - 38} {_TOP + _SIDE / 2}) rotate(-90)">'
        f"predicted, {unit}</text>",
    ]
    return parts


def _band(low: float, high: float, left: int) -> str:
    """The band of predictions within 15%, clipped at the frame."""
    scale = _SIDE / (high - low)
    up, down = log10(1 + _BAND) * scale, -log10(1 - _BAND) * scale
    bottom, right = _TOP + _SIDE, left + _SIDE
    corners = (
        (left, bottom),
        (left, bottom - up),
        (right - up, _TOP),
        (right, _TOP),
        (right, _TOP + down),
        (left + down, bottom),
    )
    return f'<polygon class="band" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}"/>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two powers of ten: 1, 2, 5 of each decade, or decades alone where there are many."""
    steps = (1, 2, 5) if high - low < 2.5 else (1,)
    ticks = (step * 10.0**decade for decade in range(floor(low), floor(high) + 1) for step in steps)
    return [tick for tick in ticks if low <= log10(tick) <= high]


def _legend(names: Sequence[str], counts: Counter[str], colours: dict[str, str], *, top: int) -> list[str]:
    parts: list[str] = []
    others = sum(count for source, count in counts.items() if source not in colours)
    for number, name in enumerate(names):
        x, y = _MARGIN + number % 3 * 270, top + number // 3 * _LEGEND + 12
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colours.get(name, _GREY)}"/>')
        parts.append(f'<text x="{x + 10}" y="{y}">{escape(name)} ({counts.get(name, others)})</text>')
    return parts
