"""Write files in the format of torch.save without holding them in memory: tensors arrive in any order, from threads.

Such a file is a zip without compression: `data.pkl` (a pickle in which tensors name storages), `data/0`, `data/1`, …
(the storages) and two small records. All lengths follow from the pickle and the sizes. So `TorchSaveLayout` knows the
offset of every tensor before the first byte is written. The header of a record holds the CRC-32 of its bytes:
`TorchSaveWriter` writes it together with a tensor that arrives at once, and after the last part of one that does not.

PyTorch's own `torch.serialization.skip_data` was tried (torch 2.13, `benchmarks/convert.py`, 1.4 GB, best of five, two
busy cores): native, torch_dist and legacy files took 1.7, 0.9 and 0.9 s in 355 MiB, with this module 1.1, 1.1 and
0.8 s in 327 MiB. It needs a fifth less CPU time, because it leaves the CRC-32 of tensors at 0, and zip programs then
refuse the files. It is also documented as a prototype, and its bytes depend on the version of torch; so only files
without tensors are written by torch.save.
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
_ZIP64_FROM = _MAX_32_BITS  # a number from here on is stored in a field of 64 bits; its 32-bit field is all ones
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
    """Takes the place of a tensor in a document; the tensor's bytes are written later."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The bytes of its storage."""
        return math.prod(self.shape) * self.dtype.itemsize


class TorchSaveLayout:
    """A whole file except its tensors' bytes. It is made from a document with at least one `TensorPlaceholder`.

    `tensors` are the placeholders by number, `tensor_offsets` where the bytes of each start, `length` is that of the
    file.
    """

    def __init__(self, document: Any, root: str = "archive") -> None:
        pickled, self.tensors = _pickle_document(document)
        small = {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}
        self._small_records = list(small.values())
        sizes = [(name, len(data)) for name, data in small.items()]
        sizes += [(f"data/{number}", tensor.bytes) for number, tensor in enumerate(self.tensors)]
        self._records: list[_ZipRecord] = []
        end = 0
        for name, size in sizes:
            full_name = f"{root}/{name}".encode()
            record = _ZipRecord(full_name, size, end, _local_extra(end, full_name, size))
            self._records.append(record)
            end = record.data_start + size
        self.tensor_offsets = [record.data_start for record in self._records[len(small) :]]
        self._end = self._directory_start = end
        # A `.distcp` holds many of these files one after the other. The padding aligns the next one's tensors as well:
        # the kernel then copies them into the page cache in a fifth less time.
        directory_bytes = len(self._directory([0] * len(self._records)))
        self._directory_start += -(end + directory_bytes) % _ALIGNMENT
        self.length = self._directory_start + len(self._directory([0] * len(self._records)))

    def head(self, number: int, checksum: int) -> tuple[int, bytes]:
        """Return where the bytes before a tensor start, and these bytes: its header, for the first all records too."""
        record = self._records[len(self._small_records) + number]
        before = b""
        if number == 0:
            small = zip(self._records, self._small_records, strict=False)
            before = b"".join(record.local_header(zlib.crc32(data)) + data for record, data in small)
        return record.start - len(before), before + record.local_header(checksum)

    def tail(self, checksums: Sequence[int]) -> tuple[int, bytes]:
        """Return where the bytes after the last tensor start, and these bytes: the directory."""
        padding = bytes(self._directory_start - self._end)
        return self._end, padding + self._directory([*map(zlib.crc32, self._small_records), *checksums])

    def _directory(self, checksums: Sequence[int]) -> bytes:
        """Return the central directory at the end of a zip, with the checksum of every record."""
        directory = b"".join(
            record.directory_entry(checksum) for record, checksum in zip(self._records, checksums, strict=True)
        )
        count, start, length = len(self._records), self._directory_start, len(directory)
        end = b""
        if start >= _ZIP64_FROM or count >= 0xFFFF:
            end = struct.pack("<IQHHIIQQQQ", _END_64, 44, _VERSION, _VERSION, 0, 0, count, count, length, start)
            end += struct.pack("<IIQI", _LOCATOR_64, 0, start + length, 1)
        short_count = min(count, 0xFFFF)
        end += struct.pack("<IHHHHIIH", _END, 0, 0, short_count, short_count, length, _in_32_bits(start), 0)
        return directory + end


@dataclass(frozen=True)
class _ZipRecord:
    name: bytes
    size: int
    start: int
    extra: bytes

    @property
    def data_start(self) -> int:
        return self.start + 30 + len(self.name) + len(self.extra)

    def local_header(self, checksum: int) -> bytes:
        size = _in_32_bits(self.size)
        fields = (_LOCAL, _VERSION, 0, 0, 0, _DATE, checksum, size, size, len(self.name), len(self.extra))
        return struct.pack("<IHHHHHIIIHH", *fields) + self.name + self.extra

    def directory_entry(self, checksum: int) -> bytes:
        large = [value for value in (self.size, self.size, self.start) if value >= _ZIP64_FROM]
        extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        size, start = _in_32_bits(self.size), _in_32_bits(self.start)
        fields = (_CENTRAL, _VERSION, _VERSION, 0, 0, 0, _DATE, checksum, size, size)
        entry = struct.pack("<IHHHHHHIII", *fields)
        return entry + struct.pack("<HHHHHII", len(self.name), len(extra), 0, 0, 0, 0, start) + self.name + extra


def _local_extra(start: int, name: bytes, size: int) -> bytes:
    """Return what is between a record's name and its bytes: a size of 64 bits if it needs one, and the alignment."""
    large = struct.pack("<HHQQ", 1, 16, size, size) if size >= _ZIP64_FROM else b""
    padding = -(start + 30 + len(name) + len(large) + 4) % _ALIGNMENT
    return large + struct.pack("<HH", 0x4246, padding) + bytes(padding)


def _in_32_bits(value: int) -> int:
    return value if value < _ZIP64_FROM else _MAX_32_BITS


class _StorageReference:
    """What a pickle names as a tensor's storage."""

    def __init__(self, tensor: TensorPlaceholder, key: int) -> None:
        self.tensor, self.key = tensor, key


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[TensorPlaceholder] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _StorageReference):
            return None
        return "storage", _STORAGE_CLASSES[obj.tensor.dtype], str(obj.key), "cpu", math.prod(obj.tensor.shape)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, TensorPlaceholder):
            return NotImplemented
        storage = _StorageReference(obj, len(self.tensors))
        self.tensors.append(obj)
        stride = tuple(math.prod(obj.shape[dim + 1 :]) for dim in range(len(obj.shape)))
        return _rebuild_tensor_v2, (storage, 0, obj.shape, stride, False, OrderedDict())


def _pickle_document(document: Any) -> tuple[bytes, list[TensorPlaceholder]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(document)
    return file.getvalue(), pickler.tensors


class TorchSaveWriter:
    """Writes a layout into a file, from the byte `offset` of the file on."""

    def __init__(self, layout: TorchSaveLayout, file: HashedFile, offset: int = 0) -> None:
        self._layout, self._file, self._offset = layout, file, offset
        self._parts: list[dict[int, tuple[int, int]]] = [{} for _ in layout.tensors]
        self._checksums: dict[int, int] = {}
        self._lock = threading.Lock()

    def write(self, number: int, start: int, data: memoryview) -> None:
        """Write bytes of a tensor, from its byte `start` on; a tensor without elements needs one empty write."""
        checksum, size = zlib.crc32(data), self._layout.tensors[number].bytes
        if len(data) == size:
            self._finish_tensor(number, checksum, data)
            return
        self._file.write(self._offset + self._layout.tensor_offsets[number] + start, data)
        with self._lock:
            parts = self._parts[number]
            parts[start] = checksum, len(data)
            if sum(length for _, length in parts.values()) < size:
                return
        self._finish_tensor(number, crc32_combine(part for _, part in sorted(parts.items())), memoryview(b""))

    def _finish_tensor(self, number: int, checksum: int, data: memoryview) -> None:
        """Write the head of a tensor and the bytes that are not written yet; after the last tensor, the directory."""
        start, head = self._layout.head(number, checksum)
        with self._lock:
            self._checksums[number] = checksum
            is_last = len(self._checksums) == len(self._layout.tensors)
        end, tail = 0, b""
        if is_last:
            end, tail = self._layout.tail([self._checksums[index] for index in range(len(self._checksums))])
        if tail and end == start + len(head) + len(data):
            self._file.write(self._offset + start, head, data, tail)
            return
        self._file.write(self._offset + start, head, data)
        self._file.write(self._offset + end, tail)


_POLYNOMIAL = 0xEDB88320  # of CRC-32 as in zip, its bits reversed
_ONE = 1 << 31


def crc32_combine(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of adjacent parts, each given as (its own CRC-32, its bytes): zlib's `crc32_combine`."""
    combined = 0
    for checksum, length in parts:
        combined = _multiply(_shift(length), combined) ^ checksum
    return combined


@cache
def _shift(length: int) -> int:
    """Return x to the power of 8 · `length`, modulo the polynomial: the effect of `length` bytes after a checksum."""
    power, square = _ONE, _ONE >> 8
    while length:
        if length & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        length >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials over two elements, modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
