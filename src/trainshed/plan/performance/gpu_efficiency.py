"""Which share of its datasheet a GPU reaches, kernel by kernel, by its generation.

Hopper's figures are our own, from an H200 with torch 2.11 (943 matmuls, attention of cuDNN and FlashAttention-2,
copies): a matmul of [M, K] by [K, N] takes FLOPs / (peak · efficiency) · (1 + half_depth / K), at least its bytes at
the memory bandwidth, and a fixed start. Tiles and waves explain nothing more (stream-K kernels). The median error of
that law is 6.5% where a matmul has 17 GFLOP or more. The other generations follow the same law, with the share of the
peak fitted to published measurements (`benchmarks/fit_planner.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainshed.recipe.yaml_io import parse_yaml

_FILE = Path(__file__).with_name("gpu_efficiency.yaml")
_UNKNOWN = "any"
"""The entry for GPUs that nobody has measured: the cautious middle of the others."""


@dataclass(frozen=True)
class GpuEfficiency:
    """What kernels reach of the peaks of one generation of GPUs."""

    forward: float
    """Share of the dense peak that the matmuls of the forward pass reach."""
    input_gradient: float
    weight_gradient: float
    fp8: float
    """Share of the fp8 peak that matmuls reach, relative to the share of the bf16 peak that bf16 matmuls reach."""
    attention: float
    """Share of the bf16 peak that the best kernel of attention reaches on long sequences with heads of 128."""
    fp4: float = 0.7
    """The same for fp4, relative to fp8."""
    half_depth: float = 100.0
    """K at which a matmul reaches half its speed."""
    grouped_half_tokens: float = 60.0
    """Tokens of an expert at which a grouped matmul reaches half its speed."""
    attention_length: float = 400.0
    """Keys at which attention reaches half its speed."""
    attention_backward: float = 0.85
    """Speed of attention's backward pass, relative to its forward pass."""
    attention_max: float = 1.0
    """Share of the bf16 peak that attention never exceeds, whatever is fitted: the constants of an engine that was
    measured on another generation multiply it. FlashAttention-2 reaches 0.73 of an A100 at best (Dao 2023)."""
    attention_width: float = 0.3
    """How attention's speed falls with narrower heads: (width / 128) to this power."""
    memory: float = 0.85
    """Share of the memory bandwidth that copies and element-wise kernels reach."""
    link: float = 1.0
    """What collectives reach of the links between GPUs, relative to what they reach of Hopper's slower ones."""
    start_us: float = 4.0
    """Fixed time of a kernel."""


@cache
def all_gpu_efficiencies() -> Mapping[str, GpuEfficiency]:
    """Return all entries of the file, by the beginning of a GPU's name in the catalog."""
    entries = parse_yaml(_FILE.read_text("utf-8"), _FILE.name).value
    return {name: GpuEfficiency(**values) for name, values in entries.items()}


def gpu_efficiency(gpu_name: str, known: Mapping[str, GpuEfficiency] | None = None) -> GpuEfficiency:
    """Return the efficiency of a GPU, from the file unless `known` is given; an unknown GPU gets a cautious one."""
    entries = all_gpu_efficiencies() if known is None else known
    return next((entry for prefix, entry in entries.items() if gpu_name.startswith(prefix)), entries[_UNKNOWN])
