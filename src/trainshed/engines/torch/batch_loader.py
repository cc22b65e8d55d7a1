"""The token rows of each step for this rank: read one step ahead, sharded for context parallel, moved to the device."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from trainshed.data.order import DataOrder, hash_batch_rows
from trainshed.data.sampling.rows import SampleRows
from trainshed.engines.torch.parallel import ParallelMesh
from trainshed.models.attention import context_parallel_shard
from trainshed.models.loss import IGNORE_INDEX


@dataclass(frozen=True)
class LocalBatch:
    """This rank's rows of a step.

    `tokens` and `labels` are int64 [R, S], None on ranks whose stages need none. `samples` are the run's sample numbers
    [R], present only where dropout needs them. `hashes` are the sums of the rows' hashes; they are zero on all but one
    of the ranks that read the same rows. `document_starts` int64 [R, L] are of whole rows, on every pipeline rank; None
    where documents are not kept apart, and then every token has a label. `reference_logps` float64 [R, D] are what the
    reference model of a preference run gives the documents; only the last pipeline rank has them. `sources` int64 [R]
    are the numbers of the rows' sources, on the last pipeline rank where there are several.
    """

    rows: int
    tokens: torch.Tensor | None
    labels: torch.Tensor | None
    samples: torch.Tensor | None = None
    hashes: tuple[int, int] = (0, 0)
    document_starts: torch.Tensor | None = None
    reference_logps: torch.Tensor | None = None
    sources: torch.Tensor | None = None


class BatchLoader:
    """Reads a run's batches for one rank. Only ranks whose stages need tokens read any."""

    def __init__(
        self, order: DataOrder, mesh: ParallelMesh, *, with_sample_ids: bool, with_sources: bool = False
    ) -> None:
        self.order, self.mesh, self.with_sample_ids = order, mesh, with_sample_ids
        # The losses of sources are summed where the loss is computed.
        self.with_sources = with_sources and mesh.coordinates.pp == mesh.layout.pp - 1
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="batch-loader")
        self._next: tuple[int, Future[_ReadRows]] | None = None

    def batch(self, step: int, *, ahead: bool = True) -> LocalBatch:
        """Return this rank's rows of a step; `ahead` starts to read those of the next step."""
        read = self._next[1].result() if self._next is not None and self._next[0] == step else self._read(step)
        self._next = (step + 1, self._reader.submit(self._read, step + 1)) if ahead else None
        local_rows = self._local_rows(step)
        padding = self.mesh.layout.padding(self.order.batch_size(step), self.mesh.coordinates.dp)
        samples = None
        if self.with_sample_ids:
            first = self.order.run_samples(step)
            # Padding rows have no sample of their own; what dropout does to them does not matter.
            samples = torch.arange(first + local_rows.start, first + local_rows.stop + padding, device=self.mesh.device)
        if read.rows is None:
            starts = _starts_to_device(read.document_starts, self.mesh, padding)
            return LocalBatch(len(local_rows) + padding, None, None, samples, read.hashes, starts)
        batch = to_local_batch(
            read.rows.tokens[:, :-1],
            read.rows.labels(),
            self.mesh,
            padding=padding,
            samples=samples,
            hashes=read.hashes,
            document_starts=read.document_starts,
        )
        return replace(batch, sources=self._sources(step, local_rows, padding)) if self.with_sources else batch

    def _sources(self, step: int, rows: range, padding: int) -> torch.Tensor:
        """Return the number of each row's source; padding rows have no label, and count for none."""
        numbers = np.pad(self.order.source_numbers(step, rows.start, rows.stop), (0, padding))
        return _to_device(torch.from_numpy(numbers), self.mesh)

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _local_rows(self, step: int) -> range:
        return self.mesh.layout.sample_range(self.order.batch_size(step), self.mesh.coordinates.dp)

    def _read(self, step: int) -> _ReadRows:
        local_rows, coordinates = self._local_rows(step), self.mesh.coordinates
        if not self.mesh.reads_tokens:
            return _ReadRows(None, self.order.document_starts(step, local_rows.start, local_rows.stop))
        rows = self.order.rows(step, local_rows.start, local_rows.stop)
        hashes_rows = coordinates.pp == 0 and coordinates.cp == 0 and coordinates.tp == 0
        hashes = hash_batch_rows(rows, local_rows.start) if hashes_rows else (0, 0)
        return _ReadRows(rows, rows.document_starts, hashes)


@dataclass(frozen=True)
class _ReadRows:
    """What was read for a step: the rows, or on ranks that need no tokens only where documents begin."""

    rows: SampleRows | None
    document_starts: np.ndarray | None
    hashes: tuple[int, int] = (0, 0)


def to_local_batch(
    inputs: np.ndarray,
    labels: np.ndarray,
    mesh: ParallelMesh,
    *,
    padding: int = 0,
    samples: torch.Tensor | None = None,
    hashes: tuple[int, int] = (0, 0),
    document_starts: np.ndarray | None = None,
) -> LocalBatch:
    """Move inputs and labels [R, L] to the device, followed by `padding` rows that carry no loss.

    `document_starts` is [R, L + 1], as in `SampleRows`.
    """
    if padding:
        inputs = np.pad(inputs, ((0, padding), (0, 0)))
        labels = np.pad(labels.astype(np.int64), ((0, padding), (0, 0)), constant_values=IGNORE_INDEX)
    starts = _starts_to_device(document_starts, mesh, padding)
    return LocalBatch(
        len(inputs), _shard_to_device(inputs, mesh), _shard_to_device(labels, mesh), samples, hashes, starts
    )


def _starts_to_device(document_starts: np.ndarray | None, mesh: ParallelMesh, padding: int) -> torch.Tensor | None:
    """Move document starts [R, L + 1] without their last column to the device; a padding row is one document."""
    if document_starts is None:
        return None
    starts = np.pad(document_starts[:, :-1], ((0, padding), (0, 0)))
    return _to_device(torch.from_numpy(starts.astype(np.int64)), mesh)


def _shard_to_device(columns: np.ndarray, mesh: ParallelMesh) -> torch.Tensor:
    """Move this rank's part of columns [R, L] to the device: int64 [R, S]."""
    whole = torch.from_numpy(columns.astype(np.int64))
    return _to_device(context_parallel_shard(whole, mesh.layout.cp, mesh.coordinates.cp).contiguous(), mesh)


def _to_device(values: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    return values.pin_memory().to(mesh.device, non_blocking=True) if mesh.device.type == "cuda" else values
