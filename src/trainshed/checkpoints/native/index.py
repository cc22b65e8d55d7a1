"""The index of a checkpoint (`pieces-NNNN.json`): where the bytes of every tensor lie, with a checksum for each item.

It says what `.metadata` says, in a form that needs neither torch nor unpickling.
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
"""Since 2 checksums are of any algorithm; in 1 all are SHA-256."""


@dataclass(frozen=True)
class IndexedItem:
    """A box of a tensor, saved by `torch.save` as the bytes [start, start + length) of a file."""

    offset: tuple[int, ...]
    box: tuple[int, ...]
    file: str
    start: int
    length: int
    checksum: str


@dataclass(frozen=True)
class IndexedTensor:
    """One tensor as a whole, and the items that make it up."""

    shape: tuple[int, ...]
    dtype: str
    items: tuple[IndexedItem, ...]


def encode_index(tensors: Mapping[str, IndexedTensor]) -> bytes:
    """The table as it is stored: files by number, items as lists, because there may be millions."""
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
                    [item.offset, item.box, number[item.file], item.start, item.length, item.checksum]
                    for item in tensor.items
                ],
            }
            for name, tensor in tensors.items()
        },
    }
    return orjson.dumps(document)


def decode_index(data: bytes, where: str) -> dict[str, IndexedTensor]:
    """Read the table; its checksum has been compared by whoever read the bytes."""
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
                IndexedItem(tuple(offset), tuple(box), files[file], start, length, checksum)
                for offset, box, file, start, length, checksum in tensor["items"]
            ),
        )
        for name, tensor in document["tensors"].items()
    }


def read_index(store: Store, found: CompleteCheckpoint) -> dict[str, IndexedTensor]:
    """Read a checkpoint's table of contents, checked against the manifest."""
    name = found.facts["pieces"]
    entry = next((each for each in found.manifest.files if each.path == name), None)
    where = join(store.url, f"{found.path}/{name}")
    data = store.read(f"{found.path}/{name}")
    if entry is None or checksum_of(data, algorithm_of(entry.checksum)) != entry.checksum:
        raise corrupt_checkpoint(store, found, "the table of pieces is not what the manifest says", where)
    return decode_index(data, where)


def overlap(
    item: IndexedItem, offset: Sequence[int], box: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where an item and the box at `offset` meet: inside the item and inside the box, or None if they do not."""
    starts = [max(a, b) for a, b in zip(item.offset, offset, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(item.offset, item.box, offset, box, strict=True)]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return _slices(starts, ends, item.offset), _slices(starts, ends, offset)


def _slices(starts: list[int], ends: list[int], offset: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start - zero, end - zero) for start, end, zero in zip(starts, ends, offset, strict=True))


def corrupt_checkpoint(store: Store, found: CompleteCheckpoint, what: str, where: str) -> CorruptData:
    """The error for a broken checkpoint, with the way to the one before it."""
    folder = found.path.rpartition("/")[0]
    before = next((each for each in complete_checkpoints(store, folder) if each.step < found.step), None)
    run = join(store.url, folder.rpartition("/")[0])
    remove = f"`trainshed checkpoints {run} --verify --prune` removes it"
    if before is None:
        return CorruptData(what, where=where, hint=f"{remove}; there is no earlier checkpoint to go on from")
    earlier = join(store.url, before.path)
    return CorruptData(what, where=where, hint=f"{remove}, and the run goes on from step {before.step} ({earlier})")
