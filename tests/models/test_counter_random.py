"""Random numbers by element: the same for ever, the same for any part of a tensor, and random enough to train with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainshed.models import init
from trainshed.models.init import (
    box_indices,
    dropout_mask,
    dropout_mask_compiled,
    fill_normal,
    random_bits,
    rng_key,
    rng_key_tensor,
)

SHAPE = (7, 6, 5)


def whole(shape: tuple[int, ...], key: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    fill_normal(out, key, 1.0, shape)
    return out


def test_version_1_never_changes() -> None:
    key = rng_key("init", 1, 1234, "embedding.weight")
    assert init.RNG_VERSION == 1
    assert key == 1191252305631021064
    index = torch.tensor([0, 1, 2, 2**32, 2**40 + 3])
    assert [random_bits(index, key, stream).tolist() for stream in range(3)] == [
        [3688974285, 408154753, 2078901316, 4177145060, 1514996840],
        [1951401353, 3914115113, 2191681544, 963344381, 3616877868],
        [2444133060, 3811649271, 1805495142, 2612297616, 3848104586],
    ]
    # From these bits by Box-Muller; logarithms and cosines may differ in the last place between machines.
    normal = [-0.5289989565251325, 1.8414639282027467, -1.2021440272433606, 1.389909040259724]
    assert whole((4,), key).tolist() == pytest.approx(normal, rel=1e-12)
    assert dropout_mask(torch.arange(8), key, 0.25).tolist() == [True, True, True, False, False, True, True, True]


@given(index=st.integers(0, 2**63 - 1), key=st.integers(0, 2**62 - 1), stream=st.integers(0, 2))
@settings(max_examples=50)
def test_bits_are_two_rounds_of_murmurs_finaliser(index: int, key: int, stream: int) -> None:
    low, high = key % 2**32, key >> 32
    x = finalise(index % 2**32 ^ low)
    x = finalise((x + (index >> 32) + high + 0x9E3779B9 * (2 * stream + 1)) % 2**32)
    expected = finalise(x ^ (low * 0x9E3779B1 + high) % 2**32)
    assert random_bits(torch.tensor(index), key, stream).item() == expected


@given(first=st.integers(0, 2**62), key=st.integers(0, 2**62 - 1), probability=st.sampled_from([0.01, 0.1, 0.5, 0.9]))
@settings(deadline=None, max_examples=50)
def test_a_key_in_a_tensor_gives_the_same_mask(first: int, key: int, probability: float) -> None:
    index = first + torch.arange(64)
    expected = dropout_mask(index, key, probability)
    assert torch.equal(dropout_mask_compiled(index, rng_key_tensor(key, "cpu"), probability), expected)


def finalise(x: int) -> int:
    """murmur3's fmix32, as its source has it."""
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


@given(data=st.data())
@settings(max_examples=50)
def test_any_box_is_that_part_of_the_whole(data: st.DataObject) -> None:
    cuts = [sorted(data.draw(st.tuples(st.integers(0, length), st.integers(0, length)))) for length in SHAPE]
    offset, shape = [first for first, _ in cuts], [last - first for first, last in cuts]
    box = torch.empty(shape)
    fill_normal(box, 99, 0.5, SHAPE, offset)
    everything = torch.empty(SHAPE)
    fill_normal(everything, 99, 0.5, SHAPE)
    assert torch.equal(box, everything[tuple(slice(first, last) for first, last in cuts)])


def test_a_tensor_filled_in_several_strokes_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = whole(SHAPE, 5)
    monkeypatch.setattr(init, "_CHUNK_ELEMENTS", 2 * 6 * 5)
    assert torch.equal(whole(SHAPE, 5), at_once)


def test_indices_of_a_box_count_the_elements_of_the_whole() -> None:
    assert torch.equal(box_indices(SHAPE, (0, 0, 0), SHAPE, "cpu"), torch.arange(7 * 6 * 5).view(SHAPE))
    assert box_indices(SHAPE, (6, 5, 4), (1, 1, 1), "cpu").tolist() == [[[209]]]


def test_numbers_are_normal() -> None:
    x = whole((200, 250), rng_key("a"))
    # 50,000 draws: mean, spread, skewness, kurtosis within five standard errors, and the tails.
    assert abs(x.mean()) < 5 / 50_000**0.5
    assert abs(x.std() - 1) < 5 / 100_000**0.5
    assert abs(x.pow(3).mean()) < 5 * (15 / 50_000) ** 0.5
    assert abs(x.pow(4).mean() - 3) < 5 * (96 / 50_000) ** 0.5
    assert 3.5 < x.abs().max() < 7


def test_neighbours_rows_and_streams_are_independent() -> None:
    x = whole((200, 250), rng_key("a"))
    pairs = {
        "next column": (x[:, :-1], x[:, 1:]),
        "next row": (x[:-1], x[1:]),
        "another name": (x, whole((200, 250), rng_key("b"))),
        "another seed": (x, whole((200, 250), rng_key("a", 1))),
    }
    for what, (left, right) in pairs.items():
        assert abs((left * right).mean()) < 5 / left.numel() ** 0.5, what
    drawn = [random_bits(torch.arange(100_000), 7, stream) for stream in range(3)]
    for left, right in [(0, 1), (0, 2), (1, 2)]:
        assert (drawn[left] == drawn[right]).sum() < 3


def test_elements_past_two_to_the_32_do_not_repeat_the_first() -> None:
    index = torch.arange(10_000)
    first = random_bits(index, 3)
    for far in (2**32, 2**33, 2**40, 2**32 * 2**24):
        assert (random_bits(index + far, 3) == first).sum() < 3


def test_every_bit_is_as_often_set_as_not() -> None:
    drawn = random_bits(torch.arange(100_000), rng_key("bits"))
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < 2**32
    rates = torch.stack([(drawn >> bit & 1).double().mean() for bit in range(32)])
    assert (rates - 0.5).abs().max() < 5 * 0.5 / 100_000**0.5


def test_names_and_numbers_make_a_key_by_their_order_and_borders() -> None:
    keys = [rng_key("a", 1), rng_key(1, "a"), rng_key("a1"), rng_key("a", 11), rng_key("a", 1, 1), rng_key("a", 2)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**62 for key in keys)


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_dropout_drops_as_often_as_it_is_asked_to(probability: float) -> None:
    kept = dropout_mask(torch.arange(100_000), rng_key("dropout"), probability).double().mean()
    assert abs(kept - (1 - probability)) <= 5 * (probability * (1 - probability) / 100_000) ** 0.5
