"""The blend: closed form equals counting, shares are kept, and the future never changes the past."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainshed.data.sampling.blend import Blend
from trainshed.errors import InputError

weights = st.lists(st.floats(1e-2, 1e2), min_size=1, max_size=12)


def blend_of(values) -> Blend:
    return Blend([f"s{number}" for number in range(len(values))], values)


def test_the_first_samples_are_frozen():
    source, draw = blend_of([5, 3, 2]).locate(np.arange(20))
    assert source.tolist() == [2, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1, 0]
    assert draw.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 2, 5, 3, 6, 3, 7, 4, 8, 5, 9]


@settings(max_examples=60)
@given(values=weights)
def test_each_source_is_drawn_in_order_without_gaps(values):
    source, draw = blend_of(values).locate(np.arange(3000))
    for number in range(len(values)):
        drawn = draw[source == number]
        assert np.array_equal(drawn, np.arange(len(drawn)))


@settings(max_examples=60)
@given(values=weights, samples=st.integers(0, 3000))
def test_counts_equal_counting_and_keep_the_shares(values, samples):
    blend = blend_of(values)
    source, _ = blend.locate(np.arange(samples))
    counts = blend.counts(samples)
    assert counts == np.bincount(source, minlength=len(values)).tolist()
    depth = max(1, (len(values) - 1).bit_length())
    for count, weight in zip(counts, blend.weights, strict=True):
        assert abs(count - weight * samples) < depth + 1e-3


@settings(max_examples=60)
@given(values=weights, start=st.integers(0, 2**62))
def test_far_samples_are_found_without_their_past(values, start):
    blend = blend_of(values)
    before, after = blend.counts(start), blend.counts(start + 50)
    source, draw = blend.locate(np.arange(start, start + 50))
    for number in range(len(values)):
        assert draw[source == number].tolist() == list(range(before[number], after[number]))


def test_weights_left_out_follow_the_tokens():
    assert Blend(["a", "b"], None, [300, 100]).weights == [0.75, 0.25]
    assert Blend(["a", "b"], [None, None], [300, 100]).weights == [0.75, 0.25]
    assert blend_of([70, 30]).weights == [0.7, 0.3]


@pytest.mark.parametrize(
    ("values", "tokens", "message"),
    [
        ([], [], "no source to draw from"),
        ([1.0, None], [1, 1], "source 's1' has no weight, but others have one"),
        ([1.0, 0.0], [1, 1], "source 's1' has weight 0"),
        ([1.0, float("nan")], [1, 1], "source 's1' has weight nan"),
        ([None, None], [5, 0], "source 's1' has no tokens to be weighed by"),
        ([1.0, 1e-9, 1.0], [1, 1, 1], "source 's1' has a weight of 5e-10 of the whole, too small"),
    ],
)
def test_wrong_weights_are_named(values, tokens, message):
    with pytest.raises(InputError, match=message):
        Blend([f"s{number}" for number in range(len(values))], values, tokens)
