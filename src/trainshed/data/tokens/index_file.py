"""The `.idx` file of a token file: its layout, and writing it byte for byte as megatron-core 0.16.1 does.

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

We write one sequence per document; an empty document has none (its index is repeated). Sentence-split files
of others have several. The bytes are yielded front to back in O(1) memory, so that the same code feeds a
local file, an object store's writer and a hash.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainshed.data.tokens.atomic_file import replace_file
from trainshed.data.tokens.token_file import REPREPARE
from trainshed.errors import CorruptData, InputError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
SCAN_ITEMS = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type tokens are stored in: Megatron's rule (`DType.optimal_dtype`), not the tightest one."""
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
        return HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self.sequences, self.documents + 1)

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
        if code not in DTYPES:
            raise CorruptData(f"has token type code {code}; 1 to 8 are known", where=where, hint=REPREPARE)
        if document_indices < 1:
            raise CorruptData("has no document indices (even no document needs one)", where=where, hint=REPREPARE)
        return cls(np.dtype(DTYPES[code]), sequences, document_indices - 1)


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


def index_bytes(dtype: np.dtype, document_lengths: LengthChunks) -> Iterator[bytes]:
    """The bytes of the `.idx` for documents of these lengths, one sequence per document that is not empty.

    `document_lengths()` is called four times, once to count and once for each section, and must give the same
    each time: a billion documents take no more memory than a chunk.
    """
    if dtype not in CODES:
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
    """Write a local `.idx` that appears whole or not at all, and return its header."""
    header: IndexHeader | None = None
    with replace_file(Path(path)) as file:
        for piece in index_bytes(dtype, document_lengths):
            header = header or IndexHeader.unpack(piece, os.fspath(path))
            file.write(piece)
    assert header is not None  # the first piece is always the header
    return header
