"""The points of a sweep: what is swept, what is drawn, and what is refused before any run is looked at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshed.errors import InputError
from trainshed.workflow.sweeps.grid import SweptKey, split_swept, sweep_values, values_text


def test_commas_sweep_a_key_except_inside_brackets_and_quotes() -> None:
    same, swept = split_swept(
        ["train.steps=10", "train.optimizer.betas=[0.9,0.95]", "a.b=[1,2],[3,4]", 'c="x,y",z', "layout={tp: 2, dp: 1}"]
    )
    assert same == ["train.steps=10", "train.optimizer.betas=[0.9,0.95]", "layout={tp: 2, dp: 1}"]
    assert swept == [SweptKey("a.b", ("[1,2]", "[3,4]")), SweptKey("c", ('"x,y"', "z"))]


def test_a_grid_has_every_combination_in_the_order_it_is_written() -> None:
    _, swept = split_swept(["lr=1,2", "tp=1,2,4"])
    points = [values_text(values) for values in sweep_values(swept)]
    assert points == ["lr=1 tp=1", "lr=1 tp=2", "lr=1 tp=4", "lr=2 tp=1", "lr=2 tp=2", "lr=2 tp=4"]


def test_a_random_sweep_of_a_grid_is_part_of_it_and_the_seed_says_which() -> None:
    _, swept = split_swept(["a=1,2,3,4", "b=1,2,3,4"])
    grid = sweep_values(swept)
    drawn = sweep_values(swept, draws=5, seed=7)
    assert len(set(drawn)) == 5
    assert set(drawn) <= set(grid)
    assert drawn == sweep_values(swept, draws=5, seed=7)
    assert drawn != sweep_values(swept, draws=5, seed=8)
    assert sweep_values(swept, draws=16) == grid


@given(st.integers(0, 1000))
def test_a_range_is_drawn_evenly_over_its_decades(seed: int) -> None:
    _, swept = split_swept(["train.optimizer.lr=1e-5..1e-3", "train.global_batch=8..512"])
    points = [dict(values) for values in sweep_values(swept, draws=64, seed=seed)]
    rates = [float(point["train.optimizer.lr"]) for point in points]
    assert all(1e-5 <= rate <= 1e-3 for rate in rates)
    # Of 64 fair draws, fewer than 12 in one half of the range is a matter of one in a million.
    assert 12 <= sum(rate < 1e-4 for rate in rates) <= 52
    assert all(point["train.global_batch"].isdigit() for point in points)


@pytest.mark.parametrize(
    ("overrides", "draws", "words"),
    [
        (["train.steps=3"], None, "no key has several values"),
        (["lr=1,2", "lr=3,4"], None, "`lr` is swept twice"),
        (["lr=1,1"], None, "1 is written twice"),
        (["lr=1,,2"], None, "a value is empty"),
        (["lr=1..2"], None, "is a range, and a grid has no values of it"),
        (["lr=0..2"], 3, "is not a range"),
        (["lr=2..1"], 3, "is not a range"),
        (["lr=1,2"], 3, "3 points of a grid that has 2"),
        (["lr=1,2"], 0, "0 points are none"),
        (["seed=1..3"], 50, "draws gave only 3 different points"),
        (["name=a,b"], None, "runs of one sweep are kept in one place"),
        (["cluster.store=/a,/b"], None, "runs of one sweep are kept in one place"),
        ([f"{letter}={','.join(map(str, range(10)))}" for letter in "abcdefgh"], None, "these are 100,000,000 runs"),
    ],
)
def test_what_is_no_sweep_is_refused(overrides: list[str], draws: int | None, words: str) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        sweep_values(split_swept(overrides)[1], draws=draws)
