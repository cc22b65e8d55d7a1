"""What tests of checkpoints share: a store with a hook before every change, and several ranks in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from trainshed.checkpoints.native.folder import CompleteCheckpoint, checkpoints_folder
from trainshed.checkpoints.native.reader import load_checkpoint
from trainshed.checkpoints.native.shards import TensorShard
from trainshed.checkpoints.native.writer import CheckpointWriter
from trainshed.storage import ObjectInfo, Store, Writer
from trainshed.storage.attempts import Attempt

RUN = "runs/demo/0123abcd"
FOLDER = checkpoints_folder(RUN)
SPEC = {"name": "demo", "id": "0123abcd"}

Hook = Callable[[str, str], None]


class HookedStore:
    """A store that calls `before(what, path)` ahead of every change: put, open, write, publish, delete."""

    def __init__(self, store: Store, before: Hook) -> None:
        self._store, self._before = store, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, path: str, data: bytes, *, expect: str | None = None) -> ObjectInfo:
        self._before("put", path)
        return self._store.put(path, data, expect=expect)

    def delete(self, path: str) -> None:
        self._before("delete", path)
        self._store.delete(path)

    @contextmanager
    def writer(self, path: str, *, size: int | None = None) -> Iterator[Writer]:
        self._before("open", path)
        with self._store.writer(path, size=size) as writer:
            yield _HookedWriter(writer, lambda: self._before("write", path))
            self._before("publish", path)


class _HookedWriter:
    def __init__(self, writer: Writer, before: Callable[[], None]) -> None:
        self._writer, self._before = writer, before

    @property
    def info(self) -> ObjectInfo | None:
        return self._writer.info

    def write(self, data: bytes | memoryview) -> None:
        half = len(data) // 2
        self._writer.write(memoryview(data)[:half])
        self._before()
        self._writer.write(memoryview(data)[half:])


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorShard]:
    """One rank holds everything."""
    return {name: TensorShard(tuple(each.shape), (0,) * each.dim(), each) for name, each in tensors.items()}


def by_rows(tensors: Mapping[str, torch.Tensor], ranks: int) -> list[dict[str, TensorShard]]:
    """Rows dealt out, unevenly where they do not divide; what has no rows is replicated and owned by rank 0."""
    dealt: list[dict[str, TensorShard]] = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        for rank in range(ranks):
            if tensor.dim() == 0:
                dealt[rank][name] = TensorShard((), (), tensor.clone(), is_owner=rank == 0)
                continue
            rows = math.ceil(tensor.shape[0] / ranks)
            first = min(rank * rows, tensor.shape[0])
            part = tensor[first : first + rows].clone()
            dealt[rank][name] = TensorShard(tuple(tensor.shape), (first,) + (0,) * (tensor.dim() - 1), part)
    return dealt


def empty_like(pieces: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
    return {
        name: TensorShard(each.global_shape, each.global_offset, torch.zeros_like(each.local))
        for name, each in pieces.items()
    }


def some_state(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "model.embedding.weight": torch.randn(7, 4, generator=made),
        "model.norm.weight": torch.randn(4, generator=made).to(torch.bfloat16),
        "optimizer.momentum.embedding.weight": torch.randn(7, 4, generator=made, dtype=torch.float64),
        "optimizer.updates": torch.tensor(seed + 12, dtype=torch.int64),
    }


class Ranks:
    """The writers of all ranks of one attempt, each with its thread, meeting in a HashStore."""

    def __init__(self, attempt: Attempt, count: int, stores: Mapping[int, Store] | None = None, **options: Any) -> None:
        meeting = dist.HashStore() if count > 1 else None
        stores = stores or {}
        self.writers = [
            CheckpointWriter(
                Attempt(stores.get(rank, attempt.store), attempt.run_folder, attempt.number),
                rank=rank,
                world_size=count,
                **{"spec": SPEC, "store": meeting, **options},
            )
            for rank in range(count)
        ]

    def save(
        self, step: int, pieces: Sequence[Mapping[str, TensorShard]], facts: Mapping[str, Any] | None = None
    ) -> list[Exception | None]:
        """Save on all ranks and wait; return what each rank raised."""

        def one(writer: CheckpointWriter, mine: Mapping[str, TensorShard]) -> Exception | None:
            try:
                writer.save(step, mine, facts or {"consumed_samples": 8 * step}, blocking=True)
            except Exception as error:
                return error
            return None

        with ThreadPoolExecutor(len(self.writers)) as pool:
            return list(pool.map(one, self.writers, pieces))


def save_whole(attempt: Attempt, step: int, state: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Save on one rank; raises what failed."""
    with CheckpointWriter(attempt, **{"spec": SPEC, **options}) as writer:
        writer.save(step, whole(state), {"consumed_samples": 8 * step})


def loaded(store: Store, found: CompleteCheckpoint, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Load everything on one rank."""
    pieces = empty_like(whole(like))
    load_checkpoint(store, found, pieces)
    return {name: piece.local for name, piece in pieces.items()}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
