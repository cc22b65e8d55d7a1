"""Load a checkpoint onto any layout: read the items that overlap a rank's shards, and verify their checksums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from trainshed.checkpoints.io import BufferPool, bytes_of
from trainshed.checkpoints.native.folder import CompleteCheckpoint
from trainshed.checkpoints.native.index import IndexedItem, IndexedTensor, corrupt_checkpoint, overlap, read_index
from trainshed.checkpoints.native.shards import DTYPES, TensorShard, check_bounds, dtype_name
from trainshed.checkpoints.torch_save_reader import find_tensor_bytes
from trainshed.errors import InputError, NotFound
from trainshed.storage import Hasher, Store, join, read_into

# Neighbours in a file are read in one request, up to this much at a time.
_READ_BYTES = 64 * 1024 * 1024
_WORKERS = 8
_NAMED = 5  # how many tensors an error names before it only counts


@dataclass
class _ItemRead:
    """One item, and the parts of it that go into pieces: (inside the item, inside the piece, the piece)."""

    name: str
    dtype: str
    item: IndexedItem
    copies: list[tuple[tuple[slice, ...], tuple[slice, ...], torch.Tensor]] = field(default_factory=list)


def load_checkpoint(
    store: Store,
    found: CompleteCheckpoint,
    tensors: Mapping[str, TensorShard],
    *,
    strict: bool = True,
    workers: int = _WORKERS,
) -> Mapping[str, Any]:
    """Fill the pieces in place from a checkpoint, whatever layout wrote it; return the facts stored with it.

    A tensor that the checkpoint does not hold is an error, or with `strict=False` left as it is. Nothing is converted:
    shapes and dtypes must be those that were written.
    """
    stored = read_index(store, found)
    _check_fit(found, stored, tensors, strict, join(store.url, found.path))
    wanted: dict[tuple[str, int], _ItemRead] = {}
    for name, piece in tensors.items():
        if name in stored:
            _add_reads(name, stored[name], piece, wanted)
    ordered = sorted(wanted.values(), key=lambda each: (each.item.file, each.item.start))
    scratch = BufferPool()
    with ThreadPoolExecutor(workers, thread_name_prefix="trainshed-load") as pool:
        for _ in pool.map(lambda run: _load_run(store, found, run, scratch), _adjacent_runs(ordered)):
            pass
    return found.facts


def _check_fit(
    found: CompleteCheckpoint,
    stored: Mapping[str, IndexedTensor],
    tensors: Mapping[str, TensorShard],
    strict: bool,
    where: str,
) -> None:
    missing = [name for name in tensors if name not in stored]
    if missing and strict:
        named = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
        raise InputError(
            f"the checkpoint of step {found.step} does not hold {named}",
            where=where,
            hint="load it into the model that wrote it",
        )
    for name, piece in tensors.items():
        check_bounds(name, piece)
        if name not in stored:
            continue
        there, here = stored[name], (tuple(piece.shape), dtype_name(piece.tensor.dtype))
        if (there.shape, there.dtype) != here:
            raise InputError(
                f"{name} is {there.dtype} {list(there.shape)} in the checkpoint and {here[1]} {list(here[0])} here",
                where=where,
                hint="load it into a model of the same shape and precision: nothing is converted on the way",
            )


def _add_reads(name: str, stored: IndexedTensor, piece: TensorShard, wanted: dict[tuple[str, int], _ItemRead]) -> None:
    """Note every item that overlaps a piece."""
    target = piece.tensor.detach()
    box = tuple(target.shape)
    filled = 0
    for item in stored.items:
        shared = overlap(item, piece.offset, box)
        if shared is None:
            continue
        each = wanted.setdefault((item.file, item.start), _ItemRead(name, stored.dtype, item))
        each.copies.append((*shared, target))
        filled += math.prod(part.stop - part.start for part in shared[0])
    assert filled == target.numel(), f"{name}: the items of a committed checkpoint cover every element"


def read_item(
    store: Store,
    found: CompleteCheckpoint,
    name: str,
    dtype: str,
    item: IndexedItem,
    memory: torch.Tensor,
    *,
    check: bool,
) -> torch.Tensor:
    """Read one item of the tensor `name` into bytes of memory, held against its checksum; return the box it is.

    The box lies in that memory.
    """
    saved = bytes_of(memory[: item.length])
    _read_run(store, found, [_ItemRead(name, dtype, item)], saved, check=check)
    return _box(saved, item, dtype)


def _adjacent_runs(ordered: list[_ItemRead]) -> list[list[_ItemRead]]:
    """Items that lie side by side in one file, as many as are read at once."""
    runs: list[list[_ItemRead]] = []
    for _, in_file in groupby(ordered, key=lambda each: each.item.file):
        run: list[_ItemRead] = []
        for each in in_file:
            if run:
                end, first = run[-1].item.start + run[-1].item.length, run[0].item.start
                if each.item.start == end and each.item.start + each.item.length - first <= _READ_BYTES:
                    run.append(each)
                    continue
                runs.append(run)
            run = [each]
        runs.append(run)
    return runs


def _load_run(store: Store, found: CompleteCheckpoint, run: list[_ItemRead], scratch: BufferPool) -> None:
    first, last = run[0].item, run[-1].item
    with scratch.lent((last.start + last.length - first.start,), torch.uint8) as memory:
        saved = bytes_of(memory)
        _read_run(store, found, run, saved, check=True)
        for each in run:
            start = each.item.start - first.start
            box = _box(saved[start : start + each.item.length], each.item, each.dtype)
            for inside_item, inside_piece, target in each.copies:
                target[inside_piece].copy_(box[inside_item])


def _box(saved: memoryview, item: IndexedItem, dtype: str) -> torch.Tensor:
    return torch.frombuffer(find_tensor_bytes(saved), dtype=DTYPES[dtype], count=math.prod(item.box)).view(item.box)


def _read_run(
    store: Store, found: CompleteCheckpoint, run: list[_ItemRead], memory: memoryview, *, check: bool
) -> None:
    """Read items that lie side by side, each held against its checksum."""
    first = run[0].item
    path = f"{found.path}/{first.file}"
    where = join(store.url, path)
    try:
        read = read_into(store, path, first.start, memory)
    except NotFound:
        raise corrupt_checkpoint(store, found, f"{first.file} is missing", where) from None
    for each in run if check or read < len(memory) else ():
        start = each.item.start - first.start
        hasher = Hasher.like(each.item.checksum)
        hasher.update(memory[start : min(start + each.item.length, read)])
        if hasher.checksum != each.item.checksum:
            raise corrupt_checkpoint(
                store, found, f"the bytes of {each.name} in {each.item.file} are not those written", where
            )
