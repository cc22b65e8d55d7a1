"""Who trains when nodes are bad: spares in their places, then fewer nodes, then nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.recipes.small_recipes import recipe_text, small_recipe
from trainshed.launch.agent.leader import first_training_slots, plan_for_fewer_nodes, replace_bad_slots
from trainshed.launch.job import JobFile, Stage
from trainshed.plan import RankLayout, resolve_layout
from trainshed.recipe import Layout

FOUR = Stage("train", nodes=4, spares=2, ranks_per_node=2)


def layout(**keys: int) -> RankLayout:
    config = small_recipe("dense").model.config
    assert config is not None
    return resolve_layout(Layout.model_validate(keys), config)


def job(folder: Path, stage: Stage, min_nodes: int | None) -> JobFile:
    (folder / "recipe.yaml").write_text(recipe_text("dense"))
    return JobFile("small-1", str(folder), (stage,), 60, "fp64", "0", min_nodes=min_nodes)


def test_spares_take_the_places_of_bad_nodes_and_nobody_else_moves() -> None:
    assert first_training_slots(FOUR) == (0, 1, 2, 3)
    assert replace_bad_slots((0, 1, 2, 3), 6, {1}) == (0, 4, 2, 3)
    assert replace_bad_slots((0, 4, 2, 3), 6, {1, 3}) == (0, 4, 2, 5)
    assert replace_bad_slots((0, 1, 2, 3), 6, {4}) == (0, 1, 2, 3)
    assert replace_bad_slots((0, 1, 2, 3), 6, {1, 2, 3}) is None


def test_with_fewer_nodes_whole_replicas_are_given_up(tmp_path: Path) -> None:
    stage = Stage("train", nodes=4, ranks_per_node=2)
    found = plan_for_fewer_nodes(job(tmp_path, stage, 1), stage, tmp_path, layout(tp=2, dp=4), {2, 3})
    assert found == ((0, 1), layout(tp=2, dp=2))


def test_replicas_that_do_not_divide_the_batch_share_it_unevenly(tmp_path: Path) -> None:
    stage = Stage("train", nodes=4, ranks_per_node=2)
    found = plan_for_fewer_nodes(job(tmp_path, stage, 1), stage, tmp_path, layout(tp=2, dp=4), {1})
    assert found == ((0, 2, 3), replace(layout(tp=2, dp=3), uneven=True))


def test_routers_would_count_rows_without_a_loss_so_experts_go_on_with_fewer_replicas(tmp_path: Path) -> None:
    stage = Stage("train", nodes=4)
    wanted = job(tmp_path, stage, 1)
    (tmp_path / "recipe.yaml").write_text(recipe_text("moe"))
    assert plan_for_fewer_nodes(wanted, stage, tmp_path, layout(dp=4), {3}) == ((0, 1), layout(dp=2))


def test_the_micro_batch_shrinks_where_it_must(tmp_path: Path) -> None:
    stage = Stage("train", nodes=8)
    planned = replace(layout(dp=2), micro_batch=4, dp=2)
    # One replica of 8 samples can keep it; it is kept wherever it divides.
    assert plan_for_fewer_nodes(job(tmp_path, stage, 1), stage, tmp_path, planned, set(range(1, 8))) == (
        (0,),
        replace(planned, dp=1),
    )


@pytest.mark.parametrize(
    ("min_nodes", "bad", "reason"),
    [
        (None, {1}, "3 of 4 nodes are left, and 4 are needed"),
        (3, {1, 2}, "2 of 4 nodes are left, and elastic.min_nodes asks for 3"),
    ],
)
def test_where_nobody_can_train_the_reason_is_said(
    tmp_path: Path, min_nodes: int | None, bad: set[int], reason: str
) -> None:
    stage = Stage("train", nodes=4)
    found = plan_for_fewer_nodes(job(tmp_path, stage, min_nodes), stage, tmp_path, layout(dp=4), bad)
    assert isinstance(found, str)
    assert found.startswith(reason)


def test_a_replica_larger_than_what_is_left_cannot_train(tmp_path: Path) -> None:
    stage = Stage("train", nodes=4)
    found = plan_for_fewer_nodes(job(tmp_path, stage, 1), stage, tmp_path, layout(tp=2, pp=2), {0})
    assert found == (
        "3 of 4 nodes are left, and no layout of 1 to 3 nodes is legal: a replica is 4 ranks, and 3 nodes have 3"
    )
