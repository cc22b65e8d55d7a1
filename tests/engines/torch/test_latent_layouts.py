"""Latent attention and DeepSeek-V3's routing train on every layout as on one process, the routers' biases included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.recipes.small_recipes import ALONE
from support.runs.small_runs import SmallRuns, difference, figures, state

STILL = "train.moe.bias_update=0.0"
PLAIN_QUERIES = "model.config.mla.query_rank=null"
FOUR_LAYERS = "model.config.layers=4"
SAVED = ("checkpoint.every=10", "train.steps=20")
SAMPLED: list[tuple[str, tuple[str, ...]]] = [
    ("tp=2,micro_batch=4", (PLAIN_QUERIES,)),
    ("pp=2,micro_batch=2", ()),
    ("dp=2,shard=full,micro_batch=2", ()),
    ("tp=2,cp=2,ep=2,micro_batch=4", ()),
]
MORE: list[tuple[str, tuple[str, ...]]] = [
    ("micro_batch=1", ()),
    ("tp=2,micro_batch=4", ()),
    ("cp=2,micro_batch=4", ()),
    ("dp=2,ep=2,micro_batch=2", ()),
    ("tp=2,ep=2,recompute=selective,micro_batch=4", ()),
    ("micro_batch=4,recompute=full", ()),
    ("dp=2,shard=none,micro_batch=4", ()),
    ("dp=2,shard=zero2,micro_batch=2", ()),
    ("dp=4,replicate=2,shard=full,micro_batch=2", ()),
    ("cp=2,ep=2,micro_batch=4", (PLAIN_QUERIES,)),
    ("tp=2,etp=2,micro_batch=4", ()),
    ("tp=2,dp=2,ep=4,micro_batch=4", ()),
    ("tp=2,dp=2,ep=2,shard=full,recompute=full,micro_batch=2", ()),
    ("tp=2,pp=2,dp=2,ep=4,micro_batch=2", ()),
    ("pp=2,dp=2,ep=2,schedule=zero_bubble,micro_batch=2", ()),
    ("pp=2,vp=2,micro_batch=2", (FOUR_LAYERS,)),
    ("pp=2,stages=1+3,recompute=full,micro_batch=2", (FOUR_LAYERS,)),
    ("tp=2,offload=activations,micro_batch=4", ()),
    ("cp=2,tp=2,micro_batch=4", ("data.document_mask=true",)),
    ("dp=2,ep=2,micro_batch=1", ("train.batch_ramp={start: 4, increment: 2, samples: 24}",)),
]


def cases() -> list[Any]:
    """All layouts, with the overrides that they need; the bulk is for `make test-all`."""
    more = [pytest.param(*case, marks=pytest.mark.full) for case in MORE[1:]]
    return [*SAMPLED, MORE[0], *more]


@pytest.mark.parametrize(("layout", "overrides"), cases())
def test_a_layout_gives_the_losses_and_gradient_norms_of_one_process(
    small_runs: SmallRuns, layout: str, overrides: tuple[str, ...]
) -> None:
    expected, got = small_runs.alone("latent", *overrides), small_runs.fresh("latent", layout, *overrides)
    assert [event["batch_hash"] for event in got] == [event["batch_hash"] for event in expected]
    for figure in ("loss", "grad_norm", "moe_balance", "moe_z"):
        assert difference(expected, got, figure) <= 1e-9, figure


def test_moving_biases_change_the_training(small_runs: SmallRuns) -> None:
    moving, still = small_runs.alone("latent"), small_runs.alone("latent", STILL)
    assert [event["loss"] for event in moving[:1]] == [event["loss"] for event in still[:1]]
    assert [event["loss"] for event in moving[-5:]] != [event["loss"] for event in still[-5:]]


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,ep=2,micro_batch=1",
        "tp=2,cp=2,recompute=full,micro_batch=2",
        pytest.param("pp=2,dp=2,micro_batch=2", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_holds_the_biases_and_another_layout_goes_on_with_them(small_runs: SmallRuns, layout: str) -> None:
    folder = small_runs.new_folder()
    small_runs.train(folder, "latent", ALONE, *SAVED, "train.steps=10")
    steps = small_runs.train(folder, "latent", layout, *SAVED)
    assert difference(small_runs.alone("latent"), steps, "loss") <= 1e-9
    name = "model.layers.1.mlp.router.score_bias"
    early, late = state(folder, 10), state(folder, 20)
    assert not [key for key in late if key.startswith("optimizer.") and "score_bias" in key]
    for step, tensors in ((10, early), (20, late)):
        # Each step moves it by 0.02 up, down or, with exactly the mean load, not at all.
        moves = tensors[name] / 0.02
        assert 0 < moves.abs().max() <= step
        torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-9)
    assert not torch.equal(early[name], late[name])


def test_a_run_that_stopped_goes_on_bit_by_bit(small_runs: SmallRuns) -> None:
    folder, whole = small_runs.new_folder(), small_runs.new_folder()
    small_runs.train(folder, "latent", ALONE, *SAVED, "train.steps=10")
    resumed = small_runs.train(folder, "latent", ALONE, *SAVED)
    assert figures(resumed) == figures(small_runs.train(whole, "latent", ALONE, *SAVED))
    one, other = state(folder, 20), state(whole, 20)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
