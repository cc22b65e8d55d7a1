"""How the library tells what it is doing: it never prints, it reports to whoever listens.

The command line listens with a progress bar on a terminal and with plain lines elsewhere; tests and other programs
pass their own `Reporter` or none at all (`SILENT`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Task(Protocol):
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
        """Tell a choice that was made, and why."""
        ...

    def warn(self, text: str) -> None:
        """Tell something that is legal and probably not wanted."""
        ...

    def task(self, label: str, *, total: float | None, unit: str) -> AbstractContextManager[Task]:
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

    def task(self, label: str, *, total: float | None, unit: str) -> AbstractContextManager[Task]:
        return nullcontext(_SilentTask())


SILENT: Reporter = _Silent()
