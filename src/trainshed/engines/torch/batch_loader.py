"""The token rows of each step for this rank: read one step ahead, cut for context parallel, put on the device."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from trainshed.data.order import DataOrder, hash_batch_rows
from trainshed.engines.torch.parallel import ParallelMesh
from trainshed.models.attention import context_parallel_shard
from trainshed.models.loss import IGNORE_INDEX


@dataclass(frozen=True)
class LocalBatch:
    """This rank's rows of a step.

    `tokens` and `labels` are int64 [R, S], None on ranks whose chunks need none; `samples` are the run's sample numbers
    [R], there only where dropout needs them.
    """

    rows: int
    tokens: torch.Tensor | None
    labels: torch.Tensor | None
    samples: torch.Tensor | None


@dataclass(frozen=True)
class HashedBatch:
    """A step's rows for this rank, and the sums of their hashes (zero on ranks that another one speaks for)."""

    batch: LocalBatch
    hashes: tuple[int, int]


class BatchLoader:
    """Reads a run's batches for one rank; only ranks whose chunks need tokens read any."""

    def __init__(self, order: DataOrder, mesh: ParallelMesh, *, numbered: bool) -> None:
        self.order, self.mesh, self.numbered = order, mesh, numbered
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._next: tuple[int, Future[tuple[np.ndarray | None, tuple[int, int]]]] | None = None

    def batch(self, step: int, *, ahead: bool = True) -> HashedBatch:
        """Return this rank's rows of a step; `ahead` starts reading the next step's."""
        if self._next is not None and self._next[0] == step:
            rows, hashes = self._next[1].result()
        else:
            rows, hashes = self._read(step)
        self._next = (step + 1, self._reader.submit(self._read, step + 1)) if ahead else None
        mine = self._rows(step)
        padding = self.mesh.layout.padding(self.order.batch_size(step), self.mesh.at.dp)
        samples = None
        if self.numbered:
            first = self.order.consumed(step)
            # Rows that only make up the number have no sample; what dropout does to them does not matter.
            samples = torch.arange(first + mine.start, first + mine.stop + padding, device=self.mesh.device)
        if rows is None:
            return HashedBatch(LocalBatch(len(mine) + padding, None, None, samples), hashes)
        return HashedBatch(self.on_device(rows, samples, padding), hashes)

    def on_device(self, rows: np.ndarray, samples: torch.Tensor | None = None, padding: int = 0) -> LocalBatch:
        """Turn token rows [R, L + 1] into inputs and labels on the device, with rows behind them that carry no loss."""
        inputs, labels = rows[:, :-1], rows[:, 1:]
        if padding:
            behind = ((0, padding), (0, 0))
            inputs, labels = (
                np.pad(inputs, behind),
                np.pad(labels.astype(np.int64), behind, constant_values=IGNORE_INDEX),
            )
        return LocalBatch(len(inputs), self.placed(inputs, self.mesh), self.placed(labels, self.mesh), samples)

    @staticmethod
    def placed(columns: np.ndarray, mesh: ParallelMesh) -> torch.Tensor:
        """Put this rank's part of columns [R, L] on the device: int64 [R, S]."""
        part = context_parallel_shard(
            torch.from_numpy(columns.astype(np.int64)), mesh.layout.cp, mesh.at.cp
        ).contiguous()
        return part.pin_memory().to(mesh.device, non_blocking=True) if mesh.device.type == "cuda" else part

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _rows(self, step: int) -> range:
        return self.mesh.layout.sample_range(self.order.batch_size(step), self.mesh.at.dp)

    def _read(self, step: int) -> tuple[np.ndarray | None, tuple[int, int]]:
        if not self.mesh.reads_tokens:
            return None, (0, 0)
        mine, at = self._rows(step), self.mesh.at
        rows = self.order.rows(step, mine.start, mine.stop)
        speaks = at.pp == 0 and at.cp == 0 and at.tp == 0
        return rows, hash_batch_rows(rows, mine.start) if speaks else (0, 0)
