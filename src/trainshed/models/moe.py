"""A mixture of experts: top-k routing, nothing dropped, experts spread over ep ranks and cut over etp ranks.

Scores are a softmax over the experts, or a sigmoid of each (DeepSeek-V3). With a `score_bias` experts are chosen by
score plus bias and weighted by the score alone. The bias has no gradient: after each step it moves a little, up for
experts with less than the mean load of the global batch and down for those with more (Wang et al. 2024). With `groups`
a token visits only the experts of its best groups, which are the groups whose two best experts have the highest sum.

Shapes: s tokens of this rank, B sequences, T = s · B tokens, H hidden, F inner width, E experts (e on this rank), K
experts per token. Expert-parallel ranks hold different tokens (within tp because of sequence parallel), so tokens are
sent to their experts and back by all_to_all. Rows are moved by permutations, so gradients always add in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from trainshed.models.collectives import AxisGroup, ParallelAxes, all_gather, all_reduce, all_to_all, reduce_scatter
from trainshed.models.compute_weights import in_compute_dtype
from trainshed.models.layers import MLP, Linear, Norm, apply_activation
from trainshed.recipe import ModelConfig
from trainshed.recipe.model_parts import Moe

if TYPE_CHECKING:
    from trainshed.models.lora import ExpertAdapters

ROUTER_LOSS_TERMS = ("moe_balance", "moe_z")
"""The losses that `MoE` returns, in this order."""


class GroupedExperts(nn.Module):
    """The weights of this rank's experts, stacked."""

    def __init__(self, config: ModelConfig, axes: ParallelAxes) -> None:
        super().__init__()
        assert config.moe is not None, "only models with experts have them"
        self.config = config
        self.gate_up_interleaved = config.gated
        """Whether rows of the up projection alternate gate and up, as in `Linear`."""
        count, width = config.moe.experts // axes.ep.size, config.moe.ffn // axes.etp.size
        up = nn.Parameter(torch.empty(count, 2 * width if config.gated else width, config.hidden))
        if config.gated:
            self.gate_up = up
        else:
            self.up = up
        self.down = nn.Parameter(torch.empty(count, config.hidden, width))
        if config.mlp_bias:
            bias = nn.Parameter(torch.empty(up.shape[:2]))
            if config.gated:
                self.gate_up_bias = bias
            else:
                self.up_bias = bias
            self.down_bias = nn.Parameter(torch.empty(count, config.hidden))
        self.etp = axes.etp
        self.lora: ExpertAdapters | None = None
        self.compute_weights: dict[str, torch.Tensor] = {}
        """Copies of weights in the dtype of the products, by their names, where the model keeps them."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send rows, sorted by expert, through their experts: [rows, H] to [rows, H]; counts: int64 [e]."""
        up = self._weight("gate_up" if self.config.gated else "up", x.dtype)
        groups = counts.cumsum(0).to(torch.int32) if x.is_cuda and x.dtype == torch.bfloat16 else counts.tolist()
        up_bias, down_bias = self._biases(x, counts) if self.config.mlp_bias else (None, None)
        hidden = _add(grouped_linear(x, up, groups), up_bias)
        adapters = self.lora if self.lora is not None and self.lora.enabled else None
        hidden = hidden if adapters is None else hidden + adapters.up(x, groups)
        hidden = apply_activation(hidden, self.config, interleaved=self.gate_up_interleaved)
        out = _add(grouped_linear(hidden, self._weight("down", x.dtype), groups), down_bias)
        return out if adapters is None else out + adapters.down(hidden, groups)

    def _weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return stacked weights as they are multiplied."""
        return in_compute_dtype(getattr(self, name), dtype, self.compute_weights.get(name))

    def _biases(self, x: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the biases of each row's expert, of the up projection and of the down projection.

        They are products with the rows' choice of an expert, so that their gradients are products too: in one order,
        without atomics. The outputs of etp ranks are added up, so the first of them alone adds the second bias.
        """
        experts = torch.arange(len(counts), device=x.device)
        of_row = experts.repeat_interleave(counts, output_size=len(x))
        choice = (of_row[:, None] == experts).to(x.dtype)
        up = self.gate_up_bias if self.config.gated else self.up_bias
        return choice @ up.to(x.dtype), choice @ (self.down_bias.to(x.dtype) * float(self.etp.rank == 0))


def _add(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias


GroupSizes = torch.Tensor | list[int]
"""How many rows belong to each expert: a list, or int32 [e] with the ends of the groups for the grouped kernel."""


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, groups: GroupSizes) -> torch.Tensor:
    """Multiply rows [rows, in], sorted by expert, with their expert's weight of [e, out, in]: [rows, out]."""
    if isinstance(groups, torch.Tensor):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=groups)
    return torch.cat([F.linear(part, weight[i]) for i, part in enumerate(x.split(groups))])


class Router(Linear):
    """The router's weight and its own bias, and the bias that is added to scores for the choice alone."""

    score_bias: torch.Tensor | None

    def __init__(self, config: ModelConfig, moe: Moe) -> None:
        super().__init__(config.hidden, moe.experts, bias=moe.router_bias)
        self.register_buffer("score_bias", torch.zeros(moe.experts) if moe.score_bias else None)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep the bias in float32 or better: bf16 has no number between 0.5 and 0.5 + 2 · 0.001."""
        before = self.score_bias
        module = super()._apply(fn, recurse)
        if before is not None and self.score_bias is not None and self.score_bias.dtype.itemsize < 4:
            self.score_bias = before.to(self.score_bias.device)
        return module


def update_score_bias(bias: torch.Tensor, load: torch.Tensor, rate: float | torch.Tensor) -> None:
    """Move the bias [E] of each expert's score towards even load; `load` [E] is that of the whole batch."""
    bias += rate * torch.sign(load.mean() - load).to(bias.dtype)


class MoE(nn.Module):
    """A norm, a router and its experts, instead of the feed-forward block."""

    def __init__(self, config: ModelConfig, axes: ParallelAxes, *, balance_loss: float, z_loss: float) -> None:
        super().__init__()
        assert config.moe is not None, "only models with experts have them"
        self.config, self.moe, self.axes = config, config.moe, axes
        self.balance_loss, self.z_loss = balance_loss, z_loss
        self.norm = Norm(config.hidden, config)
        self.router = Router(config, config.moe)
        self.experts = GroupedExperts(config, axes)
        if config.moe.shared_ffn:
            self.shared = MLP(config, config.moe.shared_ffn, axes, normed=True)

    def forward(
        self, x: torch.Tensor, sequence_scale: torch.Tensor | None, samples: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Transform tokens [s, B, H]; `sequence_scale` is 1 / sequences of the global batch.

        `samples` are the run's sample numbers [B], for the dropout of the shared expert's adapters.
        Returns the output and the router's figures: this rank's part of the `ROUTER_LOSS_TERMS`, already weighted and
        scaled, and where choices have a bias, how many of this rank's tokens chose each expert [E].
        """
        x = self.norm(x)
        tokens = x.flatten(0, 1)
        # The router computes in float32 or better, whatever the dtype of the activations.
        router_dtype = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.router.bias is None else self.router.bias.to(x.dtype).to(router_dtype)
        logits = F.linear(tokens.to(router_dtype), self.router.weight.to(x.dtype).to(router_dtype), bias)
        scores = logits.softmax(-1) if self.moe.scores == "softmax" else logits.sigmoid()
        weights, expert_ids = self._choose(scores)
        group = self.axes.etp
        dispatch = self._start_dispatch(all_gather(expert_ids, group))
        figures = self._losses(logits, scores, expert_ids, x.shape[:2], sequence_scale)
        if self.moe.score_bias:
            chosen = torch.ones_like(expert_ids, dtype=figures.dtype).flatten()
            load = figures.new_zeros(self.moe.experts).scatter_add_(0, expert_ids.flatten(), chosen)
            figures = torch.cat([figures, load])
        # What needs no other rank is queued first: the device has work while the host waits for the sizes.
        shared = self.shared(x, samples) if self.moe.shared_ffn else None
        out = self._dispatch_and_combine(all_gather(tokens, group), all_gather(weights, group), dispatch)
        out = reduce_scatter(out, group).view_as(x)
        return (out if shared is None else out + shared), figures

    def _choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and the numbers of each token's experts, [T, K] each; scores are [T, E]."""
        moe, bias = self.moe, self.router.score_bias
        if bias is None and moe.groups == 1:
            weights, expert_ids = scores.topk(moe.top_k, dim=-1)
        else:
            choice = scores.detach() if bias is None else scores.detach() + bias.to(scores.dtype)
            if moe.groups > 1:
                grouped = choice.unflatten(1, (moe.groups, -1))
                group_scores = grouped.topk(2, dim=-1).values.sum(-1)
                best = group_scores.topk(moe.top_groups, dim=-1).indices
                left_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
                choice = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(1)
            expert_ids = choice.topk(moe.top_k, dim=-1).indices
            weights = scores.gather(1, expert_ids)
        if moe.normalize_top_k:
            # Sigmoids of a token's experts may all be 0 in the dtype of the scores.
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if moe.scores == "sigmoid" else 0.0))
        return (weights if moe.scale == 1.0 else weights * moe.scale), expert_ids

    def _start_dispatch(self, expert_ids: torch.Tensor) -> Dispatch:
        """Count the rows of each expert, and begin to tell the ranks that hold them; expert_ids [T, K]."""
        counts = torch.zeros(self.moe.experts, dtype=torch.int64, device=expert_ids.device)
        counts = counts.scatter_add_(0, expert_ids.flatten(), torch.ones_like(expert_ids.flatten()))
        exchange = None if self.axes.ep.size == 1 else _exchange_counts(counts, self.axes.ep)
        return Dispatch(expert_ids, counts, exchange)

    def _dispatch_and_combine(self, tokens: torch.Tensor, weights: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
        """Tokens [T, H] to their experts [T, K], weighted by [T, K], and back."""
        by_expert = dispatch.expert_ids.flatten().argsort(stable=True)
        places = inverse_permutation(by_expert).view_as(dispatch.expert_ids)
        rows = _CopyToExperts.apply(tokens, by_expert, places)
        if self.moe.scale_inputs:
            rows = rows * permute_rows(weights.flatten(), by_expert)[:, None].to(rows.dtype)
        if dispatch.exchange is None:
            out = self.experts(rows, dispatch.counts)
        else:
            out = self._dispatch_over_ep(rows, dispatch.exchange)
        if self.moe.scale_inputs:
            weights = torch.ones_like(weights)
        return _WeightedSum.apply(out, weights, by_expert, places)

    def _dispatch_over_ep(self, rows: torch.Tensor, exchange: CountExchange) -> torch.Tensor:
        """Send rows, sorted by expert, to the ranks that hold the experts, and return the results in the same order."""
        ep, counts = self.axes.ep, exchange.received
        send, receive = exchange.read_sizes()
        received = all_to_all(rows, receive, send, ep)
        local_experts = torch.arange(counts.shape[1], device=rows.device).repeat(ep.size)
        # With the size, which is known by now, the device is not asked for it.
        expert = local_experts.repeat_interleave(counts.flatten(), output_size=sum(receive))
        by_expert = expert.argsort(stable=True)
        out = self.experts(permute_rows(received, by_expert), counts.sum(0))
        return all_to_all(permute_rows(out, inverse_permutation(by_expert)), send, receive, ep)

    def _losses(
        self,
        logits: torch.Tensor,
        scores: torch.Tensor,
        expert_ids: torch.Tensor,
        shape: torch.Size,
        sequence_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the `ROUTER_LOSS_TERMS`. Balance is per whole sequence, so that it does not change with the layout."""
        if sequence_scale is None or not (self.balance_loss or self.z_loss):
            return logits.new_zeros(len(ROUTER_LOSS_TERMS))
        length, batch = shape
        experts = self.moe.experts
        whole = length * self.axes.sequence.size
        load = (
            logits.new_zeros(length * batch, experts).scatter_(1, expert_ids, 1.0).view(length, batch, experts).sum(0)
        )
        load = all_reduce(load, self.axes.sequence) / (whole * self.moe.top_k)  # [B, E], the same on all parts
        if self.moe.scores == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        share = scores.view(length, batch, experts).sum(0) / whole
        balance = self.balance_loss * experts * (load * share).sum() * sequence_scale
        z = self.z_loss * logits.logsumexp(-1).square().sum() / whole * sequence_scale
        return torch.stack([balance, z])


@dataclass(frozen=True)
class CountExchange:
    """How many rows go to each ep rank and come from it; the host learns it while the device goes on.

    An all_to_all takes its sizes from the host, so there is one wait for each layer and micro-batch. It is a wait for
    the counts alone, not for what was queued after them.
    """

    received: torch.Tensor
    """[ep, e]: rows from each rank for each of this rank's experts."""
    sizes: torch.Tensor
    """[2, ep] on the host: rows to each rank, and from it."""
    arrived: torch.cuda.Event | None

    @torch._dynamo.disable
    def read_sizes(self) -> tuple[list[int], list[int]]:
        """Wait for the sizes; returns rows to each rank, and from it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        send, receive = self.sizes.tolist()
        return send, receive


@dataclass(frozen=True)
class Dispatch:
    """Which experts [T, K] tokens go to, the rows of each expert [E], and with ep what ranks tell each other of it."""

    expert_ids: torch.Tensor
    counts: torch.Tensor
    exchange: CountExchange | None


@torch._dynamo.disable
def _exchange_counts(counts: torch.Tensor, ep: AxisGroup) -> CountExchange:
    """Tell each ep rank how many rows come for its experts, and begin to copy the sizes to the host."""
    # Integers carry no gradient, so the plain collective is enough.
    received = torch.empty_like(counts)
    torch.distributed.all_to_all_single(received, counts, group=ep.process_group)
    sent, received = (x.view(ep.size, -1) for x in (counts, received))
    sizes = torch.stack([sent.sum(1), received.sum(1)])
    if not sizes.is_cuda:
        return CountExchange(received, sizes, None)
    host = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True).copy_(sizes, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return CountExchange(received, host, arrived)


def inverse_permutation(permutation: torch.Tensor) -> torch.Tensor:
    """Return the permutation that undoes this one."""
    inverse = torch.empty_like(permutation)
    return inverse.scatter_(0, permutation, torch.arange(permutation.numel(), device=permutation.device))


@torch._dynamo.allow_in_graph
class _PermuteRows(torch.autograd.Function):
    """Indexing by a permutation: its gradient is indexing by the inverse, not a scatter with atomics."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, permutation: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(permutation)
        return x[permutation]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (permutation,) = ctx.saved_tensors
        return grads[0][inverse_permutation(permutation)], None


def permute_rows(x: torch.Tensor, permutation: torch.Tensor) -> torch.Tensor:
    """Return row permutation[i] of x as row i."""
    return _PermuteRows.apply(x, permutation)


@torch._dynamo.allow_in_graph
class _CopyToExperts(torch.autograd.Function):
    """Copies tokens [T, H] into rows sorted by expert [T · K, H].

    Row i is a copy for choice `by_expert[i]`, counted through all tokens; `places` [T, K] are the rows of each token.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, by_expert: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return tokens[by_expert // places.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _sum_rows(grads[0], places, None), None, None


@torch._dynamo.allow_in_graph
class _WeightedSum(torch.autograd.Function):
    """Adds the rows of each token, times their weights [T, K]: the way back of `_CopyToExperts`."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, by_expert: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, by_expert, places)
        return _sum_rows(rows, places, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        rows, weights, by_expert, places = ctx.saved_tensors
        (grad,) = grads
        wide = torch.promote_types(grad.dtype, torch.float32)
        of_rows = grad[by_expert // places.shape[1]] * weights.flatten()[by_expert][:, None].to(grad.dtype)
        if not ctx.needs_input_grad[1]:
            return of_rows, None, None, None
        of_weights = (grad[:, None].to(wide) * rows[places].to(wide)).sum(-1)
        return of_rows, of_weights.to(weights.dtype), None, None


def _sum_rows(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of each token's rows [T, H], in the order of its choices.

    One addition after the other, which compiles to a single kernel at the speed of memory. A sum over a dim of K makes
    a kernel that takes five times as long.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    total: torch.Tensor | None = None
    for choice in range(places.shape[1]):
        part = rows[places[:, choice]].to(wide)
        part = part if weights is None else part * weights[:, choice, None].to(wide)
        total = part if total is None else total + part
    assert total is not None, "a token has at least one expert"
    return total.to(rows.dtype)
