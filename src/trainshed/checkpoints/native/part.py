"""One rank's part of a checkpoint: its items in one file, hashed on the way, and the record that tells about it."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import orjson
import torch

from trainshed.checkpoints.native.plan import Item, WritePlan
from trainshed.storage import FileEntry, Hasher, Store, Writer

# torch.save writes some forty little pieces per tensor and one large one.
_SMALL_BYTES = 1024 * 1024
_SLICE_BYTES = 16 * 1024 * 1024
# What torch.save adds to a tensor is below 2 kB; the bound lets a bucket choose its part size.
_ITEM_OVERHEAD_BYTES = 8 * 1024


@dataclass(frozen=True)
class Span:
    """Where one item lies in the part's file; an item without elements has no bytes."""

    start: int
    length: int
    sha256: str


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
        spans = [(span.start, span.length, span.sha256) for span in self.spans]
        file = (self.file.path, self.file.size, self.file.sha256)
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


def write_part(store: Store, folder: str, name: str, plan: WritePlan, staged: Iterable[torch.Tensor]) -> Part:
    """Stream the staged items into one file of a checkpoint's folder; each is asked for when its turn comes."""
    spans = []
    bound = plan.size + len(plan.items) * _ITEM_OVERHEAD_BYTES
    with ThreadPoolExecutor(2, thread_name_prefix="trainshed-hash") as pool:
        with store.writer(f"{folder}/{name}", size=bound) as writer:
            stream = _HashingStream(writer, pool)
            file: Any = stream  # torch asks for a whole IO and calls `write` and `flush`
            for item, tensor in zip(plan.items, staged, strict=True):
                start = stream.file.size
                stream.item = Hasher()
                if item.size:
                    torch.save(tensor, file)
                spans.append(Span(start, stream.file.size - start, stream.item.sha256))
            stream.flush_small()
        entry = FileEntry(name, stream.file.size, stream.file.sha256)
    return Part(plan.digest, plan.items, tuple(spans), entry)


def tensor_bytes(saved: bytes) -> memoryview:
    """The bytes of the one tensor that `torch.save` wrote, as they lie in memory: an item is saved contiguous."""
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        (record,) = (each for each in archive.infolist() if each.filename.endswith("/data/0"))
    # The local header is followed by the name and by padding of its own length.
    name, padding = struct.unpack_from("<HH", saved, record.header_offset + 26)
    start = record.header_offset + 30 + name + padding
    return memoryview(saved)[start : start + record.file_size]


class _HashingStream:
    """What `torch.save` writes to: bytes go on to a store's writer while the item's and the file's checksum grow.

    The two checksums and the write take about the same time and wait for each other only once per slice.
    """

    def __init__(self, writer: Writer, pool: ThreadPoolExecutor) -> None:
        self._writer = writer
        self._pool = pool
        self._small = bytearray()
        self.file, self.item = Hasher(), Hasher()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if len(view) < _SMALL_BYTES:
            self.file.update(view)
            self.item.update(view)
            self._small += view
            if len(self._small) >= _SMALL_BYTES:
                self.flush_small()
            return len(view)
        self.flush_small()
        for start in range(0, len(view), _SLICE_BYTES):
            part = view[start : start + _SLICE_BYTES]
            hashed = [self._pool.submit(hasher.update, part) for hasher in (self.file, self.item)]
            try:
                self._writer.write(part)
            finally:
                for each in hashed:
                    each.result()
        return len(view)

    def flush_small(self) -> None:
        if self._small:
            self._writer.write(bytes(self._small))
            self._small.clear()

    def flush(self) -> None:
        """Nothing: `torch.save` calls it after each tensor, and small writes are gathered across tensors."""
