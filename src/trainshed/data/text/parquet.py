"""Text columns of parquet files, read row group by row group from any store."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainshed.errors import BadDocument, InputError, MissingExtra, StorageError

if TYPE_CHECKING:
    from trainshed.storage import Store

BATCH_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class TextBatch:
    """Some rows of a text column: None for a null, bytes where they are not UTF-8.

    `fingerprint` is a hash of the texts (the file's own bytes do not arrive in order, and hold other columns too);
    `share_done` is how much of the file has been read with this batch, 0 to 1.
    """

    texts: list[str | bytes | None]
    fingerprint: bytes
    share_done: float


def row_groups(store: Store, path: str, address: str) -> int:
    """How many row groups a file has: the pieces it can be cut into."""
    return _open(store, path, address).num_row_groups


def rows_before(store: Store, path: str, address: str, group: int) -> int:
    """How many rows come before a row group."""
    metadata = _open(store, path, address).metadata
    return sum(metadata.row_group(number).num_rows for number in range(group))


def text_batches(
    store: Store, path: str, address: str, column: str, first: int = 0, last: int | None = None
) -> Iterator[TextBatch]:
    """Yield the texts of row groups [first, last) of a file, a few megabytes at a time."""
    parquet = _open(store, path, address)
    at = _text_column(parquet, column, address)
    groups = range(first, parquet.num_row_groups if last is None else last)
    total = sum(parquet.metadata.row_group(group).num_rows for group in groups)
    done = 0
    for group in groups:
        rows = parquet.metadata.row_group(group).num_rows
        text_bytes = max(parquet.metadata.row_group(group).column(at).total_uncompressed_size, 1)
        batch_rows = max(64, min(65536, BATCH_BYTES * rows // text_bytes))
        for batch in _explained(parquet.iter_batches(batch_rows, [group], [column]), address):
            done += batch.num_rows
            yield TextBatch(_texts(batch.column(0)), _fingerprint(batch.column(0)), done / max(total, 1))


def _open(store: Store, path: str, address: str) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtra.named("data", "reading parquet files") from None
    try:
        return pq.ParquetFile(_StoreFile(store, path))
    except pa.ArrowInvalid as error:
        raise InputError(f"this is not a readable parquet file: {error}", where=address) from None


def _explained(batches: Iterator[Any], address: str) -> Iterator[Any]:
    """Damaged pages are found only when they are read; pyarrow then raises all kinds of errors."""
    import pyarrow as pa

    try:
        yield from batches
    except (pa.ArrowException, OSError) as error:
        raise BadDocument(
            f"this parquet file is damaged: {str(error).splitlines()[0]}", where=address, hint="fetch it again"
        ) from None


def _text_column(parquet: Any, column: str, address: str) -> int:
    import pyarrow as pa

    schema = parquet.schema_arrow
    if column not in schema.names:
        raise InputError(
            f"there is no column {column!r}",
            where=address,
            hint=f"write --key with one of its columns: {', '.join(schema.names)}",
        )
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        raise InputError(
            f"the column {column!r} holds {kind}, not text", where=address, hint="write --key with a text column"
        )
    paths = [parquet.metadata.schema.column(i).path for i in range(parquet.metadata.num_columns)]
    return paths.index(column)


def _texts(column: Any) -> list[str | bytes | None]:
    import pyarrow as pa

    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        raw = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
        return [value if value is None else _decoded(value) for value in raw]


def _decoded(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _fingerprint(column: Any) -> bytes:
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


class _StoreFile(io.RawIOBase):
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
