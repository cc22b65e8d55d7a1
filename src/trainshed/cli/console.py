"""What the command line shows: the report on stdout, everything else (progress, notes, errors) on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from trainshed.errors import TrainshedError
from trainshed.reporting import Reporter, Task

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Output = Literal["text", "json"]
"""`-o json` on every command that reports."""

PLAIN_SECONDS_BETWEEN_LINES = 5.0


def print_report(data: dict[str, Any], output: Output, text: str) -> None:
    """Print a command's report to stdout: `text` for people, `data` for programs."""
    if output == "json":
        import orjson

        sys.stdout.write(orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode() + "\n")
    else:
        sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def print_error(error: TrainshedError) -> None:
    """Print what went wrong, where, and what to write instead."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    line = Text("error: ", style="bold red")
    if error.where:
        line.append(f"{error.where}: ", style="bold")
    console.print(line.append(error.what))
    if error.hint:
        console.print(Text(f"       {error.hint}", style="cyan"))


def reporter() -> Reporter:
    """Return a progress bar where stderr is a terminal, plain lines elsewhere."""
    return TerminalReporter() if sys.stderr.isatty() else PlainReporter()


def human(amount: float, unit: str) -> str:
    """Write an amount for people: bytes in decimal steps, anything else with separators."""
    if unit != "B":
        return f"{amount:,.0f} {unit}"
    for step in ("B", "kB", "MB", "GB", "TB"):
        if abs(amount) < 1000 or step == "TB":
            return f"{amount:.0f} {step}" if step == "B" else f"{amount:.1f} {step}"
        amount /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Write seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class _PlainTask:
    def __init__(self, label: str, total: float | None, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done, self.text = 0.0, ""
        self.started = self.last_line = time.monotonic()

    def advance(self, amount: float) -> None:
        self.done += amount
        if time.monotonic() - self.last_line >= PLAIN_SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            self.show()

    def describe(self, text: str) -> None:
        self.text = text

    def show(self, *, final: bool = False) -> None:
        seconds = max(time.monotonic() - self.started, 1e-9)
        rate = self.done / seconds
        parts = [f"{self.label:<10}"]
        if self.total and not final:
            parts.append(
                f"{self.done / self.total:4.0%}  {human(self.done, self.unit)} of {human(self.total, self.unit)}"
            )
        else:
            parts.append(human(self.done, self.unit))
        parts.append(f"{human(rate, self.unit)}/s")
        if final:
            parts.append(f"in {duration(seconds)}")
        elif self.total and rate:
            parts.append(f"ETA {duration(max(self.total - self.done, 0) / rate)}")
        if self.text:
            parts.append(self.text)
        print("  ".join(parts), file=sys.stderr, flush=True)  # noqa: T201 - this is the plain progress line


class PlainReporter:
    """Lines for logs and pipes: at most one every few seconds, and one when a task ends."""

    def note(self, text: str) -> None:
        """Print a note."""
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - the console is where printing happens

    def warn(self, text: str) -> None:
        """Print a warning."""
        print(f"warning: {text}", file=sys.stderr, flush=True)  # noqa: T201 - see note

    @contextmanager
    def task(self, label: str, *, total: float | None, unit: str) -> Iterator[Task]:
        """Report a task by lines."""
        task = _PlainTask(label, total, unit)
        yield task
        task.show(final=True)


class _BarTask:
    def __init__(self, progress: Progress, task_id: TaskID) -> None:
        self._progress, self._id = progress, task_id

    def advance(self, amount: float) -> None:
        self._progress.advance(self._id, amount)

    def describe(self, text: str) -> None:
        self._progress.update(self._id, text=text)


class TerminalReporter:
    """A progress bar with rate and time left."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)

    def note(self, text: str) -> None:
        """Print a note above the bars."""
        self._console.print(text, style="dim", markup=False)

    def warn(self, text: str) -> None:
        """Print a warning above the bars."""
        self._console.print(f"warning: {text}", style="yellow", markup=False)

    @contextmanager
    def task(self, label: str, *, total: float | None, unit: str) -> Iterator[Task]:
        """Show a bar for as long as the task runs."""
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        in_bytes = unit == "B"
        progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(show_speed=not in_bytes),
            DownloadColumn() if in_bytes else MofNCompleteColumn(),
            *([TransferSpeedColumn()] if in_bytes else []),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", style="dim"),
            console=self._console,
        )
        with progress:
            yield _BarTask(progress, progress.add_task(label, total=total, text=""))
