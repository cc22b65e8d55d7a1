"""Which of several predicted layouts is taken."""

from __future__ import annotations

from dataclasses import replace

from trainshed.catalog.models import model_preset
from trainshed.plan import resolve_layout
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import engine_constants
from trainshed.plan.performance.prediction import LayoutPrediction, predict
from trainshed.plan.search.search import rank_predictions
from trainshed.plan.training_shape import TrainingShape, hardware_of_gpu
from trainshed.recipe import Layout

CONFIG = model_preset("llama3-8b")
JOB = TrainingShape(model_shape(CONFIG), 8192, 128, "bf16", hardware_of_gpu("h100"), 64, engine_constants("megatron"))


def layout_that_takes(seconds: float, *, tp: int, risk: float = 0.0, likely: float = 0.0) -> LayoutPrediction:
    found = predict(JOB, resolve_layout(Layout(tp=tp), CONFIG, world_size=64))
    return replace(found, step_seconds=seconds, risk_seconds=risk, stall_likelihood=likely, stall_seconds=9.0)


def filled(found: LayoutPrediction, share: float) -> LayoutPrediction:
    """Return it with a card that is this full."""
    (stage,) = found.stages
    memory = stage.memory
    more = share * memory.capacity - memory.total
    return replace(found, stages=(replace(stage, memory=replace(memory, activations=memory.activations + more)),))


def test_the_fastest_is_taken_and_of_near_ties_the_simplest() -> None:
    simple, wide = (filled(layout_that_takes(seconds, tp=tp), 0.5) for seconds, tp in ((1.009, 2), (1.0, 4)))
    assert rank_predictions([wide, simple]) == [simple, wide]
    slower = replace(simple, step_seconds=1.011)
    assert rank_predictions([slower, wide]) == [wide, slower]


def test_of_near_ties_one_that_leaves_room_on_the_card_is_taken_before_a_simpler_one() -> None:
    simple, wide = layout_that_takes(1.0, tp=2), layout_that_takes(1.009, tp=4)
    assert rank_predictions([filled(simple, 0.9), filled(wide, 0.8)])[0].layout == wide.layout
    assert rank_predictions([filled(simple, 0.55), filled(wide, 0.2)])[0].layout == simple.layout


def test_what_may_stall_comes_after_what_takes_a_little_longer_for_sure() -> None:
    risky, sure = layout_that_takes(1.0, risk=0.5, tp=2), layout_that_takes(1.2, tp=4)
    assert rank_predictions([risky, sure]) == [sure, risky]


def test_beside_a_layout_that_may_stall_stands_what_does_best_with_it() -> None:
    risky = [layout_that_takes(1 + tp / 10, tp=tp, likely=0.75) for tp in (1, 2)]
    safe = [layout_that_takes(2 + tp / 10, tp=tp, likely=0.25) for tp in (4, 8)]
    # One that rarely stalls covers most; then another draw at the fast ones is worth more than a second safe one.
    assert rank_predictions([*risky, *safe]) == [risky[0], safe[0], risky[1], safe[1]]
    rarer = [replace(each, stall_likelihood=0.99) for each in risky]
    assert rank_predictions([*rarer, *safe]) == [rarer[0], *safe, rarer[1]]
    calm = [replace(each, stall_likelihood=0.0) for each in risky]
    assert rank_predictions([*calm, *safe]) == [*calm, *safe]


def test_what_is_fastest_if_nothing_stalls_is_tried_second() -> None:
    sure, also_sure = layout_that_takes(1.2, tp=1), layout_that_takes(1.3, tp=2)
    risky = layout_that_takes(1.0, tp=4, risk=0.5, likely=0.5)
    assert rank_predictions([risky, also_sure, sure]) == [sure, risky, also_sure]
