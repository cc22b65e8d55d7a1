"""What both of Megatron's formats share: weights read from regions of stored tensors, and rows copied into files.

Opening a checkpoint finds every region (a rectangle of a stored tensor, with its place in one of Megatron's full
tensors) and reads no tensor's bytes; `read` then takes from each region the rows that a box needs. For writing,
`RowCopier` reads rows from any source in blocks that stay in the processor's caches.
"""

from __future__ import annotations

import os
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch

from trainshed.checkpoints.io import BLOCK_BYTES, BufferPool, bytes_of, read_rows
from trainshed.checkpoints.megatron.args import MegatronLayout
from trainshed.checkpoints.torch_save_reader import DTYPE_BYTES
from trainshed.checkpoints.weights import AdvanceProgress, Weights, box_ends, dtype_name, join_names, stored_dtype
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.file_locks import OPEN_BYTES
from trainshed.models.megatron_tensors import MegatronTensor, is_norm_weight, megatron_row_mappings
from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig

READ_DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
_READ_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in a file, row by row; a vector is a matrix of one column."""

    file: Path
    start: int
    """Its offset in the file, in bytes."""
    dtype: str
    rows: int
    columns: int


@dataclass(frozen=True)
class StoredRegion:
    """A stored matrix, and its place in one of Megatron's full tensors: rows [row, row + rows), and columns alike.

    `locate` finds the matrix in a file, where it may be `transposed`. Its first `skipped_rows` rows belong to another
    region.
    """

    locate: Callable[[], StoredMatrix]
    row: int
    column: int
    rows: int
    columns: int
    skipped_rows: int = 0
    transposed: bool = False


FullTensor = tuple[str, int | None]
"""A tensor of Megatron's before it is sharded: the native tensor's name, and the expert."""


class MegatronWeights:
    """An open checkpoint of Megatron's: see `MegatronDistWeights` and `MegatronLegacyWeights`.

    `folder` is that of its iteration, `args` are the arguments in it, `layout` is the one its files are sharded for.
    `padded_vocab_size` is the number of rows of the embedding in the files.
    """

    folder: Path
    config: ModelConfig
    args: Namespace | None
    layout: MegatronLayout
    padded_vocab_size: int

    def __init__(
        self,
        config: ModelConfig,
        regions: Mapping[FullTensor, Sequence[StoredRegion]],
        dtypes: Sequence[str],
        zero_centered: bool,
    ) -> None:
        self.config = config
        self._regions = regions
        self._dtypes = sorted(set(dtypes))
        self._zero_centered = zero_centered
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._buffers = BufferPool()

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the stored tensors, by torch's names."""
        return self._dtypes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()
        self._buffers.clear()

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the box [offset, offset + shape) of a native tensor, on the CPU; safe to call from several threads."""
        box = torch.empty(tuple(shape), dtype=dtype)
        self._fill_box(box, parameter, offset, shape)
        return box

    @contextmanager
    def borrow(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Lend such a box for as long as the `with` block runs."""
        with self._buffers.borrow(shape, dtype) as box:
            self._fill_box(box, parameter, offset, shape)
            yield box

    def _fill_box(self, box: torch.Tensor, parameter: Parameter, offset: Sequence[int], shape: Sequence[int]) -> None:
        ends = box_ends(parameter, offset, shape)
        if not box.numel():
            return
        dim = 1 if parameter.expert else 0
        rows = offset[dim], ends[dim]
        columns = (offset[dim + 1], ends[dim + 1]) if len(shape) > dim + 1 else (0, 1)
        for expert in range(offset[0], ends[0]) if parameter.expert else (None,):
            target = box if expert is None else box[expert - offset[0]]
            self._fill(target if target.dim() > 1 else target[:, None], parameter, expert, rows, columns)

    def _fill(
        self,
        target: torch.Tensor,
        parameter: Parameter,
        expert: int | None,
        rows: tuple[int, int],
        columns: tuple[int, int],
    ) -> None:
        for mapping in megatron_row_mappings(parameter):
            first, last = (mapping.hf_start + row for row in mapping.within(*rows))
            for region in self._regions[parameter.name, expert]:
                top, bottom = max(first, region.row), min(last, region.row + region.rows)
                left, right = max(columns[0], region.column), min(columns[1], region.column + region.columns)
                if top >= bottom or left >= right:
                    continue
                into = mapping.native_rows(top - mapping.hf_start, bottom - mapping.hf_start)
                assert isinstance(into, slice), "Megatron's rows are ours, or every second of them"
                into = slice(into.start - rows[0], into.stop - rows[0], into.step)
                part = target[into, left - columns[0] : right - columns[0]]
                zero_centered = self._zero_centered and is_norm_weight(parameter)
                self._fill_part(part, region, (top, bottom), (left, right), zero_centered)

    def _fill_part(
        self,
        part: torch.Tensor,
        region: StoredRegion,
        rows: tuple[int, int],
        columns: tuple[int, int],
        zero_centered: bool,
    ) -> None:
        matrix = region.locate()
        down = rows[0] - region.row + region.skipped_rows, rows[1] - region.row + region.skipped_rows
        across = columns[0] - region.column, columns[1] - region.column
        if region.transposed:
            self._fill_matrix(part.T, matrix, across, down, zero_centered)
        else:
            self._fill_matrix(part, matrix, down, across, zero_centered)

    def _fill_matrix(
        self,
        part: torch.Tensor,
        matrix: StoredMatrix,
        rows: tuple[int, int],
        columns: tuple[int, int],
        zero_centered: bool,
    ) -> None:
        """Read rows directly to their place; through a buffer where they are cast, transposed or only partly needed."""
        dtype, width = READ_DTYPES[matrix.dtype], matrix.columns * DTYPE_BYTES[matrix.dtype]
        descriptor, start = self._descriptor(matrix.file), matrix.start + rows[0] * width
        try:
            whole_rows = columns == (0, matrix.columns) and part[:1].is_contiguous()
            if whole_rows and part.dtype == dtype and not zero_centered:
                read_rows(descriptor, start, part, self._buffers)
                return
            count = max(1, _READ_BYTES // width)
            for first in range(0, len(part), count):
                some = part[first : first + count]
                with self._buffers.borrow((len(some), matrix.columns), dtype) as block:
                    read_rows(descriptor, start + first * width, block, self._buffers)
                    wanted = block[:, columns[0] : columns[1]]
                    some.copy_(wanted.float() + 1 if zero_centered else wanted)
        except EOFError:
            raise CorruptData("is cut short", where=str(matrix.file), hint="fetch the file again") from None

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                try:
                    self._files[file] = os.open(file, os.O_RDONLY | OPEN_BYTES)
                except FileNotFoundError:
                    raise missing_file(file) from None
            return self._files[file]


def missing_file(file: Path) -> NotFound:
    """Return the error for a file that the checkpoint should have."""
    return NotFound(f"there is no {file.name}", where=str(file.parent), hint="fetch the checkpoint again")


def refuse_mismatches(missing: Sequence[str], extra: Sequence[str], wrong: Sequence[str], where: str) -> None:
    """Raise where the tensors are not those that the arguments describe."""
    by_state = ((missing, "missing"), (extra, "left over"))
    problems = [f"{join_names(names)} {state}" for names, state in by_state if names]
    problems += [join_names(wrong)] if wrong else []
    if problems:
        raise InputError(
            f"the tensors are not those of its args: {'; '.join(problems)}",
            where=where,
            hint="one that is left over would have been lost in silence",
        )


@dataclass(frozen=True)
class RowShare:
    """Every `stride`-th of some rows, from `first` on; `write` is called with the offset of their bytes, and these."""

    write: Callable[[int, memoryview], None]
    first: int = 0
    stride: int = 1


class RowCopier:
    """Copies rows of one source, in one dtype; of what is not a weight, in the dtype that it is stored in."""

    def __init__(self, source: Weights, dtype: torch.dtype, advance: AdvanceProgress) -> None:
        self.dtype = dtype
        self._source, self._advance = source, advance
        self._buffers = BufferPool()

    def row_jobs(
        self, tensor: MegatronTensor, first: int, last: int, shares: Sequence[RowShare]
    ) -> Iterator[Callable[[], None]]:
        """Yield the jobs that distribute native rows [first, last) of a tensor; they may run at the same time."""
        at_once = rows_per_block(tensor, self.dtype, BLOCK_BYTES)
        for start in range(first, last, at_once):
            yield partial(self._distribute, tensor, first, start, min(start + at_once, last), shares)

    def write_zeros(self, shape: Sequence[int], write: Callable[[int, memoryview], None]) -> None:
        """Write rows of padding."""
        self._write(0, torch.zeros(tuple(shape), dtype=self.dtype), write)

    def _distribute(
        self, tensor: MegatronTensor, origin: int, first: int, last: int, shares: Sequence[RowShare]
    ) -> None:
        with borrow_rows(tensor, self._source, first, last, stored_dtype(tensor.parameter, self.dtype)) as box:
            for share in shares:
                rows = box[share.first :: share.stride]
                start = (first - origin) // share.stride * (rows[:1].numel() * rows.itemsize)
                if rows.is_contiguous():
                    self._write(start, rows, share.write)
                    continue
                with self._buffers.borrow(rows.shape, rows.dtype) as contiguous:
                    self._write(start, contiguous.copy_(rows), share.write)

    def _write(self, start: int, rows: torch.Tensor, write: Callable[[int, memoryview], None]) -> None:
        data = bytes_of(rows)
        write(start, data)
        self._advance(len(data))


def rows_per_block(tensor: MegatronTensor, dtype: torch.dtype, block_bytes: int) -> int:
    """Return the rows of a block; an even number, so that a block of a gated tensor has complete pairs."""
    width = (tensor.shape[1] if len(tensor.shape) > 1 else 1) * dtype.itemsize
    return max(2, block_bytes // width // 2 * 2)


@contextmanager
def borrow_rows(
    tensor: MegatronTensor, source: Weights, first: int, last: int, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Borrow native rows [first, last) of the columns, and the expert, that a tensor holds."""
    offset, shape = [first], [last - first]
    if tensor.columns is not None:
        offset.append(tensor.columns[0])
        shape.append(tensor.columns[1] - tensor.columns[0])
    if tensor.expert is None:
        with source.borrow(tensor.parameter, offset, shape, dtype) as box:
            yield box
        return
    with source.borrow(tensor.parameter, [tensor.expert, *offset], [1, *shape], dtype) as box:
        yield box[0]
