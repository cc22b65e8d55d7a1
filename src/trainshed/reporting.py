"""How the library reports what it does: it never prints, it calls a `Reporter`.

The command line shows a progress bar on a terminal and plain lines elsewhere; tests and other programs
pass their own `Reporter` or none at all (`SILENT`).

Waiting is reported apart from that: a store that is deep inside other work has no reporter, and nothing happens while
a server is silent. Code that waits does so in `waiting(...)`, and a thread reports it after a few seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

FIRST_NOTE_SECONDS = 5.0
"""How long a wait may be silent. Further notes follow after twice the time, and twice that again."""
_LOOK_SECONDS = 0.5


class ProgressTask(Protocol):
    """One measured piece of work under way."""

    def advance(self, amount: float) -> None:
        """Add `amount` of the task's unit to what is done."""
        ...

    def describe(self, text: str) -> None:
        """Replace the short text beside the bar (a rate, a count, a file)."""
        ...


class Reporter(Protocol):
    """Receives what the library has to say."""

    def note(self, text: str) -> None:
        """Report a choice that was made, and why."""
        ...

    def warn(self, text: str) -> None:
        """Report something that is legal and probably not wanted."""
        ...

    def task(self, label: str, *, total: float | None, unit: str) -> AbstractContextManager[ProgressTask]:
        """Open a measured task; `unit` is `B` for bytes, else a word ('files', 'documents')."""
        ...


class _SilentTask:
    def advance(self, amount: float) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


class _Silent:
    def note(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def task(self, label: str, *, total: float | None, unit: str) -> AbstractContextManager[ProgressTask]:
        return nullcontext(_SilentTask())


SILENT: Reporter = _Silent()


@contextmanager
def quiet_loggers(*names: str) -> Iterator[None]:
    """Let only errors of these loggers through: libraries write notes of their own between ours."""
    import logging

    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class waiting:
    """Wait for a server or another process inside this context: `what` is an address as it may be shown.

    `detail` may be set under way (which attempt it is, and why there are several).
    """

    def __init__(self, what: str) -> None:
        self.what, self.detail = what, ""
        self.since = self.note_seconds = 0.0

    def __enter__(self) -> waiting:
        self.since, self.note_seconds = time.monotonic(), FIRST_NOTE_SECONDS
        _waits.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        _waits.end(self)


def on_long_wait(tell: Callable[[str], None] | None) -> None:
    """Set the callback for long waits in this process, from any thread; None: nobody is called."""
    _waits.tell = tell


class _Waits:
    """All waits of this process, and the thread that looks at them."""

    def __init__(self) -> None:
        self.tell: Callable[[str], None] | None = None
        self._open: dict[int, waiting] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(self, wait: waiting) -> None:
        self._open[id(wait)] = wait
        # After a fork the thread is not alive in the child, and is started again.
        if self.tell is not None and (self._thread is None or not self._thread.is_alive()):
            with self._lock:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._look, name="trainshed-waits", daemon=True)
                    self._thread.start()

    def end(self, wait: waiting) -> None:
        self._open.pop(id(wait), None)

    def _look(self) -> None:
        reported = 0.0
        while (tell := self.tell) is not None:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            if now - reported < FIRST_NOTE_SECONDS:
                continue  # a link that brings a little every few seconds is not worth a line each time
            due = [wait for wait in list(self._open.values()) if now - wait.since >= wait.note_seconds]
            if not due:
                continue
            for wait in due:
                wait.note_seconds *= 2
            reported = now
            first = min(due, key=lambda wait: wait.since)
            others = f", and for {len(due) - 1} more" if len(due) > 1 else ""
            detail = f" ({first.detail})" if first.detail else ""
            tell(f"waiting for {first.what} for {now - first.since:.0f} s{detail}{others}")


_waits = _Waits()
