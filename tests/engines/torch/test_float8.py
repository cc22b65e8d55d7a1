"""Products in float8 are torchao's, and so are their gradients; a master weight gets its gradient in its own dtype."""

from __future__ import annotations

import pytest
import torch
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

from trainshed.engines.torch.float8 import convert_to_float8
from trainshed.models.layers import Linear

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own, when it loads its compiler


def by_torchao(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    fast, exact = ScaledMMConfig(use_fast_accum=True), ScaledMMConfig(use_fast_accum=False)
    config = LinearMMConfig(output=fast, grad_input=exact, grad_weight=exact)
    return matmul_with_hp_or_float8_args.apply(x, weight.to(x.dtype).t(), config, Float8LinearConfig())


@pytest.fixture
def product() -> tuple[Linear, torch.Tensor, torch.Tensor]:
    """A projection with fp32 weights, its input and the gradient of its output, in bf16."""
    generator = torch.Generator().manual_seed(0)
    projection = Linear(64, 32, bias=False)
    with torch.no_grad():
        projection.weight.copy_(torch.randn(32, 64, generator=generator) * 0.05)
    x = (torch.randn(8, 2, 64, generator=generator) * 3).to(torch.bfloat16).requires_grad_()
    return projection, x, torch.randn(8, 2, 32, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("captured", [False, True])
def test_product_and_gradients_are_those_of_torchao(
    product: tuple[Linear, torch.Tensor, torch.Tensor], captured: bool
) -> None:
    projection, x, grad = product
    expected = by_torchao(x, projection.weight)
    wanted_x, wanted_weight = torch.autograd.grad(expected, [x, projection.weight], grad)
    convert_to_float8([projection])
    if captured:
        projection.compile(backend="aot_eager", fullgraph=True)
    out = projection(x)
    assert torch.equal(out, expected)
    grad_x, grad_weight = torch.autograd.grad(out, [x, projection.weight], grad)
    assert torch.equal(grad_x, wanted_x)
    assert grad_weight.dtype == torch.float32
    # torchao's was rounded to bf16.
    torch.testing.assert_close(grad_weight.to(torch.bfloat16), wanted_weight.to(torch.bfloat16))
    torch.compiler.reset()


def test_a_frozen_weight_has_no_gradient_and_its_input_is_not_kept(
    product: tuple[Linear, torch.Tensor, torch.Tensor],
) -> None:
    projection, x, grad = product
    expected = by_torchao(x, projection.weight)
    (wanted,) = torch.autograd.grad(expected, [x], grad)
    projection.requires_grad_(False)
    convert_to_float8([projection])
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: (kept.append(saved.shape), saved)[1], lambda t: t):
        out = projection(x)
    assert torch.equal(out, expected)
    assert torch.equal(torch.autograd.grad(out, [x], grad)[0], wanted)
    assert kept == [projection.weight.shape, torch.Size([])]


def test_values_beyond_the_range_are_cut_off_and_zeros_stay_zeros() -> None:
    projection = Linear(16, 16, bias=False)
    with torch.no_grad():
        projection.weight.copy_(torch.eye(16))
    convert_to_float8([projection])
    x = torch.zeros(16, 16, dtype=torch.bfloat16)
    assert torch.equal(projection(x), x)
    x[0, 0], x[1, 1] = 3e38, -3e38
    assert torch.equal(projection(x), x)


def test_sizes_that_are_no_multiples_of_16_stay_as_they_are() -> None:
    odd = Linear(24, 16, bias=False)
    before = odd.matmul
    convert_to_float8([odd])
    assert odd.matmul is before
