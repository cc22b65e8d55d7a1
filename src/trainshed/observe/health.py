"""Why the ranks of an attempt failed or hung: what they leave in `health/attempt-0001/`, and a diagnosis from it.

A rank that fails writes its error, so that its launcher can raise the same one. A rank that fails or hangs also writes
a flight record: its PyTorch flight recorder and its Python stacks (`rank-00003.json`). The recorder gives JSON. NCCL's
own watchdog writes a pickle before it ends a process. It holds numbers, strings and containers only, and the unpickler
here refuses everything else. This module does not import torch: a laptop reads the records of a dead run.

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import orjson

from trainshed.errors import CorruptData, TrainshedError, error_with_exit_code
from trainshed.observe.process_stacks import RankStack
from trainshed.observe.stall_advice import activity_of, exit_advice
from trainshed.run_folder import HEALTH, attempt_folder, rank_name


def health_folder(run_folder: Path, attempt: int) -> Path:
    """Return where the ranks of an attempt store what explains their end."""
    return run_folder / attempt_folder(HEALTH, attempt)


def write_rank_error(folder: Path, rank: int, error: TrainshedError) -> None:
    """Store the error that ended a rank in `health/attempt-0001`."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {"what": error.what, "where": error.where, "hint": error.hint, "exit_code": error.exit_code}
    (folder / f"error-{rank:05d}.json").write_bytes(orjson.dumps(body) + b"\n")


def read_rank_error(folder: Path) -> TrainshedError | None:
    """Return the error of the lowest rank that has one: if all ranks fail alike, they have the same."""
    for path in sorted(folder.glob("error-*.json")):
        try:
            body = orjson.loads(path.read_bytes())
        except orjson.JSONDecodeError:
            continue
        return error_with_exit_code(body["exit_code"], body["what"], where=body["where"], hint=body["hint"])
    return None


HOSTS_FILE = "hosts.json"
"""Which host had which ranks; the agents of a job write it into `health/attempt-0001`."""


def read_hosts(folder: Path) -> list[str] | None:
    """Return the host of each node of an attempt, in the order of node ranks; None where no agent has written them."""
    try:
        nodes = orjson.loads((folder / HOSTS_FILE).read_bytes())["nodes"]
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    return [node["host"] for node in nodes]


STALLED_EXIT_CODE = 75
"""A rank whose watchdog saw no progress exits with this (EX_TEMPFAIL of sysexits.h: try again)."""

NCCL_DUMP = "nccl-rank-"
"""The start of the file name that PyTorch gives the dump of NCCL's watchdog; the rank's number follows."""


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
class RecordedError:
    """The error that ended a rank; `collective` if it is about other ranks (a timeout, a lost connection)."""

    kind: str
    text: str
    collective: bool


@dataclass(frozen=True)
class ProcessGroupRecord:
    """A process group: its name, which all members share, its purpose, its ranks."""

    name: str
    description: str
    ranks: list[int]


@dataclass(frozen=True)
class FlightRecord:
    """What one rank has recorded.

    `stack` is the stack of its error, otherwise of its main thread, innermost last, as `file:line in function: code`.
    `waiting` is what it was waiting for, judged by that stack. `missing` says why there are no collectives, if known.
    `advice` is what to write in the recipe if a limit was too short.
    """

    rank: int
    time: float
    reason: str
    step: int | None = None
    phase: str | None = None
    error: RecordedError | None = None
    stack: list[str] = field(default_factory=list)
    waiting: Literal["collective", "point-to-point"] | None = None
    groups: list[ProcessGroupRecord] = field(default_factory=list)
    collectives: list[CollectiveRecord] = field(default_factory=list)
    missing: str | None = None
    threads: str = ""
    advice: str | None = None
    v: int = 1

    def to_json(self) -> bytes:
        """Return the record as the content of its file."""
        return orjson.dumps(self, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_json(cls, content: bytes) -> FlightRecord:
        """Read a record; keys of a later version are ignored."""
        body: dict[str, Any] = orjson.loads(content)
        known = {key: value for key, value in body.items() if key in cls.__dataclass_fields__}
        known["error"] = RecordedError(**known["error"]) if known.get("error") else None
        known["groups"] = [ProcessGroupRecord(**group) for group in known.get("groups", [])]
        known["collectives"] = [CollectiveRecord(**collective) for collective in known.get("collectives", [])]
        return cls(**known)


def flight_record_name(rank: int) -> str:
    """Return the file name of a rank's flight record."""
    return f"{rank_name(rank)}.json"


_KEPT_PER_GROUP = 20
"""Thousands of ranks write at once, and only the end is of interest."""

_POINT_TO_POINT = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")


def parse_collectives(entries: list[Mapping[str, Any]], groups: list[ProcessGroupRecord]) -> list[CollectiveRecord]:
    """Return the last operations of each group in a recorder's `entries`, and earlier ones that have not ended."""
    ranks = {group.name: group.ranks for group in groups}
    by_group: dict[tuple[str, str], list[CollectiveRecord]] = {}
    parsed = [_parse_collective(entry, ranks) for entry in entries]
    for collective in sorted(parsed, key=lambda collective: collective.created):
        by_group.setdefault((collective.backend, collective.group), []).append(collective)
    kept = []
    for group in by_group.values():
        kept += [item for item in group[:-_KEPT_PER_GROUP] if item.state != "done"][:_KEPT_PER_GROUP]
        kept += group[-_KEPT_PER_GROUP:]
    return kept


def read_nccl_dump(content: bytes, where: str) -> tuple[list[CollectiveRecord], list[ProcessGroupRecord]]:
    """Return the operations and the groups in a dump of NCCL's watchdog."""
    try:
        trace = _PlainUnpickler(io.BytesIO(content)).load()
        groups = [
            ProcessGroupRecord(name, config["desc"], json.loads(config["ranks"]))
            for name, config in trace["pg_config"].items()
        ]
        return parse_collectives(trace["entries"], groups), groups
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptData(f"this is not a dump of PyTorch's flight recorder: {error}", where=where) from None


class _PlainUnpickler(pickle.Unpickler):
    """Loads no class and calls nothing."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def _parse_collective(entry: Mapping[str, Any], ranks: Mapping[str, list[int]]) -> CollectiveRecord:
    backend, _, op = entry["profiling_name"].rpartition(":")
    group = entry["process_group"][0]
    peer = None
    if entry["is_p2p"] and (match := _POINT_TO_POINT.search(op)):
        members = ranks.get(group, [])
        op, peer = match[1], int(match[2])
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
    """Which ranks failed the others (empty if that is not known), in which collective, and a sentence about it."""

    ranks: list[int]
    collective: str | None
    sentence: str


@dataclass(frozen=True)
class _Wait:
    """One rank in one operation, and whom it waits for: those that have not begun it, or have begun another one."""

    rank: int
    collective: CollectiveRecord
    group: ProcessGroupRecord
    missing_ranks: tuple[int, ...]
    mismatched_ranks: tuple[int, ...]

    @property
    def key(self) -> tuple[str, str, int, int | None]:
        return self.collective.backend, self.group.name, self.collective.seq, self.collective.peer

    def __str__(self) -> str:
        sizes = " and ".join("×".join(map(str, size)) or "scalar" for size in self.collective.sizes[:2])
        detail = f"; {sizes} {self.collective.dtype}" if sizes else ""
        number = "" if self.collective.peer is not None else f" #{self.collective.seq}"
        ranks = format_ranks(self.group.ranks)
        return f"{self.collective.op}{number} of group {self.group.description} ({ranks}{detail})"


def diagnose(
    records: Mapping[int, FlightRecord], world_size: int, *, exit_reasons: Mapping[int, str] | None = None
) -> FailureDiagnosis:
    """Name the ranks that failed the others.

    `exit_reasons` says how ranks ended that ended by themselves ("was killed by SIGKILL"); their launcher knows it.
    """
    exit_reasons = exit_reasons or {}
    waits = [wait for record in records.values() for wait in _waits(record, records, world_size)]
    silent = [rank for rank in range(world_size) if rank not in records]
    blamed = (
        [rank for rank, record in records.items() if record.error and not record.error.collective]
        or _ends_of_chains(waits, silent, exit_reasons)
        or _ended_first(silent, exit_reasons)
        or (silent if len(silent) < world_size else [])
    )
    if blamed:
        return _blame(sorted(blamed), waits, records, exit_reasons)
    if mismatched := [wait for wait in waits if wait.mismatched_ranks]:
        return _mismatch_diagnosis(mismatched, records)
    if missing := [wait for wait in waits if wait.missing_ranks]:
        return _deadlock_diagnosis(missing)
    idle = [rank for rank, record in records.items() if record.waiting is None]
    if idle and len(idle) < world_size:
        return _blame(sorted(idle), waits, records, exit_reasons)
    if not records:
        return FailureDiagnosis([], None, "no rank has left a flight record")
    return FailureDiagnosis([], None, f"no rank stands out among the flight records of {format_ranks(records)}")


def failure_advice(
    diagnosis: FailureDiagnosis, records: Mapping[int, FlightRecord], exit_reasons: Mapping[int, str]
) -> str | None:
    """Return what to do about the ranks that a diagnosis names, None where nothing is known to help.

    It is about how they ended, otherwise about where they stood while the others waited for them.
    """
    for rank in diagnosis.ranks:
        record = records.get(rank)
        if record is None and rank in exit_reasons and (advice := exit_advice(exit_reasons[rank])) is not None:
            return advice
        if record is not None and record.error is None:
            activity = activity_of([frame.partition(": ")[0] for frame in record.stack])
            if activity.advice is not None and not activity.waits_for_others:
                return activity.advice
    return None


def read_flight_records(folder: Path) -> dict[int, FlightRecord]:
    """Return the flight records in a folder (`health/attempt-0001`), by rank.

    Ranks of our own engine write theirs. Of a foreign engine there are the stacks that its nodes have read
    (`watch_node.py`). PyTorch's own dumps are added to both, where a rank could not write its collectives: NCCL's
    watchdog has ended it, or it is foreign.
    """
    records: dict[int, FlightRecord] = {}
    for path in sorted(folder.glob("rank-*.json")):
        record = FlightRecord.from_json(path.read_bytes())
        records[record.rank] = record
    for path in sorted(folder.glob("stacks-*.json")):
        records |= {record.rank: record for record in _read_node_stacks(path) if record.rank not in records}
    for path in sorted(folder.glob(f"{NCCL_DUMP}*")):
        number = path.name.removeprefix(NCCL_DUMP)
        if not number.isdecimal():
            continue
        record = records.get(int(number))
        if record is not None and record.collectives:
            continue
        try:
            operations, groups = read_nccl_dump(path.read_bytes(), str(path))
        except CorruptData:  # its writer was killed while writing
            continue
        reason = "NCCL's watchdog ended it"
        record = record or FlightRecord(int(number), path.stat().st_mtime, reason, waiting="collective")
        records[record.rank] = replace(record, groups=groups, collectives=operations, missing=None)
    return records


def _read_node_stacks(path: Path) -> Iterator[FlightRecord]:
    """Yield a record for each rank in the answer of a node of a foreign engine, which has stalled."""
    try:
        stacks = [RankStack(**stack) for stack in orjson.loads(path.read_bytes())["ranks"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return
    for stack in stacks:
        activity = activity_of(stack.stack, stack.state)
        yield FlightRecord(
            stack.rank,
            path.stat().st_mtime,
            "its engine's log has not grown",
            stack=stack.stack,
            waiting="collective" if activity.waits_for_others or activity.name == "gpu" else None,
            missing=stack.problem or "its flight recorder did not answer",
        )


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as a person writes them: `rank 3`, `ranks 0-7, 9`."""
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
    """Yield the operations that a rank was in, one per group, and the ranks that it waits for there."""
    groups = {group.name: group for group in record.groups}
    for collective in _unfinished(record):
        name = collective.group
        group = groups.get(name) or ProcessGroupRecord(name, name, list(range(world_size)))
        others = [rank for rank in group.ranks if rank != record.rank]
        if collective.peer is not None:
            peer = collective.peer
            missing = () if _has_matching_operation(records.get(peer), record.rank) else (peer,)
            yield _Wait(record.rank, collective, group, missing, ())
            continue
        missing = [rank for rank in others if _is_missing(collective, record, records.get(rank))]
        mismatched = [rank for rank in others if rank not in missing and _is_mismatched(collective, records[rank])]
        yield _Wait(record.rank, collective, group, tuple(missing), tuple(mismatched))


def _unfinished(record: FlightRecord) -> list[CollectiveRecord]:
    first: dict[tuple[str, str], CollectiveRecord] = {}
    for collective in record.collectives:
        if collective.state != "done":
            first.setdefault((collective.backend, collective.group), collective)
    if first or record.error is None or not record.error.collective or record.waiting == "point-to-point":
        return list(first.values())
    # For gloo a collective that has failed is done: it is the last one that was begun.
    return sorted(record.collectives, key=lambda collective: collective.created)[-1:]


def _is_missing(collective: CollectiveRecord, waiting: FlightRecord, other: FlightRecord | None) -> bool:
    """Whether a rank had not begun a collective while another rank waited in it."""
    if other is None:
        return True
    if other.missing is not None:
        return False
    theirs = _same_counter(collective, other)
    if not theirs or max(theirs) < collective.seq:
        return True
    same = theirs.get(collective.seq)
    if same is None:
        return False
    came_too_late = same.created > waiting.time
    # Its GPU is still busy with something earlier.
    return came_too_late or (collective.state == "started" and same.state == "waiting")


def _is_mismatched(collective: CollectiveRecord, other: FlightRecord) -> bool:
    theirs = _same_counter(collective, other).get(collective.seq)
    return theirs is not None and (
        theirs.op != collective.op or (collective.op in _ONE_SIZE and theirs.sizes != collective.sizes)
    )


def _same_counter(collective: CollectiveRecord, other: FlightRecord) -> dict[int, CollectiveRecord]:
    """Return another rank's collectives by number, of the group and backend of this one."""
    return {
        theirs.seq: theirs
        for theirs in other.collectives
        if (theirs.backend, theirs.group) == (collective.backend, collective.group) and theirs.peer is None
    }


def _has_matching_operation(peer: FlightRecord | None, rank: int) -> bool:
    return peer is not None and any(item.peer == rank and item.state != "done" for item in peer.collectives)


def _ends_of_chains(waits: list[_Wait], silent: list[int], exit_reasons: Mapping[int, str]) -> list[int]:
    """Return the ranks that others wait for and that wait for nobody."""
    waiting = {wait.rank for wait in waits if wait.missing_ranks or wait.mismatched_ranks}
    missing = {rank for wait in waits for rank in wait.missing_ranks} - waiting
    # Some of those without a record were ended by their launcher: they may have been waiting too.
    return _ended_first([rank for rank in missing if rank in silent], exit_reasons) or list(missing)


def _ended_first(silent: list[int], exit_reasons: Mapping[int, str]) -> list[int]:
    return [rank for rank in silent if rank in exit_reasons]


def _blame(
    ranks: list[int], waits: list[_Wait], records: Mapping[int, FlightRecord], exit_reasons: Mapping[int, str]
) -> FailureDiagnosis:
    sentence = " and ".join(
        f"{format_ranks(same)} {what}"
        for what, same in _grouped({rank: _describe_rank(rank, records, exit_reasons) for rank in ranks}).items()
    )
    held = [wait for wait in waits if set(wait.missing_ranks) & set(ranks)]
    collective = None
    if held:
        # The collective in which most ranks wait comes first; of several such, the earliest.
        held.sort(key=lambda wait: wait.collective.created)
        keys = [key for key, _ in Counter(wait.key for wait in held).most_common(3)]
        groups = [[wait for wait in held if wait.key == key] for key in keys]
        collective = str(groups[0][0])
        for number, group in enumerate(groups):
            waiting = format_ranks(wait.rank for wait in group)
            sentence += f"{', ' if number else '; '}{waiting} waited in {group[0]}"
    elif others := [rank for rank, record in records.items() if record.waiting and rank not in ranks]:
        kinds = Counter(records[rank].waiting for rank in others)
        collective = f"{kinds.most_common(1)[0][0]} communication"
        sentence += f"; {format_ranks(others)} waited in {collective}"
    return FailureDiagnosis(ranks, collective, sentence)


def _describe_rank(rank: int, records: Mapping[int, FlightRecord], exit_reasons: Mapping[int, str]) -> str:
    record = records.get(rank)
    if record is None:
        return exit_reasons.get(rank, "left no flight record: it was killed or its machine is gone")
    if record.error is not None and not record.error.collective:
        return f"failed with {record.error.kind}: {record.error.text}"
    at = f" and stood at {record.stack[-1]}" if record.stack else ""
    return f"did not arrive{_step_text(record)}{at}"


def _step_text(record: FlightRecord) -> str:
    """Describe the step that a rank was in, counted from 1; `record.step` is how many were done."""
    if record.step is None:
        return ""
    return f" in step {record.step + 1}" if record.phase in STEP_PHASES else f" after step {record.step}"


def _grouped(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks by their text."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_by_text.setdefault(text, []).append(rank)
    return ranks_by_text


def _mismatch_diagnosis(waits: list[_Wait], records: Mapping[int, FlightRecord]) -> FailureDiagnosis:
    wait = waits[0]
    texts = {other.rank: str(other) for other in waits if other.key == wait.key}
    for rank in wait.mismatched_ranks:
        theirs = _same_counter(wait.collective, records[rank])[wait.collective.seq]
        texts[rank] = str(_Wait(rank, theirs, wait.group, (), ()))
    sides = _grouped(texts)
    fewest = min(len(same) for same in sides.values())
    ranks = sorted(rank for same in sides.values() if len(same) == fewest for rank in same)
    description = ", ".join(f"{format_ranks(same)} in {text}" for text, same in sides.items())
    return FailureDiagnosis(ranks, str(wait), f"ranks disagree about what comes next: {description}")


def _deadlock_diagnosis(waits: list[_Wait]) -> FailureDiagnosis:
    description = ", ".join(f"rank {wait.rank} for {format_ranks(wait.missing_ranks)} in {wait}" for wait in waits[:4])
    ranks = sorted({wait.rank for wait in waits})
    return FailureDiagnosis(ranks, str(waits[0]), f"{format_ranks(ranks)} wait for each other: {description}")
