"""A checkpoint's bytes are those the engine writes, its minutes those of the storage it goes to."""

from __future__ import annotations

import random
from math import sqrt
from pathlib import Path

import pytest

from support.models.one_process import CPU, one_process_model
from trainshed.catalog import gpu, machine, model_preset
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.state import state_tensors
from trainshed.engines.torch.weight_average import WeightAverage
from trainshed.errors import RecipeError
from trainshed.models.parameters import parameter_count
from trainshed.plan.budget.checkpoint_cost import (
    CheckpointCost,
    best_interval_seconds,
    checkpoint_bytes,
    checkpoint_cost,
    checkpoint_warning,
    expected_goodput,
    format_duration,
    goodput,
    node_mtbf_hours,
    writers_by_node,
)
from trainshed.plan.budget.storage import TIB, cluster_storage, planned_storage
from trainshed.plan.layout import RankLayout, resolve_layout
from trainshed.plan.training_shape import hardware_of
from trainshed.recipe import Layout, Optimizer, load_cluster
from trainshed.recipe.optimizer import Ema

CONFIG = model_preset("llama3-70b")
AKS_BYTES = 2.3 * TIB
"""The AKS recipe: "the 175B model checkpoints require approximately 2.3 TiB"."""


def layout(world_size: int, **keys: object) -> RankLayout:
    return resolve_layout(Layout.model_validate(keys), CONFIG, world_size=world_size)


def test_our_engine_keeps_as_many_bytes_as_the_plan_counts() -> None:
    config = model_preset("tiny")
    model = one_process_model(config, length=8, precision="bf16")
    tensors = state_tensors(model, AdamW(model.shards, Optimizer(lr=1e-3), CPU))
    kept = sum(shard.local.nbytes for shard in tensors.values() if shard.is_owner)
    assert kept == checkpoint_bytes(parameter_count(config)) + 4  # and how many updates were made
    averages = WeightAverage(model, Ema(decay=0.9)).state_tensors()
    kept += sum(tensor.local.nbytes for tensor in averages.values())
    assert kept == checkpoint_bytes(parameter_count(config), averaged=True) + 4


def test_the_checkpoint_of_the_175b_recipe_has_the_size_it_states() -> None:
    assert checkpoint_bytes(174_600_000_000, "megatron") / TIB == pytest.approx(2.3, rel=0.04)


@pytest.mark.parametrize(
    ("tier", "size_tib", "stated_gb_per_s", "stated_minutes"),
    [("amlfs-40", 480, 19.2, 2.04), ("amlfs-125", 512, 64, 0.61), ("amlfs-250", 512, 128, 0.31),
     ("amlfs-500", 512, 256, 0.15)],
)  # fmt: skip
def test_the_aks_table_is_reproduced_and_its_mixed_units_are_corrected(
    tier: str, size_tib: float, stated_gb_per_s: float, stated_minutes: float
) -> None:
    rate = planned_storage(tier, size_tib).write_gb_per_s(64)
    assert rate == pytest.approx(stated_gb_per_s)
    # The table takes 1024 GB for a TiB; a TiB has 1099.5.
    assert 2.3 * 1024 / rate / 60 == pytest.approx(stated_minutes, abs=0.011)
    assert AKS_BYTES / (rate * 1e9) / 60 == pytest.approx(stated_minutes * 1.0737, rel=0.05)


def test_the_16_tib_that_the_aks_recipe_buys_mean_21_minutes_a_save_and_the_plan_says_so() -> None:
    storage = cluster_storage(load_cluster("aks-nd-h100-v5"))
    assert storage is not None
    seconds = AKS_BYTES / (storage.write_gb_per_s(2, machine("nd-h100-v5")) * 1e9)
    assert seconds / 60 == pytest.approx(21, abs=0.1)
    cost = CheckpointCost(round(AKS_BYTES), 16, 2, 100.0, 1.0, seconds, seconds, 2.0, str(storage))
    assert checkpoint_warning(cost, 30 * 60) == (
        "a checkpoint of 2.30 TiB takes 21.1 minutes to write at 2 GB/s (amlfs-125, 16 TiB), 70% of the 30.0 minutes "
        "between two saves: little more and it would wait; save every 42.1 minutes or less often, or write at "
        "2.81 GB/s"
    )
    assert "training waits for it" in (checkpoint_warning(cost, 15 * 60) or "")
    assert checkpoint_warning(cost, 3600) is None
    assert "35% of the" in (checkpoint_warning(cost, 3600, asynchronous=False) or "")


def test_training_stands_still_for_the_copy_and_for_a_write_that_outlasts_the_interval() -> None:
    cost = CheckpointCost(10**12, 16, 2, 100.0, 2.0, 60.0)
    assert cost.stall_seconds(100.0) == 2.0
    assert cost.stall_seconds(50.0) == 12.0
    assert cost.stall_seconds(100.0, asynchronous=False) == 62.0


@pytest.mark.parametrize(
    ("keys", "writers", "nodes", "fullest"),
    [
        ({"tp": 8, "shard": "full"}, 64, 8, 8),
        ({"tp": 8, "shard": "none"}, 8, 1, 8),
        ({"tp": 8, "pp": 2, "shard": "none"}, 16, 2, 8),
        ({"tp": 4, "pp": 2, "cp": 2, "shard": "zero1"}, 64, 8, 8),
        ({"tp": 4, "shard": "full", "replicate": 4}, 16, 2, 8),
        ({"tp": 2, "pp": 4, "shard": "none"}, 8, 4, 2),
    ],
)
def test_only_the_first_copy_of_the_state_is_written(
    keys: dict[str, object], writers: int, nodes: int, fullest: int
) -> None:
    counts = writers_by_node(layout(64, **keys), 8)
    assert (sum(counts.values()), len(counts), max(counts.values())) == (writers, nodes, fullest)
    assert sum(writers_by_node(layout(64, **keys), 8, "megatron").values()) == 64


def test_a_cost_follows_from_weights_layout_machine_and_storage() -> None:
    node = machine("a3-mega")
    storage = planned_storage("gcs")
    cost = checkpoint_cost(
        70_000_000_000, layout(64, tp=8, shard="full"), hardware_of(node), storage=storage, machine=node
    )
    assert cost.bytes == 840_000_000_000
    assert cost.staged_gib_per_node == pytest.approx(840e9 / 8 / 2**30)
    assert cost.write_gb_per_s == 32.0  # eight nodes, 4 GB/s each
    assert cost.write_seconds == pytest.approx(840 / 32)
    assert cost.read_seconds == pytest.approx(840 / 25)  # the region's quota, not the nodes
    assert cost.stage_seconds == pytest.approx(840e9 / 64 / (gpu("h100").host_gb_per_s * 1e9 * 0.7))
    assert cost.to_plain()["storage"] == "gcs"


def test_a_nodes_own_network_limits_the_fastest_storage() -> None:
    storage = planned_storage("amlfs-500", 512)
    assert storage.write_gb_per_s(2) == 256.0
    assert storage.write_gb_per_s(2, machine("nd-h100-v5")) == 20.0


def test_without_storage_the_time_is_not_known() -> None:
    cost = checkpoint_cost(10**9, layout(8, tp=8), hardware_of(machine("dgx-h100")))
    assert (cost.write_seconds, cost.read_seconds, checkpoint_warning(cost, 1.0)) == (None, None, None)


def test_storage_is_paid_by_its_size_or_by_what_is_used() -> None:
    assert planned_storage("amlfs-125", 16).usd_per_month(0) == pytest.approx(16 * TIB / 1e9 * 0.145)
    assert planned_storage("s3").usd_per_month(1e12) == pytest.approx(23.0)
    assert planned_storage("nvme").usd_per_month(1e12) is None


def test_a_cluster_files_storage_is_checked_against_the_catalog_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ntarget: local\nstorage: {tier: amlfs-125, size_tib: 20}\n")
    with pytest.raises(RecipeError) as caught:
        cluster_storage(load_cluster(file))
    assert caught.value.where == f"{file}:3 (storage)"
    assert caught.value.what == "amlfs-125 cannot be bought in 20 TiB"


def test_durations_are_said_as_people_say_them() -> None:
    assert [format_duration(each) for each in (2, 89, 1264, 7200, 260000)] == [
        "2 seconds", "89 seconds", "21.1 minutes", "2.0 hours", "3.0 days"
    ]  # fmt: skip


HOUR = 3600.0


def cost(stage: float = 5.0, write: float | None = 60.0) -> CheckpointCost:
    return CheckpointCost(10**12, 64, 8, 100.0, stage, write, write, 10.0, "somewhere")


@pytest.mark.parametrize(("save", "mtbf"), [(1.0, 24 * HOUR), (10.0, 3 * HOUR), (60.0, 100 * HOUR)])
def test_the_interval_is_youngs_with_dalys_correction(save: float, mtbf: float) -> None:
    young = sqrt(2 * save * mtbf)
    assert best_interval_seconds(save, mtbf) == pytest.approx(young, rel=0.05)
    ratio = save / (2 * mtbf)
    assert best_interval_seconds(save, mtbf) == pytest.approx(young * (1 + sqrt(ratio) / 3 + ratio / 9) - save)


def test_where_saving_takes_longer_than_running_the_interval_is_the_mtbf() -> None:
    assert best_interval_seconds(200.0, 100.0) == 100.0


@pytest.mark.parametrize(("save", "mtbf"), [(10.0, 3 * HOUR), (120.0, 2 * HOUR)])
def test_no_other_interval_gives_more_goodput(save: float, mtbf: float) -> None:
    best = best_interval_seconds(save, mtbf)
    shares = [expected_goodput(best * factor, save, 300.0, mtbf) for factor in (0.5, 0.8, 1.0, 1.25, 2.0)]
    assert max(shares) == shares[2]


def test_the_expectation_is_what_happens_to_a_thousand_simulated_intervals() -> None:
    interval, save, restart, mtbf = 1800.0, 60.0, 300.0, 3 * HOUR
    dice = random.Random(1)
    wall = 0.0
    for _ in range(4000):
        waiting = 0.0  # the first try needs no restart
        while (until := dice.expovariate(1 / mtbf)) < waiting + interval + save:
            wall += until
            waiting = restart
        wall += waiting + interval + save
    # Daly counts a failure during a restart as one more; at these lengths that is below the noise.
    assert 4000 * interval / wall == pytest.approx(expected_goodput(interval, save, restart, mtbf), rel=0.04)


def test_failures_are_metas_by_the_gpus_of_a_node() -> None:
    hours, source = node_mtbf_hours(8)
    assert hours == pytest.approx(6334, abs=1)
    assert node_mtbf_hours(4)[0] == 2 * hours
    assert "Llama 3" in source
    assert node_mtbf_hours(8, 100.0) == (100.0, "as given")


def test_llama_3s_own_run_comes_out_above_the_90_percent_that_meta_states() -> None:
    found = goodput(cost(), step_seconds=8.0, nodes=2048, mtbf_hours=node_mtbf_hours(8)[0], interval_steps=100)
    assert found.mtbf_hours == pytest.approx(3.09, abs=0.01)
    assert found.goodput is not None
    assert 0.90 < found.goodput < found.best_goodput < 0.97


def test_an_async_save_is_never_started_before_the_last_is_written() -> None:
    found = goodput(cost(stage=0.01, write=600.0), step_seconds=7.0, nodes=64, mtbf_hours=1000.0, interval_steps=500)
    assert found.best_interval_steps == 172  # twice the write: what is advised is not what is then warned about
    assert checkpoint_warning(cost(stage=0.01, write=600.0), 172 * 7.0) is None
    assert checkpoint_warning(cost(stage=0.01, write=600.0), 171 * 7.0) is not None
    waiting = goodput(cost(stage=0.01, write=600.0), step_seconds=7.0, nodes=64, mtbf_hours=1000.0, interval_steps=10)
    assert waiting.stall_seconds == pytest.approx(530.01)
    assert waiting.goodput is not None
    assert waiting.goodput < 0.15


def test_saving_beside_training_loses_less_than_standing_still() -> None:
    asked = {"step_seconds": 8.0, "nodes": 128, "mtbf_hours": 6000.0, "interval_steps": 100}
    beside, still = goodput(cost(), **asked), goodput(cost(), **asked, asynchronous=False)
    assert beside.goodput is not None
    assert still.goodput is not None
    assert beside.goodput > still.goodput
    assert beside.best_interval_steps < still.best_interval_steps


def test_without_a_save_on_the_way_no_goodput_is_promised() -> None:
    found = goodput(cost(), step_seconds=8.0, nodes=128, mtbf_hours=6000.0, interval_steps=None)
    assert found.goodput is None
    assert found.best_goodput > 0.9


def test_a_job_that_never_gets_through_has_none() -> None:
    assert expected_goodput(1e6, 1.0, 1.0, 100.0) == 0.0
