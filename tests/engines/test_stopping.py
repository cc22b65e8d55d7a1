"""Runs that are stopped, killed, stuck or poisoned: each says so, ends in bounded time, and goes on as if never stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from small_runs import SmallRuns, events, figures, recipe_text, state
from trainshed.observe.reading import EventFollower, read_events, steps
from trainshed.storage import LocalStore

LAYOUT = "dp=2,micro_batch=2"
ENDLESS = "train.steps=1000000"
WAIT_SECONDS = 120.0


class Training:
    """`trainshed train` as a process of its own, with its events as they come."""

    def __init__(self, folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> None:
        (folder / "recipe.yaml").write_text(recipe_text("dense"))
        command = [sys.executable, *launcher, "-m", "trainshed", "train", "recipe.yaml", *arguments, "--id", "it"]
        self.run = folder / "store" / "runs" / "proof" / "it"
        self._follower = EventFollower(self.run)
        self._follower.poll()
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until an event of this attempt is as wanted."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            for event in self._follower.poll():
                if wanted(event):
                    return event
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.process.kill()
        raise AssertionError(f"it did not come to that: {self.process.communicate()}")

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks that are running."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {int(each.environ()["RANK"]): each for each in found if "worker" in each.cmdline()}

    def end(self) -> tuple[int, str]:
        """Wait for the end; returns the exit code and what was said on stderr."""
        said = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.returncode, said[1]


def after_checkpoint(step: int) -> Callable[[dict[str, Any]], bool]:
    """The first step from `step` on that has a stored checkpoint behind it."""
    stored = False

    def wanted(event: dict[str, Any]) -> bool:
        nonlocal stored
        stored = stored or (event["kind"] == "checkpoint" and event["phase"] == "committed")
        return stored and event["kind"] == "step" and event["step"] >= step

    return wanted


def of_kind(kind: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["kind"] == kind


def assert_as_if_never_stopped(small_runs: SmallRuns, run: Path, layout: str) -> None:
    """Every step, and the state at the end, bitwise those of a straight run."""
    got = steps(LocalStore(run), "")
    straight = small_runs.new_folder()
    expected = small_runs.train(straight, "dense", layout, f"train.steps={len(got)}")
    assert figures(got) == figures(expected)
    there, here = state(straight, len(got)), state(run, len(got))
    assert [name for name in there if not there[name].equal(here[name])] == []


def test_a_run_asked_to_stop_stores_its_state_and_goes_on_as_if_nobody_had_asked(
    small_runs: SmallRuns, tmp_path: Path
) -> None:
    first = Training(tmp_path, ENDLESS, "--layout", LAYOUT)
    first.wait_for(lambda event: event["kind"] == "step" and event["step"] >= 2)
    first.process.send_signal(signal.SIGTERM)
    code, said = first.end()
    assert code == 128 + signal.SIGTERM, said
    (asked,) = events(first.run, "signal")
    assert asked["name"] == "SIGTERM"
    assert events(first.run, "end")[-1]["reason"] == "signal"
    assert events(first.run, "end")[-1]["exit_code"] == 143
    stopped = asked["step"]
    assert [each["step"] for each in events(first.run, "checkpoint") if each["phase"] == "committed"] == [stopped]
    second = Training(tmp_path, f"train.steps={stopped + 3}", "checkpoint.resume=must", "--layout", LAYOUT)
    code, said = second.end()
    assert code == 0, said
    assert [each["step"] for each in events(first.run, "resume")] == [stopped]
    assert_as_if_never_stopped(small_runs, first.run, LAYOUT)


def test_a_rank_that_is_killed_is_named_and_nobody_is_left_behind(small_runs: SmallRuns, tmp_path: Path) -> None:
    first = Training(tmp_path, ENDLESS, "checkpoint.every=3", "--layout", LAYOUT)
    first.wait_for(after_checkpoint(4))
    ranks = first.ranks()
    ranks[1].kill()
    code, said = first.end()
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in said
    assert "the same command goes on from the last checkpoint" in said
    assert not any(rank.is_running() for rank in ranks.values())
    (failure,) = events(first.run, "failure")
    assert failure["ranks"] == [1]
    assert "all_reduce" in failure["collective"] or "all_gather" in failure["collective"], failure
    done = len(steps(LocalStore(first.run), ""))
    second = Training(tmp_path, f"train.steps={done + 2}", "checkpoint.every=3", "--layout", LAYOUT)
    assert second.end()[0] == 0
    assert len(events(first.run, "resume")) == 1
    assert_as_if_never_stopped(small_runs, first.run, LAYOUT)


def test_torchrun_starts_the_same_ranks(small_runs: SmallRuns, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0")
    training = Training(tmp_path, "train.steps=4", "--layout", "tp=2,micro_batch=4", launcher=launcher)
    code, said = training.end()
    assert code == 0, said
    assert "4 of 4" in said or "step 4" in said, said
    assert_as_if_never_stopped(small_runs, training.run, "tp=2,micro_batch=4")
