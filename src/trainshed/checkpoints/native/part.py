"""One rank's part of a checkpoint: its items in one file, hashed on the way, and the record that tells about it."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

import orjson
import torch

from trainshed.checkpoints.native.plan import DTYPES, Item, WritePlan
from trainshed.checkpoints.pt_frame import PtFrame, Stub
from trainshed.checkpoints.scratch import bytes_of
from trainshed.storage import FileEntry, Hasher, Store, Writer

# What is smaller is gathered before it is written.
_SMALL_BYTES = 1024 * 1024
# Small enough that a slice is still in the processor's caches when the second checksum sees it.
_SLICE_BYTES = 8 * 1024 * 1024
# What torch.save adds to a tensor is below 2 kB; the bound lets a bucket choose its part size.
_ITEM_OVERHEAD_BYTES = 8 * 1024
_END_BYTES, _FULL = 22, 0xFFFFFFFF  # of a zip's directory; a number that does not fit into 32 bits


@dataclass(frozen=True)
class Span:
    """Where one item lies in the part's file; an item without elements has no bytes."""

    start: int
    length: int
    checksum: str


@dataclass(frozen=True)
class Part:
    """What a rank tells about its part. `items` may be left out where the listener knows them by the plan's digest."""

    plan: str
    items: tuple[Item, ...] | None
    spans: tuple[Span, ...]
    file: FileEntry

    def to_bytes(self) -> bytes:
        """The record on its way to rank 0."""
        items = self.items and [(i.name, i.shape, i.dtype, i.offset, i.box, i.start, i.size) for i in self.items]
        spans = [(span.start, span.length, span.checksum) for span in self.spans]
        file = (self.file.path, self.file.size, self.file.checksum)
        return orjson.dumps({"plan": self.plan, "items": items, "spans": spans, "file": file})

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """Read a record."""
        document = orjson.loads(data)
        items = document["items"] and tuple(
            Item(name, tuple(shape), dtype, tuple(offset), tuple(box), start, size)
            for name, shape, dtype, offset, box, start, size in document["items"]
        )
        spans = tuple(Span(*each) for each in document["spans"])
        return cls(document["plan"], items, spans, FileEntry(*document["file"]))

    def without_items(self) -> Part:
        """The record for a listener that knows the plan."""
        return replace(self, items=None)


def write_part(store: Store, folder: str, name: str, plan: WritePlan, staged: Sequence[torch.Tensor]) -> Part:
    """Stream the staged items into one file of a checkpoint's folder."""
    spans = []
    bound = plan.size + len(plan.items) * _ITEM_OVERHEAD_BYTES
    with ThreadPoolExecutor(3, thread_name_prefix="trainshed-hash") as pool:
        data = [bytes_of(tensor) for tensor in staged]
        ahead: deque[Future[int]] = deque()
        with store.writer(f"{folder}/{name}", size=bound) as writer:
            stream = _HashingStream(writer, pool)
            for number, item in enumerate(plan.items):
                # What stands before an item holds its CRC-32: the next is summed while this one is written.
                while len(ahead) < 2 and number + len(ahead) < len(data):
                    ahead.append(pool.submit(zlib.crc32, data[number + len(ahead)]))
                checksum, start = ahead.popleft().result(), stream.file.size
                stream.item = Hasher()
                if item.size:
                    before, behind = framed(item, checksum)
                    for part in (before, data[number], behind):
                        stream.write(part)
                spans.append(Span(start, stream.file.size - start, stream.item.checksum))
            stream.flush()
        entry = FileEntry(name, stream.file.size, stream.file.checksum)
    return Part(plan.digest, plan.items, tuple(spans), entry)


def framed(item: Item, crc32: int) -> tuple[bytes, bytes]:
    """What stands before and behind the bytes of an item, which together are a file of torch.save."""
    frame = _frame(item.box, item.dtype)
    return frame.head(0, crc32)[1], frame.tail([crc32])[1]


def item_bytes(item: Item) -> int:
    """How long an item becomes."""
    return _frame(item.box, item.dtype).length if item.size else 0


@lru_cache(maxsize=1024)
def _frame(box: tuple[int, ...], dtype: str) -> PtFrame:
    return PtFrame(Stub(box, DTYPES[dtype]))


def tensor_bytes(saved: memoryview) -> memoryview:
    """The bytes of the one tensor in a file of torch.save, as they lie in memory: an item is saved contiguous."""
    # The directory says where the record is; read by hand, since `zipfile` would take longer than reading the item.
    end = len(saved) - _END_BYTES
    if end < 0 or saved[end : end + 4] != b"PK\x05\x06":
        raise ValueError("no directory at the end")
    at = struct.unpack_from("<I", saved, end + 16)[0]
    while at != _FULL and saved[at : at + 4] == b"PK\x01\x02":
        size, name_bytes, extra_bytes, note_bytes = struct.unpack_from("<IHHH", saved, at + 24)
        header = struct.unpack_from("<I", saved, at + 42)[0]
        if bytes(saved[at + 46 : at + 46 + name_bytes]).endswith(b"/data/0") and _FULL not in (size, header):
            return _record(saved, header, size)
        at += 46 + name_bytes + extra_bytes + note_bytes
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:  # one of 4 GiB or more
        (record,) = (each for each in archive.infolist() if each.filename.endswith("/data/0"))
    return _record(saved, record.header_offset, record.file_size)


def _record(saved: memoryview, header: int, size: int) -> memoryview:
    # The local header is followed by the name and by padding of its own length.
    name, padding = struct.unpack_from("<HH", saved, header + 26)
    start = header + 30 + name + padding
    return saved[start : start + size]


class _HashingStream:
    """Bytes on their way to a store's writer, while the item's and the file's checksum grow.

    The two checksums and the write take about the same time and wait for each other only once per slice.
    """

    def __init__(self, writer: Writer, pool: ThreadPoolExecutor) -> None:
        self._writer = writer
        self._pool = pool
        self._small = bytearray()
        self.file, self.item = Hasher(), Hasher()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        if len(view) < _SMALL_BYTES:
            self.file.update(view)
            self.item.update(view)
            self._small += view
            if len(self._small) >= _SMALL_BYTES:
                self.flush()
            return
        self.flush()
        for start in range(0, len(view), _SLICE_BYTES):
            part = view[start : start + _SLICE_BYTES]
            hashed = [self._pool.submit(hasher.update, part) for hasher in (self.file, self.item)]
            try:
                self._writer.write(part)
            finally:
                for each in hashed:
                    each.result()

    def flush(self) -> None:
        if self._small:
            self._writer.write(bytes(self._small))
            self._small.clear()
