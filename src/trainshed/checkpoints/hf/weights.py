"""A model's weights as transformers saves them: checked against its config, read box by box.

Opening reads the config and the headers alone and needs no torch; `read` touches the bytes a box needs and no others,
so that every rank of any layout reads its own part from the same files. Nothing is mapped: memory holds what was asked
for, whatever the size of a file.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from trainshed.checkpoints.hf.folder import DTYPES, matched, read_config, stored_tensors
from trainshed.checkpoints.hf.safetensors_file import StoredTensor, same_bytes
from trainshed.checkpoints.weights import box_ends
from trainshed.errors import CorruptData, InputError
from trainshed.models.families import HF_FAMILIES
from trainshed.models.hf_tensors import Strip, sources
from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig

if TYPE_CHECKING:
    import torch

    from trainshed.checkpoints.scratch import Scratch

HEAD = "lm_head.weight"
# Small enough to stay in a processor's cache between reading and laying out, large enough that reads do not count.
_BUFFER_BYTES = 2 * 1024 * 1024


class HfWeights:
    """The weights in a folder.

    `config` is what the config.json beside them describes, unless it is given; names, shapes and dtypes of all tensors
    have been held against it.
    """

    def __init__(self, folder: Path, config: ModelConfig | None = None) -> None:
        self.folder = folder
        self.config = read_config(folder) if config is None else config
        stored = stored_tensors(folder)
        self._tied_head = stored.pop(HEAD, None) if self.config.tied_embeddings else None
        self._tensors = matched(self.config, stored, folder)
        self._open_files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._strips: dict[str, tuple[Strip, ...]] = {}
        self._memory: Scratch | None = None
        weakref.finalize(self, _close, self._open_files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            _close(self._open_files)
            self._memory = None

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the stored tensors, in torch's words."""
        return sorted({DTYPES[tensor.dtype] for tensor in self._tensors.values()})

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Where each tensor lies, by the name that transformers saves it under today."""
        return self._tensors

    @property
    def parameters(self) -> int:
        """The number of weights, tied ones counted once."""
        return sum(math.prod(tensor.shape) for tensor in self._tensors.values())

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the box [offset, offset + shape) of a native tensor, on the CPU."""
        import torch

        box_ends(parameter, offset, shape)
        box = torch.empty(tuple(shape), dtype=dtype)
        self._fill(box, parameter, offset)
        return box

    @contextmanager
    def lent(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Lend such a box, to look at for as long as the block runs."""
        box_ends(parameter, offset, shape)
        with self._scratch.lent(shape, dtype) as box:
            self._fill(box, parameter, offset)
            yield box

    def check_tied_head(self) -> None:
        """Compare a head that is stored although it is tied with the embedding it should be. Reads both."""
        name = HF_FAMILIES[self.config.family].names.tensors["embedding"][0] + ".weight"
        if self._tied_head is not None and not same_bytes(self._tied_head, self._tensors[name]):
            raise InputError(
                f"`tie_word_embeddings` says that `{HEAD}` and `{name}` are one, and they differ",
                where=str(self.folder),
                hint="if the head was trained by itself, its config.json should say `tie_word_embeddings: false`",
            )

    @property
    def _scratch(self) -> Scratch:
        from trainshed.checkpoints.scratch import Scratch

        with self._lock:
            self._memory = self._memory or Scratch()
            return self._memory

    def _fill(self, box: torch.Tensor, parameter: Parameter, offset: Sequence[int]) -> None:
        """Read all strips of a box to their rows in it."""
        if not box.numel():
            return
        ends = [start + length for start, length in zip(offset, box.shape, strict=True)]
        dim = 1 if parameter.expert else 0
        columns = slice(offset[dim + 1], ends[dim + 1]) if box.dim() > dim + 1 else None
        whole_rows = columns is None or columns == slice(0, parameter.shape[dim + 1])
        for strip in self._sources(parameter):
            if strip.expert is not None and not offset[0] <= strip.expert < ends[0]:
                continue
            target = box if strip.expert is None else box[strip.expert - offset[0]]
            part = strip.within(offset[dim], ends[dim])
            if whole_rows and not strip.transposed and DTYPES[self._tensors[strip.hf_name].dtype] == _name(box.dtype):
                self._read_straight(target, strip, *part, offset[dim])
            else:
                self._read_by_block(target, strip, *part, columns, offset[dim])

    def _sources(self, parameter: Parameter) -> tuple[Strip, ...]:
        if parameter.name not in self._strips:  # experts have hundreds
            self._strips[parameter.name] = sources(self.config, parameter)
        return self._strips[parameter.name]

    def _read_straight(self, target: torch.Tensor, strip: Strip, first: int, last: int, origin: int) -> None:
        """Rows that lie in the file as in memory need no buffer between: each run of them is read to its place."""
        from trainshed.checkpoints.scratch import read_rows

        stored = self._tensors[strip.hf_name]
        row_bytes = (stored.end - stored.start) // stored.shape[0]
        descriptor, scratch = self._descriptor(stored.file), self._scratch
        for start, rows in strip.runs(first, last):
            try:
                into = target[rows.start - origin : rows.stop - origin : rows.step]
                read_rows(descriptor, stored.start + (strip.hf_start + start) * row_bytes, into, scratch)
            except EOFError:
                raise _cut_short(stored) from None

    def _read_by_block(
        self, target: torch.Tensor, strip: Strip, first: int, last: int, columns: slice | None, origin: int
    ) -> None:
        """What is cast, turned or only partly wanted passes through a buffer."""
        import torch

        for start, stop, block in self._blocks(strip, first, last, columns):
            rows = strip.native_rows(start, stop)
            if isinstance(rows, slice):
                target[rows.start - origin : rows.stop - origin : rows.step] = block
            else:
                target[torch.from_numpy(rows - origin)] = block.to(target.dtype)

    def _blocks(
        self, strip: Strip, first: int, last: int, columns: slice | None
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the rows [first, last) of a strip, some at a time: (from, to, rows); each is gone with the next."""
        if first == last:
            return
        stored = self._tensors[strip.hf_name]
        if not strip.transposed:
            for start, stop, rows in self._stored_rows(stored, strip.hf_start + first, strip.hf_start + last):
                block = rows if columns is None else rows[:, columns]
                yield start - strip.hf_start, stop - strip.hf_start, block
            return
        import torch

        # There our columns are the rows, and our rows a range of its columns: such models are small.
        assert columns is not None
        part = slice(strip.hf_start + first, strip.hf_start + last)
        parts = [rows[:, part].clone() for _, _, rows in self._stored_rows(stored, columns.start, columns.stop)]
        if parts:
            yield first, last, torch.cat(parts).T

    def _stored_rows(self, stored: StoredTensor, first: int, last: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Read rows of a stored tensor into a buffer that is used again: what is mapped would count as memory."""
        import torch

        from trainshed.checkpoints.scratch import read_rows

        dtype = getattr(torch, DTYPES[stored.dtype])
        width = stored.shape[1:]
        row_bytes = math.prod(width) * dtype.itemsize
        count = max(1, _BUFFER_BYTES // row_bytes)
        scratch, descriptor = self._scratch, self._descriptor(stored.file)
        for start in range(first, last, count):
            stop = min(start + count, last)
            with scratch.lent((stop - start, *width), dtype) as rows:
                try:
                    read_rows(descriptor, stored.start + start * row_bytes, rows, scratch)
                except EOFError:
                    raise _cut_short(stored) from None
                yield start, stop, rows

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._open_files:
                self._open_files[file] = os.open(file, os.O_RDONLY)
            return self._open_files[file]


def _cut_short(stored: StoredTensor) -> CorruptData:
    return CorruptData(f"ends before `{stored.name}` does", where=str(stored.file), hint="fetch the file again")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _close(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])
