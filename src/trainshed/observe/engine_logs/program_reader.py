"""What every reader of a program's log is: lines in, the events of `observe/events.py` out.

It keeps what it needs between lines, so that a log can be read while it grows.

Steps are counted as in our events: the first one is 0. `ProgramReader.first_step` is the number that the program itself
gives to it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

LogEvent = dict[str, Any]
"""`kind`, `step`, and the keys of its kind; `time` in seconds since 1970 where the line says it."""


@dataclass
class LogFacts:
    """What a log says besides its events; None for what it does not say."""

    steps: int | None = None
    """How many the run is to have."""
    global_batch: int | None = None
    sequence_length: int | None = None
    world_size: int | None = None
    precision: str | None = None
    memory_gib: float | None = None
    """Peak memory of tensors."""
    day: str | None = None
    """The last date in it."""
    eta_seconds: float | None = None
    """The time left that its last line says."""


class ProgramReader(ABC):
    """Reads the lines of one program; `facts` grows as it reads."""

    program: ClassVar[str]
    first_step: ClassVar[int] = 1

    def __init__(self) -> None:
        self.facts = LogFacts()
        self._last_step = -1

    @property
    def name(self) -> str:
        """The program's name, as far as its lines have shown it."""
        return self.program

    @abstractmethod
    def read(self, line: str) -> Iterator[LogEvent]:
        """Yield the events of one line."""

    def is_new(self, step: int) -> bool:
        """Whether a step was not yet seen; a bar is drawn again and again, and a restart goes back some steps."""
        if step == self._last_step:
            return False
        self._last_step = step
        return True


def step_event(step: int, time: float | None = None, **values: Any) -> LogEvent:
    """Return a step with all the keys that every step has; null for what the log does not say.

    A step that took no time is one whose time is not known: its digits were cut, or the clock was set back.
    """
    if (values.get("step_seconds") or 0.0) <= 0:
        values["step_seconds"] = None
    event: LogEvent = {"kind": "step", "step": step}
    if time is not None:
        event["time"] = time
    empty = dict.fromkeys(("loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second_per_gpu"))
    event |= empty | {"mfu": None, "mfu_full_attention": None, "skipped": False}
    return event | {key: value for key, value in values.items() if value is not None or key in event}


def other_event(kind: str, step: int | None, time: float | None = None, **values: Any) -> LogEvent:
    """Return an event of another kind, without the values that are None."""
    event: LogEvent = {"kind": kind, "step": step} | ({"time": time} if time is not None else {})
    return event | {key: value for key, value in values.items() if value is not None or key == "loss"}


def parse_number(text: str | None) -> float | None:
    """Return a finite number; None for nan, inf and whatever is not a number."""
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def parse_time(text: str | None) -> float | None:
    """Return a date and time without a zone as seconds since 1970, read in the zone of this machine."""
    try:
        return datetime.fromisoformat(text).timestamp() if text is not None else None
    except ValueError:
        return None


def named_figures(line: str, sign: str = ":", between: str = "|") -> dict[str, str]:
    """Return the figures of a line of `name: value | name: value`."""
    pairs = (part.rpartition(sign) for part in line.split(between))
    return {name.strip(): value.strip() for name, separator, value in pairs if separator}


def figure(figures: Mapping[str, str], *names: str) -> float | None:
    """Return the first of these figures that is a number."""
    return next((value for name in names if (value := parse_number(figures.get(name))) is not None), None)
