"""Megatron-core's own schedules, given our arguments, do step by step what the recipe means."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.recipes.megatron_tasks import megatron_task
from trainshed.data.sampling.schedule import BatchRampUp, BatchSchedule
from trainshed.engines.megatron import megatron_launch
from trainshed.engines.megatron.arguments import ParsedArguments, parse_arguments
from trainshed.engines.torch.learning_rate import learning_rate
from trainshed.errors import InputError

with warnings.catch_warnings(action="ignore"):
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class Sgd:
    """As much of an optimiser as the scheduler looks at."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{}]


def megatron_rates(parsed: ParsedArguments, steps: int) -> list[float]:
    """The rate of every step, as `get_optimizer_param_scheduler` and the training loop of Megatron-LM make them."""
    batch = parsed["global_batch_size"]
    scheduler = OptimizerParamScheduler(
        Sgd(),
        init_lr=parsed["lr_warmup_init"],
        max_lr=parsed["lr"],
        min_lr=parsed["min_lr"],
        lr_warmup_steps=parsed["lr_warmup_iters"] * batch,
        lr_decay_steps=parsed["lr_decay_iters"] * batch,
        lr_decay_style=parsed["lr_decay_style"],
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=None if parsed["lr_wsd_decay_iters"] is None else parsed["lr_wsd_decay_iters"] * batch,
        lr_wsd_decay_style=parsed["lr_wsd_decay_style"],
    )
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_lr({}))
        scheduler.num_steps += batch
    return rates


@settings(max_examples=60)
@given(
    name=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    warmup=st.integers(0, 20),
    decay=st.none() | st.integers(21, 90),
    steps=st.integers(25, 60),
    floor=st.sampled_from([0.0, 1e-5]),
)
def test_every_step_has_the_rate_that_our_own_engine_would_give_it(
    name: str, warmup: int, decay: int | None, steps: int, floor: float
) -> None:
    schedule: dict[str, Any] = {"name": name, "warmup": warmup}
    if name != "constant":
        schedule |= {"min_lr": floor}
        if decay is not None or name == "wsd":
            schedule["decay"] = decay or 10
    task = megatron_task("llama3-8b", f"train.steps={steps}", f"train.schedule={schedule}".replace("'", ""))
    theirs = megatron_rates(parse_arguments(megatron_launch(task).arguments, "launch"), steps)
    train = task.recipe.train
    ours = [learning_rate(step, steps, train.optimizer.lr, train.schedule) for step in range(steps)]
    assert theirs == pytest.approx(ours, rel=1e-9, abs=1e-15)


RAMP = {"start": 32, "increment": 16, "samples": 3000}


def test_a_ramp_of_0_16_takes_the_batches_that_the_recipe_means() -> None:
    task = megatron_task("llama3-8b", f"train.batch_ramp={RAMP}".replace("'", ""), "engine.version=0.16.1")
    parsed = parse_arguments(megatron_launch(task).arguments, "launch")
    assert parsed["train_iters"] is None
    start, increment, samples = parsed["rampup_batch_size"]
    schedule = BatchSchedule(512, BatchRampUp(**RAMP))
    with warnings.catch_warnings(action="ignore"):
        theirs = RampupBatchsizeNumMicroBatchesCalculator(512, 1, 1, False, 0, start, increment, samples)
    consumed = 0
    for step in range(100):
        theirs.update(consumed, consistency_check=False)
        assert theirs.get_current_global_batch_size() == schedule.batch_size(step)
        consumed += schedule.batch_size(step)
    assert parsed["train_samples"] == consumed


def test_later_versions_ignore_a_ramp_and_are_told_its_steps() -> None:
    task = megatron_task("llama3-8b", f"train.batch_ramp={RAMP}".replace("'", ""), "engine.version=head")
    parsed = parse_arguments(megatron_launch(task).arguments, "launch")
    assert parsed["rampup_batch_size"] is None
    assert parsed["global_batch_size"] is None, "Megatron refuses both"
    steps = [tuple(map(int, each.split(":"))) for each in parsed["step_batch_size_schedule"].split()]
    schedule = BatchSchedule(512, BatchRampUp(**RAMP))
    for step in range(100):
        tokens = schedule.consumed(step) * parsed["seq_length"]
        assert max(size for threshold, size in steps if threshold <= tokens) == schedule.batch_size(step)


def test_a_ramp_longer_than_the_run_is_refused() -> None:
    task = megatron_task("llama3-8b", "train.batch_ramp={start: 32, increment: 16, samples: 100000}")
    with pytest.raises(InputError, match="ramp that does not end"):
        megatron_launch(task)
