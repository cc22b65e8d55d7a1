"""A block of text to documents, and documents to tokens: the work of one worker."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import orjson

from trainshed.data.encode.encoders import Encoded, Encoder, EncoderName, choose_encoder, require_equal
from trainshed.data.encode.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trainshed.data.text.reading import Block

OnBadLine = Literal["stop", "skip"]

SAMPLE_BYTES = 64 * 1024
"""How much of a shard is encoded by both encoders: enough to meet most kinds of text, a blink for the slow one."""

_BOM = b"\xef\xbb\xbf"
_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")
_LEADING_BLANK_LINES = re.compile(rb"(?:[ \t\r]*\n)*")

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
class BadLine:
    """A line or row without a document: its number, counted from 1 at the start of the piece, and what to do."""

    number: int
    what: str
    hint: str


@dataclass(frozen=True)
class Tokens:
    """A block as tokens: `data` is T tokens in the file's dtype, `lengths` N int32 (0: an empty document)."""

    data: bytes
    lengths: bytes
    documents: int
    text_bytes: int
    bad_lines: list[BadLine] = field(default_factory=list)


class BlockToTokenize(Protocol):
    """What is known of a block: see `dealing.Job`."""

    @property
    def block(self) -> Block:
        """The text."""
        ...

    @property
    def key(self) -> str:
        """The JSON key of the text."""
        ...

    @property
    def where(self) -> str:
        """The file, for errors."""
        ...

    @property
    def compare(self) -> bool:
        """Whether to prove a sample of it against the reference first."""
        ...


class BlockTokenizer:
    """Turns blocks into tokens; `parallel` lets the encoder use several cores by itself."""

    def __init__(self, options: TokenizeOptions, *, parallel: bool = False) -> None:
        self._options = options
        self.encoder: Encoder
        self.encoder, self.reason = choose_encoder(options.tokenizer, options.encoder, parallel=parallel)

    def tokens(self, job: BlockToTokenize) -> Tokens:
        """Parse, encode and lay out one block."""
        (tokens,) = self.tokens_together([job])
        return tokens

    def tokens_together(self, jobs: Sequence[BlockToTokenize]) -> list[Tokens]:
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


def extract(block: Block, key: str) -> tuple[list[str], list[BadLine]]:
    """Return a block's documents, and the lines that hold none though they are not blank."""
    payload = block.payload
    if isinstance(payload, bytes) and block.first == 1 and payload.startswith(_BOM):
        payload = payload[len(_BOM) :]
    if block.kind == "strings" or not isinstance(payload, bytes):
        found: Iterable[tuple[int, _Found]] = enumerate(_cell(value, key) for value in payload)
    elif block.kind == "jsonl":
        lines = payload.split(b"\n")
        loads = orjson.loads
        try:
            documents = [loads(line)[key] for line in lines if line]
            if all(type(document) is str for document in documents):
                return documents, []
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
            pass
        # Something is wrong: go through it again line by line to say what and where.
        found = enumerate(_json_document(line, key) for line in lines)
    elif block.kind == "line":
        found = enumerate(_utf8(line.rstrip(b"\r"))[1] for line in payload.split(b"\n"))
    elif block.kind == "blank_line":
        found = _paragraphs(payload)
    else:
        found = [_utf8(payload)]
    documents, bad_lines = [], []
    for offset, document in found:
        if isinstance(document, str):
            documents.append(document)
        elif document is not None:
            bad_lines.append(BadLine(block.first + offset, document.what, document.hint))
    return documents, bad_lines


@dataclass(frozen=True)
class _Bad:
    what: str
    hint: str


_Found = str | _Bad | None
"""What a line holds: a document, something wrong, or nothing."""


def _json_document(line: bytes, key: str) -> _Found:
    """The document of a JSONL line; None for a blank line."""
    if not line.strip():
        return None
    try:
        row: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        try:
            line.decode()
        except UnicodeDecodeError as broken:
            return _Bad(f"invalid UTF-8 at byte {broken.start}", "write the file as UTF-8")
        return _Bad(f"broken JSON: {error}", 'each line must be one JSON object such as {"' + key + '": "…"}')
    if not isinstance(row, dict):
        return _Bad(f"a JSON {_json_name(row)}, not an object", 'write {"' + key + '": "…"}')
    if key not in row:
        return _Bad(
            f"no key {key!r}",
            f"its keys are {', '.join(map(repr, row)) or 'none'}: write --key with the right one",
        )
    value = row[key]
    if not isinstance(value, str):
        return _Bad(f"{key!r} holds a JSON {_json_name(value)}, not a string", "write the text as a string")
    return value


def _cell(value: object, key: str) -> str | _Bad:
    if value is None:
        return _Bad(f"no text: {key!r} is null", "fill or drop such rows")
    if not isinstance(value, str):
        return _Bad(f"invalid UTF-8 in {key!r}", "write the column as UTF-8")
    return value


def _paragraphs(payload: bytes) -> Iterator[tuple[int, _Found]]:
    """Documents between blank lines. Blocks end inside such a gap, so each one is trimmed of what is left of it."""
    start, line = 0, 0
    for end in (*(gap.start() for gap in _BLANK_LINES.finditer(payload)), len(payload)):
        begin = min(_LEADING_BLANK_LINES.match(payload, start).end(), end)  # type: ignore[union-attr]
        line += payload.count(b"\n", start, begin)
        text = payload[begin:end].rstrip(b"\r\n")
        if text.strip():
            offset, document = _utf8(text)
            yield line + offset, document
        line += payload.count(b"\n", begin, end)
        start = end


def _utf8(data: bytes) -> tuple[int, _Found]:
    """The text, or the line (counted from 0) at which it is broken; None for no text."""
    try:
        return 0, data.decode() or None
    except UnicodeDecodeError as error:
        line_start = data.rfind(b"\n", 0, error.start) + 1
        what = f"invalid UTF-8 at byte {error.start - line_start}"
        return data.count(b"\n", 0, error.start), _Bad(what, "write the file as UTF-8")


def _json_name(value: object) -> str:
    names: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


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
