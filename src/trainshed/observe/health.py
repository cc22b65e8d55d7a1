"""Why the ranks of an attempt failed or hung: what they leave in `health/attempt-0001/`, and a diagnosis from it.

A rank that fails writes its error, so that whoever started it can raise the same one. A rank that fails or hangs also
writes a flight record: its PyTorch flight recorder and its Python stacks (`rank-00003.json`). The recorder answers in
JSON. NCCL's own watchdog writes a pickle before it ends a process; it holds numbers, strings and containers only, and
the unpickler here refuses everything else. No torch here: a laptop reads the records of a dead run.

`diagnose` compares the records of all ranks. Ranks of a group number their collectives alike, so a rank that has begun
fewer of them is the one that the others wait for. It may itself be waiting in another group: the end of that chain is
to blame.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import orjson

from trainshed.errors import CorruptData, TrainshedError, error_with_exit_code


def health_folder(run_folder: Path, attempt: int) -> Path:
    """Where the ranks of an attempt leave what explains their end."""
    return run_folder / "health" / f"attempt-{attempt:04d}"


def write_rank_error(folder: Path, rank: int, error: TrainshedError) -> None:
    """Keep the error that ended a rank in `health/attempt-0001`."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {"what": error.what, "where": error.where, "hint": error.hint, "exit_code": error.exit_code}
    (folder / f"error-{rank:05d}.json").write_bytes(orjson.dumps(body) + b"\n")


def read_rank_error(folder: Path) -> TrainshedError | None:
    """Return the error of the lowest rank that had one: where all ranks fail alike they say the same."""
    for path in sorted(folder.glob("error-*.json")):
        try:
            body = orjson.loads(path.read_bytes())
        except orjson.JSONDecodeError:
            continue
        return error_with_exit_code(body["exit_code"], body["what"], where=body["where"], hint=body["hint"])
    return None


STALLED_EXIT_CODE = 75
"""A rank whose watchdog saw no progress exits with this (EX_TEMPFAIL of sysexits.h: try again)."""

NCCL_DUMP = "nccl-rank-"
"""What PyTorch names the dump of NCCL's watchdog, before the rank's number."""


@dataclass(frozen=True)
class CollectiveRecord:
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
class ProcessGroupRecord:
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
    groups: list[ProcessGroupRecord] = field(default_factory=list)
    collectives: list[CollectiveRecord] = field(default_factory=list)
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
        known["groups"] = [ProcessGroupRecord(**each) for each in known.get("groups", [])]
        known["collectives"] = [CollectiveRecord(**each) for each in known.get("collectives", [])]
        return cls(**known)


def flight_record_name(rank: int) -> str:
    """The name of a rank's flight record."""
    return f"rank-{rank:05d}.json"


_KEPT_PER_GROUP = 20
"""Thousands of ranks write at once, and only the end is of interest."""

_POINT_TO_POINT = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")


def parse_collectives(entries: list[Mapping[str, Any]], groups: list[ProcessGroupRecord]) -> list[CollectiveRecord]:
    """The last operations of each group in a recorder's `entries`, and those before them that have not ended."""
    ranks = {group.name: group.ranks for group in groups}
    by_group: dict[tuple[str, str], list[CollectiveRecord]] = {}
    for each in sorted((_parse_collective(entry, ranks) for entry in entries), key=lambda each: each.created):
        by_group.setdefault((each.backend, each.group), []).append(each)
    kept = []
    for group in by_group.values():
        kept += [each for each in group[:-_KEPT_PER_GROUP] if each.state != "done"][:_KEPT_PER_GROUP]
        kept += group[-_KEPT_PER_GROUP:]
    return kept


def read_nccl_dump(content: bytes, where: str) -> tuple[list[CollectiveRecord], list[ProcessGroupRecord]]:
    """The operations and the groups in a dump of NCCL's watchdog."""
    try:
        trace = _PlainUnpickler(io.BytesIO(content)).load()
        groups = [
            ProcessGroupRecord(name, config["desc"], json.loads(config["ranks"]))
            for name, config in trace["pg_config"].items()
        ]
        return parse_collectives(trace["entries"], groups), groups
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptData(f"this is no dump of PyTorch's flight recorder: {error}", where=where) from None


class _PlainUnpickler(pickle.Unpickler):
    """Reads no classes and calls nothing."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def _parse_collective(entry: Mapping[str, Any], ranks: Mapping[str, list[int]]) -> CollectiveRecord:
    backend, _, op = entry["profiling_name"].rpartition(":")
    group = entry["process_group"][0]
    peer = None
    if entry["is_p2p"] and (found := _POINT_TO_POINT.search(op)):
        members = ranks.get(group, [])
        op, peer = found[1], int(found[2])
        peer = members[peer] if peer < len(members) else peer
    # gloo never says 'completed'; NCCL also retires what has timed out.
    if entry["state"] == "completed" or (backend != "nccl" and entry["retired"]):
        state: Literal["waiting", "started", "done"] = "done"
    else:
        state = "started" if entry["state"] == "started" else "waiting"
    return CollectiveRecord(
        backend=backend,
        group=group,
        seq=entry["collective_seq_id"],
        op=op,
        sizes=[list(size) for size in entry["input_sizes"]],
        dtype=next(iter(entry["input_dtypes"]), ""),
        state=state,
        created=entry["time_created_ns"] / 1e9,
        peer=peer,
    )


_ONE_SIZE = frozenset({"all_reduce", "allreduce", "broadcast", "reduce"})
"""Collectives whose tensors must have one size on all ranks; those of others may be uneven."""

STEP_PHASES = (None, "step", "first_step")
"""Phases in which a rank is within a step; in others it is between two."""

_MAX_RANGES = 8


@dataclass(frozen=True)
class FailureDiagnosis:
    """Who failed the others (`ranks`, empty where it cannot be told), in which collective, and a sentence about it."""

    ranks: list[int]
    collective: str | None
    sentence: str


@dataclass(frozen=True)
class _Wait:
    """One rank in one operation, and whom it waits for there: `absent` have not come, `astray` came with another."""

    rank: int
    what: CollectiveRecord
    group: ProcessGroupRecord
    absent: tuple[int, ...]
    astray: tuple[int, ...]

    @property
    def place(self) -> tuple[str, str, int, int | None]:
        return self.what.backend, self.group.name, self.what.seq, self.what.peer

    def __str__(self) -> str:
        size = " and ".join("×".join(map(str, each)) or "scalar" for each in self.what.sizes[:2])
        detail = f"; {size} {self.what.dtype}" if size else ""
        number = "" if self.what.peer is not None else f" #{self.what.seq}"
        return f"{self.what.op}{number} of group {self.group.description} ({format_ranks(self.group.ranks)}{detail})"


def diagnose(
    records: Mapping[int, FlightRecord], world_size: int, *, ends: Mapping[int, str] | None = None
) -> FailureDiagnosis:
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
        return _blame(sorted(blamed), waits, records, ends)
    if astray := [wait for wait in waits if wait.astray]:
        return _disagreeing(astray, records)
    if absent := [wait for wait in waits if wait.absent]:
        return _circular(absent)
    idle = [rank for rank, record in records.items() if record.waiting is None]
    if idle and len(idle) < world_size:
        return _blame(sorted(idle), waits, records, ends)
    if not records:
        return FailureDiagnosis([], None, "no rank has left a flight record")
    return FailureDiagnosis([], None, f"no rank stands out among the flight records of {format_ranks(records)}")


def read_flight_records(folder: Path) -> dict[int, FlightRecord]:
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
            operations, groups = read_nccl_dump(path.read_bytes(), str(path))
        except CorruptData:  # its writer was ended in the middle of it
            continue
        found[int(number)] = FlightRecord(
            int(number), path.stat().st_mtime, reason, waiting="collective", groups=groups, collectives=operations
        )
    return found


def format_ranks(ranks: Iterable[int]) -> str:
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
        group = groups.get(what.group) or ProcessGroupRecord(what.group, what.group, list(range(world_size)))
        others = [rank for rank in group.ranks if rank != record.rank]
        if what.peer is not None:
            absent = [what.peer] if not _answers(records.get(what.peer), record.rank) else []
            yield _Wait(record.rank, what, group, tuple(absent), ())
            continue
        absent = [rank for rank in others if _is_absent(what, record, records.get(rank))]
        astray = [rank for rank in others if rank not in absent and _is_astray(what, records[rank])]
        yield _Wait(record.rank, what, group, tuple(absent), tuple(astray))


def _unfinished(record: FlightRecord) -> list[CollectiveRecord]:
    first: dict[tuple[str, str], CollectiveRecord] = {}
    for each in record.collectives:
        if each.state != "done":
            first.setdefault((each.backend, each.group), each)
    if first or record.error is None or not record.error.collective or record.waiting == "point-to-point":
        return list(first.values())
    # gloo counts a collective that has failed as done: it is the last one that was begun.
    return sorted(record.collectives, key=lambda each: each.created)[-1:]


def _is_absent(what: CollectiveRecord, waiting: FlightRecord, other: FlightRecord | None) -> bool:
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


def _is_astray(what: CollectiveRecord, other: FlightRecord) -> bool:
    theirs = _same_counter(what, other).get(what.seq)
    return theirs is not None and (theirs.op != what.op or (what.op in _ONE_SIZE and theirs.sizes != what.sizes))


def _same_counter(what: CollectiveRecord, other: FlightRecord) -> dict[int, CollectiveRecord]:
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


def _blame(
    ranks: list[int], waits: list[_Wait], records: Mapping[int, FlightRecord], ends: Mapping[int, str]
) -> FailureDiagnosis:
    did = " and ".join(
        f"{format_ranks(same)} {what}"
        for what, same in _grouped({rank: _describe_rank(rank, records, ends) for rank in ranks}).items()
    )
    held = [wait for wait in waits if set(wait.absent) & set(ranks)]
    collective = None
    if held:
        # Where most wait comes first; of several such places, the one that was reached first.
        held.sort(key=lambda wait: wait.what.created)
        places = [place for place, _ in Counter(wait.place for wait in held).most_common(3)]
        there = [[wait for wait in held if wait.place == place] for place in places]
        collective = str(there[0][0])
        did += "; " + ", ".join(f"{format_ranks(wait.rank for wait in same)} waited in {same[0]}" for same in there)
    elif others := [rank for rank, record in records.items() if record.waiting and rank not in ranks]:
        kinds = Counter(records[rank].waiting for rank in others)
        collective = f"{kinds.most_common(1)[0][0]} communication"
        did += f"; {format_ranks(others)} waited in {collective}"
    return FailureDiagnosis(ranks, collective, did)


def _describe_rank(rank: int, records: Mapping[int, FlightRecord], ends: Mapping[int, str]) -> str:
    record = records.get(rank)
    if record is None:
        return ends.get(rank, "left no flight record: it was killed or its machine is gone")
    if record.error is not None and not record.error.collective:
        return f"failed with {record.error.kind}: {record.error.text}"
    at = f" and stood at {record.stack[-1]}" if record.stack else ""
    return f"did not arrive{_step_text(record)}{at}"


def _step_text(record: FlightRecord) -> str:
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


def _disagreeing(waits: list[_Wait], records: Mapping[int, FlightRecord]) -> FailureDiagnosis:
    wait = waits[0]
    there = [each for each in waits if each.place == wait.place]
    texts = {each.rank: str(each) for each in there}
    for rank in wait.astray:
        other = _same_counter(wait.what, records[rank])[wait.what.seq]
        texts[rank] = str(_Wait(rank, other, wait.group, (), ()))
    sides = _grouped(texts)
    fewest = min(len(same) for same in sides.values())
    ranks = sorted(rank for same in sides.values() if len(same) == fewest for rank in same)
    said = ", ".join(f"{format_ranks(same)} in {text}" for text, same in sides.items())
    return FailureDiagnosis(ranks, str(wait), f"ranks disagree about what comes next: {said}")


def _circular(waits: list[_Wait]) -> FailureDiagnosis:
    said = ", ".join(f"rank {wait.rank} for {format_ranks(wait.absent)} in {wait}" for wait in waits[:4])
    ranks = sorted({wait.rank for wait in waits})
    return FailureDiagnosis(ranks, str(waits[0]), f"{format_ranks(ranks)} wait for each other: {said}")
