"""How much of its datasheet a GPU reaches, kernel by kernel, by its generation.

Hopper's figures are our own, from an H200 with torch 2.11 (943 products, attention of cuDNN and FlashAttention-2,
copies): a product of [M, K] by [K, N] takes FLOPs / (peak · reach) · (1 + depth / K), at least its bytes at the speed
of memory, and a fixed start; tiles and waves explain nothing more (stream-K kernels), and the median error of that law
is 6.5% where a product has 17 GFLOP or more. The other generations follow the same law with the peak share fitted to
published measurements (`benchmarks/fit_planner.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainshed.errors import InputError


@dataclass(frozen=True)
class Reach:
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
    attention_width: float = 0.3
    """How attention's speed falls with narrower heads: (width / 128) to this power."""
    memory: float = 0.85
    """Of the bandwidth of memory, what copies and element-wise kernels reach."""
    start_us: float = 4.0
    """What a kernel costs before its first byte."""


_REACH = {
    "a100": Reach(0.83, 0.80, 0.79, low=1.0, attention=0.60, memory=0.80),
    "h100": Reach(0.78, 0.75, 0.74, low=0.85, attention=0.60),
    "h200": Reach(0.78, 0.75, 0.74, low=0.85, attention=0.60),
    "b200": Reach(0.75, 0.72, 0.72, low=0.80, attention=0.50),
    "b300": Reach(0.75, 0.72, 0.72, low=0.80, attention=0.50),
    "gb200": Reach(0.75, 0.72, 0.72, low=0.80, attention=0.50),
    "gb300": Reach(0.75, 0.72, 0.72, low=0.80, attention=0.50),
    "mi": Reach(0.55, 0.52, 0.50, low=0.80, attention=0.35, memory=0.75),
}
_ANY = Reach(0.70, 0.67, 0.66, low=0.85, attention=0.45, memory=0.80)


def reach_of(gpu_name: str) -> Reach:
    """Return what a GPU reaches; one nobody has measured gets the cautious middle of the others."""
    for prefix, reach in _REACH.items():
        if gpu_name.startswith(prefix):
            return reach
    return _ANY


def product_peak_flops(dense_tflops: object, dtype: str) -> float:
    """Return the dense peak of a dtype in FLOP a second."""
    peak = getattr(dense_tflops, "peak")(dtype)
    if peak is None:
        raise InputError(f"the GPU has no peak for {dtype}", hint="choose another precision")
    return peak * 1e12
