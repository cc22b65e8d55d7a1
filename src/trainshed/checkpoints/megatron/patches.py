"""Weights put together from patches: rectangles of stored tensors, each with its place in one of Megatron's.

Both formats come down to this. Opening finds every patch and touches no tensor's bytes; `read` then takes from each
patch the rows that a box needs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from trainshed.checkpoints.megatron.args import Layout
from trainshed.checkpoints.megatron.pickled import DTYPE_BYTES
from trainshed.checkpoints.scratch import Scratch, read_rows
from trainshed.checkpoints.weights import box_ends
from trainshed.errors import CorruptData, InputError, NotFound
from trainshed.models.megatron_tensors import is_norm_weight, strips
from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
READ_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
_BLOCK_BYTES = 2 * 1024 * 1024
_NAMED = 5  # how many tensors an error names before it only counts


@dataclass(frozen=True)
class Located:
    """A matrix in a file, row by row; a vector is a matrix of one column."""

    file: Path
    start: int
    """Bytes of the file before it."""
    dtype: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Patch:
    """A stored matrix, and its place in one of Megatron's uncut ones: rows [row, row + rows) and such columns.

    `locate` finds it in a file, where it may lie `transposed`; `skip` of its rows belong to another patch.
    """

    locate: Callable[[], Located]
    row: int
    column: int
    rows: int
    columns: int
    skip: int = 0
    transposed: bool = False


Whole = tuple[str, int | None]
"""Megatron's uncut tensor: the native tensor's name, and the expert."""


class PatchedWeights:
    """Weights of Megatron's, opened: see `MegatronDistWeights` and `MegatronLegacyWeights`.

    `padded_vocab_size` is the number of rows that the embedding has in the files, `layout` how they are cut.
    """

    config: ModelConfig
    layout: Layout
    padded_vocab_size: int

    def __init__(
        self, config: ModelConfig, patches: Mapping[Whole, Sequence[Patch]], dtypes: Sequence[str], less_one: bool
    ) -> None:
        self.config = config
        self._patches = patches
        self._dtypes = sorted(set(dtypes))
        self._less_one = less_one
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._scratch = Scratch()

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
        for strip in strips(parameter):
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
        self, part: torch.Tensor, patch: Patch, rows: tuple[int, int], columns: tuple[int, int], less_one: bool
    ) -> None:
        located = patch.locate()
        down = rows[0] - patch.row + patch.skip, rows[1] - patch.row + patch.skip
        across = columns[0] - patch.column, columns[1] - patch.column
        if patch.transposed:
            self._fill_matrix(part.T, located, across, down, less_one)
        else:
            self._fill_matrix(part, located, down, across, less_one)

    def _fill_matrix(
        self, part: torch.Tensor, located: Located, rows: tuple[int, int], columns: tuple[int, int], less_one: bool
    ) -> None:
        """Read rows straight to their place or, where they are cast, turned or partly wanted, through a buffer."""
        dtype, width = READ_DTYPES[located.dtype], located.columns * DTYPE_BYTES[located.dtype]
        descriptor, start = self._descriptor(located.file), located.start + rows[0] * width
        try:
            if columns == (0, located.columns) and part.dtype == dtype and part[:1].is_contiguous() and not less_one:
                read_rows(descriptor, start, part, self._scratch)
                return
            count = max(1, _BLOCK_BYTES // width)
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
    latest = folder / LATEST
    if not latest.is_file():
        return folder
    said = latest.read_text().strip()
    if said != RELEASE and not said.isdecimal():
        raise CorruptData(f"names `{said}`, which is no iteration", where=str(latest), hint="name one of its folders")
    found = folder / (said if said == RELEASE else f"iter_{int(said):07d}")
    if not found.is_dir():
        raise NotFound(f"there is no {found.name}", where=str(folder), hint=f"{LATEST} names it: fetch it too")
    return found


def missing_file(file: Path) -> NotFound:
    """The error for a file that the checkpoint should have."""
    return NotFound(f"there is no {file.name}", where=str(file.parent), hint="fetch the checkpoint again")


def refuse_misfits(missing: Sequence[str], extra: Sequence[str], wrong: Sequence[str], where: str) -> None:
    """Say which tensors are not those that the arguments describe."""
    told = [f"{_listed(names)} {how}" for names, how in ((missing, "missing"), (extra, "left over")) if names]
    told += [_listed(wrong)] if wrong else []
    if told:
        raise InputError(
            f"the tensors are not those of its args: {'; '.join(told)}",
            where=where,
            hint="one that is left over would have been lost in silence",
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
