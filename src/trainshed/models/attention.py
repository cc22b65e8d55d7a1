"""Causal attention over the whole sequence with rotary positions: heads cut over tp, queries cut over cp.

Shapes: S tokens of this context-parallel rank, L whole sequence, B sequences, G key/value groups of this
tensor-parallel rank, r query heads per group, D head_dim, H hidden.

With context parallel, keys and values are all_gathered (their gradients are reduce_scattered back) and each rank
computes its own queries. A rank holds two parts of the sequence, one early and one late, so that causal work is even.
Plain causal attention hides both collectives (`context_parallel.py`); windows, documents and changed scores wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from trainshed.models.collectives import ParallelAxes, all_gather
from trainshed.models.context_parallel import context_attention, supports_context_attention
from trainshed.models.documents import AttentionMask, block_attention
from trainshed.models.layers import Linear, Norm, ProjectionNorm, RowParallelLinear
from trainshed.recipe import ModelConfig
from trainshed.recipe.model_parts import RopeScaling

# cuDNN's kernel is about twice as fast as the flash one on Hopper; the others are for shapes it does not support.
SDPA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


AttentionSpan = tuple[int | None, int | None]
"""(window, chunk) of a layer."""
RotaryTable = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [S, 1, 1, D] or [S, B, 1, D] each."""
PositionTable = RotaryTable | torch.Tensor | None
"""What positions do to a layer's queries and keys: they are turned, or queries alone are multiplied, or nothing."""


@dataclass(frozen=True)
class AttentionRule:
    """How one layer attends: how far back, and what becomes of the scores before the softmax."""

    window: int | None = None
    """How many tokens a query sees, itself included; None: all before it."""
    scale: float | None = None
    """What scores are multiplied by; None: 1 / sqrt(D)."""
    soft_cap: float | None = None
    """Scores x become cap · tanh(x / cap); None: they stay as they are."""
    has_sinks: bool = False
    """Whether each head has a score of its own in the softmax, beside those of the keys: a sink, which has no value."""
    chunk: int | None = None
    """A query sees only its own chunk of so many tokens, counted from the first; None: there are no chunks."""

    @property
    def needs_scores(self) -> bool:
        """Whether it changes scores in a way that `scaled_dot_product_attention` does not have."""
        return self.soft_cap is not None or self.has_sinks

    @property
    def span(self) -> AttentionSpan:
        """What decides how far back a query sees: rules with the same have the same masks."""
        return self.window, self.chunk

    def is_plain(self, keys: int) -> bool:
        """Whether a query sees all of up to `keys` keys before it, and its scores are only scaled."""
        bounded = any(limit is not None and limit < keys for limit in self.span)
        return not bounded and not self.needs_scores


PLAIN_ATTENTION = AttentionRule()


def attention_rule(config: ModelConfig, layer: int) -> AttentionRule:
    """Return how a layer attends."""
    scale = None if config.query_scalar is None else config.query_scalar**-0.5
    return AttentionRule(
        config.layer_window(layer),
        scale,
        config.attention_soft_cap,
        config.attention_sinks,
        config.layer_chunk(layer),
    )


class Attention(nn.Module):
    """Self-attention with grouped queries."""

    def __init__(self, config: ModelConfig, axes: ParallelAxes, layer: int = 0) -> None:
        super().__init__()
        self.config, self.axes = config, axes
        self.rule = attention_rule(config, layer)
        self.kv_groups = config.kv_heads // axes.tp.size
        self.queries_per_group = config.heads // config.kv_heads
        rows = self.kv_groups * (self.queries_per_group + 2) * config.head_dim
        self.norm = nn.Identity() if config.norm_placement == "post" else Norm(config.hidden, config)
        self.qkv = Linear(config.hidden, rows, bias=config.qkv_bias)
        if config.qk_norm and config.qk_norm_span == "projection":
            self.query_norm: Norm = ProjectionNorm(config.heads * config.head_dim, config, axes.tp)
            self.key_norm: Norm = ProjectionNorm(config.kv_heads * config.head_dim, config, axes.tp)
        elif config.qk_norm:
            self.query_norm = Norm(config.head_dim, config, kind="rms")
            self.key_norm = Norm(config.head_dim, config, kind="rms")
        heads = self.kv_groups * self.queries_per_group * config.head_dim
        self.sinks = nn.Parameter(torch.empty(heads // config.head_dim)) if config.attention_sinks else None
        self.out = RowParallelLinear(heads, config.hidden, axes.tp, bias=config.output_bias)
        self.post_norm = nn.Identity() if config.norm_placement == "pre" else Norm(config.hidden, config)

    def forward(
        self,
        x: torch.Tensor,
        rotary: PositionTable,
        samples: torch.Tensor | None = None,
        masks: tuple[AttentionMask, ...] | None = None,
    ) -> torch.Tensor:
        """Attend from this rank's tokens [s, B, H]; `rotary` is what their positions do.

        `samples` are the run's sample numbers [B], for the dropout of adapters. `masks` keep documents apart
        (`document_masks`); without them a row is one document.
        """
        query, key, value = self.qkv_projection(x, rotary, samples)
        return self.output_projection(self._attend(query, key, value, masks), samples)

    def output_projection(self, heads: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        """Project what the heads [S, B, G · r, D] found to this rank's tokens [s, B, H]."""
        return self.post_norm(self.out(heads.reshape(*heads.shape[:2], -1), samples))

    def qkv_projection(
        self,
        x: torch.Tensor,
        rotary: PositionTable,
        samples: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute queries [S, B, G · r, D], keys and values [S, B, G, D] of this rank's tokens, rotated by position."""
        projected = self.qkv.gathered(self.norm(x), self.axes.tp, samples)
        length, batch = projected.shape[:2]
        heads = projected.view(length, batch, self.kv_groups, self.queries_per_group + 2, self.config.head_dim)
        query, key, value = heads.split([self.queries_per_group, 1, 1], dim=3)
        query, key, value = query.flatten(2, 3), key.squeeze(3), value.squeeze(3)
        if self.config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        if isinstance(rotary, torch.Tensor):
            query = (query * rotary).to(x.dtype)
        elif rotary is not None:
            query, key = self.rotate(query, rotary), self.rotate(key, rotary)
        return query, key, value

    def rotate(self, heads: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
        """Rotate queries or keys [S, B, heads, D] by position, and normalise them where the model does."""
        rope = self.config.rope
        if rope is not None and rope.interleaved:
            # Queries and keys are permuted alike, which changes no product of the two.
            heads = torch.cat([heads[..., 0::2], heads[..., 1::2]], dim=-1)
        turned = apply_rotary(heads, *rotary)
        if self.config.qk_l2_norm:
            turned = F.rms_norm(turned, turned.shape[-1:], None, self.config.norm_eps)
        return turned.to(heads.dtype)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masks: tuple[AttentionMask, ...] | None
    ) -> torch.Tensor:
        """Attend over the whole sequence: [S, B, heads, D] each to [S, B, heads, D]."""
        cp = self.axes.cp
        if cp.size == 1:
            return causal_attention(query, key, value, self.rule, None if masks is None else masks[0], self.sinks)
        plain = masks is None and self.rule.is_plain(cp.size * len(query))
        if plain and supports_context_attention(query.shape[-1], query.dtype, query.device):
            return context_attention(query, key, value, cp, self.rule.scale)
        both = restore_sequence_order(all_gather(torch.cat([key, value], dim=2), cp), cp.size)
        key, value = both.split(self.kv_groups, dim=2)
        half_length = query.shape[0] // 2
        halves = []
        for half, queries in enumerate(query.split(half_length)):
            end = ((cp.rank, 2 * cp.size - 1 - cp.rank)[half] + 1) * half_length
            mask = None if masks is None else masks[half]
            halves.append(causal_attention(queries, key[:end], value[:end], self.rule, mask, self.sinks))
        return torch.cat(halves)


def restore_sequence_order(gathered: torch.Tensor, cp_size: int) -> torch.Tensor:
    """Put the gathered parts of all cp ranks (an early and a late one each) into sequence order, on dim 0."""
    length = gathered.shape[0]
    parts = gathered.split(length // (2 * cp_size))
    early, late = parts[0::2], parts[1::2]
    return torch.cat([*early, *reversed(late)])


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule = PLAIN_ATTENTION,
    document_mask: AttentionMask | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally: [S, B, heads, D] throughout; the last query is at the position of the last key.

    A `document_mask` takes the place of causality and window, which it contains. `sinks` [heads] are for a rule that
    has them.
    """
    queries, keys, window = query.shape[0], key.shape[0], rule.window
    if document_mask is None and rule.chunk is not None and rule.chunk < keys:
        return _chunked_attention(query, key, value, rule, rule.chunk, sinks)
    windowed = window is not None and window < keys
    if document_mask is not None:
        return _masked_attention(query, key, value, document_mask, rule, sinks)
    has_kernel = not rule.needs_scores and supports_flash(query.shape[-1], query.dtype, query.device)
    if (windowed or keys > queries) and has_kernel:
        if (missing := query.shape[-1] - value.shape[-1]) > 0:
            # The kernel takes one width; latent attention has narrower values.
            value = F.pad(value, (0, missing))
            return _flash_attention(query, key, value, window if windowed else None, rule.scale)[..., :-missing]
        return _flash_attention(query, key, value, window if windowed else None, rule.scale)
    mask = None
    if keys != queries or windowed or rule.needs_scores:
        at = torch.arange(keys - queries, keys, device=query.device)[:, None]
        other = torch.arange(keys, device=query.device)[None, :]
        mask = other <= at
        if window is not None:
            mask = mask & (other > at - window)
    return _masked_attention(query, key, value, mask, rule, sinks)


def _chunked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    chunk: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`causal_attention` chunk by chunk: none computes a score that its mask would hide."""
    within, begin = replace(rule, chunk=None), key.shape[0] - query.shape[0]
    parts = []
    for start in range(begin // chunk * chunk, key.shape[0], chunk):
        stop = min(start + chunk, key.shape[0])
        queries = query[max(start, begin) - begin : stop - begin]
        parts.append(causal_attention(queries, key[start:stop], value[start:stop], within, sinks=sinks))
    return torch.cat(parts)


def _masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: AttentionMask | None,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend under a mask, or causally without one: [S, B, heads, D] throughout."""
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    if isinstance(mask, BlockMask):
        out = block_attention(query, key, value, mask, scale=rule.scale, soft_cap=rule.soft_cap, sinks=sinks)
    elif rule.needs_scores:
        assert mask is not None, "`causal_attention` makes one"
        out = score_attention(query, key, value, mask, rule, sinks)
    elif query.is_cuda:
        with sdpa_kernel(SDPA_BACKENDS, set_priority=True):
            out = F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=mask is None, scale=rule.scale, enable_gqa=True
            )
    else:
        ratio = query.shape[1] // key.shape[1]
        if ratio > 1:
            key, value = key.repeat_interleave(ratio, dim=1), value.repeat_interleave(ratio, dim=1)
        out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=rule.scale)
    return out.permute(2, 0, 1, 3)


def supports_flash(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch's flash attention takes such heads with a window, or with fewer queries than keys.

    Also for decoding with a cache. A ROCm device has the same type, but its kernels read windows in another way
    (pytorch/pytorch#173469), so it attends under a mask.
    """
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
    )


def score_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    rule: AttentionRule,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from [B, heads, Q, D] to [B, groups, K, D] with scores that exist whole: for rules that no kernel has."""
    groups, scale = key.shape[1], rule.scale or query.shape[-1] ** -0.5
    queries = query.unflatten(1, (groups, -1))  # [B, groups, r, Q, D]
    scores = (queries @ key[:, :, None].transpose(-1, -2)) * scale
    if rule.soft_cap is not None:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~(mask if mask.dim() == 2 else mask[:, :, None]), -torch.inf)
    wide = torch.promote_types(query.dtype, torch.float32)
    if sinks is not None:
        # One more key for each head, whose weight is left out afterwards: it takes its part of the sum.
        sink = sinks.to(scores.dtype).view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1, dtype=wide).to(query.dtype)
    weights = weights if sinks is None else weights[..., :-1]
    return (weights @ value[:, :, None]).flatten(1, 2)


def _flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, scale: float | None
) -> torch.Tensor:
    """`causal_attention` where `scaled_dot_product_attention` needs a mask of S · L: fewer queries, or a window.

    Flash attention puts the last query at the last key by itself, and skips what lies before a window: with 4,096 of
    16,384 tokens on an H200 it takes a quarter of the time of a mask.
    """
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    within = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out = torch.ops.aten._flash_attention_forward(
        query, key, value, None, None, query.shape[1], key.shape[1], 0.0, True, False, scale=scale, **within
    )[0]
    return out.transpose(0, 1)


def context_parallel_shard(tokens: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Keep the columns of [B, L] that a context-parallel rank holds: [B, S]."""
    if cp_size == 1:
        return tokens
    return tokens[:, context_parallel_positions(tokens.shape[1], cp_size, cp_rank).to(tokens.device)]


def context_parallel_positions(length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Return a rank's positions: parts r and 2·cp-1-r of the sequence, so that causal work is even. int64 [S]."""
    if cp_size == 1:
        return torch.arange(length)
    half_length = length // (2 * cp_size)
    halves = (cp_rank, 2 * cp_size - 1 - cp_rank)
    return torch.cat([torch.arange(half * half_length, (half + 1) * half_length) for half in halves])


def is_stretched(config: ModelConfig, length: int) -> bool:
    """Whether a text of `length` tokens has other rotary frequencies than shorter ones, at all of its positions."""
    scaling = None if config.rope is None else config.rope.scaling
    if scaling is None or scaling.kind != "longrope":
        return False
    assert scaling.original_positions is not None, "the schema asks for it"
    return length > scaling.original_positions


def inverse_frequencies(config: ModelConfig, *, local: bool = False, stretched: bool = False) -> torch.Tensor:
    """Return the rotary frequencies, stretched as the model says: float32 [D / 2], as Hugging Face computes them.

    D is the part of a head that is turned. `local` is for layers with a window that have a base of their own,
    `stretched` is what `is_stretched` says of a text.
    """
    assert config.rope is not None, "the schema asks for it wherever positions are rotary"
    rope, width = config.rope, config.rotary_dim
    exponent = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    if local:
        assert rope.local_base is not None, "the caller asks `has_local_rope`"
        return 1.0 / (rope.local_base**exponent)
    frequencies = 1.0 / (rope.base**exponent)
    if rope.scaling is None:
        return frequencies
    match rope.scaling.kind:
        case "linear":
            return frequencies / rope.scaling.factor
        case "llama3":
            return _llama3_frequencies(frequencies, rope.scaling)
        case "yarn":
            return _yarn_frequencies(frequencies, rope.base, rope.scaling)
        case "longrope":
            factors = rope.scaling.long_factors if stretched else rope.scaling.short_factors
            assert factors is not None, "the schema asks for both"
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.base**exponent)


def _llama3_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    low, high, original = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_positions
    assert low is not None, "the schema asks for all three"
    assert high is not None, "the schema asks for all three"
    assert original is not None, "the schema asks for all three"
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    result = torch.where(wavelength > original / low, frequencies / scaling.factor, frequencies)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, result)


def _yarn_frequencies(frequencies: torch.Tensor, base: float, scaling: RopeScaling) -> torch.Tensor:
    """Leave fast frequencies alone, divide slow ones, blend between them channel by channel (Peng et al. 2023)."""
    original = scaling.original_positions
    assert original is not None, "the schema asks for it"
    width = 2 * len(frequencies)

    def channel(turns: float) -> float:
        """Return the channel that makes `turns` turns within the original context."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = channel(scaling.beta_fast or 32.0), channel(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # a ramp of no width has no slope
    ramp = ((torch.arange(len(frequencies), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _rotary_magnitude(config: ModelConfig, *, local: bool) -> float:
    """Return what cosines and sines are multiplied by: YaRN and LongRoPE make scores larger."""
    scaling = config.rope.scaling if config.rope is not None and not local else None
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "longrope":
        assert scaling.original_positions is not None, "the schema asks for it"
        growth = max(0.0, math.log(scaling.factor)) / math.log(scaling.original_positions)
        return math.sqrt(1 + growth)
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_magnitude(scaling, scaling.mscale) / yarn_magnitude(scaling, scaling.mscale_all_dim)
    return yarn_magnitude(scaling)


def yarn_magnitude(scaling: RopeScaling, mscale: float = 1.0) -> float:
    """Return how much larger attention is made by YaRN for a longer context."""
    return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0


def rotary_table(
    config: ModelConfig, positions: torch.Tensor, *, length: int, local: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines for these positions of a text of some length: float32 [S, D] each.

    `local` is as in `inverse_frequencies`.
    """
    frequencies = inverse_frequencies(config, local=local, stretched=is_stretched(config, length))
    angles = torch.outer(positions.float(), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    magnitude = _rotary_magnitude(config, local=local)
    return angles.cos() * magnitude, angles.sin() * magnitude


def query_scales(config: ModelConfig, positions: torch.Tensor) -> torch.Tensor | None:
    """Return what queries without positions are multiplied by, by their place: float32 [S]; None: by nothing."""
    if (temperature := config.attention_temperature) is None:
        return None
    steps = torch.floor((positions.float() + 1.0) / temperature.tokens)
    return torch.log1p(steps) * temperature.scale + 1.0


def apply_rotary(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate heads [S, B, heads, D] by their positions; cosine and sine are [S, 1, 1, D] or [S, B, 1, D].

    Where these are narrower than a head, only the first channels of the head are turned.
    """
    if (width := cosine.shape[-1]) < x.shape[-1]:
        return torch.cat([apply_rotary(x[..., :width], cosine, sine), x[..., width:]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine
