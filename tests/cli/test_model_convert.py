"""`trainshed model fetch` and `convert` as a person runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.models.tiny_models import save_tiny_hf
from support.servers.hub_server import COMMIT, TOKEN, HubServer, running
from trainshed.cli import run_cli
from trainshed.storage import LocalStore


@pytest.fixture
def hub(tmp_path: Path, no_cloud: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The Hub with a model as org/name, its authors' own files beside it."""
    save_tiny_hf("llama", tmp_path / "model", seed=1)
    store = LocalStore(tmp_path / "model")
    with running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        files = {info.path: store.read(info.path) for info in store.list()}
        server.repos["org/name"] = files | {"original/params.json": b"{}", "original/deep/x.pth": b"large"}
        yield server


def test_a_model_is_fetched_at_a_commit_and_without_its_originals(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["model", "fetch", "hf://org/name", str(tmp_path / "a"), "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["source"]) == ("trainshed.model.fetch/1", f"hf://org/name@{COMMIT}")
    assert (tmp_path / "a" / "model.safetensors").exists()
    assert not (tmp_path / "a" / "original").exists()
    assert run_cli(["model", "fetch", "hf://org/name", str(tmp_path / "b"), "--include", "original/**"]) == 0
    assert sorted(path.name for path in (tmp_path / "b" / "original").iterdir()) == ["deep", "params.json"]


def test_a_gated_model_is_refused_with_what_to_do(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated.add("org/name")
    for signed_in in (False, True):
        if signed_in:
            monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert run_cli(["model", "fetch", "hf://org/name", str(tmp_path / "a")]) == 1
        error = capsys.readouterr().err.replace("\n", " ")
        assert f"accept its licence or ask for access at {hub.url}/org/name" in error
        assert ("as the account of your token" if signed_in else "then set HF_TOKEN") in error
        assert TOKEN not in error


def test_a_model_of_the_hub_is_converted_and_proven(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["model", "convert", "hf://org/name", str(tmp_path / "native"), "--to", "native", "-o", "json"]
    assert run_cli(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["source"], report["source_format"]) == (f"hf://org/name@{COMMIT}", "hf")
    assert report["verdict"]["passed"]
    assert report["verdict"]["logits"]["ran"]
    requests = hub.count("/resolve/")
    assert run_cli([*command[:-2], "--no-logits"]) == 0
    assert hub.count("/resolve/") == requests, "what is done is not fetched again"
    shown = capsys.readouterr().out
    assert "equal bit by bit" in shown
    assert "verdict  passed" in shown
    assert not list(tmp_path.glob(".native*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model", "native", "--to", "onnx"], "onnx"),
        (["model", "native"], "--to is missing"),
        (["model", "native", "--to", "hf", "--tp", "2"], "hf has no layout in its files"),
        (["model", "native", "--to", "native", "--dtype", "int8"], "int8"),
        (["model", "native", "--to", "native", "--workers", "0"], "0 workers"),
    ],
)
def test_wrong_input_exits_with_2_and_leaves_nothing(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_hf("llama", tmp_path / "model", seed=1)
    monkeypatch.chdir(tmp_path)
    assert run_cli(["model", "convert", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
