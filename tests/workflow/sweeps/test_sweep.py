"""Sweeps on this machine, with real runs: found again, resumed, failed one by one, and planned for a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.recipes.text_recipes import SCRIPT, write_script, write_small_recipe
from trainshed.cli import run_cli
from trainshed.cli.console import PlainReporter
from trainshed.errors import InputError
from trainshed.workflow.sweeps.runners import sweep_runner
from trainshed.workflow.sweeps.sweep import PointState, SweepPoint, plan_sweep, run_sweep


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_script(tmp_path)
    write_small_recipe(tmp_path)
    return tmp_path


def attempts(folder: Path, run: str) -> int:
    return len(list((folder / "store/runs" / run / "attempts").glob("*.json")))


def sweep(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run_cli(["sweep", "recipe.yaml", *arguments, "-o", "json"])
    return code, json.loads(capsys.readouterr().out)


def test_one_run_that_fails_stops_no_other_and_only_it_is_tried_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("raise SystemExit('the disk of the corpus is gone')\n")
    asked = ("data.train.0.script=broken.py,numbers.py", "train.steps=2")
    code, data = sweep(capsys, *asked)
    assert code == 1
    broken, trained = data["runs"]
    assert (broken["state"], trained["state"]) == ("failed", "done")
    assert "the disk of the corpus is gone" in broken["why"]
    assert trained["step"] == 2
    assert trained["loss"] > 0
    assert data["folder"] == f"store/sweeps/small/{data['id']}"
    page = (folder / data["report"]).read_text()
    assert "the disk of the corpus is gone" in page
    assert page.count("<svg") == 2
    assert json.loads((folder / data["folder"] / "sweep.json").read_text())["runs"] == data["runs"]

    write_script(folder, SCRIPT.replace("300", "301"), "broken.py")
    code, again = sweep(capsys, *asked)
    assert code == 0
    assert again["id"] == data["id"]
    assert [run["state"] for run in again["runs"]] == ["done", "done"]
    assert attempts(folder, trained["run"]) == 1

    # A run of a sweep is the run that `run` with the same keys has.
    assert run_cli(["status", "recipe.yaml", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == trained["run"]

    assert run_cli(["ls"]) == 0
    shown = capsys.readouterr().out
    assert f"small/{data['id']}" in shown
    assert "2 of 2 runs done over data.train.0.script" in shown
    assert run_cli(["rm", f"small/{data['id']}", "--yes"]) == 0
    assert "its 2 runs stay" in capsys.readouterr().out
    assert not (folder / data["folder"]).exists()
    assert (folder / "store/runs" / trained["run"] / "recipe.yaml").is_file()


def test_values_that_make_no_other_run_are_in_the_ids_and_others_are_not(folder: Path) -> None:
    planned = plan_sweep("recipe.yaml", ["train.optimizer.lr=1e-3,1e-2", "layout.dp=1,2"])
    ids = [point.id for point in planned.points]
    plain = [point.id for point in plan_sweep("recipe.yaml", ["train.optimizer.lr=1e-3,1e-2"]).points]
    assert ids == [f"{plain[0]}-dp1", f"{plain[0]}-dp2", f"{plain[1]}-dp1", f"{plain[1]}-dp2"]
    assert [point.gpus for point in planned.points] == [1, 2, 1, 2]
    # The length of a sweep's runs may grow: it stays the same sweep.
    longer = plan_sweep("recipe.yaml", ["train.optimizer.lr=1e-3,1e-2", "layout.dp=1,2", "train.steps=50"])
    assert longer.id == planned.id


def test_a_value_that_cannot_run_is_refused_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["sweep", "recipe.yaml", "layout.tp=1,3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: tp=3: ")
    assert "no run was started" in error
    assert not (folder / "store").exists()
    assert run_cli(["sweep", "recipe.yaml", "train.optimizer.lr=1e-3,high"]) == 2
    assert "lr=high" in capsys.readouterr().err
    with pytest.raises(InputError, match="0 runs at once"):
        sweep_runner(plan_sweep("recipe.yaml", ["train.optimizer.lr=1e-3,1e-2"]), 0)


def test_a_sweep_on_a_cluster_is_priced_and_asks_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["sweep", "recipe.yaml", "model={preset: llama3.1-8b, init: random}", "tokenizer=null"]
    asked += ["data={synthetic: true, sequence_length: 4096}", "train.precision=bf16", "train.global_batch=64"]
    asked += ["train.optimizer.lr=1e-4,3e-4", "layout={tp: 2, shard: full}", "train.steps=1000", "--on", "eks-p5"]
    assert run_cli([*asked, "--dry-run", "-o", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    first, second = data["runs"]
    assert first["gpu_hours"] == pytest.approx(first["hours"] * first["gpus"])
    assert first["cost"] > 0
    assert data["planned"]["cost"] == pytest.approx(first["cost"] + second["cost"])
    assert run_cli(asked) == 2
    shown = capsys.readouterr().err
    assert "2 runs on eks-p5: " in shown
    assert "GPU hours" in shown
    assert "write --yes to send them" in shown


@pytest.mark.full
def test_a_sweep_that_is_killed_goes_on_where_its_runs_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "recipe.yaml",
        "train.optimizer.lr=1e-3,1e-2",
        "train.steps=400",
        "checkpoint={every: 20}",
        "--parallel",
        "2",
    ]
    command = [sys.executable, "-P", "-m", "trainshed", "sweep", *asked]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 300
        while len(list(folder.glob("store/runs/small/*/checkpoints/latest"))) < 2:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGKILL)
    code, data = sweep(capsys, *asked[1:])
    assert code == 0
    assert [(run["state"], run["step"]) for run in data["runs"]] == [("done", 400)] * 2
    # Each went on from a checkpoint, and none was trained twice at once.
    assert [attempts(folder, run["run"]) for run in data["runs"]] == [2, 2]


class StoppedRunner:
    """Two runs that go on until Ctrl-C: the first has just ended then, the second is stopped."""

    look_seconds = 0.01

    def __init__(self) -> None:
        self.states: dict[str, PointState] = {}

    def start(self, point: SweepPoint) -> None:
        self.states[point.run] = "running"
        if len(self.states) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    def look(self, point: SweepPoint) -> tuple[PointState, str]:
        return self.states.get(point.run, "waiting"), ""

    def is_prepared(self, point: SweepPoint) -> bool:
        return True

    def stop(self, points: Sequence[SweepPoint]) -> None:
        first, second = points
        self.states |= {first.run: "done", second.run: "stopped"}


def test_progress_of_a_stopped_sweep_counts_the_runs_that_ended(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = plan_sweep("recipe.yaml", ["train.optimizer.lr=1e-3,1e-2"])
    outcome = run_sweep(planned, StoppedRunner(), parallel=2, reporter=PlainReporter())
    assert outcome.exit_code == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("sweep                   1 run  ")
    assert "running" not in last
