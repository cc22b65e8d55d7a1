"""GPUs by name and by what their driver calls them, from `gpus.yaml`: peaks, memory, links, each with its source."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from trainshed.errors import InputError
from trainshed.recipe.messages import validate
from trainshed.recipe.places import Document, Places
from trainshed.recipe.section import PositiveFloat, Section, Text
from trainshed.recipe.yaml_source import parse

_FILE = Path(__file__).with_name("gpus.yaml")
HOW_TO_DESCRIBE = (
    "describe another as an entry of catalog/gpus.yaml: NAME: {source: its datasheet, device_names: [what "
    "torch.cuda.get_device_name says], memory_gib: 80.0, memory_gb_per_s: 2000.0, link_gb_per_s: null, "
    "dense_tflops: {bf16: 300.0}}"
)


class DenseTflops(Section):
    """Peaks without sparsity by the dtype of a product's inputs, in 10^12 FLOP a second; None: not published."""

    fp4: PositiveFloat | None = Field(None, description="NVFP4 or MXFP4")
    fp8: PositiveFloat | None = Field(None, description="E4M3 and E5M2")
    bf16: PositiveFloat = Field(description="bfloat16")
    fp16: PositiveFloat | None = Field(None, description="IEEE half")
    tf32: PositiveFloat | None = Field(None, description="fp32 inputs, rounded by the matrix units")
    fp32: PositiveFloat | None = Field(None, description="fp32 inputs, not rounded")
    fp64: PositiveFloat | None = Field(None, description="fp64, matrix units where they have it")

    def peak(self, dtype: str) -> float | None:
        """Return the peak of a dtype by name, None where it is not published."""
        return getattr(self, dtype) if dtype in type(self).model_fields else None


class Gpu(Section):
    """One GPU as it is sold."""

    source: Text = Field(description="Where the figures are published, and how they were made dense")
    device_names: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] = Field(
        description="What torch.cuda.get_device_name returns"
    )
    memory_gib: PositiveFloat = Field(description="Total memory that the driver reports")
    memory_gb_per_s: PositiveFloat = Field(description="Peak memory bandwidth, 10^9 bytes a second")
    link_gb_per_s: PositiveFloat | None = Field(
        description="NVLink or xGMI, both directions together, 10^9 bytes a second; null: PCIe only"
    )
    dense_tflops: DenseTflops = Field(description="Peaks without sparsity")


@cache
def _document() -> Document:
    return parse(_FILE.read_text(encoding="utf-8"), _FILE.name)


def gpu_names() -> list[str]:
    """Return the names of all GPUs, in the order of the catalog."""
    return list(_document().value)


@cache
def gpu(name: str) -> Gpu:
    """Return a GPU by its name in the catalog."""
    names = gpu_names()
    if name not in names:
        wanted = name.lower().replace("_", "-")
        variants = [known for known in names if known.startswith(wanted)]
        near = variants or difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known GPUs: {', '.join(names)}"
        raise InputError(f"there is no GPU `{name}` in the catalog", hint=f"{hint}\n{HOW_TO_DESCRIBE}")
    return validate(Gpu, Document(_document().value[name], Places(f"{_FILE.name}, {name}")))


def gpu_by_device_name(text: str) -> Gpu | None:
    """Return the GPU that a driver calls by this name, None where the catalog has none: nothing is guessed."""
    wanted = " ".join(text.split()).casefold()
    for name in gpu_names():
        found = gpu(name)
        if any(wanted == device.casefold() for device in found.device_names):
            return found
    return None
