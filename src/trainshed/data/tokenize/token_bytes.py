"""How many bytes of text each token of a vocabulary stands for, so that a loss can be given per byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainshed.data.tokenize.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACE = "▁"
"""What sentencepiece writes for a space."""


def token_byte_lengths(tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the length of each token in UTF-8: int64 [V]; special tokens have none.

    None where the decoder joins tokens in a way of its own (WordPiece), so that a token alone has no length.
    """
    body: dict[str, Any] = json.loads(tokenizer.json)
    kinds = set(_decoder_kinds(body.get("decoder") or {}))
    added = {token["id"]: token for token in body.get("added_tokens", ())}
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    for text, number in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if number in added:
            lengths[number] = 0 if added[number].get("special") else len(added[number]["content"].encode())
        elif "ByteLevel" in kinds:
            lengths[number] = len(text)  # one letter for every byte
        elif kinds & {"ByteFallback", "Metaspace"}:
            lengths[number] = 1 if _BYTE_TOKEN.fullmatch(text) else len(text.replace(_SPACE, " ").encode())
        else:
            return None
    return lengths


def _decoder_kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder.get("type", "")
    for part in decoder.get("decoders", ()):
        yield from _decoder_kinds(part)
