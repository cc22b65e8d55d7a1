"""Letters that Unicode added between the tables of the two encoders: found in a text, and encoded by the reference."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.runs.preparing import MadeTokenizer
from trainshed.data.tokenize.encoders import FastEncoder, ReferenceEncoder
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokenize.unicode_gaps import GAP_RANGES, documents_with_gaps

YOUNG = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in GAP_RANGES) + "]")
COMPANY = "{0}.s a{0}b 1{0}2 {0} {0}{0}\n{0}'s x{0}\n\n y  {0}"
"""What a letter must stand beside for its class to show."""

EDGES = [point for first, last in GAP_RANGES for point in (first - 1, first, last, last + 1)]


@settings(max_examples=300)
@given(
    st.lists(
        st.lists(st.one_of(st.text(max_size=5), st.sampled_from(EDGES).map(chr)), max_size=4).map("".join), max_size=6
    )
)
def test_the_glance_finds_what_a_regular_expression_finds(texts: list[str]) -> None:
    assert documents_with_gaps(texts) == [number for number, text in enumerate(texts) if YOUNG.search(text)]


def test_every_one_of_them_is_found_and_its_neighbours_are_not() -> None:
    assert documents_with_gaps([chr(point) for point in EDGES]) == [
        number for number, point in enumerate(EDGES) if any(first <= point <= last for first, last in GAP_RANGES)
    ]
    points = [point for first, last in GAP_RANGES for point in range(first, last + 1)]
    assert documents_with_gaps([chr(point) for point in points]) == list(range(len(points)))


def differing(tokenizer: Tokenizer, points: list[int]) -> list[str]:
    texts = [COMPANY.format(chr(point)) for point in points]
    one, other = ReferenceEncoder(tokenizer).encode(texts), FastEncoder(tokenizer).encode(texts)
    rows = zip(points, one.rows(), other.rows(), strict=True)
    return [f"U+{point:04X}" for point, a, b in rows if not np.array_equal(a, b)]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen", "llama2"])
def test_the_encoders_agree_at_the_edges_of_the_ranges_and_on_every_block(
    made_tokenizer: MadeTokenizer, kind: str
) -> None:
    points = sorted({*EDGES, *range(0x250), *(p for p in range(0x250, 0x110000, 211) if not 0xD800 <= p < 0xE000)})
    assert differing(made_tokenizer(kind), points) == []


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen", "llama2"])
def test_the_encoders_agree_on_every_character(made_tokenizer: MadeTokenizer, kind: str) -> None:
    """If a new version of either library fails here, RANGES wants what it names."""
    # Planes 4 to 13 are empty, 15 and 16 for private use.
    for start in [*range(0, 0x40000, 0x8000), 0xE0000]:
        points = [point for point in range(start, start + 0x8000) if not 0xD800 <= point < 0xE000]
        assert differing(made_tokenizer(kind), points) == []
