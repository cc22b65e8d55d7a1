"""One rank's file of a checkpoint, hashed while it is written, and the commit of all ranks' files by rank 0.

The commit writes the index and `.metadata`, then the manifest, then `latest`.
"""

from __future__ import annotations

import math
import pickle
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import orjson
import torch

from trainshed.checkpoints.io import bytes_of
from trainshed.checkpoints.native import index
from trainshed.checkpoints.native.folder import (
    FORMAT,
    KIND,
    LATEST,
    MANIFEST,
    METADATA,
    LatestPointer,
    index_name,
    step_folder,
)
from trainshed.checkpoints.native.index import IndexedItem, IndexedTensor
from trainshed.checkpoints.native.shards import DTYPES, SavePlan, WriteItem
from trainshed.checkpoints.torch_save_writer import TensorPlaceholder, TorchSaveLayout
from trainshed.errors import TrainshedError
from trainshed.storage import FileEntry, Hasher, Manifest, Store, Writer, checksum_of
from trainshed.storage.attempts import Attempt

# What is smaller is gathered before it is written.
_SMALL_BYTES = 1024 * 1024
# Small enough that a slice is still in the processor's caches when the second checksum sees it.
_SLICE_BYTES = 8 * 1024 * 1024
# What torch.save adds to a tensor is below 2 kB; the bound lets a bucket choose its part size.
_ITEM_OVERHEAD_BYTES = 8 * 1024


@dataclass(frozen=True)
class ItemSpan:
    """Where one item lies in the part's file; an item without elements has no bytes."""

    start: int
    length: int
    checksum: str


@dataclass(frozen=True)
class RankFileRecord:
    """What a rank tells about its part. `items` may be left out where the listener knows them by the plan's digest."""

    plan: str
    items: tuple[WriteItem, ...] | None
    spans: tuple[ItemSpan, ...]
    file: FileEntry

    def to_bytes(self) -> bytes:
        """The record on its way to rank 0."""
        items = self.items and [(i.name, i.shape, i.dtype, i.offset, i.box, i.start, i.size) for i in self.items]
        spans = [(span.start, span.length, span.checksum) for span in self.spans]
        file = (self.file.path, self.file.size, self.file.checksum)
        return orjson.dumps({"plan": self.plan, "items": items, "spans": spans, "file": file})

    @classmethod
    def from_bytes(cls, data: bytes) -> RankFileRecord:
        """Read a record."""
        document = orjson.loads(data)
        items = document["items"] and tuple(
            WriteItem(name, tuple(shape), dtype, tuple(offset), tuple(box), start, size)
            for name, shape, dtype, offset, box, start, size in document["items"]
        )
        spans = tuple(ItemSpan(*each) for each in document["spans"])
        return cls(document["plan"], items, spans, FileEntry(*document["file"]))

    def without_items(self) -> RankFileRecord:
        """The record for a listener that knows the plan."""
        return replace(self, items=None)


def write_rank_file(
    store: Store, folder: str, name: str, plan: SavePlan, staged: Sequence[torch.Tensor]
) -> RankFileRecord:
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
                    before, behind = frame_item(item, checksum)
                    for part in (before, data[number], behind):
                        stream.write(part)
                spans.append(ItemSpan(start, stream.file.size - start, stream.item.checksum))
            stream.flush()
        entry = FileEntry(name, stream.file.size, stream.file.checksum)
    return RankFileRecord(plan.digest, plan.items, tuple(spans), entry)


def frame_item(item: WriteItem, crc32: int) -> tuple[bytes, bytes]:
    """What stands before and behind the bytes of an item, which together are a file of torch.save."""
    frame = _item_layout(item.box, item.dtype)
    return frame.head(0, crc32)[1], frame.tail([crc32])[1]


def framed_item_bytes(item: WriteItem) -> int:
    """How long an item becomes."""
    return _item_layout(item.box, item.dtype).length if item.size else 0


@lru_cache(maxsize=1024)
def _item_layout(box: tuple[int, ...], dtype: str) -> TorchSaveLayout:
    return TorchSaveLayout(TensorPlaceholder(box, DTYPES[dtype]))


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


_DCP_VERSION = "1.0.0"  # torch/distributed/checkpoint/filesystem.py, CURRENT_DCP_VERSION
_OWN_FACTS = frozenset({"format", "attempt", "pieces", "tensors"})


def assemble_index(parts: Iterable[RankFileRecord]) -> dict[str, IndexedTensor]:
    """Put the parts together; every element of every tensor must have been written by exactly one rank."""
    wholes: dict[str, tuple[tuple[int, ...], str]] = {}
    items: dict[str, list[IndexedItem]] = {}
    for part in parts:
        assert part.items is not None, "whoever gathers the parts fills in the items it knows"
        for item, span in zip(part.items, part.spans, strict=True):
            if wholes.setdefault(item.name, (item.shape, item.dtype)) != (item.shape, item.dtype):
                raise TrainshedError(f"{item.name}: ranks disagree about its shape or dtype")
            mine = items.setdefault(item.name, [])
            if span.length:
                stored = IndexedItem(item.offset, item.box, part.file.path, span.start, span.length, span.checksum)
                mine.append(stored)
    for name, (shape, _) in wholes.items():
        _check_coverage(name, shape, items[name])
    return {
        name: IndexedTensor(shape, dtype, tuple(sorted(items[name], key=lambda each: each.offset)))
        for name, (shape, dtype) in wholes.items()
    }


def _check_coverage(name: str, shape: tuple[int, ...], items: list[IndexedItem]) -> None:
    written, wanted = sum(math.prod(item.box) for item in items), math.prod(shape)
    if written != wanted or len({item.offset for item in items}) != len(items):
        raise TrainshedError(
            f"{name}: the ranks wrote {written:,} elements of a tensor of {wanted:,}",
            hint="each piece needs exactly one owner; this is a fault of Trainshed's engine: report it",
        )


def write_index_files(
    attempt: Attempt,
    folder: str,
    step: int,
    parts: Iterable[RankFileRecord],
    spec: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> Manifest:
    """Write the tables of contents of what all ranks have written; return the manifest that will commit it."""
    if taken := _OWN_FACTS & facts.keys():
        raise ValueError(f"'{min(taken)}' is a fact that the checkpoint writes itself")
    assert facts.get("step", step) == step
    parts = list(parts)
    tensors = assemble_index(parts)
    path, table = step_folder(folder, step), index_name(attempt.number)
    pieces, metadata = index.encode_index(tensors), dcp_metadata(tensors)
    own_facts = {
        "format": FORMAT,
        "step": step,
        "attempt": attempt.number,
        "pieces": table,
        "tensors": {name: {"shape": list(each.shape), "dtype": each.dtype} for name, each in tensors.items()},
    }
    files = [
        *(part.file for part in parts),
        FileEntry(table, len(pieces), checksum_of(pieces)),
        FileEntry(METADATA, len(metadata), checksum_of(metadata)),
    ]
    manifest = Manifest.of(KIND, spec, files, {**facts, **own_facts})
    attempt.store.put(f"{path}/{table}", pieces)
    attempt.put(f"{path}/{METADATA}", metadata)
    return manifest


def commit_checkpoint(attempt: Attempt, folder: str, step: int, manifest: Manifest) -> None:
    """Store the manifest, by which the checkpoint exists, and let `latest` name it."""
    attempt.put(f"{step_folder(folder, step)}/{MANIFEST}", manifest.to_bytes())
    attempt.put(f"{folder}/{LATEST}", LatestPointer(step, attempt.number, attempt.number).to_bytes())


def dcp_metadata(tensors: Mapping[str, IndexedTensor]) -> bytes:
    """The `.metadata` file as PyTorch's FileSystemReader expects it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    table, storage = {}, {}
    for name, tensor in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(item.offset), torch.Size(item.box)) for item in tensor.items]
        properties = TensorProperties(dtype=DTYPES[tensor.dtype])
        table[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, item in enumerate(tensor.items):
            storage[MetadataIndex(name, item.offset, number)] = _StorageInfo(item.file, item.start, item.length)
    # Names are kept whole where PyTorch would make nested dictionaries of them.
    metadata = Metadata(table, {name: (name,) for name in tensors}, storage, StorageMeta())
    metadata.version = _DCP_VERSION
    return pickle.dumps(metadata)
