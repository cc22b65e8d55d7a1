"""What a rank holds of each tensor, and how it is cut into the items that the rank writes.

Layouts differ only in how tensors are cut into shards, so a checkpoint written as shards loads on any layout. A
plan is made once and kept while names, shapes and offsets stay the same, which in training is always.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import torch


@dataclass(frozen=True)
class TensorShard:
    """`tensor` is elements [offset, offset + tensor.shape) of the global tensor of this `shape`.

    Several ranks may hold the same piece (replicas); exactly one of them is its `owner` and writes it. A rank that
    holds nothing of a tensor (more ranks than rows) has a piece with a 0 in its shape.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    owner: bool = True


# A reader needs an item whole, to check it: small enough to hold several, large enough that requests do not count.
ITEM_BYTES = 128 * 1024 * 1024
_ALIGNMENT_BYTES = 64

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}
"""What a checkpoint may hold, by the name it is stored under."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name a dtype is stored under."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"checkpoints hold no {name} tensors")
    return name


@dataclass(frozen=True)
class WriteItem:
    """A box of one tensor; its bytes are [start, start + size) of the staging buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: tuple[int, ...]
    box: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class SavePlan:
    """All items of one rank; `starts` says where each whole piece lies in the staging buffer of `size` bytes.

    An item without elements is in the plan, because it tells that the tensor exists, and is not written.
    """

    key: tuple[Any, ...]
    items: tuple[WriteItem, ...]
    starts: Mapping[str, int]
    size: int
    digest: str


def save_plan_key(tensors: Mapping[str, TensorShard]) -> tuple[Any, ...]:
    """All that a plan depends on: equal keys, equal plans."""
    return tuple(
        (name, tuple(piece.shape), tuple(piece.offset), tuple(piece.tensor.shape), piece.tensor.dtype)
        for name, piece in tensors.items()
        if piece.owner
    )


def make_save_plan(tensors: Mapping[str, TensorShard], item_bytes: int = ITEM_BYTES) -> SavePlan:
    """Plan the writing of all pieces that this rank owns."""
    items: list[WriteItem] = []
    starts: dict[str, int] = {}
    end = 0
    for name, piece in tensors.items():
        if not piece.owner:
            continue
        check_bounds(name, piece)
        starts[name] = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        items += _cut_into_items(name, piece, starts[name], item_bytes)
        end = starts[name] + piece.tensor.nbytes
    told = [(item.name, item.shape, item.dtype, item.offset, item.box) for item in items]
    return SavePlan(save_plan_key(tensors), tuple(items), starts, end, hashlib.sha256(orjson.dumps(told)).hexdigest())


def _cut_into_items(name: str, piece: TensorShard, start: int, item_bytes: int) -> list[WriteItem]:
    """Cut a piece along its first dim, so that each item is one stretch of its memory."""
    shape, offset, box = tuple(piece.shape), tuple(piece.offset), tuple(piece.tensor.shape)
    dtype, size = dtype_name(piece.tensor.dtype), piece.tensor.nbytes
    if size <= item_bytes or box[0] == 1:
        return [WriteItem(name, shape, dtype, offset, box, start, size)]
    row_bytes = size // box[0]
    rows = max(1, item_bytes // row_bytes)
    items = []
    for first in range(0, box[0], rows):
        count = min(rows, box[0] - first)
        part_offset, part_box = (offset[0] + first, *offset[1:]), (count, *box[1:])
        items.append(WriteItem(name, shape, dtype, part_offset, part_box, start + first * row_bytes, count * row_bytes))
    return items


def check_bounds(name: str, piece: TensorShard) -> None:
    """Raise if a piece does not lie inside its tensor."""
    box = tuple(piece.tensor.shape)
    same_dims = len(piece.shape) == len(piece.offset) == len(box)
    inside = same_dims and all(
        offset >= 0 and offset + length <= whole
        for whole, offset, length in zip(piece.shape, piece.offset, box, strict=True)
    )
    if not (inside or (same_dims and 0 in box)):  # where nothing lies does not matter
        raise ValueError(f"{name}: a piece {box} at {tuple(piece.offset)} is not inside {tuple(piece.shape)}")
