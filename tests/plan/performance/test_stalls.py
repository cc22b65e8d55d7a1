"""Where runs are held up, and what is allocated ahead where they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainshed.catalog.models import model_preset
from trainshed.plan import resolve_layout
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import engine_constants
from trainshed.plan.performance.memory import backward_share
from trainshed.plan.performance.prediction import LayoutPrediction, predict
from trainshed.plan.performance.stalls import pending_gathered_bytes
from trainshed.plan.training_shape import TrainingShape, hardware_of_gpu
from trainshed.recipe import Layout

CONFIG = model_preset("llama3-8b").model_copy(update={"kv_heads": 32})
NANOTRON = engine_constants("nanotron")


def training_on(gpus: int, **constants: float) -> TrainingShape:
    engine = replace(NANOTRON, **dict[str, Any](constants))
    return TrainingShape(model_shape(CONFIG), 4096, 1024, "bf16", hardware_of_gpu("h100"), gpus, engine)


def predicted(training: TrainingShape, **keys: object) -> LayoutPrediction:
    return predict(training, resolve_layout(Layout.model_validate(keys), CONFIG, world_size=training.gpus))


def test_on_64_nodes_every_transfer_of_a_pipeline_stalls_and_a_middle_stage_has_twice_as_many() -> None:
    for pp, transfers in ((2, 2), (4, 4)):
        keys = {"tp": 2, "pp": pp}
        held_up, free = predicted(training_on(512), **keys), predicted(training_on(512, stall_ms=0.0), **keys)
        micro_batches = held_up.layout.micro_batches(1024)
        lost = held_up.step_seconds - free.step_seconds
        assert lost >= micro_batches * transfers * NANOTRON.stall_ms * 1e-3
        assert held_up.risk_seconds == free.risk_seconds  # it is known, so it is not a risk


def test_on_32_nodes_a_stall_is_a_risk_that_is_not_in_the_step() -> None:
    risky, free = predicted(training_on(256), tp=2, pp=2), predicted(training_on(256, stall_ms=0.0), tp=2, pp=2)
    assert risky.step_seconds == free.step_seconds
    assert risky.ranking_seconds == pytest.approx(risky.step_seconds + risky.risk_seconds)
    assert risky.risk_seconds > free.risk_seconds
    assert (
        predicted(training_on(256), tp=2).risk_seconds == predicted(training_on(256, stall_ms=0.0), tp=2).risk_seconds
    )
    assert predicted(training_on(128), tp=2, pp=2).risk_seconds == free.risk_seconds


def test_on_64_nodes_tensor_parallel_may_stall_without_a_pipeline_and_least_where_its_groups_are_far() -> None:
    within, whole, far = (predicted(training_on(512), tp=tp) for tp in (4, 8, 32))
    assert whole.stall_likelihood > within.stall_likelihood > far.stall_likelihood > 0
    free = predicted(training_on(512, stall_ms=0.0), tp=8)
    assert whole.step_seconds == free.step_seconds
    assert whole.risk_seconds > free.risk_seconds
    assert predicted(training_on(512), tp=1).stall_likelihood == predicted(training_on(256), tp=8).stall_likelihood == 0


def test_what_is_pending_grows_with_tokens_and_width_but_not_with_depth() -> None:
    training = training_on(64)
    layout = resolve_layout(Layout(tp=8), CONFIG, world_size=64)
    pending = pending_gathered_bytes(training, layout, 0)
    assert pending == pytest.approx(NANOTRON.pending_bytes * 4096 * CONFIG.hidden)
    deeper = replace(training, model=replace(training.model, layers=2 * training.model.layers))
    assert pending_gathered_bytes(deeper, layout, 0) == pending
    assert pending_gathered_bytes(training, replace(layout, micro_batch=2), 0) == pytest.approx(2 * pending)


def test_nothing_is_pending_without_tensor_parallel_nor_where_a_run_is_held_up() -> None:
    alone = resolve_layout(Layout(), CONFIG, world_size=64)
    assert pending_gathered_bytes(training_on(64), alone, 0) == 0
    shared = resolve_layout(Layout(tp=8, pp=4), CONFIG, world_size=512)
    assert pending_gathered_bytes(training_on(512), shared, 0) == 0


def test_the_last_stage_waits_for_its_first_backward_and_is_never_ahead() -> None:
    training, layout = training_on(64), resolve_layout(Layout(tp=2, pp=4), CONFIG, world_size=64)
    assert pending_gathered_bytes(training, layout, 0) > 0
    assert pending_gathered_bytes(training, layout, 3) == 0


def test_what_is_only_pending_is_a_risk_and_never_the_reason_why_a_layout_does_not_fit() -> None:
    keys = {"tp": 8, "micro_batch": 14}
    without, found = predicted(training_on(64, pending_bytes=0.0), **keys), predicted(training_on(64), **keys)
    training = training_on(64)
    assert (
        backward_share(training, found.layout, 0, pending=True)
        > 1
        > backward_share(training, found.layout, 0, pending=False)
    )
    assert without.fits
    assert found.fits
    assert found.memory.total > without.memory.total
    assert found.step_seconds == without.step_seconds
    assert found.risk_seconds > 0
