"""Recompute changes memory and time, never a number: gradients are the same to the last bit, with dropout too."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.models.one_process import gradients, one_process_model, token_rows
from support.models.tiny_models import tiny_config
from trainshed.models.decoder import Regularization

ROWS, LENGTH = 2, 16
LOSSES = Regularization(z_loss=0.01, moe_balance=0.02, moe_z=0.03, dropout=0.2, seed=5)
PRODUCTS = ("mm", "addmm", "bmm")


class CountedOperations(TorchDispatchMode):
    """Counts what reaches the device, by the operation's name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Outcome:
    """One forward and backward: the loss, the router's losses, all gradients, what was computed."""

    def __init__(self, variant: str, recompute: str) -> None:
        config = tiny_config(variant)
        model = one_process_model(config, length=LENGTH, regularization=LOSSES, recompute=recompute, micro_batch=ROWS)
        tokens, labels = (token_rows(config, ROWS, LENGTH, seed=seed) for seed in (0, 1))
        model.normalization.tokens.fill_(1.0 / tokens.numel())
        model.normalization.sequences.fill_(1.0 / ROWS)
        (stage,) = model.stages
        loss = stage(tokens, labels, torch.tensor([3, 8]))
        with CountedOperations() as counted:
            loss[0].backward()
        self.loss, self.router_losses, self.gradients = loss.detach(), stage.router_losses, gradients(model)
        self.products = sum(counted.calls[name] for name in PRODUCTS)
        self.attentions = sum(
            calls
            for name, calls in counted.calls.items()
            if "scaled_dot_product" in name and not name.endswith("backward")
        )


@cache
def outcome(variant: str, recompute: str) -> Outcome:
    return Outcome(variant, recompute)


@pytest.mark.parametrize("variant", ["qwen3", "gpt2", "mixtral"])
def test_gradients_are_the_same_to_the_last_bit(variant: str) -> None:
    kept = outcome(variant, "none")
    assert all(bool(gradient.any()) for gradient in kept.gradients.values())
    for recompute in ("selective", "full"):
        again = outcome(variant, recompute)
        assert torch.equal(again.loss, kept.loss)
        assert torch.equal(again.router_losses, kept.router_losses)
        assert list(again.gradients) == list(kept.gradients)
        for name, gradient in kept.gradients.items():
            assert torch.equal(again.gradients[name], gradient), name


@pytest.mark.parametrize("variant", ["qwen3", "mixtral"])
def test_selective_computes_no_product_twice_and_full_all_of_them(variant: str) -> None:
    none, selective, full = (outcome(variant, recompute) for recompute in ("none", "selective", "full"))
    assert none.products == selective.products < full.products
    assert none.attentions == selective.attentions == 0
    assert full.attentions == tiny_config(variant).layers


def test_dropout_depends_on_the_sample_and_not_on_its_place_in_the_batch() -> None:
    config = tiny_config("qwen3")
    model = one_process_model(config, length=LENGTH, regularization=LOSSES, micro_batch=ROWS)
    tokens = token_rows(config, ROWS, LENGTH)
    with torch.no_grad():
        first = model.stages[0](tokens, None, torch.tensor([3, 8]))
        second = model.stages[0](tokens.flip(0), None, torch.tensor([8, 3]))
        other = model.stages[0](tokens, None, torch.tensor([8, 3]))
    torch.testing.assert_close(first, second.flip(1))
    assert not torch.equal(first, other)
