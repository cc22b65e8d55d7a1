"""Runs that start from a Hugging Face model: proven by its probe before step 0, on every layout, or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from support.models.tiny_models import save_tiny_hf
from support.recipes.small_recipes import world_size
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import train_prepared
from support.runs.small_runs import events
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat
from trainshed.checkpoints.prove.probe import PROBE
from trainshed.errors import NotFound
from trainshed.recipe import Recipe, parse_recipe
from trainshed.workflow import PreparedRun, open_run, prepare_run

LAYOUT = "tp=2,micro_batch=2"


def recipe_from(weights: Path, store: Path, *overrides: str) -> Recipe:
    body = {
        "trainshed": 1,
        "name": "continued",
        "model": {"from": str(weights)},
        # The probe has 64 tokens; a run whose sequences are shorter does not compare it.
        "data": {"synthetic": True, "sequence_length": 64},
        "train": {"steps": 2, "global_batch": 4, "precision": "fp32", "optimizer": {"lr": 1e-3}},
        "store": str(store),
    }
    return parse_recipe(yaml.safe_dump(body), overrides)


@pytest.fixture
def prepared(tmp_path: Path) -> PreparedRun:
    """A run on a tiny Llama, its weights hashed and measured."""
    save_tiny_hf("llama", tmp_path / "hf")
    return prepare_run(recipe_from(tmp_path / "hf", tmp_path / "store"))


def refused(pool: RankPool, run: PreparedRun, layout: str = LAYOUT, with_base: bool = True) -> str:
    """What a run that must not start says; it has not made a step."""
    ends = pool.ends(train_prepared, run.folder, layout, with_base, ranks=world_size(layout))
    assert all(end.error for end in ends)
    assert not events(run.folder, "step")
    return ends[0].error or ""


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", LAYOUT),
        ("qwen3_moe", "dp=2,ep=2,shard=full,micro_batch=2"),
        pytest.param("gpt2", "pp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("llama3", "pp=2,tp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("mistral", "cp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("mixtral", "tp=2,etp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("qwen2", "dp=4,shard=full,micro_batch=1", marks=pytest.mark.full),
        pytest.param("qwen3", "cp=2,tp=2,micro_batch=4", marks=pytest.mark.full),
    ],
)
def test_base_weights_have_the_same_loss_on_every_layout(
    rank_pool: RankPool, tmp_path: Path, family: str, layout: str
) -> None:
    save_tiny_hf(family, tmp_path / "hf", shard_bytes=20_000)
    run = prepare_run(recipe_from(tmp_path / "hf", tmp_path / "store"))
    assert set(rank_pool.run(train_prepared, run.folder, layout, ranks=world_size(layout))) == {0}
    (probe,) = events(run.folder, "probe")
    assert probe["expected"] == json.loads((run.base.folder / PROBE).read_text())["loss"] if run.base else None
    assert abs(probe["loss"] - probe["expected"]) <= 1e-5
    assert [event["step"] for event in events(run.folder, "step")] == [0, 1]


def test_a_run_starts_from_a_megatron_checkpoint_on_another_layout_than_its_files(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    save_tiny_hf("llama", tmp_path / "hf")
    made = convert_weights(
        str(tmp_path / "hf"), str(tmp_path / "megatron"), TargetFormat("megatron", "torch", tp=2, pp=2)
    )
    run = prepare_run(recipe_from(tmp_path / "megatron", tmp_path / "store"))
    assert rank_pool.run(train_prepared, run.folder, LAYOUT, ranks=world_size(LAYOUT)) == [0, 0]
    (probe,) = events(run.folder, "probe")
    assert made.verdict.probe is not None
    assert probe["expected"] == made.verdict.probe.loss, "measured when it was converted"
    assert abs(probe["loss"] - probe["expected"]) <= 1e-5


def test_going_on_reads_the_checkpoint_and_not_the_base_again(rank_pool: RankPool, prepared: PreparedRun) -> None:
    ranks = world_size(LAYOUT)
    assert rank_pool.run(train_prepared, prepared.folder, LAYOUT, ranks=ranks) == [0, 0]
    prepare_run(recipe_from(prepared.folder.parents[3] / "hf", prepared.folder.parents[2], "train.steps=3"))
    assert rank_pool.run(train_prepared, prepared.folder, LAYOUT, ranks=ranks) == [0, 0]
    assert len(events(prepared.folder, "probe")) == 1
    assert [event["step"] for event in events(prepared.folder, "step")] == [0, 1, 2]


def test_without_its_base_weights_a_run_does_not_start_from_random_ones(
    rank_pool: RankPool, prepared: PreparedRun, tmp_path: Path
) -> None:
    said = refused(rank_pool, prepared, "micro_batch=2", with_base=False)
    assert "there are no weights to start from: `model.from` is not resolved" in said
    assert "run `trainshed run RECIPE`, which fetches them" in said
    with pytest.raises(NotFound, match="are not fetched yet"):
        open_run(recipe_from(tmp_path / "hf", tmp_path / "another-store"))


def test_weights_that_changed_behind_our_back_are_refused(rank_pool: RankPool, prepared: PreparedRun) -> None:
    assert prepared.base is not None
    file = prepared.base.files / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert "CorruptData" in refused(rank_pool, prepared)
    # As many bytes as before: ranks do not hash a hundred gigabytes again, the probe finds it.
    file.write_bytes(whole[:-4000] + bytes(4000))
    said = refused(rank_pool, prepared)
    assert "the base weights have a loss of" in said
    assert "the weights were not read as they were written" in said


def test_a_probe_that_does_not_fit_ends_the_run_before_step_0(rank_pool: RankPool, prepared: PreparedRun) -> None:
    assert prepared.base is not None
    stored = prepared.base.folder / PROBE
    body = json.loads(stored.read_text())
    measured = body["loss"]
    stored.write_text(json.dumps(body | {"loss": measured + 0.01}))
    said = refused(rank_pool, prepared)
    found = re.search(r"the base weights have a loss of ([\d.]+) on the probe batch as they lie on this layout", said)
    assert found is not None
    assert abs(float(found[1]) - measured) < 1e-5
    assert f"it was {measured + 0.01:.6f} when they were converted (bound 0.001)" in said
    (probe,) = events(prepared.folder, "probe")
    assert probe["expected"] == measured + 0.01
