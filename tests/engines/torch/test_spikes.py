"""Spikes: a step far above its window is skipped, counted and bounded; the same on every layout and after a restart."""

from __future__ import annotations

import statistics

import pytest
import torch

from support.models.one_process import one_process_model
from support.models.tiny_models import tiny_config
from support.recipes.small_recipes import ALONE, world_size
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import train_small
from support.runs.small_runs import SmallRuns, difference, events, figures, state
from trainshed.engines.torch.spikes import SpikeDetector
from trainshed.recipe.optimizer import Spikes

SPIKES = "train.spikes={sigma: 1.2, window: 4, max_in_a_row: 20}"
"""So narrow that steps of a quiet run are skipped."""
ZERO = torch.zeros((), dtype=torch.float64)


def detector(**keys: object) -> SpikeDetector:
    model = one_process_model(tiny_config("llama", layers=1), length=8)
    return SpikeDetector(Spikes.model_validate(keys), model.mesh)


def test_decisions_are_those_of_a_plain_window() -> None:
    generator = torch.Generator().manual_seed(3)
    sigma, window = 1.5, 5
    ours, losses, norms, skipped = detector(sigma=sigma, window=window), [], [], []
    for step in range(60):
        loss, norm = (
            torch.rand(2, generator=generator, dtype=torch.float64) + (2.0 if step % 13 == 9 else 0.0)
        ).tolist()
        bad = step == 30
        full = len(losses) >= window
        spike = (
            (not bad)
            and full
            and any(
                value > statistics.mean(kept[-window:]) + sigma * statistics.stdev(kept[-window:])
                for value, kept in ((loss, losses), (norm, norms))
            )
        )
        if not (spike or bad):
            losses.append(loss)
            norms.append(norm)
        figure = torch.tensor(float("nan") if bad else loss, dtype=torch.float64)
        skip = ours.skip(figure, torch.tensor(norm, dtype=torch.float64), ZERO + float(bad))
        assert bool(skip) == (spike or bad), step
        assert bool(ours.figures()[0]) == spike
        skipped.append(spike)
    assert 3 < sum(skipped) < 40
    assert int(ours.counts[0]) == len(losses)


def test_skips_in_a_row_are_counted_and_a_learned_step_ends_the_row() -> None:
    ours = detector(sigma=2.0, window=2)
    rows = []
    for loss in (1.0, 1.1, 9.0, 9.0, 9.0, 1.05, 9.0):
        ours.skip(ZERO + loss, ZERO + 1.0, ZERO)
        rows.append(int(ours.figures()[0]))
    assert rows == [0, 0, 1, 2, 3, 0, 1]


def test_a_low_loss_is_never_a_spike() -> None:
    ours = detector(sigma=1.0, window=3)
    assert [bool(ours.skip(ZERO + loss, ZERO + 1.0, ZERO)) for loss in (5.0, 5.1, 5.2, 0.1)] == [False] * 4


@pytest.mark.parametrize(
    ("model", "layout", "extra"),
    [
        ("dense", "tp=2,micro_batch=4", ()),
        pytest.param("moe", "dp=2,ep=2,micro_batch=4", (), marks=pytest.mark.full),
        pytest.param("dense", "pp=2,dp=2,micro_batch=2", ("train.optimizer.name=muon",), marks=pytest.mark.full),
    ],
)
def test_every_layout_skips_the_same_steps_and_goes_on_alike_after_a_restart(
    small_runs: SmallRuns, model: str, layout: str, extra: tuple[str, ...]
) -> None:
    expected, folder = small_runs.alone(model, SPIKES, *extra), small_runs.new_folder()
    skipped = [event["step"] for event in expected if event["skipped"]]
    assert skipped, "a policy that skips nothing proves nothing"
    small_runs.train(folder, model, layout, SPIKES, *extra, "train.steps=11")
    actual = small_runs.train(folder, model, ALONE, SPIKES, *extra)
    assert [event["step"] for event in actual if event["skipped"]] == skipped
    assert [event["step"] for event in events(folder, "spike")] == skipped
    assert difference(expected, actual, "loss") <= 1e-9
    assert difference(expected, actual, "grad_norm") <= 1e-9


def test_a_resumed_run_is_bitwise_the_one_that_never_stopped(small_runs: SmallRuns) -> None:
    straight, stopped = small_runs.new_folder(), small_runs.new_folder()
    expected = small_runs.train(straight, "dense", ALONE, SPIKES)
    small_runs.train(stopped, "dense", ALONE, SPIKES, "train.steps=9")
    assert figures(small_runs.train(stopped, "dense", ALONE, SPIKES)) == figures(expected)
    one, other = state(straight, 20), state(stopped, 20)
    assert {"spikes.window", "spikes.counts"} <= one.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "second", ["global_batch: 1, data: {seed: 5}", pytest.param("sequence_length: 32", marks=pytest.mark.full)]
)
def test_a_phase_that_cannot_be_compared_begins_with_an_empty_window(small_runs: SmallRuns, second: str) -> None:
    # The gradient of one row is larger than that of eight: held against the first phase, every step would be a spike.
    phases = (
        "train.steps=null",
        "train.schedule={}",
        "train.spikes={sigma: 6, window: 4, max_in_a_row: 1}",
        f"train.phases=[{{steps: 6}}, {{steps: 4, {second}}}, {{steps: 3, {second}}}]",
        "checkpoint.every=6",
    )
    straight = small_runs.new_folder()
    got = small_runs.train(straight, "dense", "micro_batch=1", *phases)
    assert [event["step"] for event in got if event["skipped"]] == []
    # Steps 6 to 12: the third phase is like the second, so its window goes on.
    assert state(straight, 13)["spikes.counts"].tolist() == [7, 0]
    assert state(straight, 6)["spikes.counts"].tolist() == [6, 0]
    stopped = small_runs.new_folder()
    small_runs.train(stopped, "dense", "micro_batch=1", *phases, "train.phases=[{steps: 6}]")
    assert figures(small_runs.train(stopped, "dense", "micro_batch=1", *phases)) == figures(got)
    assert torch.equal(state(stopped, 13)["spikes.window"], state(straight, 13)["spikes.window"])


@pytest.mark.parametrize("layout", [ALONE, pytest.param("tp=2,micro_batch=4", marks=pytest.mark.full)])
def test_too_many_in_a_row_end_the_run_with_figures_and_a_way_on(
    small_runs: SmallRuns, rank_pool: RankPool, layout: str
) -> None:
    folder = small_runs.new_folder()
    # A rate that blows the model up: from some step on every loss is above what was.
    blown = ("train.optimizer={lr: 3.0, clip: null}", "train.spikes={sigma: 0.01, window: 2, max_in_a_row: 2}")
    for end in rank_pool.ends(train_small, folder, "dense", layout, blown, ranks=world_size(layout)):
        assert "3 steps in a row were skipped as spikes, the last is step" in (end.error or "")
        assert "(limit " in (end.error or "")
        assert f"--id {folder.name}" in (end.error or "")
    assert [event["in_a_row"] for event in events(folder, "spike")][-3:] == [1, 2, 3]
    assert events(folder, "end")[-1]["exit_code"] == 1
