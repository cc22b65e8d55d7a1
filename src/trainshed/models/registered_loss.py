"""A loss that a plugin has registered, over a vocabulary cut over tp, a slice of tokens at a time.

The gradient of a slice is made while its logits are at hand, as `loss.py` does for cross entropy; autograd computes it.

Shapes: T tokens, C tokens of a slice, H hidden, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from typing import Any

import torch

from trainshed.models import loss as cross_entropy
from trainshed.models.collectives import SINGLE_RANK, AxisGroup, all_reduce, all_reduce_max
from trainshed.models.loss import IGNORE_INDEX
from trainshed.models.token_loss import TokenLoss

_SLICE_SHARE = 8
"""Autograd keeps some tensors of the size of the logits, so slices are smaller than those of cross entropy."""


@torch._dynamo.allow_in_graph
class _SumOverRanks(torch.autograd.Function):
    """Sums over the ranks. All of them compute the same loss from the sum, so the gradient of a part is the sum's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: AxisGroup) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class VocabularyLogits:
    """The logits of a slice of tokens, of which this rank has a part of the vocabulary.

    `values` [C, V] are this rank's, from row `vocab_start` of the vocabulary on. What is computed over the whole
    vocabulary must go through one of the methods.
    """

    def __init__(
        self, values: torch.Tensor, group: AxisGroup = SINGLE_RANK, vocab_start: int = 0, vocab_size: int | None = None
    ) -> None:
        self.values, self.vocab_start = values, vocab_start
        self.vocab_size = values.shape[-1] if vocab_size is None else vocab_size
        self._group = group
        self._log_normalizer: torch.Tensor | None = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum a figure of each word [C, V] over the whole vocabulary: [C]."""
        return _SumOverRanks.apply(x.sum(-1), self._group)

    def of_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the logit of each token's label [C]."""
        mine = (labels >= self.vocab_start) & (labels < self.vocab_start + self.values.shape[-1])
        column = torch.where(mine, labels - self.vocab_start, 0)[:, None]
        return _SumOverRanks.apply(torch.where(mine, self.values.gather(-1, column)[:, 0], 0.0), self._group)

    def log_normalizer(self) -> torch.Tensor:
        """Return log Σ exp(logit) over the whole vocabulary [C]."""
        if self._log_normalizer is None:
            peak = all_reduce_max(self.values.detach().amax(-1), self._group)
            self._log_normalizer = peak + self.sum((self.values - peak[:, None]).exp()).log()
        return self._log_normalizer

    def cross_entropy(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of each token [C]."""
        return self.log_normalizer() - self.of_labels(labels)


@torch._dynamo.allow_in_graph
class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        trained_rows: torch.Tensor | None,
        labels: torch.Tensor,
        scale: torch.Tensor,
        rule: TokenLoss,
        group: AxisGroup,
        vocab_start: int,
        vocab_size: int,
        trained_start: int,
        source_losses: cross_entropy.SourceLosses | None,
        soft_cap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        wants_grad = any(ctx.needs_input_grad)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        extra = torch.zeros_like(total)
        # From the whole vocabulary: ranks may hold parts of different sizes, and must cut alike.
        tokens = max(1, cross_entropy.CHUNK_ELEMENTS // _SLICE_SHARE // vocab_size)
        grad_hidden = torch.empty_like(hidden) if wants_grad else None
        grad_weight: torch.Tensor | None = None
        used, trained = cross_entropy.replace_rows(weight, trained_rows, trained_start).to(hidden.dtype), weight
        columns = slice(None)
        if trained_rows is not None:
            trained, columns = trained_rows, slice(trained_start, trained_start + trained_rows.shape[0])
        for start in range(0, hidden.shape[0], tokens):
            part, label = hidden[start : start + tokens], labels[start : start + tokens]
            values = (part @ used.t()).to(wide).requires_grad_(wants_grad)
            counted = label != IGNORE_INDEX
            share = counted.to(wide) * scale.to(wide)
            with torch.set_grad_enabled(wants_grad):
                capped = values if soft_cap is None else soft_cap * torch.tanh(values / soft_cap)
                logits = VocabularyLogits(capped, group, vocab_start, vocab_size)
                known = torch.where(counted, label, 0)
                token_losses = rule.loss(logits, known) * share
                slice_loss = token_losses.sum()
                term = rule.extra(logits, known)
                slice_extra = torch.zeros_like(slice_loss) if term is None else (term * share).sum()
                slice_total = slice_loss + slice_extra
            total, extra = total + slice_total.detach(), extra + slice_extra.detach()
            if source_losses is not None:
                source_losses.add(token_losses.detach(), start)
            if grad_hidden is None:
                continue
            gradient = torch.autograd.grad(slice_total, values)[0].to(hidden.dtype)
            torch.mm(gradient, used, out=grad_hidden[start : start + tokens])
            if not any(ctx.needs_input_grad[1:3]):  # a frozen head
                continue
            product = (gradient[:, columns].t() @ part).to(wide)
            grad_weight = product if grad_weight is None else grad_weight.add_(product)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(trained.dtype))
        ctx.mark_non_differentiable(extra)
        return total, extra

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grads[0]
        scaled = None if grad_weight is None else grad_weight * factor.to(grad_weight.dtype)
        placed = cross_entropy.place_row_gradients(ctx, (grad_hidden * factor.to(grad_hidden.dtype), scaled))
        return *placed, *(None,) * 9


def linear_token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    scale: torch.Tensor,
    rule: TokenLoss,
    *,
    group: AxisGroup = SINGLE_RANK,
    vocab_start: int = 0,
    vocab_size: int,
    trained_rows: torch.Tensor | None = None,
    trained_start: int = 0,
    source_losses: cross_entropy.SourceLosses | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, the extra part of it) of hidden states [T, H] against labels [T], as `linear_cross_entropy` does.

    `weight` [V, H] is this rank's part of the vocabulary, from `vocab_start` on. The result is the same on all ranks of
    the group, the gradient of `hidden` this rank's part of a sum. `trained_rows`, `source_losses` and `soft_cap` are
    those of `linear_cross_entropy`.
    """
    where = (group, vocab_start, vocab_size, trained_start)
    total, extra = _LinearTokenLoss.apply(
        hidden, weight, trained_rows, labels, scale, rule, *where, source_losses, soft_cap
    )
    return total, extra.detach()
