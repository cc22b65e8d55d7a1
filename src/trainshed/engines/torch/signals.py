"""Requests to stop: a signal only sets a flag; ranks agree on it at a step boundary."""

from __future__ import annotations

import signal
from types import FrameType

WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequests:
    """Which stop signals this rank has received; each rank votes with every step, and one vote stops all."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequests:
        for number in WATCHED:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyrefly: ignore[bad-argument-type]

    def votes(self) -> list[float]:
        """One number per watched signal, to be summed over all ranks."""
        return [float(number in self.seen) for number in WATCHED]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.seen.add(number)


def agreed(votes: list[float]) -> int | None:
    """Return the signal that some rank has received, if any."""
    return next((int(number) for number, count in zip(WATCHED, votes, strict=True) if count > 0), None)
