"""Averaged weights: PyTorch's EMA, the same on every layout; validated, saved and exported by choice."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from support.models.one_process import one_process_model
from support.models.tiny_models import tiny_config
from support.recipes.small_recipes import ALONE, world_size
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import train_validating
from support.runs.small_runs import SmallRuns, difference, events, figures, state
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat, open_weights
from trainshed.engines.torch.weight_average import WeightAverage
from trainshed.errors import InputError
from trainshed.models.parameters import parameters
from trainshed.recipe.optimizer import Ema

EMA = "train.ema={decay: 0.7}"
GOOD, BAD = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)


def test_the_average_is_that_of_torch_and_a_skipped_step_leaves_it() -> None:
    model = one_process_model(tiny_config("llama", layers=1), length=8, precision="fp64")
    average = WeightAverage(model, Ema(decay=0.9))
    average.start()
    copies = torch.nn.ParameterList([shard.local_tensor.clone() for shard in model.shards])
    theirs = AveragedModel(copies, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(copies)
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        with torch.no_grad():
            for shard, copy in zip(model.shards, copies, strict=True):
                copy += torch.randn(copy.shape, generator=generator, dtype=torch.float64)
                shard.local_tensor.copy_(copy)
        if step == 3:
            average.update(BAD)
            continue
        average.update(GOOD)
        theirs.update_parameters(copies)
    for ours, other in zip(average.averages, theirs.module.parameters(), strict=True):
        torch.testing.assert_close(ours, other.detach(), rtol=1e-12, atol=1e-12)


def test_weights_are_bitwise_back_after_their_averages_were_used() -> None:
    model = one_process_model(tiny_config("llama", layers=1), length=8)
    average = WeightAverage(model, Ema(decay=0.9))
    weights = [shard.local_tensor.clone() for shard in model.shards]
    with average.in_place_of_weights():
        assert all(not shard.local_tensor.any() for shard in model.shards)
    assert all(map(torch.equal, [shard.local_tensor for shard in model.shards], weights))


def test_an_average_changes_nothing_of_the_training_and_is_the_mean_it_says(small_runs: SmallRuns) -> None:
    folder = small_runs.new_folder()
    keep = ("checkpoint={every: 1, keep: null}", "train.steps=4")
    assert figures(small_runs.train(folder, "dense", ALONE, EMA, *keep)) == figures(small_runs.alone("dense"))[:4]
    states = [state(folder, step) for step in range(1, 5)]
    name = "layers.0.attention.qkv.weight"
    for before, after in pairwise(states):
        expected = 0.7 * before[f"ema.{name}"] + 0.3 * after[f"model.{name}"]
        torch.testing.assert_close(after[f"ema.{name}"], expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("model", "first", "then"),
    [
        ("dense", "dp=2,shard=full,micro_batch=2", "tp=2,micro_batch=4"),
        pytest.param("moe", "dp=2,ep=2,micro_batch=4", ALONE, marks=pytest.mark.full),
        pytest.param("tied", "pp=2,micro_batch=2", "dp=2,micro_batch=2", marks=pytest.mark.full),
    ],
)
def test_every_layout_has_the_same_average_also_after_a_change_of_layout(
    small_runs: SmallRuns, model: str, first: str, then: str
) -> None:
    alone, folder = small_runs.new_folder(), small_runs.new_folder()
    small_runs.train(alone, model, ALONE, EMA)
    small_runs.train(folder, model, first, EMA, "train.steps=9")
    small_runs.train(folder, model, then, EMA)
    expected, actual = state(alone, 20), state(folder, 20)
    averages = [name for name in expected if name.startswith("ema.")]
    assert len(averages) == sum(name.startswith("model.") for name in expected)
    for name in averages:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", "dp=2,shard=full,micro_batch=2"),
        pytest.param("dense", "dp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("dense", "pp=2,micro_batch=2", marks=pytest.mark.full),
    ],
)
def test_validation_with_the_average_is_the_same_everywhere_and_leaves_training_alone(
    small_runs: SmallRuns, rank_pool: RankPool, model: str, layout: str
) -> None:
    alone, spread, plain = (small_runs.new_folder() for _ in range(3))
    validated = ("train.steps=7", "train.ema={decay: 0.7}")
    for folder, placed, keys in ((alone, ALONE, validated), (spread, layout, validated), (plain, ALONE, validated[:1])):
        assert set(rank_pool.run(train_validating, folder, model, placed, keys, ranks=world_size(placed))) == {0}
    assert difference(events(alone, "validation"), events(spread, "validation"), "loss") <= 1e-9
    assert difference(events(alone, "step"), events(spread, "step"), "loss") <= 1e-9
    assert figures(events(alone, "step")) == figures(events(plain, "step"))
    assert [event["loss"] for event in events(alone, "validation")] != [
        event["loss"] for event in events(plain, "validation")
    ]


def test_the_average_is_exported_and_proven_and_never_written_over_the_weights(
    small_runs: SmallRuns, tmp_path: Path
) -> None:
    folder = small_runs.new_folder()
    small_runs.train(folder, "dense", ALONE, EMA, "train.precision=fp32")
    stored = state(folder, 20)
    made = convert_weights(str(folder), str(tmp_path / "ema"), TargetFormat("hf"), dtype="fp32", averaged=True)
    assert made.verdict.passed
    exported = load_file(tmp_path / "ema" / "model.safetensors")
    assert torch.equal(exported["model.norm.weight"], stored["ema.norm.weight"])
    assert not torch.equal(exported["model.norm.weight"], stored["model.norm.weight"])
    with open_weights(folder, averaged=True) as weights:
        norm = next(one for one in parameters(weights.config) if one.name == "norm.weight")
        assert torch.equal(weights.read(norm, (0,), norm.shape, torch.float32), stored["ema.norm.weight"])
    with pytest.raises(InputError, match="the conversion of"):
        convert_weights(str(folder), str(tmp_path / "ema"), TargetFormat("hf"), dtype="fp32")


def test_biases_of_routers_are_exported_with_the_average_as_they_are(small_runs: SmallRuns, tmp_path: Path) -> None:
    folder = small_runs.new_folder()
    small_runs.train(
        folder, "latent", ALONE, EMA, "train.precision=fp32", "train.steps=3", "model.config.moe.shared_ffn=16"
    )
    made = convert_weights(str(folder), str(tmp_path / "ema"), TargetFormat("hf"), dtype="fp32", averaged=True)
    assert made.verdict.passed
    exported, stored = load_file(tmp_path / "ema" / "model.safetensors"), state(folder, 3)
    (bias,) = [name for name in stored if "bias" in name][:1]
    theirs = [exported[name] for name in sorted(exported) if name.endswith("e_score_correction_bias")]
    assert any(torch.equal(one.float(), stored[bias].float()) for one in theirs)


def test_a_run_without_an_average_has_none_to_export(small_runs: SmallRuns, tmp_path: Path) -> None:
    folder = small_runs.new_folder()
    small_runs.train(folder, "dense", ALONE, "train.steps=1")
    with pytest.raises(InputError, match="the checkpoint holds no averaged weights"):
        convert_weights(str(folder), str(tmp_path / "ema"), TargetFormat("hf"), averaged=True)
