"""What plugins add to training, by the examples of docs/plugins.md: an optimizer, a loss, an exporter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.recipes.small_recipes import world_size
from support.runs.plugged_ranks import train_plugged, write_plugged
from support.runs.rank_pool import RankPool
from support.runs.small_runs import difference, events, figures, state
from trainshed.errors import InputError
from trainshed.models.registered_loss import VocabularyLogits, linear_token_loss
from trainshed.models.token_loss import build_loss
from trainshed.observe.event_log import read_steps
from trainshed.recipe import load_recipe
from trainshed.storage import LocalStore


def train(pool: RankPool, folder: Path, file: Path, layout: str, *overrides: str) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    assert set(pool.run(train_plugged, folder, file, layout, overrides, ranks=world_size(layout))) == {0}
    return read_steps(LocalStore(folder), "")


SGD = ("train.optimizer={name: sgd, lr: 0.05, weight_decay: 0.01, options: {momentum: 0.8}}",)


def test_a_registered_optimizer_trains_alike_on_every_layout(rank_pool: RankPool, tmp_path: Path) -> None:
    file = write_plugged(tmp_path, "sgd_optimizer")
    alone = train(rank_pool, tmp_path / "alone", file, "micro_batch=2", *SGD)
    spread = train(rank_pool, tmp_path / "spread", file, "tp=2,pp=2,micro_batch=2", *SGD)
    assert difference(alone, spread, "loss") < 1e-9
    assert difference(alone, spread, "grad_norm") < 1e-9
    usual = train(rank_pool, tmp_path / "usual", file, "micro_batch=2", "train.optimizer.lr=0.05")
    assert usual[1:] != alone[1:]
    (start,) = events(tmp_path / "alone", "start")
    assert list(start["plugins"]) == ["sgd_optimizer"]


def test_the_state_of_a_registered_optimizer_is_saved_and_goes_on_elsewhere(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    file = write_plugged(tmp_path, "sgd_optimizer")
    straight = train(rank_pool, tmp_path / "straight", file, "dp=2,micro_batch=2", *SGD)
    folder = tmp_path / "resumed"
    train(rank_pool, folder, file, "dp=2,micro_batch=2", *SGD, "train.steps=10")
    names = [name for name in state(folder, 10) if name.startswith("optimizer.")]
    assert "optimizer.momentum.embedding.weight" in names
    assert not any("exp_avg" in name for name in names)
    assert figures(train(rank_pool, folder, file, "dp=2,micro_batch=2", *SGD)) == figures(straight)
    other = tmp_path / "other"
    train(rank_pool, other, file, "dp=2,micro_batch=2", *SGD, "train.steps=10")
    assert difference(straight, train(rank_pool, other, file, "tp=2,micro_batch=2", *SGD), "loss") < 1e-9


SPECTRAL = ("train.optimizer={name: spectral, lr: 0.01, options: {momentum: 0.8}}", "train.steps=8")


def test_a_registered_optimizer_gets_whole_matrices_on_every_layout(rank_pool: RankPool, tmp_path: Path) -> None:
    file = write_plugged(tmp_path, "spectral_optimizer")
    alone = train(rank_pool, tmp_path / "alone", file, "micro_batch=2", *SPECTRAL)
    spread = train(rank_pool, tmp_path / "spread", file, "tp=2,dp=2,shard=full,micro_batch=2", *SPECTRAL)
    assert difference(alone, spread, "loss") < 1e-9
    assert difference(alone, spread, "grad_norm") < 1e-9
    names = state(tmp_path / "spread", 8)
    assert "optimizer.momentum.layers.0.mlp.gate_up.weight" in names
    assert "optimizer.exp_avg.embedding.weight" in names


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ("{name: sgd, lr: 0.1, betas: [0.5, 0.5]}", "the optimizer sgd does not read it"),
        ("{name: sgd, lr: 0.1, states: bf16}", "the optimizer sgd of a plugin keeps its states as its weights are"),
        ("{name: sgd, lr: 0.1, options: {momentun: 0.5}}", "unexpected keyword argument 'momentun'"),
        ("{name: sgb, lr: 0.1}", "`sgb` is not one of adamw, muon, sgd"),
        ("{name: adamw, lr: 0.1, options: {momentum: 0.5}}", "adamw has none"),
    ],
)
def test_keys_that_a_registered_optimizer_does_not_take_are_refused(tmp_path: Path, keys: str, what: str) -> None:
    file = write_plugged(tmp_path, "sgd_optimizer")
    with pytest.raises(InputError, match=what):
        load_recipe(file, [f"train.optimizer={keys}"])


def test_a_name_of_a_plugin_that_is_not_named_is_refused_in_the_same_process(tmp_path: Path) -> None:
    file = write_plugged(tmp_path, "sgd_optimizer")
    load_recipe(file, SGD)
    with pytest.raises(InputError, match="`plugins` does not name `sgd_optimizer`"):
        load_recipe(file, [*SGD, "plugins=null"])


SMOOTH = ("train.loss={name: smooth, options: {smoothing: 0.2, z: 0.001}}",)


@pytest.mark.parametrize("layout", ["tp=2,micro_batch=2", "pp=2,micro_batch=2", "cp=2,micro_batch=2"])
def test_a_registered_loss_is_the_same_on_every_layout(rank_pool: RankPool, tmp_path: Path, layout: str) -> None:
    file = write_plugged(tmp_path, "smooth_loss")
    alone = train(rank_pool, tmp_path / "alone", file, "micro_batch=2", *SMOOTH, "train.steps=6")
    spread = train(rank_pool, tmp_path / "spread", file, layout, *SMOOTH, "train.steps=6")
    for figure in ("loss", "grad_norm", "z_loss"):
        assert difference(alone, spread, figure) < 1e-9


def test_a_registered_loss_has_the_gradient_of_the_plain_formula(tmp_path: Path) -> None:
    recipe = load_recipe(write_plugged(tmp_path, "smooth_loss"), SMOOTH)
    rule = build_loss(recipe.train.loss)
    assert rule is not None
    torch.manual_seed(1)
    hidden = torch.randn(12, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 31, (12,))
    labels[3] = -100
    scale = torch.tensor(1 / 11, dtype=torch.float64)
    total, extra = linear_token_loss(hidden, weight, labels, scale, rule, vocab_size=31)
    total.backward()
    plain = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight)]
    logits = plain[0] @ plain[1].t()
    z = 0.001 * (logits.logsumexp(-1)[labels >= 0] ** 2).sum() / 11
    smooth = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2)
    (smooth + z).backward()
    torch.testing.assert_close(total, smooth + z)
    torch.testing.assert_close(extra, z)
    torch.testing.assert_close(hidden.grad, plain[0].grad)
    torch.testing.assert_close(weight.grad, plain[1].grad)


def test_cross_entropy_of_vocabulary_logits_is_pytorchs() -> None:
    values, labels = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 6])
    expected = torch.nn.functional.cross_entropy(values, labels, reduction="none")
    torch.testing.assert_close(VocabularyLogits(values).cross_entropy(labels), expected)


def test_z_loss_beside_a_registered_loss_is_refused(tmp_path: Path) -> None:
    file = write_plugged(tmp_path, "smooth_loss")
    with pytest.raises(InputError, match="a registered loss has its own terms"):
        load_recipe(file, [*SMOOTH, "train.z_loss=0.1"])


def test_an_exporter_of_a_plugin_writes_beside_ours(rank_pool: RankPool, tmp_path: Path) -> None:
    file = write_plugged(tmp_path, "csv_exporter")
    keys = ("train.steps=3", "observe.exporters={csv: {file: table.csv}}")
    steps = train(rank_pool, tmp_path / "run", file, "micro_batch=2", *keys)
    header, *lines = (tmp_path / "run" / "table.csv").read_text().splitlines()
    assert header == "step,loss,lr"
    assert lines == [f"{step['step']},{step['loss']},{step['lr']}" for step in steps]


def test_an_exporter_of_a_plugin_that_fails_warns_once_and_training_goes_on(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    file = write_plugged(tmp_path, "csv_exporter")
    plugin = tmp_path / "csv_exporter.py"
    plugin.write_text(plugin.read_text().replace("if event[", "1 / (event['step'] != 1)\n        if event["))
    steps = train(rank_pool, tmp_path / "run", file, "micro_batch=2", "train.steps=3", "observe.exporters=[csv]")
    assert len(steps) == 3
    warnings = [event["text"] for event in events(tmp_path / "run", "warning")]
    assert warnings == ["observe.exporters.csv: nothing more is exported: ZeroDivisionError: division by zero"]


@pytest.mark.parametrize(
    ("exporters", "what"),
    [
        ("[tensorboard]", "tensorboard has a key of its own"),
        ("[cvs]", "no plugin has registered an exporter `cvs`"),
        ("{csv: {path: x}}", "unexpected keyword argument 'path'"),
    ],
)
def test_exporters_that_nobody_could_make_are_refused(tmp_path: Path, exporters: str, what: str) -> None:
    file = write_plugged(tmp_path, "csv_exporter")
    with pytest.raises(InputError, match=what):
        load_recipe(file, [f"observe.exporters={exporters}"])
