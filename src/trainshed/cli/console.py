"""What every verb prints and reads in the same way: the report on stdout; progress, notes and errors on stderr."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from trainshed.errors import InputError, TrainshedError
from trainshed.observe.event_text import EventFormatter, format_duration
from trainshed.redaction import redacted
from trainshed.reporting import ProgressTask, Reporter

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from trainshed.storage import CopyResult


Output = Literal["text", "json"]
"""`-o json` on every command that reports."""
Flag = Annotated[bool, Parameter(negative="")]
"""Off unless it is written; it has no `--no-` form."""

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
    place = (f"{error.where}: ", "bold") if error.where else ""
    console.print(Text.assemble(("error: ", "bold red"), place, error.what))
    if error.hint:
        console.print(Text(textwrap.indent(error.hint, "       "), style="cyan"))


def print_error_report(error: TrainshedError) -> None:
    """Print an error to stdout as the report of a command that was asked for JSON."""
    data = {
        "schema": "trainshed.error/1",
        "what": error.what,
        "where": error.where,
        "hint": error.hint,
        "exit_code": error.exit_code,
    }
    print_report(data, "json", "")


def reporter() -> Reporter:
    """Return a progress bar where stderr is a terminal, plain lines elsewhere."""
    global _latest
    _latest = TerminalReporter() if sys.stderr.isatty() else PlainReporter()
    return _latest


_latest: Reporter | None = None


def ask(question: str) -> str | None:
    """Ask a person at the terminal; None where they closed it (Ctrl-D) and gave no answer."""
    sys.stderr.write(f"{question} ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        sys.stderr.write("\n")
        return None
    return line.strip()


def tell_wait(text: str) -> None:
    """Say that something is being waited for, above any progress bars."""
    (_latest or PlainReporter()).note(text)


def format_amount(amount: float, unit: str) -> str:
    """Write an amount for people: bytes in decimal steps, anything else with separators; `unit` is a plural."""
    if unit != "B":
        unit = unit.removesuffix("s") if amount == 1 else unit
        # A rate below ten a second is often below one.
        return f"{amount:,.0f} {unit}" if amount >= 10 or amount == int(amount) else f"{amount:.2g} {unit}"
    for step in ("B", "kB", "MB", "GB", "TB"):
        if abs(amount) < 1000 or step == "TB":
            return f"{amount:.0f} {step}" if step == "B" else f"{amount:.1f} {step}"
        amount /= 1000
    raise AssertionError("unreachable")


def described_names(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Write names with their descriptions beside them; in a terminal that is too narrow, below them.

    In a pipe every name keeps its one line, for grep.
    """
    widest = max((len(name) for name, _ in rows), default=0)
    columns = shutil.get_terminal_size().columns
    room = columns - widest - 2
    if not (sys.stdout.isatty() or "COLUMNS" in os.environ) or room >= max((len(text) for _, text in rows), default=0):
        return [f"{name:<{widest}}  {text}".rstrip() for name, text in rows]
    indent = widest + 2 if room >= _NARROWEST_DESCRIPTION else 4
    lines = []
    for name, text in rows:
        first, *others = textwrap.wrap(text, columns - indent, break_on_hyphens=False) or [""]
        lines += [f"{name:<{widest}}  {first}"] if indent > widest else [name, f"    {first}"]
        lines += [f"{'':<{indent}}{part}" for part in others]
    return lines


_NARROWEST_DESCRIPTION = 30
_SHORTEST_RATED = 0.1
"""Seconds below which a rate is that of the clock."""


def figures(amount: float, total: float | None, unit: str, seconds: float, *, done: bool) -> str:
    """Write how far a task is: `43%  1.2 GB of 2.8 GB  112 MB/s  ETA 0:00:14`, and when done how long it took."""
    rate = amount / max(seconds, 1e-9)
    if done and seconds < _SHORTEST_RATED:
        return f"{format_amount(amount, unit):>10}  in less than 0.1 s"
    if done or not total:
        return f"{format_amount(amount, unit):>10}  {format_amount(rate, unit)}/s  in {format_duration(seconds)}"
    left = format_duration((total - amount) / rate) if amount else "?"
    done_amount = format_amount(amount, unit)
    if unit != "B":
        done_amount = done_amount.partition(" ")[0]
    done_of_all = f"{done_amount} of {format_amount(total, unit)}"
    return f"{amount / total:4.0%}  {done_of_all}  {format_amount(rate, unit)}/s  ETA {left}"


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
        shown = figures(self.done, self.total, self.unit, time.monotonic() - self.started, done=final)
        print(f"{self.label:<18} {shown}  {self.text}".rstrip(), file=sys.stderr, flush=True)  # noqa: T201


class PlainReporter:
    """Lines for logs and pipes: at most one every few seconds, and one when a task ends."""

    def note(self, text: str) -> None:
        """Print a note."""
        print(redacted(text), file=sys.stderr, flush=True)  # noqa: T201 - the console is where printing happens

    def warn(self, text: str) -> None:
        """Print a warning."""
        print(f"warning: {redacted(text)}", file=sys.stderr, flush=True)  # noqa: T201 - see note

    @contextmanager
    def task(self, label: str, *, total: float | None, unit: str) -> Iterator[ProgressTask]:
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


_LABEL_WIDTH, _USUAL_WIDTH = 18, 80


class TerminalReporter:
    """A progress bar with rate and time left."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)

    def note(self, text: str) -> None:
        """Print a note above the bars."""
        self.console.print(redacted(text), style="dim", markup=False)

    def warn(self, text: str) -> None:
        """Print a warning above the bars."""
        self.console.print(f"warning: {redacted(text)}", style="yellow", markup=False)

    @contextmanager
    def task(self, label: str, *, total: float | None, unit: str) -> Iterator[ProgressTask]:
        """Show a bar for as long as the task runs."""
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
        from rich.progress import Task as RichTask
        from rich.table import Column
        from rich.text import Text

        class Figures(ProgressColumn):
            """Share, amount, rate and the time left, or the time taken once it is done; then what else is known."""

            def render(self, task: RichTask) -> Text:
                shown = figures(task.completed, task.total, unit, task.elapsed or 0.0, done=task.finished)
                return Text.assemble(shown, (f"  {task.fields['text']}".rstrip(), "dim"))

        # In one line whatever the width: first the bar goes, then the end of the line.
        one_line = Column(no_wrap=True, overflow="ellipsis")
        padding = max(len(label), _LABEL_WIDTH if self.console.width >= _USUAL_WIDTH else 0)
        progress = Progress(
            TextColumn(f"{{task.description:<{padding}}}", table_column=Column(no_wrap=True, min_width=padding)),
            BarColumn(bar_width=24),
            Figures(table_column=one_line),
            console=self.console,
        )
        with progress:
            yield _BarTask(progress, progress.add_task(label, total=total, text=""))


@contextmanager
def training_progress(steps: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield what to call with every event of a training."""
    shown = reporter()
    if not isinstance(shown, TerminalReporter):
        yield _ProgressLines(shown, steps)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    # A step's line says share, time left and rate itself: the bar needs nothing beside it.
    columns = (BarColumn(bar_width=16), TextColumn("{task.description}"))
    with Progress(*columns, console=shown.console) as bar:
        yield _ProgressBar(shown, steps, bar)


class _ProgressLines:
    """Says each event in a line; of the steps the first, the last, and at most one every few seconds."""

    def __init__(self, shown: Reporter, steps: int) -> None:
        self.shown, self.words = shown, EventFormatter(steps)
        self.last_step_line: float | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        text = self.words.format(event)
        if text is None or (event["kind"] == "step" and not self._is_due(event["step"] + 1)):
            return
        if event["kind"] in ("warning", "non_finite", "spike", "stall", "alarm"):
            self.shown.warn(text)
        else:
            self.shown.note(text)

    def _is_due(self, done: int) -> bool:
        now = time.monotonic()
        is_first, is_last = self.last_step_line is None, done == self.words.steps
        if not is_first and not is_last and now - (self.last_step_line or 0.0) < PLAIN_SECONDS_BETWEEN_LINES:
            return False
        self.last_step_line = now
        return True


class _ProgressBar(_ProgressLines):
    """Moves a bar with the steps and says everything else above it."""

    def __init__(self, shown: Reporter, steps: int, bar: Progress) -> None:
        super().__init__(shown, steps)
        self.bar, self.task = bar, bar.add_task("starting", total=steps)

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            self.bar.update(self.task, completed=event["step"] + 1, description=self.words.format_step(event))
            return
        if event["kind"] == "resume":
            self.bar.update(self.task, completed=event["step"])
        super().__call__(event)


def report_copy(result: CopyResult, schema: str, output: Output) -> None:
    """Print what a copy did: the source with its commit, how much moved, where the manifest is."""
    data = {"schema": schema, **result.as_dict()}
    moved = f"{result.copied_files} copied ({format_amount(result.copied_bytes, 'B')})"
    kept = result.files - result.copied_files
    lines = [
        f"{result.files} files, {format_amount(result.bytes, 'B')}: {moved}, {kept} already there",
        f"from      {result.source}",
        f"to        {result.destination}",
        f"manifest  {result.manifest}",
    ]
    if not result.complete:
        lines.append("other tasks have not finished yet; the last one writes the manifest of the whole")
    print_report(data, output, "\n".join(lines))


def parse_task(text: str) -> tuple[int, int]:
    """Read `--task i/N`: part i of N, counted from 0 as SLURM_ARRAY_TASK_ID and JOB_COMPLETION_INDEX are."""
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None:
        raise InputError(f"--task {text} is not i/N", hint="write for example --task 0/16")
    number, count = int(match[1]), int(match[2])
    if number >= count:
        hint = f"tasks are counted from 0: write --task 0/{count} to --task {count - 1}/{count}" if count else None
        raise InputError(f"--task {text}: there is no such part", hint=hint or "write for example --task 0/16")
    return number, count
