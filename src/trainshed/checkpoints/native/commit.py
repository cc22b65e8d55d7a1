"""One rank's file of a checkpoint, hashed while it is written; and the commit of all ranks' files by rank 0.

The commit writes the index and `.metadata`, then the manifest, then `latest`, and `best` where it is the best so far.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch

from trainshed.checkpoints.io import bytes_of
from trainshed.checkpoints.native.folder import (
    BEST,
    LATEST,
    METADATA,
    BestPointer,
    LatestPointer,
    index_name,
    step_folder,
)
from trainshed.checkpoints.native.shards import DTYPES, SavePlan, WriteItem
from trainshed.checkpoints.native.table_process import make_tables
from trainshed.checkpoints.native.tables import CheckpointContents, ItemSpan, RankFileRecord
from trainshed.checkpoints.torch_save_writer import TensorPlaceholder, TorchSaveLayout
from trainshed.storage import FileEntry, Hasher, Store, Writer
from trainshed.storage.attempts import Attempt
from trainshed.storage.manifest import MANIFEST

# Smaller items are collected before they are written.
_SMALL_BYTES = 1024 * 1024
# Small enough that a slice is still in the processor's caches when the second checksum sees it.
_SLICE_BYTES = 8 * 1024 * 1024
# What torch.save adds to a tensor is below 2 kB; the bound lets a bucket choose its part size.
_ITEM_OVERHEAD_BYTES = 8 * 1024


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
    return RankFileRecord.of(plan.digest, plan.boxes, spans, entry)


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


def write_index_files(
    attempt: Attempt,
    folder: str,
    step: int,
    parts: Sequence[RankFileRecord],
    spec: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> CheckpointContents:
    """Write the index and `.metadata` of all ranks' files; return them with the manifest that will commit them."""
    contents = make_tables(parts, step, attempt.number, spec, facts)
    path = step_folder(folder, step)
    attempt.store.put(f"{path}/{index_name(attempt.number)}", contents.index)
    attempt.put(f"{path}/{METADATA}", contents.metadata)
    return contents


def commit_checkpoint(
    attempt: Attempt, folder: str, step: int, manifest: bytes, best_loss: float | None = None
) -> None:
    """Store the manifest, which makes the checkpoint exist, and point `latest` to it.

    With `best_loss` it is the best checkpoint so far, and `best` points to it as well.
    """
    attempt.put(f"{step_folder(folder, step)}/{MANIFEST}", manifest)
    attempt.put(f"{folder}/{LATEST}", LatestPointer(step, attempt.number, attempt.number).to_bytes())
    if best_loss is not None:
        commit_best(attempt, folder, step, best_loss)


def commit_best(attempt: Attempt, folder: str, step: int, loss: float) -> None:
    """Point `best` to a checkpoint that is stored."""
    attempt.put(f"{folder}/{BEST}", BestPointer(step, loss, attempt.number).to_bytes())
