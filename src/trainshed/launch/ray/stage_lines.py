"""How a stage stands, as lines in the driver's log: Ray itself knows only the job as a whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Word = Literal["waits", "runs", "done"]

_LINE = re.compile(r"stage (\S+) (waits|runs|done)(?:: (.*))?")
_ERROR = re.compile(r"error: (.*)")


@dataclass(frozen=True)
class StageLine:
    """What the driver last said about a stage."""

    stage: str
    word: Word
    detail: str = ""

    def __str__(self) -> str:
        return f"stage {self.stage} {self.word}" + (f": {self.detail}" if self.detail else "")


def read_stage_lines(log: str) -> dict[str, StageLine]:
    """Return the last line about each stage that a driver's log has, in the order of the stages."""
    found: dict[str, StageLine] = {}
    for line in log.splitlines():
        if match := _LINE.fullmatch(line.strip()):
            word: Word = "waits" if match[2] == "waits" else "runs" if match[2] == "runs" else "done"
            found[match[1]] = StageLine(match[1], word, match[3] or "")
    return found


def lines_of_stage(log: str, stage: str) -> list[str]:
    """Return the part of a driver's log that was written during a stage."""
    lines, current = [], None
    for line in log.splitlines():
        if match := _LINE.fullmatch(line.strip()):
            current = match[1]
        if current == stage:
            lines.append(line)
    return lines


def last_error(log: str) -> str | None:
    """Return the error that ended a driver, as its command line printed it."""
    found = [match[1] for line in log.splitlines() if (match := _ERROR.match(line.strip()))]
    return found[-1] if found else None
