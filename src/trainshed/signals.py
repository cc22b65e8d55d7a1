"""Requests to stop, as signals: one guard for every process of ours, and the exit code of a process that obeyed one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self


def known_signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return those of some signals that this system has: Windows knows few."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


STOP_SIGNALS = known_signals("SIGTERM", "SIGUSR1", "SIGINT")
"""The signals that ask a job to save and end. Ranks vote in this order."""


def exit_code_of(number: int) -> int:
    """Return the exit code of a process that a signal has stopped."""
    return 128 + number


class StopSignals:
    """Notes the signals that ask this process to stop, for as long as it is entered.

    Earlier handlers come back afterwards, so that guards nest: while ranks run, theirs is on top of the agent's. Only a
    main thread may handle signals; in any other nothing is installed.
    """

    def __init__(
        self, signals: Sequence[int] = STOP_SIGNALS, *, on_signal: Callable[[int], None] | None = None
    ) -> None:
        """`on_signal` is called inside the handler for every signal, repeated ones too: it may only set flags."""
        self.first: int | None = None
        self.received: set[int] = set()
        self._signals = tuple(signals)
        self._on_signal = on_signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Begin to note signals."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        """Put the earlier handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def exit_code(self) -> int | None:
        """The exit code that tells of the first signal; None while there was none."""
        return None if self.first is None else exit_code_of(self.first)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.first = self.first if self.first is not None else number
        self.received.add(number)
        if self._on_signal is not None:
            self._on_signal(number)


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait until this is left, and raise it then."""
    with StopSignals((signal.SIGINT,)) as stop:
        yield
    if stop.first is not None:
        raise KeyboardInterrupt


def import_torch() -> None:
    """Import torch where a person may press Ctrl-C: an interrupt inside its C++ part would abort the process.

    Where torch is missing nothing happens: who uses it says what to install.
    """
    with delayed_interrupt(), suppress(ImportError):
        import torch  # noqa: F401
