"""The commit of a checkpoint, on rank 0: tables of contents, then the manifest, then `latest`."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainshed.checkpoints.native import pieces_file
from trainshed.checkpoints.native.folder import (
    FORMAT,
    KIND,
    LATEST,
    MANIFEST,
    METADATA,
    Latest,
    pieces_name,
    step_folder,
)
from trainshed.checkpoints.native.part import Part
from trainshed.checkpoints.native.pieces_file import StoredItem, StoredTensor
from trainshed.checkpoints.native.plan import DTYPES
from trainshed.errors import TrainshedError
from trainshed.storage import FileEntry, Manifest, checksum_of
from trainshed.storage.attempts import Attempt

_DCP_VERSION = "1.0.0"  # torch/distributed/checkpoint/filesystem.py, CURRENT_DCP_VERSION
_OWN_FACTS = frozenset({"format", "attempt", "pieces", "tensors"})


def assembled(parts: Iterable[Part]) -> dict[str, StoredTensor]:
    """Put the parts together; every element of every tensor must have been written by exactly one rank."""
    wholes: dict[str, tuple[tuple[int, ...], str]] = {}
    items: dict[str, list[StoredItem]] = {}
    for part in parts:
        assert part.items is not None, "whoever gathers the parts fills in the items it knows"
        for item, span in zip(part.items, part.spans, strict=True):
            if wholes.setdefault(item.name, (item.shape, item.dtype)) != (item.shape, item.dtype):
                raise TrainshedError(f"{item.name}: ranks disagree about its shape or dtype")
            mine = items.setdefault(item.name, [])
            if span.length:
                stored = StoredItem(item.offset, item.box, part.file.path, span.start, span.length, span.checksum)
                mine.append(stored)
    for name, (shape, _) in wholes.items():
        _check_cover(name, shape, items[name])
    return {
        name: StoredTensor(shape, dtype, tuple(sorted(items[name], key=lambda each: each.offset)))
        for name, (shape, dtype) in wholes.items()
    }


def _check_cover(name: str, shape: tuple[int, ...], items: list[StoredItem]) -> None:
    written, wanted = sum(math.prod(item.box) for item in items), math.prod(shape)
    if written != wanted or len({item.offset for item in items}) != len(items):
        raise TrainshedError(
            f"{name}: the ranks wrote {written:,} elements of a tensor of {wanted:,}",
            hint="each piece needs exactly one owner; this is a fault of Trainshed's engine: report it",
        )


def write_tables(
    attempt: Attempt,
    folder: str,
    step: int,
    parts: Iterable[Part],
    spec: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> Manifest:
    """Write the tables of contents of what all ranks have written; return the manifest that will commit it."""
    if taken := _OWN_FACTS & facts.keys():
        raise ValueError(f"'{min(taken)}' is a fact that the checkpoint writes itself")
    assert facts.get("step", step) == step
    parts = list(parts)
    tensors = assembled(parts)
    path, table = step_folder(folder, step), pieces_name(attempt.number)
    pieces, metadata = pieces_file.to_bytes(tensors), dcp_metadata(tensors)
    own_facts = {
        "format": FORMAT,
        "step": step,
        "attempt": attempt.number,
        "pieces": table,
        "tensors": {name: {"shape": list(each.shape), "dtype": each.dtype} for name, each in tensors.items()},
    }
    files = [
        *(part.file for part in parts),
        FileEntry(table, len(pieces), checksum_of(pieces)),
        FileEntry(METADATA, len(metadata), checksum_of(metadata)),
    ]
    manifest = Manifest.of(KIND, spec, files, {**facts, **own_facts})
    attempt.store.put(f"{path}/{table}", pieces)
    attempt.put(f"{path}/{METADATA}", metadata)
    return manifest


def commit(attempt: Attempt, folder: str, step: int, manifest: Manifest) -> None:
    """Store the manifest, by which the checkpoint exists, and let `latest` name it."""
    attempt.put(f"{step_folder(folder, step)}/{MANIFEST}", manifest.to_bytes())
    attempt.put(f"{folder}/{LATEST}", Latest(step, attempt.number, attempt.number).to_bytes())


def dcp_metadata(tensors: Mapping[str, StoredTensor]) -> bytes:
    """The `.metadata` file as PyTorch's FileSystemReader expects it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    table, storage = {}, {}
    for name, tensor in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(item.offset), torch.Size(item.box)) for item in tensor.items]
        properties = TensorProperties(dtype=DTYPES[tensor.dtype])
        table[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, item in enumerate(tensor.items):
            storage[MetadataIndex(name, item.offset, number)] = _StorageInfo(item.file, item.start, item.length)
    # Names are kept whole where PyTorch would make nested dictionaries of them.
    metadata = Metadata(table, {name: (name,) for name in tensors}, storage, StorageMeta())
    metadata.version = _DCP_VERSION
    return pickle.dumps(metadata)
