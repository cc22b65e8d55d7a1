"""Projections that multiply in float8; the router and the head stay as they are.

Each tensor is divided by a scale so that its largest value is the largest of the format (dynamic scales, one for each
tensor). Inputs and weights are e4m3, gradients e5m2, as torchao has them by default. The kernels want the inner
dimension of both factors contiguous, so backward needs three of its factors transposed.

Backward keeps the input in float8, and the cast is an operation of its own: a compiler that looked inside would compute
the layer's norm again in backward, and write it transposed one byte at a time. That took 8% of a step on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import FunctionType
from typing import Any

import torch

from trainshed.models.layers import Linear

_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST_MAXIMUM = 1e-12
"""Tensors of zeros are scaled as if this were their largest value."""


def convert_to_float8(projections: Iterable[Linear]) -> None:
    """Make projections multiply in float8; backward of frozen ones computes no gradient of the weight."""

    def trained(x: torch.Tensor, weight: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
        return _Float8Matmul.apply(x, weight, copy, False)

    def frozen(x: torch.Tensor, weight: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
        return _Float8Matmul.apply(x, weight, copy, True)

    for module in projections:
        # The kernels need sizes in multiples of 16.
        if not any(size % 16 for size in module.weight.shape):
            module.matmul = trained if module.weight.requires_grad else frozen


@torch._dynamo.allow_in_graph
class _Float8Matmul(torch.autograd.Function):
    """x · Wᵀ. The gradient of W has W's own dtype; a frozen W has none, and the input is not kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, copy: torch.Tensor | None, frozen: bool
    ) -> torch.Tensor:
        rows, rounded = x.flatten(0, -2), x.dtype
        ctx.frozen, ctx.weight_dtype = frozen, weight.dtype
        if copy is not None and copy.dtype == rounded:
            weight = copy  # half the bytes to read, four times
        row_scale, weight_scale = _scale(rows, _FORWARD), _scale(weight.to(rounded), _FORWARD)
        narrow = cast_to_float8(rows, row_scale, rounded, _FORWARD)
        narrow_weight = cast_to_float8(weight, weight_scale, rounded, _FORWARD)
        # The weight is there anyway; to cast it again in backward takes less than to keep it costs.
        ctx.save_for_backward(weight, weight_scale, *(() if frozen else (narrow, row_scale)))
        out = _multiply(narrow, row_scale, narrow_weight, weight_scale, rounded, fast=True)
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        weight, weight_scale, *inputs = ctx.saved_tensors
        (grad,) = grads
        rows, rounded = grad.flatten(0, -2), grad.dtype
        scale = _scale(rows, _BACKWARD)
        narrow = cast_to_float8(rows, scale, rounded, _BACKWARD)
        transposed_weight = cast_to_float8_transposed(weight, weight_scale, rounded, _FORWARD)
        grad_x = _multiply(narrow, scale, transposed_weight, weight_scale, rounded).unflatten(0, grad.shape[:-1])
        if ctx.frozen:
            return grad_x, None, None, None
        x, x_scale = inputs
        transposed = narrow.t().contiguous()
        return grad_x, _multiply(transposed, scale, x.t().contiguous(), x_scale, ctx.weight_dtype), None, None


def _multiply(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> torch.Tensor:
    """Return left · rightᵀ [m, n] of [m, k] and [n, k]; `fast` sums are less exact."""
    scales = left_scale.reciprocal(), right_scale.reciprocal()
    return torch._scaled_mm(left, right.t(), *scales, out_dtype=dtype, use_fast_accum=fast)


def _scale(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what x is multiplied by so that its largest value is the largest of a float8 format."""
    # Division in float64 gives the same result compiled and not.
    largest = x.abs().amax().double().clamp(min=_SMALLEST_MAXIMUM)
    return (torch.finfo(dtype).max / largest).float()


@torch.library.custom_op("trainshed::cast_to_float8", mutates_args=())
def cast_to_float8(x: torch.Tensor, scale: torch.Tensor, rounded_to: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Round x to another dtype, multiply it by a scale and cast it to float8; values beyond its range are cut off."""
    x = x.contiguous()
    cast = _compiled(_cast, x.shape) if x.is_cuda else _cast
    return cast(x.view(-1), scale, rounded_to, dtype).view(x.shape)


@torch.library.custom_op("trainshed::cast_to_float8_transposed", mutates_args=())
def cast_to_float8_transposed(
    x: torch.Tensor, scale: torch.Tensor, rounded_to: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """The same of x [m, n], as [n, m]."""
    cast = _compiled(_cast_transposed, x.shape) if x.is_cuda else _cast_transposed
    return cast(x, scale, rounded_to, dtype)


@cast_to_float8.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, rounded_to: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@cast_to_float8_transposed.register_fake
def _(x: torch.Tensor, scale: torch.Tensor, rounded_to: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape[::-1], dtype=dtype, device=x.device)


def _cast(x: torch.Tensor, scale: torch.Tensor, rounded_to: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return (x.to(rounded_to).float() * scale).clamp(-limit, limit).to(dtype)


def _cast_transposed(x: torch.Tensor, scale: torch.Tensor, rounded_to: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    return _cast(x, scale, rounded_to, dtype).t().contiguous()


def _compiled(function: Callable[..., torch.Tensor], shape: torch.Size) -> Callable[..., torch.Tensor]:
    """One kernel on a GPU, compiled on first use.

    A kernel for one shape casts at 3.8 TB/s on an H200, one for any shape at 2.6, and at half of that where it
    transposes. A rank has few shapes; with more (rows that change from step to step) the kernel for any is used.
    """
    of_shape = (function, shape)
    if of_shape not in _compiled_casts and len(_compiled_casts) < _MOST_COMPILED_CASTS:
        _compiled_casts[of_shape] = torch.compile(_clone(function), dynamic=False)
    return _compiled_casts.get(of_shape) or _compiled_for_any_shape(function)


_MOST_COMPILED_CASTS = 64
_compiled_casts: dict[tuple[Callable[..., torch.Tensor], torch.Size], Callable[..., torch.Tensor]] = {}


@cache
def _compiled_for_any_shape(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(_clone(function), dynamic=True)


def _clone(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function with code of its own: PyTorch counts how often it compiles one code, and stops at eight."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__, closure=None)
