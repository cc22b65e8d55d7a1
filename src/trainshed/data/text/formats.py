"""File formats of text: which format a file has by its name, how it is decompressed, and how rows are read from it.

JSONL and plain text are cut into blocks by `reader.py`. CSV and TSV files, JSON arrays and parquet files have rows, and
these are read here. A JSON array is read whole; parquet is read row group by row group from any store.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import orjson

from trainshed.errors import BadDocument, InputError, MissingExtra, StorageError
from trainshed.redaction import shown_address

if TYPE_CHECKING:
    from trainshed.storage import Store


# The recipe's schema and the flag of `data prepare` list the same; a test compares them.
TextFormatName = Literal["jsonl", "json", "csv", "tsv", "parquet", "text"]
Compression = Literal["gz", "zst"]
DocumentBoundary = Literal["file", "line", "blank_line"]
"""Where a plain-text document ends: at the end of its file, of each line, or at each blank line."""

FORMAT_BY_SUFFIX: dict[str, TextFormatName] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".md": "text",
    ".markdown": "text",
    ".rst": "text",
}
_MARKUP = (
    "holds markup beside its text",
    "extract the text first (trafilatura does), or write --format text to take it as it is, tags included",
)
_PRINTED = ("is made for printing", "extract its text into .txt or .jsonl files first")
_ARCHIVE = ("is an archive", "unpack it first")
REFUSED_SUFFIXES = {
    **dict.fromkeys((".html", ".htm", ".xhtml", ".xml"), _MARKUP),
    **dict.fromkeys((".pdf", ".docx", ".epub"), _PRINTED),
    **dict.fromkeys((".tar", ".tgz", ".zip"), _ARCHIVE),
    ".xlsx": ("is a spreadsheet", "save it as .csv"),
    ".arrow": ("is an Arrow file", "save it as parquet: datasets.load_from_disk(DIR).to_parquet(FILE)"),
}
"""Suffixes of other common files that are not read as they are: what each one is, and what to do."""
COMPRESSION_BY_SUFFIX: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}

# Small enough that even a file compressed a thousandfold inflates to a bounded piece at a time.
INFLATE_BYTES = 256 * 1024


@dataclass(frozen=True)
class TextFileFormat:
    """How to read a file: what it holds and how it is compressed."""

    kind: str
    """A `TextFormatName`, or the name of a format that a plugin registers."""
    compression: Compression | None = None

    @property
    def by_line(self) -> bool:
        """Whether a location in the file is a line; otherwise it is a row."""
        return self.kind in ("jsonl", "text")


def refused_file(name: str) -> tuple[str, str] | None:
    """Say by the name of a file that it is not read as it is, and what to do; None for any other."""
    ending = next((suffix for suffix in REFUSED_SUFFIXES if name.lower().endswith(suffix)), None)
    if ending is None:
        return None
    what, hint = REFUSED_SUFFIXES[ending]
    return f"a {ending} file {what}", hint


def detect_format(address: str, kind: str | None = None) -> TextFileFormat:
    """Detect a file's format by its name; `kind` overrides the suffix."""
    name = shown_address(address).lower().removesuffix("?…")
    compression = next((c for ending, c in COMPRESSION_BY_SUFFIX.items() if name.endswith(ending)), None)
    if compression:
        name = name.rsplit(".", 1)[0]
    detected = kind or next((k for ending, k in FORMAT_BY_SUFFIX.items() if name.endswith(ending)), None)
    if detected is None:
        if (refused := refused_file(name)) is not None:
            what, hint = refused
            raise InputError(what, where=address, hint=hint)
        raise InputError(
            "cannot tell from its name what this file holds",
            where=address,
            hint=f"known endings: {', '.join(FORMAT_BY_SUFFIX)} (all but parquet also with .gz or .zst); "
            f"or write --format with one of {', '.join(get_args(TextFormatName))}",
        )
    if detected == "parquet" and compression:
        raise InputError(
            "a compressed parquet file cannot be read in pieces", where=address, hint="decompress it first"
        )
    return TextFileFormat(detected, compression)


def decompress(chunks: Iterable[bytes], compression: Compression | None, where: str) -> Iterator[bytes]:
    """Decompress a stream of chunks; several frames or members in a row are one stream, a cut one is an error."""
    if compression is None:
        yield from chunks
    elif compression == "gz":
        yield from _inflate_gz(chunks, where)
    else:
        yield from _inflate_zst(chunks, where)


def _small_chunks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        for at in range(0, len(chunk), INFLATE_BYTES):
            yield chunk[at : at + INFLATE_BYTES]


def _inflate_gz(chunks: Iterable[bytes], where: str) -> Iterator[bytes]:
    member = zlib.decompressobj(wbits=31)
    started = False
    try:
        for piece in _small_chunks(chunks):
            data = piece
            while data:
                if member.eof:
                    data = data.lstrip(b"\0")  # tools pad archives with zeros
                    if not data:
                        break
                    member, started = zlib.decompressobj(wbits=31), False
                started = True
                yield member.decompress(data)
                data = member.unused_data
    except zlib.error as error:
        raise _damaged(where, "gzip", str(error)) from None
    if started and not member.eof:
        raise _damaged(where, "gzip", "the file ends in the middle of the data")


def _inflate_zst(chunks: Iterable[bytes], where: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise MissingExtra.named("data", "reading .zst files") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = decompressor.decompressobj()
    started = False
    try:
        for piece in _small_chunks(chunks):
            data = piece
            while data:
                if frame.eof:
                    frame, started = decompressor.decompressobj(), False
                started = True
                yield frame.decompress(data)
                data = frame.unused_data if frame.eof else b""
    except zstandard.ZstdError as error:
        raise _damaged(where, "zstd", str(error)) from None
    if started and not frame.eof:
        raise _damaged(where, "zstd", "the file ends in the middle of the data")


def _damaged(where: str, what: str, detail: str) -> BadDocument:
    return BadDocument(f"this {what} file is damaged: {detail}", where=where, hint="fetch it again")


FIELD_BYTES = 256 * 1024 * 1024
"""A field larger than this is a quotation mark that nobody closed."""

ARRAY_BYTES = 1024 * 1024 * 1024
"""A JSON array has no boundaries to read it by, so it is read whole; a larger one might not fit into memory."""

CONVERT_ARRAY = "jq -c '.[]' FILE.json > FILE.jsonl"


@dataclass(frozen=True)
class LongRow:
    """A row of a table with more fields than the first line names: one of its texts holds a bare delimiter."""

    fields: int
    columns: int


def read_csv_column(
    chunks: Iterable[bytes], delimiter: str, column: str, where: str
) -> Iterator[str | bytes | LongRow | None]:
    """Yield the text of one column, row by row: None where a row has none, bytes where it is not UTF-8.

    The first line names the columns. Quoted fields may hold line ends, as RFC 4180 says; broken quoting is an error,
    since everything after it would be read as something else.
    """
    rows = _csv_fields(chunks, delimiter, where)
    header = next(rows, None)
    if header is None:
        return
    if header.count(column) != 1:
        count = "no column" if column not in header else "more than one column"
        raise InputError(
            f"there is {count} {column!r}",
            where=where,
            hint=f"write --key with one of its columns, which its first line names: {', '.join(header)}",
        )
    at = header.index(column)
    for row in rows:
        if any(row[len(header) :]):
            yield LongRow(len(row), len(header))
        else:
            yield _text_or_bytes(row[at]) if at < len(row) else None


def read_csv_rows(
    chunks: Iterable[bytes], delimiter: str, wanted: tuple[str, ...], where: str
) -> Iterator[dict[str, str | bytes] | LongRow]:
    """Yield the rows of a table as objects; an empty field is left out of its row, one that is not UTF-8 is bytes.

    Each of the `wanted` columns may be there once.
    """
    rows = _csv_fields(chunks, delimiter, where)
    header = next(rows, [])
    _check_named_once(header, wanted, where)
    for row in rows:
        if any(row[len(header) :]):
            yield LongRow(len(row), len(header))
            continue
        fields = ((name, _text_or_bytes(text)) for name, text in zip(header, row, strict=False))
        yield {name: text for name, text in fields if text}


def _check_named_once(names: list[str], wanted: tuple[str, ...], where: str) -> None:
    double = next((name for name in wanted if names.count(name) > 1), None)
    if double is not None:
        raise InputError(
            f"there is more than one column {double!r}",
            where=where,
            hint=f"its columns are {', '.join(names)}: give each a name of its own",
        )


def _csv_fields(chunks: Iterable[bytes], delimiter: str, where: str) -> Iterator[list[str]]:
    """Yield the fields of each line that is not empty, those of the header first."""
    csv.field_size_limit(FIELD_BYTES)
    reader = csv.reader(_decode_lines(chunks), delimiter=delimiter, strict=True)
    try:
        yield from (row for row in reader if row)
    except csv.Error as error:
        raise BadDocument(
            f"broken CSV: {error}", where=f"{where}:{reader.line_num}", hint='write fields with " as "…""…"'
        ) from None


def _decode_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield lines with their ends; bytes that are not UTF-8 stay as surrogates until their row is known."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    rest, first = "", True
    for chunk in chunks:
        text = rest + decoder.decode(chunk)
        if first and text:
            text, first = text.removeprefix("\ufeff"), False
        *whole, rest = text.split("\n")
        for line in whole:
            yield f"{line}\n"
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest


def _text_or_bytes(text: str) -> str | bytes:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
    return text


def read_json_array(chunks: Iterable[bytes], where: str) -> list[Any]:
    """Return the elements of a file that is one JSON array."""
    parts, size = [], 0
    for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size > ARRAY_BYTES:
            raise InputError(
                f"this JSON array is larger than {ARRAY_BYTES // 2**20:,} MiB, and one is read whole",
                where=where,
                hint=f"write one object a line, which is read in pieces: {CONVERT_ARRAY}",
            )
    data = b"".join(parts).removeprefix(codecs.BOM_UTF8)
    if not data.strip():
        return []
    try:
        rows = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadDocument(
            f"broken JSON: {error}", where=where, hint="write --format jsonl if it holds one object a line"
        ) from None
    if not isinstance(rows, list):
        raise BadDocument(
            "this JSON file holds no array", where=where, hint="write --format jsonl if it holds one object a line"
        )
    return rows


def refuse_json_array(first: bytes, where: str) -> None:
    """Raise if a file that should hold one JSON object per line starts with an array of them."""
    text = first.removeprefix(codecs.BOM_UTF8).lstrip()
    if not text.startswith(b"["):
        return
    try:
        row = orjson.loads(text.partition(b"\n")[0])
    except orjson.JSONDecodeError:
        row = [{}]  # it goes on over several lines
    if row and isinstance(row[0], dict):
        raise BadDocument(
            "this is a JSON array, not one JSON object a line",
            where=where,
            hint=f"write --format json to read it as one, or convert it: {CONVERT_ARRAY}",
        )


PARQUET_BATCH_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class ParquetBatch:
    """Some rows: those of a text column (None for a null, bytes where they are not UTF-8), or objects.

    `fingerprint` is a hash of what was read (the file's own bytes do not arrive in order, and hold other columns too);
    `share_done` is how much of the file has been read with this batch, 0 to 1.
    """

    contents: list[Any]
    fingerprint: bytes
    share_done: float


def count_row_groups(store: Store, path: str, address: str) -> int:
    """Return how many row groups a file has: it can be cut between them."""
    return _open_parquet(store, path, address).num_row_groups


def count_rows_before_group(store: Store, path: str, address: str, group: int | None) -> int:
    """Return how many rows come before a row group; with None, how many there are."""
    metadata = _open_parquet(store, path, address).metadata
    groups = metadata.num_row_groups if group is None else group
    return sum(metadata.row_group(number).num_rows for number in range(groups))


def read_parquet_batches(
    store: Store, path: str, address: str, wanted: str | tuple[str, ...], first: int = 0, last: int | None = None
) -> Iterator[ParquetBatch]:
    """Yield row groups [first, last) of a file, a few megabytes at a time: the texts of a column, or several columns.

    Of several columns, those that the file does not have are left out.
    """
    parquet = _open_parquet(store, path, address)
    if isinstance(wanted, str):
        _check_text_column(parquet, wanted, address)
        columns = [wanted]
    else:
        columns = [name for name in wanted if name in parquet.schema_arrow.names]
        _check_named_once(parquet.schema_arrow.names, wanted, address)
        if not columns:
            raise InputError(
                f"there is no column {' or '.join(map(repr, wanted))}",
                where=address,
                hint=f"its columns are {', '.join(parquet.schema_arrow.names)}: name the right one with --columns",
            )
    groups = range(first, parquet.num_row_groups if last is None else last)
    total = sum(parquet.metadata.row_group(group).num_rows for group in groups)
    done = 0
    for group in groups:
        rows = parquet.metadata.row_group(group).num_rows
        size = max(_column_bytes(parquet.metadata.row_group(group), columns), 1)
        batch_rows = max(64, min(65536, PARQUET_BATCH_BYTES * rows // size))
        for batch in _explain_damage(parquet.iter_batches(batch_rows, [group], columns), address):
            done += batch.num_rows
            if isinstance(wanted, str):
                contents, fingerprint = _column_texts(batch.column(0)), _hash_column(batch.column(0))
            else:
                contents = _batch_rows(batch, address)
                fingerprint = hashlib.sha256(orjson.dumps(contents, default=str)).digest()
            yield ParquetBatch(contents, fingerprint, done / max(total, 1))


def _column_bytes(group: Any, columns: list[str]) -> int:
    """Return how many bytes some columns take, with all that is nested in them."""
    leaves = (group.column(number) for number in range(group.num_columns))
    inside = tuple(f"{column}." for column in columns)
    return sum(leaf.total_uncompressed_size for leaf in leaves if f"{leaf.path_in_schema}.".startswith(inside))


def _batch_rows(batch: Any, address: str) -> list[dict[str, Any]]:
    """Return rows as objects. A table gives every object of a column the same keys, and null where one has none."""
    try:
        return [_without_nulls(row) for row in batch.to_pylist()]
    except UnicodeDecodeError:
        raise BadDocument("text that is not UTF-8", where=address, hint="write the file as UTF-8") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _open_parquet(store: Store, path: str, address: str) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtra.named("data", "reading parquet files") from None
    try:
        return pq.ParquetFile(_SeekableObject(store, path))
    except pa.ArrowInvalid as error:
        raise InputError(f"this is not a readable parquet file: {error}", where=address) from None


def _explain_damage(batches: Iterator[Any], address: str) -> Iterator[Any]:
    """Damaged pages are found only when they are read; pyarrow then raises all kinds of errors."""
    import pyarrow as pa

    try:
        yield from batches
    except (pa.ArrowException, OSError) as error:
        raise BadDocument(
            f"this parquet file is damaged: {str(error).splitlines()[0]}", where=address, hint="fetch it again"
        ) from None


def _check_text_column(parquet: Any, column: str, address: str) -> None:
    import pyarrow as pa

    schema = parquet.schema_arrow
    if column not in schema.names:
        raise InputError(
            f"there is no column {column!r}",
            where=address,
            hint=f"write --key with one of its columns: {', '.join(schema.names)}",
        )
    _check_named_once(schema.names, (column,), address)
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        raise InputError(
            f"the column {column!r} holds {kind}, not text", where=address, hint="write --key with a text column"
        )


def _column_texts(column: Any) -> list[str | bytes | None]:
    import pyarrow as pa

    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        raw = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
        return [value if value is None else _decode_or_keep(value) for value in raw]


def _decode_or_keep(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _hash_column(column: Any) -> bytes:
    import numpy as np
    import pyarrow as pa

    plain = column.cast(pa.large_string()).cast(pa.large_binary())
    _, offsets_buffer, data = plain.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[plain.offset : plain.offset + len(plain) + 1]
    digest = hashlib.sha256(np.diff(offsets).tobytes())
    if plain.null_count:
        digest.update(np.asarray(plain.is_null()).tobytes())
    if data is not None:
        digest.update(memoryview(data)[int(offsets[0]) : int(offsets[-1])])
    return digest.digest()


class _SeekableObject(io.RawIOBase):
    """A stored object as the seekable file that parquet needs; every read is one ranged get."""

    def __init__(self, store: Store, path: str) -> None:
        info = store.head(path)
        if info is None:
            raise StorageError("the file is gone", where=f"{store.url}/{path}")
        self._store, self._path, self._size, self._at = store, path, info.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        data = self._store.read(self._path, self._at, end) if end > self._at else b""
        self._at += len(data)
        return data
