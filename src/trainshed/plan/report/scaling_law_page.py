"""A scaling law as one page: its curves over tokens with the runs on them, its constants and their error."""

from __future__ import annotations

from math import log10

from trainshed.plan.report.line_chart import SERIES_COLOURS, ChartSeries, html_document, html_table, line_chart
from trainshed.plan.report.text import format_count
from trainshed.plan.scaling_law import LEVEL, LossPrediction, ScalingLaw

_CURVE_POINTS = 60


def scaling_law_page(law: ScalingLaw, predictions: list[LossPrediction]) -> str:
    """Return the page; `predictions` are drawn beyond the runs."""
    intervals = law.intervals
    constants = [
        [name, f"{value:.4g}", f"{intervals[name][0]:.4g} to {intervals[name][1]:.4g}"]
        for name, value in law.constants.items()
    ]
    rows = [
        [
            point.name,
            format_count(point.parameters),
            format_count(point.tokens),
            f"{point.loss:.4f}",
            f"{law.predict(point.parameters, point.tokens).loss:.4f}",
        ]
        for point in law.points
    ]
    sections = [
        ("Loss over tokens, by model size", _curves(law, predictions)),
        (
            f"L(N, D) = E + A / N^α + B / D^β, with {LEVEL:.0%} intervals",
            html_table(["", "fit", "interval"], constants),
        ),
    ]
    if predictions:
        shown = [
            [
                format_count(one.parameters),
                format_count(one.tokens),
                f"{one.compute:.3g}",
                f"{one.loss:.4f} ({one.interval[0]:.4f} to {one.interval[1]:.4f})",
            ]
            for one in predictions
        ]
        sections.append(("Predicted", html_table(["parameters", "tokens", "FLOPs", "loss"], shown)))
    sections.append(("Runs", html_table(["run", "parameters", "tokens", "loss", "fitted"], rows)))
    subtitle = f"{len(law.points)} runs, residual {law.residual:.2%}"
    if law.held_out is not None and law.held_out_error is not None:
        subtitle += f"; {law.held_out[0].name} is predicted from the others with an error of {law.held_out_error:+.2%}"
    return html_document("Scaling law", subtitle, sections)


def _curves(law: ScalingLaw, predictions: list[LossPrediction]) -> str:
    sizes = sorted({point.parameters for point in law.points})
    tokens = [point.tokens for point in (*law.points, *predictions)]
    low, high = log10(min(tokens)), log10(max(tokens))
    series = []
    for place, size in enumerate(sizes):
        colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
        amounts = [10 ** (low + (high - low) * step / _CURVE_POINTS) for step in range(_CURVE_POINTS + 1)]
        curve = [(amount, law.predict(size, amount).loss) for amount in amounts]
        series.append(ChartSeries(format_count(size), curve, colour, dashed=True))
        own = [point for point in law.points if point.parameters == size]
        tips = [f"{point.name}: {point.loss:.4f}" for point in own]
        series.append(ChartSeries("", [(point.tokens, point.loss) for point in own], colour, dots=True, tips=tips))
    if predictions:
        tips = [f"{format_count(one.parameters)} parameters: {one.loss:.4f}" for one in predictions]
        points = [(one.tokens, one.loss) for one in predictions]
        series.append(ChartSeries("predicted", points, "#c94f4f", dots=True, tips=tips))
    return line_chart(series, x_label="tokens", y_label="loss", log_x=True).svg(label="Loss over tokens")
