"""Checkpoints of Megatron's for tests: random native weights as a source, and a writer run to its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from trainshed.checkpoints.weights import Weights, WeightsWriter
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig
from trainshed.storage import FileEntry, checksum_of

# As Llama 3.1 has it, which is all that Megatron can be told; base and positions such that every kind of frequency is
# there at a tiny width.
LLAMA3: dict[str, Any] = {
    "rope": {
        "base": 500000.0,
        "scaling": {
            "kind": "llama3",
            "factor": 8.0,
            "low_frequency_factor": 1.0,
            "high_frequency_factor": 4.0,
            "original_positions": 8192,
        },
    },
    "max_positions": 16384,
}


class MadeWeights:
    """Random weights in memory, seen as any others."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {each.name: torch.randn(each.shape, generator=generator) for each in parameters(config)}

    @property
    def dtypes(self) -> list[str]:
        return ["float32"]

    def read(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        box = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
        return self.tensors[parameter.name][box].to(dtype)

    @contextmanager
    def borrow(
        self, parameter: Parameter, offset: Sequence[int], shape: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        yield self.read(parameter, offset, shape, dtype)

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def written(writer: WeightsWriter, source: Weights, folder: Path) -> Path:
    """Write every unit and finish; each must become exactly as large as was said, and every byte be told."""
    entries = []
    for unit in writer.output_files():
        file = folder / unit.path
        file.parent.mkdir(parents=True, exist_ok=True)
        told: list[int] = []
        checksum = writer.write(unit, source, file, told.append, threads=2)
        assert file.stat().st_size == unit.bytes
        assert checksum == checksum_of(file.read_bytes())
        assert 0 < sum(told) <= unit.bytes
        entries.append(FileEntry(unit.path, unit.bytes, checksum))
    writer.finish(folder, entries)
    return folder


def assert_equal(one: Weights, other: Weights, dtype: torch.dtype = torch.float32) -> None:
    """Compare architectures and all tensors bit by bit."""
    assert one.config == other.config
    for parameter in parameters(one.config):
        zeros = [0] * len(parameter.shape)
        left, right = (each.read(parameter, zeros, parameter.shape, dtype) for each in (one, other))
        assert torch.equal(left, right), parameter.name
