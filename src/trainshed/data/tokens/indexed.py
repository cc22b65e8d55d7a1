"""Reading token files: `PREFIX.bin` and `PREFIX.idx` as megatron-core 0.16.1 writes them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from trainshed.data.tokens.index_file import (
    HEADER,
    SCAN_ITEMS,
    IndexHeader,
    LengthChunks,
    index_bytes,
    lengths_from_file,
    token_dtype,
    write_index,
)
from trainshed.data.tokens.shards import shard_name, shard_prefixes
from trainshed.data.tokens.token_file import REPREPARE, local_copy, open_token_file
from trainshed.errors import CorruptData

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions

__all__ = [
    "IndexHeader",
    "IndexedReader",
    "LengthChunks",
    "index_bytes",
    "lengths_from_file",
    "shard_name",
    "shard_prefixes",
    "token_dtype",
    "write_index",
]


class IndexedReader:
    """Random access to the tokens of one `.bin/.idx` pair, on a disk or in a store.

    The index is memory-mapped (a store's is copied here first); tokens are read with pread or ranged gets. Opening
    costs a few small reads; `check()` scans everything.
    """

    def __init__(self, prefix: str | os.PathLike[str], options: StoreOptions | None = None) -> None:
        self.prefix = os.fspath(prefix)
        self._options = options
        self.index_address = self.prefix + ".idx"
        self.bin_address = self.prefix + ".bin"
        with local_copy(self.index_address, options) as file:
            size = os.fstat(file.fileno()).st_size
            header = IndexHeader.unpack(file.read(HEADER.size), self.index_address)
            if size not in (header.index_bytes, header.index_bytes + header.sequences):
                self._corrupt(
                    f"is {size} bytes, but {header.sequences} sequences and {header.documents} documents"
                    f" take {header.index_bytes}"
                )
            # The map keeps its own handle on the file and is unmapped with the last array that looks into it.
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self.header = header
        self.has_modes = size != header.index_bytes
        lengths_at = HEADER.size
        pointers_at = lengths_at + 4 * header.sequences
        documents_at = pointers_at + 8 * header.sequences
        self.lengths = np.frombuffer(data, "<i4", header.sequences, lengths_at)
        self.pointers = np.frombuffer(data, "<i8", header.sequences, pointers_at)
        self.document_indices = np.frombuffer(data, "<i8", header.documents + 1, documents_at)
        self.modes = np.frombuffer(data, "<i1", header.sequences, header.index_bytes) if self.has_modes else None
        self._file = open_token_file(self.bin_address, options)
        self.bin_bytes = self._file.size
        self._check_ends()

    def __reduce__(self) -> tuple[type[IndexedReader], tuple[str, StoreOptions | None]]:
        return (IndexedReader, (self.prefix, self._options))

    def __enter__(self) -> IndexedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the `.bin`; arrays already handed out stay valid."""
        self._file.close()

    @property
    def dtype(self) -> np.dtype:
        """Type of one stored token."""
        return self.header.dtype

    @property
    def documents(self) -> int:
        """Number of documents, empty ones included."""
        return self.header.documents

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.header.sequences

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.bin_bytes // self.dtype.itemsize

    def sequence(self, index: int) -> np.ndarray:
        """Return the tokens of one sequence, read-only."""
        return self.read(int(self.pointers[index]) // self.dtype.itemsize, int(self.lengths[index]))

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document (all its sequences), read-only."""
        first, last = int(self.document_indices[index]), int(self.document_indices[index + 1])
        if first == last:
            return self.read(0, 0)
        start = int(self.pointers[first]) // self.dtype.itemsize
        stop = int(self.pointers[last - 1]) // self.dtype.itemsize + int(self.lengths[last - 1])
        return self.read(start, stop - start)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens from token `start` of the file, read-only."""
        out = np.empty(count, self.dtype)
        if count:
            self._file.read_into(out.view(np.uint8).data, start * self.dtype.itemsize)
        out.flags.writeable = False
        return out

    def token_chunks(self, chunk_tokens: int = SCAN_ITEMS) -> Iterator[np.ndarray]:
        """All tokens in file order, a chunk at a time."""
        for start in range(0, self.tokens, chunk_tokens):
            yield self.read(start, min(chunk_tokens, self.tokens - start))

    def check(self) -> None:
        """Scan the whole index: lengths, offsets and document bounds must agree and fill the `.bin`."""
        expected = 0
        for start in range(0, self.sequences, SCAN_ITEMS):
            lengths = self.lengths[start : start + SCAN_ITEMS]
            if (negative := np.flatnonzero(lengths < 0)).size:
                self._corrupt(f"sequence {start + negative[0]} has {lengths[negative[0]]} tokens")
            ends = expected + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            begins = np.concatenate(([expected], ends[:-1]))
            pointers = self.pointers[start : start + SCAN_ITEMS]
            if (wrong := np.flatnonzero(pointers != begins)).size:
                self._corrupt(
                    f"sequence {start + wrong[0]} points to byte {pointers[wrong[0]]}, "
                    f"but the sequences before it end at byte {begins[wrong[0]]}"
                )
            expected = int(ends[-1])
        if expected != self.bin_bytes:
            self._corrupt(f"describes {expected} bytes of tokens, the .bin has {self.bin_bytes}")
        for start in range(0, self.documents, SCAN_ITEMS):
            bounds = self.document_indices[start : start + SCAN_ITEMS + 1]
            if (falling := np.flatnonzero(np.diff(bounds) < 0)).size:
                self._corrupt(f"document {start + falling[0]} ends before it starts")

    def _check_ends(self) -> None:
        if self.document_indices[0] != 0 or self.document_indices[-1] != self.sequences:
            self._corrupt(
                f"documents span sequences {self.document_indices[0]} to {self.document_indices[-1]}"
                f" of {self.sequences}"
            )
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if self.sequences else 0
        if end != self.bin_bytes:
            cut = "is cut short" if self.bin_bytes < end else "is too long"
            raise CorruptData(
                f"{cut}: {self.bin_bytes} bytes, the index describes {end}",
                where=self.bin_address,
                hint=REPREPARE,
            )

    def _corrupt(self, what: str) -> NoReturn:
        raise CorruptData(what, where=self.index_address, hint=REPREPARE)
