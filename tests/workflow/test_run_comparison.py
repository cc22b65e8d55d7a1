"""Two trainings side by side: what is equal, what is not, and what cannot be compared."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from trainshed.errors import TrainshedError
from trainshed.workflow.verify import BITWISE_TOLERANCE, FLOAT64_TOLERANCE, compare_runs, relative_difference


def events(steps: int = 4, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": 4.5 - step / 8, "grad_norm": 1.25 + step, "batch_hash": f"{step:016x}"}
        for step in range(first, first + steps)
    ]


def changed(at: int, **values: Any) -> list[dict[str, Any]]:
    return [event | (values if event["step"] == at else {}) for event in events()]


def test_a_training_equals_itself_bitwise() -> None:
    found = compare_runs(events(), events(), BITWISE_TOLERANCE)
    assert found.equal
    assert (found.loss_difference, found.grad_norm_difference) == (0.0, 0.0)
    assert [step.step for step in found.steps] == [1, 2, 3, 4]


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_rounding_is_within_the_bound_and_is_not_bitwise(key: str) -> None:
    rounded = changed(2, **{key: events()[2][key] * (1 + 1e-13)})
    assert compare_runs(events(), rounded, FLOAT64_TOLERANCE).equal
    assert not compare_runs(events(), rounded, BITWISE_TOLERANCE).equal


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_a_difference_at_a_single_step_is_outside_the_bound(key: str) -> None:
    found = compare_runs(events(), changed(3, **{key: events()[3][key] * (1 + 1e-8)}), FLOAT64_TOLERANCE)
    assert not found.equal
    assert getattr(found, f"{key}_difference") == pytest.approx(1e-8)
    assert [getattr(step, f"{key}_difference") > 0 for step in found.steps] == [False, False, False, True]


def test_other_tokens_are_a_difference_even_where_the_figures_agree() -> None:
    found = compare_runs(events(), changed(1, batch_hash="f" * 16), FLOAT64_TOLERANCE)
    assert (found.equal, found.same_batches) == (False, False)


def test_a_figure_that_is_not_finite_equals_nothing() -> None:
    found = compare_runs(changed(0, loss=None), changed(0, loss=None), FLOAT64_TOLERANCE)
    assert not found.equal
    plain = orjson.loads(orjson.dumps(found.to_plain()))
    assert plain["loss_difference"] is None
    assert plain["rows"][0]["loss_difference"] is None
    assert plain["grad_norm_difference"] == 0


def test_trainings_of_other_steps_cannot_be_compared() -> None:
    with pytest.raises(TrainshedError, match="one training has steps 1 to 4, the other steps 3 to 6"):
        compare_runs(events(), events(first=2), FLOAT64_TOLERANCE)
    with pytest.raises(TrainshedError, match="the other no steps"):
        compare_runs(events(), [], FLOAT64_TOLERANCE)


def test_the_difference_is_relative_to_the_larger() -> None:
    assert relative_difference(1.0, -3.0) == pytest.approx(4 / 3)
    assert relative_difference(0.0, 0.0) == 0.0
    assert relative_difference(0.0, 1e-300) == 1.0
