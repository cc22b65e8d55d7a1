"""The loss of direct preference optimisation (DPO) over packed pairs, without all logits in memory at once.

A row holds whole documents. Documents 2i and 2i + 1 of a row are a pair: the better answer to a prompt and the worse
one. The log-probability of a document is the sum over its labelled tokens. A pair counts if both documents have labels;
what is left over at the end of a row (padding) has none.

The loss is a function of a few sums, so it takes two passes over the tokens: the first computes the sums, from which
follows how much the loss changes with each document; the second is a cross-entropy that weights each token by its
document. If the head is frozen, the first pass already gives the gradient of the hidden states up to that weight.

Shapes: B rows, T tokens of them on this rank (cut over cp), L tokens of a row, N = B · `document_slots(L)` documents,
P = N / 2 pairs, H hidden, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from trainshed.models.collectives import SINGLE_RANK, AxisGroup, all_reduce
from trainshed.models.loss import (
    IGNORE_INDEX,
    VocabularyShard,
    backward_of_saved,
    cross_entropy_pass,
    place_row_gradients,
    sum_dtype,
)

PREFERENCE_FIGURES = ("reward_chosen", "reward_rejected", "reward_accuracy", "logp_chosen", "logp_rejected")
"""What is reported of pairs besides the loss, in this order; each is summed over the pairs."""


@dataclass(frozen=True)
class PreferenceRule:
    """How a pair becomes a loss: `train.dpo`.

    With m = β · ((chosen - its reference) - (rejected - its reference)), the loss of a pair is
    -(1 - ε) · log σ(m) - ε · log σ(-m), where ε is `label_smoothing` (conservative DPO). With `length_normalized` a
    document's log-probability is the mean over its tokens instead of the sum.
    """

    beta: float
    label_smoothing: float = 0.0
    length_normalized: bool = False


@dataclass(frozen=True)
class PackedDocuments:
    """Which document each token of hidden states [T, H] belongs to.

    `numbers` [T] counts through the documents of all rows: row · `slots` + number within the row. `slots` is even, so
    that pairs stay together. With context parallelism, a document's tokens may lie on all ranks of `cp`.
    """

    numbers: torch.Tensor
    rows: int
    slots: int
    cp: AxisGroup = SINGLE_RANK

    @property
    def count(self) -> int:
        """N: documents of all rows, with those that are empty."""
        return self.rows * self.slots


def document_slots(length: int) -> int:
    """Return the most documents that a row of `length` tokens gets room for: an even number that no row exceeds.

    It depends on nothing but the length, so shapes stay the same from batch to batch.
    """
    return length + length % 2


def number_documents(document_starts: torch.Tensor) -> torch.Tensor:
    """Return the number of each column's document within its row [B, L], from the column at which it starts [B, L]."""
    columns = torch.arange(document_starts.shape[1], device=document_starts.device)
    return (document_starts == columns).cumsum(1) - 1


def packed_documents(document_starts: torch.Tensor, columns: torch.Tensor, cp: AxisGroup) -> PackedDocuments:
    """Return the documents of these columns [S] of rows whose documents start at `document_starts` [B, L].

    Tokens are in the order of hidden states: T = S · B, rows varying fastest.
    """
    rows, length = document_starts.shape
    slots = document_slots(length)
    first = slots * torch.arange(rows, device=document_starts.device)
    numbers = number_documents(document_starts)[:, columns] + first[:, None]
    return PackedDocuments(numbers.t().flatten(), rows, slots, cp)


def count_pairs(labels: torch.Tensor, documents: PackedDocuments) -> torch.Tensor:
    """Return how many pairs have labels [T] in both documents: the same scalar on all ranks of cp."""
    return _complete_pairs(_sum_documents((labels != IGNORE_INDEX).double()[None], documents)[0]).sum()


@torch.no_grad()
def linear_document_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    documents: PackedDocuments,
    rule: PreferenceRule,
    vocabulary: VocabularyShard,
    trained_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the log-probability of each document [N], float64; a document without labels has 0.

    The arguments are those of `linear_preference_loss`. The result is the same on all ranks of tp and cp.
    """
    logps, _ = _token_logps(hidden, weight, trained_rows, labels, vocabulary, wants_grad_hidden=False)
    return _document_logps(logps, labels, documents, rule)[0]


def linear_preference_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    documents: PackedDocuments,
    reference_logps: torch.Tensor,
    scale: torch.Tensor,
    rule: PreferenceRule,
    vocabulary: VocabularyShard,
    trained_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the loss, the `PREFERENCE_FIGURES`) of hidden states [T, H] against labels [T].

    `reference_logps` [N] are `linear_document_logps` of the reference model; `scale` is 1 / pairs of the global batch.
    Loss and figures are to be summed over the ranks of cp: the first returns them, the others return zeros. They are
    the same on all ranks of tp. The gradient of `hidden` is this rank's part of a sum over tp. `trained_rows` are those
    of `linear_cross_entropy`.
    """
    loss, figures = _LinearPreferenceLoss.apply(
        hidden, weight, trained_rows, labels, documents, reference_logps, scale, rule, vocabulary
    )
    return loss, figures.detach()


@torch._dynamo.allow_in_graph
class _LinearPreferenceLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        trained_rows: torch.Tensor | None,
        labels: torch.Tensor,
        documents: PackedDocuments,
        reference_logps: torch.Tensor,
        scale: torch.Tensor,
        rule: PreferenceRule,
        vocabulary: VocabularyShard,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wants_hidden, wants_weight = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        in_one_pass = wants_hidden and not wants_weight
        logps, grad_hidden = _token_logps(
            hidden, weight, trained_rows, labels, vocabulary, wants_grad_hidden=in_one_pass
        )
        document_logps, tokens = _document_logps(logps, labels, documents, rule)
        loss, figures, slopes = _pair_losses(document_logps, reference_logps, tokens, scale.double(), rule)
        # The slope of the loss over the cross-entropy of a token, which is its log-probability with the other sign.
        token_weights = torch.where(labels != IGNORE_INDEX, -slopes[documents.numbers], 0.0).to(sum_dtype(hidden.dtype))
        if grad_hidden is not None:
            ctx.save_for_backward(grad_hidden.mul_(token_weights[:, None].to(grad_hidden.dtype)), None)
        elif wants_weight:
            result = cross_entropy_pass(
                hidden,
                weight,
                labels,
                token_weights,
                vocabulary,
                wants_grad_hidden=wants_hidden,
                wants_grad_weight=True,
                trained_rows=trained_rows,
            )
            ctx.save_for_backward(result.grad_hidden, result.grad_weight)
        ctx.mark_non_differentiable(figures)
        counts = float(documents.cp.rank == 0)
        return loss.to(token_weights.dtype) * counts, figures.to(token_weights.dtype) * counts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *place_row_gradients(ctx, backward_of_saved(ctx, grads[0])), *(None,) * 6


def _token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    trained_rows: torch.Tensor | None,
    labels: torch.Tensor,
    vocabulary: VocabularyShard,
    *,
    wants_grad_hidden: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probability of each labelled token [T], 0 for others, and the gradient of their negative sum."""
    result = cross_entropy_pass(
        hidden,
        weight,
        labels,
        (labels != IGNORE_INDEX).to(sum_dtype(hidden.dtype)),
        vocabulary,
        wants_grad_hidden=wants_grad_hidden,
        wants_grad_weight=False,
        trained_rows=trained_rows,
    )
    return -result.entropy, result.grad_hidden


def _document_logps(
    logps: torch.Tensor, labels: torch.Tensor, documents: PackedDocuments, rule: PreferenceRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probability, labelled tokens) of each document, both [N] and float64."""
    values = torch.stack([logps.double(), (labels != IGNORE_INDEX).double()])
    document_logps, tokens = _sum_documents(values, documents).unbind()
    if rule.length_normalized:
        document_logps = document_logps / tokens.clamp(min=1.0)
    return document_logps, tokens


def _sum_documents(values: torch.Tensor, documents: PackedDocuments) -> torch.Tensor:
    """Sum figures of tokens [..., T] over each document: [..., N]."""
    sums = values.new_zeros(*values.shape[:-1], documents.count).index_add_(-1, documents.numbers, values)
    return all_reduce(sums, documents.cp)


def _complete_pairs(tokens: torch.Tensor) -> torch.Tensor:
    """Whether both documents of each pair have labels [P], from their numbers [N]."""
    return (tokens.view(-1, 2) > 0).all(1)


def _pair_losses(
    document_logps: torch.Tensor,
    reference_logps: torch.Tensor,
    tokens: torch.Tensor,
    scale: torch.Tensor,
    rule: PreferenceRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, figures, slope of the loss over the sum of each document's log-probabilities [N])."""
    chosen, rejected = (rule.beta * (document_logps - reference_logps)).view(-1, 2).unbind(1)
    counts = _complete_pairs(tokens).double()
    margin, smoothing = chosen - rejected, rule.label_smoothing
    losses = -(1.0 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    slope = rule.beta * (smoothing * margin.sigmoid() - (1.0 - smoothing) * (-margin).sigmoid()) * counts * scale
    slopes = torch.stack([slope, -slope], 1).flatten()
    if rule.length_normalized:
        slopes = slopes / tokens.clamp(min=1.0)
    logp_chosen, logp_rejected = document_logps.view(-1, 2).unbind(1)
    figures = torch.stack([chosen, rejected, (margin > 0).double(), logp_chosen, logp_rejected])
    return (losses * counts).sum() * scale, (figures * counts).sum(1), slopes
