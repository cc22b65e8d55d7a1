"""A sweep on a real Slurm: jobs at once, what they share prepared once, and a second command that finds them done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.clusters.slurm_runs import SlurmRuns, write_cluster
from support.recipes.small_recipes import recipe_text
from trainshed.cli import run_cli

pytestmark = [pytest.mark.slurm, pytest.mark.full]


def test_a_sweep_is_submitted_followed_and_not_repeated(
    slurm_runs: SlurmRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "store").mkdir()
    (tmp_path / "recipe.yaml").write_text(recipe_text("dense"))
    cluster = write_cluster(tmp_path, nodes={"default": 1})
    asked = ["sweep", "recipe.yaml", "train.optimizer.lr=1e-3,1e-2", "train.steps=4", "layout.dp=1"]
    asked += ["--on", str(cluster), "--parallel", "2", "--yes", "-o", "json"]
    assert run_cli(asked) == 0
    shown = capsys.readouterr()
    data = json.loads(shown.out)
    assert [(run["state"], run["step"]) for run in data["runs"]] == [("done", 4)] * 2
    assert data["runs"][0]["loss"] != data["runs"][1]["loss"]
    assert (Path(data["folder"]) / "report.html").is_file()
    assert data["folder"].startswith(str(tmp_path / "store/sweeps"))
    assert run_cli(asked) == 0
    assert "2 of 2 runs are done already" in capsys.readouterr().err
