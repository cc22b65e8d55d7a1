"""Selective recompute repeats no matrix product and no attention, whichever kernels compute them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from trainshed.engines.torch.float8 import convert_to_float8
from trainshed.models import attention
from trainshed.models.attention import AttentionRule, causal_attention, supports_flash
from trainshed.models.collectives import ParallelAxes
from trainshed.models.decoder import DecoderLayer, Regularization
from trainshed.models.layers import Linear
from trainshed.models.recompute import selective_checkpoint_contexts
from trainshed.recipe import ModelConfig
from trainshed.recipe.layout import Recompute

CONFIG = ModelConfig.model_validate(
    {
        "family": "llama",
        "layers": 1,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 128,
        "vocab_size": 256,
        "max_positions": 64,
        "rope": {"base": 10000.0},
    }
)
LENGTH, ROWS = 32, 2


class CountedOps(TorchDispatchMode):
    """Counts operations by name."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def products_in_backward(recompute: Recompute, *, fp8: bool, captured: bool) -> int:
    """The matrix products of backward through a layer."""
    torch.manual_seed(0)
    layer = DecoderLayer(CONFIG, ParallelAxes(), Regularization(), 0, recompute)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    if fp8:
        convert_to_float8([module for module in layer.modules() if isinstance(module, Linear)])
    if captured:
        layer.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(LENGTH, ROWS, CONFIG.hidden, dtype=torch.bfloat16, requires_grad=True)
    out, _ = layer(x, None, None, None, torch.arange(LENGTH))
    with CountedOps() as ops:
        out.float().square().sum().backward()
    torch.compiler.reset()
    return ops.counts["aten.mm.default"] + ops.counts["aten._scaled_mm.default"]


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, when it loads its compiler
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_products_are_kept_in_every_precision(fp8: bool, captured: bool) -> None:
    plain, selective = (products_in_backward(each, fp8=fp8, captured=captured) for each in ("none", "selective"))
    assert selective == plain == 8  # two for each of four projections


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, when it loads its compiler
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_without_selection_products_are_repeated(fp8: bool, captured: bool) -> None:
    assert products_in_backward("full", fp8=fp8, captured=captured) > 8


@pytest.mark.parametrize(("queries", "window"), [(128, 48), (64, None), (64, 48)], ids=["window", "cp", "both"])
def test_attention_with_a_window_or_over_gathered_keys_is_kept(
    queries: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device the kernels of a GPU run without computing anything."""
    monkeypatch.setattr(attention, "supports_flash", lambda *_: True)
    inputs = meta_inputs(queries)
    with CountedOps() as ops:
        attend = partial(causal_attention, rule=AttentionRule(window))
        out = checkpoint(attend, *inputs, use_reentrant=False, context_fn=selective_checkpoint_contexts)
        out.sum().backward()
    assert ops.counts["aten._flash_attention_forward.default"] == 1
    assert ops.counts["aten._flash_attention_backward.default"] == 1


def meta_inputs(queries: int) -> list[torch.Tensor]:
    """Queries, keys and values without memory."""
    shapes = [(queries, 1, 4, 64), (128, 1, 2, 64), (128, 1, 2, 64)]
    return [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def test_flash_attention_is_for_gpus_of_nvidia_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert supports_flash(64, torch.bfloat16, cuda)
    assert not supports_flash(64, torch.bfloat16, torch.device("cpu"))
    assert not supports_flash(64, torch.float32, cuda)
    assert not supports_flash(20, torch.bfloat16, cuda)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not supports_flash(64, torch.bfloat16, cuda)
