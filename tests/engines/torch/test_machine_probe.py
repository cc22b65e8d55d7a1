"""Measuring a machine: on CI a CPU, with two processes for the all-reduce."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from trainshed.catalog.machines import find_machine
from trainshed.cli.plan import probe
from trainshed.engines.torch.machine_probe import find_network
from trainshed.launch.attempt import machine_environment
from trainshed.plan.training_shape import hardware_of

SMALL = """
import sys
from trainshed.engines.torch import machine_probe
machine_probe._CPU_SHAPES = ((64, 64, 64),)
machine_probe._CPU_ATTENTION = ((64, 2, 32),)
from trainshed.cli import run_cli
sys.exit(run_cli(["plan", "probe", *sys.argv[1:]]))
"""
"""The command with one small shape each: a process of its own, as the environment must be there before PyTorch is."""


def test_a_machine_is_measured_and_its_file_is_one_that_plans_take(tmp_path: Path):
    file = tmp_path / "node.yaml"
    command = [sys.executable, "-c", SMALL, "--to", str(file), "-o", "json"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **machine_environment("bf16")})
    assert done.returncode == 0, done.stderr.decode()
    report = orjson.loads(done.stdout)
    assert report["schema"] == "trainshed.plan.probe/1"
    assert {gemm["dtype"] for gemm in report["gemms"]} >= {"bf16"}
    assert all(gemm["tflops"] > 0 for gemm in report["gemms"])
    assert report["attention"][0]["backward_tflops"] > 0
    assert report["copy_gb_per_s"] > 0
    assert report["launch_us"] > 0
    if report["kind"] == "cpu":
        assert [one["ranks"] for one in report["all_reduces"]] == [2, 2, 2]
    hardware = hardware_of(find_machine(file))
    assert hardware.gpu.dense_tflops.bf16 > 0
    assert hardware.gpus_per_node == report["devices"]


@pytest.mark.parametrize(
    ("to", "message"),
    [("node.txt", "a machine file is YAML"), ("no/such/folder/node.yaml", "there is no such folder")],
)
def test_a_file_that_could_not_be_written_is_refused_before_measuring(tmp_path: Path, to: str, message: str):
    with pytest.raises(Exception, match=message):
        probe(to=tmp_path / to)


def card(root: Path, name: str, **files: str) -> None:
    """A card as Linux lists it."""
    folder = root / name
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text)


def test_cards_that_gpus_reach_each_other_through_come_before_plain_ones(tmp_path: Path):
    card(tmp_path, "net/eth0", speed="100000\n", device="")
    assert find_network(tmp_path) == ("ethernet", 100.0)
    for number in range(8):
        port = {"rate": "400 Gb/sec (4X NDR)\n", "state": "4: ACTIVE\n", "link_layer": "InfiniBand\n"}
        card(tmp_path, f"infiniband/mlx5_{number}/ports/1", **port)
    assert find_network(tmp_path) == ("infiniband-ndr", 3200.0)


def test_cards_that_are_down_or_not_there_are_nothing(tmp_path: Path):
    down = {"rate": "400 Gb/sec (4X NDR)\n", "state": "1: DOWN\n", "link_layer": "Ethernet\n"}
    card(tmp_path, "infiniband/mlx5_0/ports/1", **down)
    card(tmp_path, "net/lo", speed="-1\n")
    assert find_network(tmp_path) == (None, None)
