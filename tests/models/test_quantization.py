"""Frozen weights in 8 and 4 bits: torchao's codes, bounded errors, products that keep no whole weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainshed.models import quantization
from trainshed.models.quantization import NF4_LEVELS, QuantizedWeight, dequantize_rows, quantize_rows


def random_weight(rows: int = 32, columns: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def test_the_codes_of_nf4_are_those_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.dtypes import to_nf4

    weight = random_weight(64, 512)
    theirs = to_nf4(weight, block_size=64, scaler_block_size=256)
    codes, scales = quantize_rows(weight, "nf4")
    # They quantise the scales as well, to 8 bits of the largest among 256 of them.
    ours, other = dequantize_rows(codes, scales, torch.float32), theirs.get_original_weight()
    assert float((ours - other).norm() / weight.norm()) < 0.02
    assert float((ours - weight).norm()) < float((other - weight).norm())
    # Their table has four digits. With it every code is the same.
    torch.testing.assert_close(theirs.nf4, torch.tensor(NF4_LEVELS), rtol=0.0, atol=5.1e-5)
    monkeypatch.setattr(quantization, "NF4_LEVELS", tuple(theirs.nf4.tolist()))
    assert torch.equal(quantize_rows(weight, "nf4")[0].flatten(), theirs.quantized_data)


def test_int8_is_off_by_half_a_step_at_most() -> None:
    weight = random_weight()
    codes, scales = quantize_rows(weight, "int8")
    assert codes.dtype == torch.int8
    error = (dequantize_rows(codes, scales, torch.float32) - weight).abs()
    assert bool((error <= weight.abs().amax(1, keepdim=True) / 254 * 1.0001).all())
    largest = weight.abs().argmax(1)
    exact = dequantize_rows(codes, scales, torch.float32)[torch.arange(len(weight)), largest]
    torch.testing.assert_close(exact, weight[torch.arange(len(weight)), largest])


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_rows_of_zeros_stay_zeros(kind: str) -> None:
    weight = random_weight()
    weight[3] = 0.0
    codes, scales = quantize_rows(weight, kind)  # type: ignore[arg-type]
    assert torch.equal(dequantize_rows(codes, scales, torch.float32)[3], torch.zeros(256))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_product_and_its_gradient_are_those_of_the_dequantised_weight(kind: str, dtype: torch.dtype) -> None:
    held = QuantizedWeight(kind, 32, 256)  # type: ignore[arg-type]
    held.store(torch.arange(32), random_weight(), 0)
    weight = held.dequantize(dtype)
    x = torch.randn(5, 3, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, actual = F.linear(one, weight), held.matmul(other)
    assert torch.equal(actual, expected)
    expected.square().sum().backward()
    actual.square().sum().backward()
    assert other.grad is not None
    assert torch.equal(other.grad, one.grad)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_backward_keeps_no_weight_in_full_precision(kind: str) -> None:
    held = QuantizedWeight(kind, 32, 256)  # type: ignore[arg-type]
    held.store(torch.arange(32), random_weight(), 0)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        held.matmul(torch.randn(7, 256, requires_grad=True))
    assert {tensor.data_ptr() for tensor in kept} == {held.codes.data_ptr(), held.scales.data_ptr()}


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_columns_cut_over_ranks_are_those_of_the_whole(kind: str) -> None:
    weight, rows = random_weight(), torch.arange(32)
    whole, parts = QuantizedWeight(kind, 32, 256), [QuantizedWeight(kind, 32, 128) for _ in range(2)]  # type: ignore[arg-type]
    squares = whole.store(rows, weight, 0)
    cut = [part.store(rows, weight, 128 * number) for number, part in enumerate(parts)]
    assert torch.equal(
        torch.cat([part.dequantize(torch.float32) for part in parts], 1), whole.dequantize(torch.float32)
    )
    for number in range(2):
        torch.testing.assert_close(cut[0][number] + cut[1][number], squares[number])
    relative = float((squares[0] / squares[1]).sqrt())
    assert {"int8": 0.003, "nf4": 0.07}[kind] < relative < {"int8": 0.02, "nf4": 0.12}[kind]
