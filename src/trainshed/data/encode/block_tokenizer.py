"""A block of text to tokens: the work of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainshed.data.encode.encoders import Encoded, Encoder, EncoderName, choose_encoder, require_equal
from trainshed.data.encode.tokenizer import Tokenizer
from trainshed.data.text.documents import BadLine, extract

if TYPE_CHECKING:
    from trainshed.data.workers.dealing import Job

SAMPLE_BYTES = 64 * 1024
"""How much of a shard is encoded by both encoders: enough to meet most kinds of text, a blink for the slow one."""

# Shapes:  N documents in a block, T tokens of the block with BOS and EOD.


@dataclass(frozen=True)
class TokenizeOptions:
    """What every worker must know: the same for all blocks of a preparation."""

    tokenizer: Tokenizer
    eod: int | None
    bos: int | None
    dtype: str
    encoder: EncoderName = "auto"


@dataclass(frozen=True)
class Tokens:
    """A block as tokens: `data` is T tokens in the file's dtype, `lengths` N int32 (0: an empty document)."""

    data: bytes
    lengths: bytes
    documents: int
    text_bytes: int
    bad_lines: list[BadLine] = field(default_factory=list)


class BlockTokenizer:
    """Turns blocks into tokens; `parallel` lets the encoder use several cores by itself."""

    def __init__(self, options: TokenizeOptions, *, parallel: bool = False) -> None:
        self._options = options
        self.encoder: Encoder
        self.encoder, self.reason = choose_encoder(options.tokenizer, options.encoder, parallel=parallel)

    def tokens(self, job: Job[Any]) -> Tokens:
        """Parse, encode and lay out one block."""
        (tokens,) = self.tokens_together([job])
        return tokens

    def tokens_together(self, jobs: Sequence[Job[Any]]) -> list[Tokens]:
        """Tokenise several blocks with one call of the encoder."""
        extracted = [extract(job.block, job.key) for job in jobs]
        for job, (documents, _) in zip(jobs, extracted, strict=True):
            if job.compare and self._options.encoder != "tokenizers":
                require_equal(self._options.tokenizer, self.encoder, _sample(documents), job.where)
        encoded = self.encoder.encode([document for documents, _ in extracted for document in documents])
        parts = encoded.split([len(documents) for documents, _ in extracted])
        return [
            Tokens(*self.lay_out(part), len(documents), _utf8_bytes(documents), bad_lines)
            for part, (documents, bad_lines) in zip(parts, extracted, strict=True)
        ]

    def lay_out(self, encoded: Encoded) -> tuple[bytes, bytes]:
        """Put BOS before and EOD behind each document that is not empty, in the file's dtype."""
        import numpy as np

        dtype = np.dtype(self._options.dtype)
        extra = (self._options.bos is not None) + (self._options.eod is not None)
        if not extra:
            return encoded.ids.astype(dtype).tobytes(), encoded.lengths.astype("<i4").tobytes()
        filled = encoded.lengths > 0
        lengths = encoded.lengths + extra * filled
        ends = np.cumsum(lengths)[filled]
        out = np.empty(int(lengths.sum()), dtype)
        text = np.ones(len(out), np.bool_)
        if self._options.eod is not None:
            out[ends - 1] = self._options.eod
            text[ends - 1] = False
        if self._options.bos is not None:
            starts = ends - lengths[filled]
            out[starts] = self._options.bos
            text[starts] = False
        out[text] = encoded.ids
        return out.tobytes(), lengths.astype("<i4").tobytes()


def _utf8_bytes(documents: list[str]) -> int:
    # Asking whether a string is ASCII costs nothing, and most are: then characters are bytes.
    return sum(len(text) if text.isascii() else len(text.encode()) for text in documents)


def _sample(documents: list[str]) -> list[str]:
    """The first documents of a block up to SAMPLE_BYTES, a huge one cut."""
    sample: list[str] = []
    room = SAMPLE_BYTES
    for document in documents:
        sample.append(document[:room])
        room -= len(sample[-1])
        if room <= 0:
            break
    return sample
