"""Selective recompute: which results of a layer's forward pass are kept for backward.

Matrix products, attention and collectives are kept, whichever kernels compute them; everything else is computed again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trainshed.models.context_parallel import ATTEND_PARTS
from trainshed.models.quantization import QUANTIZED_LINEAR

_aten, _comm = torch.ops.aten, torch.ops._c10d_functional
_SAVED_OPS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_mm.default,
    _aten._flash_attention_forward.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _comm.reduce_scatter_tensor.default,
    _comm.all_to_all_single.default,
    torch.ops.higher_order.flex_attention,
    ATTEND_PARTS,
    QUANTIZED_LINEAR,
)


def selective_checkpoint_contexts(cheap_products: frozenset[int] = frozenset()) -> Any:
    """Selective recompute: save the results of matrix products, attention and collectives; recompute the rest.

    Products whose inner size is among the `cheap_products` are recomputed too: they are as large as those of whole
    weights and cost next to nothing.
    """
    return create_selective_checkpoint_contexts(partial(_checkpoint_policy, cheap_products))


def _checkpoint_policy(cheap_products: frozenset[int], context: Any, func: Any, *args: Any, **_: Any) -> Any:
    if func not in _SAVED_OPS or (func is _aten.mm.default and args[0].shape[1] in cheap_products):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def selective_checkpoint_contexts_beside_hooks(cheap_products: frozenset[int] = frozenset()) -> Any:
    """The same for blocks in which FSDP gathers experts: its hooks run other operations the second time."""
    return tuple(_OnlySavedOps(mode) for mode in selective_checkpoint_contexts(cheap_products))


class _OnlySavedOps(TorchDispatchMode):
    """Hides all operations but the saved ones from a selective checkpoint, which refuses another number of them."""

    supports_higher_order_operators = True

    def __init__(self, counting: Any) -> None:
        super().__init__()
        self.counting = counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAVED_OPS:
            return self.counting.__torch_dispatch__(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))
