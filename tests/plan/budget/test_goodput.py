"""The interval between saves is Young's and Daly's, and failures cost what they cost Meta."""

from __future__ import annotations

import random
from math import sqrt

import pytest

from trainshed.plan.budget.checkpoint_cost import (
    CheckpointCost,
    best_interval_seconds,
    checkpoint_warning,
    expected_goodput,
    goodput,
    node_mtbf_hours,
)

HOUR = 3600.0


def cost(stage: float = 5.0, write: float | None = 60.0) -> CheckpointCost:
    return CheckpointCost(10**12, 64, 8, 100.0, stage, write, write, 10.0, "somewhere")


@pytest.mark.parametrize(("save", "mtbf"), [(1.0, 24 * HOUR), (10.0, 3 * HOUR), (60.0, 100 * HOUR)])
def test_the_interval_is_youngs_with_dalys_correction(save: float, mtbf: float) -> None:
    young = sqrt(2 * save * mtbf)
    assert best_interval_seconds(save, mtbf) == pytest.approx(young, rel=0.05)
    ratio = save / (2 * mtbf)
    assert best_interval_seconds(save, mtbf) == pytest.approx(young * (1 + sqrt(ratio) / 3 + ratio / 9) - save)


def test_where_saving_takes_longer_than_running_the_interval_is_the_mtbf() -> None:
    assert best_interval_seconds(200.0, 100.0) == 100.0


@pytest.mark.parametrize(("save", "mtbf"), [(10.0, 3 * HOUR), (120.0, 2 * HOUR)])
def test_no_other_interval_gives_more_goodput(save: float, mtbf: float) -> None:
    best = best_interval_seconds(save, mtbf)
    shares = [expected_goodput(best * factor, save, 300.0, mtbf) for factor in (0.5, 0.8, 1.0, 1.25, 2.0)]
    assert max(shares) == shares[2]


def test_the_expectation_is_what_happens_to_a_thousand_simulated_intervals() -> None:
    interval, save, restart, mtbf = 1800.0, 60.0, 300.0, 3 * HOUR
    dice = random.Random(1)
    wall = 0.0
    for _ in range(4000):
        waiting = 0.0  # the first try needs no restart
        while (until := dice.expovariate(1 / mtbf)) < waiting + interval + save:
            wall += until
            waiting = restart
        wall += waiting + interval + save
    # Daly counts a failure during a restart as one more; at these lengths that is below the noise.
    assert 4000 * interval / wall == pytest.approx(expected_goodput(interval, save, restart, mtbf), rel=0.04)


def test_failures_are_metas_by_the_gpus_of_a_node() -> None:
    hours, source = node_mtbf_hours(8)
    assert hours == pytest.approx(6334, abs=1)
    assert node_mtbf_hours(4)[0] == 2 * hours
    assert "Llama 3" in source
    assert node_mtbf_hours(8, 100.0) == (100.0, "as given")


def test_llama_3s_own_run_comes_out_above_the_90_percent_that_meta_states() -> None:
    found = goodput(cost(), step_seconds=8.0, nodes=2048, mtbf_hours=node_mtbf_hours(8)[0], interval_steps=100)
    assert found.mtbf_hours == pytest.approx(3.09, abs=0.01)
    assert found.goodput is not None
    assert 0.90 < found.goodput < found.best_goodput < 0.97


def test_an_async_save_is_never_started_before_the_last_is_written() -> None:
    found = goodput(cost(stage=0.01, write=600.0), step_seconds=7.0, nodes=64, mtbf_hours=1000.0, interval_steps=500)
    assert found.best_interval_steps == 172  # twice the write: what is advised is not what is then warned about
    assert checkpoint_warning(cost(stage=0.01, write=600.0), 172 * 7.0) is None
    assert checkpoint_warning(cost(stage=0.01, write=600.0), 171 * 7.0) is not None
    waiting = goodput(cost(stage=0.01, write=600.0), step_seconds=7.0, nodes=64, mtbf_hours=1000.0, interval_steps=10)
    assert waiting.stall_seconds == pytest.approx(530.01)
    assert waiting.goodput is not None
    assert waiting.goodput < 0.15


def test_saving_beside_training_loses_less_than_standing_still() -> None:
    asked = {"step_seconds": 8.0, "nodes": 128, "mtbf_hours": 6000.0, "interval_steps": 100}
    beside, still = goodput(cost(), **asked), goodput(cost(), **asked, asynchronous=False)
    assert beside.goodput is not None
    assert still.goodput is not None
    assert beside.goodput > still.goodput
    assert beside.best_interval_steps < still.best_interval_steps


def test_without_a_save_on_the_way_no_goodput_is_promised() -> None:
    found = goodput(cost(), step_seconds=8.0, nodes=128, mtbf_hours=6000.0, interval_steps=None)
    assert found.goodput is None
    assert found.best_goodput > 0.9


def test_a_job_that_never_gets_through_has_none() -> None:
    assert expected_goodput(1e6, 1.0, 1.0, 100.0) == 0.0
