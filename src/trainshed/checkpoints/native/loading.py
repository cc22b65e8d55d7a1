"""Loading a checkpoint onto any layout: the items that overlap a rank's pieces, each checked against its checksum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from trainshed.checkpoints.native import pieces_file
from trainshed.checkpoints.native.folder import Found, find
from trainshed.checkpoints.native.part import tensor_bytes
from trainshed.checkpoints.native.pieces_file import StoredItem, StoredTensor
from trainshed.checkpoints.native.plan import DTYPES, check_bounds, dtype_name
from trainshed.checkpoints.pieces import Piece
from trainshed.checkpoints.scratch import Scratch, bytes_of
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.storage import Hasher, Store, algorithm_of, checksum_of, join, read_into

# Neighbours in a file are read in one request, up to this much at a time.
_READ_BYTES = 64 * 1024 * 1024
_WORKERS = 8
_NAMED = 5  # how many tensors an error names before it only counts


@dataclass
class _Wanted:
    """One item, and the parts of it that go into pieces: (inside the item, inside the piece, the piece)."""

    name: str
    dtype: str
    item: StoredItem
    copies: list[tuple[tuple[slice, ...], tuple[slice, ...], torch.Tensor]] = field(default_factory=list)


def load(
    store: Store, found: Found, tensors: Mapping[str, Piece], *, strict: bool = True, workers: int = _WORKERS
) -> Mapping[str, Any]:
    """Fill the pieces in place from a checkpoint, whatever layout wrote it; return the facts stored with it.

    A tensor that the checkpoint does not hold is an error, or with `strict=False` left as it is. Nothing is converted:
    shapes and dtypes must be those that were written.
    """
    stored = read_pieces(store, found)
    _check_fit(found, stored, tensors, strict, join(store.url, found.path))
    wanted: dict[tuple[str, int], _Wanted] = {}
    for name, piece in tensors.items():
        if name in stored:
            _want(name, stored[name], piece, wanted)
    ordered = sorted(wanted.values(), key=lambda each: (each.item.file, each.item.start))
    scratch = Scratch()
    with ThreadPoolExecutor(workers, thread_name_prefix="trainshed-load") as pool:
        for _ in pool.map(lambda run: _load_run(store, found, run, scratch), _runs(ordered)):
            pass
    return found.facts


def read_pieces(store: Store, found: Found) -> dict[str, StoredTensor]:
    """Read a checkpoint's table of contents, checked against the manifest."""
    name = found.facts["pieces"]
    entry = next((each for each in found.manifest.files if each.path == name), None)
    where = join(store.url, f"{found.path}/{name}")
    data = store.read(f"{found.path}/{name}")
    if entry is None or checksum_of(data, algorithm_of(entry.checksum)) != entry.checksum:
        raise _corrupt(store, found, "the table of pieces is not what the manifest says", where)
    return pieces_file.from_bytes(data, where)


def _check_fit(
    found: Found, stored: Mapping[str, StoredTensor], tensors: Mapping[str, Piece], strict: bool, where: str
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


def _want(name: str, stored: StoredTensor, piece: Piece, wanted: dict[tuple[str, int], _Wanted]) -> None:
    """Note every item that overlaps a piece."""
    target = piece.tensor.detach()
    box = tuple(target.shape)
    filled = 0
    for item in stored.items:
        shared = overlap(item, piece.offset, box)
        if shared is None:
            continue
        each = wanted.setdefault((item.file, item.start), _Wanted(name, stored.dtype, item))
        each.copies.append((*shared, target))
        filled += math.prod(part.stop - part.start for part in shared[0])
    assert filled == target.numel(), f"{name}: the items of a committed checkpoint cover every element"


def overlap(
    item: StoredItem, offset: Sequence[int], box: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where an item and the box at `offset` meet: inside the item and inside the box, or None if they do not."""
    starts = [max(a, b) for a, b in zip(item.offset, offset, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(item.offset, item.box, offset, box, strict=True)]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return _slices(starts, ends, item.offset), _slices(starts, ends, offset)


def _slices(starts: list[int], ends: list[int], offset: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start - zero, end - zero) for start, end, zero in zip(starts, ends, offset, strict=True))


def read_saved(
    store: Store, found: Found, name: str, dtype: str, item: StoredItem, memory: torch.Tensor, *, check: bool
) -> torch.Tensor:
    """Read one item of the tensor `name` into bytes of memory, held against its checksum; return the box it is.

    The box lies in that memory.
    """
    saved = bytes_of(memory[: item.length])
    _read(store, found, [_Wanted(name, dtype, item)], saved, check=check)
    return _box(saved, item, dtype)


def _runs(ordered: list[_Wanted]) -> list[list[_Wanted]]:
    """Items that lie side by side in one file, as many as are read at once."""
    runs: list[list[_Wanted]] = []
    for _, in_file in groupby(ordered, key=lambda each: each.item.file):
        run: list[_Wanted] = []
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


def _load_run(store: Store, found: Found, run: list[_Wanted], scratch: Scratch) -> None:
    first, last = run[0].item, run[-1].item
    with scratch.lent((last.start + last.length - first.start,), torch.uint8) as memory:
        saved = bytes_of(memory)
        _read(store, found, run, saved, check=True)
        for each in run:
            start = each.item.start - first.start
            box = _box(saved[start : start + each.item.length], each.item, each.dtype)
            for inside_item, inside_piece, target in each.copies:
                target[inside_piece].copy_(box[inside_item])


def _box(saved: memoryview, item: StoredItem, dtype: str) -> torch.Tensor:
    return torch.frombuffer(tensor_bytes(saved), dtype=DTYPES[dtype], count=math.prod(item.box)).view(item.box)


def _read(store: Store, found: Found, run: list[_Wanted], memory: memoryview, *, check: bool) -> None:
    """Read items that lie side by side, each held against its checksum."""
    first = run[0].item
    path = f"{found.path}/{first.file}"
    where = join(store.url, path)
    try:
        read = read_into(store, path, first.start, memory)
    except NotFound:
        raise _corrupt(store, found, f"{first.file} is missing", where) from None
    for each in run if check or read < len(memory) else ():
        start = each.item.start - first.start
        hasher = Hasher.like(each.item.checksum)
        hasher.update(memory[start : min(start + each.item.length, read)])
        if hasher.checksum != each.item.checksum:
            raise _corrupt(store, found, f"the bytes of {each.name} in {each.item.file} are not those written", where)


def _corrupt(store: Store, found: Found, what: str, where: str) -> CorruptData:
    """The error for a broken checkpoint, with the way to the one before it."""
    folder = found.path.rpartition("/")[0]
    before = next((each for each in find(store, folder) if each.step < found.step), None)
    run = join(store.url, folder.rpartition("/")[0])
    remove = f"`trainshed checkpoints {run} --verify --prune` removes it"
    if before is None:
        return CorruptData(what, where=where, hint=f"{remove}; there is no earlier checkpoint to go on from")
    earlier = join(store.url, before.path)
    return CorruptData(what, where=where, hint=f"{remove}, and the run goes on from step {before.step} ({earlier})")
