"""What PyTorch's flight recorder wrote, in our words. No torch here: a laptop reads the dumps of a dead run.

The recorder answers in JSON, which the engine asks for; NCCL's own watchdog writes a pickle before it ends a process.
That pickle holds numbers, strings and containers only, and is read by a reader that knows nothing else.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from trainshed.errors import CorruptData
from trainshed.observe.flight_record import Collective, Group

_KEPT_PER_GROUP = 20
"""Thousands of ranks write at once, and only the end is of interest."""

_POINT_TO_POINT = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")


def collectives(entries: list[Mapping[str, Any]], groups: list[Group]) -> list[Collective]:
    """The last operations of each group in a recorder's `entries`, and those before them that have not ended."""
    ranks = {group.name: group.ranks for group in groups}
    by_group: dict[tuple[str, str], list[Collective]] = {}
    for each in sorted((_collective(entry, ranks) for entry in entries), key=lambda each: each.created):
        by_group.setdefault((each.backend, each.group), []).append(each)
    kept = []
    for group in by_group.values():
        kept += [each for each in group[:-_KEPT_PER_GROUP] if each.state != "done"][:_KEPT_PER_GROUP]
        kept += group[-_KEPT_PER_GROUP:]
    return kept


def read_pickle(content: bytes, where: str) -> tuple[list[Collective], list[Group]]:
    """The operations and the groups in a dump of NCCL's watchdog."""
    try:
        trace = _Plain(io.BytesIO(content)).load()
        groups = [
            Group(name, config["desc"], json.loads(config["ranks"])) for name, config in trace["pg_config"].items()
        ]
        return collectives(trace["entries"], groups), groups
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptData(f"this is no dump of PyTorch's flight recorder: {error}", where=where) from None


class _Plain(pickle.Unpickler):
    """Reads no classes and calls nothing."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def _collective(entry: Mapping[str, Any], ranks: Mapping[str, list[int]]) -> Collective:
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
    return Collective(
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
