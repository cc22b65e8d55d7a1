"""The `.metadata` file of torch.distributed.checkpoint (DCP), as its FileSystemReader expects it.

Our own checkpoints and Megatron's `torch_dist` are both in this format. Importing this module imports all of DCP, so
its users import it when they need it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

_DCP_VERSION = "1.0.0"  # torch/distributed/checkpoint/filesystem.py, CURRENT_DCP_VERSION


class DcpMetadataBuilder:
    """Collects where the chunks of tensors and the pickled objects are stored; keys are added in any order."""

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}
        self._storage: dict[Any, Any] = {}

    def add_tensor(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Add a tensor; one that was added before stays as it is."""
        if key not in self._entries:
            self._entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])

    def add_chunk(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], file: str, start: int, length: int
    ) -> None:
        """Add a chunk of a tensor: bytes [start, start + length) of a file."""
        chunks = self._entries[key].chunks
        self._storage[MetadataIndex(key, offsets, len(chunks))] = _StorageInfo(file, start, length)
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))

    def add_object(self, key: str, file: str, start: int, length: int) -> None:
        """Add something pickled: bytes [start, start + length) of a file."""
        self._entries[key] = BytesStorageMetadata()
        self._storage[MetadataIndex(key)] = _StorageInfo(file, start, length)

    def to_bytes(self) -> bytes:
        """Return the file's bytes."""
        # Names are kept whole where PyTorch would make nested dictionaries of them.
        paths = {key: (key,) for key in self._entries}
        metadata = Metadata(self._entries, paths, self._storage, StorageMeta())
        metadata.version = _DCP_VERSION
        return pickle.dumps(metadata)
