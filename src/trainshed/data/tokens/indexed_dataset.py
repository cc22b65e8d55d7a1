"""Token files in Megatron's indexed-dataset format, byte for byte as megatron-core 0.16.1 writes and reads them.

`PREFIX.bin` holds the tokens of all sequences back to back. `PREFIX.idx`, little-endian and unaligned:

    offset  size  field
    0       9     magic `MMIDIDX\\0\\0`
    9       8     u64 version = 1
    17      1     u8 token type: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
    18      8     u64 S = number of sequences
    26      8     u64 D = length of document_indices (documents + 1)
    34      4S    i32 tokens per sequence
    ..      8S    i64 byte offset of each sequence in .bin
    ..      8D    i64 document_indices: the sequence where each document starts; first 0, last S
    ..      S     i8 mode per sequence, multimodal files only

We write one sequence per document. An empty document has none: its index is repeated. Files of others may have
several sequences per document. The index is yielded front to back in O(1) memory, so that the same code feeds a local
file, an object store's writer and a hash.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from trainshed.data.tokens.token_files import (
    REPREPARE,
    local_copy,
    open_token_file,
    replace_file,
)
from trainshed.errors import CorruptData, InputError

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions


MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_BY_CODE = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODE_BY_DTYPE = {np.dtype(name): code for code, name in DTYPE_BY_CODE.items()}
SCAN_ITEMS = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type that tokens are stored in: Megatron's rule (`DType.optimal_dtype`), not the smallest one."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


@dataclass(frozen=True)
class IndexHeader:
    """The fixed part of an `.idx` file."""

    dtype: np.dtype
    sequences: int
    documents: int

    @property
    def index_bytes(self) -> int:
        """Size of the `.idx` file without modes."""
        return HEADER.size + 12 * self.sequences + 8 * (self.documents + 1)

    def pack(self) -> bytes:
        """Return the first 34 bytes of the file."""
        return HEADER.pack(MAGIC, VERSION, CODE_BY_DTYPE[self.dtype], self.sequences, self.documents + 1)

    @classmethod
    def unpack(cls, data: bytes, where: str) -> IndexHeader:
        """Read the first 34 bytes of a file; `where` names it in errors."""
        if len(data) < HEADER.size:
            raise CorruptData(
                f"{len(data)} bytes are too few for a header of {HEADER.size}", where=where, hint=REPREPARE
            )
        magic, version, code, sequences, document_indices = HEADER.unpack(data[: HEADER.size])
        if magic != MAGIC:
            raise CorruptData(
                f"starts with {magic!r}, not {MAGIC!r}: no index of a token file",
                where=where,
                hint="give the prefix of a .bin/.idx pair written by Trainshed or Megatron",
            )
        if version != VERSION:
            raise CorruptData(
                f"is of format version {version}; version 1 is the only one known",
                where=where,
                hint=REPREPARE,
            )
        if code not in DTYPE_BY_CODE:
            raise CorruptData(f"has token type code {code}; 1 to 8 are known", where=where, hint=REPREPARE)
        if document_indices < 1:
            raise CorruptData("has no document indices (even no document needs one)", where=where, hint=REPREPARE)
        return cls(np.dtype(DTYPE_BY_CODE[code]), sequences, document_indices - 1)


LengthChunks = Callable[[], Iterable[np.ndarray]]


def lengths_from_file(path: str | os.PathLike[str], chunk_items: int = SCAN_ITEMS) -> LengthChunks:
    """Return a factory of chunks over an append-only file of int32 document lengths (0: empty document)."""

    def chunks() -> Iterator[np.ndarray]:
        with open(path, "rb") as file:
            while data := file.read(4 * chunk_items):
                if len(data) % 4:
                    raise CorruptData("ends in the middle of a length", where=os.fspath(path), hint="write it again")
                yield np.frombuffer(data, "<i4")

    return chunks


def encode_index(dtype: np.dtype, document_lengths: LengthChunks) -> Iterator[bytes]:
    """Yield the bytes of the `.idx` for documents of these lengths, one sequence per document that is not empty.

    `document_lengths()` is called four times, once to count and once for each section, and must give the same each
    time. So a billion documents take no more memory than a chunk.
    """
    if dtype not in CODE_BY_DTYPE:
        raise InputError(f"tokens cannot be stored as {dtype}", hint="use uint16 or int32 (see `token_dtype`)")
    documents = sequences = 0
    for chunk in document_lengths():
        documents += len(chunk)
        sequences += int(np.count_nonzero(chunk))
    yield IndexHeader(dtype, sequences, documents).pack()
    for chunk in document_lengths():
        yield chunk[chunk != 0].astype("<i4", copy=False).tobytes()
    offset = 0
    for chunk in document_lengths():
        lengths = chunk[chunk != 0]
        ends = offset + np.cumsum(lengths, dtype="<i8") * dtype.itemsize
        if len(ends):
            yield np.concatenate((np.array([offset], "<i8"), ends[:-1])).tobytes()
            offset = int(ends[-1])
    yield np.zeros(1, "<i8").tobytes()
    before = 0
    for chunk in document_lengths():
        ends = before + np.cumsum(chunk != 0, dtype="<i8")
        if len(ends):
            yield ends.tobytes()
            before = int(ends[-1])


def write_index(path: str | os.PathLike[str], dtype: np.dtype, document_lengths: LengthChunks) -> IndexHeader:
    """Write a local `.idx` atomically, and return its header."""
    header: IndexHeader | None = None
    with replace_file(Path(path)) as file:
        for piece in encode_index(dtype, document_lengths):
            header = header or IndexHeader.unpack(piece, os.fspath(path))
            file.write(piece)
    assert header is not None  # the first piece is always the header
    return header


class IndexedDataset:
    """Random access to the tokens of one `.bin/.idx` pair, on a disk or in a store.

    The index is memory-mapped; one in a store is copied here first. Tokens are read with pread or ranged gets. Opening
    costs a few small reads, `check()` scans everything.
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
            # The map keeps its own handle on the file and is unmapped with the last array that uses it.
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

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str, StoreOptions | None]]:
        return (IndexedDataset, (self.prefix, self._options))

    def __enter__(self) -> IndexedDataset:
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
        """Yield all tokens in file order, in chunks."""
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
