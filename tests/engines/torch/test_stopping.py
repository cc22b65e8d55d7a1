"""Runs that are stopped, killed or stuck: they say so, end in bounded time, and go on as if never stopped."""

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

from support.recipes.small_recipes import ALONE, recipe_text, world_size
from support.runs.rank_pool import NO_GPU, RankPool
from support.runs.small_ranks import train_keeping_apart, train_loading_slowly, train_until_asked
from support.runs.small_runs import SmallRuns, events, figures, state
from trainshed.errors import TrainshedError
from trainshed.launch.local import train_locally
from trainshed.launch.ranks import free_port
from trainshed.observe.event_log import EventFollower, read_steps
from trainshed.plan import parse_layout
from trainshed.recipe import parse_recipe
from trainshed.storage import LocalStore
from trainshed.workflow import prepare_run, run_layout

LAYOUT = "dp=2,micro_batch=2"
ENDLESS = "train.steps=1000000"
WAIT_SECONDS = 120.0


class Training:
    """A `trainshed train` of its own process, with its events as they come."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.run = folder / "store" / "runs" / "proof" / "it"
        self.process = process
        self._follower = EventFollower(self.run)

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until an event is as wanted."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not any(wanted(event) for event in self._follower.poll()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "it did not come to that"
            time.sleep(0.02)

    def wait_for_line(self, wanted: str) -> str:
        """Wait until a line on stderr holds some words; returns it."""
        assert self.process.stderr is not None
        line = next((line for line in self.process.stderr if wanted in line), None)
        assert line is not None, f"it ended without a word of '{wanted}'"
        return line

    def end(self) -> tuple[int, str]:
        """Wait for the end; returns the exit code and what was said on the way."""
        said = "".join(self.process.communicate(timeout=WAIT_SECONDS))
        return self.process.returncode, said


@contextmanager
def training(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> Iterator[Training]:
    """Start `trainshed train` on the small dense recipe; nothing of it stays."""
    (folder / "recipe.yaml").write_text(recipe_text("dense"))
    command = [sys.executable, *launcher, "-m", "trainshed", "train", "recipe.yaml", "--id", "it", *arguments]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | NO_GPU,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Training(folder, process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def ranks_below(process: int) -> dict[int, psutil.Process]:
    """The ranks that a process has started."""
    found = psutil.Process(process).children(recursive=True)
    return {int(each.environ()["RANK"]): each for each in found if "worker" in each.cmdline()}


def after_checkpoint(step: int) -> Callable[[dict[str, Any]], bool]:
    """The first step from `step` on that has a stored checkpoint behind it."""
    stored = False

    def wanted(event: dict[str, Any]) -> bool:
        nonlocal stored
        stored = stored or (event["kind"] == "checkpoint" and event["phase"] == "committed")
        return stored and event["kind"] == "step" and event["step"] >= step

    return wanted


def assert_as_if_never_stopped(small_runs: SmallRuns, run: Path, layout: str, checkpoints: Path | None = None) -> None:
    """Every step, and the state at the end, bitwise those of a straight run."""
    got = read_steps(LocalStore(run), "")
    straight = small_runs.new_folder()
    expected = small_runs.train(straight, "dense", layout, f"train.steps={len(got)}")
    assert figures(got) == figures(expected)
    there, here = state(straight, len(got)), state(checkpoints or run, len(got))
    assert there.keys() == here.keys()
    assert [name for name in there if not there[name].equal(here[name])] == []


def test_a_run_asked_to_stop_stores_its_state_and_the_same_command_goes_on(
    small_runs: SmallRuns, tmp_path: Path
) -> None:
    with training(tmp_path, ENDLESS, "--layout", LAYOUT) as first:
        first.wait_for(lambda event: event["kind"] == "step" and event["step"] >= 2)
        first.process.send_signal(signal.SIGTERM)
        code, said = first.end()
    assert code == 128 + signal.SIGTERM, said
    assert "SIGTERM: attempt 1, in step " in said
    (asked,) = events(first.run, "signal")
    assert asked["name"] == "SIGTERM"
    (end,) = events(first.run, "end")
    assert (end["reason"], end["exit_code"]) == ("signal", 143)
    assert [each["step"] for each in events(first.run, "checkpoint") if each["phase"] == "committed"] == [asked["step"]]
    with training(tmp_path, f"train.steps={asked['step'] + 3}", "--layout", LAYOUT) as second:
        code, said = second.end()
    assert code == 0, said
    assert [each["step"] for each in events(first.run, "resume")] == [asked["step"]]
    assert_as_if_never_stopped(small_runs, first.run, LAYOUT)


@pytest.mark.parametrize(
    ("layout", "rank", "number"),
    [
        ("pp=2,micro_batch=2", 1, signal.SIGUSR1),
        pytest.param("tp=2,micro_batch=4", 1, signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(ALONE, 0, signal.SIGUSR1, marks=pytest.mark.full),
    ],
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    small_runs: SmallRuns, rank_pool: RankPool, layout: str, rank: int, number: signal.Signals
) -> None:
    folder, ranks = small_runs.new_folder(), world_size(layout)
    codes = rank_pool.run(train_until_asked, folder, "dense", layout, (ENDLESS,), rank, number, ranks=ranks)
    assert codes == [128 + number] * ranks
    (asked,) = events(folder, "signal")
    assert asked["name"] == number.name
    small_runs.train(folder, "dense", layout, f"train.steps={asked['step'] + 2}", "checkpoint.resume=must")
    assert_as_if_never_stopped(small_runs, folder, layout)


def test_ctrl_c_says_at_once_that_it_saves_and_a_second_one_that_it_does_not(tmp_path: Path) -> None:
    with training(tmp_path, ENDLESS, "--layout", ALONE) as run:
        run.wait_for(lambda event: event["kind"] == "step" and event["step"] >= 2)
        (rank,) = ranks_below(run.process.pid).values()
        rank.suspend()  # or it would have saved before a person can press a key twice
        os.killpg(run.process.pid, signal.SIGINT)
        said = run.wait_for_line("Ctrl-C: attempt 1, in step ")
        assert (
            "stops within a step or two and saves a checkpoint; a second Ctrl-C stops it at once, without saving"
            in said
        )
        os.killpg(run.process.pid, signal.SIGINT)
        code, said = run.end()
    assert code == 128 + signal.SIGINT, said
    assert "Ctrl-C again: attempt 1 is stopped at once and does not save; there is no checkpoint" in said
    assert "flight record" not in said
    (end,) = events(run.run, "end")
    assert (end["reason"], end["exit_code"]) == ("signal", 130)


def test_a_run_whose_folder_is_gone_says_so_and_ends(tmp_path: Path) -> None:
    with training(tmp_path, ENDLESS, "--layout", ALONE) as run:
        run.wait_for(lambda event: event["kind"] == "step" and event["step"] >= 2)
        run.run.rename(tmp_path / "elsewhere")
        code, said = run.end()
    assert code == 1, said
    assert "the folder of this run was removed or renamed while it trained" in said
    assert "store/runs/proof/it" in said


def test_a_rank_that_is_killed_is_named_and_nobody_is_left_behind(small_runs: SmallRuns, tmp_path: Path) -> None:
    often = "checkpoint.every=3"
    with training(tmp_path, ENDLESS, often, "--layout", LAYOUT) as first:
        first.wait_for(after_checkpoint(4))
        ranks = ranks_below(first.process.pid)
        ranks[1].kill()
        code, said = first.end()
    assert code == 1, said
    assert "rank 1 was killed by SIGKILL" in said
    assert "the same command goes on from the last checkpoint" in said
    assert not any(rank.is_running() for rank in ranks.values())
    (failure,) = events(first.run, "failure")
    assert failure["ranks"] == [1]
    done = len(read_steps(LocalStore(first.run), ""))
    small_runs.train(first.run, "dense", LAYOUT, f"train.steps={done + 2}", often, "checkpoint.resume=must")
    assert_as_if_never_stopped(small_runs, first.run, LAYOUT)


@pytest.mark.parametrize(
    ("layout", "collective"),
    [
        (LAYOUT, "(ranks 0-1; "),
        # Waits that gloo neither records nor ends: the watchdog does.
        pytest.param("pp=2,micro_batch=2", "point-to-point", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_is_stuck_is_named_with_the_collective_the_others_wait_in(
    tmp_path: Path, layout: str, collective: str
) -> None:
    budget = "budgets={step: 10s}"
    run = prepare_run(parse_recipe(recipe_text("dense"), [ENDLESS, budget, f"store={tmp_path}"]), id="it")
    stopped: list[psutil.Process] = []

    def stop_a_rank(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] >= 2 and not stopped:
            stopped.append(ranks_below(os.getpid())[1])
            stopped[0].suspend()

    with pytest.raises(TrainshedError) as error:
        train_locally(
            run.folder,
            run_layout(run, keys=parse_layout(layout)),
            precision="fp64",
            on_event=stop_a_rank,
            environment=NO_GPU,
            failure_grace_seconds=1.0,
        )
    assert error.value.exit_code == 1
    assert not stopped[0].is_running()
    (failure,) = events(run.folder, "failure")
    assert failure["ranks"] == [1]
    assert failure["what"].startswith("rank 1 was stopped (SIGSTOP) and never went on; ")
    assert collective in failure["collective"]
    assert f"rank 0 waited in {failure['collective']}" in error.value.what
    assert error.value.hint is not None
    assert "where it was only slow, write `budgets: {step: 20s}`" in error.value.hint


def test_a_full_disk_ends_a_run_with_the_file_and_the_rank_that_could_not_be_written(
    tmp_path: Path, tiny_disk: Path
) -> None:
    (tiny_disk / "other").write_bytes(bytes(1000 * 1024))
    saved = (f"checkpoint.to={tiny_disk}", "checkpoint.every=2", "budgets={checkpoint: 2m}")
    with training(tmp_path, "train.steps=50", *saved, "--layout", "dp=2,shard=full,micro_batch=2") as run:
        code, said = run.end()
    assert code == 1, said
    assert "the disk is full" in said
    assert "step-00000002/__" in said
    assert f"{tiny_disk}" in said
    failed = [event for event in events(run.run, "checkpoint") if event["phase"] == "failed"]
    assert [event["step"] for event in failed] == [2]


def test_loading_has_its_own_budget_and_others_wait_for_a_rank_that_is_slow_at_it(
    small_runs: SmallRuns, rank_pool: RankPool
) -> None:
    folder = small_runs.new_folder()
    late_seconds = 4.5  # more than a rank may wait within any step, the first one included
    run = (folder, "dense", LAYOUT, ("train.steps=2", "budgets={first_step: 4, step: 8}"))
    assert rank_pool.run(train_loading_slowly, *run, late_seconds, ranks=2) == [0, 0]


@pytest.mark.parametrize(
    ("killed_before", "goes_on_from"),
    [
        (("put", "step-00000008/manifest.json"), 4),
        pytest.param(("put", "step-00000008/.metadata"), 4, marks=pytest.mark.full),
        pytest.param(("write", "step-00000008/__0_1.distcp"), 4, marks=pytest.mark.full),
        pytest.param(("delete", "step-00000004/manifest.json"), 8, marks=pytest.mark.full),
    ],
)
def test_killed_while_it_saves_a_run_goes_on_from_a_whole_checkpoint(
    small_runs: SmallRuns, rank_pool: RankPool, killed_before: tuple[str, str], goes_on_from: int
) -> None:
    folder, layout = small_runs.new_folder(), "dp=2,shard=full,micro_batch=2"
    run = (folder, "dense", layout, ("train.steps=12", "checkpoint.every=4", "checkpoint.keep=1"))
    ends = rank_pool.ends(train_keeping_apart, *run, killed_before, ranks=2)
    assert ends[0].signal == "SIGKILL"
    assert ends[1].error is not None
    assert rank_pool.run(train_keeping_apart, *run, None, ranks=2) == [0, 0]
    assert [event["step"] for event in events(folder, "resume")] == [goes_on_from]
    assert_as_if_never_stopped(small_runs, folder, layout, folder / "apart")


def test_torchrun_starts_the_same_ranks(small_runs: SmallRuns, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    layout = "tp=2,micro_batch=4"
    with training(tmp_path, "train.steps=4", "--layout", layout, launcher=launcher) as under_torchrun:
        code, said = under_torchrun.end()
    assert code == 0, said
    (start,) = events(under_torchrun.run, "start")
    assert (start["layout"], start["world_size"]) == ("tp2", 2)
    assert_as_if_never_stopped(small_runs, under_torchrun.run, layout)
