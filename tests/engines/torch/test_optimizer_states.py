"""`states: bf16`: the averages are rounded so that training does not notice, the same on every layout."""

from __future__ import annotations

import pytest
import torch

from support.models.one_process import CPU, gradients, one_process_model, token_rows
from support.models.tiny_models import tiny_config
from support.recipes.small_recipes import ALONE
from support.runs.small_runs import SmallRuns, difference, figures, state
from trainshed.engines.torch.optimizer import AdamW, round_to_bf16
from trainshed.recipe.train import Optimizer

BF16 = "train.optimizer.states=bf16"


def test_rounding_is_right_on_average_and_never_off_by_more_than_one_step() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(64, generator=generator) * 10.0 ** torch.randint(-20, 20, (64,), generator=generator)
    bits = torch.arange(1 << 16)
    rounded = round_to_bf16(value[:, None].expand(-1, len(bits)), bits).float()
    torch.testing.assert_close(rounded.double().mean(1), value.double(), rtol=1e-9, atol=0.0)
    assert bool(((rounded - value[:, None]).abs() < value.abs()[:, None] / 128).all())
    exact = value.to(torch.bfloat16)
    assert torch.equal(round_to_bf16(exact.float(), torch.tensor(65535)), exact)


def test_an_average_that_moves_slowly_moves() -> None:
    """Rounded to nearest, the second average would stay where it is: its steps are a thousandth of it."""
    model = one_process_model(tiny_config("gpt2", layers=1), length=8)
    options = Optimizer.model_validate({"lr": 1e-3, "betas": (0.9, 0.999), "clip": None, "states": "bf16"})
    rounded, whole = (
        AdamW(model.shards, options.model_copy(update={"states": states}), CPU) for states in ("bf16", "fp32")
    )
    good = torch.zeros((), dtype=torch.float64)
    for step in range(300):
        for shard in model.shards:
            shard.tensor.grad = torch.full_like(shard.tensor, 1.0 if step < 100 else 3.0)
        for optimizer in (rounded, whole):
            optimizer.step(1e-3, good + 1.0, good)
    for ours, exact in zip(rounded.exp_avg_sq, whole.exp_avg_sq, strict=True):
        assert ours.dtype == torch.bfloat16
        assert abs(float(ours.double().mean() / exact.double().mean()) - 1) < 0.05
    stuck = torch.tensor(1.0, dtype=torch.bfloat16)
    assert (stuck.float() * 0.999 + 0.001 * 3.0).to(torch.bfloat16) == stuck, "rounding to nearest has this problem"


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,shard=full,micro_batch=2",
        pytest.param("tp=2,micro_batch=4", marks=pytest.mark.full),
        pytest.param("pp=2,dp=2,micro_batch=2", marks=pytest.mark.full),
    ],
)
def test_a_layout_rounds_as_one_process_does(small_runs: SmallRuns, layout: str) -> None:
    expected, actual = small_runs.alone("dense", BF16), small_runs.fresh("dense", layout, BF16)
    assert difference(expected, actual, "loss") <= 1e-9
    assert difference(expected, actual, "grad_norm") <= 1e-9


def losses_by_heart(states: str) -> list[float]:
    """The losses of a tiny model that learns two rows by heart."""
    config = tiny_config("llama")
    model = one_process_model(config, length=16, micro_batch=2)
    options = Optimizer.model_validate({"lr": 3e-3, "betas": (0.9, 0.999), "clip": None, "states": states})
    optimizer = AdamW(model.shards, options, CPU)
    tokens, labels = (token_rows(config, 2, 16, seed=seed) for seed in (0, 1))
    model.normalization.tokens.fill_(1.0 / tokens.numel())
    good = torch.zeros((), dtype=torch.float64)
    losses = []
    for _ in range(60):
        loss = model.stages[0](tokens, labels)[0]
        loss.backward()
        optimizer.step(3e-3, good + 1.0, good)
        gradients(model)
        losses.append(float(loss.detach()))
    return losses


def test_a_model_learns_as_well_as_with_whole_states() -> None:
    whole, rounded = losses_by_heart("fp32"), losses_by_heart("bf16")
    assert whole[-1] < 0.1 * whole[0]
    differences = [abs(ours - exact) for ours, exact in zip(rounded, whole, strict=True)]
    assert 0 < max(differences) < 0.02 * whole[0], "within two hundredths of the first loss, at every step"


def test_a_resumed_run_is_bitwise_the_one_that_never_stopped(small_runs: SmallRuns) -> None:
    straight, stopped = small_runs.new_folder(), small_runs.new_folder()
    expected = small_runs.train(straight, "moe", ALONE, BF16, "train.steps=6")
    small_runs.train(stopped, "moe", ALONE, BF16, "train.steps=3")
    assert figures(small_runs.train(stopped, "moe", ALONE, BF16, "train.steps=6")) == figures(expected)
    one, other = state(straight, 6), state(stopped, 6)
    assert all(torch.equal(one[name], other[name]) for name in one)
    averages = {tensor.dtype for name, tensor in one.items() if name.startswith("optimizer.exp_avg")}
    assert averages == {torch.bfloat16}
