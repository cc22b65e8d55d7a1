"""Which network NCCL took is read from its own log, and a fallback never passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainshed.catalog import fabric_names
from trainshed.launch.fabric import SINGLE_NODE, FabricSetup, fabric_setup
from trainshed.launch.preflight.measurement import check_fabric, nccl_log_environment, read_nccl_logs
from trainshed.recipe import Cluster

DATA = Path(__file__).with_name("data")
PUBLISHED: list[dict[str, Any]] = yaml.safe_load((DATA / "nccl-published.yaml").read_text())


def setup(fabric: str, sharp: bool = False) -> FabricSetup:
    return fabric_setup(Cluster(name="c", target="slurm", fabric=fabric, sharp=sharp), nodes=2)


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case['fabric']}-{case['verdict']}")
def test_published_logs_are_read_as_people_read_them(case: dict[str, Any]) -> None:
    found = check_fabric(setup(case["fabric"], case.get("sharp", False)), case["log"])
    assert found.verdict == case["verdict"], found.what
    if "says" in case:
        assert found.what == case["says"]


def test_every_fabric_but_plain_ethernet_refuses_nccls_own_log_of_sockets() -> None:
    """Written by NCCL 2.28.9 on an H200 that has no other network."""
    log = (DATA / "nccl-2.28-socket.log").read_text()
    passing = [name for name in fabric_names() if check_fabric(setup(name), log).verdict == "pass"]
    assert passing == ["ethernet"]


def test_a_missing_plugin_is_named() -> None:
    """Written by NCCL 2.28.9 with NCCL_NET=AWS Libfabric and no such plugin: it ended instead of taking sockets."""
    found = check_fabric(setup("efa-v2"), (DATA / "nccl-2.28-no-plugin.log").read_text())
    assert found.verdict == "fail"
    assert found.what == "efa-v2 is not used: NCCL says `NET/Plugin: Could not find: libnccl-net.so`"
    assert found.hint == "is the plugin of efa any in the image (NCCL_NET=AWS Libfabric), and are its devices there?"


def test_no_log_proves_nothing_and_one_node_needs_no_proof() -> None:
    assert check_fabric(setup("gib"), " \n").what == "NCCL left no log: nothing proves that the fabric is used"
    alone = check_fabric(FabricSetup(SINGLE_NODE, None, ""), "x NCCL INFO Using network Socket")
    assert (alone.verdict, alone.measured) == ("skipped", {"network": "Socket"})


def test_patterns_look_at_lines_and_not_across_them() -> None:
    wanted = replace(setup("roce"), selected=("Using network IB$",))
    assert check_fabric(wanted, "a NCCL INFO Using network IBext_v8\n").verdict == "fail"


def test_nccl_writes_where_we_read(tmp_path: Path) -> None:
    name = nccl_log_environment(tmp_path)["NCCL_DEBUG_FILE"].replace("%h", "host").replace("%p", "17")
    Path(name).write_text("NCCL INFO Using network IB\n")
    assert read_nccl_logs(tmp_path) == "NCCL INFO Using network IB\n"
