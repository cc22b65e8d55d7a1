"""What keeps the documents of a packed row apart: attention, positions and loss never cross from one into the next.

One tensor says it all. `document_starts` [B, L] holds for each column of a row the column at which its document begins.
A query at column q sees the keys from `document_starts[q]` to q, and its position is q - `document_starts[q]`. (Which
labels count follows from it too; see `SampleRows.labels`.) The column at which a document begins never decreases along
a row, and neither does the first key that a sliding window lets through; so the keys that a query sees are one
interval, and both ends of it only move to the right.

On a GPU the interval becomes a block mask of FlexAttention, elsewhere a plain mask. FlexAttention was measured beside
flash attention with variable lengths by `benchmarks/document_attention_gpu.py`: about equal at short documents, faster
at long ones, and it needs to know neither the number nor the lengths of documents, nor another kernel for windows and
context parallel.

Shapes: L whole row, S columns of this context-parallel rank, B rows of a micro-batch, Q queries of a mask, K its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainshed.models.collectives import AxisGroup

AttentionMask = torch.Tensor | BlockMask
"""Which keys each query sees: bool [B, 1, Q, K], or the same as blocks."""
_BLOCK = 128
_FLEX_MIN_HEAD_DIM = 16


def document_positions(document_starts: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the position of each of these columns [S] within its document: int64 [S, B]."""
    return columns[:, None] - document_starts[:, columns].t()


def has_block_attention(device: torch.device, head_dim: int) -> bool:
    """Whether attention under a mask is FlexAttention's here."""
    return device.type == "cuda" and head_dim >= _FLEX_MIN_HEAD_DIM


def document_masks(
    document_starts: torch.Tensor, cp: AxisGroup, window: int | None, *, blocks: bool, chunk: int | None = None
) -> tuple[AttentionMask, ...]:
    """Return one mask for each contiguous part of this rank's queries: one, or with context parallel two.

    The parts are those of `context_parallel_positions`. The keys of a part are all columns up to its last query. With
    `blocks` a mask is one for FlexAttention (`has_block_attention`). Chunks of attention begin with each document.
    """
    length = document_starts.shape[1]
    if cp.size == 1:
        return (_mask(document_starts, 0, length, window, chunk, blocks),)
    part = length // (2 * cp.size)
    numbers = (cp.rank, 2 * cp.size - 1 - cp.rank)
    ends = ((number * part, (number + 1) * part) for number in numbers)
    return tuple(_mask(document_starts, *begin_end, window, chunk, blocks) for begin_end in ends)


def _mask(
    document_starts: torch.Tensor, begin: int, end: int, window: int | None, chunk: int | None, blocks: bool
) -> AttentionMask:
    """Return the mask of the queries in columns [begin, end) over the keys in columns [0, end)."""
    columns = torch.arange(begin, end, device=document_starts.device)
    first_key = document_starts[:, begin:end]
    if window is not None:
        first_key = torch.maximum(first_key, columns - (window - 1))
    if chunk is not None:
        first_key = columns - (columns - first_key) % chunk
    if blocks:
        return _block_mask(first_key.contiguous(), begin, end)
    keys = torch.arange(end, device=document_starts.device)
    return ((keys >= first_key[..., None]) & (keys <= columns[:, None]))[:, None]


def _block_mask(first_key: torch.Tensor, begin: int, end: int) -> BlockMask:
    """Return the mask as blocks; `first_key` [B, Q] is the first key that each query sees.

    `create_block_mask` would evaluate every element. Intervals of which both ends only move to the right need the first
    and the last query of a block alone.
    """
    queries, device = end - begin, first_key.device
    block = torch.arange(-(-queries // _BLOCK), device=device) * _BLOCK
    last_row = (block + _BLOCK - 1).clamp(max=queries - 1)
    lowest, highest = first_key[:, block, None], first_key[:, last_row, None]  # [B, blocks, 1]
    first_query, last_query = block[:, None] + begin, last_row[:, None] + begin
    key_block = torch.arange(-(-end // _BLOCK), device=device) * _BLOCK
    last_key = (key_block + _BLOCK - 1).clamp(max=end - 1)
    whole = (key_block >= highest) & (key_block + _BLOCK - 1 <= first_query)
    partial = (last_key >= lowest) & (key_block <= last_query) & ~whole

    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k >= first_key[b, q]) & (k <= q + begin)

    def indices(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = blocks.sum(-1, dtype=torch.int32)[:, None]
        return count, torch.argsort((~blocks).to(torch.int8), stable=True).to(torch.int32)[:, None]

    return BlockMask.from_kv_blocks(
        *indices(partial), *indices(whole), BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(queries, end)
    )


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from [B, heads, Q, D] to [B, groups, K, D] under a block mask; `scale`, `soft_cap`: of the scores.

    With `sinks` [heads] a score of each head takes part in its softmax. The kernel gives the logarithm of its own sum;
    what it attended to becomes less by the share of the sink: exp(lse) / (exp(lse) + exp(sink)).
    """
    # Blocks of the decoder are compiled as a whole; outside of them the kernel is compiled by itself.
    function: Callable[..., Any] = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()

    def capped(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        assert soft_cap is not None, "only used with one"
        return soft_cap * torch.tanh(score / soft_cap)

    score_mod = None if soft_cap is None else capped
    options: dict[str, Any] = {"score_mod": score_mod, "block_mask": mask, "scale": scale, "enable_gqa": True}
    if sinks is None:
        return function(query, key, value, **options)
    out, lse = function(query, key, value, return_lse=True, **options)
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return (out * share[..., None]).to(out.dtype)


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)
