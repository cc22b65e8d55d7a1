"""Experts against plain formulas in float64: routing, weights of the chosen, losses of the router, permutations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from support.models.tiny_models import tiny_config
from trainshed.models.collectives import ParallelAxes
from trainshed.models.moe import MoE, inverse_permutation, permute_rows

LENGTH, BATCH, EXPERTS, TOP_K = 10, 3, 4, 2
BALANCE, Z = 0.3, 0.7


def expert_mlp(seed: int = 0, *, balance: float = 0.0, z: float = 0.0, **moe: Any) -> MoE:
    """One expert block with random weights in float64."""
    config = tiny_config("mixtral", moe={"experts": EXPERTS, "top_k": TOP_K, "ffn": 24} | moe)
    mlp = MoE(config, ParallelAxes(), balance_loss=balance, z_loss=z).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 0.3)
    return mlp


def activations(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, BATCH, 32, generator=generator, dtype=torch.float64).requires_grad_()


def router(mlp: MoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normed tokens [S, B, H], their logits and their probabilities [S, B, E]."""
    normed = F.rms_norm(x, (x.shape[-1],), mlp.norm.weight, mlp.config.norm_eps)
    logits = normed @ mlp.router.weight.t()
    return normed, logits, logits.softmax(-1)


def every_expert_for_every_token(mlp: MoE, x: torch.Tensor) -> torch.Tensor:
    """The mixture without any routing: all experts see all tokens, and what was not chosen weighs nothing."""
    normed, _, probabilities = router(mlp, x)
    kept = probabilities >= probabilities.topk(mlp.moe.top_k).values[..., -1:]
    weights = torch.where(kept, probabilities, 0.0)
    if mlp.moe.normalize_top_k:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = mlp.experts.gate_up[expert, 0::2], mlp.experts.gate_up[expert, 1::2]
        inner = F.silu(normed @ gate.t()) * (normed @ up.t())
        out = out + weights[..., expert, None] * (inner @ mlp.experts.down[expert].t())
    return out


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_the_mixture_and_its_gradients_are_those_of_the_plain_formula(top_k: int, normalize: bool) -> None:
    mlp, x = expert_mlp(top_k=top_k, normalize_top_k=normalize), activations()
    inputs = [x, mlp.norm.weight, mlp.router.weight, mlp.experts.gate_up, mlp.experts.down]
    found, _ = mlp(x, None)
    expected = every_expert_for_every_token(mlp, x)
    torch.testing.assert_close(found, expected)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, direction), torch.autograd.grad(expected, inputs, direction)
    )


def test_nothing_is_dropped_when_all_tokens_want_the_same_experts() -> None:
    mlp = expert_mlp()
    with torch.no_grad():
        # Every token looks alike to the router, so two experts get all of them and two get none.
        x = activations().detach().abs() + 1.0
        mlp.norm.weight.fill_(1.0)
        mlp.router.weight.copy_(torch.tensor([2.0, -1.0, 1.0, -2.0])[:, None].expand(-1, 32))
        mlp.router.weight.mul_(0.1)
        found, _ = mlp(x, None)
        assert {int(expert) for expert in router(mlp, x)[2].topk(TOP_K).indices.flatten()} == {0, 2}
        torch.testing.assert_close(found, every_expert_for_every_token(mlp, x))
    assert bool((found.abs().sum(-1) > 0).all())


def test_weights_of_the_chosen_add_up_to_one_only_where_the_model_says_so() -> None:
    # Where all experts are one and the same, the mixture is that expert times the sum of its weights.
    for normalize in (True, False):
        mlp, x = expert_mlp(normalize_top_k=normalize), activations()
        with torch.no_grad():
            for stacked in (mlp.experts.gate_up, mlp.experts.down):
                stacked.copy_(stacked[:1].clone().expand_as(stacked))
            mixture, _ = mlp(x, None)
            normed, _, probabilities = router(mlp, x)
            one = F.silu(normed @ mlp.experts.gate_up[0, 0::2].t()) * (normed @ mlp.experts.gate_up[0, 1::2].t())
            one = one @ mlp.experts.down[0].t()
        total = probabilities.topk(TOP_K).values.sum(-1, keepdim=True)
        assert total.max() < 1
        torch.testing.assert_close(mixture, one if normalize else one * total)


def test_losses_of_the_router_are_those_of_their_formulas() -> None:
    mlp, x = expert_mlp(balance=BALANCE, z=Z), activations()
    sequences = 8  # of a global batch of which this rank sees three
    _, losses = mlp(x, torch.tensor(1.0 / sequences, dtype=torch.float64))

    _, logits, probabilities = router(mlp, x)
    balance = z = torch.zeros((), dtype=torch.float64)
    for row in range(BATCH):
        chosen = probabilities[:, row].topk(TOP_K).indices
        # Switch Transformer's loss, for each sequence by itself: experts · sum of (share of tokens · mean probability).
        for expert in range(EXPERTS):
            share = (chosen == expert).sum() / (LENGTH * TOP_K)
            balance = balance + EXPERTS * share * probabilities[:, row, expert].mean()
        z = z + logits[:, row].logsumexp(-1).square().mean()
    expected = torch.stack([BALANCE * balance, Z * z]) / sequences
    torch.testing.assert_close(losses, expected)
    inputs = [x, mlp.norm.weight, mlp.router.weight]
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))


def test_balance_is_counted_for_each_sequence_by_itself() -> None:
    mlp, x = expert_mlp(balance=BALANCE, z=Z), activations().detach()
    scale = torch.tensor(1.0, dtype=torch.float64)
    together = mlp(x, scale)[1]
    apart = torch.stack([mlp(x[:, row : row + 1], scale)[1] for row in range(BATCH)]).sum(0)
    torch.testing.assert_close(together, apart)


def test_an_even_router_has_a_balance_loss_of_its_factor() -> None:
    mlp, x = expert_mlp(balance=BALANCE), activations()
    with torch.no_grad():
        mlp.router.weight.zero_()
        _, losses = mlp(x, torch.tensor(1.0 / BATCH, dtype=torch.float64))
    torch.testing.assert_close(losses, torch.tensor([BALANCE, 0.0], dtype=torch.float64))


@given(order=st.permutations(range(6)))
@settings(max_examples=20)
def test_rows_travel_by_a_permutation_and_their_gradients_travel_back(order: list[int]) -> None:
    permutation = torch.tensor(order)
    x = torch.arange(12.0, dtype=torch.float64).view(6, 2).requires_grad_()
    out = permute_rows(x, permutation)
    assert torch.equal(out, x[permutation])
    assert torch.equal(permute_rows(out, inverse_permutation(permutation)), x)
    direction = torch.arange(12.0, 24.0, dtype=torch.float64).view(6, 2)
    (found,) = torch.autograd.grad(out, x, direction)
    (expected,) = torch.autograd.grad(x[permutation], x, direction)
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, when it loads its compiler
def test_a_graph_gives_experts_and_router_the_gradients_that_they_have_without_one() -> None:
    """Dynamo of PyTorch 2.11 lost the gradients of autograd functions that it traced through, in float32."""
    gradients = []
    for captured in (False, True):
        mlp = expert_mlp()
        if captured:
            mlp.compile(backend="aot_eager")
        x = activations().requires_grad_()
        out, _ = mlp(x, None)
        out.square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in mlp.parameters())])
    torch.compiler.reset()
    for plain, of_graph in zip(*gradients, strict=True):
        assert plain is not None
        torch.testing.assert_close(of_graph, plain)
