"""Text as it comes: whole characters, the spaces of the whole text, nothing of a stop text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from support.models.made_tokenizers import KINDS
from trainshed.serve.tokenizer import REPLACEMENT_CHARACTER, DecodeTokens, IncrementalDetokenizer, StopStrings

TEXT = "Ein naïver 😀 Satz — 日本語, ﷽ and 👩‍👩‍👧 families;\n\n  spaces   too, x² ≠ y."


@pytest.fixture(scope="module", params=["gpt2", "llama3", "llama2", "qwen"])
def backend(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


def decoder(backend: Tokenizer) -> DecodeTokens:
    return lambda tokens: backend.decode(list(tokens), skip_special_tokens=True)


def test_the_parts_are_the_whole_and_no_part_ends_within_a_character(backend: Tokenizer) -> None:
    tokens = backend.encode(TEXT, add_special_tokens=False).ids
    stream = IncrementalDetokenizer(decoder(backend))
    parts = [stream.push(token) for token in tokens]
    assert "".join(parts) + stream.finish() == decoder(backend)(tokens)
    assert stream.finish() == ""
    assert not any(REPLACEMENT_CHARACTER in part for part in parts)
    assert sum(not part for part in parts) > 5, "characters of several tokens are held back"


def test_an_answer_goes_on_where_its_prompt_ended(backend: Tokenizer) -> None:
    """The text after any prompt is what the whole text has there, a first space included."""
    decode = decoder(backend)
    tokens = backend.encode(TEXT, add_special_tokens=False).ids
    whole = decode(tokens)
    for cut in range(1, len(tokens)):
        if REPLACEMENT_CHARACTER in decode(tokens[:cut]):
            continue  # the prompt ends within a character
        stream = IncrementalDetokenizer(decode, tokens[:cut])
        answer = "".join(stream.push(token) for token in tokens[cut:]) + stream.finish()
        assert decode(tokens[:cut]) + answer == whole


def test_bytes_that_never_become_a_character_are_told_at_the_end(backend: Tokenizer) -> None:
    decode = decoder(backend)
    tokens = backend.encode("a😀", add_special_tokens=False).ids[:-1]
    stream = IncrementalDetokenizer(decode)
    parts = [stream.push(token) for token in tokens]
    assert "".join(parts) == "a"
    assert set(stream.finish()) == {REPLACEMENT_CHARACTER}


def test_any_tokens_in_any_order_stream_to_what_they_decode_to() -> None:
    backend = KINDS["gpt2"]()
    decode = decoder(backend)
    chance = random.Random(0)
    for _ in range(30):
        tokens = [chance.randrange(300) for _ in range(60)]
        stream = IncrementalDetokenizer(decode)
        parts = [stream.push(token) for token in tokens]
        assert "".join(parts) + stream.finish() == decode(tokens)


def test_a_long_answer_costs_no_more_per_token_than_a_short_one() -> None:
    seen: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return "".join(chr(97 + token % 26) for token in tokens)

    stream = IncrementalDetokenizer(decode, range(1000))
    assert "".join(stream.push(token) for token in range(500)) == "".join(chr(97 + i % 26) for i in range(500))
    assert max(seen) <= 16


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=300)
@given(
    st.text("ab\n", max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 50), max_size=5),
)
def test_a_stop_text_ends_the_answer_wherever_tokens_are_cut(text: str, stops: list[str], places: list[int]) -> None:
    watch = StopStrings(stops)
    told = ""
    for part in cut(text, places):
        told += watch.push(part)
        assert not any(stop in told for stop in stops)
        if watch.found:
            break
    eos_tokens = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    first = min(eos_tokens)[1] if eos_tokens else None
    assert watch.found == bool(eos_tokens)
    assert told + ("" if watch.found else watch.finish()) == text[:first]


def test_what_may_begin_a_stop_text_is_held_back_and_nothing_else() -> None:
    watch = StopStrings(["\n\nUser:", "END"])
    parts = ("Hi\n", "\n", "\nUse", "ful E", "N", "D")
    assert [watch.push(part) for part in parts] == ["Hi", "", "\n", "\n\nUseful ", "", ""]
    assert watch.found
