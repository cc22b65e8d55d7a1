"""What a layout's `shard` says is what ranks hold: whole or in shards, at which moments, and how often they sum."""

from __future__ import annotations

import pytest
import torch

from support.recipes.small_recipes import world_size
from support.runs.rank_pool import RankPool
from support.runs.sharding_ranks import ShardObservations, train_watching_shards
from support.runs.small_runs import SmallRuns

ONE_STEP = ("train.steps=1",)
FOUR_LAYERS = "model.config.layers=4"


def watch(
    small_runs: SmallRuns, rank_pool: RankPool, layout: str, *overrides: str, model: str = "dense"
) -> list[ShardObservations]:
    """What each rank sees in one step."""
    folder = small_runs.new_folder()
    return rank_pool.run(
        train_watching_shards, folder, model, layout, (*ONE_STEP, *overrides), ranks=world_size(layout)
    )


@pytest.mark.parametrize(
    ("shard", "weights", "gradients"),
    [
        ("zero1", [1, 0.5], [1, 0.5]),
        ("zero2", [1, 0.5], [0.5, 0.5]),
        pytest.param("none", [1, 1], [1, 1], marks=pytest.mark.full),
    ],
)
def test_between_the_micro_batches_of_a_pipeline_gradients_are_held_as_shard_says(
    small_runs: SmallRuns, rank_pool: RankPool, shard: str, weights: list[float], gradients: list[float]
) -> None:
    for seen in watch(small_runs, rank_pool, f"pp=2,dp=2,shard={shard},micro_batch=2", FOUR_LAYERS):
        assert len(seen.after_backward) == 2
        for number, held in enumerate(seen.after_backward):
            # Rows do not divide evenly everywhere: one rank has some more.
            assert held == pytest.approx((weights[number], gradients[number]), abs=0.02)


@pytest.mark.parametrize(
    "layout",
    [
        "pp=2,dp=2,shard=full,micro_batch=1",
        "pp=2,vp=2,dp=2,shard=full,micro_batch=1",
        pytest.param("pp=2,dp=2,shard=full,schedule=gpipe,micro_batch=1", marks=pytest.mark.full),
    ],
)
def test_with_full_sharding_a_stage_gathers_the_layer_that_it_runs_and_keeps_nothing(
    small_runs: SmallRuns, rank_pool: RankPool, layout: str
) -> None:
    for seen in watch(small_runs, rank_pool, layout, FOUR_LAYERS):
        assert {len(parts) for parts in seen.in_layers} == {1}, "layers in use, embedding and head among them"
        # The final norm alone, 16 weights, stays gathered between the passes.
        assert seen.after_backward
        for weights, gradients in seen.after_backward:
            assert weights == pytest.approx(0.5, abs=0.02)
            assert gradients <= 0.52


def test_embedding_and_head_are_gathered_for_their_own_use_alone(small_runs: SmallRuns, rank_pool: RankPool) -> None:
    for seen in watch(small_runs, rank_pool, "dp=2,shard=full,micro_batch=2"):
        assert seen.in_layers == [["0"], ["1"]] * 2


@pytest.mark.parametrize(
    "layout",
    [
        "dp=4,replicate=2,shard=full,micro_batch=1",
        "pp=2,dp=4,replicate=2,shard=zero2,micro_batch=1",
        pytest.param("dp=4,replicate=2,shard=zero2,micro_batch=1", marks=pytest.mark.full),
        pytest.param("pp=2,dp=4,replicate=2,shard=full,micro_batch=1", marks=pytest.mark.full),
    ],
)
def test_copies_of_the_model_sum_their_shards_once_a_step(
    small_runs: SmallRuns, rank_pool: RankPool, layout: str
) -> None:
    # Two micro-batches. Groups: embedding, two layers, head, and the final norm in the group of the stage.
    ranks = watch(small_runs, rank_pool, layout)
    groups = [2] * 4 + [3] * 4 if "pp" in layout else [5] * 4
    assert [seen.all_reduces for seen in ranks] == groups


def test_rotary_tables_and_scales_of_losses_are_not_rounded_to_the_dtype_of_the_products(
    small_runs: SmallRuns, rank_pool: RankPool
) -> None:
    for seen in watch(small_runs, rank_pool, "dp=2,micro_batch=2", "train.precision=bf16"):
        assert seen.given_dtypes == {torch.float32}
