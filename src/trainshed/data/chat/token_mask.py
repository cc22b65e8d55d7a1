"""Learned characters to learned tokens.

A token is learned if any of its characters is, as in transformers. The characters of a token are known from its length
where a tokenizer writes text down without changing it: byte-level BPE (GPT-2, Llama 3, Qwen), and BPE that only puts ▁
for spaces (Gemma). There the lengths of a text's tokens must sum up to the text, or they are not used. All other texts
are encoded again by `tokenizers`, which says where each token is and is many times slower.

Shapes: N texts of a batch, T tokens of the batch, V entries of the vocabulary.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from trainshed.data.tokenize.encoders import EncodedBatch
from trainshed.data.tokenize.tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainshed.data.chat.sandbox import Span

SPACE_MARK = "▁"


class TokenMasks:
    """Finds the learned tokens of texts that one tokenizer has encoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._body: dict[str, Any] = orjson.loads(tokenizer.json)

    def learned(
        self, texts: Sequence[str], encoded: EncodedBatch, spans: Sequence[Sequence[Span]]
    ) -> NDArray[np.uint8]:
        """Return for each token [T] whether it is learned: 1 or 0."""
        ends = np.cumsum(encoded.lengths)
        starts = ends - encoded.lengths
        sizes = self._token_bytes[encoded.ids] if self._token_bytes is not None else None
        mask = np.zeros(len(encoded.ids), np.uint8)
        for number, text in enumerate(texts):
            tokens = slice(int(starts[number]), int(ends[number]))
            if sizes is None or not self._mark_by_length(text, sizes[tokens], spans[number], mask[tokens]):
                self._mark_by_reference(text, encoded.ids[tokens], spans[number], mask[tokens])
        return mask

    def _mark_by_length(
        self, text: str, sizes: NDArray[np.int64], spans: Sequence[Span], mask: NDArray[np.uint8]
    ) -> bool:
        """Mark learned tokens; return False where the lengths of the tokens do not tell where they are."""
        is_ascii = text.isascii()
        if not is_ascii and self._composes and not unicodedata.is_normalized("NFC", text):
            return False
        token_ends = np.cumsum(sizes)
        total = int(token_ends[-1]) if len(token_ends) else 0
        if total != (len(text) if is_ascii else _utf8_length(text)):
            return False
        token_starts = token_ends - sizes
        for start, end in spans:
            first_byte, last_byte = (start, end) if is_ascii else (_utf8_length(text[:start]), _utf8_length(text[:end]))
            first = int(np.searchsorted(token_ends, first_byte, "right"))
            last = int(np.searchsorted(token_starts, last_byte, "left"))
            mask[first:last] = 1
        return True

    def _mark_by_reference(
        self, text: str, ids: NDArray[np.uint32], spans: Sequence[Span], mask: NDArray[np.uint8]
    ) -> None:
        encoding = self._tokenizer.backend.encode(text, add_special_tokens=False)
        assert len(encoding.ids) == len(ids), "both encoders give the same ids"
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for start, end in spans:
            mask[(offsets[:, 0] < end) & (offsets[:, 1] > start)] = 1

    @cached_property
    def _token_bytes(self) -> NDArray[np.int64] | None:
        """How many bytes of text each token stands for [V]; None where that cannot be said."""
        model = self._body["model"]
        if model.get("type", "BPE") != "BPE" or not self._keeps_text:
            return None
        backend = self._tokenizer.backend
        sizes = np.zeros(self._tokenizer.vocab_size, np.int64)
        byte_level = self._is_byte_level
        for token, number in backend.get_vocab(with_added_tokens=False).items():
            if byte_level:
                sizes[number] = len(token)  # one character stands for one byte
            elif model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
                sizes[number] = 1
            else:
                sizes[number] = len(token.replace(SPACE_MARK, " ").encode())
        for number, token in backend.get_added_tokens_decoder().items():
            sizes[number] = len(token.content.encode())
        return sizes

    @cached_property
    def _pre_tokenizers(self) -> list[dict[str, Any]]:
        body = self._body.get("pre_tokenizer") or {}
        return body.get("pretokenizers", [body]) if body else []

    @cached_property
    def _is_byte_level(self) -> bool:
        return any(step["type"] == "ByteLevel" for step in self._pre_tokenizers)

    @cached_property
    def _composes(self) -> bool:
        return (self._body.get("normalizer") or {}).get("type") == "NFC"

    @cached_property
    def _keeps_text(self) -> bool:
        """Whether its tokens, put together, are the text: nothing is added, removed or replaced before BPE."""
        normalizer = self._body.get("normalizer") or {}
        if self._is_byte_level:
            return normalizer.get("type") in (None, "NFC") and all(
                not step.get("add_prefix_space", False) for step in self._pre_tokenizers
            )
        marks_spaces = (
            normalizer.get("type") == "Replace"
            and normalizer.get("pattern") == {"String": " "}
            and normalizer.get("content") == SPACE_MARK
        )
        return marks_spaces and all(step["type"] == "Split" for step in self._pre_tokenizers)


def _utf8_length(text: str) -> int:
    return len(text.encode())
