"""How training looks in a terminal: a bar where there is one, else one line per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainshed.cli.console import TerminalReporter, reporter
from trainshed.observe.training_words import TrainingWords
from trainshed.reporting import Reporter

if TYPE_CHECKING:
    from rich.progress import Progress


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
        self.shown, self.words = shown, TrainingWords(steps)

    def __call__(self, event: dict[str, Any]) -> None:
        text = self.words.text(event)
        if text is None:
            return
        if event["kind"] in ("warning", "non_finite", "stall"):
            self.shown.warn(text)
        else:
            self.shown.note(text)


class _Bar(_Lines):
    """Moves a bar with the steps and says everything else above it."""

    def __init__(self, shown: Reporter, steps: int, bar: Progress) -> None:
        super().__init__(shown, steps)
        self.bar, self.task = bar, bar.add_task("starting", total=steps)

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            self.bar.update(self.task, completed=event["step"] + 1, description=self.words.step_text(event))
            return
        if event["kind"] == "resume":
            self.bar.update(self.task, completed=event["step"])
        super().__call__(event)
