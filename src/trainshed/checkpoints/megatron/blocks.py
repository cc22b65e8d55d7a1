"""The bytes of Megatron's tensors, pulled from any source in blocks that stay in the processor's caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from trainshed.checkpoints.hashed_file import BLOCK_BYTES
from trainshed.checkpoints.scratch import Scratch, bytes_of
from trainshed.checkpoints.weights import Advance, Weights
from trainshed.models.megatron_tensors import MegatronTensor


@dataclass(frozen=True)
class Share:
    """Every `step`-th of some rows, from `part` on; `put` takes their bytes, told how many came before."""

    put: Callable[[int, memoryview], None]
    part: int = 0
    step: int = 1


class Laying:
    """Reads one source, in one dtype."""

    def __init__(self, source: Weights, dtype: torch.dtype, advance: Advance) -> None:
        self.dtype = dtype
        self._source, self._advance = source, advance
        self._scratch = Scratch()

    def rows(
        self, tensor: MegatronTensor, first: int, last: int, shares: Sequence[Share]
    ) -> Iterator[Callable[[], None]]:
        """Yield the jobs that share out native rows [first, last) of a tensor, which may be done at the same time."""
        at_once = rows_at_once(tensor, self.dtype, BLOCK_BYTES)
        for start in range(first, last, at_once):
            yield partial(self._share_out, tensor, first, start, min(start + at_once, last), shares)

    def zeros(self, shape: Sequence[int], put: Callable[[int, memoryview], None]) -> None:
        """Give out rows of padding."""
        self._give(0, torch.zeros(tuple(shape), dtype=self.dtype), put)

    def _share_out(self, tensor: MegatronTensor, origin: int, first: int, last: int, shares: Sequence[Share]) -> None:
        with lent_rows(tensor, self._source, first, last, self.dtype) as box:
            for share in shares:
                rows = box[share.part :: share.step]
                start = (first - origin) // share.step * (rows[:1].numel() * rows.itemsize)
                if rows.is_contiguous():
                    self._give(start, rows, share.put)
                    continue
                with self._scratch.lent(rows.shape, rows.dtype) as together:
                    self._give(start, together.copy_(rows), share.put)

    def _give(self, start: int, rows: torch.Tensor, put: Callable[[int, memoryview], None]) -> None:
        data = bytes_of(rows)
        put(start, data)
        self._advance(len(data))


def rows_at_once(tensor: MegatronTensor, dtype: torch.dtype, block_bytes: int) -> int:
    """How many rows make a block; an even number, so that a block of a gated tensor has whole pairs."""
    width = (tensor.shape[1] if len(tensor.shape) > 1 else 1) * dtype.itemsize
    return max(2, block_bytes // width // 2 * 2)


@contextmanager
def lent_rows(
    tensor: MegatronTensor, source: Weights, first: int, last: int, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Borrow native rows [first, last) of the columns, and the expert, that a tensor holds."""
    offset, shape = [first], [last - first]
    if tensor.columns is not None:
        offset.append(tensor.columns[0])
        shape.append(tensor.columns[1] - tensor.columns[0])
    if tensor.expert is None:
        with source.lent(tensor.parameter, offset, shape, dtype) as box:
            yield box
        return
    with source.lent(tensor.parameter, [tensor.expert, *offset], [1, *shape], dtype) as box:
        yield box[0]
