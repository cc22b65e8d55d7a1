"""MXFP4, in which gpt-oss is published: blocks of 32 numbers of 4 bits that share an exponent (OCP MX, version 1.0).

A matrix [out, in] is stored as `*_blocks` [out, in / 32, 16], two numbers to a byte, the first in the low bits, and
`*_scales` [out, in / 32], the exponent plus 127. Any rows of a matrix are read by themselves.
"""

from __future__ import annotations

from functools import cache

import torch

BLOCK_NUMBERS = 32
"""Numbers that share an exponent."""
BLOCK_BYTES = BLOCK_NUMBERS // 2
_EXPONENT_BIAS = 127
# E2M1: one bit of sign, two of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers of blocks [rows, G, 16] with exponents [rows, G], uint8 both: bfloat16 [rows, 32 G].

    Exact: four bits times a power of two are a bfloat16, save what is too small for one.
    """
    numbers = _pairs()[blocks.int()].flatten(-2)
    exponents = scales.int() - _EXPONENT_BIAS
    return torch.ldexp(numbers, exponents[..., None]).to(torch.bfloat16).flatten(-2)


@cache
def _pairs() -> torch.Tensor:
    """The two numbers of each byte: bfloat16 [256, 2]."""
    numbers = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    return torch.stack([numbers[byte % 16], numbers[byte // 16]], dim=-1)
