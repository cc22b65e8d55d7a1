"""Conversations to tokens in a test: rows as a worker of a preparation tokenizes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainshed.data.chat.template import find_template
from trainshed.data.chat.tokenize import ChatSettings, ConversationTokenizer
from trainshed.data.text.reader import TextBlock
from trainshed.data.tokenize.tokenizer import load_tokenizer
from trainshed.data.tokenize.workers import BlockTask, TokenBlock
from trainshed.recipe.data import SampleFormat

Tokens = list[tuple[list[int], list[int]]]
"""Ids and learned tokens of some conversations."""
LONG = 100_000


def tokenized(
    folder: Path,
    rows: Sequence[Any],
    *,
    sample_format: SampleFormat = "chat",
    template: str | None = None,
    length: int = LONG,
    encoder: Any = "auto",
    **settings: Any,
) -> TokenBlock:
    tokenizer = load_tokenizer(str(folder))
    chat = ChatSettings(sample_format, find_template(template, tokenizer), length, **settings)
    block = TextBlock("rows", list(rows), 1, len(rows), 0)
    worker = ConversationTokenizer(tokenizer, chat, "uint16", encoder)
    return worker.tokenize_block(BlockTask(block, "", "x", True, None))


def tokens_of(block: TokenBlock) -> Tokens:
    assert not block.bad_lines, block.bad_lines[0]
    assert block.learned is not None
    ends = np.cumsum(np.frombuffer(block.lengths, "<i4"))[:-1]
    ids, learned = np.frombuffer(block.data, np.uint16), np.frombuffer(block.learned, np.uint8)
    return [(a.tolist(), b.tolist()) for a, b in zip(np.split(ids, ends), np.split(learned, ends), strict=True)]
