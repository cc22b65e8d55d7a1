"""How training looks in a terminal: a bar where there is one, else one line per step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainshed.cli.console import TerminalReporter, duration, reporter
from trainshed.reporting import Reporter

if TYPE_CHECKING:
    from rich.progress import Progress

_RECENT_STEPS = 20  # what the ETA is drawn from


@contextmanager
def training_progress(steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield what to call with every event of a training."""
    shown = reporter()
    if not isinstance(shown, TerminalReporter):
        yield _Lines(shown, steps)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    # A step's line says share, time left and rate itself: the bar needs nothing beside it.
    columns = (BarColumn(bar_width=16), TextColumn("{task.description}"))
    with Progress(*columns, console=shown.console) as bar:
        yield _Bar(shown, steps, bar)


class _Lines:
    """Says each event in a line."""

    def __init__(self, shown: Reporter, steps: int) -> None:
        self.shown, self.steps = shown, steps
        self.recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def __call__(self, event: dict[str, Any]) -> None:
        text = self.text(event)
        if text is None:
            return
        if event["kind"] in ("warning", "non_finite"):
            self.shown.warn(text)
        else:
            self.shown.note(text)

    def text(self, event: dict[str, Any]) -> str | None:
        """An event in words; None for those nobody waits for."""
        kind = event["kind"]
        if kind == "step":
            return self.step_text(event)
        if kind in ("note", "warning"):
            return event["text"]
        if kind == "start":
            return (
                f"training {event['run']}: {event['parameters']:,} parameters on {event['device']}, {event['layout']}"
            )
        if kind == "resume":
            return f"going on after step {event['step']} from {event['checkpoint']}"
        if kind == "probe":
            return f"base weights: loss {event['loss']:.4f} on the probe batch, {event['expected']:.4f} when fetched"
        if kind == "validation":
            return f"validation after step {event['step']}: loss {_figure(event['loss'], '.4f')}"
        if kind == "non_finite":
            return f"step {event['step']}: {event['what']}; {_POLICIES[event['policy']]}"
        if kind == "checkpoint" and event["phase"] in ("committed", "failed"):
            what = event.get("what") or event.get("path") or ""
            return f"checkpoint of step {event['step']} {event['phase']}  {what}".rstrip()
        if kind == "signal":
            return f"asked to stop by {event['name']}: stopped after step {event['step']}"
        return None

    def step_text(self, event: dict[str, Any]) -> str:
        """One step: how far, how long still, how well, how fast."""
        self.recent.append(event["step_seconds"])
        done = event["step"] + 1
        left = (self.steps - done) * sum(self.recent) / len(self.recent)
        parts = [
            f"step {done}/{self.steps}  {done / self.steps:4.0%}  ETA {duration(left)}",
            f"loss {_figure(event['loss'], '.4f')}",
            f"grad norm {_figure(event['grad_norm'], '.3f')}",
            f"{event['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU",
        ]
        if event.get("mfu") is not None:
            parts.append(f"MFU {event['mfu']:.1%}")
        return "  ".join(parts)


class _Bar(_Lines):
    """Moves a bar with the steps and says everything else above it."""

    def __init__(self, shown: Reporter, steps: int, bar: Progress) -> None:
        super().__init__(shown, steps)
        self.bar, self.task = bar, bar.add_task("starting", total=steps)

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            self.bar.update(self.task, completed=event["step"] + 1, description=self.step_text(event))
            return
        if event["kind"] == "resume":
            self.bar.update(self.task, completed=event["step"])
        super().__call__(event)


_POLICIES = {"stop": "stopping", "skip": "nothing was updated, going on"}


def _figure(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
