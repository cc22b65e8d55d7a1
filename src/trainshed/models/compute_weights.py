"""Copies of master weights in the dtype of the products, kept from step to step.

Without them every micro-batch casts every weight again, and each one in flight keeps its own copies for backward. With
them AdamW writes a new weight in both dtypes in one pass. What anybody else writes (another optimizer, a checkpoint, an
average put in place of the weights) is copied before the next forward pass: PyTorch counts the writes of a tensor
(`_version`), and every update marks as stale the copies of all weights that it may have written uncounted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class ComputeWeight:
    """The copy of one master weight, equal to it after `refresh_compute_weights`."""

    def __init__(self, master: nn.Parameter, dtype: torch.dtype) -> None:
        self.master = master
        self.tensor = torch.empty_like(master, dtype=dtype, requires_grad=False)
        self._version: int | None = None

    @property
    def stale(self) -> bool:
        """Whether the weight may have been written since it was copied."""
        return self._version != self.master._version

    def mark_written(self) -> None:
        """Say that the copy has the weight's present values."""
        self._version = self.master._version

    def mark_stale(self) -> None:
        """Say that the weight may have been written, whatever PyTorch has counted."""
        self._version = None


@torch.no_grad()
def refresh_compute_weights(weights: Iterable[ComputeWeight]) -> None:
    """Copy the weights that were written since they were copied."""
    stale = [weight for weight in weights if weight.stale]
    if not stale:
        return
    torch._foreach_copy_([weight.tensor for weight in stale], [weight.master for weight in stale])
    for weight in stale:
        weight.mark_written()


def copy_or_cast(weight: torch.Tensor, dtype: torch.dtype, copy: torch.Tensor | None) -> torch.Tensor:
    """Return a weight in the dtype of the products: its copy, if there is one in that dtype. A copy has no gradient."""
    return weight.to(dtype) if copy is None or copy.dtype != dtype else copy


def in_compute_dtype(weight: torch.Tensor, dtype: torch.dtype, copy: torch.Tensor | None) -> torch.Tensor:
    """Return the same for autograd: the weight has the gradient, whether it is cast or copied."""
    narrow = copy_or_cast(weight, dtype, copy)
    return _UseCopy.apply(weight, narrow) if narrow is copy else narrow


@torch._dynamo.allow_in_graph
class _UseCopy(torch.autograd.Function):
    """The copy in place of the weight; the weight has the gradient, in its own dtype."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].to(ctx.dtype), None
