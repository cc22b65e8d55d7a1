"""`trainshed serve`: what is wrong with how it is called is said before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainshed.cli import run_cli
from trainshed.serve.http.server import bind_socket


def test_a_variable_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.delenv("NO_KEY_HERE", raising=False)
    assert run_cli(["serve", "weights", "--api-key-env", "NO_KEY_HERE"]) == 2
    assert "--api-key-env NO_KEY_HERE: this variable is not set" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_at_once(capsys: pytest.CaptureFixture) -> None:
    with bind_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert run_cli(["serve", "weights", "--port", str(port)]) == 2
    assert f"port {port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [("--grace", "-1", "--grace -1.0 is not a time"), ("--max-questions", "0", "--max-questions 0 answers nobody")],
)
def test_what_means_nothing_is_refused(
    option: str, value: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["serve", "weights", option, value]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("adapters", "sentence"),
    [
        (["some/folder"], "--adapter some/folder is not a name and address"),
        (["a=x", "a=y"], "two adapters are called `a`"),
    ],
)
def test_adapters_need_a_name_each(adapters: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["serve", "weights", *(f"--adapter={adapter}" for adapter in adapters)]) == 2
    assert sentence in capsys.readouterr().err


def test_weights_that_are_not_there_end_the_server(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run_cli(["serve", str(tmp_path), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "listening at http://127.0.0.1:" in said
    assert f"{tmp_path}: there are no weights" in said


def test_everybody_is_warned_of_everybody(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_cli(["serve", str(tmp_path), "--port", "0", "--host", "0.0.0.0"])
    assert "warning: everybody who can reach 0.0.0.0 may ask: --api-key-env" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["starlette", "uvicorn", "torch"])
def test_without_its_extra_it_says_the_pip_line(module: str) -> None:
    without = f"import sys; sys.modules['{module}'] = None; from trainshed.cli import run_cli; "
    command = [sys.executable, "-c", f"{without} sys.exit(run_cli(['serve', 'hf://some/model', '--port', '0']))"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'trainshed[serve]'" in done.stderr
