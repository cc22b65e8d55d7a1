"""Requests to stop that reach an agent while it has no ranks to pass them on to."""

from __future__ import annotations

import signal
from types import TracebackType

from trainshed.launch.ranks import STOP_SIGNALS


class StopRequests:
    """Remembers the first signal that asked this process to stop; while ranks run, they are told instead."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequests:
        self._before = {each: signal.signal(each, self._ask) for each in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)  # type: ignore[arg-type]

    @property
    def exit_code(self) -> int | None:
        """128 + the signal; None while nobody has asked."""
        return None if self.signal is None else 128 + self.signal

    def _ask(self, number: int, _: object) -> None:
        self.signal = self.signal or number
