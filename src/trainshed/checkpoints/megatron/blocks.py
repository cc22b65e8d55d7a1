"""The bytes of one of Megatron's tensors, pulled from any source in blocks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainshed.checkpoints.weights import Advance, Weights
from trainshed.models.megatron_tensors import MegatronTensor

BLOCK_BYTES = 64 * 1024 * 1024


def blocks(tensor: MegatronTensor, source: Weights, dtype: torch.dtype, advance: Advance) -> Iterator[memoryview]:
    """Yield a tensor's bytes, first to last; a gated one is held whole, since its rows are put apart."""
    first, last = tensor.rows
    at_once = rows_at_once(tensor, dtype)
    if tensor.gated:
        box = read_rows(tensor, source, first, last, dtype)
        yield from (_told(box[part::2], advance) for part in (0, 1))
    else:
        for start in range(first, last, at_once):
            yield _told(read_rows(tensor, source, start, min(start + at_once, last), dtype), advance)
    for start in range(0, tensor.padding, at_once):
        rows = min(at_once, tensor.padding - start)
        yield _told(torch.zeros((rows, *tensor.shape[1:]), dtype=dtype), advance)


def rows_at_once(tensor: MegatronTensor, dtype: torch.dtype) -> int:
    """How many rows make a block; an even number, so that a block of a gated tensor has whole pairs."""
    width = (tensor.shape[1] if len(tensor.shape) > 1 else 1) * dtype.itemsize
    return max(2, BLOCK_BYTES // width // 2 * 2)


def read_rows(tensor: MegatronTensor, source: Weights, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
    """Read native rows [first, last) of the columns, and the expert, that a tensor holds."""
    offset, shape = [first], [last - first]
    if tensor.columns is not None:
        offset.append(tensor.columns[0])
        shape.append(tensor.columns[1] - tensor.columns[0])
    if tensor.expert is None:
        return source.read(tensor.parameter, offset, shape, dtype)
    return source.read(tensor.parameter, [tensor.expert, *offset], [1, *shape], dtype)[0]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, as a file stores them; its own memory, where it lies in one piece."""
    raw: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()  # numpy's stubs do not know it for a buffer
    return memoryview(raw)


def _told(tensor: torch.Tensor, advance: Advance) -> memoryview:
    data = bytes_of(tensor)
    advance(len(data))
    return data
