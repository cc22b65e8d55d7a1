"""`export-figures`, `grafana` and `doctor --notify` at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.recipes.small_recipes import recipe_text
from support.servers.webhook_server import webhook_server
from trainshed.cli import run_cli
from trainshed.observe.events import EventWriter
from trainshed.storage import LocalStore

STEP = {"loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64, "step_seconds": 0.5, "mfu": None, "skipped": False}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "store/runs/proof/1"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe_text("dense"))
    with EventWriter(LocalStore(folder), "", attempt=1, rank=0) as events:
        more = {"tokens_per_second_per_gpu": 1.0, "mfu_full_attention": None, "batch_hash": "0"}
        events.emit("step", 0, **STEP, **more)
    return folder


def test_a_run_is_exported_by_its_name_and_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["export-figures", "proof", "--to", "tensorboard"]) in (0, None)
    assert capsys.readouterr().out == (
        "proof/1: 1 points of 1 steps written to tensorboard: store/runs/proof/1/tensorboard\n"
    )
    assert run_cli(["export-figures", "proof/1", "--to", "dllogger", "--out", "there", "-o", "json"]) in (0, None)
    assert json.loads(capsys.readouterr().out) == {
        "schema": "trainshed.export-figures/1",
        "run": "proof/1",
        "tool": "dllogger",
        "to": "there/dllogger/rank-0/dllogger.json",
        "steps": 1,
        "written": 1,
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "wandb"], "write 'observe.wandb={project: NAME}' after the run"),
        (["--to", "wandb", "train.steps=3"], "`train.steps=3` is not an option of a tool"),
        (["--to", "wandb", "observe.wandb.projct=x"], "did you mean observe.wandb.project?"),
        (["--to", "excel"], "excel"),
    ],
)
def test_wrong_words_end_with_2(run: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["export-figures", "proof", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_dashboard_is_printed_or_written_to_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(["grafana"]) in (0, None)
    assert json.loads(capsys.readouterr().out)["title"] == "Trainshed training"
    assert run_cli(["grafana", "--out", "board.json"]) in (0, None)
    assert json.loads(Path("board.json").read_text())["uid"] == "trainshed-training"
    assert run_cli(["grafana", "--out", "board.json"]) == 2
    assert "File exists" in capsys.readouterr().err


def test_doctor_sends_a_test_message_and_names_no_address(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(run / "recipe.yaml")
    words = ["doctor", "--notify", "--recipe", recipe, "notify=[{webhook: {secret: HOOK}}, {command: ['false']}]"]
    with webhook_server() as webhook:
        monkeypatch.setenv("HOOK", webhook.address)
        assert run_cli(words) == 1
        assert [message["text"] for message in webhook.messages] == [
            "doctor on local: a test of `notify`; no run has begun"
        ]
        printed = capsys.readouterr()
        assert "a test message was sent by its webhook" in printed.out
        assert "false ended with exit code 1" in printed.out
        assert webhook.address not in printed.out + printed.err
    assert run_cli(["doctor", "--notify"]) == 2
    assert run_cli(["doctor", "--recipe", recipe]) == 2
