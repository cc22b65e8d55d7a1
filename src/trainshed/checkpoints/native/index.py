"""The index of a checkpoint (`pieces-NNNN.json`): where the bytes of every tensor are, with a checksum for each item.

It contains what `.metadata` contains, in a form that needs neither torch nor unpickling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from trainshed.checkpoints.native.folder import CompleteCheckpoint, complete_checkpoints
from trainshed.errors import CorruptData
from trainshed.storage import Store, algorithm_of, checksum_of, join

INDEX_FORMAT = 2
"""In format 2 a checksum may be of any algorithm; in format 1 all are SHA-256."""


@dataclass(frozen=True)
class IndexedItem:
    """A box of a tensor, in the format of torch.save, as the bytes [start, start + length) of a file."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    checksum: str


@dataclass(frozen=True)
class IndexedTensor:
    """One whole tensor, and its items."""

    shape: tuple[int, ...]
    dtype: str
    items: tuple[IndexedItem, ...]


def encode_index(tensors: Mapping[str, IndexedTensor]) -> bytes:
    """Return the index as it is stored: files by number, items as lists, because there may be millions."""
    files = sorted({item.file for tensor in tensors.values() for item in tensor.items})
    number = {file: index for index, file in enumerate(files)}
    document = {
        "format": INDEX_FORMAT,
        "files": files,
        "tensors": {
            name: {
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                "items": [
                    [item.offset, item.sizes, number[item.file], item.start, item.length, item.checksum]
                    for item in tensor.items
                ],
            }
            for name, tensor in tensors.items()
        },
    }
    return orjson.dumps(document)


def decode_index(data: bytes, where: str) -> dict[str, IndexedTensor]:
    """Read an index; the caller has compared its checksum."""
    document: Any = orjson.loads(data)
    if document["format"] > INDEX_FORMAT:
        raise CorruptData(
            f"the table of pieces has format {document['format']}, this Trainshed reads up to {INDEX_FORMAT}",
            where=where,
            hint="upgrade Trainshed",
        )
    files = document["files"]
    return {
        name: IndexedTensor(
            tuple(tensor["shape"]),
            tensor["dtype"],
            tuple(
                IndexedItem(tuple(offset), tuple(sizes), files[file], start, length, checksum)
                for offset, sizes, file, start, length, checksum in tensor["items"]
            ),
        )
        for name, tensor in document["tensors"].items()
    }


def read_index(store: Store, checkpoint: CompleteCheckpoint) -> dict[str, IndexedTensor]:
    """Read a checkpoint's index, checked against the manifest."""
    name = checkpoint.facts["pieces"]
    entry = next((file for file in checkpoint.manifest.files if file.path == name), None)
    where = join(store.url, f"{checkpoint.path}/{name}")
    data = store.read(f"{checkpoint.path}/{name}")
    if entry is None or checksum_of(data, algorithm_of(entry.checksum)) != entry.checksum:
        raise corrupt_checkpoint(store, checkpoint, "the table of pieces is not what the manifest says", where)
    return decode_index(data, where)


def overlap(
    item: IndexedItem, offset: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of an item and the box at `offset`, as slices of the item and of the box; None without one."""
    starts = [max(a, b) for a, b in zip(item.offset, offset, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(item.offset, item.sizes, offset, sizes, strict=True)]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return _slices(starts, ends, item.offset), _slices(starts, ends, offset)


def _slices(starts: list[int], ends: list[int], offset: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start - origin, end - origin) for start, end, origin in zip(starts, ends, offset, strict=True))


def corrupt_checkpoint(store: Store, checkpoint: CompleteCheckpoint, what: str, where: str) -> CorruptData:
    """Return the error for a broken checkpoint; its hint names the checkpoint before it."""
    folder = checkpoint.path.rpartition("/")[0]
    earlier = next((other for other in complete_checkpoints(store, folder) if other.step < checkpoint.step), None)
    run = join(store.url, folder.rpartition("/")[0])
    remove = f"`trainshed checkpoints {run} --verify --prune` removes it"
    if earlier is None:
        return CorruptData(what, where=where, hint=f"{remove}; there is no earlier checkpoint to go on from")
    address = join(store.url, earlier.path)
    return CorruptData(what, where=where, hint=f"{remove}, and the run goes on from step {earlier.step} ({address})")
