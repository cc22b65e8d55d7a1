"""The reader of a training log of any known program: which one wrote it shows at its first event.

Every line goes to the readers of all programs until one of them finds something; from then on that one reads alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainshed.observe.engine_logs.maxtext import MaxTextReader
from trainshed.observe.engine_logs.megatron import MegatronReader
from trainshed.observe.engine_logs.nemo import NemoReader
from trainshed.observe.engine_logs.program_reader import LogEvent, LogFacts, ProgramReader
from trainshed.observe.engine_logs.torchtune import TorchtuneReader
from trainshed.observe.engine_logs.trainshed import TrainshedReader

PROGRAM_READERS: tuple[type[ProgramReader], ...] = (
    TrainshedReader,
    MegatronReader,
    NemoReader,
    TorchtuneReader,
    MaxTextReader,
)
_DAY = re.compile(r"\b(20\d\d-[01]\d-[0-3]\d)\b")
_LINE_END = re.compile(r"[\r\n]")
_LONGEST_LINE = 1 << 16
"""A longer one is not a figure of a step: a dump of something, without a line break."""

READABLE = (
    "Trainshed's own log, Megatron-LM's and Megatron-Bridge's \"elapsed time per iteration (ms)\", NeMo's "
    '"train_step_timing in s" and DLLogger, torchtune\'s "Step 5 | loss:" and its bar, MaxText\'s "completed step:"'
)
"""What is read, for an error message."""


@dataclass
class LogReader:
    """Reads a log of any of these programs; which one it is shows at its first event."""

    reader: ProgramReader | None = None
    """That of the program, once it is known."""
    _candidates: list[ProgramReader] = field(default_factory=lambda: [reader() for reader in PROGRAM_READERS])
    _partial: str = ""
    _day: str | None = None

    @property
    def facts(self) -> LogFacts:
        """What the log says besides its events."""
        facts = self.reader.facts if self.reader is not None else LogFacts()
        facts.day = self._day
        return facts

    def read_line(self, line: str) -> list[LogEvent]:
        """Return the events of one line."""
        if match := _DAY.search(line):
            self._day = match[1]
        if self.reader is not None:
            return list(self.reader.read(line))
        for candidate in self._candidates:
            if events := list(candidate.read(line)):
                self.reader, self._candidates = candidate, []
                return events
        return []

    def feed(self, text: str) -> list[LogEvent]:
        """Return the events of the lines that this text completes; a bar's lines end with a carriage return."""
        *lines, self._partial = _LINE_END.split(self._partial + text)
        self._partial = self._partial[-_LONGEST_LINE:]
        return [event for line in lines if line for event in self.read_line(line)]

    def finish(self) -> list[LogEvent]:
        """Return the events of the last line, which may have no end."""
        return self.feed("\n")


def read_lines(lines: Iterable[str]) -> tuple[list[LogEvent], LogReader]:
    """Read a log that is there as a whole; returns its events, and the reader, whose `facts` are what else it says."""
    reader = LogReader()
    events = [event for line in lines for event in reader.feed(line if line.endswith("\n") else f"{line}\n")]
    return events, reader
