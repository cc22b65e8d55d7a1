"""Multi-token prediction: transformers' own layers give the same losses, layouts agree, and weights keep its layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from support.models.mtp_models import both_logits, save_with_mtp
from support.models.tiny_models import save_tiny_hf
from support.recipes.small_recipes import ALONE, small_job, small_recipe
from support.runs.small_runs import SmallRuns, difference, figures, state
from trainshed.checkpoints.base import fetch_base
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat, open_weights
from trainshed.engines.torch.model import RankModel, build_model
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.weights import load_base_weights
from trainshed.errors import RecipeError
from trainshed.models.collectives import SINGLE_RANK
from trainshed.models.decoder import Regularization
from trainshed.models.loss import IGNORE_INDEX
from trainshed.models.multi_token import further_tokens
from trainshed.models.parameters import is_unused_mtp, parameters
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, ModelConfig

MTP, TWO = "train.mtp={}", "train.mtp={layers: 2, weight: 0.5}"
LENGTH, WEIGHT = 12, 0.3


def build(config: ModelConfig) -> RankModel:
    layout = resolve_layout(Layout.model_validate({"micro_batch": 2}), config)
    return build_model(
        config,
        single_rank_mesh(layout, torch.device("cpu")),
        sequence_length=LENGTH,
        precision="fp64",
        regularization=Regularization(mtp=WEIGHT),
    )


def expected_losses(model: Any, extra: dict[str, torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The sums of both losses, computed with transformers' layers and plain formulas."""
    logits, further = both_logits(model, extra, rows)
    return (
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"),
        F.cross_entropy(further[:, :-1].flatten(0, 1), rows[:, 2:].flatten(), reduction="sum"),
    )


def test_losses_and_gradients_are_those_of_transformers_layers(tmp_path: Path) -> None:
    config, theirs, extra = save_with_mtp(tmp_path / "hf")
    base = fetch_base(str(tmp_path / "hf"), tmp_path / "artefacts")
    assert base.mtp_layers == 1
    ours = build(config)
    load_base_weights(ours, base, seed=0)
    rows = torch.randint(0, config.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    for tensor in extra.values():
        tensor.requires_grad_()
    loss, further = expected_losses(theirs, extra, rows)
    (loss + WEIGHT * further).backward()
    terms = ours.stages[0](rows[:, :-1], rows[:, 1:])
    terms[0].backward()
    assert terms[2].item() == pytest.approx(WEIGHT * further.item(), rel=1e-6)
    assert terms[0].item() == pytest.approx((loss + WEIGHT * further).item(), rel=1e-6)
    gradients = {shard.name: shard.gradient for shard in ours.shards}
    prefix = f"layers.{config.layers}.mtp"
    wanted = {
        f"{prefix}.projection.weight": extra["eh_proj.weight"].grad,
        f"{prefix}.embedding_norm.weight": extra["enorm.weight"].grad,
        f"{prefix}.hidden_norm.weight": extra["hnorm.weight"].grad,
        f"{prefix}.norm.weight": extra["shared_head.norm.weight"].grad,
        "embedding.weight": theirs.model.embed_tokens.weight.grad,
        "head.weight": theirs.lm_head.weight.grad,
    }
    for name, gradient in wanted.items():
        got = gradients[name]
        assert got is not None
        torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-5)  # rotary tables are float32 there
    with torch.no_grad():
        assert ours.stages[0](rows[:, :-1], rows[:, 1:])[2] == 0, "validation measures the next token alone"


def test_a_column_counts_where_every_token_up_to_its_label_is_one() -> None:
    labels = torch.tensor([[5, 6, IGNORE_INDEX, 7, 8, 9]])
    tokens, further = further_tokens(labels, 1, SINGLE_RANK)
    assert further.tolist() == [[6, IGNORE_INDEX, IGNORE_INDEX, 8, 9, IGNORE_INDEX]]
    assert tokens.tolist() == [[5, 0, 0, 7, 8, 0]]
    tokens, further = further_tokens(labels, 2, SINGLE_RANK)
    assert further.tolist() == [[IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, 9, IGNORE_INDEX, IGNORE_INDEX]]
    assert tokens.tolist() == [[0, 0, 0, 8, 0, 0]]


LAYOUTS = [
    ("tp=2,cp=2,ep=2,micro_batch=4", (TWO,), True),
    ("pp=2,dp=2,shard=full,micro_batch=2", (MTP,), True),
    ("tp=2,pp=2,micro_batch=4", (TWO,), False),
    ("dp=2,shard=full,recompute=full,micro_batch=2", (TWO,), False),
    ("cp=2,micro_batch=4", (TWO, "data.document_mask=true"), False),
    ("pp=2,schedule=zero_bubble,dp=2,micro_batch=2", (MTP,), False),
    ("pp=2,vp=2,recompute=selective,micro_batch=2", (MTP, "model.config.layers=4"), False),
    ("dp=4,replicate=2,shard=full,ep=2,micro_batch=2", (MTP,), False),
    ("tp=2,offload=activations,micro_batch=4", (MTP,), False),
]


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [pytest.param(*case[:2], marks=() if case[2] else pytest.mark.full) for case in LAYOUTS],
)
def test_layouts_train_as_one_process(small_runs: SmallRuns, layout: str, overrides: tuple[str, ...]) -> None:
    expected, got = small_runs.alone("latent", *overrides), small_runs.fresh("latent", layout, *overrides)
    assert expected[-1]["mtp_loss"] > 0
    for figure in ("loss", "grad_norm", "mtp_loss", "moe_balance"):
        assert difference(expected, got, figure) <= 1e-9, figure


def test_it_learns_beside_the_next_token_and_resumes_bit_by_bit(small_runs: SmallRuns) -> None:
    saved = (MTP, "checkpoint.every=10", "train.steps=20")
    folder, whole = small_runs.new_folder(), small_runs.new_folder()
    small_runs.train(folder, "latent", ALONE, *saved, "train.steps=10")
    resumed = small_runs.train(folder, "latent", ALONE, *saved)
    straight = small_runs.train(whole, "latent", ALONE, *saved)
    assert figures(resumed) == figures(straight)
    assert straight[-1]["mtp_loss"] < straight[0]["mtp_loss"]
    one, other = state(folder, 20), state(whole, 20)
    assert "model.layers.2.mtp.projection.weight" in one
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_weights_keep_the_layers_in_every_format_and_transformers_loads_them(tmp_path: Path) -> None:
    import transformers

    config, _, _ = save_with_mtp(tmp_path / "hf")
    native = convert_weights(str(tmp_path / "hf"), str(tmp_path / "native"), TargetFormat("native"))
    exported = convert_weights(str(tmp_path / "native"), str(tmp_path / "again"), TargetFormat("hf"))
    assert native.verdict.passed
    assert exported.verdict.passed
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    copies = {name for name in before if name.endswith(("layers.2.embed_tokens.weight", "shared_head.head.weight"))}
    assert before.keys() - copies == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float64)
    with open_weights(tmp_path / "native", config=config.with_mtp_layers(0)) as weights:
        assert not [one.name for one in parameters(weights.config) if ".mtp." in one.name]


def test_a_base_without_the_layers_gets_fresh_ones(tmp_path: Path) -> None:
    config = save_tiny_hf("deepseek_v3", tmp_path / "hf", seed=1).with_mtp_layers(1)
    base = fetch_base(str(tmp_path / "hf"), tmp_path / "artefacts")
    ours, again = build(config), build(config)
    load_base_weights(ours, base, seed=7)
    load_base_weights(again, base, seed=8)
    differ = {
        one.name
        for one, other in zip(ours.shards, again.shards, strict=True)
        if not torch.equal(one.local_tensor, other.local_tensor)
    }
    assert differ
    assert all(is_unused_mtp(config.with_mtp_layers(0), name) for name in differ)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("train.lora={rank: 4, alpha: 8}",), "multi-token prediction is for pretraining"),
        (("train.mode=dpo",), "multi-token prediction is for pretraining"),
        (("model.config.mtp_layers=1",), "a recipe says it by `train.mtp`"),
    ],
)
def test_what_it_cannot_do_is_refused(overrides: tuple[str, ...], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        small_recipe("latent", (MTP, *overrides))


def test_other_families_have_no_such_layers(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="the family llama has no layers for multi-token prediction"):
        small_job(tmp_path, small_recipe("dense", (MTP,)), ALONE)
