"""A measured machine becomes a file that the catalog reads, whether it knows the GPU or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainshed.catalog.gpus import find_gpu, gpu
from trainshed.catalog.machines import find_machine, machine
from trainshed.plan.machine_file import (
    AllReduceRate,
    AttentionRate,
    GemmRate,
    MachineMeasurements,
    reached_shares,
    write_machine_file,
)
from trainshed.plan.training_shape import hardware_of

H200 = MachineMeasurements(
    device="NVIDIA H200",
    kind="cuda",
    devices=8,
    memory_gib=139.8,
    host_memory_gib=2000.0,
    cpus=192,
    torch="2.11.0",
    gemms=(GemmRate(8192, 8192, 8192, "bf16", 742.0), GemmRate(1024, 1024, 1024, "bf16", 200.0)),
    attention=(AttentionRate(8192, 32, 128, "bf16", 500.0, 400.0),),
    copy_gb_per_s=4320.0,
    launch_us=2.0,
    all_reduces=(AllReduceRate(8, 1024.0, 0.005, 360.0),),
    fabric="infiniband-ndr",
    network_gbps=3200.0,
)


def test_a_known_gpu_keeps_its_published_figures(tmp_path: Path):
    file = tmp_path / "node.yaml"
    assert write_machine_file(H200, file) == [file]
    hardware = hardware_of(find_machine(file))
    assert hardware.gpu == gpu("h200")
    assert (hardware.gpus_per_node, hardware.fabric, hardware.network_gb_per_s) == (8, "infiniband-ndr", 50.0)
    assert "# 8192 x 8192 x 8192 bf16: 742 TFLOP/s" in file.read_text()


def test_an_unknown_gpu_is_described_beside_the_machine_by_what_was_measured(tmp_path: Path):
    file = tmp_path / "node.yaml"
    beside = tmp_path / "node-gpu.yaml"
    assert write_machine_file(replace(H200, device="Abacus 9000 (rev. B)"), file) == [file, beside]
    found = hardware_of(find_machine(file)).gpu
    assert found == find_gpu(beside)
    assert (found.name, found.device_names) == ("abacus-9000-rev-b", ("Abacus 9000 (rev. B)",))
    assert found.dense_tflops.bf16 == pytest.approx(742 / 0.8, rel=1e-3)
    assert found.link_gb_per_s == pytest.approx(900.0)
    assert find_machine(str(tmp_path / (found.machine or ""))).name == "node"


def test_a_machine_without_network_cards_says_whose_network_was_taken(tmp_path: Path):
    alone = replace(H200, fabric=None, network_gbps=None)
    write_machine_file(alone, tmp_path / "known.yaml")
    found, usual = find_machine(tmp_path / "known.yaml"), machine(gpu("h200").machine or "")
    assert (found.fabric, found.network_gbps) == (usual.fabric, usual.network_gbps)
    assert f"no network card found: that of {usual.name}" in found.source
    write_machine_file(replace(alone, device="Abacus"), tmp_path / "unknown.yaml")
    assert "10 Gbit/s of ethernet assumed" in find_machine(tmp_path / "unknown.yaml").source


def test_what_is_reached_of_published_figures_is_said_for_known_gpus_only():
    reached = reached_shares(H200)
    assert reached == {"memory": pytest.approx(0.9), "bf16": pytest.approx(0.75, abs=1e-3), "link": pytest.approx(0.8)}
    assert reached_shares(replace(H200, device="Abacus")) == {}
