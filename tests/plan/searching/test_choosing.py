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


def layout_that_takes(seconds: float, *, tp: int, risk: float = 0.0, likely: float = 0.0) -> Prediction:
    found = predict(JOB, resolve_layout(Layout(tp=tp), CONFIG, world_size=64))
    return replace(found, step_seconds=seconds, risk_seconds=risk, stall_likelihood=likely)


def test_the_fastest_is_taken_and_of_near_ties_the_simplest() -> None:
    simple, wide = layout_that_takes(1.009, tp=2), layout_that_takes(1.0, tp=4)
    assert in_order_of_choice([wide, simple]) == [simple, wide]
    slower = replace(simple, step_seconds=1.011)
    assert in_order_of_choice([slower, wide]) == [wide, slower]


def test_what_may_stall_comes_after_what_takes_a_little_longer_for_sure() -> None:
    risky, sure = layout_that_takes(1.0, risk=0.5, tp=2), layout_that_takes(1.2, tp=4)
    assert in_order_of_choice([risky, sure]) == [sure, risky]


def test_beside_a_layout_that_may_stall_stand_layouts_that_do_not_share_its_luck() -> None:
    risky = [layout_that_takes(1 + tp / 100, tp=tp, likely=0.75) for tp in (1, 2)]
    safe = [layout_that_takes(2 + tp / 100, tp=tp, likely=0.25) for tp in (4, 8)]
    assert in_order_of_choice([*risky, *safe]) == [risky[0], *safe, risky[1]]
    calm = [replace(each, stall_likelihood=0.0) for each in risky]
    assert in_order_of_choice([*calm, *safe]) == [*calm, *safe]


def test_what_is_fastest_if_nothing_stalls_is_tried_second() -> None:
    sure, also_sure = layout_that_takes(1.2, tp=1), layout_that_takes(1.3, tp=2)
    risky = layout_that_takes(1.0, tp=4, risk=0.5, likely=0.5)
    assert in_order_of_choice([risky, also_sure, sure]) == [sure, risky, also_sure]
