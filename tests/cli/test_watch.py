"""`trainshed watch`: a run as it goes, in a terminal of any width, a pipe or JSON, from a disk or a bucket."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.runs.written_runs import START, STEP, write_run, write_training
from trainshed.cli import run_cli
from trainshed.cli.watch_frame import ASCII, UNICODE, Frame, RunAccount, glyphs_for
from trainshed.observe.event_log import read_events
from trainshed.observe.events import EventWriter
from trainshed.observe.live_view import LiveView
from trainshed.storage import LocalStore, open_store

PATIENCE_SECONDS = 120
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Somebody who works on a run until he is killed.
HOLD = """
import sys, time
from pathlib import Path
from trainshed.launch.local import lock_run
from trainshed.observe.events import EventWriter
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt
folder = Path(sys.argv[1])
with lock_run(folder, "proof/x"):
    take_attempt(LocalStore(folder), "")
    with EventWriter(LocalStore(folder), "", attempt=1, rank=0) as events:
        events.emit("note", text="held")
        print("held", flush=True)
        time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was never started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return write_run(tmp_path / "store")


def test_a_frame_has_every_figure_and_its_exit_code_is_the_runs(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    write_training(run)
    assert run_cli(["watch", "proof", "--once"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "proof/x here: done, attempt 1",
        "12 parameters, dp 2, 2 ranks on NVIDIA H100",
        "━━  step 6 of 6  100%",
        "▁",
        "2.5000",
        "2.7500 at 6",
        "1,234 tokens/s/GPU  MFU 41.0%  2.0 s/step",
        "norm 0.500  lr 1.00e-04  384 tokens  3.5 GiB",
        "slowest 2 (node-b) 1.250 s, 25% over the median; fastest 0 1.000 s",
        "step 6, in 1.0 s, stall 0.2 s, ",
        "ALARM loss spike: 9.1 after 2.6 … at once",
        "attempt 1 finished",
    ):
        assert words in shown
    assert run_cli(["watch", "proof", "--once", "-o", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["state"], data["status"]["step"]) == ("trainshed.watch/1", "done", 6)
    assert (data["ranks"]["slowest_rank"], data["checkpoint"]["stall_seconds"]) == (2, 0.2)
    assert [point["alarm"] for point in data["losses"]] == [False] * 5 + [True]


def test_sixty_columns_and_plain_letters_are_enough(run: Path) -> None:
    write_training(run, end="failed")
    view = LiveView(steps=6)
    view.add(read_events(LocalStore(run), ""))
    account = RunAccount("proof/x", "here", "failed", "attempt 1 failed", problem="its events … cannot be read")
    for width in (30, 60, 61, 200):
        for height in (None, 5, 24):
            lines = [line.plain for line in Frame(account, view.snapshot(), ASCII, height=height).lines(width)]
            assert all(len(line) <= width and line.isascii() for line in lines)
            assert height is None or len(lines) <= height
            assert "failed" in lines[0]
    assert any("#" in line.plain for line in Frame(account, view.snapshot(), ASCII, height=None).lines(60))


def test_the_line_of_losses_is_scaled_and_shows_what_is_not_finite() -> None:
    assert UNICODE.spark([1.0, 2.0, 3.0, None]) == "▁▅█×"
    assert ASCII.spark([2.0, 2.0]) == "__"
    assert ASCII.spark([None, None]) == "xx"
    assert ASCII.safe("a…\x1b[31mb\nc") == "a? [31mb c"


@pytest.mark.parametrize(
    ("locale", "encoding", "expected"),
    [
        ({"LC_ALL": "C"}, "utf-8", ASCII),
        ({"LANG": "POSIX"}, "utf-8", ASCII),
        ({"LANG": "de_DE.UTF-8"}, "utf-8", UNICODE),
        ({"LC_ALL": "C.UTF-8", "LANG": "C"}, "utf-8", UNICODE),
        ({}, "utf-8", UNICODE),
        ({}, "iso-8859-1", ASCII),
    ],
)
def test_letters_beyond_ascii_are_for_terminals_that_have_them(
    locale: dict[str, str], encoding: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in locale.items():
        monkeypatch.setenv(name, value)
    assert glyphs_for(encoding) is expected


def test_a_run_that_has_not_begun_shows_its_stages(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventWriter(LocalStore(run), "", attempt=0, rank=None) as events:
        events.emit("stage", name="prepare", state="started")
        events.emit("stage", name="prepare", state="failed", seconds=1.0, what="numbers.jsonl is empty")
    assert run_cli(["watch", "proof", "--once"]) == 1
    shown = capsys.readouterr().out
    assert "proof/x here: failed" in shown
    assert "last error: prepare failed: numbers.jsonl is empty" in shown
    assert run_cli(["status", "proof"]) == 1
    assert "prepare failed in 1.0 s: numbers.jsonl is empty" in capsys.readouterr().out


def test_what_is_wrong_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["watch", "nothing"]) == 2
    assert "runs: proof/x" in capsys.readouterr().err
    assert run_cli(["watch", "proof", "--every", "0"]) == 2
    assert "--every" in capsys.readouterr().err


class Terminal:
    """A real terminal of some columns, with `trainshed watch` in it."""

    def __init__(self, columns: int, *arguments: str, **environment: str) -> None:
        self.parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainshed", "watch", *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            env=clean | {"TERM": "xterm-256color"} | environment,
            start_new_session=True,
        )
        os.close(child)
        self.shown = ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.parent, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read_until(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while words not in COLOUR.sub("", self.shown):
            assert time.monotonic() < deadline, self.shown
            if select.select([self.parent], [], [], 1.0)[0]:
                try:
                    self.shown += os.read(self.parent, 65536).decode()
                except OSError:  # its other end was closed
                    assert words in COLOUR.sub("", self.shown), self.shown
                    return

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.parent)


def test_a_run_that_is_killed_is_said_in_the_terminal_and_leaving_it_alone_ends_nothing(run: Path) -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True) as holder:
        # A view that finds nobody at work ends at once.
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        left = Terminal(100, "proof")
        stays = Terminal(60, "proof", "--every", "0.2", NO_COLOR="1", LC_ALL="C")
        try:
            for terminal in (left, stays):
                terminal.read_until("running, attempt 1")
            left.process.send_signal(signal.SIGINT)
            left.read_until("left the view; the run goes on")
            assert left.process.wait(PATIENCE_SECONDS) == 0
            assert holder.poll() is None
            stays.resize(90)
            holder.kill()
            holder.wait()
            stays.read_until("attempt 1 was killed: it ended without a word")
            # The frame stays on the screen when the view is gone.
            stays.read_until("\x1b[?1049l")
            stays.read_until("x here: failed")
            assert stays.process.wait(PATIENCE_SECONDS) == 1
            colours = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")
            assert colours.search(left.shown)
            assert not colours.search(stays.shown)
            assert "━" not in stays.shown
        finally:
            holder.kill()
            left.close()
            stays.close()


def test_in_a_pipe_it_prints_what_happens_until_the_end(run: Path) -> None:
    command = [sys.executable, "-P", "-m", "trainshed", "watch", "proof", "--every", "0.2"]
    with subprocess.Popen([sys.executable, "-P", "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert watching.stdout is not None
            lines: list[str] = []
            while not lines or "proof/x here: running" not in lines[-1]:
                lines.append(watching.stdout.readline())
                assert lines[-1], lines
            with EventWriter(LocalStore(run), "", attempt=1, rank=0) as events:
                events.emit("start", **START)
                events.emit("step", 0, loss=3.0, tokens=64, **STEP)
            while "step 1 of 6" not in lines[-1]:
                lines.append(watching.stdout.readline())
                assert lines[-1], lines
            holder.kill()
            holder.wait()
            rest = watching.stdout.read()
            assert watching.wait(PATIENCE_SECONDS) == 1
        finally:
            holder.kill()
            watching.kill()
            watching.communicate()
    assert "training proof/x: 12 parameters on NVIDIA H100, dp 2" in "".join(lines)
    assert "proof/x here: failed" in rest
    assert "attempt 1 was killed" in rest
    assert "\x1b" not in "".join(lines) + rest


# A rank that trains into a bucket and waits in the middle until it is let go on.
TRAIN_INTO_BUCKET = """
import sys, time
from dataclasses import replace
from functools import partial
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from support.recipes.small_recipes import ALONE, recipe_text, small_job, small_recipe
from trainshed.engines.torch import rank
from trainshed.observe.stages import StageRecorder
from trainshed.storage import open_store
rank.EventWriter = partial(rank.EventWriter, segment_seconds=0.2)
folder = Path(sys.argv[1])
store, path = open_store(sys.argv[2])
store.put(f"{path}/recipe.yaml", recipe_text("dense").replace("steps: 20", "steps: 6").encode())
with StageRecorder(store, path).stage("prepare") as outcome:
    outcome.what = "synthetic tokens"
job = small_job(folder, small_recipe("dense", ["train.steps=6"]), ALONE)
def wait_in_the_middle(event):
    while event["kind"] == "step" and event["step"] == 2 and not (folder / "go-on").exists():
        time.sleep(0.05)
sys.exit(rank.train_rank(replace(job, store=store, folder=path), run_folder=folder, listener=wait_in_the_middle))
"""


def read_json(process: subprocess.Popen[str], until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    assert process.stdout is not None
    while line := process.stdout.readline():
        data = json.loads(line)
        if until(data):
            return data
    raise AssertionError("the view ended before")


@pytest.mark.s3
def test_a_run_in_a_bucket_is_watched_while_it_trains_and_found_by_every_verb(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    address = f"s3://{s3_bucket}/team/runs/proof/live"
    support = str(Path(__file__).parents[1])
    command = [sys.executable, "-P", "-c", TRAIN_INTO_BUCKET, str(tmp_path), address, support]
    with subprocess.Popen(command) as training:
        try:
            store, path = open_store(address)
            while not any(store.list(f"{path}/attempts")):
                assert training.poll() is None
                time.sleep(0.2)
            watch = [sys.executable, "-P", "-m", "trainshed", "watch", address, "-o", "json", "--every", "0.2"]
            with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as watching:
                middle = read_json(watching, lambda data: data["status"]["step"] == 3)
                assert (middle["state"], middle["status"]["steps"]) == ("running", 6)
                assert middle["stages"][0]["what"] == "synthetic tokens"
                (tmp_path / "go-on").touch()
                last = read_json(watching, lambda data: data["state"] == "done")
                assert (last["status"]["step"], len(last["losses"])) == (6, 6)
                assert watching.wait(PATIENCE_SECONDS) == 0
            assert training.wait(PATIENCE_SECONDS) == 0
        finally:
            training.kill()
    store.put(f"{path}/logs/attempt-0001/rank-00000.log", b"step 1/6\nstep 6/6\n")
    (tmp_path / "mine.yaml").write_text(f"name: mine\ntarget: local\nstore: s3://{s3_bucket}/team\n")
    capsys.readouterr()

    def report(*arguments: str) -> Any:
        assert run_cli([*arguments, "--on", "mine.yaml", "-o", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    (listed,) = report("ls")["runs"]
    assert (listed["run"], listed["cluster"], listed["state"]) == ("proof/live", f"s3://{s3_bucket}/team", "done")
    assert report("status", "proof")["folder"] == address
    assert [row["step"] for row in report("checkpoints", "proof/live")["checkpoints"]] == [6]
    assert run_cli(["status", address]) == 0
    assert capsys.readouterr().out.startswith(f"proof/live in s3://{s3_bucket}/team: done, step 6 of 6, loss ")
    assert run_cli(["logs", "proof", "--on", "mine.yaml"]) == 0
    assert capsys.readouterr().out == "step 1/6\nstep 6/6\n"
    assert run_cli(["watch", f"{address}-nothing"]) == 2
    assert "there is no run here" in capsys.readouterr().err
