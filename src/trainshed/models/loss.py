"""Cross-entropy over a vocabulary cut over tp, a chunk of tokens at a time: the logits never exist whole.

The gradient is computed in the same pass, while the logits of a chunk exist; backward has nothing left to compute. The
loss is the sum over the labelled tokens times `scale` (1 / their count in the global batch), so it does not depend on
how the batch is cut into micro-batches.

`cross_entropy_pass` gives every token a weight of its own, so other losses that are functions of the tokens'
log-probabilities (`preference_loss.py`) use it too.

Shapes: T tokens, C tokens of a chunk, H hidden, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from trainshed.models.collectives import SINGLE_RANK, AxisGroup, all_reduce, all_reduce_max

IGNORE_INDEX = -100
"""The label of a token that carries no loss."""
LOSS_TERMS = ("loss", "z_loss", "mtp_loss")
"""What the last stage returns, in this order: the loss that is differentiated, then the parts of it that are reported
by themselves."""
# Chunks with this many logits keep the matrix units busy and memory small: 4096 tokens of a 128k vocabulary. Each one
# but the first reads and writes the gradient of the whole head, which is 2 GB with such a vocabulary.
CHUNK_ELEMENTS = 1 << 29
_VOCABULARY_MULTIPLE = 64
"""Products on a GPU are fast if the rows of the vocabulary are a multiple of this; with GPT-2's 50,257 they run at a
sixth of the speed. Rows of zeros are added to the copy that is multiplied, and their logits are minus infinity."""


def source_terms(slots: int) -> tuple[str, ...]:
    """Return the names of the parts of a loss that the sources of its samples have, in their order."""
    return tuple(f"source_loss_{number}" for number in range(slots))


class SourceLosses:
    """Sums the losses of tokens by the source of their sample, beside the loss; it has no part in the gradient."""

    def __init__(self, numbers: torch.Tensor, slots: int) -> None:
        self._numbers, self._slots = numbers, slots
        self.sums = torch.zeros(slots, dtype=torch.float64, device=numbers.device)

    @classmethod
    def of_rows(cls, sources: torch.Tensor | None, columns: int, slots: int) -> SourceLosses | None:
        """Make one for tokens [S · B], rows varying fastest, from the sources of rows [B]; None without sources."""
        return None if sources is None or not slots else cls(sources.repeat(columns), slots)

    @torch.no_grad()
    def add(self, losses: torch.Tensor, start: int = 0) -> None:
        """Add the weighted losses of tokens [C] from token `start` on."""
        numbers = self._numbers[start : start + len(losses)]
        slots = torch.arange(self._slots, device=numbers.device)
        self.sums += torch.where(numbers == slots[:, None], losses.double(), 0.0).sum(1)


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's part of the vocabulary, cut over tp: from row `start` on, of `size` rows in all.

    `trained_start` is where, among the rows of this rank, those begin that are trained while the others are frozen.
    """

    size: int
    group: AxisGroup = SINGLE_RANK
    start: int = 0
    trained_start: int = 0
    soft_cap: float | None = None
    """Logits x are cap · tanh(x / cap); None: as they are."""


def _chunk_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    token_weights: torch.Tensor,
    z_loss: float,
    group: AxisGroup,
    vocab_start: int,
    rows: int,
    with_gradient: bool,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cross-entropy [C], z sum) of a chunk, weighted by token; the logits are overwritten by their gradient.

    Only the first `rows` of a token's logits belong to the vocabulary. Without a gradient the logits are undefined
    afterwards: without a compiler, each pass over a new tensor of their size costs time.
    """
    scores = logits.to(token_weights.dtype)
    cap_slope: torch.Tensor | None = None
    if soft_cap is not None:
        bounded = torch.tanh(scores / soft_cap)
        cap_slope = 1.0 - bounded.square()
        # Rows that only fill up the vocabulary stay at minus infinity.
        scores = torch.where(torch.isneginf(scores), scores, soft_cap * bounded)
    max_logit = all_reduce_max(scores.amax(-1), group)
    on_this_rank = (labels >= vocab_start) & (labels < vocab_start + rows)
    column = torch.where(on_this_rank, labels - vocab_start, 0)[:, None]
    label_logit = torch.where(on_this_rank, scores.gather(-1, column)[:, 0], 0.0)
    exp_logits = _exp_shifted(scores, max_logit[:, None])
    total, label_logit = all_reduce(torch.stack([exp_logits.sum(-1), label_logit]), group).unbind()
    log_total = max_logit + total.log()
    entropy = (log_total - label_logit) * token_weights
    z = z_loss * (log_total.square() * token_weights).sum()
    if not with_gradient:
        return entropy, z
    slope = token_weights * (1.0 + 2.0 * z_loss * log_total) / total
    label_weight = torch.where(on_this_rank, token_weights, 0.0)
    gradient = _scale_and_subtract(exp_logits, slope[:, None], column, label_weight[:, None])
    if cap_slope is not None:
        gradient = gradient * cap_slope
    logits.copy_(gradient)
    return entropy, z


def _exp_shifted(scores: torch.Tensor, max_logit: torch.Tensor) -> torch.Tensor:
    """Return exp(scores - max_logit)."""
    if torch.compiler.is_compiling():
        return (scores - max_logit).exp()
    return scores.sub_(max_logit).exp_()


def _scale_and_subtract(
    x: torch.Tensor, factor: torch.Tensor, column: torch.Tensor, subtrahend: torch.Tensor
) -> torch.Tensor:
    """Return x · factor, minus `subtrahend` in one column of each row."""
    if torch.compiler.is_compiling():
        # A scatter would end the fused kernel; a comparison costs nothing.
        columns = torch.arange(x.shape[-1], device=x.device)
        return torch.where(columns[None, :] == column, x * factor - subtrahend, x * factor)
    x.mul_(factor)
    return x.scatter_(1, column, x.gather(1, column) - subtrahend)


@cache
def _compiled_chunk_loss() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Compile on first use: loading the compiler takes seconds, and a CPU never needs it."""
    return torch.compile(_chunk_loss, dynamic=False)


def _pad_vocabulary(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights in another precision, padded to a number of rows with which products are fast."""
    rows = _padded_rows(weight)
    if rows == weight.shape[0]:
        return weight.to(dtype)
    whole = weight.new_zeros((rows, weight.shape[1]), dtype=dtype)
    whole[: weight.shape[0]].copy_(weight)
    return whole


def _padded_rows(weight: torch.Tensor) -> int:
    return -(-weight.shape[0] // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE if weight.is_cuda else weight.shape[0]


def _accumulate_product(
    total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, accumulate_dtype: torch.dtype
) -> torch.Tensor:
    """Add left @ right to a total in `accumulate_dtype`; on a GPU the product itself adds, without another pass."""
    if left.is_cuda and left.dtype != accumulate_dtype:
        if total is None:
            return torch.mm(left, right, out_dtype=accumulate_dtype)
        return torch.addmm(total, left, right, out_dtype=accumulate_dtype, out=total)
    if total is None:
        return (left @ right).to(accumulate_dtype)
    return total.addmm_(left, right) if left.dtype == accumulate_dtype else total.add_(left @ right)


def replace_rows(weight: torch.Tensor, rows: torch.Tensor | None, start: int) -> torch.Tensor:
    """Return a copy of a weight [V, H] with other rows from `start` on; the weight itself where there are none."""
    if rows is None:
        return weight
    return torch.cat([weight[:start], rows.to(weight.dtype), weight[start + rows.shape[0] :]])


@dataclass(frozen=True)
class CrossEntropyPass:
    """What a pass over the tokens gives: weighted cross-entropies [T], their z sum, and the gradients asked for."""

    entropy: torch.Tensor
    z: torch.Tensor
    grad_hidden: torch.Tensor | None
    grad_weight: torch.Tensor | None


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over activations of a dtype are kept."""
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def cross_entropy_pass(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    token_weights: torch.Tensor,
    vocabulary: VocabularyShard,
    *,
    z_loss: float = 0.0,
    wants_grad_hidden: bool,
    wants_grad_weight: bool,
    trained_rows: torch.Tensor | None = None,
) -> CrossEntropyPass:
    """Compute the cross-entropy of each token times its weight [T], and the gradients of their sum.

    Tokens without a label need a weight of 0. The weights are in the `sum_dtype` of `hidden`; `weight`, `labels` and
    `trained_rows` are those of `linear_cross_entropy`. With trained rows the gradient of the weight is that of these.
    """
    columns = slice(None)
    if trained_rows is not None:
        columns = slice(vocabulary.trained_start, vocabulary.trained_start + trained_rows.shape[0])
        weight = replace_rows(weight, trained_rows, columns.start)
    with_gradient = wants_grad_hidden or wants_grad_weight
    chunk_loss = _compiled_chunk_loss() if hidden.is_cuda and vocabulary.group.size == 1 else _chunk_loss
    entropy, z = torch.empty_like(token_weights), token_weights.new_zeros(())
    # Computed from the whole vocabulary: ranks may hold parts of different sizes, but must use the same chunks.
    tokens = max(1, CHUNK_ELEMENTS // vocabulary.size)
    chunks = -(-hidden.shape[0] // tokens)
    tokens = -(-hidden.shape[0] // chunks)  # equal chunks: one shape to compile
    grad_hidden = torch.empty_like(hidden) if wants_grad_hidden else None
    grad_weight: torch.Tensor | None = None
    rows = weight.shape[0]
    padded_weight = _pad_vocabulary(weight, hidden.dtype)
    for start in range(0, hidden.shape[0], tokens):
        chunk = slice(start, start + tokens)
        logits = hidden[chunk] @ padded_weight.t()
        if rows < padded_weight.shape[0]:
            logits[:, rows:] = -torch.inf
        entropy[chunk], chunk_z = chunk_loss(
            logits,
            labels[chunk],
            token_weights[chunk],
            z_loss,
            vocabulary.group,
            vocabulary.start,
            rows,
            with_gradient,
            vocabulary.soft_cap,
        )
        z = z + chunk_z
        gradient = logits  # overwritten, if a gradient is wanted
        if grad_hidden is not None:
            torch.mm(gradient, padded_weight, out=grad_hidden[chunk])
        if wants_grad_weight:
            part = gradient[:, columns].t()
            grad_weight = _accumulate_product(grad_weight, part, hidden[chunk], token_weights.dtype)
            del part
        del logits, gradient  # before the next chunk is made
    return CrossEntropyPass(
        entropy, z, grad_hidden, _in_dtype(grad_weight, weight if trained_rows is None else trained_rows)
    )


def _in_dtype(gradient: torch.Tensor | None, of: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a weight in its dtype, without the rows that were added for the product."""
    return None if gradient is None else gradient[: of.shape[0]].to(of.dtype)


def place_row_gradients(ctx: Any, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of (hidden, weight, trained rows), given those of hidden and of whichever is trained."""
    grad_hidden, grad_weight = grads
    return (grad_hidden, None, grad_weight) if ctx.needs_input_grad[2] else (grad_hidden, grad_weight, None)


def backward_of_saved(ctx: Any, factor: torch.Tensor, *, unit_factor: bool = False) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients that a forward pass has saved, times the gradient of its loss.

    With `unit_factor` it must be 1, and a pass over the gradient of the whole head is saved.
    """
    if unit_factor:
        torch._assert_async((factor == 1).all())
        return ctx.saved_tensors
    return tuple(None if saved is None else saved * factor.to(saved.dtype) for saved in ctx.saved_tensors)


@torch._dynamo.allow_in_graph
class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        trained_rows: torch.Tensor | None,
        labels: torch.Tensor,
        scale: torch.Tensor,
        z_loss: float,
        vocabulary: VocabularyShard,
        source_losses: SourceLosses | None,
        unit_factor: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.unit_factor = unit_factor
        dtype = sum_dtype(hidden.dtype)
        result = cross_entropy_pass(
            hidden,
            weight,
            labels,
            (labels != IGNORE_INDEX).to(dtype) * scale.to(dtype),
            vocabulary,
            z_loss=z_loss,
            wants_grad_hidden=ctx.needs_input_grad[0],
            wants_grad_weight=ctx.needs_input_grad[1] or ctx.needs_input_grad[2],
            trained_rows=trained_rows,
        )
        if source_losses is not None:
            source_losses.add(result.entropy)
        ctx.save_for_backward(result.grad_hidden, result.grad_weight)
        ctx.mark_non_differentiable(result.z)
        return result.entropy.sum() + result.z, result.z

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = backward_of_saved(ctx, grads[0], unit_factor=ctx.unit_factor)
        return *place_row_gradients(ctx, gradients), *(None,) * 6


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    scale: torch.Tensor,
    *,
    z_loss: float = 0.0,
    group: AxisGroup = SINGLE_RANK,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    trained_rows: torch.Tensor | None = None,
    trained_start: int = 0,
    source_losses: SourceLosses | None = None,
    soft_cap: float | None = None,
    unit_factor: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, the z-loss part of it) of hidden states [T, H] against labels [T].

    `weight` [V, H] is this rank's part of the vocabulary, from row `vocab_start` on, in any precision; products are in
    the precision of `hidden`. `vocab_size` is the size of the whole vocabulary, which a group of several ranks needs.
    The result is the same on all ranks of the group; the gradient of `hidden` is this rank's part of a sum.

    `trained_rows` [n, H] are used in place of the rows of `weight` from `trained_start` on; `weight` is frozen then.
    `source_losses` are given the loss of each token, without the z-loss.
    With a `soft_cap` logits x are cap · tanh(x / cap). With `unit_factor` the loss must be differentiated as it is,
    not multiplied by anything.
    """
    if vocab_size is None:
        if group.size > 1:
            raise ValueError("ranks that share a vocabulary need to be told its size")
        vocab_size = weight.shape[0]
    vocabulary = VocabularyShard(vocab_size, group, vocab_start, trained_start, soft_cap)
    loss, z = _LinearCrossEntropy.apply(
        hidden, weight, trained_rows, labels, scale, z_loss, vocabulary, source_losses, unit_factor
    )
    return loss, z.detach()
