"""`trainshed schema` and `trainshed recipes`."""

import json
from pathlib import Path

import pytest

from trainshed.cli import run_cli


def test_schema_prints_the_recipes_schema_with_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    choices = schema["$defs"]["ModelSection"]["properties"]["preset"]["anyOf"][0]["enum"]
    assert "llama3.1-8b" in choices


def test_schema_of_the_cluster_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["schema", "--cluster"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Trainshed cluster"


def test_recipes_lists_names_with_their_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["recipes"]) == 0
    assert "A tiny model trained on the docstrings" in capsys.readouterr().out
    assert run_cli(["recipes", "-o", "json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["recipes"]]
    assert "quickstart" in names


def test_recipes_copy_writes_the_recipe_and_its_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["recipes", "copy", "quickstart", str(tmp_path)]) == 0
    assert (tmp_path / "quickstart.yaml").is_file()
    assert (tmp_path / "quickstart" / "docstrings.py").is_file()
    assert f"run it: trainshed run {tmp_path}/quickstart.yaml" in capsys.readouterr().out


def test_recipes_copy_of_an_unknown_name_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["recipes", "copy", "quikstart", str(tmp_path)]) == 2
    assert "did you mean quickstart?" in capsys.readouterr().err
