"""Learning a byte-level BPE from a corpus: for the quickstart, and for languages no published tokenizer fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import orjson

from trainshed.data.text.documents import OnBadLine, extract
from trainshed.data.text.reading import Piece, PieceReader
from trainshed.errors import InputError, MissingExtra
from trainshed.reporting import SILENT, Reporter, Task
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
    on_bad_line: OnBadLine = "skip",
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
        sample = _Sample(pieces, on_bad_line, options, task)
        tokenizer.train_from_iterator(sample.texts(), trainer)
    found = tokenizer.get_vocab_size()
    if not sample.characters:
        raise InputError(
            "the training sources hold no text to learn a tokenizer from",
            where=pieces[0].address if pieces else None,
            hint="give the recipe text, or the address of a tokenizer",
        )
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


class _Sample:
    """The first text of a corpus, and how much of it there was."""

    def __init__(
        self, pieces: Sequence[Piece], on_bad_line: OnBadLine, options: StoreOptions | None, task: Task
    ) -> None:
        self._pieces, self._on_bad_line, self._options, self._task = pieces, on_bad_line, options, task
        self.characters = 0

    def texts(self) -> Iterator[list[str]]:
        """Yield the documents of block after block, up to SAMPLE_BYTES."""
        for piece in self._pieces:
            for block in PieceReader(piece, *open_store(piece.address, self._options)).blocks():
                documents, bad_lines = extract(block, piece.key)
                if bad_lines and self._on_bad_line == "stop":
                    raise bad_lines[0].as_error(piece, bad_lines[0].number)
                yield documents
                self._task.advance(block.bytes_read)
                self.characters += sum(map(len, documents))
                if self.characters >= SAMPLE_BYTES:
                    return
