"""A batch that gives no number: the run stops before it or passes over it, and says which one it was.

The poison is in the weights a run starts from: the embedding of one token is NaN, so that exactly the batches with that
token among their inputs are bad.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.models.tiny_models import random_hf_model
from support.recipes.small_recipes import small_job, small_recipe, world_size
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import train_from, train_small
from support.runs.small_runs import SmallRuns, checkpoint, events, state
from trainshed.checkpoints.base import fetch_base
from trainshed.observe.event_log import read_steps
from trainshed.storage import LocalStore

STEPS = 20
RUN = (f"train.steps={STEPS}", "train.global_batch=1", "checkpoint.every=1", "checkpoint.keep=null")


@dataclass(frozen=True)
class Poisoned:
    """Base weights, and which of the first samples hold the token whose embedding is NaN."""

    base: Path
    bad: list[int]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Poisoned:
    folder = tmp_path_factory.mktemp("poisoned")
    recipe = small_recipe("dense", RUN)
    order = small_job(folder, recipe, "micro_batch=1").order
    bad = {token: [step for step in range(STEPS) if token in order.batch(step).tokens[:, :-1]] for token in range(61)}
    # Some good steps before it, and some after it.
    token = next(token for token, samples in bad.items() if len(samples) > 2 and 2 <= samples[0] < samples[1] - 3)
    assert recipe.model.config is not None
    random_hf_model(recipe.model.config, 0).save_pretrained(folder / "hf")
    weights = load_file(folder / "hf" / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = torch.nan
    save_file(weights, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    return Poisoned(fetch_base(str(folder / "hf"), folder / "artefacts").folder, bad[token])


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two states are equal, NaNs included."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one if one[name].dim()
    )


@pytest.mark.parametrize("layout", ["tp=2,micro_batch=1", pytest.param("micro_batch=1", marks=pytest.mark.full)])
def test_a_bad_batch_stops_the_run_and_its_hint_leads_past_it(
    small_runs: SmallRuns, rank_pool: RankPool, poisoned: Poisoned, layout: str
) -> None:
    folder, (first, second) = small_runs.new_folder(), poisoned.bad[:2]
    ranks = world_size(layout)
    ends = rank_pool.ends(train_from, folder, layout, RUN, poisoned.base, ranks=ranks)
    for end in ends:
        said = end.error or ""
        assert f"step {first + 1} has a loss nan, gradient norm nan; nothing was updated" in said
        assert f"the checkpoint of step {first} is kept" in said
        assert f"`train.non_finite=skip --id {folder.name}`" in said
        assert f"`data.skip: [[{first}, {first + 1}]]`" in said
    (found,) = events(folder, "non_finite")
    assert (found["step"], found["policy"]) == (first, "stop")
    assert events(folder, "end")[-1]["exit_code"] == 1
    skip = [(first, first + 1)]
    shorter = (f"train.steps={second - 1}", *RUN[1:])
    assert rank_pool.run(train_from, folder, layout, shorter, poisoned.base, skip, ranks=ranks) == [0] * ranks
    assert [event["step"] for event in events(folder, "resume")] == [first]
    assert not any(event["skipped"] for event in read_steps(LocalStore(folder), "")[first:])
    ends = rank_pool.ends(train_from, folder, layout, RUN, poisoned.base, skip, ranks=ranks)
    assert f"`data.skip: [[{first}, {first + 1}], [{second}, {second + 1}]]`" in (ends[0].error or "")


@pytest.mark.parametrize("layout", ["micro_batch=1", pytest.param("tp=2,micro_batch=1", marks=pytest.mark.full)])
def test_skipped_steps_are_counted_and_change_nothing(
    small_runs: SmallRuns, rank_pool: RankPool, poisoned: Poisoned, layout: str
) -> None:
    folder, ranks = small_runs.new_folder(), world_size(layout)
    assert (
        rank_pool.run(train_from, folder, layout, (*RUN, "train.non_finite=skip"), poisoned.base, ranks=ranks)
        == [0] * ranks
    )
    got = read_steps(LocalStore(folder), "")
    assert [event["step"] for event in got if event["skipped"]] == poisoned.bad
    assert [event["step"] for event in got if event["loss"] is None] == poisoned.bad
    assert [event["step"] for event in events(folder, "non_finite")] == poisoned.bad
    for step in (*poisoned.bad[:2], poisoned.bad[0] + 1):
        assert same_bits(state(folder, step), state(folder, step + 1)) == (step in poisoned.bad)
    assert checkpoint(folder, STEPS).facts["skipped_steps"] == len(poisoned.bad)
    assert state(folder, STEPS)["optimizer.updates"] == STEPS - len(poisoned.bad)


def test_weights_that_fly_apart_stop_a_run_without_a_checkpoint(small_runs: SmallRuns, rank_pool: RankPool) -> None:
    folder = small_runs.new_folder()
    absurd = ("train.optimizer.lr=1e+200", "train.schedule.min_lr=0")
    (end,) = rank_pool.ends(train_small, folder, "dense", "micro_batch=2", absurd)
    assert "nothing was updated, there is no checkpoint before it" in (end.error or "")
