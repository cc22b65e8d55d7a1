"""`trainshed data fetch` as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.servers.hub_server import COMMIT, TOKEN, HubServer
from trainshed.cli.console import parse_task
from trainshed.errors import InputError

NAME = "datasets/org/corpus"


def run(*arguments: str) -> int:
    from trainshed.cli import run_cli

    return run_cli(["data", "fetch", *arguments])


@pytest.fixture(autouse=True)
def corpus(hub: HubServer) -> None:
    hub.repos[NAME] = {f"train/{number}.jsonl.zst": bytes([number]) * 100 for number in range(9)} | {"README.md": b"#"}


def test_a_sample_of_a_hub_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = (f"hf://{NAME}", f"{tmp_path}/c", "--include", "*.jsonl.zst", "--limit", "4", "-o", "json")
    assert run(*command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "schema": "trainshed.data.fetch/1",
        "source": f"hf://{NAME}@{COMMIT}",
        "destination": f"{tmp_path}/c",
        "files": 4,
        "bytes": 400,
        "copied_files": 4,
        "copied_bytes": 400,
        "manifest": f"{tmp_path}/c/.trainshed/manifest.json",
        "complete": True,
    }
    assert run(*command) == 0
    assert json.loads(capsys.readouterr().out)["copied_files"] == 0


def test_an_array_of_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        assert run(f"hf://{NAME}", f"{tmp_path}/c", "--task", f"{number}/3") == 0
        waiting = "other tasks have not finished yet" in capsys.readouterr().out
        assert waiting == (number < 2)
    assert len(list((tmp_path / "c" / "train").iterdir())) == 9


def test_a_gated_dataset_is_refused_with_the_page_to_go_to(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated.add(NAME)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert run(f"hf://{NAME}", f"{tmp_path}/c") == 1
    error = capsys.readouterr().err
    assert "gated" in error
    assert "ask for access at" in error
    assert TOKEN not in error


@pytest.mark.parametrize(
    "arguments", [("s3:/x", "y"), ("a",), ("a", "b", "--task", "4/4"), ("a", "b", "--task", "x"), ("a", "b", "--nope")]
)
def test_wrong_input_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments) == 2


@pytest.mark.parametrize("src", ["nope", f"hf://{NAME}-of-nobody", f"hf://{NAME}/*.csv"])
def test_a_source_that_names_nothing_is_wrong_input(
    src: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(src, "copies") == 2
    assert not (tmp_path / "copies").exists()
    assert "error: " in capsys.readouterr().err


def test_tasks_are_counted_from_zero() -> None:
    assert parse_task("3/16") == (3, 16)
    assert parse_task(" 0/1 ") == (0, 1)
    for bad in ("16/16", "0/0", "1", "a/b", "-1/4", "1/2/3", ""):
        with pytest.raises(InputError, match="--task"):
            parse_task(bad)
