"""The decoder: one class for every family, in stages for the pipeline.

A stage is a range of layers, with the embedding where it is the first and the norm, head and loss where it is the
last. A single process has one stage that is both. Parameter names are those of `parameters.py`.

Shapes: L whole sequence, S tokens of this context-parallel rank, s = S / tp, B sequences of the micro-batch, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainshed.models.attention import Attention, context_parallel_positions, rotary_table
from trainshed.models.collectives import ParallelAxes, all_gather, reduce_scatter
from trainshed.models.layers import MLP, CounterDropout, Norm
from trainshed.models.loss import linear_cross_entropy
from trainshed.models.moe import MoE
from trainshed.models.registered_loss import linear_token_loss
from trainshed.models.token_loss import TokenLoss
from trainshed.recipe import ModelConfig
from trainshed.recipe.schema import Recompute


@dataclass(frozen=True)
class Regularization:
    """What is added to the cross-entropy, and dropout: the parts of `train` that live inside the model."""

    z_loss: float = 0.0
    moe_balance: float = 0.0
    moe_z: float = 0.0
    dropout: float = 0.0
    seed: int = 0
    token_loss: TokenLoss | None = None
    """What takes the place of the cross-entropy; None: nothing does."""


@dataclass
class LossNormalization:
    """What one step divides by; written before each step, read by every chunk.

    `tokens` is 1 / labelled tokens of the global batch, `sequences` 1 / its sequences.
    """

    tokens: torch.Tensor
    sequences: torch.Tensor


_aten, _comm = torch.ops.aten, torch.ops._c10d_functional
_SAVED_OPS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _comm.reduce_scatter_tensor.default,
    _comm.all_to_all_single.default,
)


@dataclass(frozen=True)
class DecoderStageSpec:
    """Which part of the model a chunk is, and how it is computed."""

    layers: range
    first: bool
    last: bool
    sequence_length: int
    dtype: torch.dtype
    device: torch.device
    recompute: Recompute = "none"


class DecoderLayer(nn.Module):
    """One layer: attention and feed-forward, each on the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        axes: ParallelAxes,
        losses: Regularization,
        layer: int,
        recompute: Recompute,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.keeping = (
            selective_checkpoint_contexts if config.moe is None else selective_checkpoint_contexts_beside_hooks
        )
        self.attention = Attention(config, axes)
        if config.moe is None:
            assert config.ffn is not None, "the schema asks for it wherever there are no experts"
            self.mlp: MLP | MoE = MLP(config, config.ffn, axes)
        else:
            self.mlp = MoE(config, axes, balance_loss=losses.moe_balance, z_loss=losses.moe_z)
        self.after_attention = CounterDropout(layer, "attention", losses.dropout, losses.seed, device)
        self.after_mlp = CounterDropout(layer, "mlp", losses.dropout, losses.seed, device)

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        scale: torch.Tensor | None,
        samples: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the residual stream [s, B, H] and the router's losses, if there is a router."""
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._forward(x, rotary, scale, samples, positions)
        keep: dict[str, Any] = {"context_fn": self.keeping} if self.recompute == "selective" else {}
        return checkpoint(self._forward, x, rotary, scale, samples, positions, use_reentrant=False, **keep)

    def _forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        scale: torch.Tensor | None,
        samples: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = x + self.after_attention(self.attention(x, rotary), samples, positions)
        if isinstance(self.mlp, MoE):
            out, losses = self.mlp(x, scale)
            out, losses = _AttachLosses.apply(out, losses), losses.detach()
        else:
            out, losses = self.mlp(x), None
        return x + self.after_mlp(out, samples, positions), losses


class Embedding(nn.Module):
    """A table of vectors, as rows of a weight; holds the embedding, the learned positions, the head."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


class DecoderStage(nn.Module):
    """A run of layers of the decoder."""

    def __init__(
        self,
        config: ModelConfig,
        axes: ParallelAxes,
        spec: DecoderStageSpec,
        losses: Regularization,
        scale: LossNormalization,
    ) -> None:
        super().__init__()
        self.config, self.axes, self.spec, self.losses, self.scale = config, axes, spec, losses, scale
        self.first_row, last_row = axes.tp.bounds(config.vocab_size)
        vocabulary = last_row - self.first_row
        if spec.first or (spec.last and config.tied_embeddings):
            self.embedding = Embedding(vocabulary, config.hidden)
        if spec.first and config.positions == "learned":
            self.positions = Embedding(config.max_positions, config.hidden)
        self.layers = nn.ModuleDict(
            {
                str(layer): DecoderLayer(config, axes, losses, layer, spec.recompute, spec.device)
                for layer in spec.layers
            }
        )
        if spec.last:
            self.norm = Norm(config.hidden, config)
            if not config.tied_embeddings:
                self.head = Embedding(vocabulary, config.hidden)
        self.after_embedding = CounterDropout(-1, "embedding", losses.dropout, losses.seed, spec.device)
        self._tables(spec)

    def _tables(self, spec: DecoderStageSpec) -> None:
        """Positions and rotary angles, made on the true device even while parameters are being laid out on none."""
        device, cp, tp = spec.device, self.axes.cp, self.axes.tp
        with torch.device("cpu"):
            local = context_parallel_positions(spec.sequence_length, cp.size, cp.rank)
            self.rotary: tuple[torch.Tensor, torch.Tensor] | None = None
            if self.config.positions == "rope":
                wide = torch.promote_types(spec.dtype, torch.float32)
                cosine, sine = rotary_table(self.config, local)
                self.rotary = (
                    cosine[:, None, None].to(device, wide),
                    sine[:, None, None].to(device, wide),
                )
            start, stop = tp.bounds(len(local))
            self.own_positions = local[start:stop].to(device)
        self.router_losses = torch.zeros(2, dtype=torch.float64, device=device)

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, samples: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Carry a micro-batch through this chunk.

        `x` is token ids [B, S] in the first chunk, the residual stream [s, B, H] in others. The last chunk returns
        [loss, z-loss part] where there are labels [B, S], and normalised hidden states [S, B, H] where there are none.
        """
        if self.spec.first:
            x = self._embed(x, samples)
        for block in self.layers.values():
            x, losses = block(x, self.rotary, self.scale.sequences, samples, self.own_positions)
            if losses is not None:
                self.router_losses += losses
        if not self.spec.last:
            return x
        hidden = all_gather(self.norm(x), self.axes.tp)
        if labels is None:
            return hidden
        if (rule := self.losses.token_loss) is not None:
            return torch.stack(
                linear_token_loss(
                    hidden.flatten(0, 1),
                    self._head(),
                    labels.t().flatten(),
                    self.scale.tokens,
                    rule,
                    group=self.axes.tp,
                    first_row=self.first_row,
                    vocab_size=self.config.vocab_size,
                )
            )
        loss, z = linear_cross_entropy(
            hidden.flatten(0, 1),
            self._head(),
            labels.t().flatten(),
            self.scale.tokens,
            z_loss=self.losses.z_loss,
            group=self.axes.tp,
            first_row=self.first_row,
            vocab_size=self.config.vocab_size,
        )
        return torch.stack([loss, z])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of this rank's part of the vocabulary for hidden states [S, B, H]: [S, B, V]."""
        return hidden @ self._head().to(hidden.dtype).t()

    def _head(self) -> torch.Tensor:
        return self.embedding.weight if self.config.tied_embeddings else self.head.weight

    def _embed(self, tokens: torch.Tensor, samples: torch.Tensor | None) -> torch.Tensor:
        """Token ids [B, S] to this rank's part of the residual stream [s, B, H]; each rank knows some of the words."""
        ids = tokens.t() - self.first_row
        weight, tp = self.embedding.weight, self.axes.tp
        if tp.size == 1:
            x = F.embedding(ids, weight)
        else:
            known = (ids >= 0) & (ids < weight.shape[0])
            rows = F.embedding(torch.where(known, ids, 0), weight)
            x = reduce_scatter(torch.where(known[..., None], rows, 0.0), tp)
        x = x.to(self.spec.dtype)
        if self.config.positions == "learned":
            x = x + F.embedding(self.own_positions, self.positions.weight)[:, None].to(x.dtype)
        return self.after_embedding(x, samples, self.own_positions)


class _AttachLosses(torch.autograd.Function):
    """Ties the router's losses to the activations, so that backward reaches them from any pipeline stage."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        ctx.like = losses.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], torch.ones(2, dtype=ctx.like, device=grads[0].device)


def selective_checkpoint_contexts() -> Any:
    """Selective recompute: keep what matrix products, attention and other ranks gave; compute the rest again."""
    return create_selective_checkpoint_contexts(list(_SAVED_OPS))


def selective_checkpoint_contexts_beside_hooks() -> Any:
    """The same where FSDP gathers experts within a block: what its hooks do is not the same the second time."""
    return tuple(_OnlySavedOps(mode) for mode in selective_checkpoint_contexts())


class _OnlySavedOps(TorchDispatchMode):
    """Shows a selective checkpoint only what it is to keep: it counts operations, and refuses any other number."""

    def __init__(self, counting: Any) -> None:
        super().__init__()
        self.counting = counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAVED_OPS:
            return self.counting.__torch_dispatch__(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))
