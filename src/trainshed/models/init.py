"""Fresh weights, and the counter-based random numbers that they and dropout masks are made of.

A number is a function of (key, element index), so any rank makes any part of a tensor alone, and every layout starts
from the same weights. The key of a weight is its parameter's name and the seed.

Version 1 is never edited, only added to: fresh weights and dropout masks of every run depend on it. The hash is two
rounds of a 32-bit finaliser (Wang's/murmur3's xor-shift-multiply) over (key, index). Integers are exact on every
device, so a CPU and a GPU draw the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from trainshed.models.parameters import Parameter
from trainshed.recipe import ModelConfig

RNG_VERSION = 1
_MASK = 0xFFFFFFFF
_CHUNK_ELEMENTS = 1 << 22


def rng_key(*parts: str | int) -> int:
    """Return a 62-bit key of names and numbers."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def _mix(x: torch.Tensor) -> torch.Tensor:
    """murmur3's 32-bit finaliser on int64 tensors that hold 32-bit values; works in place."""
    x.bitwise_xor_(x >> 16).mul_(0x85EBCA6B).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 13).mul_(0xC2B2AE35).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 16)


def random_bits(index: torch.Tensor, key: int, stream: int = 0) -> torch.Tensor:
    """Return 32 random bits for each int64 index, as int64."""
    low, high = key & _MASK, (key >> 32) & _MASK
    # A 64-bit index enters in two halves, so tensors past 2^32 elements do not repeat.
    x = (index & _MASK) ^ low
    x = _mix(x)
    x = x.add_((index >> 32) + high + 0x9E3779B9 * (2 * stream + 1)).bitwise_and_(_MASK)
    x = _mix(x)
    return _mix(x.bitwise_xor_((low * 0x9E3779B1 + high) & _MASK))


def box_indices(
    shape: Sequence[int], offset: Sequence[int], box: Sequence[int], device: torch.device | str
) -> torch.Tensor:
    """Return the flat indices, within a tensor of `shape`, of the box at `offset`."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = math.prod(shape)
    for length, start, count in zip(shape, offset, box, strict=True):
        stride //= length
        index = index.unsqueeze(-1) + torch.arange(start, start + count, device=device, dtype=torch.int64) * stride
    return index


def fill_normal(
    out: torch.Tensor, key: int, std: float, shape: Sequence[int], offset: Sequence[int] | None = None
) -> None:
    """Fill `out`, the box at `offset` of a tensor of `shape`, with that tensor's normal numbers (Box-Muller)."""
    if out.numel() == 0:
        return
    offset = offset or (0,) * len(shape)
    rows = max(1, _CHUNK_ELEMENTS // max(1, out[0].numel())) if out.dim() else 1
    for first in range(0, out.shape[0] if out.dim() else 1, rows):
        part = out[first : first + rows] if out.dim() else out
        start = (offset[0] + first, *offset[1:]) if out.dim() else ()
        index = box_indices(shape, start, part.shape, out.device)
        # 32 bits each, centred in their cells, so the logarithm never sees 0.
        radius = random_bits(index, key, 0).double().add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = random_bits(index, key, 1).double().add_(0.5).mul_(2.0 * math.pi * 2.0**-32).cos_()
        part.copy_(radius.mul_(angle).mul_(std))


def fill_uniform(
    out: torch.Tensor, key: int, bound: float, shape: Sequence[int], offset: Sequence[int] | None = None
) -> None:
    """Fill `out`, the box at `offset` of a tensor of `shape`, with that tensor's numbers between ± bound."""
    if out.numel() == 0:
        return
    offset = offset or (0,) * len(shape)
    rows = max(1, _CHUNK_ELEMENTS // max(1, out[0].numel()))
    for first in range(0, out.shape[0], rows):
        part = out[first : first + rows]
        index = box_indices(shape, (offset[0] + first, *offset[1:]), part.shape, out.device)
        # Centred in their cells, so that the numbers are symmetric about 0.
        part.copy_(random_bits(index, key).double().add_(0.5).mul_(2.0**-31).sub_(1.0).mul_(bound))


def dropout_mask(index: torch.Tensor, key: int, probability: float) -> torch.Tensor:
    """Return which elements dropout keeps, each with `1 - probability`."""
    return random_bits(index, key, 2) >= int(probability * 2**32)


def rng_key_tensor(key: int, device: torch.device | str) -> torch.Tensor:
    """Return a key as int64 [3] for `random_bits_compiled`: its low and high half, and what the last round adds."""
    low, high = key & _MASK, (key >> 32) & _MASK
    return torch.tensor([low, high, (low * 0x9E3779B1 + high) & _MASK], dtype=torch.int64, device=device)


def random_bits_compiled(index: torch.Tensor, key: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """Return the bits of `random_bits` for a key from `rng_key_tensor`.

    A compiler takes a number for a constant: every key would be compiled anew. It takes a tensor as it comes.
    """
    low, high, last = key.unbind()
    x = _mix((index & _MASK) ^ low)
    x = x.add_((index >> 32) + high + 0x9E3779B9 * (2 * stream + 1)).bitwise_and_(_MASK)
    x = _mix(x)
    return _mix(x.bitwise_xor_(last))


def dropout_mask_compiled(index: torch.Tensor, key: torch.Tensor, probability: float) -> torch.Tensor:
    """Return the mask of `dropout_mask` for a key from `rng_key_tensor`."""
    return random_bits_compiled(index, key, 2) >= int(probability * 2**32)


ROUNDING_STREAM = 3
"""The stream of the bits that decide how optimizer states are rounded."""


INIT_VERSION = 1


@torch.no_grad()
def init_parameter(
    out: torch.Tensor, parameter: Parameter, offset: Sequence[int], config: ModelConfig, seed: int
) -> None:
    """Fill `out`, the box at `offset` of a parameter, with its starting values."""
    if parameter.init == "ones":
        out.fill_(1.0)
    elif parameter.init == "zeros":
        out.zero_()
    elif parameter.init == "kaiming_uniform":
        bound = 1.0 / math.sqrt(parameter.shape[-1])
        fill_uniform(out, rng_key("init", INIT_VERSION, seed, parameter.name), bound, parameter.shape, offset)
    elif parameter.init in ("row_norms", "base_rows"):
        raise ValueError(f"{parameter.name} is computed from the weight that it belongs to")
    else:
        std = config.init_std
        if parameter.init == "output":
            std /= math.sqrt(2 * config.layers)
        fill_normal(out, rng_key("init", INIT_VERSION, seed, parameter.name), std, parameter.shape, offset)
