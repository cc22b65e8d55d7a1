"""Write the files of torch.save without holding them in memory: tensors come in any order, in parts, from threads.

Such a file is a zip without compression: `data.pkl` (the pickle, in which tensors name storages), `data/0`,
`data/1`, … (the storages) and two small records. All lengths follow from the pickle and the sizes, so
`TorchSaveLayout` knows where each tensor will lie before the first byte is written. The header of a record holds
the CRC-32 of its bytes, so `TorchSaveWriter` writes it together with a tensor that comes whole, and after the last
part of one that comes in parts.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2

from trainshed.checkpoints.io import HashedFile

_LOCAL, _CENTRAL, _END = 0x04034B50, 0x02014B50, 0x06054B50
_END_64, _LOCATOR_64 = 0x06064B50, 0x07064B50
_MAX_32_BITS = 0xFFFFFFFF
_WIDE_FROM = _MAX_32_BITS  # a number from here on stands in a field of 64 bits, and 32 set bits where it should be
_VERSION = 45  # of the zip format: the first with 64-bit sizes
_DATE = 0x21  # 1980-01-01: the same weights give the same bytes
_ALIGNMENT = 64  # of storages, as torch.save aligns them, so that they can be mapped
_STORAGE_CLASSES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}


@dataclass(frozen=True)
class TensorPlaceholder:
    """Stands in a document for a tensor whose bytes come later."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The bytes of its storage."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _ZipRecord:
    name: bytes
    size: int
    start: int
    extra: bytes


class TorchSaveLayout:
    """Everything of a file but its tensors' bytes: a document in which `TensorPlaceholder`s stand for tensors."""

    def __init__(self, document: Any, root: str = "archive") -> None:
        self._pickle, self.stubs = _pickled(document)
        small = {"data.pkl": self._pickle, "version": b"3\n", "byteorder": b"little"}
        self._small = list(small.values())
        sizes = [(name, len(data)) for name, data in small.items()]
        sizes += [(f"data/{number}", stub.bytes) for number, stub in enumerate(self.stubs)]
        self._places: list[_ZipRecord] = []
        end = 0
        for name, size in sizes:
            full = f"{root}/{name}".encode()
            place = _ZipRecord(full, size, end, _local_extra(end, full, size))
            self._places.append(place)
            end = _data_start(place) + size
        self._end = self._directory = end
        # Files of ours hold frames side by side: the next one's tensors are aligned as well, which the kernel's copy
        # into the page cache takes a fifth less time for.
        self._directory += -(end + len(self._central([0] * len(self._places)))) % _ALIGNMENT
        self.length = self._directory + len(self._central([0] * len(self._places)))

    @property
    def starts(self) -> list[int]:
        """Where the bytes of each stub begin."""
        return [_data_start(place) for place in self._places[-len(self.stubs) :]] if self.stubs else []

    def head(self, number: int, checksum: int) -> tuple[int, bytes]:
        """Where the bytes before those of a stub begin, and these: its header, and before the first all else."""
        place = self._places[len(self._small) + number]
        before = self._records() if number == 0 else b""
        return place.start - len(before), before + _local_header(place, checksum)

    def tail(self, checksums: Sequence[int]) -> tuple[int, bytes]:
        """Where the bytes after those of the last stub begin, and these: the directory."""
        padding = bytes(self._directory - self._end)
        return self._end, padding + self._central([*map(zlib.crc32, self._small), *checksums])

    def to_bytes(self) -> bytes:
        """The file of a document without tensors."""
        assert not self.stubs
        return self._records() + self.tail([])[1]

    def _records(self) -> bytes:
        """What is not tensors, each with its header."""
        small = zip(self._places, self._small, strict=False)
        return b"".join(_local_header(place, zlib.crc32(data)) + data for place, data in small)

    def _central(self, sums: Sequence[int]) -> bytes:
        """The directory at the end, with the checksum of every record."""
        found = bytearray()
        for place, checksum in zip(self._places, sums, strict=True):
            wide = [value for value in (place.size, place.size, place.start) if value >= _WIDE_FROM]
            extra = struct.pack("<HH", 1, 8 * len(wide)) + b"".join(struct.pack("<Q", v) for v in wide) if wide else b""
            size, start = _narrow(place.size), _narrow(place.start)
            fields = (_CENTRAL, _VERSION, _VERSION, 0, 0, 0, _DATE, checksum, size, size)
            found += struct.pack("<IHHHHHHIII", *fields)
            found += struct.pack("<HHHHHII", len(place.name), len(extra), 0, 0, 0, 0, start) + place.name + extra
        count, start, length = len(self._places), self._directory, len(found)
        end = b""
        if start >= _WIDE_FROM or count >= 0xFFFF:
            end = struct.pack("<IQHHIIQQQQ", _END_64, 44, _VERSION, _VERSION, 0, 0, count, count, length, start)
            end += struct.pack("<IIQI", _LOCATOR_64, 0, start + length, 1)
        few = min(count, 0xFFFF)
        return bytes(found) + end + struct.pack("<IHHHHIIH", _END, 0, 0, few, few, length, _narrow(start), 0)


class _StorageReference:
    """What a pickle names as a tensor's storage."""

    def __init__(self, stub: TensorPlaceholder, key: int) -> None:
        self.stub, self.key = stub, key


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.stubs: list[TensorPlaceholder] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _StorageReference):
            return None
        return "storage", _STORAGE_CLASSES[obj.stub.dtype], str(obj.key), "cpu", math.prod(obj.stub.shape)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, TensorPlaceholder):
            return NotImplemented
        storage = _StorageReference(obj, len(self.stubs))
        self.stubs.append(obj)
        strides, step = [], 1
        for length in reversed(obj.shape):
            strides.append(step)
            step *= length
        return _rebuild_tensor_v2, (storage, 0, obj.shape, tuple(reversed(strides)), False, OrderedDict())


def _pickled(document: Any) -> tuple[bytes, list[TensorPlaceholder]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(document)
    return file.getvalue(), pickler.stubs


def _local_extra(start: int, name: bytes, size: int) -> bytes:
    """What stands between a record's name and its bytes: a size that 32 bits cannot hold, and the alignment."""
    wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= _WIDE_FROM else b""
    padding = -(start + 30 + len(name) + len(wide) + 4) % _ALIGNMENT
    return wide + struct.pack("<HH", 0x4246, padding) + bytes(padding)


def _local_header(place: _ZipRecord, checksum: int) -> bytes:
    size = _narrow(place.size)
    fields = (_LOCAL, _VERSION, 0, 0, 0, _DATE, checksum, size, size, len(place.name), len(place.extra))
    return struct.pack("<IHHHHHIIIHH", *fields) + place.name + place.extra


def _data_start(place: _ZipRecord) -> int:
    return place.start + 30 + len(place.name) + len(place.extra)


def _narrow(value: int) -> int:
    return value if value < _WIDE_FROM else _MAX_32_BITS


_POLYNOMIAL = 0xEDB88320  # of CRC-32 as zip has it, its bits reversed
_ONE = 1 << 31


def crc32_combine(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of parts side by side, each given as (its own CRC-32, its bytes): zlib's `crc32_combine`."""
    whole = 0
    for checksum, length in parts:
        whole = _product(_shift(length), whole) ^ checksum
    return whole


@cache
def _shift(length: int) -> int:
    """x to the power of 8 · `length`, modulo the polynomial: what so many bytes behind it do to a checksum."""
    found, square = _ONE, _ONE >> 8
    while length:
        if length & 1:
            found = _product(square, found)
        square = _product(square, square)
        length >>= 1
    return found


def _product(a: int, b: int) -> int:
    """The product of two polynomials over two elements, modulo the polynomial."""
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


class TorchSaveWriter:
    """A frame that begins at byte `base` of a file."""

    def __init__(self, frame: TorchSaveLayout, file: HashedFile, base: int = 0) -> None:
        self._frame, self._file, self._base = frame, file, base
        self._starts = frame.starts
        self._parts: list[dict[int, tuple[int, int]]] = [{} for _ in frame.stubs]
        self._sums: dict[int, int] = {}
        self._lock = threading.Lock()

    def write(self, number: int, start: int, data: memoryview) -> None:
        """Write bytes of a stub's tensor, from its byte `start` on; an empty tensor is written as such, too."""
        checksum, size = zlib.crc32(data), self._frame.stubs[number].bytes
        if len(data) == size:
            self._finish(number, checksum, data)
            return
        self._file.write(self._base + self._starts[number] + start, data)
        with self._lock:
            parts = self._parts[number]
            parts[start] = checksum, len(data)
            if sum(length for _, length in parts.values()) < size:
                return
        self._finish(number, crc32_combine(part for _, part in sorted(parts.items())), memoryview(b""))

    def _finish(self, number: int, checksum: int, data: memoryview) -> None:
        """Write what stands before a tensor, with its bytes where these are to be written; behind the last, the end."""
        start, head = self._frame.head(number, checksum)
        with self._lock:
            self._sums[number] = checksum
            last = len(self._sums) == len(self._frame.stubs)
        end, tail = self._frame.tail([self._sums[each] for each in range(len(self._sums))]) if last else (0, b"")
        if tail and end == start + len(head) + len(data):
            self._file.write(self._base + start, head, data, tail)
            return
        self._file.write(self._base + start, head, data)
        self._file.write(self._base + end, tail)
