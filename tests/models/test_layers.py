"""The parts of a layer: a norm with fewer passes, rows that alternate, dropout that knows only sample and position."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from support.models.one_process import one_process_model, token_rows
from support.models.tiny_models import tiny_config
from trainshed.models.decoder import Regularization
from trainshed.models.layers import (
    CounterDropout,
    Linear,
    Norm,
    _SplitBf16Pairs,
    apply_activation,
    linear,
)
from trainshed.recipe.train import TrainSection

CONFIG = tiny_config("llama", norm_eps=0.1)
HIDDEN = CONFIG.hidden


def norm_and_input(dtype: torch.dtype) -> tuple[Norm, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    norm = Norm(HIDDEN, CONFIG).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(HIDDEN, generator=generator))
    return norm, torch.randn(3, 2, HIDDEN, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_of_a_cpu_is_that_of_pytorch(dtype: torch.dtype) -> None:
    norm, x = norm_and_input(dtype)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, expected = norm(x), F.rms_norm(x, (HIDDEN,), norm.weight, CONFIG.norm_eps)
    torch.testing.assert_close(found, expected)
    inputs = [x, norm.weight]
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, direction), torch.autograd.grad(expected, inputs, direction)
    )


def test_gradients_of_the_norm_are_those_of_small_differences() -> None:
    norm, x = norm_and_input(torch.float64)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(normed, (x, norm.weight), fast_mode=True)


def test_an_input_of_zeros_has_a_finite_norm_and_gradient() -> None:
    norm, x = norm_and_input(torch.float32)
    nothing = torch.zeros_like(x, requires_grad=True)
    norm(nothing).sum().backward()
    assert nothing.grad is not None
    torch.testing.assert_close(nothing.grad, (norm.weight / CONFIG.norm_eps**0.5).expand_as(x).detach())


def test_gates_and_ups_alternate_in_the_weight_and_in_the_output() -> None:
    matrix = Linear(HIDDEN, 6, bias=True, gate_up_interleaved=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in matrix.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
    x = torch.randn(4, HIDDEN, generator=generator)
    assert matrix.bias is not None
    gate, up = (F.linear(x, matrix.weight[odd::2], matrix.bias[odd::2]) for odd in (0, 1))
    torch.testing.assert_close(apply_activation(matrix(x), CONFIG, interleaved=True), F.silu(gate) * up)
    gates_first = torch.cat([gate, up], dim=-1)
    torch.testing.assert_close(apply_activation(gates_first, CONFIG, interleaved=False), F.silu(gate) * up)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_pairs_of_bf16_are_split_and_joined_as_words_bit_by_bit(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=generator).to(torch.bfloat16)
    x[0, 0] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, -3e38, float("nan"), 1.0])
    x.requires_grad_()

    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _SplitBf16Pairs.apply(x)

    even, odd = torch.compile(split, backend=backend, fullgraph=True)(x)
    for half, column in ((even, 0), (odd, 1)):
        expected = x.detach()[..., column::2].contiguous()
        assert torch.equal(half.detach().view(torch.int16), expected.view(torch.int16))
    grads = [torch.randn(even.shape, generator=generator).to(torch.bfloat16) for _ in range(2)]
    (joined,) = torch.autograd.grad([even, odd], [x], grads)
    assert torch.equal(joined, torch.stack(grads, dim=-1).flatten(-2))


def test_a_weight_in_a_wider_dtype_gets_its_gradient_in_that_dtype() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, HIDDEN, generator=generator).requires_grad_()
    x = torch.randn(4, 2, HIDDEN, generator=generator).to(torch.bfloat16).requires_grad_()
    grad = torch.randn(4, 2, 6, generator=generator).to(torch.bfloat16)
    expected = F.linear(x, weight.to(torch.bfloat16))
    wanted = torch.autograd.grad(expected, [x, weight], grad)
    out = linear(x, weight)
    assert torch.equal(out, expected)
    grad_x, grad_weight = torch.autograd.grad(out, [x, weight], grad)
    assert torch.equal(grad_x, wanted[0])
    assert grad_weight.dtype == torch.float32
    torch.testing.assert_close(grad_weight, wanted[1])


def test_dropout_keeps_the_mean_and_depends_on_layer_branch_and_seed() -> None:
    x = torch.ones(16, 4, 64)
    samples, positions = torch.arange(4), torch.arange(16)
    dropout = CounterDropout(layer=1, site="mlp", probability=0.25, seed=7)
    dropped = dropout(x, samples, positions)
    assert set(dropped.flatten().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(dropped.mean() - 1) < 5 * (0.25 / 0.75 / x.numel()) ** 0.5
    others = (
        CounterDropout(2, "mlp", 0.25, 7),
        CounterDropout(1, "attention", 0.25, 7),
        CounterDropout(1, "mlp", 0.25, 8),
    )
    assert not any(torch.equal(dropped, other(x, samples, positions)) for other in others)
    # A late part of the sequence, for one of the samples: what a rank with other parts of the batch drops.
    torch.testing.assert_close(dropout(x[8:, 2:3], samples[2:3], positions[8:]), dropped[8:, 2:3], rtol=0, atol=0)


def test_nothing_is_dropped_without_a_probability_or_without_samples() -> None:
    x = torch.ones(2, 2, 4)
    assert CounterDropout(0, "mlp", 0.0, 1)(x, torch.arange(2), torch.arange(2)) is x
    assert CounterDropout(0, "mlp", 0.5, 1)(x, None, torch.arange(2)) is x


def test_compiled_dropout_drops_the_same_and_all_layers_share_its_code() -> None:
    torch.compiler.reset()
    compiler = CompileCounterWithBackend("aot_eager")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, 64, generator=generator, requires_grad=True)
    samples, positions = torch.arange(4) + 2**26, torch.arange(16)
    dropouts = [CounterDropout(layer, site, 0.25, 7) for layer in range(8) for site in ("attention", "mlp")]
    compiled = torch.compile(lambda dropout: dropout(x, samples, positions), backend=compiler, fullgraph=True)
    for dropout in dropouts:
        eager, captured = dropout(x, samples, positions), compiled(dropout)
        assert torch.equal(captured, eager)
        found, expected = (torch.autograd.grad(each.sum(), x)[0] for each in (captured, eager))
        assert torch.equal(found, expected)
    assert compiler.frame_count == 1


def test_dropout_is_of_the_residual_stream_and_its_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention weights are never dropped by our own engine; what other engines drop is said in the same text."""
    given: list[dict[str, object]] = []
    attend = F.scaled_dot_product_attention

    def watch(*arguments: torch.Tensor, **options: object) -> torch.Tensor:
        given.append(options)
        return attend(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    model = one_process_model(CONFIG, length=8, regularization=Regularization(dropout=0.5))
    model.stages[0](token_rows(CONFIG, 1, 8), None, torch.tensor([0]))
    assert given
    assert not any("dropout_p" in options for options in given)
    text = TrainSection.model_fields["dropout"].description
    assert text == "Dropout of the residual stream (Megatron and NeMo: of attention too)"
