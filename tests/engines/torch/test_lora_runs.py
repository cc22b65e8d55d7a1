"""Runs with adapters: they begin at their base, change nothing of it, save adapters alone and go on elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from support.models.tiny_models import save_tiny_hf
from support.recipes.small_recipes import ALONE, MODELS, world_size
from support.runs.lora_runs import LORA, AdaptedRuns, train_adapters, train_hashing, write_base
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import train_prepared
from support.runs.small_runs import checkpoint, difference, events, figures, state
from trainshed.checkpoints.base import BaseWeights
from trainshed.models.parameters import lora_parameter_count, lora_parameters
from trainshed.recipe import Lora, ModelConfig, parse_recipe
from trainshed.workflow import prepare_run

DORA = "{rank: 4, alpha: 8, targets: [attn, mlp], dora: true}"
DROPPING = "{rank: 4, alpha: 8, targets: [attn, mlp], dropout: 0.1}"
NF4_SIZES = {"hidden": 64, "heads": 4, "head_dim": 32, "ffn": 128}


def lora_of(text: str) -> Lora:
    return Lora.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("family", "layout", "lora"),
    [
        ("llama", "tp=2,micro_batch=2", DORA),
        ("qwen3_moe", "dp=2,ep=2,shard=full,micro_batch=2", LORA),
        pytest.param("gpt2", "pp=2,micro_batch=2", LORA, marks=pytest.mark.full),
        pytest.param("qwen2", "dp=2,shard=full,micro_batch=2", DORA, marks=pytest.mark.full),
    ],
)
def test_a_run_begins_at_the_loss_of_its_base(
    rank_pool: RankPool, tmp_path: Path, family: str, layout: str, lora: str
) -> None:
    save_tiny_hf(family, tmp_path / "hf")
    body = {
        "trainshed": 1,
        "name": "adapted",
        "model": {"from": str(tmp_path / "hf")},
        "data": {"synthetic": True, "sequence_length": 64},
        "train": {"steps": 2, "global_batch": 4, "precision": "fp32", "optimizer": {"lr": 1e-3}},
        "store": str(tmp_path / "store"),
    }
    run = prepare_run(parse_recipe(yaml.safe_dump(body), [f"train.lora={lora}"]))
    assert set(rank_pool.run(train_prepared, run.folder, layout, ranks=world_size(layout))) == {0}
    (probe,) = events(run.folder, "probe")
    assert abs(probe["loss"] - probe["expected"]) <= 1e-5
    assert [event["step"] for event in events(run.folder, "step")] == [0, 1]


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_a_checkpoint_holds_the_adapters_alone(adapted_runs: AdaptedRuns, model: str) -> None:
    folder = adapted_runs.new_folder()
    adapted_runs.train(folder, model, ALONE, "train.steps=2")
    config, lora = ModelConfig.model_validate(MODELS[model]), lora_of(LORA)
    adapters = [parameter.name for parameter in lora_parameters(config, lora)]
    expected = {"optimizer.updates", *(f"model.{name}" for name in adapters)}
    expected |= {f"optimizer.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in adapters}
    tensors = state(folder, 2)
    assert set(tensors) == expected
    assert sum(tensor.numel() for tensor in tensors.values()) == 3 * lora_parameter_count(config, lora) + 1
    spec = checkpoint(folder, 2).manifest.spec
    base = BaseWeights.from_folder(adapted_runs.base(model))
    assert spec["lora"] == {
        "rank": 4,
        "alpha": 8.0,
        "dropout": 0.0,
        "targets": ["all-linear"],
        "rslora": False,
        "dora": False,
    }
    assert spec["base"] == {"from": str(adapted_runs.base(model)), "sha256": base.sha256}
    (note,) = [event["text"] for event in events(folder, "note") if "adapters are trained" in event["text"]]
    assert f"{lora_parameter_count(config, lora):,} weights" in note


@pytest.mark.parametrize(
    ("layout", "lora", "precision"),
    [
        ("dp=2,shard=full,micro_batch=2", LORA, "bf16"),
        ("tp=2,micro_batch=4", "{rank: 4, alpha: 8, targets: [attn], quantize: int8}", "fp32"),
        pytest.param("dp=2,pp=2,micro_batch=2", DORA, "bf16", marks=pytest.mark.full),
    ],
)
def test_nothing_of_the_base_changes(
    adapted_runs: AdaptedRuns, rank_pool: RankPool, layout: str, lora: str, precision: str
) -> None:
    base = adapted_runs.base("dense")
    files = BaseWeights.from_folder(base)
    overrides = ("train.steps=4", f"train.precision={precision}")
    reports = rank_pool.run(
        train_hashing,
        adapted_runs.new_folder(),
        "dense",
        layout,
        base,
        lora,
        overrides,
        ranks=world_size(layout),
    )
    for report in reports:
        assert report["before"]
        assert report["after"] == report["before"]
        assert report["gradients"] == []
        frozen = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}[precision]
        assert report["frozen"] == {frozen}
        assert report["trained"] == {"torch.float32"}
        if "dp" in layout:
            # The frozen weights are gathered as they are stored; adapters are cast first.
            assert report["gathered"] == {"frozen": {frozen}, "trained": {frozen}}
    assert BaseWeights.from_folder(base).sha256 == files.sha256


JOURNEYS: dict[str, tuple[str, list[str]]] = {
    "dense": (
        DORA,
        [
            ALONE,
            "tp=2,micro_batch=4",
            "pp=2,micro_batch=2",
            "dp=2,shard=full,micro_batch=2",
            "cp=2,micro_batch=4",
            "dp=4,shard=zero2,micro_batch=2",
            ALONE,
        ],
    ),
    "moe": (
        LORA,
        [
            "dp=2,ep=2,micro_batch=4",
            "tp=2,etp=2,micro_batch=4",
            ALONE,
            "dp=4,ep=2,shard=full,micro_batch=2",
            "tp=2,ep=2,micro_batch=4",
        ],
    ),
}


@pytest.mark.parametrize("model", JOURNEYS)
def test_a_run_that_moves_to_another_layout_every_other_step_keeps_its_curve(
    adapted_runs: AdaptedRuns, model: str
) -> None:
    lora, legs = JOURNEYS[model]
    straight, moved = adapted_runs.new_folder(), adapted_runs.new_folder()
    expected = adapted_runs.train(straight, model, ALONE, f"train.steps={2 * len(legs)}", lora=lora)
    actual: list[dict[str, Any]] = []
    for number, layout in enumerate(legs, start=1):
        actual = adapted_runs.train(moved, model, layout, f"train.steps={2 * number}", lora=lora)
    assert len(events(moved, "resume")) == len(legs) - 1
    assert difference(expected, actual, "loss") <= 1e-9
    assert difference(expected, actual, "grad_norm") <= 1e-9
    one, other = state(straight, 2 * len(legs)), state(moved, 2 * len(legs))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def test_a_resumed_run_is_bitwise_the_one_that_never_stopped(adapted_runs: AdaptedRuns) -> None:
    straight, stopped = adapted_runs.new_folder(), adapted_runs.new_folder()
    expected = adapted_runs.train(straight, "dense", ALONE, "train.steps=6", lora=DROPPING)
    adapted_runs.train(stopped, "dense", ALONE, "train.steps=3", lora=DROPPING)
    assert figures(adapted_runs.train(stopped, "dense", ALONE, "train.steps=6", lora=DROPPING)) == figures(expected)
    one, other = state(straight, 6), state(stopped, 6)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_adapters_do_not_go_on_upon_another_base(
    adapted_runs: AdaptedRuns, rank_pool: RankPool, tmp_path: Path
) -> None:
    folder = adapted_runs.new_folder()
    adapted_runs.train(folder, "dense", ALONE, "train.steps=2")
    base = write_base("dense", tmp_path, seed=8)
    (end,) = rank_pool.ends(train_adapters, folder, "dense", ALONE, base, LORA, ("train.steps=3",))
    assert "the adapters of step 2 were trained on" in (end.error or "")
    assert "and the base weights here are other ones" in (end.error or "")
    assert "put the old weights back, or start another run with --id" in (end.error or "")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantised_base_says_its_error_and_goes_on_after_a_stop(
    adapted_runs: AdaptedRuns, rank_pool: RankPool, tmp_path: Path, kind: str
) -> None:
    base = write_base("dense", tmp_path, **NF4_SIZES)
    lora = f"{{rank: 4, alpha: 8, targets: [attn, mlp], dora: true, quantize: {kind}}}"
    sizes = tuple(f"model.config.{key}={value}" for key, value in NF4_SIZES.items())
    straight, stopped = adapted_runs.new_folder(), adapted_runs.new_folder()
    for folder, layout, steps in ((straight, ALONE, 4), (stopped, "tp=2,micro_batch=4", 2), (stopped, ALONE, 4)):
        overrides = (*sizes, f"train.steps={steps}")
        codes = rank_pool.run(train_adapters, folder, "dense", layout, base, lora, overrides, ranks=world_size(layout))
        assert set(codes) == {0}
    one, other = (events(folder, "step") for folder in (straight, stopped))
    assert difference(one, other, "loss") <= 1e-9
    notes = [event["text"] for folder in (straight, stopped) for event in events(folder, "note")]
    errors = {text.split("relative error ")[1].split()[0] for text in notes if f"held as {kind}" in text}
    assert len(errors) == 1, "the same weights on every layout and after every start"
    low, high = {"int8": (0.003, 0.02), "nf4": (0.06, 0.12)}[kind]
    assert low < float(errors.pop()) < high
