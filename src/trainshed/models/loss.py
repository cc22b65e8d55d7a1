"""Cross-entropy over a vocabulary cut over tp, a slice of tokens at a time: the logits never exist whole.

The gradient is made in the same pass, as the logits of a slice are at hand only then; backward has nothing left to
compute. The loss is the sum over the labelled tokens times `scale` (1 / their count in the global batch), so it does
not depend on how the batch is cut into micro-batches.

Shapes: T tokens, C tokens of a slice, H hidden, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from trainshed.models.collectives import SINGLE_RANK, AxisGroup, all_reduce, all_reduce_max

IGNORE_INDEX = -100
"""The label of a token that carries no loss."""
# Slices of logits this large (elements) keep the matrix units busy and memory small: 2048 tokens of 128k words.
SLICE_ELEMENTS = 1 << 28
_VOCABULARY_MULTIPLE = 64
"""Rows of the vocabulary that products on a GPU want a multiple of: with GPT-2's 50,257 they run at a sixth of the
speed. Rows of zeros are added to the copy that is multiplied, and their logits are minus infinity."""


def _slice_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    scale: torch.Tensor,
    z_loss: float,
    group: AxisGroup,
    first_row: int,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (cross-entropy sum, z sum, gradient of the logits) of a slice; both sums are scaled.

    Of a token's logits the first `rows` are words. They may be overwritten: without a compiler, each pass over a fresh
    tensor of their size costs.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.to(wide)
    peak = all_reduce_max(scores.amax(-1), group)
    mine = (labels >= first_row) & (labels < first_row + rows)
    column = torch.where(mine, labels - first_row, 0)[:, None]
    hit = torch.where(mine, scores.gather(-1, column)[:, 0], 0.0)
    powers = _exp_shifted(scores, peak[:, None])
    total, hit = all_reduce(torch.stack([powers.sum(-1), hit]), group).unbind()
    log_total = peak + total.log()
    weight = (labels != IGNORE_INDEX).to(wide) * scale.to(wide)
    entropy = ((log_total - hit) * weight).sum()
    z = z_loss * (log_total.square() * weight).sum()
    slope = weight * (1.0 + 2.0 * z_loss * log_total) / total
    gradient = _scale_and_subtract(powers, slope[:, None], column, torch.where(mine, weight, 0.0)[:, None])
    return entropy, z, gradient.to(logits.dtype)


def _exp_shifted(scores: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """exp(scores - peak)."""
    if torch.compiler.is_compiling():
        return (scores - peak).exp()
    return scores.sub_(peak).exp_()


def _scale_and_subtract(
    x: torch.Tensor, factor: torch.Tensor, column: torch.Tensor, less: torch.Tensor
) -> torch.Tensor:
    """x · factor, and `less` less in one column of each row."""
    if torch.compiler.is_compiling():
        # A scatter would end the fused kernel; a comparison costs it nothing.
        columns = torch.arange(x.shape[-1], device=x.device)
        return torch.where(columns[None, :] == column, x * factor - less, x * factor)
    x.mul_(factor)
    return x.scatter_(1, column, x.gather(1, column) - less)


@cache
def _compiled_slice_loss() -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Compiled where it is first used: loading the compiler costs seconds, and a CPU never asks for it."""
    return torch.compile(_slice_loss, dynamic=False)


def _pad_vocabulary(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights in another precision, made up to a multiple of rows that products are fast with."""
    rows = _padded_rows(weight)
    if rows == weight.shape[0]:
        return weight.to(dtype)
    whole = weight.new_zeros((rows, weight.shape[1]), dtype=dtype)
    whole[: weight.shape[0]].copy_(weight)
    return whole


def _padded_rows(weight: torch.Tensor) -> int:
    return -(-weight.shape[0] // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE if weight.is_cuda else weight.shape[0]


def _accumulate_product(
    total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, wide: torch.dtype
) -> torch.Tensor:
    """Add left @ right to a total kept in `wide`; on a GPU the product itself adds, without a pass of its own."""
    if left.is_cuda and left.dtype != wide:
        if total is None:
            return torch.mm(left, right, out_dtype=wide)
        return torch.addmm(total, left, right, out_dtype=wide, out=total)
    if total is None:
        return (left @ right).to(wide)
    return total.addmm_(left, right) if left.dtype == wide else total.add_(left @ right)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        scale: torch.Tensor,
        z_loss: float,
        group: AxisGroup,
        first_row: int,
        vocab_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slice_loss = _compiled_slice_loss() if hidden.is_cuda and group.size == 1 else _slice_loss
        wide = torch.promote_types(hidden.dtype, torch.float32)
        wants_grad = any(ctx.needs_input_grad)
        entropy = torch.zeros((), dtype=wide, device=hidden.device)
        z = torch.zeros_like(entropy)
        # From the whole vocabulary: ranks may hold parts of different sizes, and must cut alike.
        tokens = max(1, SLICE_ELEMENTS // vocab_size)
        slices = -(-hidden.shape[0] // tokens)
        tokens = -(-hidden.shape[0] // slices)  # equal slices: one shape to compile
        grad_hidden = torch.empty_like(hidden) if wants_grad else None
        grad_weight: torch.Tensor | None = None
        rows = weight.shape[0]
        used = _pad_vocabulary(weight, hidden.dtype)
        for start in range(0, hidden.shape[0], tokens):
            part = hidden[start : start + tokens]
            logits = part @ used.t()
            if rows < used.shape[0]:
                logits[:, rows:] = -torch.inf
            more, more_z, gradient = slice_loss(
                logits, labels[start : start + tokens], scale, z_loss, group, first_row, rows
            )
            entropy, z = entropy + more, z + more_z
            if grad_hidden is None:
                continue
            torch.mm(gradient, used, out=grad_hidden[start : start + tokens])
            grad_weight = _accumulate_product(grad_weight, gradient.t(), part, wide)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight[:rows].to(weight.dtype))
        ctx.mark_non_differentiable(z)
        return entropy + z, z

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grads[0]
        return (
            grad_hidden * factor.to(grad_hidden.dtype),
            grad_weight * factor.to(grad_weight.dtype),
            *(None,) * 6,
        )


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    scale: torch.Tensor,
    *,
    z_loss: float = 0.0,
    group: AxisGroup = SINGLE_RANK,
    first_row: int = 0,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, the z-loss part of it) of hidden states [T, H] against labels [T].

    `weight` [V, H] is this rank's part of the vocabulary, from `first_row` on, in any precision; products are in that
    of `hidden`. `vocab_size` is the whole vocabulary: a group of several ranks needs it. The result is the same on all
    ranks of the group, the gradient of `hidden` this rank's part of a sum.
    """
    if vocab_size is None:
        if group.size > 1:
            raise ValueError("ranks that share a vocabulary need to be told its size")
        vocab_size = weight.shape[0]
    loss, z = _LinearCrossEntropy.apply(hidden, weight, labels, scale, z_loss, group, first_row, vocab_size)
    return loss, z.detach()
