"""A corpus as a deterministic stream of blocks: a few megabytes of whole documents, with file and line.

Reading is one pass: bytes arrive from any store, are hashed, inflated and cut at document boundaries; nothing is
written to disk. What a block holds is parsed elsewhere (`documents.py`), in the workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from trainshed.data.text.formats import Format, TextDocuments, decompress
from trainshed.data.text.tables import array_rows, csv_texts, refuse_array
from trainshed.redaction import shown_address

if TYPE_CHECKING:
    from trainshed.storage import Store

BLOCK_BYTES = 4 * 1024 * 1024
READ_BYTES = 1024 * 1024

BlockKind = Literal["jsonl", "file", "line", "blank_line", "strings", "rows"]
DELIMITERS = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True)
class Piece:
    """One input file, or the part of it that a shard reads.

    `start` and `end` count bytes in text files (a line belongs to the piece in which it starts) and row groups in
    parquet files; a whole file has `end=None`.
    """

    address: str
    size: int
    version: str
    format: Format
    key: str = "text"
    documents: TextDocuments = "file"
    start: int = 0
    end: int | None = None

    @property
    def shown(self) -> str:
        """The address as messages and manifests have it: `address` itself may be a signed URL."""
        return shown_address(self.address)

    @property
    def whole(self) -> bool:
        """Whether the piece is a whole file."""
        return self.start == 0 and self.end is None

    @property
    def splittable(self) -> bool:
        """Whether several shards can share the file: documents must be findable from the middle of it."""
        if self.format.kind == "parquet":
            return True
        by_line = self.format.kind == "jsonl" or (self.format.kind == "text" and self.documents == "line")
        return by_line and self.format.compression is None

    @property
    def bytes(self) -> int:
        """About how many bytes reading it takes, for progress and balance."""
        if self.format.kind == "parquet" or self.whole:
            return self.size
        return (self.size if self.end is None else self.end) - self.start


@dataclass(frozen=True)
class Block:
    """Whole documents of one piece.

    `first` is the number of its first line (or row), counted from 1 at the start of the piece; `position` says where
    reading goes on after it: inflated bytes from the start of the piece, or rows.
    """

    kind: BlockKind
    payload: bytes | list[Any]
    first: int
    position: int
    bytes_read: int


class PieceReader:
    """Reads one piece; `sha256` is known once every block was taken."""

    def __init__(self, piece: Piece, store: Store, path: str) -> None:
        self.piece, self._store, self._path = piece, store, path
        self._digest = hashlib.sha256()
        self._bytes_read = 0
        self.sha256: str | None = None

    def blocks(self, after: int = 0) -> Iterator[Block]:
        """Yield the blocks behind position `after` (0: all)."""
        piece = self.piece
        if piece.format.kind == "parquet":
            yield from self._parquet_blocks(after)
        elif piece.format.kind in DELIMITERS:
            yield from self._csv_blocks(after)
        elif piece.format.kind == "json":
            yield from self._array_blocks(after)
        else:
            kind: BlockKind = "jsonl" if piece.format.kind == "jsonl" else piece.documents
            yield from self._text_blocks(kind, after)
        self.sha256 = f"sha256:{self._digest.hexdigest()}"

    def _text_blocks(self, kind: BlockKind, after: int) -> Iterator[Block]:
        position, line = 0, 1
        for data in _cut(self._plain(), _boundary(kind)):
            if kind == "jsonl" and position == 0 and self.piece.start == 0:
                refuse_array(data, self.piece.shown)
            lines, start, position = data.count(b"\n"), position, position + len(data)
            if position > after:
                # A store may cut its chunks, and so our blocks, differently than the time before.
                skip = max(after - start, 0)
                read, self._bytes_read = self._bytes_read, 0
                yield Block(kind, data[skip:], line + data.count(b"\n", 0, skip), position, read)
            line += lines

    def _csv_blocks(self, after: int) -> Iterator[Block]:
        piece, texts, size, first = self.piece, [], 0, 1
        column = csv_texts(self._plain(), DELIMITERS[piece.format.kind], piece.key, piece.shown)
        for text in column:
            texts.append(text)
            size += len(text or "")
            if size >= BLOCK_BYTES:
                yield from self._rows_block("strings", texts, first, after)
                texts, size, first = [], 0, first + len(texts)
        yield from self._rows_block("strings", texts, first, after)

    def _array_blocks(self, after: int) -> Iterator[Block]:
        rows = array_rows(self._plain(), self.piece.shown)
        together = max(1, BLOCK_BYTES * len(rows) // max(self.piece.size, 1))
        for start in range(0, len(rows), together):
            yield from self._rows_block("rows", rows[start : start + together], start + 1, after)

    def _rows_block(self, kind: BlockKind, rows: list[Any], first: int, after: int) -> Iterator[Block]:
        position = first - 1 + len(rows)
        if position > after:
            skip = max(after - (first - 1), 0)
            read, self._bytes_read = self._bytes_read, 0
            yield Block(kind, rows[skip:], first + skip, position, read)

    def _plain(self) -> Iterator[bytes]:
        """The bytes of the piece, counted, hashed and inflated."""
        raw = self._counted(_lines_between(self._store, self._path, self.piece))
        return decompress(raw, self.piece.format.compression, self.piece.shown)

    def _counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._digest.update(chunk)
            self._bytes_read += len(chunk)
            yield chunk

    def _parquet_blocks(self, after: int) -> Iterator[Block]:
        from trainshed.data.text.parquet import text_batches

        piece, first, reported = self.piece, 1, 0
        for batch in text_batches(self._store, self._path, piece.shown, piece.key, piece.start, piece.end):
            self._digest.update(batch.fingerprint)
            position = first - 1 + len(batch.texts)
            self._bytes_read = int(piece.size * batch.share_done) - reported
            if position > after:
                reported += self._bytes_read
                skip = max(after - (first - 1), 0)
                yield Block("strings", batch.texts[skip:], first + skip, position, self._bytes_read)
            first += len(batch.texts)


def _boundary(kind: BlockKind) -> Callable[[bytes], int] | None:
    """How to find the last document boundary in a chunk: the offset behind it, 0 if there is none."""
    if kind == "file":
        return None
    if kind == "blank_line":
        return lambda chunk: max(
            (at + len(mark) for mark in (b"\n\n", b"\n\r\n") if (at := chunk.rfind(mark)) >= 0), default=0
        )
    return lambda chunk: chunk.rfind(b"\n") + 1


def _cut(chunks: Iterable[bytes], boundary: Callable[[bytes], int] | None) -> Iterator[bytes]:
    """Gather chunks into blocks that end at a document boundary; a document larger than a block makes it larger."""
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


def _lines_between(store: Store, path: str, piece: Piece) -> Iterator[bytes]:
    """Yield the bytes of the lines that start inside the piece."""
    if piece.whole:
        yield from store.stream(path, chunk_bytes=READ_BYTES)
        return
    # Start one byte early: a line that starts exactly at `start` is ours, one that started before is not.
    begin = 0 if piece.start == 0 else None
    at = max(piece.start - 1, 0)
    for chunk in store.stream(path, start=at, chunk_bytes=READ_BYTES):
        if begin is None:
            newline = chunk.find(b"\n")
            if newline >= 0:
                begin = at + newline + 1
        if begin is not None:
            if piece.end is not None and begin >= piece.end:
                return
            local = max(begin - at, 0)
            if piece.end is not None and at + len(chunk) >= piece.end:
                # Our last line starts before `end`, so it ends at the first newline at or behind end - 1.
                last = chunk.find(b"\n", max(piece.end - 1 - at, local))
                if last >= 0:
                    yield chunk[local : last + 1]
                    return
            yield chunk[local:]
        at += len(chunk)


def lines_before(piece: Piece, store: Store, path: str) -> int:
    """How many lines (or rows) of its file come before a piece. It reads them all: to say where an error is."""
    if piece.start == 0:
        return 0
    if piece.format.kind == "parquet":
        from trainshed.data.text.parquet import rows_before

        return rows_before(store, path, piece.shown, piece.start)
    lines, left = 1, piece.start - 1
    for chunk in store.stream(path, chunk_bytes=READ_BYTES):
        lines += chunk.count(b"\n", 0, left)
        left -= len(chunk)
        if left <= 0:
            break
    return lines


def most_parts(piece: Piece, store: Store, path: str) -> int:
    """Into how many pieces a file can be cut."""
    if not piece.splittable:
        return 1
    if piece.format.kind == "parquet":
        from trainshed.data.text.parquet import row_groups

        return row_groups(store, path, piece.shown)
    return piece.size


def split_piece(piece: Piece, parts: int, store: Store, path: str) -> list[Piece]:
    """Cut a file into at most `parts` pieces of about the same size."""
    total = most_parts(piece, store, path)
    parts = max(1, min(parts, total))
    cuts = [total * i // parts for i in range(parts + 1)]
    return [replace(piece, start=a, end=b) for a, b in pairwise(cuts)]
