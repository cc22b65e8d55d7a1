"""The scaling curve: the best layout at each number of GPUs, and where adding more stops paying."""

from __future__ import annotations

import pytest

from trainshed.catalog import model_preset
from trainshed.errors import InputError
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import engine_constants
from trainshed.plan.search.scaling import BREAKS_BELOW, doubling_counts, scaling_curve
from trainshed.plan.training_shape import TrainingShape, hardware_of_gpu


@pytest.fixture(scope="module")
def training() -> TrainingShape:
    model = model_shape(model_preset("llama3-8b"), "llama3-8b")
    return TrainingShape(model, 8192, 64, "bf16", hardware_of_gpu("h100"), 8, engine_constants("megatron"))


def test_efficiency_is_measured_against_the_smallest_that_fits_and_breaks_for_a_reason(training: TrainingShape) -> None:
    curve = scaling_curve(training, [1, 8, 64, 512, 2048], engine="megatron")
    one, first, *_ = curve.points
    assert one.prediction is None
    assert (one.reason or "").startswith("llama3-8b does not fit on 1 h100-sxm")
    assert first.efficiency == 1.0
    assert first.prediction is not None
    assert first.tokens_per_second == pytest.approx(8 * first.prediction.tokens_per_second_per_gpu)
    below = [point.gpus for point in curve.points if point.efficiency is not None and point.efficiency < BREAKS_BELOW]
    assert curve.breaks_at == below[0]
    assert curve.reason is not None
    assert "% of a step on 8 GPUs and takes " in curve.reason


def test_a_curve_that_holds_has_no_break(training: TrainingShape) -> None:
    curve = scaling_curve(training, [8, 16], engine="megatron")
    assert (curve.breaks_at, curve.reason) == (None, None)


def test_counts_double_and_end_where_they_are_told() -> None:
    assert doubling_counts(8, 64) == [8, 16, 32, 64]
    assert doubling_counts(8, 48) == [8, 16, 32, 48]
    assert doubling_counts(6, 6) == [6]
    with pytest.raises(InputError, match=r"16\.\.8 is not a range"):
        doubling_counts(16, 8)


def test_more_than_100_percent_is_explained() -> None:
    model = model_shape(model_preset("llama3-8b"), "llama3-8b")
    training = TrainingShape(model, 8192, 64, "bf16", hardware_of_gpu("h100"), 8, engine_constants("torch"))
    curve = scaling_curve(training, [2, 8], engine="torch")
    assert (curve.points[-1].efficiency or 0) > 1.05
    assert curve.above is not None
    assert curve.above.startswith(
        "it is counted against 2 GPUs, the fewest asked about that fit, and memory holds them"
    )
    assert "recompute full on 2" in curve.above
    assert scaling_curve(training, [8, 16], engine="torch").above is None
