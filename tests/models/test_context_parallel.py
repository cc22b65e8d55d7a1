"""Attention in parts gives what attention over the whole sequence gives; collectives start before what hides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from trainshed.models import context_parallel
from trainshed.models.attention import context_parallel_positions
from trainshed.models.context_parallel import (
    attend_parts,
    attend_parts_backward,
    gradients_of_others,
    gradients_of_own,
)

DEVICES = [
    pytest.param("cpu", torch.float64, 1e-12),
    pytest.param(
        "cuda",
        torch.bfloat16,
        2e-2,
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
    ),
]


def whole_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal attention of [L, B, heads, D] with all scores, in float64."""
    ratio = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(ratio, dim=2) for x in (key, value))
    heads = [x.double().permute(1, 2, 0, 3) for x in (query, key, value)]
    return F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True, scale=scale).permute(2, 0, 1, 3)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((got.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("device", "dtype", "bound"), DEVICES)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_all_ranks_are_attention_over_the_whole_sequence(
    device: str, dtype: torch.dtype, bound: float, size: int, scale: float | None
) -> None:
    length, rows, width = (16, 2, 8) if device == "cpu" else (2048, 2, 128)
    torch.manual_seed(0)
    query, key, value, grad = (
        torch.randn(length, rows, heads, width, device=device).to(dtype) for heads in (4, 2, 2, 4)
    )
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    expected = whole_attention(leaves[0], leaves[1], leaves[2], scale)
    expected.backward(grad.double())
    columns = [context_parallel_positions(length, size, rank).to(device) for rank in range(size)]
    gathered = torch.cat([torch.cat([key[at], value[at]], dim=2) for at in columns])
    of_gathered = torch.zeros_like(gathered, dtype=torch.float64)
    gradients = [torch.zeros_like(x, dtype=torch.float64) for x in (query, key, value)]
    for rank, at in enumerate(columns):
        own = query[at], key[at], value[at]
        out, logsumexp = attend_parts(*own, gathered, size, rank, scale)
        assert error(out, expected.detach()[at]) <= bound
        of_queries, others = gradients_of_others(grad[at], own[0], gathered, out, logsumexp, size, rank, scale)
        of_gathered += others
        for gradient, part in zip(gradients, gradients_of_own(grad[at], *own, out, logsumexp, scale), strict=True):
            gradient[at] += part
        gradients[0][at] += of_queries
    for at, sent in zip(columns, of_gathered.split(length // size), strict=True):
        for gradient, part in zip(gradients[1:], sent.chunk(2, dim=2), strict=True):
            gradient[at] += part
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert leaf.grad is not None
        assert error(gradient, leaf.grad.double()) <= bound


class _Calls(TorchDispatchMode):
    """Notes kernels and collectives in the order in which they are queued; a collective of one process is a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[-1].split(".")[0]
        if any(word in name for word in ("attention", "reduce_scatter", "wait_tensor")):
            self.names.append(name.removeprefix("_scaled_dot_product_flash_"))
        if name == "reduce_scatter_tensor":
            return args[0].chunk(args[2])[0].clone()
        return func(*args, **(kwargs or {}))


def test_own_keys_are_attended_to_before_anything_waits_for_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_parallel, "may_be_in_flight", lambda x: True)  # as on a GPU
    query, key, value = (torch.randn(8, 1, 2, 8) for _ in range(3))
    gathered = torch.randn(16, 1, 4, 8)
    with _Calls() as forward:
        out, logsumexp = attend_parts._init_fn(query, key, value, gathered, 2, 1, None)
    kernel, backward_kernel = "attention_for_cpu", "attention_for_cpu_backward"
    assert forward.names == [kernel, "wait_tensor", kernel, kernel]
    with _Calls() as backward:
        attend_parts_backward._init_fn(out, query, key, value, gathered, out, logsumexp, "cp", 2, 1, None)
    others = ["wait_tensor", backward_kernel, backward_kernel]
    assert backward.names == [*others, "reduce_scatter_tensor", backward_kernel, "wait_tensor"]
