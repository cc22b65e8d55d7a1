"""GPUs by name and by their driver's name, from `gpus.yaml`: peaks, memory, links, each with its source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from trainshed.catalog.table import CatalogEntry, CatalogTable
from trainshed.recipe.section import PositiveFloat, Problem, Section, Text

HOW_TO_DESCRIBE_GPU = (
    "describe another in a file and give its path (--gpu ./mygpu.yaml): NAME: {source: its datasheet, device_names: "
    "[what torch.cuda.get_device_name says], memory_gib: 80.0, memory_gb_per_s: 2000.0, link_gb_per_s: null, "
    "dense_tflops: {bf16: 300.0}, machine: dgx-h100}"
)


class DenseTflops(Section):
    """Peaks without sparsity by the dtype of a matmul's inputs, in 10^12 FLOP a second; None: not published."""

    fp4: PositiveFloat | None = Field(None, description="NVFP4 or MXFP4")
    fp8: PositiveFloat | None = Field(None, description="E4M3 and E5M2")
    bf16: PositiveFloat | None = Field(None, description="bfloat16; a Volta has none")
    fp16: PositiveFloat | None = Field(None, description="IEEE half")
    tf32: PositiveFloat | None = Field(None, description="fp32 inputs, rounded by the matrix units")
    fp32: PositiveFloat | None = Field(None, description="fp32 inputs, not rounded")
    fp64: PositiveFloat | None = Field(None, description="fp64, matrix units where they have it")

    def problems(self) -> Iterator[Problem]:
        """A GPU needs a peak for 16-bit matmuls."""
        if self.bf16 is None and self.fp16 is None:
            yield Problem(("bf16",), "neither bf16 nor fp16 has a peak", "write the dense one of its datasheet")

    @property
    def half(self) -> float:
        """The peak of 16-bit matmuls: of bf16, or of fp16 if there is no bf16."""
        peak = self.bf16 or self.fp16
        assert peak is not None, "`problems` requires one of them"
        return peak

    def peak(self, dtype: str) -> float | None:
        """Return the peak of a dtype by name; None if it is not published."""
        return getattr(self, dtype) if dtype in type(self).model_fields else None


class Gpu(CatalogEntry):
    """One GPU as it is sold."""

    source: Text = Field(description="Where the figures are published, and how they were made dense")
    aliases: Annotated[tuple[Text, ...], Field(strict=False)] = Field((), description="What people call it besides")
    device_names: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] = Field(
        description="What torch.cuda.get_device_name returns"
    )
    memory_gib: PositiveFloat = Field(description="Total memory that the driver reports")
    memory_gb_per_s: PositiveFloat = Field(description="Peak memory bandwidth, 10^9 bytes a second")
    link_gb_per_s: PositiveFloat | None = Field(
        description="NVLink or xGMI, both directions together, 10^9 bytes a second; null: PCIe only"
    )
    host_gb_per_s: PositiveFloat = Field(
        32.0, description="To the host's memory, one direction; left out: PCIe 4.0 with 16 lanes"
    )
    dense_tflops: DenseTflops = Field(description="Peaks without sparsity")
    machine: Text | None = Field(
        None, description="The machine that is meant where only the GPU is named: a name in machines.yaml, or a file"
    )

    @property
    def vendor(self) -> Literal["nvidia", "amd"]:
        """Who makes it, by the names of its driver."""
        return "amd" if any(name.startswith("AMD") for name in self.device_names) else "nvidia"


_TABLE = CatalogTable(Path(__file__).with_name("gpus.yaml"), Gpu, "GPU", HOW_TO_DESCRIBE_GPU, other_names="aliases")


def gpu_names() -> list[str]:
    """Return the names of all GPUs, in the order of the catalog."""
    return _TABLE.names()


def gpu(name: str) -> Gpu:
    """Return a GPU by its name in the catalog, or by one of its aliases (`h100`)."""
    return _TABLE.entry(name)


def gpu_from_file(path: str | os.PathLike[str]) -> Gpu:
    """Return the GPU that a file describes."""
    return _TABLE.from_file(path)


def find_gpu(name_or_path: str | os.PathLike[str]) -> Gpu:
    """Return a GPU by name, or from the file that describes it."""
    return _TABLE.find(name_or_path)


def gpu_by_device_name(text: str) -> Gpu | None:
    """Return the GPU of which this is the driver's name; None if the catalog has none: nothing is guessed."""
    wanted = " ".join(text.split()).casefold()
    for name in gpu_names():
        entry = gpu(name)
        if any(wanted == device.casefold() for device in entry.device_names):
            return entry
    return None
