"""The keyed permutation: a bijection, frozen for ever, and without visible structure.

Statistical tests use fixed keys, so they give the same verdict every time. Their bounds are about six
standard deviations: chance does not reach them, a weakened round function does.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainshed.data.sampling import permutation
from trainshed.data.sampling.permutation import Permutation, derive_words

# Order algorithm 1. If one of these changes, runs that resume see other data: add a version 2 instead.
GOLDEN = {
    (5, 0, ()): [1, 3, 0, 0, 2],
    (1024, 1234, ("documents", "a", 0)): [160, 651, 1001, 311, 712],
    (1025, 1234, ("documents", "a", 0)): [906, 684, 180, 102, 174],
    (1_000_000, 1234, ("documents", "a", 0)): [725426, 818985, 336960, 439117, 218731],
    (1_000_000, 1234, ("documents", "a", 1)): [209283, 500694, 651437, 653924, 541129],
    (1_000_000, 1235, ("documents", "a", 0)): [397244, 76352, 878834, 408294, 46823],
    (10**12, 7, ("windows", "b", 3)): [30343140117, 54933691180, 21623846889, 938782767648, 178540612676],
    (2**61, 7, ("windows", "é", 3)): [
        195097043707490697,
        172065811671595494,
        1792300401999893752,
        958322521111536977,
        1363734244160993637,
    ],
}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_values_are_frozen(case):
    size, seed, labels = case
    positions = np.array([0, 1, 2, size // 2, size - 1])
    assert Permutation(size, seed, *labels)(positions).tolist() == GOLDEN[case]


def test_keys_are_frozen_and_labels_cannot_run_into_each_other():
    assert derive_words(1, ("a", 2), 2) == [4898109094236887842, 11126496130314676017]
    texts = [("ab", "c"), ("a", "bc"), ("a/s1:b", "c"), (1, 2), ("1", "2"), (12,), ("12",), (1, "2")]
    assert len({tuple(derive_words(0, labels, 1)) for labels in texts}) == len(texts)


@settings(max_examples=60)
@given(size=st.one_of(st.integers(0, 40), st.integers(1000, 1100), st.integers(0, 40_000)), seed=st.integers())
def test_it_is_a_bijection_and_its_inverse_undoes_it(size, seed):
    keyed = Permutation(size, seed, "x", 1)
    everything = np.arange(size)
    image = keyed(everything)
    assert np.array_equal(np.sort(image), everything)
    assert np.array_equal(keyed.inverse(image), everything)


@settings(max_examples=60)
@given(size=st.integers(1025, 2**62 - 1), seed=st.integers(0, 2**64), data=st.data())
def test_huge_domains_stay_inside_and_invert(size, seed, data):
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5)))
    keyed = Permutation(size, seed)
    image = keyed(positions)
    assert image.min() >= 0
    assert image.max() < size
    assert np.array_equal(keyed.inverse(image), positions)


def test_any_part_in_any_shape_equals_the_whole(monkeypatch):
    keyed = Permutation(100_000, 3)
    whole = keyed(np.arange(100_000))
    assert np.array_equal(keyed(np.arange(500, 620).reshape(3, 40)), whole[500:620].reshape(3, 40))
    monkeypatch.setattr(permutation, "CHUNK", 777)
    assert np.array_equal(keyed(np.arange(100_000)), whole)


def test_positions_outside_are_an_error():
    for wrong in ([2000], [-1]):
        with pytest.raises(IndexError, match="outside a permutation of 2000"):
            Permutation(2000, 1)(np.array(wrong))


def deviations(counts: np.ndarray) -> float:
    """How many standard deviations a chi-square statistic of equally likely bins is from its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [1024, 1600, 10_000, 1_000_000])
def test_every_position_gets_every_element_equally_often(size):
    positions = np.array([0, 1, 2, size // 2, size - 1])
    bins = 16
    values = np.array([Permutation(size, seed, "u")(positions) for seed in range(2000)])
    images = values * bins // size
    for column in range(len(positions)):
        assert deviations(np.bincount(images[:, column], minlength=bins)) < 6
    for left, right in ((0, 1), (1, 2), (0, 3), (3, 4)):
        pairs = images[:, left] * bins + images[:, right]
        assert abs(deviations(np.bincount(pairs, minlength=bins * bins))) < 6
    # Neighbours start with equal right and adjacent left halves of the network; that must not show.
    side = math.isqrt(size - 1) + 1
    for half in (values % side, values // side):
        steps = (half[:, 1] - half[:, 0]) % side * 4 // side
        assert deviations(np.bincount(steps, minlength=4)) < 6


def test_neighbours_and_epochs_are_uncorrelated():
    size = 50_000
    positions = np.arange(size)
    epochs = [Permutation(size, 11, "documents", "a", epoch)(positions) for epoch in range(6)]
    bound = 6 / math.sqrt(size)
    for number, epoch in enumerate(epochs):
        assert abs(np.corrcoef(epoch[:-1], epoch[1:])[0, 1]) < bound
        assert abs(np.corrcoef(epoch, positions)[0, 1]) < bound
        for other in epochs[:number]:
            assert abs(np.corrcoef(epoch, other)[0, 1]) < bound
            # Two independent permutations agree in about one place, whatever their size (Poisson with mean
            # 1).
            assert np.count_nonzero(epoch == other) < 12


def test_fixed_points_and_runs_are_as_rare_as_in_a_random_permutation():
    size, keys = 3000, 200
    positions = np.arange(size)
    images = [Permutation(size, seed, "f")(positions) for seed in range(keys)]
    for count in (
        sum(np.count_nonzero(image == positions) for image in images),
        sum(np.count_nonzero(np.diff(image) == 1) for image in images),
        sum(np.count_nonzero(np.diff(image) == -1) for image in images),
    ):
        assert abs(count - keys) < 6 * math.sqrt(keys)


def test_the_statistics_can_fail(monkeypatch):
    """Two rounds instead of six are a visibly bad shuffle, and the tests above see it."""
    monkeypatch.setattr(permutation, "ROUNDS", 2)
    with pytest.raises(AssertionError):
        test_every_position_gets_every_element_equally_often(1600)
