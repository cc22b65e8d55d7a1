"""Learning a byte-level BPE from a corpus: for the quickstart, and for languages no published tokenizer fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import orjson

from trainshed.data.text.documents import extract
from trainshed.data.text.reading import Piece, PieceReader
from trainshed.errors import InputError, MissingExtra
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import open_store

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions

SAMPLE_BYTES = 512 * 1024 * 1024
"""Enough text to learn any vocabulary from; more costs hours and moves the merges little."""


def train_tokenizer(
    pieces: Sequence[Piece],
    *,
    vocab_size: int,
    min_frequency: int = 2,
    eod: str = "<|endoftext|>",
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> dict[str, bytes]:
    """Learn a tokenizer from the first SAMPLE_BYTES of a corpus; return the files of its folder."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise MissingExtra.named("data", "training a tokenizer") from None

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[eod],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    total = min(SAMPLE_BYTES, sum(piece.bytes for piece in pieces))
    with reporter.task("tokenizer", total=total, unit="B") as task:
        tokenizer.train_from_iterator(_texts(pieces, options, task.advance), trainer)
    found = tokenizer.get_vocab_size()
    if found < vocab_size:
        raise InputError(
            f"the corpus gives a vocabulary of {found:,} tokens, {vocab_size:,} are asked for",
            where="tokenizer.train.vocab_size",
            hint=f"write {found} or less, or give it more text",
        )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eod, "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": orjson.dumps(config, option=orjson.OPT_INDENT_2) + b"\n",
    }


def _texts(pieces: Sequence[Piece], options: StoreOptions | None, advance: object) -> Iterator[list[str]]:
    room = SAMPLE_BYTES
    for piece in pieces:
        for block in PieceReader(piece, *open_store(piece.address, options)).blocks():
            documents, _ = extract(block, piece.key)
            yield documents
            advance(block.bytes_read)  # type: ignore[operator]
            room -= sum(map(len, documents))
            if room <= 0:
                return
