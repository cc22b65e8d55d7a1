"""`trainshed stacks` of runs here: one that trains, one that has died, one that has nothing to show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from trainshed.cli import run_cli
from trainshed.launch.local import lock_run
from trainshed.observe.events import EventWriter
from trainshed.observe.health import FlightRecord, flight_record_name, health_folder
from trainshed.run_folder import RECIPE_FILE
from trainshed.storage import LocalStore

RANK = """
import time
def stands_here():
    print("up", flush=True)
    while True:
        time.sleep(0.1)
stands_here()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run in the store here, which nobody works on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "store/runs/small/1a2b3c4d"
    folder.mkdir(parents=True)
    (folder / RECIPE_FILE).write_text("trainshed: 1\nname: small\n")
    return folder


@pytest.fixture
def ranks(run: Path) -> Iterator[None]:
    """Two ranks of the run, at work."""
    processes = []
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "TRAINSHED_RUN_FOLDER": str(run)}
        command = [sys.executable, "-c", RANK]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, process_group=0))
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    with lock_run(run, "small/1a2b3c4d"):
        yield
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_ranks_of_a_run_here_are_shown_and_go_on(
    run: Path, ranks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["stacks", "small"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("small/1a2b3c4d: 2 ranks now\n")
    assert "in stands_here" in printed
    assert run_cli(["stacks", "small", "--rank", "1", "-o", "json"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert (report["schema"], report["live"], report["groups"][0]["ranks"]) == ("trainshed.stacks/1", True, [1])
    assert run_cli(["stacks", "small", "--rank", "7"]) == 2
    assert "there is no rank 7 of small/1a2b3c4d to look at" in capsys.readouterr().err
    assert run_cli(["stacks", "small", "--dry-run"]) == 2
    assert "leave it out" in capsys.readouterr().err


def test_a_run_whose_ranks_have_not_started_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_run(run, "small/1a2b3c4d"):
        assert run_cli(["stacks", "small"]) == 1
    assert "none of its ranks has started yet" in capsys.readouterr().err


def test_of_a_dead_run_its_flight_records_are_shown_with_the_cause(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    health = health_folder(run, 2)
    health.mkdir(parents=True)
    health_folder(run, 3).mkdir()  # a later attempt that ended without a word
    waits = ["/x/site-packages/torch/distributed/distributed_c10d.py:2 in all_reduce: work.wait()"]
    loads = ["/x/src/trainshed/data/order.py:3 in read: return next(self.rows)"]
    for rank, stack in enumerate([waits, loads]):
        record = FlightRecord(rank, 5.0, "test", stack=stack, waiting=None if rank else "collective")
        (health / flight_record_name(rank)).write_bytes(record.to_json())
    assert run_cli(["stacks", "small"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("small/1a2b3c4d: 2 ranks when attempt 2 ended: rank 1 did not arrive")
    assert "rank 0 waits for other ranks in all_reduce" in printed
    assert "rank 1 waits for data" in printed
    with EventWriter(LocalStore(run), "", attempt=2, rank=None) as events:
        events.emit("failure", ranks=[1], collective=None, what="as it was explained then")
    assert run_cli(["stacks", "small", "-o", "json"]) == 0
    report = orjson.loads(capsys.readouterr().out)
    assert (report["live"], report["attempt"], report["diagnosis"]) == (False, 2, "as it was explained then")
    assert run_cli(["stacks", "small", "--rank", "5"]) == 2


def test_a_run_without_flight_records_has_nothing_to_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["stacks", "small"]) != 0
    assert "no rank has left a flight record" in capsys.readouterr().err
