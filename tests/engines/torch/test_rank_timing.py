"""Real gloo ranks, one of them slow: its figures, its name, and a run that does not depend on any of it."""

from __future__ import annotations

import socket

import pytest
import torch
from torch.distributed import Work

from support.runs.rank_pool import RankPool
from support.runs.small_ranks import train_with_a_slow_rank
from support.runs.small_runs import SmallRuns, events, figures
from trainshed.engines.torch.rank_timing import RankTimer, measured_waits

STEPS = "train.steps=20"


@pytest.mark.parametrize("layout", ["dp=2,micro_batch=2", "dp=2,shard=full,micro_batch=2", "tp=2,micro_batch=4"])
def test_a_slow_rank_is_named_and_changes_no_loss(small_runs: SmallRuns, rank_pool: RankPool, layout: str) -> None:
    folder = small_runs.new_folder()
    assert rank_pool.run(train_with_a_slow_rank, folder, "dense", layout, [STEPS], 0.1, ranks=2) == [0, 0]
    windows = events(folder, "ranks")
    assert len(windows) >= 3
    for window in windows:
        fast, slow = window["compute_seconds"]
        assert slow > fast + 0.05, "its own time holds the delay"
        assert window["wait_seconds"][0] > window["wait_seconds"][1] + 0.05, "the other one waits for it"
        assert window["steps"] >= 4
    (alarm,) = events(folder, "alarm")
    assert (alarm["name"], alarm["ranks"], alarm["hosts"]) == ("straggler", [1], [socket.gethostname()])
    assert f"rank 1 ({socket.gethostname()}) computes " in alarm["what"]
    usual = small_runs.new_folder()
    small_runs.train(usual, "dense", layout, STEPS)
    assert figures(folder) == figures(usual)
    assert events(usual, "ranks") == [], "this run is shorter than a window"


def test_a_single_rank_measures_nothing() -> None:
    timer = RankTimer(torch.device("cpu"), 0, 1)
    assert timer.votes() == {}
    with timer.step(0):
        pass
    assert timer.finished(0, 1.0, window_is_over=False) is None


def test_what_was_replaced_to_measure_is_put_back() -> None:
    before = vars(Work)["wait"]
    with measured_waits(torch.device("cpu")):
        assert vars(Work)["wait"] is not before
    assert vars(Work)["wait"] is before
