"""`trainshed run` of a recipe that is served: here it ends with the command, and with an export that is complete."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from support.recipes.text_recipes import write_script, write_small_recipe
from trainshed.cli import VERBS, run_cli
from trainshed.observe.event_log import read_events
from trainshed.observe.stages import stage_records
from trainshed.storage import LocalStore


def test_a_run_here_ends_with_the_command_that_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    write_script(tmp_path)
    asked = [str(write_small_recipe(tmp_path)), "export={}", "serve={max_length: 24}"]
    assert run_cli(["run", *asked, "-o", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["serve"] == f"trainshed serve {data['export']} --name small --max-length 24"
    # Other servers look for the tokenizer beside the weights.
    tokenizer = AutoTokenizer.from_pretrained(data["export"])
    assert tokenizer.decode(tokenizer("one two three")["input_ids"]).strip() == "one two three"
    assert run_cli(["run", *asked]) == 0
    shown = capsys.readouterr().out
    assert f"serve it here with: {data['serve']}" in shown
    # Every command that it names exists, and does what it says with what was made.
    run = f"small/{data['id']}"
    assert all(f"  {command}\n" in shown for command in data["next"])
    assert data["next"][0].split()[1] in ("watch", "dash")
    assert f"trainshed generate {run} --prompt 'The '" in data["next"]
    assert all(shlex.split(command)[1] in VERBS for command in data["next"])
    assert run_cli([*shlex.split(data["next"][1])[1:], "--max-tokens", "1", "--device", "cpu"]) == 0
    records = stage_records(read_events(LocalStore(Path(data["folder"])), ""))
    assert [(record.name, record.state) for record in records] == [
        ("prepare", "skipped"),
        ("index", "skipped"),
        ("export", "done"),
    ]


def test_a_benchmark_writes_no_checkpoint_at_all_and_what_needs_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path)
    recipe = str(write_small_recipe(tmp_path))
    assert run_cli(["run", recipe, "checkpoint=off", "-o", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert not list(Path(data["folder"]).glob("checkpoints/step-*"))
    assert not any("generate" in command for command in data["next"])
    assert run_cli(["run", recipe, "checkpoint=off", "export={}"]) == 2
    assert "no checkpoint is written (`checkpoint: off`)" in capsys.readouterr().err
    assert run_cli(["run", recipe, "checkpoint={save: false, to: s3://b/c}"]) == 2
    assert "no checkpoint is written (`save: false`)" in capsys.readouterr().err
