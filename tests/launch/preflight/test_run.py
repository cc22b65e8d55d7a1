"""Preflight for real: nodes are processes of this machine, their collectives gloo's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainshed.launch.fabric import SINGLE_NODE, FabricSetup
from trainshed.launch.preflight import PreflightJob, run_preflight
from trainshed.launch.ranks import free_port
from trainshed.observe.reading import read_events
from trainshed.storage import LocalStore


def start(nodes: int, folder: Path, kinds: dict[int, str], come: list[int] | None = None) -> list[str]:
    """Run the nodes that come; return what each said."""
    port = str(free_port())
    script = str(Path(__file__).with_name("node_process.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(node), str(nodes), port, str(folder), kinds.get(node, "well")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in come or range(nodes)
    ]
    try:
        return [process.communicate(timeout=300)[0].strip() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def kept(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "health/attempt-0001/preflight" / name).read_text())


def test_the_slow_one_of_four_nodes_is_found_and_named_on_all_of_them(tmp_path: Path) -> None:
    told = start(4, tmp_path, {2: "slow"})
    assert len(set(told)) == 1
    pattern = (
        r"replace: one node is to be replaced, of 4: node 2 \(host-2\): "
        r"all-reduces with it reach \S+ GB/s, others \S+ \(9\d% less\)"
    )
    assert re.fullmatch(pattern, told[0]), told[0]
    verdict = kept(tmp_path, "verdict.json")
    assert (verdict["schema"], verdict["verdict"], verdict["replace"]) == ("trainshed.preflight/1", "replace", [2])
    assert verdict["hosts"]["3"] == "host-3"
    pairs = [check for check in kept(tmp_path, "node-00002.json")["checks"] if check["name"] == "pairs"]
    assert pairs[0]["measured"]["best_gb_per_s"] < pairs[0]["measured"]["others_gb_per_s"] / 10
    (event,) = [event for event in read_events(LocalStore(tmp_path), "") if event["kind"] == "preflight"]
    assert (event["verdict"], event["nodes"], event["rank"]) == ("replace", [2], None)


def test_two_healthy_nodes_are_measured_together_and_ready(tmp_path: Path) -> None:
    told = start(2, tmp_path, {})
    pattern = r"(pass: 2 nodes are ready: all-reduce of 4 MiB reaches \S+ GB/s; measured, nothing .*|warn: .*)"
    assert re.fullmatch(pattern, told[0]), told[0]
    verdict = kept(tmp_path, "verdict.json")
    assert verdict["bus_gb_per_s"] > 0
    assert [check["name"] for check in verdict["checks"]] == ["versions", "all-reduce"]
    assert not list(tmp_path.rglob("write-*"))


@pytest.mark.full
def test_a_node_whose_collectives_fail_is_named_with_what_it_said(tmp_path: Path) -> None:
    told = start(3, tmp_path, {1: "broken"})
    assert told[0].startswith(
        "replace: one node is to be replaced, of 3: node 1 (host-1): no all-reduce with it ends: "
    )
    log = (tmp_path / "health/attempt-0001/preflight/node-00001.log").read_text()
    assert "the card is gone" in log


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    (told,) = start(3, tmp_path, {0: "alone"}, come=[0])
    assert told == "fail: 2 of 3 nodes cannot train: did not report within 0 s"


def test_one_node_is_checked_by_itself(tmp_path: Path) -> None:
    job = PreflightJob(LocalStore(tmp_path), "runs/a", 3, 1, 0, FabricSetup(SINGLE_NODE, None, ""), storage_bytes=2**20)
    verdict = run_preflight(job, node_rank=0, board=("127.0.0.1", 0))
    assert verdict.outcome in ("pass", "warn")
    assert (tmp_path / "runs/a/health/attempt-0003/preflight/verdict.json").exists()
    assert {check.name for check in verdict.nodes[0].checks} >= {"storage", "clock", "disk"}
