"""Letters that Unicode added between the tables of the two encoders: found in a text, and encoded by the reference."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainshed.data.encoders import FastEncoder, ReferenceEncoder
from trainshed.data.tokenizer import load_tokenizer
from trainshed.data.young_letters import RANGES, with_young_letters

YOUNG = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in RANGES) + "]")
COMPANY = ["{}.s", "a{}b", "1{}2", " {} {}{}\n", "{}'s", "x{}\n\n y", "  {}"]
"""What a letter must stand beside for its class to show."""

EDGES = [point for first, last in RANGES for point in (first - 1, first, last, last + 1)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.lists(st.one_of(st.text(max_size=5), st.sampled_from(EDGES).map(chr)), max_size=4).map("".join), max_size=6
    )
)
def test_the_glance_finds_what_a_regular_expression_finds(texts):
    assert with_young_letters(texts) == [number for number, text in enumerate(texts) if YOUNG.search(text)]


def test_every_one_of_them_is_found_and_its_neighbours_are_not():
    assert with_young_letters([chr(point) for point in EDGES]) == [
        number for number, point in enumerate(EDGES) if any(first <= point <= last for first, last in RANGES)
    ]
    points = [point for first, last in RANGES for point in range(first, last + 1)]
    assert with_young_letters([chr(point) for point in points]) == list(range(len(points)))


def differing(kind_folder, points: list[int]) -> list[str]:
    tokenizer = load_tokenizer(str(kind_folder))
    fast, reference = FastEncoder(tokenizer), ReferenceEncoder(tokenizer)
    found: set[int] = set()
    for company in COMPANY:
        texts = [company.format(*[chr(point)] * 3) for point in points]
        one, other = reference.encode(texts), fast.encode(texts)
        if not (np.array_equal(one.ids, other.ids) and np.array_equal(one.lengths, other.lengths)):
            rows = zip(points, one.rows(), other.rows(), strict=True)
            found |= {point for point, a, b in rows if not np.array_equal(a, b)}
    return [f"U+{point:04X}" for point in sorted(found)]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen", "llama2"])
def test_the_encoders_agree_at_the_edges_of_the_ranges_and_on_every_block(tokenizer_folder, kind):
    points = sorted({*EDGES, *range(0x250), *(p for p in range(0x250, 0x110000, 211) if not 0xD800 <= p < 0xE000)})
    assert differing(tokenizer_folder(kind), points) == []


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen", "llama2"])
def test_the_encoders_agree_on_every_character(tokenizer_folder, kind):
    """If a new version of either library fails here, RANGES wants what it names."""
    for start in range(0, 0x110000, 0x8000):
        points = [point for point in range(start, start + 0x8000) if not 0xD800 <= point < 0xE000]
        assert differing(tokenizer_folder(kind), points) == []
