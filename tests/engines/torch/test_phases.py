"""A training in phases is one training: its rate, its data and its state go on, on any layout and after any kill."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from support.recipes.small_recipes import ALONE, small_job, small_recipe, world_size
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import train_small, train_until_boundary
from support.runs.small_runs import SmallRuns, checkpoint, difference, events, figures, state
from trainshed.engines.torch import rank
from trainshed.engines.torch.rank_env import EventEmitter
from trainshed.observe.events import EventWriter
from trainshed.recipe.phase_spans import phase_spans

UNPHASED = ("train.steps=null", "train.schedule={}")
LONGER = (
    *UNPHASED,
    "train.phases=[{name: short, steps: 4, lr: 3e-3, shape: linear}, "
    "{name: long, steps: 4, sequence_length: 32, global_batch: 4, rope_base: 40000.0, lr: 1e-3, shape: cosine}]",
)
"""A warm-up, then longer sequences with another base of the rotary frequencies."""
SPREAD = (
    *UNPHASED,
    "train.phases=[{steps: 3}, {steps: 3, data: {seed: 7}, global_batch: 4, layout: {cp: 2, micro_batch: 4}}, "
    "{steps: 2, sequence_length: 32, layout: {pp: 2, micro_batch: 2}}]",
)
"""Two ranks on three layouts."""
OFTEN = ("checkpoint.every=3", "checkpoint.keep=null")


def assert_bitwise(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


def test_a_warm_up_and_a_decay_as_phases_are_the_schedule_that_has_both(small_runs: SmallRuns) -> None:
    schedule = small_runs.fresh(
        "dense", ALONE, "train.steps=10", "train.schedule={name: cosine, warmup: 3, min_lr: 1e-3}"
    )
    folder = small_runs.new_folder()
    phases = small_runs.train(
        folder,
        "dense",
        ALONE,
        *UNPHASED,
        "train.phases=[{steps: 3, shape: linear}, {steps: 7, lr: 1e-3, shape: cosine}]",
    )
    assert figures(phases) == figures(schedule)
    assert [event["train_phase"] for event in phases] == ["phase-1"] * 3 + ["phase-2"] * 7
    # Nothing had to be built again: no checkpoint was written between them.
    assert [event["step"] for event in events(folder, "checkpoint") if event["phase"] == "committed"] == [10]


def test_the_rate_of_every_phase_goes_from_where_it_is_to_its_own() -> None:
    recipe = small_recipe(
        "dense",
        (
            *UNPHASED,
            "train.phases=[{steps: 2}, {steps: 4, lr: 1e-3, shape: linear}, {steps: 2, lr: 2e-3}, "
            "{steps: 3, lr: 4e-3, shape: linear}, {steps: 2, lr: 0.0, shape: cosine}]",
        ),
    )
    rates = [span.learning_rate(step) for span in phase_spans(recipe) for step in range(span.start, span.end)]
    expected = [3e-3, 3e-3, 3e-3, 2.5e-3, 2e-3, 1.5e-3, 2e-3, 2e-3, 2.5e-3, 3e-3, 3.5e-3, 4e-3, 2e-3]
    assert all(math.isclose(rate, wanted, rel_tol=1e-12) for rate, wanted in zip(rates, expected, strict=True))


def test_phases_with_the_same_data_share_a_counter_and_others_begin_at_their_own_start(tmp_path: Path) -> None:
    phases = (
        "train.phases=[{steps: 3}, {steps: 2, data: {seed: 7}}, {steps: 2, global_batch: 4}, "
        "{steps: 2, sequence_length: 8}, {steps: 1, data: {seed: 7}}]"
    )
    job = small_job(tmp_path, small_recipe("dense", (*UNPHASED, phases)), ALONE)
    alone = small_job(tmp_path, small_recipe("dense"), ALONE).order
    other = small_job(tmp_path, small_recipe("dense", ("data.seed=7",)), ALONE).order
    first, second, third, fourth, fifth = (phase.order for phase in job.phases)
    assert [first.batch_hash(step) for step in range(3)] == [alone.batch_hash(step) for step in range(3)]
    assert [second.batch_hash(step) for step in (3, 4)] == [other.batch_hash(step) for step in (0, 1)]
    # The third takes samples 24 to 32 of the first's data, in batches of four.
    assert (third.batch(5).tokens == alone.read(alone.skip.to_stream(torch.arange(24, 28).numpy())).tokens).all()
    assert fourth.consumed(7) == 0
    assert fifth.batch_hash(9) == other.batch_hash(2)
    assert [order.run_samples(step) for order, step in ((second, 3), (third, 5), (fourth, 7), (fifth, 9))] == [
        24,
        40,
        48,
        64,
    ]
    assert fifth.run_tokens(9) == 16 * 48 + 8 * 16


def test_longer_sequences_are_a_new_model_that_goes_on_from_the_state_of_the_old_one(small_runs: SmallRuns) -> None:
    folder = small_runs.new_folder()
    steps = small_runs.train(folder, "dense", ALONE, *LONGER)
    assert [event["tokens"] for event in steps] == [128, 256, 384, 512, 640, 768, 896, 1024]
    assert [event["samples"] for event in steps] == [8, 16, 24, 32, 36, 40, 44, 48]
    first, second = events(folder, "train_phase")
    assert (first["name"], first["step"], first["sequence_length"]) == ("short", 0, 16)
    assert (second["name"], second["step"], second["sequence_length"], second["global_batch"]) == ("long", 4, 32, 4)
    assert not events(folder, "resume")
    assert [event["step"] for event in events(folder, "checkpoint") if event["phase"] == "committed"] == [4, 8]
    # The base of the rotary frequencies goes with the weights.
    assert [checkpoint(folder, step).manifest.spec["model"]["rope"]["base"] for step in (4, 8)] == [10000.0, 40000.0]


@pytest.mark.parametrize(
    ("overrides", "layout", "kind", "step"),
    [
        (LONGER, ALONE, "step", 2),
        (LONGER, ALONE, "step", 3),  # the last of its phase: before the boundary's checkpoint is there
        (LONGER, ALONE, "checkpoint", 4),  # it is there, and the next phase has not begun
        (LONGER, ALONE, "train_phase", 4),
        (LONGER, ALONE, "step", 4),
        (SPREAD, "tp=2,micro_batch=4", "checkpoint", 3),
        pytest.param(SPREAD, "tp=2,micro_batch=4", "step", 4, marks=pytest.mark.full),
        pytest.param(SPREAD, "tp=2,micro_batch=4", "train_phase", 6, marks=pytest.mark.full),
    ],
)
def test_a_kill_at_any_moment_around_a_boundary_changes_no_bit(
    small_runs: SmallRuns, rank_pool: RankPool, overrides: tuple[str, ...], layout: str, kind: str, step: int
) -> None:
    straight, broken = small_runs.new_folder(), small_runs.new_folder()
    expected = small_runs.train(straight, "dense", layout, *overrides, *OFTEN)
    ends = rank_pool.ends(
        train_until_boundary, broken, "dense", layout, (*overrides, *OFTEN), kind, step, ranks=world_size(layout)
    )
    assert ends[0].signal == "SIGKILL"
    got = small_runs.train(broken, "dense", layout, *overrides, *OFTEN)
    assert figures(got) == figures(expected)
    assert_bitwise(state(straight, len(expected)), state(broken, len(expected)))


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,shard=full,micro_batch=2",
        "tp=2,pp=2,micro_batch=2",
        pytest.param("cp=2,micro_batch=4", marks=pytest.mark.full),
        pytest.param("pp=2,micro_batch=2", marks=pytest.mark.full),
    ],
)
def test_phases_are_the_same_on_every_layout(small_runs: SmallRuns, layout: str) -> None:
    expected = small_runs.alone("dense", *LONGER)
    got = small_runs.fresh("dense", layout, *LONGER)
    assert [event["batch_hash"] for event in got] == [event["batch_hash"] for event in expected]
    assert difference(expected, got, "loss") <= 1e-9
    assert difference(expected, got, "grad_norm") <= 1e-9


def test_a_phase_with_a_layout_of_its_own_has_the_curve_of_one_process(small_runs: SmallRuns) -> None:
    alone = [override.replace("layout: {cp: 2, micro_batch: 4}", "layout: {micro_batch: 4}") for override in SPREAD]
    alone = [override.replace("layout: {pp: 2, micro_batch: 2}", "layout: {micro_batch: 2}") for override in alone]
    expected = small_runs.fresh("dense", ALONE, *alone)
    folder = small_runs.new_folder()
    got = small_runs.train(folder, "dense", "tp=2,micro_batch=4", *SPREAD)
    assert [event["layout"] for event in events(folder, "train_phase")] == ["tp2", "cp2 zero1", "pp2"]
    assert difference(expected, got, "loss") <= 1e-9
    assert difference(expected, got, "grad_norm") <= 1e-9


@pytest.mark.parametrize(("second", "alarms"), [("data: {seed: 7}, layout: {pp: 2}", 0), ("lr: 1e-3", 2)])
def test_alarms_hold_a_phase_against_what_is_like_it(tmp_path: Path, second: str, alarms: int) -> None:
    phases = f"train.phases=[{{steps: 60}}, {{steps: 60, {second}}}]"
    job = small_job(
        tmp_path, small_recipe("dense", (*UNPHASED, phases, "observe={tensorboard: false, dllogger: false}")), "dp=2"
    )
    named: list[str] = []

    class Writer:
        def emit(self, kind: str, step: int | None, **values: Any) -> None:
            named.extend([values["name"]] if kind == "alarm" else [])

    with ExitStack() as stack:
        emit = EventEmitter(cast("EventWriter", Writer()))
        rank._add_listeners(emit, None, job, tmp_path, 1, stack)
        for step in range(120):
            if step in (0, 60):
                emit("train_phase", step, first_step=step)
            emit("step", step, loss=2.0 if step < 60 else 3.0)
            if step in (70, 90):  # the second of two stages, or a slow rank
                emit("ranks", step, steps=20, compute_seconds=[0.3, 0.6])
    assert named == ["loss_spike", "straggler"][:alarms]


def test_a_longer_last_phase_has_the_same_past(small_runs: SmallRuns) -> None:
    phases = "train.phases=[{{steps: 3, shape: linear}}, {{steps: {}, sequence_length: 32}}]"
    straight, extended = small_runs.new_folder(), small_runs.new_folder()
    expected = small_runs.train(straight, "dense", ALONE, *UNPHASED, phases.format(5))
    small_runs.train(extended, "dense", ALONE, *UNPHASED, phases.format(2))
    got = small_runs.train(extended, "dense", ALONE, *UNPHASED, phases.format(5))
    assert figures(got) == figures(expected)
    assert_bitwise(state(straight, 8), state(extended, 8))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ("[{steps: 4, shape: linear}, {steps: 4, sequence_length: 32}]", "phase 1 has begun"),
        ("[{steps: 3, shape: linear}, {steps: 5, sequence_length: 8}]", "its `sequence_length` is not what it was"),
        ("[{steps: 3, shape: linear}, {steps: 5, sequence_length: 32, global_batch: 4}]", "its `global_batch`"),
        ("[{steps: 3, shape: linear}, {steps: 5, sequence_length: 32, lr: 1e-4}]", "its `lr` is not what it was"),
        (
            "[{steps: 3, shape: linear}, {steps: 5, sequence_length: 32, rope_base: 4e4}]",
            "its `rope_base` is not what it was: rope_base was 10000.0 and would be 40000.0",
        ),
        ("[{steps: 8, sequence_length: 32}]", "was trained in 2 phases"),
    ],
)
def test_a_phase_that_has_begun_cannot_be_another(
    small_runs: SmallRuns, rank_pool: RankPool, changed: str, what: str
) -> None:
    folder = small_runs.new_folder()
    small_runs.train(
        folder,
        "dense",
        ALONE,
        *UNPHASED,
        "train.phases=[{steps: 3, shape: linear}, {steps: 2, sequence_length: 32}]",
    )
    (end,) = rank_pool.ends(train_small, folder, "dense", ALONE, (*UNPHASED, f"train.phases={changed}"))
    assert end.error is not None
    assert what in end.error


def test_the_length_of_a_falling_rate_cannot_change_once_it_has_begun(
    small_runs: SmallRuns, rank_pool: RankPool
) -> None:
    folder = small_runs.new_folder()
    phases = "train.phases=[{{steps: 2}}, {{steps: {}, lr: 0.0, shape: linear}}]"
    small_runs.train(folder, "dense", ALONE, *UNPHASED, phases.format(3))
    (end,) = rank_pool.ends(train_small, folder, "dense", ALONE, (*UNPHASED, phases.format(6)))
    assert end.error is not None
    assert "length was 3 and would be 6" in end.error
