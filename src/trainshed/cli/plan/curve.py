"""The scaling curve in a terminal: a line for every number of GPUs."""

from __future__ import annotations

import textwrap

from rich.text import Text

from trainshed.plan.report.explain import seconds
from trainshed.plan.searching.scaling import BREAKS_BELOW, ScalingCurve, ScalingPoint

_BAR, _LEAST_BAR = 20, 8
_FIGURES = 45
"""Cells that everything but the layout and the bar takes."""
_LINE = "{gpus:>7}  {layout:<{room}}  {step:>7}  {mfu:>5}  {rate:>10}  "


def scaling_rows(curve: ScalingCurve, width: int) -> list[Text]:
    """Draw a scaling curve: efficiency against the smallest number of GPUs that fits, and where it breaks."""
    longest = max((len(str(point.prediction.layout)) for point in curve.points if point.prediction), default=6)
    bar = max(_LEAST_BAR, min(_BAR, width - _FIGURES - longest))
    room = min(longest, width - _FIGURES - bar)
    head = _LINE.format(gpus="GPUs", layout="layout", room=room, step="step", mfu="MFU", rate="tokens/s")
    lines = [Text(f"{head}efficiency", style="dim")]
    lines += [_row(point, room, bar, width, broken=point.gpus == curve.breaks_at) for point in curve.points]
    if curve.breaks_at is not None:
        words = f"below {BREAKS_BELOW:.0%} from {curve.breaks_at:,} GPUs on: {curve.reason}"
        lines += [Text(f"    {line}", style="yellow") for line in textwrap.wrap(words, width - 4)]
    return lines


def _row(point: ScalingPoint, room: int, bar: int, width: int, *, broken: bool) -> Text:
    best = point.prediction
    if best is None or point.efficiency is None or point.tokens_per_second is None:
        words = f"{point.gpus:>7,}  no layout: {point.reason}"
        return Text(words if len(words) <= width else f"{words[: width - 1]}…", style="dim")
    layout = str(best.layout)
    figures = _LINE.format(
        gpus=f"{point.gpus:,}",
        layout=layout if len(layout) <= room else f"{layout[: room - 1]}…",
        room=room,
        step=seconds(best.step_seconds),
        mfu=f"{best.mfu:.1%}",
        rate=f"{point.tokens_per_second:,.0f}",
    )
    cells = min(bar, round(point.efficiency * bar))
    style = "yellow" if broken else ""
    return Text(figures).append("█" * cells, style=style or "cyan").append(f" {point.efficiency:.0%}", style=style)
