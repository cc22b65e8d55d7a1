"""What needs a GPU: NCCL itself, asked for networks that the machine does not have. Run by hand: `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshed.engines.probe_request import ProbeRequest
from trainshed.launch.fabric import SINGLE_NODE, FabricSetup, fabric_setup
from trainshed.launch.preflight import PreflightJob, run_preflight
from trainshed.launch.preflight.measurement import FabricProbeGroup, FabricProbeResult, FabricProbeRunner
from trainshed.launch.rendezvous import KeyValueClient
from trainshed.recipe import Cluster
from trainshed.storage import LocalStore

pytestmark = pytest.mark.gpu


def tried(fabric: str, scratch: Path) -> FabricProbeResult:
    """Start NCCL with a fabric's setup, on one GPU."""
    setup = fabric_setup(Cluster(name="c", target="slurm", fabric=fabric), nodes=2)
    worlds = FabricProbeRunner(0, "127.0.0.1", 1, KeyValueClient(("127.0.0.1", 1), ""), setup, scratch)
    return worlds.measure(FabricProbeGroup("all", (0,), ProbeRequest("cuda", (64.0,), 0.2), proves_fabric=True), 120.0)


def test_nccl_says_that_it_uses_sockets_where_they_are_asked_for(tmp_path: Path) -> None:
    found = tried("ethernet", tmp_path)
    assert found.error is None
    assert found.fabric is not None
    assert (found.fabric["verdict"], found.fabric["what"]) == ("pass", "NCCL uses Socket")


@pytest.mark.parametrize("fabric", ["efa-v2", "gib", "tcpxo", "tcpx"])
def test_a_plugin_that_is_missing_ends_the_job_instead_of_leaving_it_on_sockets(fabric: str, tmp_path: Path) -> None:
    found = tried(fabric, tmp_path)
    assert found.error is not None
    assert "Failed to initialize any NET plugin" in found.error
    assert found.fabric is not None
    assert found.fabric["verdict"] == "fail"


def test_a_machine_with_a_gpu_is_checked_whole(tmp_path: Path) -> None:
    job = PreflightJob(LocalStore(tmp_path), "", 1, 1, 1, FabricSetup(SINGLE_NODE, None, ""))
    verdict = run_preflight(job, node_rank=0, key_value_address=("127.0.0.1", 0))
    assert verdict.outcome in ("pass", "warn")
    checks = {check.name: check for check in verdict.nodes[0].checks}
    assert checks["products"].measured["tflops"][0] > 10
    assert {"torch", "cuda", "nccl", "driver"} <= set(verdict.nodes[0].versions)
