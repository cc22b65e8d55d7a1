"""Load a checkpoint onto any layout: read the items that overlap a rank's shards, and verify their checksums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from trainshed.checkpoints.io import BufferPool, bytes_of
from trainshed.checkpoints.native.folder import CompleteCheckpoint
from trainshed.checkpoints.native.index import IndexedItem, IndexedTensor, corrupt_checkpoint, overlap, read_index
from trainshed.checkpoints.native.shards import DTYPES, TensorShard, check_bounds, stored_dtype_name
from trainshed.checkpoints.torch_save_reader import find_tensor_bytes
from trainshed.checkpoints.weights import join_names
from trainshed.errors import InputError, NotFound
from trainshed.storage import Hasher, Store, join, read_into

# Adjacent items of a file are read in one request, up to this size.
_READ_BYTES = 64 * 1024 * 1024
_WORKERS = 8


@dataclass
class _ItemRead:
    """One item, and the parts of it that are copied: (slices of the item, slices of the shard, the shard)."""

    name: str
    dtype: str
    item: IndexedItem
    copies: list[tuple[tuple[slice, ...], tuple[slice, ...], torch.Tensor]] = field(default_factory=list)


def load_checkpoint(
    store: Store,
    checkpoint: CompleteCheckpoint,
    tensors: Mapping[str, TensorShard],
    *,
    strict: bool = True,
    workers: int = _WORKERS,
) -> Mapping[str, Any]:
    """Fill the shards in place from a checkpoint, whatever layout wrote it; return the facts stored with it.

    A tensor that the checkpoint does not hold is an error; with `strict=False` it is left as it is. Nothing is
    converted: shapes and dtypes must be those that were written.

    Where shards name their replicas, all ranks call this together. The first of each group reads and checks the shard
    and sends it to the others, which read nothing: neither the items nor their part of the index.
    """
    own = {name: shard for name, shard in tensors.items() if all(axis.rank == 0 for axis in shard.replicas)}
    if own:
        _read_shards(store, checkpoint, own, strict=strict, workers=workers)
    _broadcast_replicas(tensors)
    return checkpoint.facts


def _read_shards(
    store: Store, checkpoint: CompleteCheckpoint, tensors: Mapping[str, TensorShard], *, strict: bool, workers: int
) -> None:
    stored = read_index(store, checkpoint, tensors)
    _check_fit(checkpoint, stored, tensors, strict, join(store.url, checkpoint.path))
    wanted: dict[tuple[str, int], _ItemRead] = {}
    for name, shard in tensors.items():
        if name in stored:
            _add_reads(name, stored[name], shard, wanted)
    ordered = sorted(wanted.values(), key=lambda read: (read.item.file, read.item.start))
    buffers = BufferPool()
    with ThreadPoolExecutor(workers, thread_name_prefix="trainshed-load") as pool:
        for _ in pool.map(lambda run: _load_run(store, checkpoint, run, buffers), _adjacent_runs(ordered)):
            pass


def _broadcast_replicas(tensors: Mapping[str, TensorShard]) -> None:
    """Send every shard from the rank that has read it to all that hold the same one, along one axis after the other.

    A rank takes part along an axis once it is the first of every later one: those that are not get the shard later.
    """
    for shard in tensors.values():
        for number, axis in enumerate(shard.replicas):
            if any(later.rank for later in shard.replicas[number + 1 :]) or not shard.local.numel():
                continue
            values = shard.local.detach()
            sent = values.contiguous()
            dist.broadcast(sent, group=axis.ranks, group_src=0)
            if sent.data_ptr() != values.data_ptr():
                values.copy_(sent)


def _check_fit(
    checkpoint: CompleteCheckpoint,
    stored: Mapping[str, IndexedTensor],
    tensors: Mapping[str, TensorShard],
    strict: bool,
    where: str,
) -> None:
    missing = [name for name in tensors if name not in stored]
    if missing and strict:
        raise InputError(
            f"the checkpoint of step {checkpoint.step} does not hold {join_names(missing)}",
            where=where,
            hint="load it into the model that wrote it",
        )
    for name, shard in tensors.items():
        check_bounds(name, shard)
        if name not in stored:
            continue
        entry, shape, dtype = stored[name], tuple(shard.global_shape), stored_dtype_name(shard.local.dtype)
        if (entry.shape, entry.dtype) != (shape, dtype):
            raise InputError(
                f"{name} is {entry.dtype} {list(entry.shape)} in the checkpoint and {dtype} {list(shape)} here",
                where=where,
                hint="load it into a model of the same shape and precision: nothing is converted on the way",
            )


def _add_reads(name: str, stored: IndexedTensor, shard: TensorShard, wanted: dict[tuple[str, int], _ItemRead]) -> None:
    """Add every item that overlaps a shard to `wanted`."""
    target = shard.local.detach()
    sizes = tuple(target.shape)
    filled = 0
    for item in stored.overlapping(shard.global_offset, sizes):
        shared = overlap(item, shard.global_offset, sizes)
        assert shared is not None, "it was chosen because it overlaps"
        read = wanted.setdefault((item.file, item.start), _ItemRead(name, stored.dtype, item))
        read.copies.append((*shared, target))
        filled += math.prod(part.stop - part.start for part in shared[0])
    assert filled == target.numel(), f"{name}: the items of a committed checkpoint cover every element"


def read_item(
    store: Store,
    checkpoint: CompleteCheckpoint,
    name: str,
    dtype: str,
    item: IndexedItem,
    memory: torch.Tensor,
    *,
    check: bool,
) -> torch.Tensor:
    """Read one item of the tensor `name` into `memory` and check its checksum; return its box, a view of `memory`."""
    saved = bytes_of(memory[: item.length])
    _read_run(store, checkpoint, [_ItemRead(name, dtype, item)], saved, check=check)
    return _box(saved, item, dtype)


def _adjacent_runs(ordered: list[_ItemRead]) -> list[list[_ItemRead]]:
    """Group items that are adjacent in one file; each group is read at once."""
    runs: list[list[_ItemRead]] = []
    for _, in_file in groupby(ordered, key=lambda read: read.item.file):
        run: list[_ItemRead] = []
        for read in in_file:
            if run:
                end, first = run[-1].item.start + run[-1].item.length, run[0].item.start
                if read.item.start == end and read.item.start + read.item.length - first <= _READ_BYTES:
                    run.append(read)
                    continue
                runs.append(run)
            run = [read]
        runs.append(run)
    return runs


def _load_run(store: Store, checkpoint: CompleteCheckpoint, run: list[_ItemRead], buffers: BufferPool) -> None:
    first, last = run[0].item, run[-1].item
    with buffers.borrow((last.start + last.length - first.start,), torch.uint8) as memory:
        saved = bytes_of(memory)
        _read_run(store, checkpoint, run, saved, check=True)
        for read in run:
            start = read.item.start - first.start
            box = _box(saved[start : start + read.item.length], read.item, read.dtype)
            for inside_item, inside_shard, target in read.copies:
                target[inside_shard].copy_(box[inside_item])


def _box(saved: memoryview, item: IndexedItem, dtype: str) -> torch.Tensor:
    count = math.prod(item.sizes)
    return torch.frombuffer(find_tensor_bytes(saved), dtype=DTYPES[dtype], count=count).view(item.sizes)


def _read_run(
    store: Store, checkpoint: CompleteCheckpoint, run: list[_ItemRead], memory: memoryview, *, check: bool
) -> None:
    """Read adjacent items and check the checksum of each."""
    first = run[0].item
    path = f"{checkpoint.path}/{first.file}"
    where = join(store.url, path)
    try:
        read_bytes = read_into(store, path, first.start, memory)
    except NotFound:
        raise corrupt_checkpoint(store, checkpoint, f"{first.file} is missing", where) from None
    for read in run if check or read_bytes < len(memory) else ():
        start = read.item.start - first.start
        hasher = Hasher.like(read.item.checksum)
        hasher.update(memory[start : min(start + read.item.length, read_bytes)])
        if hasher.checksum != read.item.checksum:
            raise corrupt_checkpoint(
                store, checkpoint, f"the bytes of {read.name} in {read.item.file} are not those written", where
            )
