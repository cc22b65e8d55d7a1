"""`trainshed dash` at the command line: it serves until Ctrl-C, or writes one file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.runs.observed_runs import whole_run
from trainshed.cli import run_cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    whole_run(folder / "store", steps=60)
    whole_run(folder / "store", name="other", steps=20)
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder


@contextmanager
def dash(folder: Path, *arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start the command; yields its process, and what it reported."""
    command = [sys.executable, "-P", "-m", "trainshed", "dash", "--port", "0", "-o", "json", *arguments]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"XDG_STATE_HOME": str(folder / "state")} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = ""
        while not lines.endswith("}\n"):
            line = process.stdout.readline()
            if not line:
                break
            lines += line
        yield process, json.loads(lines)
    finally:
        process.kill()
        process.communicate()


def get(url: str, **headers: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return json.load(answer)


def test_it_shows_the_runs_of_the_store_until_ctrl_c(here: Path) -> None:
    with dash(here) as (process, report):
        assert (report["schema"], report["token"], report["link"]) == ("trainshed.dash/1", None, report["url"])
        rows = get(f"{report['url']}api/runs")["runs"]
        assert {row["run"] for row in rows} == {"llama-tech/0a1b2c3d", "other/0a1b2c3d"}
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


def test_it_shows_the_runs_that_are_named(here: Path) -> None:
    with dash(here, "other") as (_, report):
        (row,) = get(f"{report['url']}api/runs")["runs"]
        assert (row["run"], row["state"], row["steps"]) == ("other/0a1b2c3d", "done", 20)


def test_whoever_lets_others_in_gets_a_link_with_a_token(here: Path) -> None:
    with dash(here, "--host", "0.0.0.0") as (process, report):
        assert report["link"] == f"{report['url']}#token={report['token']}"
        assert get(f"{report['url']}api/runs", Authorization=f"Bearer {report['token']}")["runs"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(f"{report['url']}api/runs")
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert report["token"] not in errors
    with dash(here, TRAINSHED_DASH_TOKEN="from-the-environment") as (_, report):
        assert report["token"] == "from-the-environment"


def test_one_file_is_written_on_demand(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["dash", "llama-tech", "other", "--save", "both.html"]) == 0
    assert capsys.readouterr().out.startswith("both.html  llama-tech/0a1b2c3d, other/0a1b2c3d, ")
    assert "trainshed.report/1" in Path("both.html").read_text()
    assert run_cli(["dash", "other", "--save", "one.html", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == Path("one.html").stat().st_size
    assert report["runs"] == ["other/0a1b2c3d"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no such folder, and no such run"),
        (["--port", "70000"], "--port 70000 is not a port"),
        (["--host", "no-such-host.invalid", "--port", "0"], "cannot listen at no-such-host.invalid"),
        (["--token", ""], "the token is empty"),
        (["--save", "missing/report.html"], "there is no such folder"),
        (["--save", "store"], "this is a folder"),
        (["--on", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_done_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run_cli(["dash", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_the_extra_it_names_the_line_to_install(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "trainshed.observe.dash.server", raising=False)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run_cli(["dash"]) == 2
    assert "pip install 'trainshed[dash]'" in capsys.readouterr().err
