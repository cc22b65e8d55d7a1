"""Multi-head latent attention (MLA, DeepSeek-V2): keys and values of all heads come from one short vector per token.

    latent   = norm(W_kv_down x)[: kv_rank]          keys = [W_k latent, rotary key]
    rotary   = rope((W_kv_down x)[kv_rank :])        values = W_v latent          (kv_up is [W_k; W_v], head by head)

Training expands the latents into keys and values. Generation keeps only latents and rotary keys. For a few new tokens
queries are multiplied with W_k instead of the keys, and the result of attention with W_v instead of the values, so all
heads attend to the same cached vectors, whose first `kv_rank` channels are the values too. For many new tokens
(prefill) it expands the latents as training does, which takes fewer products (`expands`).

The two down projections are whole on every tp rank and see only the rank's own tokens, so what is gathered over tp and
over cp is the short vectors. Each rank then computes keys and values of its own heads, for the whole sequence.

Shapes: s tokens of this rank, S tokens of this context-parallel rank, L whole sequence, B sequences, h heads of this tp
rank, N nope_dim, R rope_dim, V value_dim, D = N + R, C kv_rank, H hidden.
"""

from __future__ import annotations

import torch
from torch import nn

from trainshed.models.attention import (
    PLAIN_ATTENTION,
    PositionTable,
    apply_rotary,
    causal_attention,
    restore_sequence_order,
    yarn_magnitude,
)
from trainshed.models.collectives import ParallelAxes, all_gather
from trainshed.models.documents import AttentionMask
from trainshed.models.layers import Linear, Norm, RowParallelLinear
from trainshed.recipe import ModelConfig
from trainshed.recipe.model_parts import LATENT_NORM_EPS

_MOST_EXPANDED = 1 << 28
"""How many numbers of keys and values generation expands at a time: 0.5 GiB in bf16."""


class MultiHeadLatentAttention(nn.Module):
    """Self-attention over latents."""

    def __init__(self, config: ModelConfig, axes: ParallelAxes) -> None:
        super().__init__()
        assert config.mla is not None, "only models with latent attention have it"
        self.config, self.mla, self.axes = config, config.mla, axes
        self.heads = config.heads // axes.tp.size
        mla = config.mla
        self.norm = Norm(config.hidden, config)
        queries = self.heads * config.head_dim
        if mla.query_rank is None:
            self.q = Linear(config.hidden, queries, bias=False)
        else:
            self.q_down = Linear(config.hidden, mla.query_rank, bias=False)
            self.q_norm = Norm(mla.query_rank, config, kind="rms", eps=LATENT_NORM_EPS)
            self.q_up = Linear(mla.query_rank, queries, bias=False)
        self.kv_down = Linear(config.hidden, mla.kv_rank + mla.rope_dim, bias=False)
        self.kv_norm = Norm(mla.kv_rank, config, kind="rms", eps=LATENT_NORM_EPS)
        self.kv_up = Linear(mla.kv_rank, self.heads * (mla.nope_dim + mla.value_dim), bias=False)
        self.out = RowParallelLinear(self.heads * mla.value_dim, config.hidden, axes.tp, bias=False)
        self.score_scale = score_scale(config)

    def forward(
        self,
        x: torch.Tensor,
        rotary: PositionTable,
        samples: torch.Tensor | None = None,
        masks: tuple[AttentionMask, ...] | None = None,
    ) -> torch.Tensor:
        """Attend from this rank's tokens [s, B, H], as `Attention` does; `rotary` are [S, 1, 1, R] or [S, B, 1, R]."""
        assert isinstance(rotary, tuple), "latent attention has rotary positions"
        query, latent, rotary_key = self.compress(x, rotary, samples)
        compressed = torch.cat([latent, rotary_key], dim=-1)
        cp = self.axes.cp
        if cp.size > 1:
            compressed = restore_sequence_order(all_gather(compressed, cp), cp.size)
        key, value = self._expand(compressed, samples)
        out = self._attend(query * self.score_scale, key, value, masks)
        return self.out(out.flatten(2), samples)

    def compress(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], samples: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute queries [S, B, h, D], latents [S, B, C] and rotary keys [S, B, R], rotated by position."""
        mla, tp = self.mla, self.axes.tp
        normed = self.norm(x)
        latent, rotary_key = self.kv_down(normed, samples).split([mla.kv_rank, mla.rope_dim], dim=-1)
        parts = [self.kv_norm(latent), rotary_key]
        if mla.query_rank is None:
            queries = self.q.gathered(normed, tp, samples)
            latent, rotary_key = self._gather_over_tp(parts)
        else:
            parts.append(self.q_norm(self.q_down(normed, samples)))
            latent, rotary_key, query_latent = self._gather_over_tp(parts)
            queries = self.q_up(query_latent, samples)
        query = queries.unflatten(-1, (self.heads, self.config.head_dim))
        plain, turned = query.split([mla.nope_dim, mla.rope_dim], dim=-1)
        query = torch.cat([plain, self._rotate(turned, rotary)], dim=-1)
        return query, latent, self._rotate(rotary_key[:, :, None], rotary).squeeze(2)

    def _gather_over_tp(self, parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Gather several short vectors of each token with one collective."""
        if self.axes.tp.size == 1:
            return tuple(parts)
        widths = [part.shape[-1] for part in parts]
        return all_gather(torch.cat(parts, dim=-1), self.axes.tp).split(widths, dim=-1)

    def _rotate(self, heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate [S, B, heads, R]. Queries and keys are permuted alike, which changes no product of the two."""
        if self.mla.rope_interleaved:
            heads = torch.cat([heads[..., 0::2], heads[..., 1::2]], dim=-1)
        return apply_rotary(heads, *rotary).to(heads.dtype)

    def _expand(self, compressed: torch.Tensor, samples: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute keys [L, B, h, D] and values [L, B, h, V] of this rank's heads from [L, B, C + R]."""
        mla = self.mla
        latent, rotary_key = compressed.split([mla.kv_rank, mla.rope_dim], dim=-1)
        heads = self.kv_up(latent, samples).unflatten(-1, (self.heads, mla.nope_dim + mla.value_dim))
        plain, value = heads.split([mla.nope_dim, mla.value_dim], dim=-1)
        shared = rotary_key[:, :, None].expand(-1, -1, self.heads, -1)
        return torch.cat([plain, shared], dim=-1), value

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masks: tuple[AttentionMask, ...] | None
    ) -> torch.Tensor:
        """Attend from [S, B, h, D] to keys of the whole sequence: [S, B, h, V]."""
        cp = self.axes.cp
        if cp.size == 1:
            return causal_attention(query, key, value, PLAIN_ATTENTION, None if masks is None else masks[0])
        half_length = query.shape[0] // 2
        halves = []
        for half, queries in enumerate(query.split(half_length)):
            end = ((cp.rank, 2 * cp.size - 1 - cp.rank)[half] + 1) * half_length
            mask = None if masks is None else masks[half]
            halves.append(causal_attention(queries, key[:end], value[:end], PLAIN_ATTENTION, mask))
        return torch.cat(halves)

    def expands(self, queries: int, keys: int) -> bool:
        """Whether new tokens of a sequence attend to expanded keys and values: where that takes fewer products.

        A product of a query and a key takes C + R numbers and as many as C of its value, expanded D and V. To expand a
        key takes C · (N + V). Where they would take much memory, latents are attended to as they are.
        """
        mla, head = self.mla, self.config.head_dim + self.mla.value_dim
        saved = 2 * mla.kv_rank + mla.rope_dim - head
        fits = keys * self.heads * head <= _MOST_EXPANDED
        return fits and queries * saved > mla.kv_rank * (mla.nope_dim + mla.value_dim)

    def expanded_attention(self, query: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor:
        """Attend from queries [T, h, D] to cached latents and rotary keys [L, 1, C + R] as training does: [T, h · V].

        The last query is at the position of the last key.
        """
        key, value = self._expand(compressed, None)
        return causal_attention(query[:, None] * self.score_scale, key, value).flatten(1)

    def absorbed_queries(self, query: torch.Tensor) -> torch.Tensor:
        """Turn queries [T, h, D] into those that meet cached latents and rotary keys: [T, h, C + R].

        They are scaled as keys of width C + R would scale them, so that scores are those of keys of width D.
        """
        mla = self.mla
        plain, turned = query.split([mla.nope_dim, mla.rope_dim], dim=-1)
        key_weights, _ = self._up_weights(query.dtype)
        absorbed = torch.einsum("thn,hnc->thc", plain, key_weights)
        width = mla.kv_rank + mla.rope_dim
        return torch.cat([absorbed, turned], dim=-1) * (self.score_scale * (width / self.config.head_dim) ** 0.5)

    def values_of_latents(self, out: torch.Tensor) -> torch.Tensor:
        """Turn attended latents [T, h, C] into attended values [T, h · V]."""
        _, value_weights = self._up_weights(out.dtype)
        return torch.einsum("thc,hvc->thv", out, value_weights).flatten(1)

    def _up_weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of `kv_up` by head: those of keys [h, N, C] and those of values [h, V, C]."""
        weight = self.kv_up.matrix(dtype).unflatten(0, (self.heads, -1))
        keys, values = weight.split([self.mla.nope_dim, self.mla.value_dim], dim=1)
        return keys, values


def score_scale(config: ModelConfig) -> float:
    """Return what scores are multiplied with besides 1 / sqrt(D): YaRN's growth of all channels, squared."""
    scaling = None if config.rope is None else config.rope.scaling
    if scaling is None or scaling.kind != "yarn" or not scaling.mscale_all_dim:
        return 1.0
    return yarn_magnitude(scaling, scaling.mscale_all_dim) ** 2
