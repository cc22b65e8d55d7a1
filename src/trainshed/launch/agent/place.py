"""A node's place in its job: which node it is, where the first one is reached, which start of the job this is."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields

from trainshed.errors import InputError
from trainshed.launch.job import Stage
from trainshed.launch.ranks import free_port

_NODE_NAMES = ("TRAINSHED_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
_PART_NAMES = ("TRAINSHED_PART", "SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True)
class NodePlace:
    """Where this agent stands: `slot` counts the nodes of the allocation, the spare ones included."""

    slot: int
    slots: int
    host: str
    """How others reach this node."""
    master: tuple[str, int]
    """Where rank 0 listens when it is on slot 0."""
    start: str
    """Names this start of the job, alike on all its nodes and never used again."""

    @property
    def leads(self) -> bool:
        """Whether this agent decides for all: the scheduler ends the whole job when the first node is lost."""
        return self.slot == 0

    @classmethod
    def from_environment(cls, stage: Stage, environment: Mapping[str, str] = os.environ) -> NodePlace:
        """Read what the target's script has set; a node alone needs none of it."""
        slots = stage.nodes + stage.spares
        host = environment.get("TRAINSHED_HOST") or environment.get("SLURMD_NODENAME") or socket.gethostname()
        start = environment.get("TRAINSHED_START")
        if slots == 1:
            return cls(0, 1, host, ("127.0.0.1", free_port()), start or uuid.uuid4().hex)
        slot = _number(_NODE_NAMES, environment, slots, f"which of the {slots} nodes this is")
        master, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
        if not master or not port.isdecimal():
            raise _missing("MASTER_ADDR" if not master else "MASTER_PORT", "where rank 0 listens")
        if not start:
            raise _missing("TRAINSHED_START", "which start of the job this is, alike on all its nodes")
        return cls(slot, slots, host, (master, int(port)), start)


def part_of(stage: Stage, written: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return which part of a stage this node does, as `3/8` with parts counted from 0; None for a stage in one."""
    if stage.parts == 1:
        return None
    if written is not None:
        number, _, parts = written.partition("/")
        if not number.isdecimal() or parts != str(stage.parts) or int(number) >= stage.parts:
            raise InputError(
                f"`{written}` is no part of {stage.name}, which has {stage.parts}",
                where="--part",
                hint=f"write 0/{stage.parts} to {stage.parts - 1}/{stage.parts}",
            )
        return written
    number = _number(_PART_NAMES, environment, stage.parts, f"which of the {stage.parts} parts this is")
    return f"{number}/{stage.parts}"


@dataclass(frozen=True)
class AgentTimes:
    """How long agents wait for each other; `TRAINSHED_LOST_SECONDS=60` and so on change them."""

    beat_seconds: float = 30.0
    """Between two signs of life."""
    look_seconds: float = 2.0
    """Between two looks at what others have written."""
    lost_seconds: float = 150.0
    """Without a sign of life for so long a node is lost."""
    roll_call_seconds: float = 20.0
    """The same once ranks have ended somewhere: all agents beat with every look then."""
    meet_seconds: float = 600.0
    """How long the first node waits for the others to start."""
    failure_grace_seconds: float = 20.0
    """How long ranks may take to write down where they stood when another has failed."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> AgentTimes:
        """Read what the environment changes."""
        changed = {}
        for field in fields(cls):
            name = f"TRAINSHED_{field.name.upper()}"
            if name in environment:
                try:
                    changed[field.name] = float(environment[name])
                except ValueError:
                    raise InputError(
                        f"{name} is `{environment[name]}`, which is no number of seconds", where="the environment"
                    ) from None
        return cls(**changed)


def phases_before(environment: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Return how long it took before this agent ran, as the target's script has noted it: our code, then the image."""
    try:
        began, installed = float(environment["TRAINSHED_BEGAN"]), float(environment["TRAINSHED_INSTALLED"])
    except (KeyError, ValueError):
        return {}
    return {"install": max(0.0, installed - began), "image": max(0.0, time.time() - installed)}


def _number(names: tuple[str, ...], environment: Mapping[str, str], count: int, meaning: str) -> int:
    for name in names:
        text = environment.get(name)
        if text is None:
            continue
        if not text.isdecimal() or int(text) >= count:
            raise InputError(f"{name} is `{text}`, and there are {count}", where="the environment")
        return int(text)
    raise _missing(names[0], meaning)


def _missing(name: str, meaning: str) -> InputError:
    return InputError(
        f"{name} is not set: nothing says {meaning}",
        where="the environment",
        hint="the scripts that `trainshed render` prints set it",
    )
