"""Positions: which tokens of a sequence a context-parallel rank holds, and the rotary angles for them.

Shapes: L whole sequence, S the tokens of one context-parallel rank, D head_dim.
"""

from __future__ import annotations

import math

import torch

from trainshed.recipe import ModelConfig


def local_positions(length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Return the positions a rank holds: parts r and 2·cp-1-r of the sequence, so causal work is even: int64 [S]."""
    if cp_size == 1:
        return torch.arange(length)
    part = length // (2 * cp_size)
    halves = (cp_rank, 2 * cp_size - 1 - cp_rank)
    return torch.cat([torch.arange(half * part, (half + 1) * part) for half in halves])


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Return the rotary frequencies, stretched as the model says: float32 [D / 2], as Hugging Face computes them."""
    assert config.rope is not None, "the schema asks for it wherever positions are rotary"
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope.base**exponent)
    scaling = config.rope.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    low, high, original = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_positions
    assert low is not None, "the schema asks for all three"
    assert high is not None, "the schema asks for all three"
    assert original is not None, "the schema asks for all three"
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    result = torch.where(wavelength > original / low, frequencies / scaling.factor, frequencies)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, result)


def rotary_table(config: ModelConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines for these positions: float32 [S, D] each."""
    angles = torch.outer(positions.float(), inverse_frequencies(config))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn heads [S, B, heads, D] by their positions; cosine and sine are [S, 1, 1, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine
