"""Documents to token ids: a fast encoder where it is proven equal to the reference, the reference everywhere else.

`gigatoken` is about 25 times faster than `tokenizers` and reads the same tokenizer.json, but it is another
implementation. So it is never trusted blindly: a set of edge-case texts decides at the start whether it supports a
tokenizer at all, and a sample of every shard is encoded by both. A difference stops the work.
"""

from __future__ import annotations

import os
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokenize.unicode_gaps import documents_with_gaps
from trainshed.errors import InputError, TokenizerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


EncoderName = Literal["auto", "gigatoken", "tokenizers"]

CACHE_GROWTH_BYTES = 256 * 1024 * 1024
"""How much the memory of this process may grow before the fast encoder is replaced by one with an empty cache."""

BATCHES_BETWEEN_RESETS = 16
"""Batches between two replacements at least, in case something else takes the memory."""


# Shapes:  N documents in a batch, T tokens of the batch.


@dataclass(frozen=True)
class EncodedBatch:
    """A batch of documents as ids: `ids` [T] back to back, `lengths` [N] tokens per document."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int] | NDArray[np.uint32]]) -> EncodedBatch:
        """Put the ids of all documents back to back."""
        import numpy as np

        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.empty(int(lengths.sum()), dtype=np.uint32)
        at = 0
        for row in rows:
            ids[at : at + len(row)] = row
            at += len(row)
        return cls(ids, lengths)

    def split(self, counts: Sequence[int]) -> list[EncodedBatch]:
        """Cut the batch into batches of `counts` documents."""
        import numpy as np

        ends = np.concatenate(([0], np.cumsum(self.lengths)))
        cuts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        return [EncodedBatch(self.ids[ends[a] : ends[b]], self.lengths[a:b]) for a, b in pairwise(cuts.tolist())]

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

    def encode(self, documents: Sequence[str]) -> EncodedBatch:
        """Encode a batch."""
        ...


class ReferenceEncoder:
    """`tokenizers`, whose ids are right by definition."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        import tokenizers

        self._backend = tokenizer.backend
        self.name = f"tokenizers {tokenizers.__version__}"

    def encode(self, documents: Sequence[str]) -> EncodedBatch:
        """Encode a batch."""
        encodings = self._backend.encode_batch_fast(list(documents), add_special_tokens=False)
        return EncodedBatch.from_rows([encoding.ids for encoding in encodings])


class FastEncoder:
    """`gigatoken`; `parallel` lets it use several cores, otherwise parallelism comes from worker processes.

    The reference encodes the few documents with letters that gigatoken's Unicode tables class differently. Gigatoken
    caches every word it has met, so it is replaced by a new one when the cache takes too much memory.
    """

    def __init__(self, tokenizer: Tokenizer, *, parallel: bool = False) -> None:
        from importlib.metadata import version

        self._tokenizer, self._parallel = tokenizer, parallel
        self._backend = self._new_backend()
        self.name = f"gigatoken {version('gigatoken')}"
        self._baseline_bytes: int | None = None
        self._batches = 0
        self._reset_lock = threading.Lock()

    def _new_backend(self) -> Any:
        import gigatoken

        return gigatoken.Tokenizer.from_json(self._tokenizer.json).backend

    def _bound_memory(self) -> None:
        """Replace gigatoken if memory has grown too much since the first batch, when blocks in flight have theirs."""
        if not self._reset_lock.acquire(blocking=False):
            return
        try:
            self._batches += 1
            resident = resident_bytes()
            if self._baseline_bytes is None:
                self._baseline_bytes = resident
            elif resident - self._baseline_bytes > CACHE_GROWTH_BYTES and self._batches >= BATCHES_BETWEEN_RESETS:
                self._backend, self._batches = self._new_backend(), 0
        finally:
            self._reset_lock.release()

    def encode(self, documents: Sequence[str]) -> EncodedBatch:
        """Encode a batch."""
        encoded = self._encode(documents)
        self._bound_memory()
        gap_documents = documents_with_gaps(documents)
        if not gap_documents:
            return encoded
        rows = encoded.rows()
        reference = ReferenceEncoder(self._tokenizer).encode([documents[number] for number in gap_documents])
        for number, row in zip(gap_documents, reference.rows(), strict=True):
            rows[number] = row
        return EncodedBatch.from_rows(rows)

    def _encode(self, documents: Sequence[str]) -> EncodedBatch:
        import numpy as np

        if not documents:
            return EncodedBatch.from_rows([])
        layout = self._backend.encode_batch(list(documents), parallel=self._parallel).layout
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[int(offsets[0]) : int(offsets[-1])]
        return EncodedBatch(ids, np.diff(offsets))


def resident_bytes() -> int:
    """Return how much memory of this process is in RAM."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def choose_encoder(
    tokenizer: Tokenizer, requested: EncoderName = "auto", *, parallel: bool = False
) -> tuple[Encoder, str]:
    """Return the encoder to use and the reason for it in a sentence."""
    if requested == "tokenizers":
        return ReferenceEncoder(tokenizer), "tokenizers, as asked"
    try:
        fast: Encoder = FastEncoder(tokenizer, parallel=parallel)
    except ImportError:
        reason = "gigatoken is not installed"
    except Exception as error:  # its loader raises ValueError for what it does not support, and more
        reason = f"gigatoken does not support this tokenizer ({str(error).splitlines()[0]})"
    else:
        texts = edge_case_texts(tokenizer)
        difference = compare_to_reference(tokenizer, fast, texts)
        if difference is None:
            return fast, f"{fast.name}: same ids as tokenizers on {len(texts)} awkward texts"
        reason = f"gigatoken gives other ids for this tokenizer ({difference.describe()})"
    if requested == "gigatoken":
        raise InputError(
            f"--encoder gigatoken cannot be used: {reason}",
            hint="write --encoder tokenizers, or leave it out",
        )
    reference = ReferenceEncoder(tokenizer)
    return reference, f"{reference.name} (slow): {reason}"


@dataclass(frozen=True)
class EncodingMismatch:
    """The first place where two encoders disagree."""

    text: str
    expected: list[int]
    got: list[int]

    def describe(self) -> str:
        """Return the text and both ids from the first difference on, shortened."""
        at = next(
            (i for i, (a, b) in enumerate(zip(self.expected, self.got, strict=False)) if a != b),
            min(len(self.expected), len(self.got)),
        )
        return (
            f"text {self.text[:200]!r}: from token {at} on, tokenizers gives {self.expected[at : at + 8]}, "
            f"the fast encoder {self.got[at : at + 8]}"
        )


def compare_to_reference(tokenizer: Tokenizer, encoder: Encoder, documents: Sequence[str]) -> EncodingMismatch | None:
    """Encode documents with both the encoder and the reference; return the first difference, if any."""
    import numpy as np

    expected = ReferenceEncoder(tokenizer).encode(documents)
    got = encoder.encode(documents)
    if np.array_equal(expected.lengths, got.lengths) and np.array_equal(expected.ids, got.ids):
        return None
    for text, one, other in zip(documents, expected.rows(), got.rows(), strict=True):
        if not np.array_equal(one, other):
            return EncodingMismatch(text, one.tolist(), other.tolist())
    raise AssertionError("the batches differ but no document does")


def require_reference_ids(tokenizer: Tokenizer, encoder: Encoder, documents: Sequence[str], where: str) -> None:
    """Stop if the encoder disagrees with the reference on a sample of a shard."""
    if difference := compare_to_reference(tokenizer, encoder, documents):
        raise TokenizerError(
            f"{encoder.name} and tokenizers disagree: {difference.describe()}",
            where=where,
            hint="write --encoder tokenizers, and please report the text above",
        )


MAX_ADDED_TOKENS = 64
"""How many added tokens are tried; a tokenizer with thousands has them in series that are all alike."""

RECENT_CHARACTERS = "\u1c89\u0897\u1acf\u20c1\U0001fac8\U00011b60\U0001cc00\U0001e6ff\U000323b0"
"""Letters, marks, numbers and signs added in Unicode 15 to 17: tables of different years class them differently."""

EDGE_CASE_TEXTS = (
    "",
    " ",
    "  leading and trailing  ",
    "a\nb\r\nc\td\u00a0e\u3000f\u2028g\u200bh\x0bi\x0cj\x85k\x1cl",
    "it's THEY'LL we've I'D you're O'Neil's 'tis it’s 'ſ",
    "1234567 3.14159 1e-10 0x1F 12,345,678 ½ ² Ⅻ ٣٤٥",
    "Straße naïve café cafe\u0301 Ångström A\u030angstro\u0308m ﬁne ﬃ İ K Å Ω 豈 각 \u1112\u1161\u11ab",
    "日本語のテキスト 한국어 텍스트 中文文本 ไทย العربية עברית हिन्दी",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \u0000\u0001\u001b[0m \ufffd \ufeff \ue000 \U0010ffff",
    "def f(x):\n    return  x**2\n\n\n\t\tif x:\n\t\t\tpass\n" + " " * 97 + "end",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\Temp\\file.txt",
    "=" * 300 + "\n" * 70 + "ab" * 500,
    "▁ ▁▁word Ġ Ċ Ã© <0x0A> </w> ## [UNK] <unk> <pad>",
    *(f"{c}'s x{c}.s 1{c}2 {c}{c}" for c in RECENT_CHARACTERS),
)
"""Odd spaces, scripts, contractions, numbers, unnormalised letters, controls, long runs, other tokenizers' marks."""

TOKEN_CONTEXTS = ("{}", "before {} after", "word{}word", "{}{}x", " \n {} \n x", "1{}2", "日{}本", "_{}_", ".{},")
"""Contexts of an added token: its flags decide whether it counts as one there, and which spaces it takes with it."""


def edge_case_texts(tokenizer: Tokenizer) -> list[str]:
    """Return the texts above, and the tokenizer's own added tokens in every context."""
    texts = list(EDGE_CASE_TEXTS)
    tokens = _tokens_to_try(list(tokenizer.backend.get_added_tokens_decoder().values()))
    for token in tokens:
        spellings = dict.fromkeys((token, token[:-1], token[1:], token.upper(), token.lower(), *_normal_forms(token)))
        texts += [around.format(*[spelling] * 2) for spelling, around in product(spellings, TOKEN_CONTEXTS)]
    texts += [overlap for one, other in product(tokens, tokens) for overlap in _overlaps(one, other)]
    return texts


def _tokens_to_try(added: list[Any]) -> list[str]:
    """Return the added tokens to try: those with special flags first, then special ones, then some of the others."""

    def plainness(token: Any) -> tuple[bool, bool]:
        return (not (token.single_word or token.lstrip or token.rstrip or token.normalized), not token.special)

    ranked = sorted(added, key=plainness)
    kept, rest = ranked[: MAX_ADDED_TOKENS // 2], ranked[MAX_ADDED_TOKENS // 2 :]
    step = max(1, -(-len(rest) * 2 // MAX_ADDED_TOKENS))
    return [token.content for token in kept + rest[::step]]


def _normal_forms(text: str) -> Iterator[str]:
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        yield unicodedata.normalize(form, text)


def _overlaps(one: str, other: str) -> Iterator[str]:
    """Yield texts in which two tokens share characters, and texts that just miss it."""
    if one != other and one in other:
        yield from (other, other[:-1], other[1:], f"{other[:-1]}x", f"x{other[1:]}")
    for size in range(1, min(len(one), len(other))):
        if one.endswith(other[:size]):
            yield one + other[size:]
