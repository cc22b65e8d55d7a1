"""What the planner promises of its accuracy, on the measurements that come with it.

Most of these rows were fitted to: the promise for rows it never saw is `benchmarks/fit_planner.py --held-out`. This
holds the constants and the model together, so that a change to either that makes predictions worse is seen.
"""

from __future__ import annotations

import pytest

from trainshed.plan.published.rows import read_tables, shipped_tables
from trainshed.plan.published.validation import PlannerValidation, ValidationScores, validate_rows

BOUNDS = {
    "HF ultra-scale playbook": 0.12,
    "VIA-Research/vTrain": 0.10,
    "mosaicml/llm-foundry": 0.10,
    "bigscience-workshop": 0.10,
    "NVIDIA/dgxc-benchmarking": 0.08,
    "NVIDIA/NeMo": 0.08,
}
"""Source → mean error of step times above 10% MFU."""


@pytest.fixture(scope="module")
def found() -> PlannerValidation:
    return validate_rows(read_tables(shipped_tables()))


@pytest.mark.parametrize(("source", "bound"), BOUNDS.items())
def test_step_times_of_each_source(found: PlannerValidation, source: str, bound: float) -> None:
    scores = _of(found, source)
    assert scores.above_10_percent_mfu.mape is not None
    assert scores.above_10_percent_mfu.mape <= bound


def test_tuned_megatron_recipes_dense_and_with_experts(found: PlannerValidation) -> None:
    scores = found.scores_by(lambda row: "megatron" if row.text("engine") == "megatron" else "other")["megatron"]
    assert scores.step_time.mape is not None
    assert scores.step_time.mape <= 0.08


def test_memory_that_is_stated_as_allocated(found: PlannerValidation) -> None:
    memory = _of(found, "MooreThreads/SimuMax").memory
    assert memory.mape is not None
    assert memory.mape <= 0.05


def test_memory_of_the_sweep(found: PlannerValidation) -> None:
    memory = _of(found, "HF ultra-scale playbook").memory
    assert memory.mape is not None
    assert memory.mape <= 0.08


def test_what_a_wrong_choice_costs(found: PlannerValidation) -> None:
    regret = found.scores().regret
    assert (regret.top1_mean or 1) <= 0.06
    # Without the one group on 64 nodes in which nearly every run stalled it is 0.1%.
    assert (regret.top3_mean or 1) <= 0.03


def test_what_runs_out_of_memory_is_told_from_what_fits(found: PlannerValidation) -> None:
    assert (found.scores().out_of_memory.balanced_accuracy or 0) >= 0.93


def test_skill_over_a_constant_rate(found: PlannerValidation) -> None:
    scores = found.scores().above_10_percent_mfu
    assert scores.mape is not None
    assert scores.null_mape is not None
    assert scores.mape < scores.null_mape / 2


def _of(found: PlannerValidation, source: str) -> ValidationScores:
    return found.scores_by(lambda row: source if row.source.startswith(source) else "other")[source]
