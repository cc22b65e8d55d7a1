"""A run in a notebook: its figures as rows, its page as HTML, and its progress while it trains.

Only IPython's display protocol is used (`_repr_html_`, `display(…, display_id=…)`): nothing of Jupyter is imported
where none runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

from trainshed.observe.event_text import EventFormatter
from trainshed.observe.exporters.export_run import counted_events
from trainshed.observe.live_view import LossBin, loss_bins
from trainshed.plan.report.charts import SvgDrawing, coord
from trainshed.redaction import redacted
from trainshed.reporting import ProgressTask

REDRAW_SECONDS = 0.5
"""How often a display is drawn again at most: each drawing travels to the browser."""
_SHOWN_NOTES = 8
_WIDTH, _HEIGHT, _LEFT, _BELOW = 520, 150, 52, 18
_NAMED_LOSSES = {"source_losses": "loss", "set_losses": "validation_loss"}
_NOT_FIGURES = ("v", "kind", "rank", "batch_hash", "batches", "seconds")


def metric_rows(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row a step, which `pandas.DataFrame` takes as it is; a figure that was not measured is None.

    `step` counts the steps that are done, as checkpoints do. A validation is in the row of the step it followed:
    `validation_loss`. The losses of named sources and validation sets are `loss.NAME` and `validation_loss.NAME`.
    """
    rows: dict[int, dict[str, Any]] = {}
    for event in counted_events(iter(events)):
        if event["kind"] == "step":
            rows[event["step"] + 1] = _row(event, event["step"] + 1, "")
        elif event["kind"] == "validation":
            step = event["step"]
            rows.setdefault(step, {"step": step}).update(_row(event, step, "validation_"))
    columns = dict.fromkeys(key for row in rows.values() for key in row)
    return [dict.fromkeys(columns) | rows[step] for step in sorted(rows)]


def _row(event: Mapping[str, Any], step: int, prefix: str) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step}
    for key, value in event.items():
        if key in _NAMED_LOSSES and isinstance(value, Mapping):
            row |= {f"{_NAMED_LOSSES[key]}.{name}": loss for name, loss in value.items()}
        elif key in ("time", "attempt"):
            row |= {} if prefix else {key: value}
        elif key != "step" and key not in _NOT_FIGURES and not isinstance(value, Mapping | list):
            row[f"{prefix}{key}"] = value
    return row


def loss_chart(bins: Sequence[LossBin]) -> str:
    """Draw losses over steps as an SVG element that carries its own colours."""
    points = [(point.step + 1, point.loss) for point in bins if point.loss is not None]
    if not points:
        return ""
    losses = [loss for _, loss in points]
    low, high = min(losses), max(losses)
    first, last = points[0][0], points[-1][0]
    span = (high - low) or 1.0

    def place(step: int, loss: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - 8) * (step - first) / max(last - first, 1)
        return x, 10 + (_HEIGHT - _BELOW - 14) * (high - loss) / span

    # Not the page's own style sheet: a notebook has one style for all its cells.
    drawing = SvgDrawing(width=_WIDTH, height=_HEIGHT)
    for loss in (high, low):
        _, y = place(first, loss)
        drawing.elements.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{coord(y)}" y2="{coord(y)}" stroke="#8886" stroke-width="1"/>'
        )
        drawing.elements.append(_label(_LEFT - 6, y + 4, f"{loss:.4g}", "end"))
    for step, anchor in ((first, "start"), (last, "end")):
        drawing.elements.append(_label(place(step, low)[0], _HEIGHT - 2, f"step {step:,}", anchor))
    path = " ".join(f"{coord(x)},{coord(y)}" for x, y in (place(step, loss) for step, loss in points))
    drawing.elements.append(f'<polyline points="{path}" fill="none" stroke="#2f6fdf" stroke-width="1.6"/>')
    return drawing.svg(label="loss over steps")


def _label(x: float, y: float, words: str, anchor: str) -> str:
    return (
        f'<text x="{coord(x)}" y="{coord(y)}" text-anchor="{anchor}" font-size="11" font-family="sans-serif" '
        f'fill="#888">{escape(words)}</text>'
    )


def run_html(status: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a run as a notebook shows it: how it stands, the losses so far, where it is."""
    steps = [{"step": row["step"] - 1, "loss": row.get("loss")} for row in rows if row.get("lr") is not None]
    lines = [
        f"<b>{escape(str(status['run']))}</b> {escape(str(status['state']))}",
        *(escape(str(status[key])) for key in ("why", "folder") if status.get(key)),
    ]
    return f"<div>{'<br>'.join(lines)}<br>{loss_chart(loss_bins(steps))}</div>"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which can show HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookProgress:
    """One display of a cell that is drawn again as work goes on: notes, the task under way, the losses."""

    def __init__(self) -> None:
        from IPython.display import display

        self._notes: list[str] = []
        self._task = ""
        self._steps: list[dict[str, Any]] = []
        self._line = ""
        self._handle = display(self, display_id=True)
        self._drawn = 0.0

    def _repr_html_(self) -> str:
        lines = [*self._notes[-_SHOWN_NOTES:], *filter(None, (self._task, self._line))]
        text = escape("\n".join(lines))
        return f'<div><div style="white-space: pre-wrap">{text}</div>{loss_chart(loss_bins(self._steps))}</div>'

    def _draw(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._drawn = time.monotonic()
            if self._handle is not None:
                self._handle.update(self)

    def note(self, text: str) -> None:
        """Show a note."""
        self._notes.append(redacted(text))
        self._draw(now=True)

    def warn(self, text: str) -> None:
        """Show a warning."""
        self.note(f"warning: {text}")

    @contextmanager
    def task(self, label: str, *, total: float | None, unit: str) -> Iterator[ProgressTask]:
        """Show how far a task is for as long as it runs."""
        yield _NotebookTask(self, label, total)
        self._task = ""
        self._draw(now=True)

    def show_task(self, text: str) -> None:
        """Show the task under way."""
        self._task = text
        self._draw()

    @contextmanager
    def watch(self, steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Yield what to call with every event of a training."""
        formatter = EventFormatter(steps)

        def show(event: dict[str, Any]) -> None:
            if event["kind"] == "step":
                self._steps.append({"step": event["step"], "loss": event["loss"]})
                self._line = formatter.format_step(event)
                self._draw()
            elif (text := formatter.format(event)) is not None:
                self.note(text)

        yield show
        self._draw(now=True)


class _NotebookTask:
    def __init__(self, display: NotebookProgress, label: str, total: float | None) -> None:
        self._display, self._label, self._total, self._done, self._text = display, label, total, 0.0, ""

    def advance(self, amount: float) -> None:
        self._done += amount
        share = f" {self._done / self._total:.0%}" if self._total else ""
        self._display.show_task(f"{self._label}{share} {self._text}".rstrip())

    def describe(self, text: str) -> None:
        self._text = text
