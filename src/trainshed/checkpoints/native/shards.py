"""The shard of each tensor that a rank holds, and the plan that splits it into the items that the rank writes.

Layouts differ only in how tensors are split into shards, so a checkpoint written as shards loads on any layout. A plan
is made once and reused while names, shapes and offsets stay the same; in training they always do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainshed.checkpoints.native.tables import PlannedBox, encode_boxes
from trainshed.checkpoints.weights import dtype_name
from trainshed.models.collectives import AxisGroup


@dataclass(frozen=True)
class TensorShard:
    """`local` is elements [global_offset, global_offset + local.shape) of the global tensor of `global_shape`.

    Several ranks may hold the same shard (replicas); exactly one of them is its owner and writes it. A rank that holds
    nothing of a tensor (more ranks than rows) has a shard with a 0 in its shape.

    `replicas` are the axes along which ranks hold the same shard. Where they are known, one rank reads the shard from
    a checkpoint and the others get it from that rank; where they are not, each reads it.
    """

    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local: torch.Tensor
    is_owner: bool = True
    replicas: tuple[AxisGroup, ...] = ()


# A reader must read a whole item to check it: small enough to hold several, large enough that requests do not matter.
ITEM_BYTES = 128 * 1024 * 1024
_ALIGNMENT_BYTES = 64

DTYPES: dict[str, torch.dtype] = {
    dtype_name(dtype): dtype
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
"""The dtypes of tensors in a checkpoint, by the names they are stored under."""


def stored_dtype_name(dtype: torch.dtype) -> str:
    """Return the name that a dtype is stored under; raise `ValueError` for one that checkpoints do not hold."""
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise ValueError(f"checkpoints hold no {name} tensors")
    return name


@dataclass(frozen=True)
class WriteItem:
    """A box of one tensor; its bytes are [start, start + size) of the staging buffer. `shape` is the tensor's."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class SavePlan:
    """All items of one rank; `staging_offsets` are those of the shards in the staging buffer of `size` bytes.

    An item without elements is in the plan, because it records that the tensor exists; it is not written.
    """

    key: tuple[Any, ...]
    items: tuple[WriteItem, ...]
    staging_offsets: Mapping[str, int]
    size: int
    boxes: bytes
    """The boxes of all items, as they are sent to rank 0."""
    digest: str


def save_plan_key(tensors: Mapping[str, TensorShard]) -> tuple[Any, ...]:
    """Return everything that a plan depends on: equal keys, equal plans."""
    return tuple(
        (name, tuple(shard.global_shape), tuple(shard.global_offset), tuple(shard.local.shape), shard.local.dtype)
        for name, shard in tensors.items()
        if shard.is_owner
    )


def make_save_plan(tensors: Mapping[str, TensorShard], item_bytes: int = ITEM_BYTES) -> SavePlan:
    """Plan the writing of all shards that this rank owns."""
    items: list[WriteItem] = []
    staging_offsets: dict[str, int] = {}
    end = 0
    for name, shard in tensors.items():
        if not shard.is_owner:
            continue
        check_bounds(name, shard)
        start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        staging_offsets[name] = start
        items += _split_into_items(name, shard, start, item_bytes)
        end = start + shard.local.nbytes
    boxes = encode_boxes([PlannedBox(item.name, item.shape, item.dtype, item.offset, item.sizes) for item in items])
    digest = hashlib.sha256(boxes).hexdigest()
    return SavePlan(save_plan_key(tensors), tuple(items), staging_offsets, end, boxes, digest)


def _split_into_items(name: str, shard: TensorShard, start: int, item_bytes: int) -> list[WriteItem]:
    """Split a shard along its first dim, so that each item is contiguous in its memory."""
    shape, offset, sizes = tuple(shard.global_shape), tuple(shard.global_offset), tuple(shard.local.shape)
    dtype, size = stored_dtype_name(shard.local.dtype), shard.local.nbytes
    if size <= item_bytes or sizes[0] == 1:
        return [WriteItem(name, shape, dtype, offset, sizes, start, size)]
    row_bytes = size // sizes[0]
    rows = max(1, item_bytes // row_bytes)
    items = []
    for first in range(0, sizes[0], rows):
        count = min(rows, sizes[0] - first)
        item_offset, item_sizes = (offset[0] + first, *offset[1:]), (count, *sizes[1:])
        item_start = start + first * row_bytes
        items.append(WriteItem(name, shape, dtype, item_offset, item_sizes, item_start, count * row_bytes))
    return items


def check_bounds(name: str, shard: TensorShard) -> None:
    """Raise if a shard is not inside its tensor."""
    sizes = tuple(shard.local.shape)
    same_dims = len(shard.global_shape) == len(shard.global_offset) == len(sizes)
    inside = same_dims and all(
        offset >= 0 and offset + size <= global_size
        for global_size, offset, size in zip(shard.global_shape, shard.global_offset, sizes, strict=True)
    )
    if not (inside or (same_dims and 0 in sizes)):  # the offset of an empty shard does not matter
        place = f"{tuple(shard.global_offset)} is not inside {tuple(shard.global_shape)}"
        raise ValueError(f"{name}: a piece {sizes} at {place}")
