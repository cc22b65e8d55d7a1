"""The files that agents leave beside an attempt, so that it can be explained without the cluster.

<run>/health/attempt-0001/hosts.json        which host had which ranks
<run>/health/attempt-0001/node-00001.json   how the ranks of a node ended
<run>/health/attempt-0001/failed.json       the first failure: it tells all other nodes to end
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from trainshed.errors import Conflict, NotFound
from trainshed.launch.ranks import RanksResult
from trainshed.launch.rendezvous import AgentOrder, JoinedNode
from trainshed.observe.health import HOSTS_FILE, health_folder
from trainshed.run_folder import node_name
from trainshed.storage import ABSENT, LocalStore

NodeOutcome = Literal["finished", "stopped", "failed", "peer", "lost"]
"""How a node's part of an attempt ended: `peer` where another node's failure ended it, `lost` where it disappeared."""


@dataclass(frozen=True)
class FailedRankRecord:
    """A rank that did not end as it should."""

    rank: int
    how: str
    exit_code: int | None = None
    signal: str | None = None
    killed: bool = False
    """Its agent ended it: it may only have been waiting for others."""


@dataclass(frozen=True)
class NodeRecord:
    """How the ranks of one node ended."""

    node: int
    slot: int
    host: str
    ended: NodeOutcome
    exit_code: int
    failed: tuple[FailedRankRecord, ...] = ()
    bad_node: str | None = None
    """Why the node itself seems to be the cause."""
    what: str = ""
    """Why its ranks were not started."""
    log_tail: str = field(default="", repr=False)

    @classmethod
    def of(cls, result: RanksResult, *, node: int, slot: int, host: str, peer_failed: bool) -> NodeRecord:
        """Return the record for the result of a node's ranks."""
        failed = tuple(
            FailedRankRecord(rank.rank, rank.end_text, rank.exit_code, rank.signal, rank.killed and not rank.stopped)
            for rank in result.failed
        )
        tail = next((rank.log_tail for rank in result.failed if not rank.killed), "")
        ended: NodeOutcome
        if result.exit_code == 0:
            ended = "finished"
        elif not failed:
            ended = "stopped"
        elif peer_failed:
            ended = "peer"
        else:
            ended = "failed"
        return cls(node, slot, host, ended, result.exit_code, failed, bad_node_reason(result), log_tail=tail)


# What CUDA, NCCL and the driver print when hardware fails, and not the program.
_BAD_NODE_MESSAGES = (
    "uncorrectable ECC error",
    "GPU is lost",
    "fallen off the bus",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "all CUDA-capable devices are busy or unavailable",
    "hardware error",
    "NVLink error",
)
_BAD_NODE_SIGNALS = ("SIGKILL", "SIGBUS")
"""From the kernel: the node ran out of memory, or a page of its memory is broken."""


def bad_node_reason(result: RanksResult) -> str | None:
    """Return why a node itself is the cause of a failure; None where the program may be."""
    for failure in result.failed:
        if failure.killed:
            continue
        if failure.signal in _BAD_NODE_SIGNALS:
            return f"rank {failure.rank} {failure.end_text} from outside"
        message = next((message for message in _BAD_NODE_MESSAGES if message in failure.log_tail), None)
        if message is not None:
            return f"rank {failure.rank} reported '{message}'"
    return None


class AttemptRecords:
    """The files that agents leave beside one attempt."""

    def __init__(self, run_folder: Path, attempt: int) -> None:
        self.folder = health_folder(run_folder, attempt)
        self._store = LocalStore(self.folder)

    def write_hosts(
        self, start: str, order: AgentOrder, joined: Mapping[int, JoinedNode], bad: Collection[int], ranks_per_node: int
    ) -> list[str]:
        """Write which host has which ranks; returns the same as lines for people."""
        nodes = [
            {
                "node": node,
                "slot": slot,
                "host": joined[slot].host,
                "ranks": list(range(node * ranks_per_node, (node + 1) * ranks_per_node)),
            }
            for node, slot in enumerate(order.slots)
        ]
        free = [slot for slot in sorted(joined) if slot not in order.slots and slot not in bad]
        spares = [{"slot": slot, "host": joined[slot].host} for slot in free]
        body = {"start": start, "master": list(order.master), "nodes": nodes, "spares": spares}
        self._put(HOSTS_FILE, body)
        lines = [f"node {node['node']}: {node['host']}, ranks {_format_ranks(node['ranks'])}" for node in nodes]
        return lines + [f"spare: {spare['host']}" for spare in spares]

    def write_node(self, record: NodeRecord) -> None:
        """Write how a node's ranks ended."""
        self._put(f"{node_name(record.node)}.json", asdict(record))

    def write_lost_node(
        self, node: int, slot: int, host: str, ranks_per_node: int, *, ranks_text: str, node_text: str
    ) -> NodeRecord:
        """Write the record of a node that cannot write it itself, and end the attempt on the others.

        `ranks_text` says what happened to each of its ranks, `node_text` to the node.
        """
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        failed = tuple(FailedRankRecord(rank, ranks_text) for rank in ranks)
        record = NodeRecord(node, slot, host, "lost", 1, failed, node_text)
        self.mark_failed(host, f"{host} {node_text}")
        self.write_node(record)
        return record

    def read_node(self, node: int) -> NodeRecord | None:
        """Return how a node's ranks ended; None while they run."""
        try:
            body: dict[str, Any] = orjson.loads(self._store.read(f"{node_name(node)}.json"))
        except NotFound:
            return None
        return NodeRecord(**body | {"failed": tuple(FailedRankRecord(**rank) for rank in body["failed"])})

    def mark_failed(self, host: str, what: str) -> None:
        """Tell all nodes that the attempt has failed; only the first failure is kept."""
        try:
            body = orjson.dumps({"host": host, "what": what}, option=orjson.OPT_INDENT_2) + b"\n"
            self._store.put("failed.json", body, expect=ABSENT)
        except Conflict:
            pass

    @property
    def has_failed(self) -> bool:
        """Whether some node has failed."""
        return (self.folder / "failed.json").exists()

    def _put(self, name: str, body: dict[str, Any]) -> None:
        self._store.put(name, orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")


def _format_ranks(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
