"""Where the agents of one start meet: small files in the run's folder, each with one writer.

    <run>/starts/<start>/node-00001.json    who came (`Joined`), written once by each agent
    <run>/starts/<start>/beat-00001         its signs of life, counted: clocks of different machines never compared
    <run>/starts/<start>/order.json         what the first agent has decided (`Order`): an attempt, or the end
    <run>/starts/<start>/exit-code          how it ends, for the target's script: a node that was lost does not decide
    <run>/starts/<start>/bad-nodes          hosts that were to blame, for the target's script: a new start avoids them
    <run>/starts/<start>/roll-call          there while ranks are ending: agents beat with every look

A start is one placement by the scheduler (job id and restart count). Several attempts may lie within one: where a spare
node steps in, the ranks start anew without a new placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import NotFound
from trainshed.storage import LocalStore


@dataclass(frozen=True)
class Joined:
    """One agent that came; `problem` says why its node cannot take part."""

    slot: int
    host: str
    version: str
    problem: str | None = None


@dataclass(frozen=True)
class Order:
    """What all agents do next; those later in time have larger numbers."""

    number: int
    attempt: int | None = None
    slots: tuple[int, ...] = ()
    """The slot of each node rank; whoever is not among them waits as a spare."""
    master: tuple[str, int] = ("", 0)
    exit_code: int | None = None
    """Set when it is over: every agent ends with this."""
    what: str = ""
    """Why it is over, in a sentence."""


class Meeting:
    """The files of one start."""

    def __init__(self, run_folder: Path, start: str) -> None:
        self.folder = run_folder / "starts" / start
        self._store = LocalStore(self.folder)

    def join(self, joined: Joined) -> None:
        """Say that this agent is here."""
        self._put(f"node-{joined.slot:05d}.json", asdict(joined))

    def joined(self) -> dict[int, Joined]:
        """Return who is here, by slot."""
        found = [Joined(**self._get(path.name) or {}) for path in sorted(self.folder.glob("node-*.json"))]
        return {each.slot: each for each in found}

    def beat(self, slot: int, count: int) -> None:
        """Give a sign of life."""
        self._store.put(f"beat-{slot:05d}", str(count).encode())

    def beats(self, slots: tuple[int, ...]) -> dict[int, int]:
        """Return how many signs of life each slot has given."""
        found: dict[int, int] = {}
        for slot in slots:
            try:
                found[slot] = int(self._store.read(f"beat-{slot:05d}") or b"0")
            except NotFound:
                found[slot] = 0
        return found

    def call_the_roll(self) -> None:
        """Have all agents beat with every look."""
        self._store.put("roll-call", b"")

    def end_the_roll_call(self) -> None:
        """Have them beat slowly again."""
        self._store.delete("roll-call")

    @property
    def roll_is_called(self) -> bool:
        """Whether agents beat with every look."""
        return (self.folder / "roll-call").exists()

    def give(self, order: Order) -> None:
        """Tell all agents what to do; only the first agent does."""
        if order.exit_code is not None:
            self._store.put("exit-code", f"{order.exit_code}\n".encode())
        self._put("order.json", asdict(order))

    def blame(self, hosts: Sequence[str]) -> None:
        """Say which hosts were to blame for the end."""
        if hosts:
            self._store.put("bad-nodes", "".join(f"{host}\n" for host in hosts).encode())

    def order(self) -> Order | None:
        """Return what the first agent has decided last."""
        body = self._get("order.json")
        if body is None:
            return None
        return Order(**body | {"slots": tuple(body["slots"]), "master": tuple(body["master"])})

    def _put(self, name: str, body: dict[str, Any]) -> None:
        self._store.put(name, orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")

    def _get(self, name: str) -> dict[str, Any] | None:
        try:
            return orjson.loads(self._store.read(name))
        except NotFound:
            return None
