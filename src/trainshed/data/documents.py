"""A block of text to documents, and documents to tokens: the work of one worker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import orjson

from trainshed.data.encoders import Encoded, Encoder, EncoderName, choose_encoder, require_equal
from trainshed.data.tokenizer import Tokenizer
from trainshed.errors import BadDocument

if TYPE_CHECKING:
    from trainshed.data.reading import Block

OnBadLine = Literal["stop", "skip"]

SAMPLE_BYTES = 256 * 1024
"""How much of a shard is encoded by both encoders: enough to meet most kinds of text, a blink for the slow one."""

_BOM = b"\xef\xbb\xbf"
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n[\s]*")

# Shapes:  N documents in a block, T tokens of the block with BOS and EOD.


@dataclass(frozen=True)
class TokenizeOptions:
    """What every worker must know: the same for all blocks of a preparation."""

    tokenizer: Tokenizer
    eod: int | None
    bos: int | None
    dtype: str
    on_bad_line: OnBadLine = "stop"
    encoder: EncoderName = "auto"


@dataclass(frozen=True)
class Tokens:
    """A block as tokens: `data` is T tokens in the file's dtype, `lengths` N int32 (0: an empty document)."""

    data: bytes
    lengths: bytes
    documents: int
    text_bytes: int
    bad_lines: list[tuple[int, str]] = field(default_factory=list)


class BlockTokenizer:
    """Turns blocks into tokens; one per worker."""

    def __init__(self, options: TokenizeOptions) -> None:
        self._options = options
        self.encoder: Encoder
        self.encoder, self.reason = choose_encoder(options.tokenizer, options.encoder)

    def tokens(self, block: Block, key: str, where: str, *, compare: bool) -> Tokens:
        """Parse, encode and lay out one block; `compare` proves a sample of it against the reference first."""
        documents, bad_lines = extract(block, key, where, self._options.on_bad_line)
        if compare and self._options.encoder != "tokenizers":
            require_equal(self._options.tokenizer, self.encoder, _sample(documents), where)
        data, lengths = self.lay_out(self.encoder.encode(documents))
        # Asking whether a string is ASCII costs nothing, and most are: then characters are bytes.
        text_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in documents)
        return Tokens(data, lengths, len(documents), text_bytes, bad_lines)

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


def extract(block: Block, key: str, where: str, on_bad_line: OnBadLine) -> tuple[list[str], list[tuple[int, str]]]:
    """Return a block's documents, and its bad lines as (number, what is wrong) when they are to be skipped."""
    payload = block.payload
    if isinstance(payload, bytes) and block.first == 1 and payload.startswith(_BOM):
        payload = payload[len(_BOM) :]
    if block.kind == "jsonl" and isinstance(payload, bytes):
        lines = payload.split(b"\n")
        loads = orjson.loads
        try:
            documents = [loads(line)[key] for line in lines if line]
            if all(type(document) is str for document in documents):
                return documents, []
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
            pass
        # Something is wrong: go through it again line by line to say what and where.
        found = (_json_document(line, key) for line in lines)
    elif block.kind == "strings":
        found = (_cell(value, key) for value in payload)
    elif isinstance(payload, bytes):
        found = _text_documents(block.kind, payload)
    else:
        raise AssertionError(block.kind)
    documents, bad_lines = [], []
    for number, document in enumerate(found, start=block.first):
        if isinstance(document, str):
            documents.append(document)
        elif document is not None:
            if on_bad_line == "stop":
                raise BadDocument(
                    document.what,
                    where=f"{where}:{number}" if block.kind != "strings" else f"{where}, row {number}",
                    hint=f"{document.hint}, or write --on-bad-line skip to leave such lines out and count them",
                )
            bad_lines.append((number, document.what))
    return documents, bad_lines


@dataclass(frozen=True)
class _Bad:
    what: str
    hint: str


def _json_document(line: bytes, key: str) -> str | _Bad | None:
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


def _text_documents(kind: str, payload: bytes) -> Iterator[str | _Bad | None]:
    """Documents of plain text. For blank-line documents the number counts documents' first lines only roughly."""
    if kind == "line":
        for line in payload.split(b"\n"):
            text = _utf8(line.rstrip(b"\r"))
            yield text if text else None
        return
    text = _utf8(payload)
    if kind == "file" or not isinstance(text, str):
        yield text
    else:
        yield from (part for part in _BLANK_LINE.split(text) if part.strip())


def _utf8(data: bytes) -> str | _Bad:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start)
        return _Bad(f"invalid UTF-8 ({line} lines further on)" if line else "invalid UTF-8", "write the file as UTF-8")


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
