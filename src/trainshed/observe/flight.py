"""Which rank held the others up, and in which collective: the flight records of all ranks compared.

Ranks of a group number their collectives alike, so whoever has begun fewer of them than the others is the one that
they wait for. Someone who is waited for may be waiting as well, in another group: blame lies at the end of the chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainshed.errors import CorruptData
from trainshed.observe.flight_record import NCCL_DUMP, Collective, FlightRecord, Group
from trainshed.observe.torch_trace import read_pickle

_ONE_SIZE = frozenset({"all_reduce", "allreduce", "broadcast", "reduce"})
"""Collectives whose tensors must have one size on all ranks; those of others may be uneven."""

STEP_PHASES = (None, "step", "first_step")
"""Phases in which a rank is within a step; in others it is between two."""

_MAX_RANGES = 8


@dataclass(frozen=True)
class Diagnosis:
    """Who failed the others (`ranks`, empty where it cannot be told), in which collective, and a sentence about it."""

    ranks: list[int]
    collective: str | None
    sentence: str


@dataclass(frozen=True)
class _Wait:
    """One rank in one operation, and whom it waits for there: `absent` have not come, `astray` came with another."""

    rank: int
    what: Collective
    group: Group
    absent: tuple[int, ...]
    astray: tuple[int, ...]

    @property
    def place(self) -> tuple[str, str, int, int | None]:
        return self.what.backend, self.group.name, self.what.seq, self.what.peer

    def __str__(self) -> str:
        size = " and ".join("×".join(map(str, each)) or "scalar" for each in self.what.sizes[:2])
        detail = f"; {size} {self.what.dtype}" if size else ""
        number = "" if self.what.peer is not None else f" #{self.what.seq}"
        return f"{self.what.op}{number} of group {self.group.description} ({named(self.group.ranks)}{detail})"


def diagnose(
    records: Mapping[int, FlightRecord], world_size: int, *, ends: Mapping[int, str] | None = None
) -> Diagnosis:
    """Name the ranks that failed the others.

    `ends` says of ranks that ended by themselves how they did ("was killed by SIGKILL"), as whoever started them knows.
    """
    ends = ends or {}
    waits = [wait for record in records.values() for wait in _waits(record, records, world_size)]
    silent = [rank for rank in range(world_size) if rank not in records]
    blamed = (
        [rank for rank, record in records.items() if record.error and not record.error.collective]
        or _ends_of_chains(waits, silent, ends)
        or _ended_first(silent, ends)
        or (silent if len(silent) < world_size else [])
    )
    if blamed:
        return _blaming(sorted(blamed), waits, records, ends)
    if astray := [wait for wait in waits if wait.astray]:
        return _disagreeing(astray, records)
    if absent := [wait for wait in waits if wait.absent]:
        return _circular(absent)
    idle = [rank for rank, record in records.items() if record.waiting is None]
    if idle and len(idle) < world_size:
        return _blaming(sorted(idle), waits, records, ends)
    if not records:
        return Diagnosis([], None, "no rank has left a flight record")
    return Diagnosis([], None, f"no rank stands out among the flight records of {named(records)}")


def read_records(folder: Path) -> dict[int, FlightRecord]:
    """The flight records in a folder (`health/attempt-0001`), by rank.

    For a rank that NCCL's watchdog ended before it could write its own, what PyTorch dumped.
    """
    found: dict[int, FlightRecord] = {}
    for path in sorted(folder.glob("rank-*.json")):
        record = FlightRecord.from_json(path.read_bytes())
        found[record.rank] = record
    for path in sorted(folder.glob(f"{NCCL_DUMP}*")):
        number = path.name.removeprefix(NCCL_DUMP)
        if not number.isdecimal() or int(number) in found:
            continue
        reason = "NCCL's watchdog ended it"
        try:
            operations, groups = read_pickle(path.read_bytes(), str(path))
        except CorruptData:  # its writer was ended in the middle of it
            continue
        found[int(number)] = FlightRecord(
            int(number), path.stat().st_mtime, reason, waiting="collective", groups=groups, collectives=operations
        )
    return found


def named(ranks: Iterable[int]) -> str:
    """Ranks as a person writes them: `rank 3`, `ranks 0-7, 9`."""
    ranges: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    count = sum(last - first + 1 for first, last in ranges)
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MAX_RANGES]]
    more = "" if len(ranges) <= _MAX_RANGES else f" and more ({count} in all)"
    return f"{'rank' if count == 1 else 'ranks'} {', '.join(texts)}{more}"


def _waits(record: FlightRecord, records: Mapping[int, FlightRecord], world_size: int) -> Iterator[_Wait]:
    """The operations a rank was in, one per group, with those it waits for."""
    groups = {group.name: group for group in record.groups}
    for what in _unfinished(record):
        group = groups.get(what.group) or Group(what.group, what.group, list(range(world_size)))
        others = [rank for rank in group.ranks if rank != record.rank]
        if what.peer is not None:
            absent = [what.peer] if not _answers(records.get(what.peer), record.rank) else []
            yield _Wait(record.rank, what, group, tuple(absent), ())
            continue
        absent = [rank for rank in others if _is_absent(what, record, records.get(rank))]
        astray = [rank for rank in others if rank not in absent and _is_astray(what, records[rank])]
        yield _Wait(record.rank, what, group, tuple(absent), tuple(astray))


def _unfinished(record: FlightRecord) -> list[Collective]:
    first: dict[tuple[str, str], Collective] = {}
    for each in record.collectives:
        if each.state != "done":
            first.setdefault((each.backend, each.group), each)
    if first or record.error is None or not record.error.collective or record.waiting == "point-to-point":
        return list(first.values())
    # gloo counts a collective that has failed as done: it is the last one that was begun.
    return sorted(record.collectives, key=lambda each: each.created)[-1:]


def _is_absent(what: Collective, waiting: FlightRecord, other: FlightRecord | None) -> bool:
    """Whether a rank had not come to a collective while another waited there."""
    if other is None:
        return True
    if other.missing is not None:
        return False
    theirs = _same_counter(what, other)
    if not theirs or max(theirs) < what.seq:
        return True
    same = theirs.get(what.seq)
    if same is None:
        return False
    came_too_late = same.created > waiting.time
    # The GPU of one is still busy with something before it.
    return came_too_late or (what.state == "started" and same.state == "waiting")


def _is_astray(what: Collective, other: FlightRecord) -> bool:
    theirs = _same_counter(what, other).get(what.seq)
    return theirs is not None and (theirs.op != what.op or (what.op in _ONE_SIZE and theirs.sizes != what.sizes))


def _same_counter(what: Collective, other: FlightRecord) -> dict[int, Collective]:
    """Another rank's collectives by number, of the group and backend that count them together with this one."""
    return {
        each.seq: each
        for each in other.collectives
        if (each.backend, each.group) == (what.backend, what.group) and each.peer is None
    }


def _answers(peer: FlightRecord | None, rank: int) -> bool:
    return peer is not None and any(each.peer == rank and each.state != "done" for each in peer.collectives)


def _ends_of_chains(waits: list[_Wait], silent: list[int], ends: Mapping[int, str]) -> list[int]:
    """Those who are waited for and wait for nobody."""
    waiting = {wait.rank for wait in waits if wait.absent or wait.astray}
    absent = {rank for wait in waits for rank in wait.absent} - waiting
    # Of those that wrote nothing, some were ended by whoever started them: they may have been waiting too.
    return _ended_first([rank for rank in absent if rank in silent], ends) or list(absent)


def _ended_first(silent: list[int], ends: Mapping[int, str]) -> list[int]:
    return [rank for rank in silent if rank in ends]


def _blaming(
    ranks: list[int], waits: list[_Wait], records: Mapping[int, FlightRecord], ends: Mapping[int, str]
) -> Diagnosis:
    did = " and ".join(
        f"{named(same)} {what}" for what, same in _grouped({rank: _did(rank, records, ends) for rank in ranks}).items()
    )
    held = [wait for wait in waits if set(wait.absent) & set(ranks)]
    collective = None
    if held:
        # Where most wait comes first; of several such places, the one that was reached first.
        held.sort(key=lambda wait: wait.what.created)
        places = [place for place, _ in Counter(wait.place for wait in held).most_common(3)]
        there = [[wait for wait in held if wait.place == place] for place in places]
        collective = str(there[0][0])
        did += "; " + ", ".join(f"{named(wait.rank for wait in same)} waited in {same[0]}" for same in there)
    elif others := [rank for rank, record in records.items() if record.waiting and rank not in ranks]:
        kinds = Counter(records[rank].waiting for rank in others)
        collective = f"{kinds.most_common(1)[0][0]} communication"
        did += f"; {named(others)} waited in {collective}"
    return Diagnosis(ranks, collective, did)


def _did(rank: int, records: Mapping[int, FlightRecord], ends: Mapping[int, str]) -> str:
    record = records.get(rank)
    if record is None:
        return ends.get(rank, "left no flight record: it was killed or its machine is gone")
    if record.error is not None and not record.error.collective:
        return f"failed with {record.error.kind}: {record.error.text}"
    at = f" and stood at {record.stack[-1]}" if record.stack else ""
    return f"did not arrive{_where(record)}{at}"


def _where(record: FlightRecord) -> str:
    """The step a rank was in, counted from 1 as people do; `record.step` is how many were done."""
    if record.step is None:
        return ""
    return f" in step {record.step + 1}" if record.phase in STEP_PHASES else f" after step {record.step}"


def _grouped(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks by what is said of them."""
    together: dict[str, list[int]] = {}
    for rank, text in texts.items():
        together.setdefault(text, []).append(rank)
    return together


def _disagreeing(waits: list[_Wait], records: Mapping[int, FlightRecord]) -> Diagnosis:
    wait = waits[0]
    there = [each for each in waits if each.place == wait.place]
    texts = {each.rank: str(each) for each in there}
    for rank in wait.astray:
        other = _same_counter(wait.what, records[rank])[wait.what.seq]
        texts[rank] = str(_Wait(rank, other, wait.group, (), ()))
    sides = _grouped(texts)
    fewest = min(len(same) for same in sides.values())
    ranks = sorted(rank for same in sides.values() if len(same) == fewest for rank in same)
    said = ", ".join(f"{named(same)} in {text}" for text, same in sides.items())
    return Diagnosis(ranks, str(wait), f"ranks disagree about what comes next: {said}")


def _circular(waits: list[_Wait]) -> Diagnosis:
    said = ", ".join(f"rank {wait.rank} for {named(wait.absent)} in {wait}" for wait in waits[:4])
    ranks = sorted({wait.rank for wait in waits})
    return Diagnosis(ranks, str(waits[0]), f"{named(ranks)} wait for each other: {said}")
