"""The checks before a training, on every node at once: the node itself, pairs of nodes, all nodes together.

`run_preflight` is called on every node and returns the same verdict on all of them. Node 0 serves a key-value store
(`launch/rendezvous.py`) and leads (`coordinator.py`); every node checks itself and takes part in the measurements it is
told to. Results are kept under `<run>/health/attempt-0001/preflight/`, one file a node and `verdict.json`.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from trainshed.catalog import Machine
from trainshed.catalog.machines import expected_in_node
from trainshed.engines.probe_request import ProbeRequest
from trainshed.errors import TrainshedError
from trainshed.launch.fabric import FabricSetup, fabric_setup, machine_of
from trainshed.launch.job import Stage
from trainshed.launch.preflight.coordinator import PreflightCoordinator, PreflightTimeouts, check_clock, check_inside
from trainshed.launch.preflight.measurement import PROBE_COMMAND, FabricProbeGroup, FabricProbeRunner
from trainshed.launch.preflight.node import (
    STORAGE_SAMPLE_BYTES,
    check_storage,
    find_gpus,
    node_checks,
    node_versions,
    sampled_nodes,
)
from trainshed.launch.preflight.verdict import PREFLIGHT_SCHEMA, NodeCheckReport, PreflightVerdict
from trainshed.launch.rendezvous import KeyValueClient, KeyValueServer
from trainshed.observe.events import EventWriter
from trainshed.plan.budget.storage import cluster_storage
from trainshed.recipe import Cluster
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import Store

_INTRA_NODE_MEBIBYTES = 1024.0
_LOG_BYTES = 64 * 1024


@dataclass(frozen=True)
class PreflightJob:
    """What preflight must know, the same on every node; `preflight_job` makes it from a cluster file."""

    store: Store
    run_folder: str
    """Inside the store; empty where the store is the run's own folder."""
    attempt: int
    nodes: int
    gpus: int
    """Of each node that the job uses; 0: it trains on processors, with gloo."""
    setup: FabricSetup
    machine: Machine | None = None
    full: bool = False
    """Measure the whole for a minute, not for half a second."""
    storage_gb_per_s: float | None = None
    """What one node should get of the storage, where it is known."""
    storage_bytes: int = STORAGE_SAMPLE_BYTES
    limits: PreflightTimeouts = field(default_factory=PreflightTimeouts)

    @property
    def folder(self) -> str:
        """Where results are kept, inside the store."""
        return "/".join([*filter(None, [self.run_folder]), "health", f"attempt-{self.attempt:04d}", "preflight"])


def run_preflight(
    job: PreflightJob,
    *,
    node_rank: int,
    board: tuple[str, int],
    host: str | None = None,
    reporter: Reporter = SILENT,
    probe: Sequence[str] = PROBE_COMMAND,
) -> PreflightVerdict:
    """Check this node and all together; every node of the job calls this, and all get the same verdict.

    `board` is an address of node 0 with a port that is free there. `host` is what people call this node. `probe` is
    the command that measures.
    """
    host = host or socket.gethostname()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trainshed-preflight-")))
        view = stack.enter_context(_connect(job, node_rank, board))
        address = board[0] if node_rank == 0 else view.own_address()
        worlds = FabricProbeRunner(node_rank, address, max(job.gpus, 1), view, job.setup, scratch, probe)
        with reporter.task("preflight", total=None, unit="measurements") as task:
            report = _check_node(job, node_rank, host, view, worlds, scratch)
            view.put(f"node/{node_rank}", report.to_plain())
            task.advance(1)
            number = 0
            while True:
                number += 1
                plan = _next_instruction(job, view, number)
                if "verdict" in plan:
                    break
                for world in map(FabricProbeGroup.from_plain, plan["worlds"]):
                    if node_rank in world.nodes:
                        task.describe(world.name)
                        found = worlds.measure(world, job.limits.world + world.request.seconds)
                        view.put(f"result/{world.name}/{node_rank}", found.to_plain())
                        task.advance(1)
        verdict = PreflightVerdict.from_plain(plan["verdict"])
        _store_results(job, node_rank, verdict, scratch)
        if node_rank:
            view.put(f"bye/{node_rank}", True)
    return verdict


@contextmanager
def _connect(job: PreflightJob, node_rank: int, address: tuple[str, int]) -> Iterator[KeyValueClient]:
    """This node's view of the board; on node 0 the board itself and whoever leads."""
    token = f"{job.store.url}/{job.run_folder}#{job.attempt}"
    if node_rank:
        yield KeyValueClient(address, token)
        return
    with KeyValueServer(address[1], token) as server:
        view = KeyValueClient(("127.0.0.1", server.port), token)
        leader = PreflightCoordinator(view, job.nodes, bool(job.gpus), job.setup, job.machine, job.full, job.limits)
        thread = threading.Thread(target=leader.run, daemon=True)
        thread.start()
        yield view
        thread.join()


def _check_node(
    job: PreflightJob, node: int, host: str, view: KeyValueClient, worlds: FabricProbeRunner, scratch: Path
) -> NodeCheckReport:
    """Everything that this node can be asked alone."""
    checks = [
        *node_checks(job.setup, job.machine, gpus=job.gpus, scratch=scratch),
        check_clock(view.clock_offset_seconds()),
    ]
    if node in sampled_nodes(job.nodes):
        path = f"{job.folder}/write-{node:05d}"
        checks.append(
            check_storage(job.store, path, expected_gb_per_s=job.storage_gb_per_s, size_bytes=job.storage_bytes)
        )
    found = node_versions(find_gpus() if job.gpus else None)
    if job.gpus:
        expected = expected_in_node(job.machine)
        size = float(expected.mebibytes) if expected is not None and expected.mebibytes else _INTRA_NODE_MEBIBYTES
        sizes = (size,) if job.gpus > 1 else ()
        request = ProbeRequest("cuda", sizes, job.limits.measuring, products=True, timeout_seconds=job.limits.world)
        inside = worlds.measure(FabricProbeGroup("inside", (node,), request), job.limits.world)
        checks += check_inside(inside, job.machine)
        found |= inside.figures.get("versions", {})
    return NodeCheckReport(node, host, tuple(checks), found)


def _next_instruction(job: PreflightJob, view: KeyValueClient, number: int) -> dict:
    """What node 0 wants next; it waits for the slowest node of a measurement, and so do we for it."""
    key = f"plan/{number}"
    patience = job.limits.reports + job.limits.world + 120.0
    found = view.get([key], patience)
    if key not in found:
        raise TrainshedError(f"node 0 decided nothing for {patience:.0f} s", hint="its log says what it waits for")
    return found[key]


def _store_results(job: PreflightJob, node: int, verdict: PreflightVerdict, scratch: Path) -> None:
    """Store what this node found, its logs where something is wrong, and on node 0 the verdict and its event."""
    own = next((report for report in verdict.nodes if report.node == node), None)
    body = {"schema": PREFLIGHT_SCHEMA, **(own.to_plain() if own else {"node": node})}
    _put_json(job, f"node-{node:05d}.json", body)
    tails = b"".join(_log_tail(log) for log in sorted(scratch.rglob("*.log")))
    if tails and verdict.outcome in ("replace", "fail"):
        job.store.put(f"{job.folder}/node-{node:05d}.log", tails)
    if node == 0:
        _put_json(job, "verdict.json", verdict.to_plain())
        with EventWriter(job.store, job.run_folder, attempt=job.attempt, rank=None) as events:
            events.emit(
                "preflight",
                verdict=verdict.outcome,
                nodes=list(verdict.replace),
                what=verdict.sentence,
                seconds=verdict.seconds,
                fabric=verdict.fabric,
                bus_gb_per_s=verdict.bus_gb_per_s,
            )


def _put_json(job: PreflightJob, name: str, body: dict) -> None:
    job.store.put(f"{job.folder}/{name}", orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")


def _log_tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return f"==> {log.parent.name}/{log.name} <==\n".encode() + file.read() + b"\n"


def preflight_job(
    cluster: Cluster, *, store: Store, run_folder: str, attempt: int, nodes: int, gpus: int, full: bool = False
) -> PreflightJob:
    """Return what every node of a job is to prove; `gpus` of each node that the job uses, 0 on processors."""
    machine = machine_of(cluster)
    storage = cluster_storage(cluster)
    writers = len(sampled_nodes(nodes))
    return PreflightJob(
        store,
        run_folder,
        attempt,
        nodes,
        gpus,
        fabric_setup(cluster, nodes=nodes),
        machine,
        full,
        storage_gb_per_s=None if storage is None else storage.write_gb_per_s(writers, machine) / writers,
    )


def preflight_stage(cluster: Cluster, *, nodes: int | None = None) -> Stage:
    """Return a stage that takes a training's nodes and proves them; what runs behind the proof is the submitter's."""
    machine = machine_of(cluster)
    gpus = machine.gpus if machine is not None else 0
    return Stage("train", nodes or cluster.nodes.default, gpus, max(gpus, 1), preflight=True)
