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

STEPS = "train.steps=14"


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,shard=full,micro_batch=2",
        pytest.param("dp=2,shard=none,micro_batch=2", marks=pytest.mark.full),
        pytest.param("tp=2,micro_batch=4", marks=pytest.mark.full),
    ],
)
def test_a_slow_rank_is_named_and_changes_no_loss(small_runs: SmallRuns, rank_pool: RankPool, layout: str) -> None:
    folder = small_runs.new_folder()
    assert rank_pool.run(train_with_a_slow_rank, folder, "dense", layout, [STEPS], 0.4, ranks=2) == [0, 0]
    windows = events(folder, "ranks")
    assert len(windows) >= 2
    fast, slow = (sum(window["compute_seconds"][rank] for window in windows) for rank in (0, 1))
    assert slow > fast, "its own time holds the delay"
    waiting, late = (sum(window["wait_seconds"][rank] for window in windows) for rank in (0, 1))
    assert waiting > late, "the other one waits for it"
    named = [alarm for alarm in events(folder, "alarm") if alarm["ranks"] == [1]]
    assert named[0]["name"] == "straggler"
    assert named[0]["hosts"] == [socket.gethostname()]
    assert f"rank 1 ({socket.gethostname()}) computes " in named[0]["what"]
    usual = small_runs.new_folder()
    small_runs.train(usual, "dense", layout, STEPS)
    assert figures(events(folder, "step")) == figures(events(usual, "step"))
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
