"""Curves of any length are drawn with few points, and no spike is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshed.observe.dash.curves import Curves


def filled(values: list[float]) -> Curves:
    curves = Curves()
    for number, value in enumerate(values, 1):
        curves.append(number, {"loss": value, "time": number * 2.0})
    return curves


def test_a_short_run_is_drawn_step_by_step() -> None:
    window = filled([3.0, 2.0, 1.0]).window(["loss"], points=10)
    assert window.x.tolist() == [1, 2, 3]
    assert window.values["loss"].tolist() == [3.0, 2.0, 1.0]
    assert window.counts is None
    assert not window.low


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=300), st.integers(2, 40))
def test_the_extremes_of_every_step_are_in_the_points_that_stand_for_them(values: list[float], points: int) -> None:
    window = filled(values).window(["loss"], points=points)
    assert len(window.x) <= max(points, 1)
    assert window.rows == len(values)
    if window.counts is None:
        assert window.values["loss"].tolist() == values
        return
    assert int(window.counts.sum()) == len(values)
    assert window.low["loss"].min() == np.float32(min(values))
    assert window.high["loss"].max() == np.float32(max(values))


def test_a_million_steps_with_one_spike_show_it() -> None:
    curves = filled([2.0])
    for key, column in curves._columns.items():
        column.extend(np.arange(2.0, 1_000_001.0) if key != "loss" else np.full(999_999, 2.0))
    curves._rows = 1_000_000
    curves._columns["loss"][654_321] = 99.0
    window = curves.window(["loss"], points=600)
    assert (window.rows, len(window.x)) == (1_000_000, 600)
    assert window.high["loss"].max() == 99.0
    zoomed = curves.window(["loss"], start=654_300, end=654_340, points=600)
    assert zoomed.counts is None
    assert zoomed.x[int(np.argmax(zoomed.values["loss"]))] == 654_322


def test_a_step_that_is_done_again_replaces_what_came_after_it() -> None:
    curves = filled([5.0, 4.0, 3.0, 2.0])
    curves.append(3, {"loss": 3.5})
    assert curves.window(["loss"], points=10).x.tolist() == [1, 2, 3]
    assert curves.last("loss") == 3.5
    curves.drop_from(1)
    assert (len(curves), curves.last_step, curves.last("loss")) == (0, None, None)


def test_a_figure_that_begins_late_or_is_missing_has_gaps() -> None:
    curves = filled([5.0, 4.0])
    curves.append(3, {"loss": float("nan"), "mfu": 0.4})
    window = curves.window(["loss", "mfu"], points=10)
    assert np.isnan(window.values["mfu"][:2]).all()
    assert window.values["mfu"][2] == np.float32(0.4)
    assert curves.last("loss") is None
    curves.append(4, {"loss": 1.0})
    assert curves.last("mfu") is None


def test_a_window_is_kept_until_a_row_is_added() -> None:
    curves = filled([3.0, 2.0])
    first = curves.window(["loss"], points=10)
    assert curves.window(["loss"], points=10) is first
    curves.append(3, {"loss": 1.0})
    assert curves.window(["loss"], points=10).rows == 3


@pytest.mark.parametrize("axis", ["step", "tokens", "time"])
def test_an_axis_without_rows_is_an_empty_window(axis: str) -> None:
    assert Curves().window(["loss"], axis=axis, points=10).rows == 0
