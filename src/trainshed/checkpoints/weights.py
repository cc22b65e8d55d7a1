"""The protocols that every format of weights implements: `Weights` reads, `WeightsWriter` writes.

A reader returns native names and shapes (`models/parameters.py`), whatever is stored on disk. A writer reads the boxes
it needs from any reader. So each format is implemented once, and any pair of formats converts. A target consists of
files that are written one by one. Each is written completely or not at all: a killed conversion continues after the
last complete file, files are written in parallel, and memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry

if TYPE_CHECKING:
    import torch

    from trainshed.models.hf_tensors import HfTensor


AnyTensor = TypeVar("AnyTensor")
_MAX_NAMED = 5  # how many tensors an error names before it only counts
AdvanceProgress = Callable[[int], None]
"""Called with the number of bytes that were written, for a progress bar."""


class Weights(Protocol):
    """The weights of a model in some format, opened and checked against their config."""

    config: ModelConfig

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the stored weights, by torch's names, without what is not a weight (`Parameter.buffer`)."""
        ...

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the box [offset, offset + shape) of a native tensor, on the CPU; safe to call from several threads."""
        ...

    def borrow(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> AbstractContextManager[torch.Tensor]:
        """Lend such a box for as long as the `with` block runs; its memory is then reused for the next one."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def box_ends(parameter: Parameter, offset: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return where a box of a native tensor ends in each dim; raise `ValueError` for a box outside the tensor."""
    ends = [start + length for start, length in zip(offset, shape, strict=True)]
    if any(not 0 <= start <= end <= size for start, end, size in zip(offset, ends, parameter.shape, strict=True)):
        raise ValueError(f"{parameter.name} of shape {parameter.shape} has no box {shape} at {offset}")
    return ends


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`, as files and messages have it."""
    return str(dtype).removeprefix("torch.")


def stored_dtype(parameter: Parameter | HfTensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor of a model in `dtype`: that, and float32 or better for what is not a weight."""
    import torch

    return torch.promote_types(dtype, torch.float32) if parameter.buffer else dtype


def join_names(names: Sequence[str]) -> str:
    """Join names for a message: the first five, then how many more there are."""
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def group_by_size(
    tensors: Iterable[AnyTensor], size_of: Callable[[AnyTensor], int], file_bytes: int
) -> list[list[AnyTensor]]:
    """Group tensors into files of at most `file_bytes`, in order; a larger tensor has a file of its own."""
    groups: list[list[AnyTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = size_of(tensor)
        if groups[-1] and filled + size > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    return groups


@dataclass(frozen=True)
class OutputFile:
    """One file of a target; it is written completely or not at all."""

    path: str
    """Relative to the target."""
    bytes: int
    """About how large it becomes."""


class WeightsWriter(Protocol):
    """The writer of one format for one model: which files there are, and how each is written from a source."""

    config: ModelConfig

    def output_files(self) -> list[OutputFile]:
        """Return the files that hold weights, in a fixed order; the same for the same model and options."""
        ...

    def write(self, output: OutputFile, source: Weights, file: Path, advance: AdvanceProgress, threads: int = 1) -> str:
        """Write one output file to the path `file` and return its checksum; safe to call from several threads.

        It uses memory for a few blocks, whatever the size of a tensor, and `threads` threads of its own.
        """
        ...

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write what is not weights (index, metadata, config, tokenizer files) once all output files exist."""
        ...
