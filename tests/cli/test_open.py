"""`trainshed open RUN dash|tensorboard`: a page is started beside the run's files, and ends when nobody looks."""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from pathlib import Path

import pytest

from support.runs.opened_pages import opened_page
from support.runs.written_runs import write_run, write_training
from support.servers.shared_daemons import free_ports
from trainshed.cli import run_cli
from trainshed.launch.pages import FiguresCopy
from trainshed.launch.submissions import record_submission
from trainshed.launch.target import SubmittedJob
from trainshed.observe.dash.access import COOKIE
from trainshed.storage import LocalStore, open_folder

SSH = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n[ "$2" = user@login ] || exit 255\nshift 2\nexec sh -c "$*"\n'


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has ended, with TensorBoard's files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = write_run(tmp_path / "shared")
    write_training(folder)
    assert run_cli(["export-figures", str(folder), "--to", "tensorboard"]) == 0
    return folder


def is_closed(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_tensorboard_shows_a_run_of_this_machine_until_ctrl_c(run: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1, 21000, 32000)
    with opened_page(str(run), "tensorboard", port=port, folder=tmp_path) as page:
        assert page.link == f"http://127.0.0.1:{port}/"
        tags = page.ask_json("/data/plugin/scalars/tags")
        assert "train/loss" in {tag for tags_of_run in tags.values() for tag in tags_of_run}
        assert page.interrupt() == 0
    assert is_closed(port)


def test_the_dashboard_shows_a_run_of_this_machine(run: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1, 21000, 32000)
    with opened_page(str(run), "dash", port=port, folder=tmp_path) as page:
        (listed,) = page.ask_json("/api/runs")["runs"]
        assert listed["run"] == "proof/x"
        assert page.interrupt() == 0


def test_a_run_without_figures_says_how_to_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "shared")
    assert run_cli(["open", str(folder), "tensorboard"]) == 2
    assert "`trainshed export-figures proof/x --to tensorboard`" in capsys.readouterr().err


@pytest.mark.s3
def test_figures_in_a_bucket_are_copied_as_they_grow(run: Path, tmp_path: Path, s3_bucket: str) -> None:
    bucket = open_folder(f"s3://{s3_bucket}/runs/proof/x")
    (file,) = [info.path for info in LocalStore(run).list("tensorboard")]
    whole = (run / file).read_bytes()
    bucket.put(file, whole[:100])
    with FiguresCopy(bucket, tmp_path / "copy") as copy:
        assert (tmp_path / "copy" / file).read_bytes() == whole[:100]
        bucket.put(file, whole)
        with (tmp_path / "copy" / file).open("rb") as reader:  # as TensorBoard has it open
            reader.read()
            assert copy.update() == len(whole) - 100
            assert reader.read() == whole[100:]
        assert copy.update() == 0


def submit_elsewhere(run: Path, tmp_path: Path, *, login: str | None = "user@login") -> str:
    """A run that was sent to a Slurm cluster whose disk is not mounted here: the login node alone sees `run`."""
    slurm = f"slurm: {{login: {login}}}\n" if login else ""
    text = f"name: far\ntarget: slurm\nmachine: cpu\nstore: {tmp_path / 'shared'}\n{slurm}"
    hidden = run.with_name("hidden")
    run.rename(hidden)
    record_submission("proof", "x", 6, SubmittedJob("proof-x", str(run), "slurm", {"train": "17"}), text)
    return str(hidden)


@pytest.mark.parametrize("page_name", ["tensorboard", "dash"])
def test_on_slurm_the_page_runs_on_the_login_node_and_ends_with_the_connection(
    page_name: str, run: Path, tmp_path: Path
) -> None:
    """This ssh stays here; before it runs what it is given, the run's folder appears as it does on that node."""
    hidden = submit_elsewhere(run, tmp_path)
    stub = tmp_path / "bin" / "ssh"
    stub.parent.mkdir()
    stub.write_text(SSH.replace("#!/bin/sh\n", f"#!/bin/sh\nln -sfn {hidden} {run}\n"))
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    python = tmp_path / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (port,) = free_ports(1, 21000, 32000)
    path = f"{stub.parent}:{os.environ['PATH']}"
    with opened_page("proof", page_name, port=port, folder=tmp_path, PATH=path) as page:
        if page_name == "tensorboard":
            assert page.ask_json("/data/plugin/scalars/tags")
        else:
            token = page.link.partition("#token=")[2]
            assert token
            with pytest.raises(OSError, match=r"40[13]"):
                page.ask("/api/runs")
            (listed,) = page.ask_json("/api/runs", {"Cookie": f"{COOKIE}={token}"})["runs"]
            assert listed["run"] == "proof/x"
            assert token not in page.log.read_text()
        page.process.kill()  # not even told: the other side notices by itself
        page.process.wait()
    for _ in range(200):
        if is_closed(port):
            break
        time.sleep(0.1)
    assert is_closed(port)


def test_a_disk_that_nobody_here_sees_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit_elsewhere(run, tmp_path, login=None)
    assert run_cli(["open", "proof", "tensorboard"]) == 2
    assert "write `login: user@host`" in capsys.readouterr().err
    assert run_cli(["open", "proof", "tensorboard", "--keep"]) == 2
    assert "nothing keeps a page on a slurm cluster" in capsys.readouterr().err
