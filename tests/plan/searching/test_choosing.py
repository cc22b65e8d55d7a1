"""Which of several predicted layouts is taken."""

from __future__ import annotations

from dataclasses import replace

from trainshed.catalog.models import model_preset
from trainshed.plan import resolve_layout
from trainshed.plan.performance.anatomy import anatomy_of
from trainshed.plan.performance.hardware import hardware_of_gpu
from trainshed.plan.performance.predict import predict
from trainshed.plan.performance.prediction import Job, Prediction
from trainshed.plan.performance.stacks import stack
from trainshed.plan.searching.choosing import in_order_of_choice
from trainshed.recipe import Layout

CONFIG = model_preset("llama3-8b")
JOB = Job(anatomy_of(CONFIG), 8192, 128, "bf16", hardware_of_gpu("h100"), 64, stack("megatron"))


def layout_that_takes(seconds: float, *, tp: int, risk: float = 0.0) -> Prediction:
    found = predict(JOB, resolve_layout(Layout(tp=tp), CONFIG, world_size=64))
    return replace(found, step_seconds=seconds, risk_seconds=risk)


def test_the_fastest_is_taken_and_of_near_ties_the_simplest() -> None:
    simple, wide = layout_that_takes(1.009, tp=2), layout_that_takes(1.0, tp=4)
    assert in_order_of_choice([wide, simple]) == [simple, wide]
    slower = replace(simple, step_seconds=1.011)
    assert in_order_of_choice([slower, wide]) == [wide, slower]


def test_what_may_stall_comes_after_what_takes_a_little_longer_for_sure() -> None:
    risky, sure = layout_that_takes(1.0, risk=0.5, tp=2), layout_that_takes(1.2, tp=4)
    assert in_order_of_choice([risky, sure]) == [sure, risky]
