"""Preference runs: trl's loss and gradients on a whole model, the same on every layout, resumed as never stopped."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from support.models.one_process import CPU, by_name, fill_from_hf, gradients, one_process_model
from support.models.tiny_models import hf_model, save_tiny_hf
from support.models.trl_preference import pack_pairs, random_pairs, trl_dpo
from support.recipes.small_recipes import ALONE, world_size
from support.runs.preference_ranks import (
    PAIRS,
    pair_order,
    train_preference,
    train_preference_compiled,
    write_pairs,
)
from support.runs.rank_pool import RankPool
from support.runs.small_runs import events, state
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.step import EvaluationResult, ReferenceModel, StepRunner
from trainshed.models.decoder import Regularization
from trainshed.models.preference_loss import PreferenceRule
from trainshed.observe.event_text import EventFormatter
from trainshed.observe.events import REWARD_KEYS
from trainshed.recipe import Optimizer, parse_recipe
from trainshed.workflow import PreparedRun, prepare_run

LENGTH = 64
STEPS = 8
REWARDS = ("reward_chosen", "reward_rejected", "reward_margin", "logp_chosen", "logp_rejected")
EXACT = ("step", "lr", "tokens", "batch_hash", "pairs", "learned_tokens", "reward_accuracy", "skipped")
"""Figures that rounding does not change."""


def prepared(folder: Path, family: str = "llama", **train: Any) -> PreparedRun:
    """A run on a tiny model, with pairs to learn from."""
    save_tiny_hf(family, folder / "hf")
    body = {
        "trainshed": 1,
        "name": "preferring",
        "model": {"from": str(folder / "hf")},
        "data": {"synthetic": True, "sequence_length": LENGTH},
        "train": {"steps": STEPS, "global_batch": 8, "precision": "fp64", "optimizer": {"lr": 1e-3}, **train},
        "checkpoint": {"every": 4, "keep": None},
        "store": str(folder / "store"),
    }
    run = prepare_run(parse_recipe(yaml.safe_dump(body)))
    write_pairs(run.folder)
    for name in PAIRS:
        pair_order(run.folder, name, LENGTH, 8, build=True)
    return run


def trained(
    pool: RankPool, run: PreparedRun, layout: str, dpo: dict[str, Any] | None = None, **train: Any
) -> list[dict[str, Any]]:
    """The step events of a run on a layout."""
    codes = pool.run(train_preference, run.folder, layout, dpo or {}, train, ranks=world_size(layout))
    assert set(codes) == {0}
    return events(run.folder, "step")


def test_a_tiny_model_learns_a_preference_that_holds_for_pairs_it_has_not_seen(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    run = prepared(tmp_path, precision="fp32", optimizer={"lr": 3e-3})
    steps = trained(rank_pool, run, ALONE, {"beta": 0.5}, steps=40)
    first, last = steps[0], steps[-1]
    assert first["loss"] == pytest.approx(0.6931471805599453, abs=1e-6), "the reference is the model itself"
    assert (first["reward_chosen"], first["reward_rejected"], first["reward_accuracy"]) == (0.0, 0.0, 0.0)
    assert last["loss"] < 0.2
    assert last["reward_accuracy"] > 0.9
    assert last["reward_margin"] == pytest.approx(last["reward_chosen"] - last["reward_rejected"])
    assert 16 <= last["pairs"] <= 80
    before, *_, after = events(run.folder, "validation")
    assert after["reward_accuracy"] > 0.9
    assert after["reward_accuracy"] > before["reward_accuracy"]
    assert after["loss"] < 0.3
    assert set(REWARD_KEYS) <= after.keys()
    lines = EventFormatter(40)
    shown = f"reward accuracy {last['reward_accuracy']:.1%}  margin {last['reward_margin']:.3f}"
    assert shown in (lines.format(last) or "")
    assert f"reward accuracy {after['reward_accuracy']:.1%}" in (lines.format(after) or "")


def figures(run: PreparedRun, kind: str) -> list[dict[str, Any]]:
    """What the steps or validations of a run gave, without their times."""
    names = ("loss", "grad_norm", *REWARDS, *EXACT)
    return [{name: event[name] for name in names if name in event} for event in events(run.folder, kind)]


def assert_same_curve(run: PreparedRun, expected: PreparedRun) -> None:
    """The same figures of every step and validation; those that are rounded within 1e-9."""
    assert len({event["loss"] for event in figures(expected, "step")}) == STEPS, "a run that learns nothing"
    for kind in ("step", "validation"):
        ours, theirs = figures(run, kind), figures(expected, kind)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one.keys() == other.keys()
            for name, value in other.items():
                assert one[name] == (value if name in EXACT else pytest.approx(value, rel=1e-9, abs=1e-9)), name


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process gives, by family and rule; trained once."""
    runs: dict[str, PreparedRun] = {}

    def train(family: str, **dpo: Any) -> PreparedRun:
        key = f"{family} {dpo}"
        if key not in runs:
            runs[key] = prepared(tmp_path_factory.mktemp("alone"), family)
            trained(rank_pool, runs[key], ALONE, dpo)
        return runs[key]

    return train


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "tp=2,micro_batch=4"),
        ("llama", "cp=2,micro_batch=4"),
        ("llama", "pp=2,micro_batch=2"),
        ("llama", "dp=2,micro_batch=2"),
        ("llama", "dp=2,shard=full,micro_batch=2"),
        ("llama", "micro_batch=8,recompute=full"),
        pytest.param("llama", "tp=2,cp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("llama", "pp=2,cp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("llama", "tp=2,pp=2,dp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("llama", "pp=2,schedule=zero_bubble,micro_batch=2", marks=pytest.mark.full),
        pytest.param("llama", "dp=2,shard=none,micro_batch=1", marks=pytest.mark.full),
        pytest.param("llama", "dp=2,shard=zero2,recompute=selective,micro_batch=2", marks=pytest.mark.full),
        pytest.param("gpt2", "pp=2,tp=2,micro_batch=2", marks=pytest.mark.full),
        pytest.param("mixtral", "dp=2,ep=2,micro_batch=4", marks=pytest.mark.full),
    ],
)
def test_a_layout_compares_pairs_like_one_process(
    alone: Any, rank_pool: RankPool, tmp_path: Path, family: str, layout: str
) -> None:
    run = prepared(tmp_path, family)
    trained(rank_pool, run, layout)
    assert_same_curve(run, alone(family))


def test_muon_learns_from_pairs_alike_on_a_layout(rank_pool: RankPool, tmp_path: Path) -> None:
    muon = {"name": "muon", "lr": 1e-3}
    one, spread = (prepared(tmp_path / name, optimizer=muon) for name in ("one", "spread"))
    trained(rank_pool, one, ALONE)
    trained(rank_pool, spread, "dp=2,shard=full,micro_batch=2")
    assert_same_curve(spread, one)


@pytest.mark.full
def test_blocks_captured_as_for_a_gpu_compare_pairs_alike(alone: Any, rank_pool: RankPool, tmp_path: Path) -> None:
    run, layout = prepared(tmp_path), "dp=2,recompute=selective,micro_batch=2"
    codes = rank_pool.run(train_preference_compiled, run.folder, layout, {}, {}, ranks=world_size(layout))
    assert set(codes) == {0}
    assert_same_curve(run, alone("llama"))


def test_context_parallel_ranks_normalise_lengths_like_one_process(
    alone: Any, rank_pool: RankPool, tmp_path: Path
) -> None:
    dpo = {"beta": 0.7, "label_smoothing": 0.1, "length_normalized": True}
    run = prepared(tmp_path)
    trained(rank_pool, run, "cp=2,micro_batch=4", dpo)
    assert_same_curve(run, alone("llama", **dpo))


@pytest.mark.parametrize("layout", [ALONE, pytest.param("pp=2,dp=2,micro_batch=2", marks=pytest.mark.full)])
def test_a_resumed_run_is_bitwise_the_one_that_never_stopped(rank_pool: RankPool, tmp_path: Path, layout: str) -> None:
    straight, resumed = (prepared(tmp_path / name, dropout=0.1) for name in ("straight", "resumed"))
    trained(rank_pool, straight, layout)
    trained(rank_pool, resumed, layout, steps=4)
    trained(rank_pool, resumed, layout)
    assert [event["step"] for event in events(resumed.folder, "resume")] == [4]
    assert figures(resumed, "step") == figures(straight, "step")
    expected, tensors = state(straight.folder, STEPS), state(resumed.folder, STEPS)
    assert expected.keys() == tensors.keys()
    assert all(torch.equal(expected[name], tensors[name]) for name in expected)


def test_a_run_resumed_on_another_layout_still_compares_with_its_base(
    alone: Any, rank_pool: RankPool, tmp_path: Path
) -> None:
    run = prepared(tmp_path)
    trained(rank_pool, run, ALONE, steps=4)
    trained(rank_pool, run, "dp=2,shard=full,micro_batch=2")
    assert_same_curve(run, alone("llama"))


def test_a_resumed_run_that_has_lost_its_base_is_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    run = prepared(tmp_path)
    trained(rank_pool, run, ALONE, steps=4)
    (end,) = rank_pool.ends(train_preference, run.folder, ALONE, {}, {}, ["base"])
    assert "`mode: dpo` compares with the base weights, and this run has none" in (end.error or "")
    assert len(events(run.folder, "step")) == 4


def test_in_bf16_the_reference_gives_what_the_model_gives_before_it_learns(rank_pool: RankPool, tmp_path: Path) -> None:
    run = prepared(tmp_path, precision="bf16")
    first = trained(rank_pool, run, "dp=2,micro_batch=2", steps=1)[0]
    assert (first["reward_chosen"], first["reward_rejected"]) == (0.0, 0.0)
    assert first["grad_norm"] > 0


@pytest.mark.parametrize(
    ("loss_type", "rule"),
    [("sigmoid", PreferenceRule(0.3)), ("sigmoid_norm", PreferenceRule(1.5, length_normalized=True))],
)
def test_the_loss_and_all_gradients_of_a_whole_model_are_those_of_trl(
    loss_type: str, rule: PreferenceRule, tmp_path: Path
) -> None:
    config = save_tiny_hf("llama", tmp_path / "model", seed=0)
    save_tiny_hf("llama", tmp_path / "reference", seed=1)
    pairs = random_pairs(5, config.vocab_size)
    theirs = trl_dpo(
        (model := hf_model(tmp_path / "model")),
        hf_model(tmp_path / "reference"),
        pairs,
        tmp_path / "trl",
        loss_type=loss_type,
        beta=rule.beta,
    )
    theirs.loss.backward()
    ours, reference = (
        one_process_model(config, length=LENGTH, regularization=Regularization(preference=rule)) for _ in range(2)
    )
    fill_from_hf(ours, tmp_path / "model")
    fill_from_hf(reference, tmp_path / "reference")
    # Rows of different numbers of pairs, each a micro-batch: the mean is over pairs, not over rows.
    packed = pack_pairs([pairs[:3], pairs[3:]], LENGTH)
    batch = LocalBatch(2, packed.tokens, packed.labels, document_starts=packed.document_starts)
    runner = StepRunner(ours, AdamW(ours.shards, Optimizer(lr=1e-3), CPU), ReferenceModel(reference))
    ours.normalization.pairs.fill_(1 / len(pairs))
    assert runner.reference is not None
    runner.forward_backward.train(replace(batch, reference_logps=runner.reference.document_logps(batch)))
    expected = {name: shard.local_tensor for name, shard in by_name(with_gradients_as_weights(model, tmp_path)).items()}
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    metrics = runner.step(batch, 2, 1e-3).read()
    assert metrics.loss == pytest.approx(theirs.loss.item(), rel=1e-6)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in expected.values()))
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-5)
    assert metrics.pairs == 5
    assert metrics.learned_tokens == sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
    if not rule.length_normalized:
        for name, their_name in [
            ("reward_chosen", "rewards/chosen"),
            ("reward_rejected", "rewards/rejected"),
            ("reward_margin", "rewards/margins"),
            ("reward_accuracy", "rewards/accuracies"),
            ("logp_chosen", "logps/chosen"),
            ("logp_rejected", "logps/rejected"),
        ]:
            assert metrics.rewards[name] == pytest.approx(theirs.figures[their_name], rel=1e-6, abs=1e-6), name


def with_gradients_as_weights(model: Any, folder: Path) -> Any:
    """A model of ours whose weights are the gradients of a transformers model, in the places of their weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder / "gradients")
    config = save_tiny_hf("llama", folder / "config")
    holder = one_process_model(config, length=LENGTH)
    fill_from_hf(holder, folder / "gradients")
    return holder


def test_batches_of_a_validation_weigh_as_much_as_they_have_labels() -> None:
    one, other = EvaluationResult(1.0, 6, {"reward_accuracy": 0.5}), EvaluationResult(4.0, 3, {"reward_accuracy": 1.0})
    empty = EvaluationResult(float("nan"), 0, {"reward_accuracy": 0.0})
    together = EvaluationResult.mean([one, other, empty])
    assert together == EvaluationResult(2.0, 9, {"reward_accuracy": pytest.approx(2 / 3)})
    assert EvaluationResult.mean([empty, one]).loss == 1.0
    assert math.isnan(EvaluationResult.mean([empty]).loss)
