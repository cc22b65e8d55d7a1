"""`trainshed init` and `clusters`: files that plan, from flags or from answers; nothing is overwritten."""

from __future__ import annotations

import json
import os
import pty
import sys
from pathlib import Path

import pytest

from trainshed.cli import run_cli
from trainshed.recipe import load_cluster, load_recipe


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "length", "steps"), [("tiny", "50", 50), ("llama3.2-1b", "20B", None), ("gpt2", "1000", 1000)]
)
def test_a_recipe_from_flags_plans(
    model: str, length: str, steps: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["init", "--model", model, "--data", "data/*.jsonl", "--length", length]) == 0
    assert "trainshed plan recipe.yaml" in capsys.readouterr().out
    assert load_recipe("recipe.yaml").train.steps == steps
    assert run_cli(["plan", "recipe.yaml", "--gpu", "h100", "--gpus", "8", "--top", "1", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["gpus"] == 8


@pytest.mark.parametrize("target", ["slurm", "kubernetes", "ray", "local"])
def test_a_cluster_from_flags_plans(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"clusters/{target}-ours.yaml"
    flags = ["--target", target, "--machine", "dgx-h100", "--store", "/shared", "--nodes", "4"]
    flags += ["--address", "http://head:8265"] if target == "ray" else []
    assert run_cli(["init", "cluster", file, *flags]) == 0
    assert load_cluster(f"{target}-ours").store_root == "/shared"
    capsys.readouterr()
    assert (
        run_cli(["plan", "gke-llama3-70b", "--on", f"{target}-ours", "--nodes", "4", "--top", "1", "-o", "json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["job"]["gpus"] == 32
    before = Path(file).read_bytes()
    assert run_cli(["init", "cluster", file, *flags]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert Path(file).read_bytes() == before


def test_without_a_terminal_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["init", "--model", "tiny"]) == 2
    assert "--data: is missing, and there is no terminal to ask at" in capsys.readouterr().err
    assert run_cli(["init", "--model", "lama3-8b", "--data", "d", "--length", "10"]) == 2
    assert "there is no model preset `lama3-8b`" in capsys.readouterr().err
    assert run_cli(["init", "--model", "tiny", "--data", "d", "--length", "ten"]) == 2
    assert "`ten` is not a count" in capsys.readouterr().err
    assert not Path("recipe.yaml").exists()


def test_at_a_terminal_four_questions_are_asked_and_enter_takes_the_usual_answer(here: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "trainshed", "init"])
    os.write(terminal, b"gpt-125m\n\n500\n\n")
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        shown += piece
        if not piece:
            break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown
    os.close(terminal)
    assert shown.count(b"? ") >= 4
    recipe = load_recipe("recipe.yaml")
    assert (recipe.name, recipe.model.preset, recipe.train.steps) == ("gpt-125m", "gpt-125m", 500)


def test_clusters_are_listed_copied_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["clusters", "list", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["clusters"]
    assert {"local", "slurm-h100", "gke-a3-mega"} <= {row["name"] for row in rows}
    assert all(row["description"] for row in rows)
    assert run_cli(["clusters", "copy", "slurm-h100"]) == 0
    assert run_cli(["clusters", "copy", "slurm-h100"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert run_cli(["clusters", "check", "slurm-h100"]) == 0
    assert "pass    machine: dgx-h100" in capsys.readouterr().out
    Path("clusters/broken.yaml").write_text("name: broken\ntarget: kubernetes\nmachine: dgx-h100\nstore: /nowhere\n")
    assert run_cli(["clusters", "check", "broken"]) == 1
    assert "jobs need a container image" in capsys.readouterr().out
    Path("clusters/wrong.yaml").write_text("name: wrong\ntarget: slurm\nmachien: dgx-h100\n")
    assert run_cli(["clusters", "check", "wrong"]) == 2


def test_a_recipe_is_checked_against_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["recipes", "check", "quickstart"]) == 0
    assert "every key is known" in capsys.readouterr().out
    assert run_cli(["recipes", "check", "quickstart", "train.stpes=1"]) == 2
