"""Weights in any format, seen alike: boxes of native tensors are read, files of a target are written one by one.

Every reader answers in native names and shapes (`models/parameters.py`), whatever lies on disk; every writer pulls the
boxes it needs from a reader. So each format is written once, against this module, and any pair of them converts. A
target is cut into units (files), each made whole or not at all: that is what a killed conversion goes on from, what
runs in parallel, and what bounds memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry

if TYPE_CHECKING:
    import torch


AdvanceProgress = Callable[[int], None]
"""Told how many bytes were written, for a progress bar."""


class Weights(Protocol):
    """The weights of a model in some format, opened and held against their config."""

    config: ModelConfig

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the stored tensors, in torch's words."""
        ...

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the box [offset, offset + shape) of a native tensor, on the CPU; safe to call from several threads."""
        ...

    def lent(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> AbstractContextManager[torch.Tensor]:
        """Lend such a box, to look at for as long as the block runs: its memory is used again for the next."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def box_ends(parameter: Parameter, offset: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return where a box of a native tensor ends in each dim; one that reaches out of it is an error of the caller."""
    ends = [start + length for start, length in zip(offset, shape, strict=True)]
    if any(not 0 <= a <= b <= whole for a, b, whole in zip(offset, ends, parameter.shape, strict=True)):
        raise ValueError(f"{parameter.name} of shape {parameter.shape} has no box {shape} at {offset}")
    return ends


@dataclass(frozen=True)
class OutputFile:
    """One file of a target: made whole or not at all."""

    path: str
    """Relative to the target."""
    bytes: int
    """About how large it becomes."""


class WeightsWriter(Protocol):
    """A target format for one model: which files it has, and how each is made from a source."""

    config: ModelConfig

    def units(self) -> list[OutputFile]:
        """Return the files that hold weights, in a fixed order; the same for the same model and options."""
        ...

    def write(self, unit: OutputFile, source: Weights, file: Path, advance: AdvanceProgress, threads: int = 1) -> str:
        """Write one unit to a local file and return its checksum; safe to call from several threads.

        It takes memory for a few blocks, whatever the size of a tensor, and so many `threads` of its own.
        """
        ...

    def finish(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Write what is not weights (index, metadata, config, tokenizer files) once all units are there."""
        ...
