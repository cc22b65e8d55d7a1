"""How many bytes a token stands for: all tokens of a text have as many as the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import made_tokenizers
from trainshed.data.tokenize.token_bytes import token_byte_lengths
from trainshed.data.tokenize.tokenizer import load_tokenizer

TEXT = "Größe, 東京 and an emoji: 🚂; def f(x):\n    return x\n"


@pytest.mark.parametrize("make", [made_tokenizers.gpt2, made_tokenizers.llama3])
def test_the_tokens_of_a_text_have_its_bytes(make: object, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(made_tokenizers.save(make(), {}, tmp_path)))  # type: ignore[operator]
    lengths = token_byte_lengths(tokenizer)
    assert lengths is not None
    ids = tokenizer.backend.encode(TEXT, add_special_tokens=False).ids
    assert int(lengths[ids].sum()) == len(TEXT.encode())


def test_sentencepiece_counts_the_space_that_it_adds(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(made_tokenizers.save(made_tokenizers.llama2(), {}, tmp_path)))
    lengths = token_byte_lengths(tokenizer)
    assert lengths is not None
    ids = tokenizer.backend.encode(TEXT, add_special_tokens=False).ids
    assert int(lengths[ids].sum()) == len(f" {TEXT}".encode())


def test_a_tokenizer_that_joins_words_says_nothing(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(made_tokenizers.save(made_tokenizers.bert(), {}, tmp_path)))
    assert token_byte_lengths(tokenizer) is None
