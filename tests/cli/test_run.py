"""`trainshed run` of a recipe that is served: here it ends with the command, and with an export that is complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.recipes.text_recipes import write_script, write_small_recipe
from trainshed.cli import run_cli


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
    assert f"serve it here with: {data['serve']}" in capsys.readouterr().out
