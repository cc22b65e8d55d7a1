"""`trainshed doctor`: what it says, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainshed.cli import run_cli


def test_this_machine_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["doctor", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "trainshed.doctor/1"
    checks = {check["name"]: check for check in report["groups"]["this machine"]}
    assert checks["python"]["verdict"] == "pass"
    assert checks["torch"]["verdict"] == "pass"
    assert checks["bf16"]["what"].startswith("products in bf16 ")
    assert {"extra data", "extra k8s", "git", "sbatch", "shared memory", "disk"} <= set(checks)


def test_a_local_cluster_is_proven_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["doctor", "--on", "local"]) == 0
    shown = capsys.readouterr().out
    assert "cluster file\n" in shown
    assert "preflight\n" in shown
    assert "  ok    storage" in shown


def test_a_cluster_file_with_a_fault_ends_with_1_and_says_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("trainshed: 1\nname: mine\ntarget: slurm\nmachine: p5\nenvironment: {NCCL_ALGO: Ring}\n")
    assert run_cli(["doctor", "--on", str(file)]) == 1
    shown = capsys.readouterr().out
    assert "FAIL  environment" in shown
    assert "mine.yaml:5 (environment.NCCL_ALGO): NCCL_ALGO does not belong here" in shown


def test_a_cluster_that_is_not_there_is_input_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["doctor", "--on", "locall"]) == 2
    assert "did you mean local?" in capsys.readouterr().err
