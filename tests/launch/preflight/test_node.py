"""One node by itself: limits, devices, variables, versions, storage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainshed.launch.fabric import DeviceFiles, FabricSetup, fabric_setup
from trainshed.launch.preflight.coordinator import check_clock
from trainshed.launch.preflight.node import (
    check_devices,
    check_environment,
    check_limits,
    check_shared_memory,
    check_storage,
    compare_versions,
    node_checks,
    sampled_nodes,
)
from trainshed.launch.preflight.verdict import CheckResult, worst_verdict
from trainshed.recipe import Cluster
from trainshed.storage import LocalStore


def setup(fabric: str) -> FabricSetup:
    return fabric_setup(Cluster(name="c", target="slurm", fabric=fabric), nodes=2)


def test_this_machine_passes_as_a_node_without_gpus(tmp_path: Path) -> None:
    checks = node_checks(setup("ethernet"), None, gpus=0, scratch=tmp_path)
    assert [check.name for check in checks] == ["gpus", "shared memory", "disk", "environment"]
    assert worst_verdict(checks) in ("pass", "warn")


def test_cards_that_are_not_there_are_counted(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"uverbs{number}").touch()
    wanted = replace(setup("infiniband-ndr"), devices=DeviceFiles(str(tmp_path / "uverbs*"), 8))
    (found,) = check_devices(wanted)
    assert (found.verdict, found.what) == ("fail", f"7 of 8 devices {tmp_path}/uverbs* are there")
    (tmp_path / "uverbs7").touch()
    assert [check.verdict for check in check_devices(wanted)] == ["pass"]


def test_files_that_variables_name_must_be_there(tmp_path: Path) -> None:
    wanted = FabricSetup("infiniband", "infiniband-ndr", "", {"NCCL_TOPO_FILE": str(tmp_path / "topo.xml")})
    assert [check.what for check in check_devices(wanted)] == [
        f"NCCL_TOPO_FILE names {tmp_path / 'topo.xml'}, which is not there"
    ]
    (tmp_path / "topo.xml").touch()
    assert list(check_devices(wanted)) == []
    wanted = replace(wanted, profile_script=str(tmp_path / "profile.sh"))
    assert [check.verdict for check in check_devices(wanted)] == ["fail"]


def test_locked_memory_matters_to_cards_that_write_into_memory() -> None:
    assert list(check_limits(setup("ethernet"), 65536)) == []
    assert [check.verdict for check in check_limits(setup("roce"), None)] == ["pass"]


def test_locked_memory_that_is_limited_fails_without_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshed.launch.preflight.node._has_ipc_lock", lambda: False)
    (found,) = check_limits(setup("roce"), 65536)
    assert (found.verdict, found.what) == ("fail", "ranks may lock 64 KiB, and roce locks what it sends")


def test_variables_of_the_image_are_seen_and_those_of_the_setup_are_not() -> None:
    wanted = setup("efa-v2")
    environment = {**wanted.environment, "RANK": "0", "CUDA_VISIBLE_DEVICES": "0", "UCX_HOME": "/opt"}
    assert [check.verdict for check in check_environment(wanted, environment)] == ["pass"]
    (found,) = check_environment(wanted, environment | {"NCCL_PROTO": "Simple"})
    assert found.verdict == "warn"
    assert found.what.startswith("NCCL_PROTO: ")
    by_script = {"NCCL_PROTO": "Simple", "NCCL_FASTRAK_USE_SNAP": "1"}
    assert [check.verdict for check in check_environment(setup("tcpxo"), by_script)] == ["pass"]


def test_shared_memory_is_measured(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path / "none", 8).verdict == "skipped"
    assert check_shared_memory(tmp_path, 100_000).what.endswith("100000 GiB are usual")


def test_versions_that_talk_to_each_other_must_be_the_same_and_drivers_should() -> None:
    same = {"torch": "2.11", "nccl": "2.28.9", "driver": "580"}
    assert compare_versions({0: same, 1: same}).verdict == "pass"
    other = compare_versions({0: same, 1: same | {"driver": "570"}, 2: same})
    assert (other.verdict, other.what) == ("warn", "nodes differ in driver: 570 on node 1, 580 elsewhere")
    worse = compare_versions({0: same, 1: same, 2: same | {"nccl": "2.27.7"}, 3: {"torch": "2.11", "driver": "580"}})
    assert worse.verdict == "fail"
    assert worse.what == "nodes differ in nccl: 2.27.7 on node 2, none on node 3, 2.28.9 elsewhere"


@pytest.mark.parametrize(("offset", "verdict"), [(0.1, "pass"), (-3.0, "warn"), (1000.0, "fail")])
def test_clocks_may_differ_a_little(offset: float, verdict: str) -> None:
    assert check_clock(offset).verdict == verdict


def test_storage_is_written_read_and_left_as_it_was(tmp_path: Path) -> None:
    found = check_storage(LocalStore(tmp_path), "health/write-00000", size_bytes=3 * 2**20)
    assert found.verdict == "pass"
    assert found.what.endswith("measured, nothing to compare with")
    assert found.measured["bytes"] == 3 * 2**20
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_slow_storage_is_worth_a_word_and_none_fails(tmp_path: Path) -> None:
    slow = check_storage(LocalStore(tmp_path), "file", expected_gb_per_s=1e6, size_bytes=2**20)
    assert (slow.verdict, slow.hint) == ("warn", "checkpoints will take longer than planned")
    (tmp_path / "health").write_text("a file where a folder should be")
    broken: CheckResult = check_storage(LocalStore(tmp_path), "health/file", size_bytes=2**20)
    assert broken.verdict == "fail"
    assert broken.what.startswith("the run's folder cannot be written: ")


@pytest.mark.parametrize(
    ("nodes", "chosen"), [(1, (0,)), (2, (0, 1)), (4, (0, 1, 2, 3)), (5, (0, 1, 3, 4)), (1000, (0, 333, 666, 999))]
)
def test_a_few_nodes_write_for_all(nodes: int, chosen: tuple[int, ...]) -> None:
    assert sampled_nodes(nodes) == chosen
