"""Curves and points over one axis, drawn with `SvgDrawing`, and the page around such charts.

Used where figures of several runs are held beside each other: sweeps and scaling laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10
from pathlib import Path

from trainshed.plan.report.charts import DRAWING_STYLE, SvgDrawing

SERIES_COLOURS = (
    *("#3b6fd6", "#d1732b", "#2f9468", "#b3428c", "#8a6fd1", "#a08a1f"),
    *("#2b9bb0", "#c94f4f", "#6b8f2a", "#7a5a3c", "#5f6b78", "#d36fa6"),
)
_PAGE_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_HEIGHT = 260.0


@dataclass(frozen=True)
class ChartSeries:
    """One curve with its name; `dots` draws its points, with a text each, in place of a line."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dots: bool = False
    tips: Sequence[str] = ()
    dashed: bool = False


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    is_log: bool
    names: tuple[str, ...] = ()
    marks: tuple[tuple[float, str], ...] = ()

    @classmethod
    def over(
        cls,
        amounts: Sequence[float],
        *,
        is_log: bool,
        names: Sequence[str] = (),
        marks: Sequence[tuple[float, str]] = (),
    ) -> _Axis:
        scaled = [log10(amount) for amount in amounts] if is_log else list(amounts)
        low, high = min(scaled), max(scaled)
        room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        return cls(low - room, high + room, is_log, tuple(names), tuple(marks))

    def share(self, amount: float) -> float:
        scaled = log10(amount) if self.is_log else amount
        return (scaled - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        if self.marks:
            return list(self.marks)
        if self.names:
            return [(float(place), name) for place, name in enumerate(self.names)]
        if not self.is_log:
            return [(tick, f"{tick:.4g}") for tick in _round_numbers(self.low, self.high)]
        steps = (1, 2, 5) if self.high - self.low < 2.5 else (1,)
        decades = range(floor(self.low), ceil(self.high) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        return [(tick, f"{tick:.3g}") for tick in ticks if self.low <= log10(tick) <= self.high]


def line_chart(
    series: Sequence[ChartSeries],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    x_names: Sequence[str] = (),
    x_marks: Sequence[tuple[float, str]] = (),
) -> SvgDrawing:
    """Draw curves; with `x_names` the places 0, 1, 2 … of the axis are called by these words.

    `x_marks` are values of the axis with what is written there, in place of round numbers.
    """
    series = [_drawable(one, log_x, log_y) for one in series]
    drawing = SvgDrawing()
    everything = [point for one in series for point in one.points]
    if not everything:
        drawing.text(0, 16, "There is nothing to draw yet.", "soft")
        drawing.height = 28
        return drawing
    left, right, top, bottom = 64.0, drawing.width - 12, 26.0, _HEIGHT
    xs = [point[0] for point in everything] if not x_names else [0.0, len(x_names) - 1.0]
    x_axis = _Axis.over(xs, is_log=log_x, names=x_names, marks=x_marks)
    y_axis = _Axis.over([point[1] for point in everything], is_log=log_y)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return left + x_axis.share(point[0]) * (right - left), bottom - y_axis.share(point[1]) * (bottom - top)

    for tick, label in y_axis.ticks():
        y = bottom - y_axis.share(tick) * (bottom - top)
        drawing.path([(left, y), (right, y)])
        drawing.text(left - 8, y + 4, label, "small", "end")
    for tick, label in x_axis.ticks():
        x = left + x_axis.share(tick) * (right - left)
        drawing.text(x, bottom + 18, label, "small", "middle")
    drawing.text((left + right) / 2, bottom + 38, x_label, "soft", "middle")
    drawing.text(0, 10, y_label, "soft")
    for one in series:
        _draw_series(drawing, one, [at(point) for point in one.points])
    entries = [(one.colour, one.name) for one in series if one.name]
    drawing.height = drawing.legend(bottom + 62, entries) + 8 if entries else bottom + 50
    return drawing


def _drawable(series: ChartSeries, log_x: bool, log_y: bool) -> ChartSeries:
    """Leave out what an axis has no place for: a loss that is NaN, or zero on a logarithmic one."""
    kept = [
        place
        for place, (x, y) in enumerate(series.points)
        if isfinite(x) and isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)
    ]
    tips = [series.tips[place] for place in kept] if series.tips else ()
    points = [series.points[place] for place in kept]
    return ChartSeries(series.name, points, series.colour, series.dots, tips, series.dashed)


def _draw_series(drawing: SvgDrawing, series: ChartSeries, points: list[tuple[float, float]]) -> None:
    tips = series.tips or [series.name] * len(points)
    if series.dots:
        for (x, y), tip in zip(points, tips, strict=True):
            place = f'cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{series.colour}"'
            drawing.elements.append(f"<circle {place}><title>{escape(tip)}</title></circle>")
        return
    steps = " ".join(f"{'L' if place else 'M'}{x:.1f} {y:.1f}" for place, (x, y) in enumerate(points))
    dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
    drawing.elements.append(
        f'<path d="{steps}" stroke="{series.colour}" stroke-width="1.8" fill="none"{dashes}>'
        f"<title>{escape(series.name)}</title></path>"
    )


def _round_numbers(low: float, high: float, wanted: int = 5) -> list[float]:
    step = 10.0 ** floor(log10((high - low) / wanted))
    step *= next((factor for factor in (1, 2, 5) if (high - low) / (step * factor) <= wanted + 1), 10)
    first = ceil(low / step)
    return [place * step for place in range(first, floor(high / step) + 1)]


def html_document(title: str, subtitle: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return a page that needs no other file; `sections` are headings with HTML that is already escaped."""
    body = "".join(f"<section><h2>{escape(heading)}</h2>\n{content}</section>\n" for heading, content in sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>\n{DRAWING_STYLE}{_PAGE_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="asked">{escape(subtitle)}</p>\n{body}</main>\n</body>\n</html>\n'
    )


def numeric_columns(columns: int, rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return which columns hold numbers: every cell is empty or begins as a number does."""
    return [
        all(cell[:1].isdigit() or cell[:1] in "-$" for row in rows if (cell := row[place])) for place in range(columns)
    ]


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of plain texts, numbers to the right."""
    css = ["number" if is_number else "text" for is_number in numeric_columns(len(columns), rows)]

    def line(tag: str, cells: Sequence[str]) -> str:
        marked = (f'<{tag} class="{kind}">{escape(cell)}</{tag}>' for cell, kind in zip(cells, css, strict=True))
        return f"<tr>{''.join(marked)}</tr>"

    lines = "".join((line("th", columns), *(line("td", row) for row in rows)))
    return f'<div style="overflow-x:auto"><table>{lines}</table></div>\n'
