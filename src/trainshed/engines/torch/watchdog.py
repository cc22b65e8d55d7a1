"""Ends a rank that does not come on, after it has written down where it stands."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from trainshed.engines.torch.flight import limit_waits, record
from trainshed.observe.flight_record import STALLED_EXIT_CODE

BUDGET_SECONDS: Mapping[str, float] = {
    "rendezvous": 600,
    "load": 3600,
    "compile": 3600,
    "first_step": 3600,
    "step": 600,
    "validation": 3600,
    "checkpoint": 3600,
}
"""How long a rank may be in each phase without a sign of life, and wait there for others."""

COLLECTIVE_SECONDS = 300
"""How long a rank waits for the others in a collective of a plain step, for which nobody loads or compiles."""

_AT = {"step": "step {step}", "first_step": "step {step}", "checkpoint": "the checkpoint of step {done}"}
"""Where a rank stands once `done` steps are done, for people."""

_LAST_WORDS_SECONDS = 60.0
"""For the flight record and `on_stall`, before the process is ended without waiting for them."""


class Watchdog:
    """Ends this process when it shows no sign of life for longer than the phase it is in may take.

    It writes the flight record, calls `on_stall` with a sentence and exits with `STALLED_EXIT_CODE`: a rank that is
    stuck in Python, or in a collective that has no timeout, ends in bounded time. Between `with` and the first `beat`
    nothing is watched.

    The phase also says how long collectives wait: as long as the phase may take, in a `step` for `collective_seconds`.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        budget_seconds: Mapping[str, float] = BUDGET_SECONDS,
        collective_seconds: float = COLLECTIVE_SECONDS,
        on_stall: Callable[[str], None] | None = None,
        poll_seconds: float = 1.0,
    ) -> None:
        self._folder, self._rank = folder, rank
        self._budget_seconds, self._collective_seconds = budget_seconds, collective_seconds
        self._on_stall = on_stall
        self._poll_seconds = poll_seconds
        self._last: tuple[float, int | None, str] | None = None
        self._arming = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def beat(self, step: int | None, phase: str) -> None:
        """Show a sign of life, and say what comes now; costs nothing, so every step can."""
        if phase not in self._budget_seconds:
            raise ValueError(f"no budget for the phase '{phase}'; there are {', '.join(self._budget_seconds)}")
        with self._arming:
            changed = self._last is None or self._last[2] != phase
            self._last = time.monotonic(), step, phase
            if changed:  # within a phase the thread does it
                _end_anyway(self._budget_seconds[phase] + _LAST_WORDS_SECONDS)
        if changed:
            limit_waits(self._collective_seconds if phase == "step" else self._budget_seconds[phase])

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_seconds):
            with self._arming:
                if self._last is None:
                    continue
                since, step, phase = self._last
                left = since + self._budget_seconds[phase] - time.monotonic()
                _end_anyway(max(left, 0) + _LAST_WORDS_SECONDS)
            if left <= 0:
                self._end(step, phase)

    def _end(self, step: int | None, phase: str) -> None:
        at = phase if step is None else _AT.get(phase, f"{phase} after step {{done}}").format(done=step, step=step + 1)
        text = f"rank {self._rank} has shown no progress for {self._budget_seconds[phase]:g} seconds in {at}"
        try:
            record(self._folder, self._rank, reason=text, step=step, phase=phase)
            if self._on_stall is not None:
                self._on_stall(text)
        except BaseException:  # whatever it is, this process must end, and its log is the one place left
            traceback.print_exc()
        finally:
            os._exit(STALLED_EXIT_CODE)


def _end_anyway(seconds: float) -> None:
    """Have this process ended without Python's help: one that holds the interpreter lock stops our thread too."""
    if sys.__stderr__ is None or seconds > threading.TIMEOUT_MAX:
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
