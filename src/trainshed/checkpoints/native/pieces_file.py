"""The table of contents of a checkpoint: where the bytes of every part of every tensor are, and their checksums.

It says what `.metadata` says, in a form that needs neither torch nor unpickling, and with a checksum for each item.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from trainshed.errors import CorruptData

FORMAT = 2
"""Since 2 checksums are of any algorithm; in 1 all are SHA-256."""


@dataclass(frozen=True)
class StoredItem:
    """A box of a tensor, saved by `torch.save` as the bytes [start, start + length) of a file."""

    offset: tuple[int, ...]
    box: tuple[int, ...]
    file: str
    start: int
    length: int
    checksum: str


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a whole, and the items that make it up."""

    shape: tuple[int, ...]
    dtype: str
    items: tuple[StoredItem, ...]


def to_bytes(tensors: Mapping[str, StoredTensor]) -> bytes:
    """The table as it is stored: files by number, items as lists, because there may be millions."""
    files = sorted({item.file for tensor in tensors.values() for item in tensor.items})
    number = {file: index for index, file in enumerate(files)}
    document = {
        "format": FORMAT,
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


def from_bytes(data: bytes, where: str) -> dict[str, StoredTensor]:
    """Read the table; its checksum has been compared by whoever read the bytes."""
    document: Any = orjson.loads(data)
    if document["format"] > FORMAT:
        raise CorruptData(
            f"the table of pieces has format {document['format']}, this Trainshed reads up to {FORMAT}",
            where=where,
            hint="upgrade Trainshed",
        )
    files = document["files"]
    return {
        name: StoredTensor(
            tuple(tensor["shape"]),
            tensor["dtype"],
            tuple(
                StoredItem(tuple(offset), tuple(box), files[file], start, length, checksum)
                for offset, box, file, start, length, checksum in tensor["items"]
            ),
        )
        for name, tensor in document["tensors"].items()
    }
