"""How much of its datasheet a GPU reaches, kernel by kernel, by its generation.

Hopper's figures are our own, from an H200 with torch 2.11 (943 matmuls, attention of cuDNN and FlashAttention-2,
copies): a matmul of [M, K] by [K, N] takes FLOPs / (peak · efficiency) · (1 + depth / K), at least its bytes at the
speed of memory, and a fixed start. Tiles and waves explain nothing more (stream-K kernels). The median error of that
law is 6.5% where a matmul has 17 GFLOP or more. The other generations follow the same law, with the share of the peak
fitted to published measurements (`benchmarks/fit_planner.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainshed.recipe.yaml_io import parse_yaml


@dataclass(frozen=True)
class GpuEfficiency:
    """What kernels reach of the peaks of one generation of GPUs."""

    forward: float
    """Products of the forward pass, as a share of the dense peak."""
    input_gradient: float
    weight_gradient: float
    low: float
    """fp8 and fp4 products, as a share of their own peak, of what bf16 ones reach of theirs."""
    attention: float
    """Attention on long sequences with heads of 128, as a share of the bf16 peak, with the best kernel there is."""
    fp4: float = 0.7
    """fp4 products, as a share of their peak, of what fp8 ones reach of theirs."""
    depth: float = 100.0
    """K at which a product reaches half its speed."""
    narrow: float = 60.0
    """Tokens of an expert at which a grouped product reaches half its speed."""
    attention_length: float = 400.0
    """Keys at which attention reaches half its speed."""
    attention_backward: float = 0.85
    """Speed of attention's backward pass against its forward."""
    attention_most: float = 1.0
    """Share of the bf16 peak that attention never exceeds, whatever is fitted: an engine that was measured on another
    generation brings a share of its own. FlashAttention-2 reaches 0.73 of an A100 at best (Dao 2023)."""
    attention_width: float = 0.3
    """How attention's speed falls with narrower heads: (width / 128) to this power."""
    memory: float = 0.85
    """Of the bandwidth of memory, what copies and element-wise kernels reach."""
    link: float = 1.0
    """Of what collectives reach of the links between GPUs on Hopper, what they reach here of faster ones."""
    start_us: float = 4.0
    """What a kernel costs before its first byte."""


_FILE = Path(__file__).with_name("gpu_efficiency.yaml")
_UNKNOWN = "any"
"""The entry for GPUs that nobody has measured: the cautious middle of the others."""
_in_use: dict[str, GpuEfficiency] = {}


def all_gpu_efficiencies() -> dict[str, GpuEfficiency]:
    """Return what is known, by the beginning of a GPU's name in the catalog."""
    if not _in_use:
        use_gpu_efficiencies(
            {
                name: GpuEfficiency(**values)
                for name, values in parse_yaml(_FILE.read_text("utf-8"), _FILE.name).value.items()
            }
        )
    return _in_use


def use_gpu_efficiencies(reaches: Mapping[str, GpuEfficiency]) -> None:
    """Predict with other constants from now on: what fitting them needs."""
    found = dict(reaches)
    _in_use.clear()
    _in_use.update(found)


def gpu_efficiency(gpu_name: str) -> GpuEfficiency:
    """Return what a GPU reaches; one that nobody has measured gets the cautious middle of the others."""
    reaches = all_gpu_efficiencies()
    return next((reach for prefix, reach in reaches.items() if gpu_name.startswith(prefix)), reaches[_UNKNOWN])
