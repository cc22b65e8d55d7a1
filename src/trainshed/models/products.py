"""The products of projections with their weights, and those that hide tensor-parallel collectives.

A column-parallel projection gathers the tokens of all tp ranks before its product, a row-parallel one sums its product
over the ranks after it. With `layout.overlap: tp` both are one operation (`gather_linear`, `linear_scatter`):

    GPU        one product for each rank's tokens, while those of the next rank are copied: PyTorch's fused operations
               over symmetric memory, in forward and backward
    elsewhere  plain collectives, one after the other: the same arithmetic, for proofs

Shapes: S tokens, s of them on this rank, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from trainshed.models.collectives import AxisGroup
from trainshed.models.compute_weights import copy_or_cast

_comm = torch.ops._c10d_functional

MatmulFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""How a projection multiplies: (input [..., in], weight [out, in] in any precision, its copy in the dtype of the
products, if one is kept) to [..., out]."""


def linear(x: torch.Tensor, weight: torch.Tensor, copy: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x [..., in] with a weight [out, in] in the dtype of x: [..., out]; a frozen weight has no gradient."""
    if weight.dtype != x.dtype and (weight.requires_grad or copy is not None):
        return _MasterWeightProduct.apply(x, weight, copy)
    return F.linear(x, weight.to(x.dtype))


def gather_linear(x: torch.Tensor, weight: torch.Tensor, copy: torch.Tensor | None, tp: AxisGroup) -> torch.Tensor:
    """Gather the tokens of all tp ranks and multiply them with a weight: [s, B, in] to [S, B, out]."""
    return _GatherProduct.apply(x, weight, copy, tp.name, tp.size)


def linear_scatter(x: torch.Tensor, weight: torch.Tensor, copy: torch.Tensor | None, tp: AxisGroup) -> torch.Tensor:
    """Multiply with a weight, sum over the tp ranks and keep this rank's tokens: [S, B, in] to [s, B, out]."""
    return _ProductScatter.apply(x, weight, copy, tp.name, tp.size)


def _weight_gradient(grad: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return gradᵀ · x over all tokens; on a GPU it comes out of the product in this dtype, without a pass to cast."""
    rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
    if rows.is_cuda and rows.dtype != dtype:
        return torch.mm(rows.t(), inputs, out_dtype=dtype)
    return (rows.t() @ inputs).to(dtype)


@torch._dynamo.allow_in_graph  # traced by itself, its results would be kept whatever `recompute` says
class _MasterWeightProduct(torch.autograd.Function):
    """x · Wᵀ in the dtype of x; the gradient of W has W's own dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
        narrow = copy_or_cast(weight, x.dtype, copy)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, narrow)
        ctx.weight_dtype = weight.dtype
        return F.linear(x, narrow)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grads[0] @ weight if ctx.needs_input_grad[0] else None
        return grad_x, None if x is None else _weight_gradient(grads[0], x, ctx.weight_dtype), None


@torch._dynamo.allow_in_graph
class _GatherProduct(torch.autograd.Function):
    """`gather_linear`; the tokens of all ranks are kept for the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, copy: torch.Tensor | None, group: str, size: int
    ) -> torch.Tensor:
        narrow = copy_or_cast(weight, x.dtype, copy)
        gathered, out = _gather_and_multiply(x, narrow.t(), group, size)
        ctx.save_for_backward(gathered if ctx.needs_input_grad[1] else None, narrow)
        ctx.weight_dtype, ctx.group, ctx.size = weight.dtype, group, size
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gathered, narrow = ctx.saved_tensors
        grad_x = _multiply_and_scatter(grads[0], narrow, ctx.group, ctx.size)
        if gathered is None:
            return grad_x, None, None, None, None
        return grad_x, _weight_gradient(grads[0], gathered, ctx.weight_dtype), None, None, None


@torch._dynamo.allow_in_graph
class _ProductScatter(torch.autograd.Function):
    """`linear_scatter`; backward gathers the gradients of all ranks' tokens, which both products need."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, copy: torch.Tensor | None, group: str, size: int
    ) -> torch.Tensor:
        narrow = copy_or_cast(weight, x.dtype, copy)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, narrow)
        ctx.weight_dtype, ctx.group, ctx.size = weight.dtype, group, size
        return _multiply_and_scatter(x, narrow.t(), group, size)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, narrow = ctx.saved_tensors
        gathered, grad_x = _gather_and_multiply(grads[0], narrow, ctx.group, ctx.size)
        if x is None:
            return grad_x, None, None, None, None
        return grad_x, _weight_gradient(gathered, x, ctx.weight_dtype), None, None, None


def _gather_and_multiply(
    x: torch.Tensor, matrix: torch.Tensor, group: str, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather [s, B, in] over the ranks and multiply with [in, out]: [S, B, in] and [S, B, out]."""
    x = x.contiguous()
    if x.is_cuda:
        gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(x, [matrix], 0, group)
        return gathered, products[0]
    gathered = _comm.wait_tensor(_comm.all_gather_into_tensor(x, size, group))
    return gathered, gathered @ matrix


def _multiply_and_scatter(x: torch.Tensor, matrix: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Multiply [S, B, in] with [in, out], sum over the ranks and keep this rank's tokens: [s, B, out]."""
    if x.is_cuda:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), matrix, "sum", 0, group)
    return _comm.wait_tensor(_comm.reduce_scatter_tensor((x @ matrix).contiguous(), "sum", size, group))
