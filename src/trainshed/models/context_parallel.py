"""Causal attention over a sequence that is cut over cp ranks; its collectives run while kernels do.

A rank holds two parts of the sequence, one early and one late (`context_parallel_positions`). Its own tokens are in
order, so its queries attend to its own keys causally, as in a sequence by themselves. Keys of other ranks are then
either before all queries of a part or after all of them. So there are three products with plain masks, which every
kernel has:

    own         all queries over the rank's own keys, causal, while keys and values of the others arrive
    early part  the early queries over the early parts of the ranks before, no mask
    late part   the late queries over these, and over both parts of the ranks after, no mask

The results are merged by their logsumexp. Backward calls the same kernels' backward with the merged output and its
logsumexp, from which each computes its own part of the softmax. The gradients of the others' keys and values come
first, and are on their way home while the gradients of the own ones are computed.

A collective and what hides it are inside one operation, because a compiler orders operations by memory. On a GPU the
kernel is cuDNN's, elsewhere PyTorch's flash attention for CPUs, where collectives are waited for at once.

Shapes: S tokens of this rank, P = S / 2 tokens of a part, B sequences, N heads, G key/value groups, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from trainshed.models.collectives import AxisGroup, may_be_in_flight

_aten, _comm = torch.ops.aten, torch.ops._c10d_functional


def supports_context_attention(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a kernel that gives such heads' logsumexp and takes it back in backward."""
    if device.type != "cuda":
        return device.type == "cpu"
    return (
        torch.version.cuda is not None
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and not torch.are_deterministic_algorithms_enabled()  # cuDNN's backward is not
    )


def context_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cp: AxisGroup, scale: float | None
) -> torch.Tensor:
    """Attend from this rank's queries [S, B, N, D] to keys and values [S, B, G, D] of all cp ranks: [S, B, N, D]."""
    return _ContextAttention.apply(query, key, value, cp.name, cp.size, cp.rank, scale)


@torch._dynamo.allow_in_graph
class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: str,
        size: int,
        rank: int,
        scale: float | None,
    ) -> torch.Tensor:
        gathered = start_gather(torch.cat([key, value], dim=2), size, group)
        out, logsumexp = attend_parts(query, key, value, gathered, size, rank, scale)
        ctx.save_for_backward(query, key, value, gathered, out, logsumexp)
        ctx.group, ctx.size, ctx.rank, ctx.scale = group, size, rank, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = attend_parts_backward(grads[0], *ctx.saved_tensors, ctx.group, ctx.size, ctx.rank, ctx.scale)
        return (*gradients, None, None, None, None)


@torch.library.custom_op("trainshed::start_gather", mutates_args=())
def start_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Begin to all_gather x on dim 0; who uses the result waits for it first (`wait_tensor`)."""
    gathered = _comm.all_gather_into_tensor(x.contiguous(), size, group)
    return gathered if may_be_in_flight(x) else _comm.wait_tensor(gathered)


@start_gather.register_fake
def _(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return x.new_empty((size * x.shape[0], *x.shape[1:]))


@torch.library.custom_op("trainshed::attend_parts", mutates_args=())
def attend_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gathered: torch.Tensor,
    size: int,
    rank: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the own keys, then to those in `gathered` [cp · S, B, 2G, D]: the output [S, B, N, D], its logsumexp.

    `gathered` holds keys and values of all ranks and may still be arriving.
    """
    queries = _heads_first(query)
    out, logsumexp = _attend(queries, _heads_first(key), _heads_first(value), causal=True, scale=scale)
    others = _keys_of_others(_comm.wait_tensor(gathered), size, rank)
    for part, keys, values in _part_keys(others, query.shape[0], rank):
        part_out, part_logsumexp = _attend(queries[:, :, part], keys, values, causal=False, scale=scale)
        _merge_part(out[:, :, part], logsumexp[:, :, part], part_out, part_logsumexp)
    return out.permute(2, 0, 1, 3).contiguous(), logsumexp.contiguous()


@attend_parts.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gathered: torch.Tensor,
    size: int,
    rank: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, logsumexp = _attend(*(_heads_first(x) for x in (query, key, value)), causal=True, scale=scale)
    return query.new_empty(query.shape), logsumexp.new_empty(logsumexp.shape)


@torch.library.custom_op("trainshed::attend_parts_backward", mutates_args=())
def attend_parts_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gathered: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    group: str,
    size: int,
    rank: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `attend_parts`, of queries, keys and values; other ranks' gradients are added."""
    of_queries, of_gathered = gradients_of_others(grad, query, gathered, out, logsumexp, size, rank, scale)
    arriving = _comm.reduce_scatter_tensor(of_gathered, "sum", size, group)
    if not may_be_in_flight(of_gathered):
        arriving = _comm.wait_tensor(arriving)
    query_grad, *own = gradients_of_own(grad, query, key, value, out, logsumexp, scale)
    from_others = _comm.wait_tensor(arriving).split(key.shape[2], dim=2)
    key_grad, value_grad = (mine + theirs for mine, theirs in zip(own, from_others, strict=True))
    return query_grad + of_queries, key_grad, value_grad


@attend_parts_backward.register_fake
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gathered: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    group: str,
    size: int,
    rank: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def gradients_of_others(
    grad: torch.Tensor,
    query: torch.Tensor,
    gathered: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    size: int,
    rank: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what attending to other ranks' keys gives: gradients of queries, and of `gathered` [cp · S, B, 2G, D]."""
    others = _keys_of_others(_comm.wait_tensor(gathered), size, rank)
    of_queries, of_others = torch.zeros_like(query, memory_format=torch.contiguous_format), torch.zeros_like(others)
    grad, queries, out = _heads_first(grad), _heads_first(query), _heads_first(out)
    for part, keys, values in _part_keys(others, query.shape[0], rank):
        part_grads = _attend_backward(
            grad[:, :, part],
            queries[:, :, part],
            keys,
            values,
            out[:, :, part],
            logsumexp[:, :, part].contiguous(),
            causal=False,
            scale=scale,
        )
        query_grad, key_grad, value_grad = (x.permute(2, 0, 1, 3) for x in part_grads)
        of_queries[part] = query_grad
        of_others[: len(key_grad)] += torch.cat([key_grad, value_grad], dim=2)
    return of_queries, _gradient_of_gathered(of_others, gathered, size, rank)


def gradients_of_own(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """Return what attending to the own keys gives: gradients of queries, keys and values."""
    grad, query, key, value, out = (_heads_first(x) for x in (grad, query, key, value, out))
    gradients = _attend_backward(grad, query, key, value, out, logsumexp, causal=True, scale=scale)
    return tuple(gradient.permute(2, 0, 1, 3) for gradient in gradients)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """View [S, B, heads, D] as kernels take it: [B, heads, S, D]."""
    return x.permute(1, 2, 0, 3)


def _keys_of_others(gathered: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Return keys and values of other ranks that this rank's queries see: early parts of ranks before it come first.

    The late parts of those are after all of this rank's tokens. No mask is needed, so their order does not matter.
    """
    ranks = gathered.unflatten(0, (size, 2, -1))  # [cp, 2, P, B, 2G, D]
    return torch.cat([ranks[:rank, 0].flatten(0, 1), ranks[rank + 1 :].flatten(0, 2)])


def _gradient_of_gathered(of_others: torch.Tensor, gathered: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Put the gradient of `_keys_of_others` where they came from; what was not used has none."""
    gradient = gathered.new_zeros(gathered.shape)
    ranks = gradient.unflatten(0, (size, 2, -1))
    before = rank * ranks.shape[2]
    ranks[:rank, 0] = of_others[:before].view_as(ranks[:rank, 0])
    ranks[rank + 1 :] = of_others[before:].view_as(ranks[rank + 1 :])
    return gradient


def _part_keys(others: torch.Tensor, tokens: int, rank: int) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Return each part of the queries that sees keys of others, with these keys and values: [B, G, keys, D]."""
    part = tokens // 2
    pairs = []
    for queries, keys in ((slice(0, part), others[: rank * part]), (slice(part, tokens), others)):
        if len(keys):
            key, value = keys.chunk(2, dim=2)
            pairs.append((queries, _heads_first(key), _heads_first(value)))
    return pairs


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from [B, N, Q, D] to [B, G, K, D]; also returns the logsumexp of the scores, [B, N, Q] or [B, N, Q, 1]."""
    if query.is_cuda:
        out, logsumexp, *_ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        return out, logsumexp
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)


def _attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `_attend`; `out` and `logsumexp` may be those of more keys than these."""
    if query.is_cuda:
        no_seed = torch.zeros((), dtype=torch.int64, device=query.device)  # there is no dropout
        lengths = query.shape[2], key.shape[2]
        return _aten._scaled_dot_product_cudnn_attention_backward(
            grad,
            query,
            key,
            value,
            out,
            logsumexp,
            no_seed,
            no_seed,
            None,
            None,
            None,
            *lengths,
            0.0,
            causal,
            scale=scale,
        )
    groups = key.shape[1]
    key, value = (x.repeat_interleave(query.shape[1] // groups, dim=1) for x in (key, value))
    of_query, *of_heads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, logsumexp, 0.0, causal, scale=scale
    )
    of_key, of_value = (x.unflatten(1, (groups, -1)).sum(2) for x in of_heads)
    return of_query, of_key, of_value


def _merge_part(
    out: torch.Tensor, logsumexp: torch.Tensor, other_out: torch.Tensor, other_logsumexp: torch.Tensor
) -> None:
    """Add to attention what it gave over other keys, in place."""
    (_compiled_merge() if out.is_cuda else _merge)(out, logsumexp, other_out, other_logsumexp)


def _merge(out: torch.Tensor, logsumexp: torch.Tensor, other_out: torch.Tensor, other_logsumexp: torch.Tensor) -> None:
    share = torch.sigmoid(other_logsumexp - logsumexp)
    share = share if share.dim() == out.dim() else share[..., None]
    out.copy_(torch.lerp(out.to(share.dtype), other_out.to(share.dtype), share))
    logsumexp.copy_(torch.logaddexp(logsumexp, other_logsumexp))


@cache
def _compiled_merge() -> Callable[..., None]:
    """One kernel on a GPU; compiled on first use."""
    return torch.compile(_merge, dynamic=True)


ATTEND_PARTS = torch.ops.trainshed.attend_parts.default
"""For selective recompute, which keeps its results."""
