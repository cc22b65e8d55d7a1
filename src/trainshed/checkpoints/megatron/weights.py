"""What both of Megatron's formats share: weights read from regions of stored tensors, and rows copied into files.

Opening a checkpoint finds every region (a rectangle of a stored tensor, with its place in one of Megatron's full
tensors) and touches no tensor's bytes; `read` then takes from each region the rows that a box needs. For writing,
`RowCopier` pulls rows from any source in blocks that stay in the processor's caches.
"""

from __future__ import annotations

import os
import threading
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
from trainshed.checkpoints.weights import AdvanceProgress, Weights, box_ends
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.models.megatron_tensors import MegatronTensor, is_norm_weight, megatron_row_mappings
from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig

LATEST_ITERATION = "latest_checkpointed_iteration.txt"
RELEASE = "release"
READ_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
_READ_BYTES = 2 * 1024 * 1024
_NAMED = 5  # how many tensors an error names before it only counts


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in a file, row by row; a vector is a matrix of one column."""

    file: Path
    start: int
    """Bytes of the file before it."""
    dtype: str
    rows: int
    columns: int


@dataclass(frozen=True)
class StoredRegion:
    """A stored matrix, and its place in one of Megatron's uncut ones: rows [row, row + rows) and such columns.

    `locate` finds it in a file, where it may lie `transposed`; `skip` of its rows belong to another patch.
    """

    locate: Callable[[], StoredMatrix]
    row: int
    column: int
    rows: int
    columns: int
    skip: int = 0
    transposed: bool = False


FullTensor = tuple[str, int | None]
"""Megatron's uncut tensor: the native tensor's name, and the expert."""


class MegatronWeights:
    """Weights of Megatron's, opened: see `MegatronDistWeights` and `MegatronLegacyWeights`.

    `padded_vocab_size` is the number of rows that the embedding has in the files, `layout` how they are cut.
    """

    config: ModelConfig
    layout: MegatronLayout
    padded_vocab_size: int

    def __init__(
        self,
        config: ModelConfig,
        patches: Mapping[FullTensor, Sequence[StoredRegion]],
        dtypes: Sequence[str],
        less_one: bool,
    ) -> None:
        self.config = config
        self._patches = patches
        self._dtypes = sorted(set(dtypes))
        self._less_one = less_one
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._scratch = BufferPool()

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the stored tensors, in torch's words."""
        return self._dtypes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()
        self._scratch.clear()

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the box [offset, offset + shape) of a native tensor, on the CPU; safe to call from several threads."""
        box = torch.empty(tuple(shape), dtype=dtype)
        self._fill_box(box, parameter, offset, shape)
        return box

    @contextmanager
    def lent(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Lend such a box, to look at for as long as the block runs."""
        with self._scratch.lent(shape, dtype) as box:
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
        for strip in megatron_row_mappings(parameter):
            first, last = (strip.hf_start + row for row in strip.within(*rows))
            for patch in self._patches[parameter.name, expert]:
                top, bottom = max(first, patch.row), min(last, patch.row + patch.rows)
                left, right = max(columns[0], patch.column), min(columns[1], patch.column + patch.columns)
                if top >= bottom or left >= right:
                    continue
                into = strip.native_rows(top - strip.hf_start, bottom - strip.hf_start)
                assert isinstance(into, slice), "Megatron's rows are ours, or every second of them"
                into = slice(into.start - rows[0], into.stop - rows[0], into.step)
                part = target[into, left - columns[0] : right - columns[0]]
                self._fill_part(part, patch, (top, bottom), (left, right), self._less_one and is_norm_weight(parameter))

    def _fill_part(
        self, part: torch.Tensor, patch: StoredRegion, rows: tuple[int, int], columns: tuple[int, int], less_one: bool
    ) -> None:
        located = patch.locate()
        down = rows[0] - patch.row + patch.skip, rows[1] - patch.row + patch.skip
        across = columns[0] - patch.column, columns[1] - patch.column
        if patch.transposed:
            self._fill_matrix(part.T, located, across, down, less_one)
        else:
            self._fill_matrix(part, located, down, across, less_one)

    def _fill_matrix(
        self, part: torch.Tensor, located: StoredMatrix, rows: tuple[int, int], columns: tuple[int, int], less_one: bool
    ) -> None:
        """Read rows straight to their place or, where they are cast, turned or partly wanted, through a buffer."""
        dtype, width = READ_DTYPES[located.dtype], located.columns * DTYPE_BYTES[located.dtype]
        descriptor, start = self._descriptor(located.file), located.start + rows[0] * width
        try:
            if columns == (0, located.columns) and part.dtype == dtype and part[:1].is_contiguous() and not less_one:
                read_rows(descriptor, start, part, self._scratch)
                return
            count = max(1, _READ_BYTES // width)
            for first in range(0, len(part), count):
                some = part[first : first + count]
                with self._scratch.lent((len(some), located.columns), dtype) as block:
                    read_rows(descriptor, start + first * width, block, self._scratch)
                    wanted = block[:, columns[0] : columns[1]]
                    some.copy_(wanted.float() + 1 if less_one else wanted)
        except EOFError:
            raise CorruptData("is cut short", where=str(located.file), hint="fetch the file again") from None

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                try:
                    self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    raise missing_file(file) from None
            return self._files[file]


def iteration_folder(folder: Path) -> Path:
    """Return the folder of one iteration, given it or the root that names the latest."""
    latest = folder / LATEST_ITERATION
    if not latest.is_file():
        return folder
    said = latest.read_text().strip()
    if said != RELEASE and not said.isdecimal():
        raise CorruptData(f"names `{said}`, which is no iteration", where=str(latest), hint="name one of its folders")
    found = folder / (said if said == RELEASE else f"iter_{int(said):07d}")
    if not found.is_dir():
        raise NotFound(
            f"there is no {found.name}", where=str(folder), hint=f"{LATEST_ITERATION} names it: fetch it too"
        )
    return found


def missing_file(file: Path) -> NotFound:
    """The error for a file that the checkpoint should have."""
    return NotFound(f"there is no {file.name}", where=str(file.parent), hint="fetch the checkpoint again")


def refuse_mismatches(missing: Sequence[str], extra: Sequence[str], wrong: Sequence[str], where: str) -> None:
    """Say which tensors are not those that the arguments describe."""
    told = [f"{_join_names(names)} {how}" for names, how in ((missing, "missing"), (extra, "left over")) if names]
    told += [_join_names(wrong)] if wrong else []
    if told:
        raise InputError(
            f"the tensors are not those of its args: {'; '.join(told)}",
            where=where,
            hint="one that is left over would have been lost in silence",
        )


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


@dataclass(frozen=True)
class RowShare:
    """Every `step`-th of some rows, from `part` on; `put` takes their bytes, told how many came before."""

    put: Callable[[int, memoryview], None]
    part: int = 0
    step: int = 1


class RowCopier:
    """Reads one source, in one dtype."""

    def __init__(self, source: Weights, dtype: torch.dtype, advance: AdvanceProgress) -> None:
        self.dtype = dtype
        self._source, self._advance = source, advance
        self._scratch = BufferPool()

    def rows(
        self, tensor: MegatronTensor, first: int, last: int, shares: Sequence[RowShare]
    ) -> Iterator[Callable[[], None]]:
        """Yield the jobs that share out native rows [first, last) of a tensor, which may be done at the same time."""
        at_once = rows_per_block(tensor, self.dtype, BLOCK_BYTES)
        for start in range(first, last, at_once):
            yield partial(self._share_out, tensor, first, start, min(start + at_once, last), shares)

    def zeros(self, shape: Sequence[int], put: Callable[[int, memoryview], None]) -> None:
        """Give out rows of padding."""
        self._give(0, torch.zeros(tuple(shape), dtype=self.dtype), put)

    def _share_out(
        self, tensor: MegatronTensor, origin: int, first: int, last: int, shares: Sequence[RowShare]
    ) -> None:
        with borrow_rows(tensor, self._source, first, last, self.dtype) as box:
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


def rows_per_block(tensor: MegatronTensor, dtype: torch.dtype, block_bytes: int) -> int:
    """How many rows make a block; an even number, so that a block of a gated tensor has whole pairs."""
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
        with source.lent(tensor.parameter, offset, shape, dtype) as box:
            yield box
        return
    with source.lent(tensor.parameter, [tensor.expert, *offset], [1, *shape], dtype) as box:
        yield box[0]
