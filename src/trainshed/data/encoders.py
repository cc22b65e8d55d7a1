"""Text to ids: a fast encoder where it is proven equal, the reference everywhere else.

`gigatoken` is some 25 times faster than `tokenizers` and reads the same tokenizer.json, but it reimplements it. It is
therefore never trusted blindly: a battery of awkward texts decides at the start whether it supports a tokenizer at
all, and a sample of every shard is encoded by both (`Encoder.compare`); a difference stops the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trainshed.data.tokenizer import Tokenizer
from trainshed.errors import InputError, TokenizerError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EncoderName = Literal["auto", "gigatoken", "tokenizers"]

# Shapes:  N documents in a batch, T tokens of the batch.


@dataclass(frozen=True)
class Encoded:
    """A batch of documents as ids: `ids` [T] back to back, `lengths` [N] tokens per document."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]


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
        import numpy as np

        encodings = self._backend.encode_batch_fast(list(documents), add_special_tokens=False)
        rows = [encoding.ids for encoding in encodings]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.empty(int(lengths.sum()), dtype=np.uint32)
        at = 0
        for row in rows:
            ids[at : at + len(row)] = row
            at += len(row)
        return Encoded(ids, lengths)


class FastEncoder:
    """`gigatoken`, single-threaded: parallelism comes from worker processes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from importlib.metadata import version

        import gigatoken

        self._backend: Any = gigatoken.Tokenizer.from_json(tokenizer.json).backend
        self.name = f"gigatoken {version('gigatoken')}"

    def encode(self, documents: Sequence[str]) -> Encoded:
        """Encode a batch."""
        import numpy as np

        if not documents:
            return Encoded(np.empty(0, np.uint32), np.empty(0, np.int64))
        layout = self._backend.encode_batch(list(documents), parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[int(offsets[0]) : int(offsets[-1])]
        return Encoded(ids, np.diff(offsets))


def choose_encoder(tokenizer: Tokenizer, wanted: EncoderName = "auto") -> tuple[Encoder, str]:
    """Return the encoder to use and the reason for it in a sentence."""
    if wanted == "tokenizers":
        return ReferenceEncoder(tokenizer), "tokenizers, as asked"
    try:
        fast: Encoder = FastEncoder(tokenizer)
    except ImportError:
        reason = "gigatoken is not installed"
    except Exception as error:  # its loader raises ValueError for what it does not support, and more
        reason = f"gigatoken does not support this tokenizer ({str(error).splitlines()[0]})"
    else:
        difference = compare(tokenizer, fast, _battery(tokenizer))
        if difference is None:
            return fast, f"{fast.name}: same ids as tokenizers on {len(_battery(tokenizer))} awkward texts"
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
    expected_rows = np.split(expected.ids, np.cumsum(expected.lengths)[:-1])
    got_rows = np.split(got.ids, np.cumsum(got.lengths)[:-1])
    for text, one, other in zip(documents, expected_rows, got_rows, strict=True):
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


def _battery(tokenizer: Tokenizer) -> list[str]:
    """Texts on which reimplementations go wrong: special tokens in text, odd spaces, scripts, long runs, controls."""
    texts = [
        "",
        " ",
        "  leading and trailing  ",
        "a\nb\r\nc\td\u00a0e\u3000f\u2028g\u200bh",
        "it's THEY'LL we've I'D you're O'Neil's 'tis",
        "1234567 3.14159 1e-10 0x1F 12,345,678 ½ ² Ⅻ ٣٤٥",
        "Straße naïve café cafe\u0301 Ångström A\u030angstro\u0308m ﬁne ﬃ",
        "日本語のテキスト 한국어 텍스트 中文文本 ไทย العربية עברית हिन्दी",
        "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \u0000\u0001\u001b[0m \ufffd \U0010ffff",
        "def f(x):\n    return  x**2\n\n\n\t\tif x:\n\t\t\tpass\n" + " " * 97 + "end",
        "https://example.org/a?b=c&d=%20#e user@example.org C:\\Temp\\file.txt",
        "=" * 300 + "\n" * 70 + "ab" * 500,
        "▁ ▁▁word Ġ Ċ Ã© <0x0A> </w> ## [UNK] <unk> <pad>",
    ]
    for special in tokenizer.special_tokens[:8]:
        texts += [
            special,
            f"before {special} after",
            f"{special}{special}x",
            f"word{special}word",
            special[:-1],
        ]
    return texts
