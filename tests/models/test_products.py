"""Products that are one operation with their tensor-parallel collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainshed.models import products


class _OneRank(TorchDispatchMode):
    """Collectives of one process are copies."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[-1].split(".")[0]
        if name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
            return args[0].clone()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [products._GatherProduct, products._ProductScatter])
@pytest.mark.parametrize("copied", [False, True], ids=["cast", "with a copy"])
def test_on_one_rank_they_are_plain_products(function: Any, copied: bool) -> None:
    torch.manual_seed(0)
    given, master = torch.randn(4, 2, 8), torch.randn(6, 8)
    weights = [master.clone().requires_grad_() for _ in range(2)]
    inputs = [given.bfloat16().requires_grad_() for _ in range(2)]
    grad = torch.randn(4, 2, 6).bfloat16()
    copy = master.bfloat16() if copied else None
    with _OneRank():
        out = function.apply(inputs[0], weights[0], copy, "tp", 1)
        out.backward(grad)
    expected = products.linear(inputs[1], weights[1], copy)
    expected.backward(grad)
    assert torch.equal(out, expected)
    for ours, plain in ((inputs[0], inputs[1]), (weights[0], weights[1])):
        assert ours.grad is not None
        assert plain.grad is not None
        assert ours.grad.dtype == plain.grad.dtype
        assert torch.equal(ours.grad, plain.grad)
