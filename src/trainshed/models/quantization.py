"""Frozen weights in 8 or 4 bits (QLoRA): quantised when they are loaded, dequantised where they are multiplied.

    int8    round(w / s) with s = max |w| of the row / 127
    nf4     two codes to a byte, each the nearest of 16 levels times the max |w| of its block of 64 columns; the levels
            are quantiles of a normal distribution (Dettmers et al., QLoRA, arXiv:2305.14314, appendix E)

Backward needs the weight again. It is dequantised again: a copy in full precision never outlives the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from trainshed.recipe.train import NF4_BLOCK

Quantization = Literal["int8", "nf4"]
# The table of appendix E of the paper, as bitsandbytes has it; torchao rounds it to four digits.
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_INT8_LEVELS = 127.0


def quantize_rows(weight: torch.Tensor, kind: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise whole rows [rows, columns]; return codes and float32 scales.

    int8: codes int8 [rows, columns], scales [rows, 1]. nf4: codes uint8 [rows, columns / 2], of which the high half of
    a byte is the even column, scales [rows, columns / 64].
    """
    weight = weight.float()
    if kind == "int8":
        scales = weight.abs().amax(1, keepdim=True) / _INT8_LEVELS
        return torch.where(scales > 0, weight / scales, 0.0).round_().to(torch.int8), scales
    blocks = weight.unflatten(1, (-1, NF4_BLOCK))
    scales = blocks.abs().amax(2)
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    boundaries = (levels[1:] + levels[:-1]) / 2
    normed = torch.where(scales[..., None] > 0, blocks / scales[..., None], 0.0).flatten(1)
    codes = torch.bucketize(normed, boundaries).to(torch.uint8)
    return (codes[:, 0::2] << 4) | codes[:, 1::2], scales


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [rows, columns] of codes and scales; int8 codes are int8's, uint8 ones nf4's."""
    wide = torch.promote_types(dtype, torch.float32)
    if codes.dtype == torch.int8:
        return (codes.to(wide) * scales.to(wide)).to(dtype)
    levels = torch.tensor(NF4_LEVELS, dtype=wide, device=codes.device)
    pairs = torch.stack([levels[(codes >> 4).long()], levels[(codes & 15).long()]], dim=-1)
    blocks = pairs.flatten(1).unflatten(1, (-1, NF4_BLOCK))
    return (blocks * scales[..., None].to(wide)).flatten(1).to(dtype)


class QuantizedWeight(nn.Module):
    """A frozen weight [rows, columns] as codes and scales. They are buffers: FSDP does not shard them."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, kind: Quantization, rows: int, columns: int) -> None:
        super().__init__()
        self.kind: Quantization = kind
        self.rows, self.columns = rows, columns
        int8 = kind == "int8"
        codes = torch.empty((rows, columns if int8 else columns // 2), dtype=torch.int8 if int8 else torch.uint8)
        scales = torch.empty((rows, 1 if int8 else columns // NF4_BLOCK), dtype=torch.float32)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @torch.no_grad()
    def store(self, rows: torch.Tensor, weight: torch.Tensor, first_column: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise whole rows and keep this rank's columns of them as `rows` int64; return |error|² and |weight|².

        Scales are those of the whole rows, so the weight is the same however its columns are cut over ranks.
        """
        codes, scales = quantize_rows(weight, self.kind)
        own = slice(first_column, first_column + self.columns)
        lost = (dequantize_rows(codes, scales, torch.float32) - weight.float())[:, own]
        if self.kind == "nf4":
            scales = scales[:, first_column // NF4_BLOCK :][:, : self.columns // NF4_BLOCK]
            codes = codes[:, first_column // 2 :]
        else:
            codes = codes[:, first_column:]
        self.codes[rows], self.scales[rows] = codes[:, : self.codes.shape[1]], scales
        return lost.double().square().sum(), weight[:, own].double().square().sum()

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight."""
        return dequantize_rows(self.codes, self.scales, dtype)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., columns] with the weight: [..., rows]."""
        return quantized_linear(x, self.codes, self.scales)


@torch.library.custom_op("trainshed::quantized_linear", mutates_args=())
def quantized_linear(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply x [..., columns] with a quantised weight: [..., rows].

    An operation of its own: a compiler that looked inside would see that forward and backward dequantise the same
    weight, and keep it.
    """
    return F.linear(x, _dequantize(codes, scales, x.dtype))


@torch.library.custom_op("trainshed::quantized_linear_input_grad", mutates_args=())
def quantized_linear_input_grad(grad: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the input of `quantized_linear`."""
    return grad @ _dequantize(codes, scales, grad.dtype)


def _dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (_compiled_dequantize() if codes.is_cuda else dequantize_rows)(codes, scales, dtype)


@cache
def _compiled_dequantize() -> Callable[..., torch.Tensor]:
    """One kernel on a GPU; compiled on first use."""
    return torch.compile(dequantize_rows, dynamic=False)


@quantized_linear.register_fake
def _(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


@quantized_linear_input_grad.register_fake
def _(grad: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    columns = codes.shape[1] if codes.dtype == torch.int8 else 2 * codes.shape[1]
    return grad.new_empty((*grad.shape[:-1], columns))


def _keep_codes(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return quantized_linear_input_grad(grad.contiguous(), *ctx.saved_tensors), None, None


quantized_linear.register_autograd(_backward, setup_context=_keep_codes)
QUANTIZED_LINEAR = torch.ops.trainshed.quantized_linear.default
"""The operation as a dispatcher sees it."""
