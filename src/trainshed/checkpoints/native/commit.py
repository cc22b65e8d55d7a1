"""One rank's file of a checkpoint, hashed while it is written; and the commit of all ranks' files by rank 0.

The commit writes the index and `.metadata`, then the manifest, then `latest`, and `best` where it is the best so far.
"""

from __future__ import annotations

import math
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
from trainshed.checkpoints.native.folder import (
    BEST,
    FORMAT,
    KIND,
    LATEST,
    METADATA,
    BestPointer,
    LatestPointer,
    index_name,
    step_folder,
)
from trainshed.checkpoints.native.index import IndexedItem, IndexedTensor, encode_index
from trainshed.checkpoints.native.shards import DTYPES, SavePlan, WriteItem
from trainshed.checkpoints.torch_save_writer import TensorPlaceholder, TorchSaveLayout
from trainshed.errors import TrainshedError
from trainshed.storage import FileEntry, Hasher, Manifest, Store, Writer, checksum_of
from trainshed.storage.attempts import Attempt
from trainshed.storage.manifest import MANIFEST

# Smaller items are collected before they are written.
_SMALL_BYTES = 1024 * 1024
# Small enough that a slice is still in the processor's caches when the second checksum sees it.
_SLICE_BYTES = 8 * 1024 * 1024
# What torch.save adds to a tensor is below 2 kB; the bound lets a bucket choose its part size.
_ITEM_OVERHEAD_BYTES = 8 * 1024


@dataclass(frozen=True)
class ItemSpan:
    """The place of one item in the rank's file; an item without elements has no bytes."""

    start: int
    length: int
    checksum: str


@dataclass(frozen=True)
class RankFileRecord:
    """What a rank sends about its file. `items` is None where rank 0 knows them already, by the plan's digest."""

    plan_digest: str
    items: tuple[WriteItem, ...] | None
    spans: tuple[ItemSpan, ...]
    file: FileEntry

    def to_bytes(self) -> bytes:
        """The record as it is sent to rank 0."""
        items = self.items and [(i.name, i.shape, i.dtype, i.offset, i.sizes, i.start, i.size) for i in self.items]
        spans = [(span.start, span.length, span.checksum) for span in self.spans]
        file = (self.file.path, self.file.size, self.file.checksum)
        return orjson.dumps({"plan": self.plan_digest, "items": items, "spans": spans, "file": file})

    @classmethod
    def from_bytes(cls, data: bytes) -> RankFileRecord:
        """Read a record."""
        document = orjson.loads(data)
        items = document["items"] and tuple(
            WriteItem(name, tuple(shape), dtype, tuple(offset), tuple(sizes), start, size)
            for name, shape, dtype, offset, sizes, start, size in document["items"]
        )
        spans = tuple(ItemSpan(*span) for span in document["spans"])
        return cls(document["plan"], items, spans, FileEntry(*document["file"]))

    def without_items(self) -> RankFileRecord:
        """The record for a rank 0 that knows the plan."""
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
                # The head of an item holds its CRC-32: that of the next is computed while this one is written.
                while len(ahead) < 2 and number + len(ahead) < len(data):
                    ahead.append(pool.submit(zlib.crc32, data[number + len(ahead)]))
                checksum, start = ahead.popleft().result(), stream.file.size
                stream.item = Hasher()
                if item.size:
                    head, tail = frame_item(item, checksum)
                    for part in (head, data[number], tail):
                        stream.write(part)
                spans.append(ItemSpan(start, stream.file.size - start, stream.item.checksum))
            stream.flush()
        entry = FileEntry(name, stream.file.size, stream.file.checksum)
    return RankFileRecord(plan.digest, plan.items, tuple(spans), entry)


def frame_item(item: WriteItem, crc32: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after those of an item; all three together are a file of torch.save."""
    layout = _item_layout(item.sizes, item.dtype)
    return layout.head(0, crc32)[1], layout.tail([crc32])[1]


def framed_item_bytes(item: WriteItem) -> int:
    """Return the bytes that an item takes in the file."""
    return _item_layout(item.sizes, item.dtype).length if item.size else 0


@lru_cache(maxsize=1024)
def _item_layout(sizes: tuple[int, ...], dtype: str) -> TorchSaveLayout:
    return TorchSaveLayout(TensorPlaceholder(sizes, DTYPES[dtype]))


class _HashingStream:
    """Writes bytes to a store and updates the checksums of the item and of the file at the same time.

    The two checksums and the write take about the same time; they wait for each other only once per slice.
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
            futures = [self._pool.submit(hasher.update, part) for hasher in (self.file, self.item)]
            try:
                self._writer.write(part)
            finally:
                for future in futures:
                    future.result()

    def flush(self) -> None:
        if self._small:
            self._writer.write(bytes(self._small))
            self._small.clear()


_OWN_FACTS = frozenset({"format", "attempt", "pieces", "tensors"})


def assemble_index(parts: Iterable[RankFileRecord]) -> dict[str, IndexedTensor]:
    """Merge the ranks' records; every element of every tensor must have been written by exactly one rank."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    items: dict[str, list[IndexedItem]] = {}
    for part in parts:
        assert part.items is not None, "rank 0 has filled in the items that it knows"
        for item, span in zip(part.items, part.spans, strict=True):
            if shapes.setdefault(item.name, (item.shape, item.dtype)) != (item.shape, item.dtype):
                raise TrainshedError(f"{item.name}: ranks disagree about its shape or dtype")
            stored_items = items.setdefault(item.name, [])
            if span.length:
                stored = IndexedItem(item.offset, item.sizes, part.file.path, span.start, span.length, span.checksum)
                stored_items.append(stored)
    for name, (shape, _) in shapes.items():
        _check_coverage(name, shape, items[name])
    return {
        name: IndexedTensor(shape, dtype, tuple(sorted(items[name], key=lambda item: item.offset)))
        for name, (shape, dtype) in shapes.items()
    }


def _check_coverage(name: str, shape: tuple[int, ...], items: list[IndexedItem]) -> None:
    written, wanted = sum(math.prod(item.sizes) for item in items), math.prod(shape)
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
    """Write the index and `.metadata` of all ranks' files; return the manifest that will commit them."""
    contents = checkpoint_contents(parts, step, attempt.number, spec, facts)
    path = step_folder(folder, step)
    attempt.store.put(f"{path}/{index_name(attempt.number)}", contents.index)
    attempt.put(f"{path}/{METADATA}", contents.metadata)
    return contents.manifest


@dataclass(frozen=True)
class CheckpointContents:
    """The index and `.metadata` as they are stored, and the manifest that names them and the ranks' files."""

    index: bytes
    metadata: bytes
    manifest: Manifest


def checkpoint_contents(
    parts: Iterable[RankFileRecord],
    step: int,
    attempt: int,
    spec: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
) -> CheckpointContents:
    """Describe the files that all ranks have written for one step."""
    facts = facts or {}
    if reserved := _OWN_FACTS & facts.keys():
        raise ValueError(f"'{min(reserved)}' is a fact that the checkpoint writes itself")
    assert facts.get("step", step) == step
    parts = list(parts)
    tensors = assemble_index(parts)
    index, metadata = encode_index(tensors), _encode_metadata(tensors)
    own_facts = {
        "format": FORMAT,
        "step": step,
        "attempt": attempt,
        "pieces": index_name(attempt),
        "tensors": {name: {"shape": list(tensor.shape), "dtype": tensor.dtype} for name, tensor in tensors.items()},
    }
    files = [
        *(part.file for part in parts),
        FileEntry(index_name(attempt), len(index), checksum_of(index)),
        FileEntry(METADATA, len(metadata), checksum_of(metadata)),
    ]
    return CheckpointContents(index, metadata, Manifest.of(KIND, spec, files, {**facts, **own_facts}))


def commit_checkpoint(
    attempt: Attempt, folder: str, step: int, manifest: Manifest, best_loss: float | None = None
) -> None:
    """Store the manifest, which makes the checkpoint exist, and point `latest` to it.

    With `best_loss` it is the best checkpoint so far, and `best` points to it as well.
    """
    attempt.put(f"{step_folder(folder, step)}/{MANIFEST}", manifest.to_bytes())
    attempt.put(f"{folder}/{LATEST}", LatestPointer(step, attempt.number, attempt.number).to_bytes())
    if best_loss is not None:
        commit_best(attempt, folder, step, best_loss)


def commit_best(attempt: Attempt, folder: str, step: int, loss: float) -> None:
    """Point `best` to a checkpoint that is stored."""
    attempt.put(f"{folder}/{BEST}", BestPointer(step, loss, attempt.number).to_bytes())


def _encode_metadata(tensors: Mapping[str, IndexedTensor]) -> bytes:
    """Return the `.metadata` file, for PyTorch's own reader."""
    from trainshed.checkpoints.dcp import DcpMetadataBuilder

    builder = DcpMetadataBuilder()
    for name, tensor in tensors.items():
        builder.add_tensor(name, tensor.shape, DTYPES[tensor.dtype])
        for item in tensor.items:
            builder.add_chunk(name, item.offset, item.sizes, item.file, item.start, item.length)
    return builder.to_bytes()
