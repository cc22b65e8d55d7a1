"""Text to ids: a fast encoder where it is proven equal, the reference everywhere else.

`gigatoken` is some 25 times faster than `tokenizers` and reads the same tokenizer.json, but it reimplements it. It is
therefore never trusted blindly: a battery of awkward texts decides at the start whether it supports a tokenizer at
all, and a sample of every shard is encoded by both (`require_equal`); a difference stops the work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trainshed.data.encode.awkward_texts import awkward_texts
from trainshed.data.encode.tokenizer import Tokenizer
from trainshed.data.encode.young_letters import with_young_letters
from trainshed.errors import InputError, TokenizerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EncoderName = Literal["auto", "gigatoken", "tokenizers"]

WORDS_BYTES = 256 * 1024 * 1024
"""How much the memory of this process may grow before the fast encoder has to forget the words it has met."""

BATCHES_BETWEEN = 16
"""Batches it may learn from before it has to forget again, should something else be what takes the memory."""

# Shapes:  N documents in a batch, T tokens of the batch.


@dataclass(frozen=True)
class Encoded:
    """A batch of documents as ids: `ids` [T] back to back, `lengths` [N] tokens per document."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | NDArray[np.uint32]]) -> Encoded:
        """Lay the ids of each document back to back."""
        import numpy as np

        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.empty(int(lengths.sum()), dtype=np.uint32)
        at = 0
        for row in rows:
            ids[at : at + len(row)] = row
            at += len(row)
        return cls(ids, lengths)

    def split(self, counts: Sequence[int]) -> list[Encoded]:
        """Cut the batch into batches of so many documents each."""
        import numpy as np

        ends = np.concatenate(([0], np.cumsum(self.lengths)))
        cuts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        return [Encoded(self.ids[ends[a] : ends[b]], self.lengths[a:b]) for a, b in pairwise(cuts.tolist())]

    def rows(self) -> list[NDArray[np.uint32]]:
        """The ids of each document."""
        import numpy as np

        return np.split(self.ids, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


class Encoder(Protocol):
    """Encodes documents without adding special tokens."""

    @property
    def name(self) -> str:
        """Which library encodes, with its version: written into the manifest."""
        ...

    def encode(self, documents: Sequence[str]) -> Encoded:
        """Encode a batch."""
        ...


class ReferenceEncoder:
    """`tokenizers`, whose ids are right by definition."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        import tokenizers

        self._backend = tokenizer.backend
        self.name = f"tokenizers {tokenizers.__version__}"

    def encode(self, documents: Sequence[str]) -> Encoded:
        """Encode a batch."""
        encodings = self._backend.encode_batch_fast(list(documents), add_special_tokens=False)
        return Encoded.of([encoding.ids for encoding in encodings])


class FastEncoder:
    """`gigatoken`; `parallel` lets it use several cores, otherwise parallelism comes from worker processes.

    The few documents with letters that its Unicode tables class differently are left to the reference. It remembers
    every word it has met and never forgets one, so it is made anew when that takes too much memory.
    """

    def __init__(self, tokenizer: Tokenizer, *, parallel: bool = False) -> None:
        from importlib.metadata import version

        self._tokenizer, self._parallel = tokenizer, parallel
        self._backend = self._fresh()
        self.name = f"gigatoken {version('gigatoken')}"
        self._floor: int | None = None
        self._batches = 0
        self._renewing = threading.Lock()

    def _fresh(self) -> Any:
        import gigatoken

        return gigatoken.Tokenizer.from_json(self._tokenizer.json).backend

    def _bound_memory(self) -> None:
        """Measure growth from the first batch on, when blocks in flight have their place; renew when it is too much."""
        if not self._renewing.acquire(blocking=False):
            return
        try:
            self._batches += 1
            resident = resident_bytes()
            if self._floor is None:
                self._floor = resident
            elif resident - self._floor > WORDS_BYTES and self._batches >= BATCHES_BETWEEN:
                self._backend, self._batches = self._fresh(), 0
        finally:
            self._renewing.release()

    def encode(self, documents: Sequence[str]) -> Encoded:
        """Encode a batch."""
        encoded = self._encode(documents)
        self._bound_memory()
        young = with_young_letters(documents)
        if not young:
            return encoded
        rows = encoded.rows()
        reference = ReferenceEncoder(self._tokenizer).encode([documents[number] for number in young])
        for number, row in zip(young, reference.rows(), strict=True):
            rows[number] = row
        return Encoded.of(rows)

    def _encode(self, documents: Sequence[str]) -> Encoded:
        import numpy as np

        if not documents:
            return Encoded.of([])
        layout = self._backend.encode_batch(list(documents), parallel=self._parallel).layout
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[int(offsets[0]) : int(offsets[-1])]
        return Encoded(ids, np.diff(offsets))


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def choose_encoder(
    tokenizer: Tokenizer, wanted: EncoderName = "auto", *, parallel: bool = False
) -> tuple[Encoder, str]:
    """Return the encoder to use and the reason for it in a sentence."""
    if wanted == "tokenizers":
        return ReferenceEncoder(tokenizer), "tokenizers, as asked"
    try:
        fast: Encoder = FastEncoder(tokenizer, parallel=parallel)
    except ImportError:
        reason = "gigatoken is not installed"
    except Exception as error:  # its loader raises ValueError for what it does not support, and more
        reason = f"gigatoken does not support this tokenizer ({str(error).splitlines()[0]})"
    else:
        battery = awkward_texts(tokenizer)
        difference = compare(tokenizer, fast, battery)
        if difference is None:
            return fast, f"{fast.name}: same ids as tokenizers on {len(battery)} awkward texts"
        reason = f"gigatoken gives other ids for this tokenizer ({difference.describe()})"
    if wanted == "gigatoken":
        raise InputError(
            f"--encoder gigatoken cannot be used: {reason}",
            hint="write --encoder tokenizers, or leave it out",
        )
    reference = ReferenceEncoder(tokenizer)
    return reference, f"{reference.name} (slow): {reason}"


@dataclass(frozen=True)
class Difference:
    """The first place where two encoders disagree."""

    text: str
    expected: list[int]
    got: list[int]

    def describe(self) -> str:
        """Name the text and both ids, shortened to where they part."""
        at = next(
            (i for i, (a, b) in enumerate(zip(self.expected, self.got, strict=False)) if a != b),
            min(len(self.expected), len(self.got)),
        )
        return (
            f"text {self.text[:200]!r}: from token {at} on, tokenizers gives {self.expected[at : at + 8]}, "
            f"the fast encoder {self.got[at : at + 8]}"
        )


def compare(tokenizer: Tokenizer, encoder: Encoder, documents: Sequence[str]) -> Difference | None:
    """Encode documents with both the encoder and the reference; return the first difference, if any."""
    import numpy as np

    expected = ReferenceEncoder(tokenizer).encode(documents)
    got = encoder.encode(documents)
    if np.array_equal(expected.lengths, got.lengths) and np.array_equal(expected.ids, got.ids):
        return None
    for text, one, other in zip(documents, expected.rows(), got.rows(), strict=True):
        if not np.array_equal(one, other):
            return Difference(text, one.tolist(), other.tolist())
    raise AssertionError("the batches differ but no document does")


def require_equal(tokenizer: Tokenizer, encoder: Encoder, documents: Sequence[str], where: str) -> None:
    """Stop if the encoder disagrees with the reference on a sample of a shard."""
    if difference := compare(tokenizer, encoder, documents):
        raise TokenizerError(
            f"{encoder.name} and tokenizers disagree: {difference.describe()}",
            where=where,
            hint="write --encoder tokenizers, and please report the text above",
        )
