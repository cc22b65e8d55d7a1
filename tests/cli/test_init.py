"""`trainshed init` and `clusters`: files that plan, from flags or from answers; nothing is overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.terminal import at_a_terminal
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


@pytest.mark.parametrize("file", ["new/recipes/mine.yaml", "file.txt/mine.yaml"])
def test_the_folder_of_a_recipe_is_made(file: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "file.txt").write_text("not a folder")
    code = run_cli(["init", file, "--model", "tiny", "--data", "data/*.jsonl", "--length", "10"])
    if file.startswith("new"):
        assert (code, load_recipe(file).train.steps) == (0, 10)
    else:
        assert code == 2
        assert f"{file}: cannot be written: " in capsys.readouterr().err


def test_without_a_terminal_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["init", "--model", "tiny"]) == 2
    assert "--data: is missing, and there is no terminal to ask at" in capsys.readouterr().err
    assert run_cli(["init", "--model", "lama3-8b", "--data", "d", "--length", "10"]) == 2
    assert "there is no model preset `lama3-8b`" in capsys.readouterr().err
    assert run_cli(["init", "--model", "tiny", "--data", "d", "--length", "ten"]) == 2
    assert "`ten` is not a count" in capsys.readouterr().err
    assert not Path("recipe.yaml").exists()


def test_at_a_terminal_four_questions_are_asked_and_enter_takes_the_usual_answer(here: Path) -> None:
    code, shown = at_a_terminal(["init"], b"gpt-125m\n\n500\n\n")
    assert code == 0, shown
    assert shown.count("? ") >= 4
    recipe = load_recipe("recipe.yaml")
    assert (recipe.name, recipe.model.preset, recipe.train.steps) == ("gpt-125m", "gpt-125m", 500)


def test_a_wrong_answer_is_asked_for_again_and_no_answer_is_not_the_usual_one(here: Path) -> None:
    code, shown = at_a_terminal(["init"], b"lama3-8b\ntiny\n\nsoon\n500\n\n")
    assert code == 0, shown
    assert "there is no model preset `lama3-8b`" in shown
    assert "`soon` is not a count" in shown
    assert shown.count("Which model?") == shown.count("How long?") == 2
    answers = b"k8s\nray\ndgx-h1000\ndgx-h100\n/shared\nmany\n4\n\n"
    code, shown = at_a_terminal(["init", "cluster"], answers)
    assert code == 0, shown
    cluster = load_cluster("my-cluster")
    assert (cluster.target, cluster.machine, cluster.nodes.max) == ("ray", "dgx-h100", 4)
    end_of_file = b"\x04"
    code, shown = at_a_terminal(["init", "other.yaml"], b"tiny\n" + end_of_file)
    assert code == 2
    assert "--data: no answer was given, and nothing was written" in shown
    assert not Path("other.yaml").exists()


def test_weights_that_are_there_are_trained_on_gently() -> None:
    assert run_cli(["init", "--model", "hf://org/name", "--data", "data/*.jsonl", "--length", "1B"]) == 0
    assert load_recipe("recipe.yaml").train.optimizer.lr == 3e-5


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


@pytest.mark.parametrize("store", ["s3://bucket/runs", "./store"])
def test_a_store_that_submit_would_refuse_is_refused_here(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target", "slurm", "--machine", "dgx-h100", "--store", store, "--nodes", "4"]
    assert run_cli(["init", "cluster", "ours.yaml", *flags]) == 2
    assert f"--store: {store} is not a path that every node mounts" in capsys.readouterr().err
    assert not Path("ours.yaml").exists()


def test_text_that_is_not_read_as_it_is_is_refused_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "tiny", "--length", "10"]
    assert run_cli(["init", "book.yaml", *flags, "--data", "book.pdf"]) == 2
    assert "--data: `book.pdf`: a .pdf file is made for printing" in capsys.readouterr().err
    assert run_cli(["init", "book.yaml", *flags, "--data", "book.jsonl"]) == 0
    assert run_cli(["recipes", "check", "book.yaml", "data.train.0.path=book.PDF"]) == 2
    assert "`book.PDF`: a .pdf file is made for printing" in capsys.readouterr().err
