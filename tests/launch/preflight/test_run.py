"""Preflight for real: nodes are threads, their probes processes of this machine, the collectives gloo's."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trainshed.launch.fabric import SINGLE_NODE, UNKNOWN, FabricSetup
from trainshed.launch.preflight import PreflightJob, PreflightTimeouts, PreflightVerdict, run_preflight
from trainshed.launch.preflight.measurement import PROBE_COMMAND
from trainshed.launch.ranks import free_port
from trainshed.observe.event_log import read_events
from trainshed.storage import LocalStore

# Each starts the real probe behind a change that stands for a fault of the node.
FAULTS = {
    "slow": "real = dist.all_reduce\ndist.all_reduce = lambda *a, **k: (time.sleep(1.0), real(*a, **k))[1]",
    "broken": "raise RuntimeError('the card is gone')",
}
FAULTY_PROBE = """
import sys, time
from pathlib import Path
import torch.distributed as dist
{fault}
from trainshed.engines.torch import fabric_probe
fabric_probe.probe(fabric_probe.ProbeRequest.from_text(sys.argv[1]), Path(sys.argv[2]))
"""


def start(
    nodes: int, folder: Path, faults: dict[int, str], *, come: int | None = None, report_seconds: float = 60.0
) -> list[PreflightVerdict]:
    """Run the first nodes of a job as threads, their probes as processes; return what each was told."""
    timeouts = PreflightTimeouts(report_seconds=report_seconds, measurement_seconds=120.0, sample_seconds=0.1)
    setup = FabricSetup(UNKNOWN, None, "")
    job = PreflightJob(LocalStore(folder), "", 1, nodes, 0, setup, storage_bytes=2**20, timeouts=timeouts)
    port = free_port()

    def node(rank: int) -> PreflightVerdict:
        fault = FAULTS.get(faults.get(rank, ""))
        probe = PROBE_COMMAND if fault is None else (sys.executable, "-c", FAULTY_PROBE.format(fault=fault))
        return run_preflight(
            job, node_rank=rank, key_value_address=("127.0.0.1", port), host=f"host-{rank}", probe=probe
        )

    with ThreadPoolExecutor(nodes) as threads:
        return list(threads.map(node, range(come or nodes)))


def kept(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "health/attempt-0001/preflight" / name).read_text())


def test_the_slow_one_of_four_nodes_is_found_and_named_on_all_of_them(tmp_path: Path) -> None:
    told = start(4, tmp_path, {2: "slow"})
    assert len({each.sentence for each in told}) == 1
    assert told[3].replace == (2,)
    pattern = (
        r"one node is to be replaced, of 4: node 2 \(host-2\): "
        r"all-reduces with it reach \S+ GB/s, others \S+ \(\d{2,3}% less\)"
    )
    assert re.fullmatch(pattern, told[0].sentence), told[0].sentence
    verdict = kept(tmp_path, "verdict.json")
    assert (verdict["schema"], verdict["verdict"], verdict["replace"]) == ("trainshed.preflight/1", "replace", [2])
    assert verdict["hosts"]["3"] == "host-3"
    pairs = [check for check in kept(tmp_path, "node-00002.json")["checks"] if check["name"] == "pairs"]
    assert pairs[0]["measured"]["best_gb_per_s"] < pairs[0]["measured"]["others_gb_per_s"] / 5
    (event,) = [event for event in read_events(LocalStore(tmp_path), "") if event["kind"] == "preflight"]
    assert (event["verdict"], event["nodes"], event["rank"]) == ("replace", [2], None)


def test_two_healthy_nodes_are_measured_together_and_ready(tmp_path: Path) -> None:
    told = start(2, tmp_path, {})
    assert told[0].outcome in ("pass", "warn")
    assert told[0].checks[-1].what.startswith("all-reduce of 4 MiB reaches ")
    assert told[0].checks[-1].what.endswith(" GB/s; measured, nothing to compare with")
    verdict = kept(tmp_path, "verdict.json")
    assert verdict["bus_gb_per_s"] > 0
    assert [check["name"] for check in verdict["checks"]] == ["versions", "all-reduce"]
    assert not list(tmp_path.rglob("write-*"))


@pytest.mark.full
def test_a_node_whose_collectives_fail_is_named_with_what_it_said(tmp_path: Path) -> None:
    told = start(3, tmp_path, {1: "broken"})
    assert told[0].replace == (1,)
    assert told[0].sentence.startswith(
        "one node is to be replaced, of 3: node 1 (host-1): no all-reduce with it ends: "
    )
    assert "the card is gone" in told[0].sentence
    log = (tmp_path / "health/attempt-0001/preflight/node-00001.log").read_text()
    assert "the card is gone" in log


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    (told,) = start(2, tmp_path, {}, come=1, report_seconds=0.5)
    assert (told.outcome, told.replace) == ("replace", (1,))
    assert told.sentence == "one node is to be replaced, of 2: node 1 (unknown host): did not report within 0 s"


def test_one_node_is_checked_by_itself(tmp_path: Path) -> None:
    job = PreflightJob(LocalStore(tmp_path), "runs/a", 3, 1, 0, FabricSetup(SINGLE_NODE, None, ""), storage_bytes=2**20)
    verdict = run_preflight(job, node_rank=0, key_value_address=("127.0.0.1", 0))
    assert verdict.outcome in ("pass", "warn")
    assert (tmp_path / "runs/a/health/attempt-0003/preflight/verdict.json").exists()
    assert {check.name for check in verdict.nodes[0].checks} >= {"storage", "clock", "disk"}
