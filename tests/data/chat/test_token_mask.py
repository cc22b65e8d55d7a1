"""Learned characters to learned tokens, for every kind of tokenizer: by lengths as by the offsets of `tokenizers`."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.models.chat_styles import tokenizer_json
from support.models.made_tokenizers import KINDS
from support.runs.preparing import ODD_TEXTS
from trainshed.data.chat.token_mask import TokenMasks
from trainshed.data.tokenize.encoders import ReferenceEncoder
from trainshed.data.tokenize.tokenizer import Tokenizer, tokenizer_from_files

BY_LENGTH = ("byte", "space")


@cache
def tokenizer(kind: str) -> Tokenizer:
    body = json.loads(tokenizer_json(kind) if kind in BY_LENGTH else KINDS[kind]().to_str())
    _keep_spaces(body.get("post_processor") or {})
    return tokenizer_from_files(kind, {"tokenizer.json": json.dumps(body).encode()})


def _keep_spaces(processor: dict) -> None:
    """Offsets with the space that is part of a token: trimmed ones are of its letters only."""
    if "trim_offsets" in processor:
        processor["trim_offsets"] = False
    for inner in processor.get("processors", []):
        _keep_spaces(inner)


def by_offsets(kind: str, text: str, span: tuple[int, int]) -> list[int]:
    offsets = tokenizer(kind).backend.encode(text, add_special_tokens=False).offsets
    return [int(start < span[1] and end > span[0]) for start, end in offsets]


texts = st.one_of(
    st.sampled_from(ODD_TEXTS),
    st.text(max_size=40),
    st.lists(st.sampled_from(["<|im_end|>", " ", "\n", "word", " is", "ü", "e\u0301", "日本", "😀", "</s>", "▁"])).map(
        "".join
    ),
)


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from([*BY_LENGTH, *KINDS]), text=texts, data=st.data())
def test_a_token_is_learned_if_any_of_its_characters_is(kind: str, text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    span = (start, data.draw(st.integers(start, len(text))))
    encoded = ReferenceEncoder(tokenizer(kind)).encode([text])
    mask = TokenMasks(tokenizer(kind)).learned([text], encoded, [[span] if span[0] < span[1] else []])
    expected = by_offsets(kind, text, span) if span[0] < span[1] else [0] * len(mask)
    assert mask.tolist() == expected


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_common_tokenizers_need_no_second_encoding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    masks, text = (
        TokenMasks(tokenizer(kind)),
        "<|im_start|>user\nWhat, ü?<|im_end|>\n<|im_start|>assistant\nThat 日本!<|im_end|>\n",
    )
    encoded = ReferenceEncoder(tokenizer(kind)).encode([text])
    monkeypatch.setattr(TokenMasks, "_mark_by_reference", None)
    span = (text.index("That"), len(text))
    assert masks.learned([text], encoded, [[span]]).tolist() == by_offsets(kind, text, span)
