"""The decoder: one class for every family, in stages for the pipeline.

A stage is a range of layers. The first stage also has the embedding; the last also has the norm, the head and the
loss. A single process has one stage that is both. Parameter names are those of `parameters.py`.

Shapes: L whole sequence, S tokens of this context-parallel rank, s = S / tp, B sequences of the micro-batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainshed.models.attention import (
    Attention,
    AttentionSpan,
    PositionTable,
    RotaryTable,
    attention_rule,
    context_parallel_positions,
    is_stretched,
    query_scales,
    rotary_table,
)
from trainshed.models.collectives import ParallelAxes, all_gather, reduce_scatter
from trainshed.models.compute_weights import ComputeWeight, refresh_compute_weights
from trainshed.models.documents import AttentionMask, document_masks, document_positions, has_block_attention
from trainshed.models.embedding import Embedding
from trainshed.models.latent_attention import MultiHeadLatentAttention
from trainshed.models.layers import MLP, CounterDropout, Norm
from trainshed.models.loss import (
    LOSS_TERMS,
    SourceLosses,
    VocabularyShard,
    linear_cross_entropy,
    source_terms,
)
from trainshed.models.moe import ROUTER_LOSS_TERMS, MoE
from trainshed.models.multi_token import MtpInput, further_tokens
from trainshed.models.offload import ActivationOffload
from trainshed.models.preference_loss import (
    PREFERENCE_FIGURES,
    PreferenceRule,
    linear_document_logps,
    linear_preference_loss,
    packed_documents,
)
from trainshed.models.recompute import selective_checkpoint_contexts, selective_checkpoint_contexts_beside_hooks
from trainshed.models.registered_loss import linear_token_loss
from trainshed.models.token_loss import TokenLoss
from trainshed.recipe import ModelConfig
from trainshed.recipe.layout import Recompute


@dataclass(frozen=True)
class Regularization:
    """Weights of the terms that are added to the cross-entropy, and dropout."""

    z_loss: float = 0.0
    moe_balance: float = 0.0
    moe_z: float = 0.0
    moe_bias_update: float = 0.0
    """How far the bias of each expert's score moves in a step, towards even load."""
    mtp: float = 0.0
    """Factor of the mean of the losses of a model's layers for multi-token prediction."""
    dropout: float = 0.0
    seed: int = 0
    token_loss: TokenLoss | None = None
    """What takes the place of the cross-entropy; None: nothing does."""
    preference: PreferenceRule | None = None
    """How pairs of documents are compared, in place of the cross-entropy of tokens."""
    source_slots: int = 0
    """How many sources of samples get a loss of their own; 0: the loss is not split by source."""

    @property
    def output_terms(self) -> tuple[str, ...]:
        """What the last stage returns of a batch with labels, in this order."""
        terms = LOSS_TERMS if self.preference is None else (*LOSS_TERMS, *PREFERENCE_FIGURES)
        return (*terms, *source_terms(self.source_slots))


@dataclass
class LossNormalization:
    """What the sums of a step are divided by; written before each step, read by every stage.

    `tokens` is 1 / labelled tokens of the global batch, `sequences` 1 / its sequences, `pairs` 1 / its pairs of
    documents, which only the loss of a `PreferenceRule` reads.
    """

    tokens: torch.Tensor
    sequences: torch.Tensor
    pairs: torch.Tensor = field(default_factory=lambda: torch.ones(()))


PositionKind = Literal["rotary", "local", "none"]
"""What positions a layer has: rotary ones, those of layers with a rotary base of their own, or none (NoPE)."""
_PositionTables = dict[PositionKind, PositionTable]
_SpanMasks = dict[AttentionSpan, tuple[AttentionMask, ...]]


def position_kind(config: ModelConfig, layer: int) -> PositionKind:
    """Return what positions a layer has."""
    if not config.has_rope(layer):
        return "none"
    return "local" if config.has_local_rope(layer) else "rotary"


@dataclass(frozen=True)
class DecoderStageSpec:
    """Which part of the model a stage is, and how it is computed."""

    layers: range
    first: bool
    last: bool
    sequence_length: int
    dtype: torch.dtype
    device: torch.device
    recompute: Recompute = "none"
    offload: ActivationOffload | None = None
    """Where activations wait for backward; None: on the device."""


class DecoderLayer(nn.Module):
    """One layer: attention and feed-forward, each on the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        axes: ParallelAxes,
        regularization: Regularization,
        layer: int,
        recompute: Recompute,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.recompute, self.layer = recompute, layer
        self.checkpoint_contexts = (
            selective_checkpoint_contexts if config.moe is None else selective_checkpoint_contexts_beside_hooks
        )
        self.cheap_products: frozenset[int] = frozenset()
        """Inner sizes of the products that selective recompute repeats: those that adapters end in."""
        self.attention: Attention | MultiHeadLatentAttention = (
            Attention(config, axes, layer) if config.mla is None else MultiHeadLatentAttention(config, axes)
        )
        self.span, self.position_kind = attention_rule(config, layer).span, position_kind(config, layer)
        if not config.has_experts(layer):
            assert config.ffn is not None, "the schema asks for it wherever there are no experts"
            self.mlp: MLP | MoE = MLP(config, config.ffn, axes)
        else:
            self.mlp = MoE(config, axes, balance_loss=regularization.moe_balance, z_loss=regularization.moe_z)
        self.attention_dropout = CounterDropout(layer, "attention", regularization.dropout, regularization.seed, device)
        self.mlp_dropout = CounterDropout(layer, "mlp", regularization.dropout, regularization.seed, device)
        self.mtp = MtpInput(config) if layer >= config.layers else None

    def forward(
        self,
        x: torch.Tensor,
        rotary: PositionTable,
        sequence_scale: torch.Tensor | None,
        samples: torch.Tensor | None,
        columns: torch.Tensor,
        masks: tuple[AttentionMask, ...] | None = None,
        embedded: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the residual stream [s, B, H] and the router's figures (`MoE.forward`), if there is a router.

        `sequence_scale` is 1 / sequences of the global batch, for the router's losses. `samples` and `columns` are for
        dropout, `masks` keep documents apart. A layer for multi-token prediction needs the `embedded` tokens; its `x`
        and what it returns are normalised hidden states.
        """
        if self.mtp is not None:
            x = self.mtp(x, embedded)
        arguments = (x, rotary, sequence_scale, samples, columns, masks)
        if self.recompute == "none" or not torch.is_grad_enabled():
            x, router_figures = self._forward(*arguments)
        else:
            keep: dict[str, Any] = {}
            if self.recompute == "selective":
                keep["context_fn"] = partial(self.checkpoint_contexts, self.cheap_products)
            x, router_figures = checkpoint(self._forward, *arguments, use_reentrant=False, **keep)
        return x if self.mtp is None else self.mtp.norm(x), router_figures

    def _forward(
        self,
        x: torch.Tensor,
        rotary: PositionTable,
        sequence_scale: torch.Tensor | None,
        samples: torch.Tensor | None,
        columns: torch.Tensor,
        masks: tuple[AttentionMask, ...] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = x + self.attention_dropout(self.attention(x, rotary, samples, masks), samples, columns)
        if isinstance(self.mlp, MoE):
            out, router_figures = self.mlp(x, sequence_scale, samples)
            out = _AttachLosses.apply(out, router_figures[: len(ROUTER_LOSS_TERMS)])
            router_figures = router_figures.detach()
        else:
            out, router_figures = self.mlp(x, samples), None
        return x + self.mlp_dropout(out, samples, columns), router_figures


class DecoderStage(nn.Module):
    """A range of the decoder's layers, with embedding, head and loss where it has them."""

    def __init__(
        self,
        config: ModelConfig,
        axes: ParallelAxes,
        spec: DecoderStageSpec,
        regularization: Regularization,
        normalization: LossNormalization,
    ) -> None:
        super().__init__()
        self.config, self.axes, self.spec = config, axes, spec
        self.regularization, self.normalization = regularization, normalization
        self.vocab_start, vocab_stop = axes.tp.shard_bounds(config.vocab_size)
        vocabulary = vocab_stop - self.vocab_start
        self.mtp_layers = range(config.layers, config.layers + config.mtp_layers) if spec.last else range(0)
        if spec.first or (spec.last and config.embedding_at_both_ends):
            self.embedding = Embedding(vocabulary, config.hidden)
        if spec.first and config.positions == "learned":
            self.positions = Embedding(config.max_positions, config.hidden)
        self.layers = nn.ModuleDict(
            {
                str(layer): DecoderLayer(config, axes, regularization, layer, spec.recompute, spec.device)
                for layer in self._all_layers
            }
        )
        if spec.last:
            self.norm = Norm(config.hidden, config)
            if not config.tied_embeddings:
                self.head = Embedding(vocabulary, config.hidden)
        self.embedding_dropout = CounterDropout(
            -1, "embedding", regularization.dropout, regularization.seed, spec.device
        )
        self.compute_weights: dict[str, ComputeWeight] = {}
        """Copies of weights in the dtype of the products, by the weights' names, where the stage keeps them."""
        self._build_position_tables(spec)

    @property
    def _all_layers(self) -> tuple[int, ...]:
        """The layers of this stage, with those for multi-token prediction."""
        return (*self.spec.layers, *self.mtp_layers)

    def _build_position_tables(self, spec: DecoderStageSpec) -> None:
        """Make positions and rotary angles on the real device, even while parameters are made on the meta device."""
        device, cp, tp = spec.device, self.axes.cp, self.axes.tp
        with torch.device("cpu"):
            local = context_parallel_positions(spec.sequence_length, cp.size, cp.rank)
            kinds = {position_kind(self.config, layer) for layer in self._all_layers}
            self.position_tables: _PositionTables = {kind: self._position_table(local, kind) for kind in kinds}
            self._table_of_position: _PositionTables = {}
            start, stop = tp.shard_bounds(len(local))
            self.columns, self.local_columns = local.to(device), local[start:stop].to(device)
        self.router_losses = torch.zeros(len(ROUTER_LOSS_TERMS), dtype=torch.float64, device=device)
        moe = self.config.moe
        self.expert_load: torch.Tensor | None = None
        """Tokens of this rank that each expert of each layer was chosen for since it was set to 0 [layers, E]."""
        if moe is not None and moe.score_bias:
            layers = self.config.layers + self.config.mtp_layers
            self.expert_load = torch.zeros(layers, moe.experts, dtype=torch.float64, device=device)

    def generation_tables(self) -> _PositionTables:
        """Return the tables of all positions that the model knows, where its texts may have any length.

        Where longer texts have other frequencies, theirs come after those of shorter ones.
        """
        longest = self.config.max_positions
        if not is_stretched(self.config, longest):
            return self.position_tables
        with torch.device(self.spec.device):
            both = [rotary_table(self.config, torch.arange(longest), length=length) for length in (1, longest)]
        cosine, sine = (torch.cat(parts)[:, None, None] for parts in zip(*both, strict=True))
        return dict.fromkeys(self.position_tables, (cosine, sine))

    def _position_table(self, positions: torch.Tensor, kind: PositionKind) -> PositionTable:
        """Return what positions [S] do to layers of a kind, on the device: [S, 1, 1, D], or [S, 1, 1, 1]."""
        dtype = torch.promote_types(self.spec.dtype, torch.float32)
        if kind == "none":
            scales = query_scales(self.config, positions)
            return None if scales is None else scales[:, None, None, None].to(self.spec.device, dtype)
        length = self.spec.sequence_length
        cosine, sine = rotary_table(self.config, positions, length=length, local=kind == "local")
        return cosine[:, None, None].to(self.spec.device, dtype), sine[:, None, None].to(self.spec.device, dtype)

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None = None,
        samples: torch.Tensor | None = None,
        document_starts: torch.Tensor | None = None,
        reference_logps: torch.Tensor | None = None,
        sources: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run a micro-batch through this stage.

        `x` is token ids [B, S] in the first stage, the residual stream [s, B, H] in others. With labels [B, S] the last
        stage returns its `output_terms`, without them the normalised hidden states [S, B, H]. `document_starts` [B, L]
        keep the documents of a row apart (`documents.py`); without them a row is one document.

        A stage with a `PreferenceRule` needs to know the log-probabilities that the reference model gives the documents
        [B, document_slots(L)]. Without them it returns its own: it then is the reference.

        `sources` [B] are the numbers of the rows' sources, by which a stage with `source_slots` tells its loss apart.
        """
        refresh_compute_weights(self.compute_weights.values())
        if self.spec.first:
            x = self._embed(x, samples, document_starts)
        positions = self._positions(document_starts)
        masks = self._masks(x.shape[1], document_starts)
        for block, saving in self._layers(x, positions, masks, samples):
            assert isinstance(block, DecoderLayer), "a decoder's layers are blocks"
            rotary, mask = positions[block.position_kind], masks.get(block.span)
            with saving:
                x, router_figures = block(x, rotary, self.normalization.sequences, samples, self.local_columns, mask)
            self._count_router(block, router_figures)
        if not self.spec.last:
            return x
        hidden = self.norm(x)
        whole = all_gather(hidden, self.axes.tp)
        if labels is None:
            return whole
        # Validation measures the next token alone.
        further = self._predict_further(hidden, labels, positions, masks, samples) if torch.is_grad_enabled() else []
        return self._head.with_rows(
            partial(
                self._loss_terms,
                labels=labels,
                further=further,
                document_starts=document_starts,
                reference_logps=reference_logps,
                sources=sources,
            ),
            whole,
        )

    def _count_router(self, block: DecoderLayer, router_figures: torch.Tensor | None) -> None:
        """Add what the router of a layer returned: outside of what is recomputed, so that nothing counts twice."""
        if router_figures is None:
            return
        self.router_losses += router_figures[: len(ROUTER_LOSS_TERMS)]
        if self.expert_load is not None:
            self.expert_load[block.layer] += router_figures[len(ROUTER_LOSS_TERMS) :]

    def _predict_further(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        positions: _PositionTables,
        masks: _SpanMasks,
        samples: torch.Tensor | None,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the hidden states [S, B, H] and labels [B, S] of each layer for multi-token prediction."""
        predictions = []
        for depth, layer in enumerate(self.mtp_layers, start=1):
            block = self.layers[str(layer)]
            assert isinstance(block, DecoderLayer), "a decoder's layers are blocks"
            tokens, further_labels = further_tokens(labels, depth, self.axes.cp)
            hidden, router_figures = block(
                hidden,
                positions[block.position_kind],
                self.normalization.sequences,
                samples,
                self.local_columns,
                masks.get(block.span),
                self._embedded(tokens),
            )
            self._count_router(block, router_figures)
            predictions.append((all_gather(hidden, self.axes.tp), further_labels))
        return predictions

    def _loss_terms(
        self,
        head: Embedding,
        hidden: torch.Tensor,
        *,
        labels: torch.Tensor,
        further: list[tuple[torch.Tensor, torch.Tensor]],
        document_starts: torch.Tensor | None,
        reference_logps: torch.Tensor | None,
        sources: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the `output_terms` of hidden states [S, B, H]; a reference model returns log-probabilities."""
        if (preference := self.regularization.preference) is not None:
            assert document_starts is not None, "pairs are documents"
            return self._compare_pairs(preference, head, hidden, labels, document_starts, reference_logps)
        source_losses = SourceLosses.of_rows(sources, len(hidden), self.regularization.source_slots)
        if (rule := self.regularization.token_loss) is not None:
            terms = linear_token_loss(
                hidden.flatten(0, 1),
                head.weight,
                labels.t().flatten(),
                self.normalization.tokens,
                rule,
                group=self.axes.tp,
                vocab_start=self.vocab_start,
                vocab_size=self.config.vocab_size,
                trained_rows=head.trained_rows(),
                trained_start=head.trained_start,
                source_losses=source_losses,
                soft_cap=self.config.logit_soft_cap,
            )
            return self._with_source_losses(torch.stack([*terms, torch.zeros_like(terms[1])]), source_losses)
        cross_entropy = partial(
            linear_cross_entropy,
            weight=head.weight,
            group=self.axes.tp,
            vocab_start=self.vocab_start,
            vocab_size=self.config.vocab_size,
            trained_rows=head.trained_rows(),
            trained_start=head.trained_start,
            soft_cap=self.config.logit_soft_cap,
            unit_factor=True,
        )
        scale = self.normalization.tokens
        loss, z = cross_entropy(
            hidden.flatten(0, 1),
            labels=labels.t().flatten(),
            scale=scale,
            z_loss=self.regularization.z_loss,
            source_losses=source_losses,
        )
        further_loss = torch.zeros_like(z)
        for states, further_labels in further:
            part, _ = cross_entropy(
                states.flatten(0, 1),
                labels=further_labels.t().flatten(),
                scale=scale * (self.regularization.mtp / len(further)),
            )
            further_loss = further_loss + part
        terms = torch.stack([loss + further_loss, z, further_loss.detach()])
        return self._with_source_losses(terms, source_losses)

    def _with_source_losses(self, terms: torch.Tensor, source_losses: SourceLosses | None) -> torch.Tensor:
        """Return the terms of a loss, followed by what the sources have of it; zeros where no sources are known."""
        if not (slots := self.regularization.source_slots):
            return terms
        return torch.cat([terms, terms.new_zeros(slots) if source_losses is None else source_losses.sums.to(terms)])

    def _layers(
        self,
        x: torch.Tensor,
        positions: _PositionTables,
        masks: _SpanMasks,
        samples: torch.Tensor | None,
    ) -> Iterator[tuple[nn.Module, AbstractContextManager[None]]]:
        """Yield each layer with the context that it runs in, which says where its activations wait for backward."""
        blocks = [self.layers[str(layer)] for layer in self.spec.layers]
        if self.spec.offload is None or not torch.is_grad_enabled():
            yield from ((block, nullcontext()) for block in blocks)
            return
        tables = (table for kind in positions.values() for table in (kind if isinstance(kind, tuple) else (kind,)))
        plain_masks = (mask for parts in masks.values() for mask in parts if isinstance(mask, torch.Tensor))
        shared = (*tables, *plain_masks, samples)
        one_stage = self.spec.first and self.spec.last
        tokens = x.shape[0] * x.shape[1]
        forward_pass = self.spec.offload.forward_pass(
            shared, token_counts=(tokens, tokens * self.axes.tp.size), keep_last=one_stage
        )
        for block in blocks:
            yield block, forward_pass.layer(block, last=block is blocks[-1])

    def _compare_pairs(
        self,
        rule: PreferenceRule,
        head: Embedding,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        document_starts: torch.Tensor,
        reference_logps: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the `output_terms`; without the reference's log-probabilities, those of this model [B, slots]."""
        documents = packed_documents(document_starts, self.columns, self.axes.cp)
        vocabulary = VocabularyShard(
            self.config.vocab_size, self.axes.tp, self.vocab_start, head.trained_start, self.config.logit_soft_cap
        )
        states, rows, labels = hidden.flatten(0, 1), head.trained_rows(), labels.t().flatten()
        if reference_logps is None:
            logps = linear_document_logps(states, head.weight, labels, documents, rule, vocabulary, rows)
            return logps.view(documents.rows, documents.slots)
        scale = self.normalization.pairs
        loss, figures = linear_preference_loss(
            states, head.weight, labels, documents, reference_logps.flatten(), scale, rule, vocabulary, rows
        )
        no_terms = torch.zeros(len(LOSS_TERMS) - 1, dtype=loss.dtype, device=loss.device)
        return torch.cat([loss[None], no_terms, figures])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's part of the vocabulary for hidden states [S, B, H]: [S, B, V]."""
        return self._head.with_rows(
            lambda head, states: cap_logits(states @ head.matrix().to(states.dtype).t(), self.config), hidden
        )

    @property
    def _head(self) -> Embedding:
        return self.embedding if self.config.tied_embeddings else self.head

    def _positions(self, document_starts: torch.Tensor | None) -> _PositionTables:
        """Return what positions do to layers of each kind that this stage has."""
        if document_starts is None:
            return self.position_tables
        return {kind: self._document_table(document_starts, kind) for kind in self.position_tables}

    def _document_table(self, document_starts: torch.Tensor, kind: PositionKind) -> PositionTable:
        """Return the table of this rank's columns by their positions within documents: [S, B, 1, D], or of width 1."""
        if kind not in self._table_of_position:
            with torch.device("cpu"):
                self._table_of_position[kind] = self._position_table(torch.arange(self.spec.sequence_length), kind)
        table = self._table_of_position[kind]
        return None if table is None else rows_of_table(table, document_positions(document_starts, self.columns))

    def _masks(self, rows: int, document_starts: torch.Tensor | None) -> _SpanMasks:
        """Return the masks of each window or chunk that a layer of this stage has; none where kernels do without."""
        rules = {layer: attention_rule(self.config, layer) for layer in self._all_layers}
        changed_scores = any(rule.needs_scores for rule in rules.values())
        blocks = has_block_attention(self.spec.device, self.config.head_dim)
        if changed_scores and self.spec.dtype not in (torch.bfloat16, torch.float16):
            blocks = False  # on an H200, PyTorch 2.11 has no FlexAttention that changes scores in float32
        if document_starts is None:
            if not changed_scores or not blocks:
                return {}
            # Only FlexAttention changes scores without holding all of them, and it takes a mask.
            document_starts = torch.zeros(rows, self.spec.sequence_length, dtype=torch.int64, device=self.spec.device)
        return {
            (window, chunk): document_masks(document_starts, self.axes.cp, window, blocks=blocks, chunk=chunk)
            for window, chunk in {rule.span for rule in rules.values()}
        }

    def _embed(
        self, tokens: torch.Tensor, samples: torch.Tensor | None, document_starts: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the residual stream [s, B, H] of token ids [B, S]."""
        x = self._embedded(tokens)
        if self.config.positions == "learned":
            positions = self.local_columns[:, None]
            if document_starts is not None:
                positions = document_positions(document_starts, self.local_columns)
            x = x + F.embedding(positions, self.positions.weight).to(x.dtype)
        return self.embedding_dropout(x, samples, self.local_columns)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed token ids [B, S]: this rank's part [s, B, H]. Each tp rank has some rows of the table."""
        ids = tokens.t() - self.vocab_start
        tp = self.axes.tp
        if tp.size == 1:
            x = self.embedding(ids)
        else:
            on_this_rank = (ids >= 0) & (ids < self.embedding.weight.shape[0])
            rows = self.embedding(torch.where(on_this_rank, ids, 0))
            x = reduce_scatter(torch.where(on_this_rank[..., None], rows, 0.0), tp)
        return scale_embedding(x.to(self.spec.dtype), self.config)


def rows_of_table(table: RotaryTable | torch.Tensor, positions: torch.Tensor) -> RotaryTable | torch.Tensor:
    """Return the rows of a table [L, 1, 1, D] at positions [S, B]: [S, B, 1, D]; those at [T] are [T, 1, 1, D]."""
    if isinstance(table, tuple):
        cosine, sine = (rows_of_table(part, positions) for part in table)
        assert isinstance(cosine, torch.Tensor), "a part of a table"
        assert isinstance(sine, torch.Tensor), "a part of a table"
        return cosine, sine
    return table[positions] if positions.dim() == 1 else table[:, 0][positions]


def scale_embedding(x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Multiply embedded tokens by sqrt(hidden) where the model does; the factor is rounded to their dtype, as in HF."""
    if not config.scaled_embeddings:
        return x
    return x * torch.tensor(config.hidden**0.5, dtype=x.dtype).item()


def cap_logits(logits: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Bound logits by tanh where the model does."""
    cap = config.logit_soft_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)


class _AttachLosses(torch.autograd.Function):
    """Attaches the router's losses to the activations, so that backward reaches them on any pipeline stage."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
        ctx.losses_dtype = losses.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], torch.ones(len(ROUTER_LOSS_TERMS), dtype=ctx.losses_dtype, device=grads[0].device)
