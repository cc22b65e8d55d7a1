"""The decoder with a KV cache: new tokens of many sequences at once, over the cached keys and values before them.

It runs the layers of the decoder that trains; only attention differs. The keys and values of all sequences are stored
in one row of slots. Each sequence has a block of consecutive slots, and its new tokens attend to this block.

With latent attention a slot holds the latent and the rotary key that all heads share. This is one key of a single
group, and its first channels are the value (`latent_attention.py`). A few new tokens attend to the slots themselves.
For many, as in prefill, the keys and values of all heads are computed from them first: these are narrower (in
DeepSeek-V3 a query and a key cost 320 products with them, 1,088 without).

Shapes: T new tokens of all sequences, one sequence after the other; B sequences; N slots of the cache; G key/value
groups, r query heads per group, D head_dim, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trainshed.models.attention import (
    PLAIN_ATTENTION,
    AttentionRule,
    causal_attention,
    is_stretched,
    score_attention,
)
from trainshed.models.decoder import DecoderLayer, DecoderStage, rows_of_table, scale_embedding
from trainshed.models.latent_attention import MultiHeadLatentAttention
from trainshed.models.layers import Linear, gates_first
from trainshed.models.moe import GroupedExperts, MoE

AttentionFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionRule, torch.Tensor | None], torch.Tensor
]
"""How new queries [T, G · r, D] attend to cached keys [N, G, D] and values [N, G, V] by a layer's rule.

The last are the sinks [G · r] of a rule that has them. It gives [T, G · r, V]."""


@dataclass(frozen=True)
class SequenceSpan:
    """One sequence of a step: where its new tokens are among all new tokens, and where its keys are in the cache.

    The keys of the new tokens are the last `query_length` of its `key_length` keys.
    """

    query_start: int
    query_length: int
    slot_start: int
    key_length: int

    @property
    def rows(self) -> slice:
        """Its new tokens among all."""
        return slice(self.query_start, self.query_start + self.query_length)


class CachedDecoder:
    """A whole decoder on one device, with its KV cache of `slots` tokens."""

    def __init__(self, decoder: DecoderStage, slots: int) -> None:
        assert decoder.spec.first, "generation needs the whole decoder"
        assert decoder.spec.last, "generation needs the whole decoder"
        self.decoder, self.config = decoder, decoder.config
        mla = self.config.mla
        width = (self.config.kv_heads, self.config.head_dim) if mla is None else (1, mla.kv_rank + mla.rope_dim)
        shape = (self.config.layers, slots, *width)
        self.keys = torch.zeros(shape, dtype=decoder.spec.dtype, device=decoder.spec.device)
        self.values = torch.zeros_like(self.keys) if mla is None else self.keys[..., : mla.kv_rank]
        self._tables = decoder.generation_tables()

    def table_rows(self, positions: Sequence[int], longest: int) -> list[int]:
        """Return the rows of the tables for positions of a sequence that may become `longest` tokens long."""
        first = self.config.max_positions if is_stretched(self.config, longest) else 0
        return [first + position for position in positions]

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: AttentionFunction,
        *,
        table_rows: torch.Tensor | None = None,
        one_by_one: int = 0,
    ) -> torch.Tensor:
        """Run new tokens [T] at their positions [T], store their keys in `slots` [T]: normalised hidden states [T, H].

        `table_rows` [T] are those of `table_rows()`; None: the positions themselves.
        With `one_by_one` only that many of the tokens go through experts, each by itself. Then the result of a token
        never depends on the other tokens that chose the same expert.
        """
        decoder = self.decoder
        x = scale_embedding(decoder.embedding(tokens).to(decoder.spec.dtype), self.config)
        if self.config.positions == "learned":
            x = x + F.embedding(positions, decoder.positions.weight).to(x.dtype)
        rotary_of = {
            kind: None if table is None else rows_of_table(table, positions if table_rows is None else table_rows)
            for kind, table in self._tables.items()
        }
        x = x[:, None]
        for layer, block in enumerate(decoder.layers.values()):
            assert isinstance(block, DecoderLayer), "a decoder's layers are blocks"
            keys, values, rotary = self.keys[layer], self.values[layer], rotary_of[block.position_kind]
            if isinstance(block.attention, MultiHeadLatentAttention):
                assert isinstance(rotary, tuple), "latent attention has rotary positions"
                x = x + self._attend_to_latents(block.attention, x, rotary, slots, keys, values, attention)
                x = x + self._feed_forward(block, x, one_by_one)
                continue
            query, key, value = block.attention.qkv_projection(x, None)
            if isinstance(rotary, torch.Tensor):
                query = (query * rotary).to(x.dtype)
            elif rotary is not None:
                # Both at once: the time of a step with few tokens is the number of its operations.
                turned = block.attention.rotate(torch.cat([query, key], dim=2), rotary)
                query, key = turned.split([query.shape[2], key.shape[2]], dim=2)
            keys.index_copy_(0, slots, key[:, 0])
            values.index_copy_(0, slots, value[:, 0])
            out = attention(query[:, 0], keys, values, block.attention.rule, block.attention.sinks)
            x = x + block.attention.output_projection(out[:, None])
            x = x + self._feed_forward(block, x, one_by_one)
        return decoder.norm(x)[:, 0]

    @staticmethod
    def _attend_to_latents(
        module: MultiHeadLatentAttention,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attention: AttentionFunction,
    ) -> torch.Tensor:
        """Store latents and rotary keys of new tokens [T, 1, H] and attend to those of their sequences."""
        query, latent, rotary_key = module.compress(x, rotary)
        keys.index_copy_(0, slots, torch.cat([latent, rotary_key], dim=-1))
        assert isinstance(attention, PerSequenceAttention), "latents are wider than the heads that other kernels take"
        expanded = [span for span in attention.spans if module.expands(span.query_length, span.key_length)]
        if len(expanded) == len(attention.spans):
            heads = x.new_empty(len(x), module.heads * module.mla.value_dim)
        else:
            out = attention.excluding(expanded)(
                module.absorbed_queries(query[:, 0]), keys, values, PLAIN_ATTENTION, None
            )
            heads = module.values_of_latents(out)
        for span in expanded:
            compressed = keys[span.slot_start : span.slot_start + span.key_length]
            heads[span.rows] = module.expanded_attention(query[span.rows, 0], compressed)
        return module.out(heads[:, None])

    @staticmethod
    def _feed_forward(block: DecoderLayer, x: torch.Tensor, one_by_one: int) -> torch.Tensor:
        if not isinstance(block.mlp, MoE):
            return block.mlp(x)
        parts = [block.mlp(part, None)[0] for part in (x[:one_by_one].split(1) if one_by_one else (x,))]
        return torch.cat([*parts, torch.zeros_like(x[one_by_one:])] if one_by_one else parts)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [T, H]: float32 [T, V]."""
        return self.decoder.logits(hidden).float()


@dataclass(frozen=True)
class PerSequenceAttention:
    """Attends sequence by sequence: works on every device and in every dtype, and no sequence changes another."""

    spans: Sequence[SequenceSpan]

    def excluding(self, spans: Sequence[SequenceSpan]) -> PerSequenceAttention:
        """Return the same without some sequences, whose results are zeros."""
        return PerSequenceAttention([span for span in self.spans if span not in spans])

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend: an `AttentionFunction`."""
        out, window = query.new_zeros(*query.shape[:-1], values.shape[-1]), rule.window
        for span in self.spans:
            visible = span.key_length if window is None else min(span.key_length, window + span.query_length - 1)
            if rule.chunk is not None and span.query_length == 1:
                visible = (span.key_length - 1) % rule.chunk + 1
            slot_stop = span.slot_start + span.key_length
            block = slice(slot_stop - visible, slot_stop)
            if span.query_length == 1:
                out[span.rows] = _decode_attention(query[span.rows], keys[block], values[block], rule, sinks)
            else:
                parts = (query[span.rows, None], keys[block, None], values[block, None])
                out[span.rows] = causal_attention(*parts, rule, sinks=sinks)[:, 0]
        return out


def _decode_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend from one token to all given keys; a group's heads are passed as tokens, so that no key is repeated."""
    groups = keys.shape[1]
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if rule.needs_scores:
        return score_attention(query[..., None, :], keys, values, None, rule, sinks)[:, :, 0]
    grouped = query.view(1, groups, -1, query.shape[-1])
    out = F.scaled_dot_product_attention(grouped, keys, values, scale=rule.scale)
    return out.reshape(1, -1, values.shape[-1])


@dataclass(frozen=True)
class VarlenMetadata:
    """The spans of a step on the device, for one kernel over all sequences: int32 throughout.

    `cu_query_lengths` [B + 1] is where the new tokens of each sequence begin, and where the last end. `slot_starts`
    [B + 1] is where its keys begin (the last entry is not read), `key_lengths` [B] how many it has.
    """

    cu_query_lengths: torch.Tensor
    slot_starts: torch.Tensor
    key_lengths: torch.Tensor
    max_query_length: int
    max_key_length: int


def varlen_flash_attention(metadata: VarlenMetadata) -> AttentionFunction:
    """Attend with one kernel, which reads the spans on the device, so that a CUDA graph can replay it."""
    # A single new token attends to everything before it, without a mask. Only without mask and window does the kernel
    # split long sequences over the GPU.
    causal = metadata.max_query_length > 1

    def attention(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        assert sinks is None, "the runner takes another function for rules that the kernel does not have"
        return torch.ops.aten._flash_attention_forward(
            query,
            keys,
            values,
            metadata.cu_query_lengths,
            metadata.slot_starts,
            metadata.max_query_length,
            metadata.max_key_length,
            0.0,
            causal,
            False,
            scale=rule.scale,
            window_size_left=None if rule.window is None else rule.window - 1,
            window_size_right=None if rule.window is None else 0,
            seqused_k=metadata.key_lengths,
        )[0]

    return attention


@torch.no_grad()
def put_gates_first(model: nn.Module) -> None:
    """Reorder gate and up projections once, as they are used; training does so at each step, where it costs nothing."""
    for module in model.modules():
        if isinstance(module, Linear) and module.gate_up_interleaved:
            module.weight = nn.Parameter(gates_first(module.weight, 0), requires_grad=False)
            if module.bias is not None:
                module.bias = nn.Parameter(gates_first(module.bias, 0), requires_grad=False)
            module.gate_up_interleaved = False
        elif isinstance(module, GroupedExperts) and module.gate_up_interleaved:
            module.gate_up = nn.Parameter(gates_first(module.gate_up, 1), requires_grad=False)
            if module.config.mlp_bias:
                module.gate_up_bias = nn.Parameter(gates_first(module.gate_up_bias, 1), requires_grad=False)
            module.gate_up_interleaved = False
