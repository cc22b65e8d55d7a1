"""A run that was stopped, killed, moved to another layout or made longer is the run that never was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.recipes.small_recipes import ALONE, recipe_text, small_job, small_recipe, world_size
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import train_prepared, train_skipping, train_small, train_until_killed
from support.runs.small_runs import SmallRuns, checkpoint, difference, events, figures, state
from trainshed.cli import run_cli
from trainshed.data.order import DataOrder
from trainshed.data.sampling.schedule import SkipList
from trainshed.engines.torch.learning_rate import learning_rate
from trainshed.observe.event_log import read_steps
from trainshed.recipe import load_recipe
from trainshed.storage import LocalStore
from trainshed.workflow import prepare_run

STEPS = 12
OFTEN = ("train.steps=12", "checkpoint.every=4", "checkpoint.keep=null")


def assert_bitwise(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    changed = [name for name in one if not torch.equal(one[name], other[name])]
    assert not changed


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", ALONE),
        ("moe", "tp=2,dp=2,shard=full,micro_batch=4"),
        pytest.param("dense", "dp=2,shard=full,micro_batch=2", marks=pytest.mark.full),
        pytest.param("moe", "dp=2,ep=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("tied", "pp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("dense", "cp=2,micro_batch=4", marks=pytest.mark.full),
    ],
)
def test_killed_and_resumed_is_bitwise_never_stopped(
    small_runs: SmallRuns, rank_pool: RankPool, model: str, layout: str
) -> None:
    straight, broken = small_runs.new_folder(), small_runs.new_folder()
    expected = small_runs.train(straight, model, layout, *OFTEN)
    ends = rank_pool.ends(train_until_killed, broken, model, layout, OFTEN, 5, ranks=world_size(layout))
    assert ends[0].signal == "SIGKILL"
    assert all(end.error for end in ends[1:]), "a rank went on without rank 0"
    got = small_runs.train(broken, model, layout, *OFTEN, "checkpoint.resume=must")
    (resumed,) = events(broken, "resume")
    assert resumed["step"] in (4, 8)
    again = [event["step"] for event in events(broken, "step") if event["attempt"] == 2]
    assert again == list(range(resumed["step"], STEPS))
    assert figures(got) == figures(expected)
    for step in (8, STEPS):
        assert_bitwise(state(straight, step), state(broken, step))


JOURNEYS = {
    "dense": [
        ALONE,
        "tp=2,micro_batch=4",
        "pp=2,micro_batch=2",
        "dp=2,shard=full,micro_batch=2",
        "cp=2,micro_batch=4",
        "dp=2,micro_batch=2",
        "tp=2,pp=2,micro_batch=4",
        "dp=4,shard=zero2,micro_batch=2",
        "pp=2,dp=2,shard=full,micro_batch=2",
        ALONE,
    ],
    "moe": [
        "dp=2,ep=2,micro_batch=4",
        "tp=2,ep=2,micro_batch=4",
        "pp=2,micro_batch=2",
        "tp=2,etp=2,micro_batch=4",
        "dp=4,ep=2,shard=full,replicate=2,micro_batch=2",
        ALONE,
        "cp=2,ep=2,micro_batch=4",
        "tp=2,dp=2,ep=4,shard=none,micro_batch=4",
    ],
    "tied": [
        "pp=2,micro_batch=2",
        "tp=2,micro_batch=4",
        "pp=2,dp=2,schedule=zero_bubble,micro_batch=2",
        "cp=2,tp=2,micro_batch=4",
        ALONE,
        "tp=2,pp=2,dp=2,micro_batch=2",
    ],
}
LEG = 2


@pytest.mark.parametrize("model", ["dense", "moe", pytest.param("tied", marks=pytest.mark.full)])
def test_a_run_that_moves_to_another_layout_every_other_step_keeps_its_curve(small_runs: SmallRuns, model: str) -> None:
    straight, moved = small_runs.new_folder(), small_runs.new_folder()
    legs = JOURNEYS[model]
    expected = small_runs.train(straight, model, ALONE, f"train.steps={LEG * len(legs)}")
    got: list[dict[str, Any]] = []
    for number, layout in enumerate(legs, start=1):
        got = small_runs.train(moved, model, layout, f"train.steps={LEG * number}")
    assert [event["step"] for event in events(moved, "resume")] == [LEG * number for number in range(1, len(legs))]
    assert [event["batch_hash"] for event in got] == [event["batch_hash"] for event in expected]
    assert difference(expected, got, "loss") <= 1e-9
    assert difference(expected, got, "grad_norm") <= 1e-9
    there, here = state(straight, LEG * len(legs)), state(moved, LEG * len(legs))
    assert there.keys() == here.keys()
    for name, tensor in there.items():
        torch.testing.assert_close(here[name], tensor, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def test_a_longer_run_has_the_same_past(small_runs: SmallRuns) -> None:
    straight, extended = small_runs.new_folder(), small_runs.new_folder()
    expected = small_runs.train(straight, "moe", ALONE, "train.steps=8")
    small_runs.train(extended, "moe", ALONE, "train.steps=3")
    assert figures(small_runs.train(extended, "moe", ALONE, "train.steps=8")) == figures(expected)
    assert_bitwise(state(straight, 8), state(extended, 8))


def test_a_run_that_is_made_longer_asks_about_its_decay_and_never_jumps_in_silence(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_text("dense"))
    unsaid = "train.schedule.decay=null"
    run = prepare_run(
        load_recipe(str(tmp_path / "recipe.yaml"), [unsaid, "train.steps=6", f"store={tmp_path}"]), id="it"
    )
    rank_pool.run(train_prepared, run.folder, ALONE)

    def go_on(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trainshed", "train", "recipe.yaml", "--id", "it", *overrides]
        return subprocess.run([*command, f"store={tmp_path}"], cwd=tmp_path, capture_output=True, text=True)

    refused = go_on(unsaid, "train.steps=8")
    assert refused.returncode == 2
    assert "this run's learning rate decays until step 6; with 8 steps it would go from" in refused.stderr
    assert "write train.schedule.decay=6 to keep the curve" in refused.stderr
    assert len(events(run.folder, "start")) == 1, "no rank was started"
    kept = go_on("train.schedule.decay=6", "train.steps=8")
    assert kept.returncode == 0, kept.stderr
    rates = [event["lr"] for event in read_steps(LocalStore(run.folder), "")]
    assert rates == [learning_rate(step, 6, 3e-3, run.recipe.train.schedule) for step in range(8)]
    assert rates[6:] == [1e-3, 1e-3]
    stretched = go_on("train.schedule.decay=20", "train.steps=9")
    assert stretched.returncode == 0, stretched.stderr
    assert "warning: the learning rate goes from 0.001 in step 8 to 0.00" in stretched.stderr
    assert "lr 1.00e-03" in kept.stderr


def test_a_folder_in_the_place_of_latest_is_named_before_a_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe_text("dense"))
    run = prepare_run(load_recipe(str(tmp_path / "recipe.yaml"), [f"store={tmp_path}"]), id="it")
    (run.folder / "checkpoints" / "latest").mkdir(parents=True)
    assert run_cli(["train", str(tmp_path / "recipe.yaml"), "--id", "it", f"store={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert "`latest` is a folder, and must be the file that names the newest checkpoint" in said
    assert not events(run.folder, "start")


def test_every_step_says_which_tokens_it_has_seen(small_runs: SmallRuns) -> None:
    ramp = "train.batch_ramp={start: 4, increment: 2, samples: 24}"
    folder = small_runs.new_folder()
    small_runs.train(folder, "dense", "dp=2,micro_batch=1", "train.steps=3", ramp)
    got = small_runs.train(folder, "dense", "cp=2,micro_batch=2", "train.steps=8", ramp)
    order = small_job(folder, small_recipe("dense", [ramp]), ALONE).order
    assert [event["batch_hash"] for event in got] == [order.batch_hash(step) for step in range(8)]
    assert [event["tokens"] for event in got] == [order.consumed(step + 1) * 16 for step in range(8)]
    facts = checkpoint(folder, 8).facts
    assert facts["step"] == 8
    assert facts["consumed_samples"] == order.consumed(8) == 4 * 3 + 6 * 2 + 8 * 3
    assert (facts["skipped_steps"], facts["data_skip"], facts["sequence_length"]) == (0, [], 16)


def test_fresh_and_must_say_what_they_did_not_find(small_runs: SmallRuns, rank_pool: RankPool) -> None:
    folder = small_runs.new_folder()

    def refused(layout: str, wish: str) -> str:
        overrides = ("train.steps=2", f"checkpoint.resume={wish}")
        ends = rank_pool.ends(train_small, folder, "dense", layout, overrides, ranks=world_size(layout))
        assert all(end.error for end in ends), "all ranks end where one refuses"
        return ends[0].error or ""

    said = refused("dp=2,micro_batch=2", "must")
    assert "InputError: command line: checkpoint.resume=…: `resume: must`, and this run has no complete" in said
    assert "write `resume: auto` to start" in said
    small_runs.train(folder, "dense", ALONE, "train.steps=2", "checkpoint.resume=fresh")
    said = refused(ALONE, "fresh")
    assert "`resume: fresh`, and there is a checkpoint of step 2" in said
    assert "write `resume: auto` to go on from it, or start another run with --id" in said


def test_samples_may_be_skipped_as_long_as_the_run_has_not_passed_them(
    small_runs: SmallRuns, rank_pool: RankPool
) -> None:
    folder = small_runs.new_folder()
    before = small_runs.train(folder, "dense", ALONE, "train.steps=3")
    longer = (folder, "dense", ALONE, ("train.steps=6",))
    (end,) = rank_pool.ends(train_skipping, *longer, [(23, 30)])
    assert "InputError: data.skip: `data.skip` says something else about the first 24 samples" in (end.error or "")
    assert "skip samples from 24 on" in (end.error or "")
    assert rank_pool.run(train_skipping, *longer, [(24, 30), (41, 43)]) == [0]
    (end,) = rank_pool.ends(train_small, *longer[:3], ("train.steps=8",))
    assert "says something else about the first 56 samples" in (end.error or ""), "a skip that is taken back"
    source = small_job(folder, small_recipe("dense"), ALONE).order
    skipping = DataOrder(source.sources, source.schedule, skip=SkipList([(24, 30), (41, 43)]))
    got = read_steps(LocalStore(folder), "")
    assert figures(got[:3]) == figures(before)
    assert [event["batch_hash"] for event in got] == [skipping.batch_hash(step) for step in range(6)]
    assert checkpoint(folder, 6).facts["data_skip"] == [[24, 30], [41, 43]]


def test_a_recipe_whose_past_would_be_another_is_refused(small_runs: SmallRuns, rank_pool: RankPool) -> None:
    folder = small_runs.new_folder()
    small_runs.train(folder, "dense", ALONE, "train.steps=2")
    refusals = {
        "train.global_batch=16": "the checkpoint of step 2 has consumed 16 samples, the recipe says 32",
        "data.sequence_length=8": "was trained on sequences of 16 tokens, the recipe says 8",
        "train.precision=fp32": "is float64 [61, 16] in the checkpoint and float32 [61, 16] here",
        "model.config.layers=3": "does not hold model.layers.2.attention.norm.weight",
    }
    for change, sentence in refusals.items():
        (end,) = rank_pool.ends(train_small, folder, "dense", ALONE, ("train.steps=3", change))
        assert sentence in (end.error or ""), change
    assert [event["step"] for event in events(folder, "step")] == [0, 1]
