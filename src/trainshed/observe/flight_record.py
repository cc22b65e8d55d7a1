"""What one rank writes down when it fails or stands still: `health/attempt-0001/rank-00003.json`.

The engine makes it from PyTorch's flight recorder and its Python stacks; `flight.diagnose` compares those of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

STALLED_EXIT_CODE = 75
"""A rank whose watchdog saw no progress exits with this (EX_TEMPFAIL of sysexits.h: try again)."""

NCCL_DUMP = "nccl-rank-"
"""What PyTorch names the dump of NCCL's watchdog, before the rank's number."""


@dataclass(frozen=True)
class Collective:
    """One collective or point-to-point operation that a rank began.

    `seq` counts the collectives of a group on one backend (a group may have gloo and NCCL). `created` is in seconds
    since 1970, `peer` the other rank of a point-to-point operation.
    """

    backend: str
    group: str
    seq: int
    op: str
    sizes: list[list[int]]
    dtype: str
    state: Literal["waiting", "started", "done"]
    created: float
    peer: int | None = None


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank; `collective` where it is about other ranks (a timeout, a lost connection)."""

    kind: str
    text: str
    collective: bool


@dataclass(frozen=True)
class Group:
    """A process group: its name as all members know it, what it is for, its ranks."""

    name: str
    description: str
    ranks: list[int]


@dataclass(frozen=True)
class FlightRecord:
    """What one rank wrote down.

    `stack` is where its error came from or else its main thread, innermost last, as `file:line in function: code`, and
    `waiting` what it was waiting for by the look of it. `missing` says why there are no collectives, where it is known.
    """

    rank: int
    time: float
    reason: str
    step: int | None = None
    phase: str | None = None
    error: RankError | None = None
    stack: list[str] = field(default_factory=list)
    waiting: Literal["collective", "point-to-point"] | None = None
    groups: list[Group] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    missing: str | None = None
    threads: str = ""
    v: int = 1

    def to_json(self) -> bytes:
        """The record as its file holds it."""
        return orjson.dumps(self, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_json(cls, content: bytes) -> FlightRecord:
        """Read a record; keys of a later version are passed over."""
        body: dict[str, Any] = orjson.loads(content)
        known = {key: value for key, value in body.items() if key in cls.__dataclass_fields__}
        known["error"] = RankError(**known["error"]) if known.get("error") else None
        known["groups"] = [Group(**each) for each in known.get("groups", [])]
        known["collectives"] = [Collective(**each) for each in known.get("collectives", [])]
        return cls(**known)


def record_file(rank: int) -> str:
    """The name of a rank's flight record."""
    return f"rank-{rank:05d}.json"
