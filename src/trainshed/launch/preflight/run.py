"""The checks before a training, on every node at once: the node itself, pairs of nodes, all nodes together.

`run_preflight` is called on every node and returns the same verdict on all of them. Node 0 serves a key-value store
(`launch/rendezvous.py`) and gives instructions (`coordinator.py`). Every node checks itself and takes part in the
measurements of its instructions. Results are stored in `<run>/health/attempt-0001/preflight/`: one file per node and
`verdict.json`.
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
from trainshed.launch.ranks import read_log_tail
from trainshed.launch.rendezvous import KeyValueClient, KeyValueServer
from trainshed.observe.events import EventWriter
from trainshed.plan.budget.storage import cluster_storage
from trainshed.recipe import Cluster
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import node_name, preflight_folder
from trainshed.storage import Store

_INTRA_NODE_MEBIBYTES = 1024.0
_LOG_BYTES = 64 * 1024


@dataclass(frozen=True)
class PreflightJob:
    """What preflight needs to know, the same on every node; `preflight_job` makes it from a cluster file."""

    store: Store
    run_folder: str
    """Inside the store; empty if the store is the run's own folder."""
    attempt: int
    nodes: int
    gpus: int
    """How many the job uses on each node; 0: it trains on CPUs, with gloo."""
    setup: FabricSetup
    machine: Machine | None = None
    full: bool = False
    """Measure all nodes together for a minute, not for half a second."""
    storage_gb_per_s: float | None = None
    """One node's share of the storage's bandwidth, if known."""
    storage_bytes: int = STORAGE_SAMPLE_BYTES
    timeouts: PreflightTimeouts = field(default_factory=PreflightTimeouts)

    @property
    def folder(self) -> str:
        """The folder of the results, inside the store."""
        return "/".join([*filter(None, [self.run_folder]), preflight_folder(self.attempt)])


def run_preflight(
    job: PreflightJob,
    *,
    node_rank: int,
    key_value_address: tuple[str, int],
    host: str | None = None,
    reporter: Reporter = SILENT,
    probe: Sequence[str] = PROBE_COMMAND,
) -> PreflightVerdict:
    """Check this node and all together; every node of the job calls this, and all get the same verdict.

    `key_value_address` is an address of node 0 with a port that is free there. `host` is the name of this node for
    people. `probe` is the command that measures.
    """
    host = host or socket.gethostname()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trainshed-preflight-")))
        key_values = stack.enter_context(_connect(job, node_rank, key_value_address))
        address = key_value_address[0] if node_rank == 0 else key_values.own_address()
        probes = FabricProbeRunner(node_rank, address, max(job.gpus, 1), key_values, job.setup, scratch, probe)
        with reporter.task("preflight", total=None, unit="measurements") as task:
            report = _check_node(job, node_rank, host, key_values, probes, scratch)
            key_values.put(f"node/{node_rank}", report.to_plain())
            task.advance(1)
            number = 0
            while True:
                number += 1
                instruction = _next_instruction(job, key_values, number)
                if "verdict" in instruction:
                    break
                for group in map(FabricProbeGroup.from_plain, instruction["groups"]):
                    if node_rank in group.nodes:
                        task.describe(group.name)
                        result = probes.measure(group, job.timeouts.measurement_seconds + group.request.seconds)
                        key_values.put(f"result/{group.name}/{node_rank}", result.to_plain())
                        task.advance(1)
        verdict = PreflightVerdict.from_plain(instruction["verdict"])
        _store_results(job, node_rank, verdict, scratch)
        if node_rank:
            key_values.put(f"bye/{node_rank}", True)
    return verdict


@contextmanager
def _connect(job: PreflightJob, node_rank: int, address: tuple[str, int]) -> Iterator[KeyValueClient]:
    """Connect to the key-value store; node 0 also starts its server and the coordinator."""
    token = f"{job.store.url}/{job.run_folder}#{job.attempt}"
    if node_rank:
        yield KeyValueClient(address, token)
        return
    with KeyValueServer(address[1], token) as server:
        key_values = KeyValueClient(("127.0.0.1", server.port), token)
        coordinator = PreflightCoordinator(
            key_values, job.nodes, bool(job.gpus), job.setup, job.machine, job.full, job.timeouts
        )
        thread = threading.Thread(target=coordinator.run, daemon=True)
        thread.start()
        yield key_values
        thread.join()


def _check_node(
    job: PreflightJob, node: int, host: str, key_values: KeyValueClient, probes: FabricProbeRunner, scratch: Path
) -> NodeCheckReport:
    """Run the checks that need no other node."""
    checks = [
        *node_checks(job.setup, job.machine, gpus=job.gpus, scratch=scratch),
        check_clock(key_values.clock_offset_seconds()),
    ]
    if node in sampled_nodes(job.nodes):
        path = f"{job.folder}/write-{node:05d}"
        checks.append(
            check_storage(job.store, path, expected_gb_per_s=job.storage_gb_per_s, size_bytes=job.storage_bytes)
        )
    versions = node_versions(find_gpus() if job.gpus else None)
    if job.gpus:
        expected = expected_in_node(job.machine)
        size = float(expected.mebibytes) if expected is not None and expected.mebibytes else _INTRA_NODE_MEBIBYTES
        sizes = (size,) if job.gpus > 1 else ()
        request = ProbeRequest(
            "cuda", sizes, job.timeouts.sample_seconds, products=True, timeout_seconds=job.timeouts.measurement_seconds
        )
        inside = probes.measure(FabricProbeGroup("inside", (node,), request), job.timeouts.measurement_seconds)
        checks += check_inside(inside, job.machine)
        versions |= inside.figures.get("versions", {})
    return NodeCheckReport(node, host, tuple(checks), versions)


def _next_instruction(job: PreflightJob, key_values: KeyValueClient, number: int) -> dict:
    """Return node 0's next instruction; it may take as long as the slowest node of a measurement."""
    key = f"plan/{number}"
    wait_seconds = job.timeouts.report_seconds + job.timeouts.measurement_seconds + 120.0
    answers = key_values.get([key], wait_seconds)
    if key not in answers:
        raise TrainshedError(f"node 0 decided nothing for {wait_seconds:.0f} s", hint="its log says what it waits for")
    return answers[key]


def _store_results(job: PreflightJob, node: int, verdict: PreflightVerdict, scratch: Path) -> None:
    """Store what this node found, its logs where something is wrong, and on node 0 the verdict and its event."""
    own_report = next((report for report in verdict.nodes if report.node == node), None)
    body = {"schema": PREFLIGHT_SCHEMA, **(own_report.to_plain() if own_report else {"node": node})}
    _put_json(job, f"{node_name(node)}.json", body)
    tails = b"".join(_titled_log_tail(log) for log in sorted(scratch.rglob("*.log")))
    if tails and verdict.outcome in ("replace", "fail"):
        job.store.put(f"{job.folder}/{node_name(node)}.log", tails)
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


def _titled_log_tail(log: Path) -> bytes:
    return f"==> {log.parent.name}/{log.name} <==\n".encode() + read_log_tail(log, _LOG_BYTES).encode() + b"\n"


def preflight_job(
    cluster: Cluster, *, store: Store, run_folder: str, attempt: int, nodes: int, gpus: int, full: bool = False
) -> PreflightJob:
    """Return what every node of a job checks; `gpus` is how many it uses on each node, 0 on CPUs."""
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
    """Return a stage that has a training's nodes and runs preflight on them."""
    machine = machine_of(cluster)
    gpus = machine.gpus if machine is not None else 0
    return Stage("train", nodes or cluster.nodes.default, gpus, max(gpus, 1), preflight=True)
