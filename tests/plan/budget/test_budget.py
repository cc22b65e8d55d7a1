"""Beyond the layout: what a run costs to feed, to hold, to save and to pay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.recipes import small_plans
from trainshed.catalog import machine
from trainshed.catalog.machines import NO_PRICE_HINT
from trainshed.data.tokens.indexed_dataset import token_dtype
from trainshed.plan.budget.budget import (
    RunTerms,
    host_memory,
    host_memory_warning,
    price_per_gpu_hour,
    run_budget,
    run_cost,
)
from trainshed.plan.budget.storage import (
    bytes_per_token,
    planned_storage,
    readers_per_token,
    supply_warning,
    token_supply,
)

NODE = machine("a3-mega")
CHOSEN = small_plans.prediction(small_plans.layout(tp=4, pp=4, vp=5, cp=2))
TERMS = RunTerms("megatron", NODE, planned_storage("gcs"), steps=1000, checkpoint_every=100)


@pytest.mark.parametrize("vocab_size", [280, 50257, 65499, 65500, 128256])
def test_a_token_is_as_wide_as_it_is_stored(vocab_size: int) -> None:
    assert bytes_per_token(vocab_size) == token_dtype(vocab_size).itemsize


def test_first_and_last_stage_read_and_in_our_engine_every_tensor_parallel_rank() -> None:
    assert readers_per_token(small_plans.layout(tp=4, pp=4, cp=2)) == 16
    assert readers_per_token(small_plans.layout(tp=4, pp=4, cp=2), "megatron") == 4
    assert readers_per_token(small_plans.layout(tp=8)) == 8


def test_reading_keeps_up_with_training_unless_the_step_is_short() -> None:
    asked = {"storage": planned_storage("gcs"), "machine": NODE, "engine": "megatron"}
    supply = token_supply(small_plans.JOB, CHOSEN.layout, CHOSEN.step_seconds, **asked)
    tokens = small_plans.JOB.tokens_per_step
    assert supply.needed_gb_per_s == pytest.approx(tokens * 4 * 4 / CHOSEN.step_seconds / 1e9)
    assert supply.given_gb_per_s == 25.0
    assert not supply.limits_the_step
    assert supply_warning(supply, CHOSEN.step_seconds) is None
    hurried = token_supply(small_plans.JOB, CHOSEN.layout, 1.0, **asked)
    assert hurried.limits_the_step
    warned = supply_warning(hurried, 1.0) or ""
    assert warned.startswith("a step's tokens take 10.2 s to read and the step 1 s: ")
    assert "copy them to the nodes with `data.stage: nvme`" in warned
    assert "data.stage" not in (supply_warning(hurried, 1.0, "megatron") or ""), "only our own engine takes it"


def test_staged_tokens_are_copied_to_every_node_first() -> None:
    staged = token_supply(
        small_plans.JOB, CHOSEN.layout, 40.0, storage=planned_storage("gcs"), stage="nvme", corpus_tokens=10**12
    )
    assert staged.staging_seconds == pytest.approx(4e12 * 16 / 25e9)
    assert staged.given_gb_per_s == 20.0 * 16
    held = token_supply(small_plans.JOB, CHOSEN.layout, 40.0, storage=None, stage="shm", corpus_tokens=10**12)
    assert (held.read_seconds, held.staging_seconds) == (None, None)
    found = run_budget(small_plans.JOB, CHOSEN, replace(TERMS, stage="shm", corpus_tokens=10**12))
    assert found.host_memory.tokens_gib == pytest.approx(4e12 / 2**30)
    assert "tokens" in (host_memory_warning(found.host_memory) or "")


def test_everything_fits_together_in_one_budget() -> None:
    found = run_budget(small_plans.JOB, CHOSEN, TERMS)
    assert found.checkpoint.bytes == small_plans.JOB.model.weights * 14
    assert found.host_memory.fits
    assert found.host_memory.staged_checkpoint_gib == pytest.approx(found.checkpoint.bytes / 16 / 2**30)
    assert found.run is not None
    assert found.goodput.goodput is not None
    assert found.run.training_hours == pytest.approx(1000 * CHOSEN.step_seconds / 3600)
    assert found.run.hours == pytest.approx(found.run.training_hours / found.goodput.goodput)
    assert found.run.cost == pytest.approx(found.run.hours * 16 * 92.21)
    assert found.run.energy_kwh == pytest.approx(found.run.hours * 16 * 10.2)
    assert found.run.price_source.startswith("list price of a3-mega on demand, us-central1, 2026-08-22")
    assert found.warnings == ()
    plain = found.to_plain()
    assert {"checkpoint", "goodput", "data", "host_memory", "run", "volume", "warnings", "notes"} == set(plain)
    assert plain["host_memory"]["fits"] is True


def test_a_given_price_wins_and_an_unknown_one_says_what_to_write() -> None:
    assert price_per_gpu_hour(NODE, 2.0) == (2.0, "as given")
    assert price_per_gpu_hour(None) == (None, NO_PRICE_HINT)
    assert price_per_gpu_hour(machine("dgx-h100"))[1] == (f"{NO_PRICE_HINT} (dgx-h100 is not rented out by the hour)")
    assert "capacity blocks" in price_per_gpu_hour(machine("p5e"))[1]
    found = run_budget(small_plans.JOB, CHOSEN, replace(TERMS, machine=machine("dgx-h100")))
    assert found.run is not None
    assert (found.run.cost, found.run.energy_kwh is not None) == (None, True)
    assert found.run.price_source in found.notes


def test_a_run_without_storage_or_length_says_what_is_not_known() -> None:
    found = run_budget(small_plans.JOB, CHOSEN, RunTerms("torch"))
    assert (found.run, found.goodput.goodput, found.host_memory.fits) == (None, None, None)
    assert found.notes[0].startswith("no storage is named")


def test_a_better_interval_is_told_where_it_pays() -> None:
    rarely = run_budget(small_plans.JOB, CHOSEN, replace(TERMS, checkpoint_every=2000, mtbf_hours=500.0))
    assert any("steps instead of 2,000 would raise the expected goodput" in note for note in rarely.notes)


def test_slow_storage_is_warned_about() -> None:
    slow = run_budget(
        small_plans.JOB, CHOSEN, replace(TERMS, storage=planned_storage("amlfs-125", 16), checkpoint_every=10)
    )
    assert any("takes 8.2 minutes to write at 2 GB/s" in warning for warning in slow.warnings)


def test_a_small_host_is_warned_about() -> None:
    found = run_budget(small_plans.JOB, CHOSEN, TERMS)
    small = NODE.model_copy(update={"memory_gib": 90.0})
    memory = host_memory(8, found.checkpoint, found.data, small)
    assert (host_memory_warning(memory) or "").startswith("a node needs 105 GiB of its own 90: 57 for the copy")


def test_whole_machines_are_paid_for() -> None:
    found = run_cost(3600, 1.0, 4, 8, machine=NODE)
    assert found.cost == pytest.approx(92.21)
    assert found.gpu_hours == pytest.approx(4.0)
