"""The figures of a step are named: packed into one vector, read by name, reported only if the model has them."""

from __future__ import annotations

import signal

import pytest
import torch

from support.models.one_process import CPU, one_process_model, token_rows
from support.models.tiny_models import tiny_config
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.rank_health import NO_STOP_VOTES
from trainshed.engines.torch.step import StepFigures, StepMetrics, StepRunner
from trainshed.models.decoder import Regularization
from trainshed.recipe import Optimizer

LENGTH = 8


def one_step(family: str, regularization: Regularization, votes: dict[str, float]) -> StepMetrics:
    config = tiny_config(family)
    model = one_process_model(config, length=LENGTH, regularization=regularization)
    rows = token_rows(config, 2, LENGTH + 1)
    batch = LocalBatch(2, rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), hashes=(3, 5))
    return StepRunner(model, AdamW(model.shards, Optimizer(lr=1e-3), CPU)).step(batch, 2, 1e-3, votes).read()


def test_figures_are_packed_once_and_read_by_their_names() -> None:
    figures = StepFigures(CPU)
    figures.add(("loss", "z_loss"), torch.tensor([2.0, 0.25]))
    figures.add_from_host({"hash_low": 7.0})
    figures.all_reduce(world_size=1)
    assert [float(figures[name]) for name in ("z_loss", "hash_low", "loss")] == [0.25, 7.0, 2.0]
    assert figures.named(figures.copy_to_host()) == {"loss": 2.0, "z_loss": 0.25, "hash_low": 7.0}


def test_every_value_needs_a_name() -> None:
    with pytest.raises(AssertionError, match="2 values for"):
        StepFigures(CPU).add(("loss",), torch.zeros(2))


@pytest.mark.parametrize(
    ("family", "z_loss", "terms"),
    [
        ("llama", 0.0, []),
        ("llama", 1e-3, ["z_loss"]),
        ("mixtral", 0.0, ["moe_balance", "moe_z"]),
        ("mixtral", 1e-3, ["z_loss", "moe_balance", "moe_z"]),
    ],
)
def test_a_step_reports_the_terms_that_its_model_has(family: str, z_loss: float, terms: list[str]) -> None:
    metrics = one_step(family, Regularization(z_loss=z_loss, moe_balance=0.01, moe_z=1e-3), dict(NO_STOP_VOTES))
    assert list(metrics.loss_terms) == terms
    assert all(value > 0 for value in metrics.loss_terms.values())
    assert metrics.batch_hash == "0000000500000003"
    assert not metrics.non_finite
    assert metrics.stop_signal is None


def test_a_vote_of_any_rank_comes_out_as_its_signal() -> None:
    metrics = one_step("llama", Regularization(), {**NO_STOP_VOTES, "SIGUSR1": 1.0})
    assert metrics.stop_signal == signal.SIGUSR1
