"""A block of text to documents, and the lines that hold none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import orjson

from trainshed.errors import BadDocument

if TYPE_CHECKING:
    from trainshed.data.text.reading import Block, Piece

OnBadLine = Literal["stop", "skip"]

_BOM = b"\xef\xbb\xbf"
_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")
_LEADING_BLANK_LINES = re.compile(rb"(?:[ \t\r]*\n)*")


@dataclass(frozen=True)
class BadLine:
    """A line or row without a document: its number, counted from 1 at the start of the piece, and what to do."""

    number: int
    what: str
    hint: str

    def as_error(self, piece: Piece, number: int) -> BadDocument:
        """Return the error that this line is where lines are not to be skipped; `number` counts within the file."""
        return BadDocument(
            self.what,
            where=place_of(piece, number),
            hint=f"{self.hint}, or write --on-bad-line skip to leave such lines out and count them",
        )


def place_of(piece: Piece, number: int) -> str:
    """Name a line or row of a file."""
    return f"{piece.shown}:{number}" if piece.format.by_line else f"{piece.shown}, row {number}"


def extract(block: Block, key: str) -> tuple[list[str], list[BadLine]]:
    """Return a block's documents, and the lines that hold none though they are not blank."""
    payload = block.payload
    if isinstance(payload, bytes) and block.first == 1 and payload.startswith(_BOM):
        payload = payload[len(_BOM) :]
    if block.kind == "rows":
        found: Iterable[tuple[int, _Found]] = enumerate(_row_document(row, key) for row in payload)
    elif block.kind == "strings" or not isinstance(payload, bytes):
        found = enumerate(_cell(value, key) for value in payload)
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
    return _row_document(row, key)


def _row_document(row: Any, key: str) -> _Found:
    """The document of a JSON object."""
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
