"""Projections that multiply in float8 with dynamic scales (torchao); the router and the head stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trainshed.errors import MissingExtra
from trainshed.models.layers import Linear, MatmulFunction


def convert_to_float8(projections: Iterable[Linear], *, frozen: bool) -> None:
    """Make projections multiply in float8; backward of `frozen` ones computes no gradient of the weight."""
    try:
        from torchao.float8 import CastConfig, Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
    except ImportError:
        raise MissingExtra.named("fp8", "`precision: fp8`") from None
    config = Float8LinearConfig()
    fast, exact = ScaledMMConfig(use_fast_accum=True), ScaledMMConfig(use_fast_accum=False)
    matmul_config = LinearMMConfig(output=fast, grad_input=exact, grad_weight=exact)
    # A gradient multiplied as if it were an input: in the format of gradients, with exact sums.
    gradient_config = Float8LinearConfig(cast_config_input=CastConfig(target_dtype=torch.float8_e5m2))
    gradient_matmul_config = LinearMMConfig(output=exact, grad_input=exact, grad_weight=exact)

    def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.t(), matmul_config, config)

    def grad_input(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return matmul_with_hp_or_float8_args.apply(grad, weight, gradient_matmul_config, gradient_config)

    def frozen_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _FrozenMatmul.apply(x, weight, matmul, grad_input)

    for module in projections:
        # The kernels need sizes in multiples of 16.
        if not any(size % 16 for size in module.weight.shape):
            module.matmul = frozen_matmul if frozen else matmul


class _FrozenMatmul(torch.autograd.Function):
    """A product whose weight is not trained: its input is not kept, and one product less is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, matmul: MatmulFunction, grad_input: MatmulFunction
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.grad_input = grad_input
        return matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return ctx.grad_input(grads[0], weight), None, None, None
