"""A corpus as a deterministic stream of blocks, and the documents in each block.

Reading is one pass: bytes arrive from any store, are hashed, decompressed and cut at document boundaries; nothing is
written to disk. A block is a few megabytes of whole documents with its file and line. `extract_documents` parses a
block; it runs in the workers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import orjson

from trainshed.data.text.document_reader import TEXT_FORMATS, read_registered
from trainshed.data.text.formats import (
    DocumentBoundary,
    LongRow,
    TextFileFormat,
    count_row_groups,
    count_rows_before_group,
    decompress,
    read_csv_column,
    read_csv_rows,
    read_json_array,
    read_parquet_batches,
    refuse_json_array,
)
from trainshed.errors import BadDocument, InputError
from trainshed.redaction import shown_address

if TYPE_CHECKING:
    from trainshed.storage import Store


BLOCK_BYTES = 4 * 1024 * 1024
READ_BYTES = 1024 * 1024

TextBlockKind = Literal["jsonl", "file", "line", "blank_line", "strings", "rows"]
DELIMITERS = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True)
class InputSlice:
    """One input file, or the part of it that a shard reads.

    `start` and `end` count bytes in text files and row groups in parquet files; a whole file has `end=None`. A line
    belongs to the slice in which it starts. Where documents are text, `columns` is None; else they are whole rows, and
    `columns` names those that are read. `rows` [first, last) are the rows of the file that are read, where not all
    are: a row is a document, a line that is not blank, or a row of a table.
    """

    address: str
    size: int
    version: str
    format: TextFileFormat
    key: str = "text"
    documents: DocumentBoundary = "file"
    start: int = 0
    end: int | None = None
    columns: tuple[str, ...] | None = None
    rows: tuple[int, int] | None = None

    @property
    def display_address(self) -> str:
        """The address for messages and manifests: `address` itself may be a signed URL."""
        return shown_address(self.address)

    @property
    def whole(self) -> bool:
        """Whether the slice is a whole file."""
        return self.start == 0 and self.end is None

    @property
    def splittable(self) -> bool:
        """Whether several shards can share the file: a reader must find documents from the middle of it."""
        if self.format.kind == "parquet" or self.rows is not None:
            return True
        by_line = self.format.kind == "jsonl" or (self.format.kind == "text" and self.documents == "line")
        return by_line and self.format.compression is None

    @property
    def read_bytes(self) -> int:
        """About how many bytes reading it takes, for progress and balance."""
        if self.format.kind == "parquet" or self.whole:
            return self.size
        return (self.size if self.end is None else self.end) - self.start


@dataclass(frozen=True)
class TextBlock:
    """Whole documents of one slice.

    `first_line` is the number of its first line (or row), counted from 1 at the start of the slice. Reading resumes
    after it at `resume_position`: decompressed bytes from the start of the slice, or rows.
    """

    kind: TextBlockKind
    payload: bytes | list[Any]
    first_line: int
    resume_position: int
    bytes_read: int


class InputReader:
    """Reads one slice; `sha256` is known once every block has been taken."""

    def __init__(self, input_slice: InputSlice, store: Store, path: str) -> None:
        self.input_slice, self._store, self._path = input_slice, store, path
        self._digest = hashlib.sha256()
        self._bytes_read = 0
        self.sha256: str | None = None

    def blocks(self, after: int = 0) -> Iterator[TextBlock]:
        """Yield the blocks after position `after` (0: all)."""
        rows, start, first_row, bytes_read = self.input_slice.rows, 0, 0, 0
        for block in self._all_blocks():
            bytes_read += block.bytes_read
            if block.resume_position > after:
                # A store may cut its chunks, and so our blocks, differently each time.
                rest = _skip(block, max(after - start, 0))
                if rows is not None:
                    skipped = first_row + _count_rows(block) - _count_rows(rest)
                    rest = _select_rows(rest, rows[0] - skipped, rows[1] - skipped)
                yield replace(rest, bytes_read=bytes_read)
                bytes_read = 0
            if rows is not None:
                first_row += _count_rows(block)
            start = block.resume_position
        self.sha256 = f"sha256:{self._digest.hexdigest()}"

    def count_rows(self) -> int:
        """Return how many rows a slice has. It reads them all, except those of parquet."""
        input_slice = self.input_slice
        if input_slice.format.kind == "parquet":
            return count_rows_before_group(self._store, self._path, input_slice.display_address, None)
        return sum(_count_rows(block) for block in self._all_blocks())

    def _all_blocks(self) -> Iterator[TextBlock]:
        input_slice = self.input_slice
        kind = input_slice.format.kind
        if kind == "parquet":
            yield from self._parquet_blocks()
        elif kind == "json":
            yield from self._array_blocks()
        elif kind == "jsonl":
            yield from self._text_blocks("jsonl")
        elif kind in DELIMITERS:
            yield from self._csv_blocks()
        elif input_slice.columns is not None:
            raise InputError(
                f"a file in the format {kind} holds text, and no rows with columns",
                where=input_slice.display_address,
                hint="conversations are read from .jsonl, .json, .parquet, .csv and .tsv files",
            )
        elif TEXT_FORMATS.owner(kind) is not None:
            texts = read_registered(kind, input_slice.key, self._plain(), input_slice.display_address)
            yield from self._row_blocks("strings", texts)
        else:
            yield from self._text_blocks(input_slice.documents)

    def _text_blocks(self, kind: TextBlockKind) -> Iterator[TextBlock]:
        position, line = 0, 1
        for data in _cut_at_boundaries(self._plain(), _boundary_finder(kind)):
            if kind == "jsonl" and position == 0 and self.input_slice.start == 0:
                refuse_json_array(data, self.input_slice.display_address)
            position += len(data)
            yield TextBlock(kind, data, line, position, self._take_bytes_read())
            line += data.count(b"\n")

    def _csv_blocks(self) -> Iterator[TextBlock]:
        input_slice = self.input_slice
        delimiter, where = DELIMITERS[input_slice.format.kind], input_slice.display_address
        if input_slice.columns is None:
            yield from self._row_blocks("strings", read_csv_column(self._plain(), delimiter, input_slice.key, where))
        else:
            yield from self._row_blocks("rows", read_csv_rows(self._plain(), delimiter, input_slice.columns, where))

    def _row_blocks(self, kind: TextBlockKind, contents: Iterable[Any]) -> Iterator[TextBlock]:
        rows: list[Any] = []
        size, first = 0, 1
        for row in contents:
            rows.append(row)
            size += _row_size(row)
            if size >= BLOCK_BYTES:
                yield self._rows_block(kind, rows, first)
                rows, size, first = [], 0, first + len(rows)
        if rows:
            yield self._rows_block(kind, rows, first)

    def _array_blocks(self) -> Iterator[TextBlock]:
        rows = read_json_array(self._plain(), self.input_slice.display_address)
        block_rows = max(1, BLOCK_BYTES * len(rows) // max(self.input_slice.size, 1))
        for start in range(0, len(rows), block_rows):
            yield self._rows_block("rows", rows[start : start + block_rows], start + 1)

    def _rows_block(self, kind: TextBlockKind, rows: list[Any], first: int) -> TextBlock:
        return TextBlock(kind, rows, first, first - 1 + len(rows), self._take_bytes_read())

    def _take_bytes_read(self) -> int:
        read, self._bytes_read = self._bytes_read, 0
        return read

    def _plain(self) -> Iterator[bytes]:
        """Yield the bytes of the slice, counted, hashed and decompressed."""
        raw = self._counted(_lines_of_slice(self._store, self._path, self.input_slice))
        return decompress(raw, self.input_slice.format.compression, self.input_slice.display_address)

    def _counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._digest.update(chunk)
            self._bytes_read += len(chunk)
            yield chunk

    def _parquet_blocks(self) -> Iterator[TextBlock]:
        input_slice, first, reported = self.input_slice, 1, 0
        kind: TextBlockKind = "strings" if input_slice.columns is None else "rows"
        for batch in read_parquet_batches(
            self._store,
            self._path,
            input_slice.display_address,
            input_slice.key if input_slice.columns is None else input_slice.columns,
            input_slice.start,
            input_slice.end,
        ):
            self._digest.update(batch.fingerprint)
            read = int(input_slice.size * batch.share_done) - reported
            reported += read
            yield TextBlock(kind, batch.contents, first, first - 1 + len(batch.contents), read)
            first += len(batch.contents)


def _row_size(row: Any) -> int:
    if isinstance(row, dict):
        return sum(map(len, row.values()))
    return len(row) if isinstance(row, str | bytes) else 0


def _skip(block: TextBlock, count: int) -> TextBlock:
    """Leave out the first bytes of a block (whole lines), or its first rows."""
    if count == 0:
        return block
    lines = block.payload.count(b"\n", 0, count) if isinstance(block.payload, bytes) else count
    return replace(block, payload=block.payload[count:], first_line=block.first_line + lines)


def _count_rows(block: TextBlock) -> int:
    if not isinstance(block.payload, bytes):
        return len(block.payload)
    if block.kind == "file":
        return 1
    return sum(1 for line in block.payload.split(b"\n") if line.strip())


def _select_rows(block: TextBlock, first: int, last: int) -> TextBlock:
    """Keep rows [first, last) of a block; lines are made blank, so that those after them keep their numbers."""
    count = _count_rows(block)
    first, last = max(first, 0), min(last, count)
    if first == 0 and last == count:
        return block
    if not isinstance(block.payload, bytes):
        return replace(block, payload=block.payload[first : max(last, first)], first_line=block.first_line + first)
    if block.kind == "file":
        return replace(block, payload=b"")
    row, kept = 0, []
    for line in block.payload.split(b"\n"):
        is_row = bool(line.strip())
        kept.append(line if is_row and first <= row < last else b"")
        row += is_row
    return replace(block, payload=b"\n".join(kept))


def _boundary_finder(kind: TextBlockKind) -> Callable[[bytes], int] | None:
    """Return a function that finds the last document boundary of a chunk: the offset after it, 0 if there is none."""
    if kind == "file":
        return None
    if kind == "blank_line":
        return lambda chunk: max(
            (at + len(mark) for mark in (b"\n\n", b"\n\r\n") if (at := chunk.rfind(mark)) >= 0), default=0
        )
    return lambda chunk: chunk.rfind(b"\n") + 1


def _cut_at_boundaries(chunks: Iterable[bytes], boundary: Callable[[bytes], int] | None) -> Iterator[bytes]:
    """Gather chunks into blocks that end at a document boundary; a very large document makes a larger block."""
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size < BLOCK_BYTES or boundary is None:
            continue
        at = boundary(chunk)
        if at:
            parts[-1] = chunk[:at]
            yield b"".join(parts)
            parts, size = [chunk[at:]], len(chunk) - at
    if size:
        yield b"".join(parts)


def _lines_of_slice(store: Store, path: str, input_slice: InputSlice) -> Iterator[bytes]:
    """Yield the bytes of the lines that start inside the slice."""
    if input_slice.whole:
        yield from store.stream(path, chunk_bytes=READ_BYTES)
        return
    # Start one byte early: a line that starts exactly at `start` is ours, one that started before is not.
    begin = 0 if input_slice.start == 0 else None
    at = max(input_slice.start - 1, 0)
    for chunk in store.stream(path, start=at, chunk_bytes=READ_BYTES):
        if begin is None:
            newline = chunk.find(b"\n")
            if newline >= 0:
                begin = at + newline + 1
        if begin is not None:
            if input_slice.end is not None and begin >= input_slice.end:
                return
            local = max(begin - at, 0)
            if input_slice.end is not None and at + len(chunk) >= input_slice.end:
                # Our last line starts before `end`, so it ends at the first newline at or after end - 1.
                last = chunk.find(b"\n", max(input_slice.end - 1 - at, local))
                if last >= 0:
                    yield chunk[local : last + 1]
                    return
            yield chunk[local:]
        at += len(chunk)


def count_lines_before(input_slice: InputSlice, store: Store, path: str) -> int:
    """Count the lines (or rows) of the file before a slice, to say where an error is. It reads them all."""
    if input_slice.start == 0:
        return 0
    if input_slice.format.kind == "parquet":
        return count_rows_before_group(store, path, input_slice.display_address, input_slice.start)
    lines, left = 1, input_slice.start - 1
    for chunk in store.stream(path, chunk_bytes=READ_BYTES):
        lines += chunk.count(b"\n", 0, left)
        left -= len(chunk)
        if left <= 0:
            break
    return lines


def max_splits(input_slice: InputSlice, store: Store, path: str) -> int:
    """Return into how many slices a file can be cut."""
    if input_slice.rows is not None:
        return input_slice.rows[1] - input_slice.rows[0]
    if not input_slice.splittable:
        return 1
    if input_slice.format.kind == "parquet":
        return count_row_groups(store, path, input_slice.display_address)
    return input_slice.size


def split_input(input_slice: InputSlice, parts: int, store: Store, path: str) -> list[InputSlice]:
    """Cut a file into at most `parts` slices of about the same size."""
    total = max_splits(input_slice, store, path)
    parts = max(1, min(parts, total))
    cuts = [total * i // parts for i in range(parts + 1)]
    if input_slice.rows is not None:
        first = input_slice.rows[0]
        return [replace(input_slice, rows=(first + a, first + b)) for a, b in pairwise(cuts)]
    return [replace(input_slice, start=a, end=b) for a, b in pairwise(cuts)]


OnBadLine = Literal["stop", "skip"]

_BOM = b"\xef\xbb\xbf"
_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")
_LEADING_BLANK_LINES = re.compile(rb"(?:[ \t\r]*\n)*")


@dataclass(frozen=True)
class BadLine:
    """A line or row without a document: its number (from 1 at the start of the slice), the problem, and a hint.

    A `fatal` one is never skipped: it shows that the settings are wrong.
    """

    number: int
    what: str
    hint: str
    fatal: bool = False

    def to_error(self, input_slice: InputSlice, number: int) -> BadDocument:
        """Return the error for this line, for when bad lines are not skipped; `number` counts within the file."""
        skip = "" if self.fatal else ", or write --on-bad-line skip to leave such lines out and count them"
        return BadDocument(self.what, where=format_line_location(input_slice, number), hint=f"{self.hint}{skip}")


def format_line_location(input_slice: InputSlice, number: int) -> str:
    """Name a line or row of a file."""
    return (
        f"{input_slice.display_address}:{number}"
        if input_slice.format.by_line
        else f"{input_slice.display_address}, row {number}"
    )


def extract_documents(block: TextBlock, key: str) -> tuple[list[str], list[BadLine]]:
    """Return a block's documents, and the lines that are not blank and hold no document."""
    payload = block.payload
    if isinstance(payload, bytes) and block.first_line == 1 and payload.startswith(_BOM):
        payload = payload[len(_BOM) :]
    if block.kind == "rows":
        contents: Iterable[tuple[int, _LineContent]] = enumerate(_row_document(row, key) for row in payload)
    elif block.kind == "strings" or not isinstance(payload, bytes):
        contents = enumerate(_cell_document(value, key) for value in payload)
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
        contents = enumerate(_json_document(line, key) for line in lines)
    elif block.kind == "line":
        contents = enumerate(_utf8(line.rstrip(b"\r"))[1] for line in payload.split(b"\n"))
    elif block.kind == "blank_line":
        contents = _paragraphs(payload)
    else:
        contents = [_utf8(payload)]
    documents, bad_lines = [], []
    for offset, document in contents:
        if isinstance(document, str):
            documents.append(document)
        elif document is not None:
            bad_lines.append(BadLine(block.first_line + offset, document.what, document.hint))
    return documents, bad_lines


def extract_rows(block: TextBlock) -> Iterator[tuple[int, dict[str, Any] | BadLine]]:
    """Yield the rows of a block with their numbers: objects, or lines that hold none."""
    payload = block.payload
    if isinstance(payload, bytes):
        if block.first_line == 1 and payload.startswith(_BOM):
            payload = payload[len(_BOM) :]
        contents: Iterable[Any] = (_json_row(line) for line in payload.split(b"\n"))
    else:
        contents = payload
    for number, row in enumerate(contents, block.first_line):
        if isinstance(row, dict):
            yield number, row
        elif isinstance(row, _InvalidText | LongRow):
            invalid = _long_row(row) if isinstance(row, LongRow) else row
            yield number, BadLine(number, invalid.what, invalid.hint)
        elif row is not None or block.kind != "jsonl":
            yield number, BadLine(number, f"a JSON {_json_name(row)}, not an object", _WRITE_OBJECT)


_WRITE_OBJECT = 'each row must be one JSON object such as {"messages": […]}'


def _json_row(line: bytes) -> Any:
    """The value of a JSONL line; None for a blank line."""
    if not line.strip():
        return None
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return _broken_json(line, error, _WRITE_OBJECT)
    return _InvalidText("a JSON null, not an object", _WRITE_OBJECT) if row is None else row


@dataclass(frozen=True)
class _InvalidText:
    what: str
    hint: str


_LineContent = str | _InvalidText | None
"""What a line holds: a document, something wrong, or nothing."""


def _json_document(line: bytes, key: str) -> _LineContent:
    """The document of a JSONL line; None for a blank line."""
    if not line.strip():
        return None
    try:
        row: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return _broken_json(line, error, 'each line must be one JSON object such as {"' + key + '": "…"}')
    return _row_document(row, key)


def _broken_json(line: bytes, error: orjson.JSONDecodeError, hint: str) -> _InvalidText:
    try:
        line.decode()
    except UnicodeDecodeError as broken:
        return _InvalidText(f"invalid UTF-8 at byte {broken.start}", "write the file as UTF-8")
    return _InvalidText(f"broken JSON: {error}", hint)


def _row_document(row: Any, key: str) -> _LineContent:
    """The document of a JSON object."""
    if not isinstance(row, dict):
        return _InvalidText(f"a JSON {_json_name(row)}, not an object", 'write {"' + key + '": "…"}')
    if key not in row:
        return _InvalidText(
            f"no key {key!r}",
            f"its keys are {', '.join(map(repr, row)) or 'none'}: write --key with the right one",
        )
    value = row[key]
    if not isinstance(value, str):
        return _InvalidText(f"{key!r} holds a JSON {_json_name(value)}, not a string", "write the text as a string")
    return value


def _cell_document(value: object, key: str) -> str | _InvalidText:
    if value is None:
        return _InvalidText(f"no text: {key!r} is null", "fill or drop such rows")
    if isinstance(value, LongRow):
        return _long_row(value)
    if not isinstance(value, str):
        return _InvalidText(f"invalid UTF-8 in {key!r}", "write the column as UTF-8")
    return value


def _long_row(row: LongRow) -> _InvalidText:
    return _InvalidText(
        f"{row.fields} fields, and the first line names {row.columns} columns",
        'write a field that holds the delimiter in quotes: "…"',
    )


def _paragraphs(payload: bytes) -> Iterator[tuple[int, _LineContent]]:
    """Yield the documents between blank lines. A block may end inside such a gap, so the rest of it is trimmed."""
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


def _utf8(data: bytes) -> tuple[int, _LineContent]:
    """Return the text, or the line (counted from 0) with the invalid byte; None for no text."""
    try:
        return 0, data.decode() or None
    except UnicodeDecodeError as error:
        line_start = data.rfind(b"\n", 0, error.start) + 1
        what = f"invalid UTF-8 at byte {error.start - line_start}"
        return data.count(b"\n", 0, error.start), _InvalidText(what, "write the file as UTF-8")


def _json_name(value: object) -> str:
    names: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
