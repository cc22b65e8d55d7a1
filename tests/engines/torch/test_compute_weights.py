"""Copies of weights for the products: a run with them gives what one without them gives, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.models.one_process import one_process_model
from support.models.tiny_models import tiny_config
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.model import RankModel
from trainshed.engines.torch.optimizer import AdamW, _update_one
from trainshed.engines.torch.optimizer_registry import build_rank_optimizer
from trainshed.engines.torch.step import StepRunner
from trainshed.engines.torch.weight_average import WeightAverage
from trainshed.models.compute_weights import refresh_compute_weights
from trainshed.models.layers import Linear
from trainshed.models.moe import GroupedExperts
from trainshed.recipe import Lora
from trainshed.recipe.optimizer import Ema, Optimizer

LENGTH, ROWS = 16, 4


def without_copies(model: RankModel) -> RankModel:
    """Let every micro-batch cast the weights."""
    for stage in model.stages:
        stage.compute_weights.clear()
        for module in stage.modules():
            if isinstance(module, Linear):
                module.compute_weight = None
            elif isinstance(module, GroupedExperts):
                module.compute_weights.clear()
    return model


def batches(steps: int, vocabulary: int) -> list[LocalBatch]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, vocabulary, (ROWS, LENGTH + 1), generator=generator) for _ in range(steps)]
    return [LocalBatch(ROWS, each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in rows]


def trained(model: RankModel, options: dict[str, Any], steps: int = 4) -> list[torch.Tensor]:
    """Train, with a step whose weights are not finite in the middle, and return all losses and the last weights."""
    runner = StepRunner(model, build_rank_optimizer(model, Optimizer.model_validate({"lr": 1e-2, **options})))
    losses = []
    for number, batch in enumerate(batches(steps, model.config.vocab_size)):
        norm = model.shards[-1].local_tensor
        kept = norm.clone()
        if number == 2:
            norm.fill_(torch.nan)  # this step is skipped
        losses.append(torch.tensor(runner.step(batch, ROWS, 1e-2).read().loss))
        if number == 2:
            norm.copy_(kept)
    return [*losses, *(shard.local_tensor.clone() for shard in model.shards)]


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"states": "bf16"}, {"name": "muon"}], ids=["adamw", "bf16 states", "muon"])
def test_losses_and_weights_are_those_without_copies(family: str, options: dict[str, Any]) -> None:
    config = tiny_config(family)
    kept, plain = (one_process_model(config, length=LENGTH, precision="bf16", micro_batch=2) for _ in range(2))
    assert kept.compute_weights
    for ours, theirs in zip(trained(kept, options), trained(without_copies(plain), options), strict=True):
        assert torch.equal(ours, theirs) or (ours.isnan() & theirs.isnan()).all()


def test_an_average_in_place_of_the_weights_is_what_multiplies() -> None:
    model = one_process_model(tiny_config("llama"), length=LENGTH, precision="bf16")
    runner = StepRunner(model, AdamW(model.shards, Optimizer(lr=1e-3), model.mesh.device))
    average = WeightAverage(model, Ema(decay=0.9))  # all zeros until it starts
    (batch,) = batches(1, model.config.vocab_size)
    before = runner.evaluate(batch, ROWS).loss
    with average.in_place_of_weights():
        assert runner.evaluate(batch, ROWS).loss == pytest.approx(torch.tensor(model.config.vocab_size).log().item())
    assert runner.evaluate(batch, ROWS).loss == before


def test_an_update_writes_the_copy_too_and_a_skipped_one_leaves_it() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(2, 64, generator=generator)
    averages, copy = torch.zeros(2, 64), weight.bfloat16()
    options = (torch.tensor(0.1), 0.9, 0.95, 1e-8, 0.1)
    for skip in (0.0, 1.0):
        before = weight.clone()
        _update_one(weight, gradient, *averages, copy, torch.tensor([0.1, 0.05**0.5, 1.0, skip]), *options)
        assert torch.equal(weight, before) == bool(skip)
        assert torch.equal(copy, weight.bfloat16())


def test_what_is_written_behind_pytorchs_count_is_copied_after_an_update() -> None:
    model = one_process_model(tiny_config("llama"), length=LENGTH, precision="bf16")
    refresh_compute_weights(model.compute_weights)
    assert not any(weight.stale for weight in model.compute_weights)
    # PyTorch's fused AdamW does not count its writes: that is why every update marks all copies.
    StepRunner(model, AdamW(model.shards, Optimizer(lr=1e-3), model.mesh.device)).step(
        batches(1, model.config.vocab_size)[0], ROWS, 1e-3
    )
    assert all(weight.stale for weight in model.compute_weights)
    refresh_compute_weights(model.compute_weights)
    assert all(torch.equal(weight.tensor, weight.master.bfloat16()) for weight in model.compute_weights)


@pytest.mark.parametrize(
    "keys",
    [{"precision": "fp32"}, {"recompute": "selective"}, {"offload": "activations"}, {"lora": Lora(rank=2, alpha=4)}],
    ids=lambda keys: next(iter(keys)),
)
def test_no_copies_are_kept_where_they_would_cost_memory_or_change_nothing(keys: dict[str, Any]) -> None:
    model = one_process_model(tiny_config("llama"), length=LENGTH, **{"precision": "bf16"} | keys)
    assert not model.compute_weights
    assert all(module.compute_weight is None for module in model.stages[0].modules() if isinstance(module, Linear))
