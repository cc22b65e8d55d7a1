"""`trainshed verify`: real ranks on a shrunk model; what is equal, what is not, and what is refused before it runs."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from trainshed.catalog import model_preset
from trainshed.cli import run_cli
from trainshed.data.order import run_orders
from trainshed.data.tokens.token_source import RunTokens
from trainshed.models.families import to_hf_config
from trainshed.plan import resolve_layout
from trainshed.plan.shrink import shrink
from trainshed.recipe import Layout, parse_recipe
from trainshed.workflow.verify import shrunk_recipe

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")
RECIPE = """
name: checked
model: {model}
data: {{sequence_length: 4096, seed: 7, train: {{tokens: not/made/yet}}}}
train:
  tokens: 2B
  global_batch: 64
  batch_ramp: {{start: 16, increment: 16, samples: 1M}}
  optimizer: {{lr: 3e-4, clip: 0.5}}
  schedule: {{name: cosine, warmup: 2000, min_lr: 3e-5}}
layout: {layout}
checkpoint: {{to: "s3://bucket/never-written"}}
"""
# A rank that forgets to sum what its tensor-parallel neighbours have seen of the norms' gradients.
FAULT = """
import os
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    import trainshed.engines.torch.step as step
    step.reduce_gradients = lambda *_: None
"""


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where checks make their runs."""
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def write_recipe(folder: Path, model: str = "{preset: tiny, init: random}", layout: str = "{tp: 2}") -> str:
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model, layout=layout))
    return str(folder / "recipe.yaml")


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = run_cli(["verify", *arguments, "-o", "json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out) if shown.out else {}, shown.err


def test_a_layout_trains_as_one_process_does_and_resumes_bitwise(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, said = checked(capsys, QUICKSTART, "--layout", "tp=2,micro_batch=1", "--steps", "4")
    assert code == 0, said
    assert (report["schema"], report["verdict"]) == ("trainshed.verify/1", "equal")
    assert list(report) == [
        "schema", "name", "verdict", "asked", "layout", "device", "precision", "model", "parameters",
        "sequence_length", "batch_sizes", "equal", "bounds", "same_batches", "loss_difference",
        "grad_norm_difference", "rows", "resumed",
    ]  # fmt: skip
    assert (report["layout"]["tp"], report["layout"]["ranks"], report["precision"]) == (2, 2, "fp64")
    assert (report["model"]["family"], report["model"]["tied_embeddings"]) == ("llama", True)
    assert report["bounds"] == {"loss": 1e-9, "grad_norm": 1e-9}
    assert [row["step"] for row in report["rows"]] == [1, 2, 3, 4]
    assert max(report["loss_difference"], report["grad_norm_difference"]) <= 1e-9
    losses = [row["loss"] for row in report["rows"]]
    assert len(set(losses)) == 4
    resumed = report["resumed"]
    assert (resumed["after_step"], [row["step"] for row in resumed["rows"]]) == (2, [3, 4])
    if report["device"] == "cpu":
        assert resumed["bounds"] == {"loss": 0, "grad_norm": 0}
    assert resumed["equal"]
    for run in ("one process", "the layout", "resumed"):
        assert f"\n{run} " in f"\n{said}"
    assert list(runs.iterdir()) == []


@pytest.mark.full
def test_experts_spread_over_ranks_train_as_on_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, "{preset: tiny-moe, init: random}", "{dp: 2, ep: 2, shard: full}")
    code, report, said = checked(capsys, recipe, "data.sequence_length=1024")
    assert code == 0, said
    assert (report["layout"]["ep"], report["layout"]["ranks"]) == (2, 2)
    assert report["model"]["moe"]["top_k"] == 2
    assert len(report["batch_sizes"]) == 2
    assert len(report["rows"]) == 10
    assert report["resumed"]["equal"]


MUON_KEYS = (
    "train.optimizer={name: muon, lr: 1.0e-3, groups: [{match: embedding.*, lr_scale: 0.5}, {match: layers.3.*, "
    "freeze: true}]}",
    "train.spikes={window: 2, sigma: 50}",
    "train.ema={decay: 0.9}",
)


@pytest.mark.full
def test_a_layout_is_checked_with_muon_groups_spikes_and_averages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, layout="{tp: 2, dp: 1}")
    code, report, said = checked(capsys, recipe, "data.sequence_length=1024", *MUON_KEYS, "--steps", "2")
    assert code == 0, said
    assert report["verdict"] == "equal"
    assert report["resumed"]["equal"]


def test_a_group_that_names_nothing_is_refused_before_a_check_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = "train.optimizer.groups=[{match: layers.*.atention.*, freeze: true}]"
    code, _, said = checked(capsys, write_recipe(tmp_path), "data.sequence_length=1024", keys)
    assert code == 2
    assert "no tensor is called `layers.*.atention.*`" in said
    assert "near it: layers.*.attention." in said


@pytest.mark.full
def test_the_layout_that_the_planner_chooses_can_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    code, report, said = checked(capsys, QUICKSTART, "layout=auto", "--steps", "2")
    assert code == 0, said
    assert report["verdict"] == "equal"
    assert "layout: auto found no GPU here and chose one process with micro_batch 8" in said


@pytest.mark.full
def test_a_fault_of_the_engine_is_found_and_its_runs_are_kept(
    tmp_path: Path, runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert run_cli(["verify", QUICKSTART, "--layout", "tp=2", "--steps", "2"]) == 1
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith("quickstart on tp2, 2 processes against one: float64 on ")
    assert "(allowed: 1.0e-09)" in shown.out
    assert lines[-1].startswith("DIFFERENT: tp2 does not train as one process does")
    (kept,) = runs.iterdir()
    assert f"the runs of this check are kept in {kept}" in shown.err
    assert {path.name for path in (kept / "runs" / "quickstart").iterdir()} == {"one-process", "layout"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layout", "tp=4"], "tp: 4 does not divide the 2 key/value heads"),
        (["--layout", "pp=8"], "8 chunks, and the model has 4 layers"),
        (["--layout", "tpp=2"], "unknown key `tpp`"),
        (["train.global_batch=6", "--layout", "dp=4"], "does not divide the global batch of 6"),
        (["--steps", "1"], "1 steps have no middle to resume in"),
        (["engine=megatron"], "the engine megatron is not ours"),
    ],
)
def test_what_cannot_be_checked_is_2_before_anything_runs(
    arguments: list[str], said: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["verify", QUICKSTART, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert list(runs.iterdir()) == []


def test_an_architecture_is_read_beside_weights_that_are_not_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(to_hf_config(model_preset("qwen2.5-0.5b"))))
    assert run_cli(["verify", write_recipe(tmp_path, "{from: weights}", "{tp: 7}")]) == 2
    assert "tp: 7 does not divide the 2 key/value heads" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.full
def test_adapters_on_a_layout_are_checked_without_their_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(to_hf_config(model_preset("llama3-8b"))))
    recipe = write_recipe(tmp_path, model=f"{{from: {tmp_path / 'base'}}}", layout="{tp: 2, shard: zero1}")
    lora = "train.lora={rank: 4, alpha: 8, targets: [all-linear], dora: true, dropout: 0.1, quantize: nf4}"
    code, report, said = checked(capsys, recipe, lora, "--steps", "4")
    assert code == 0, said
    assert report["verdict"] == "equal"
    assert "the frozen weights are checked as int8" in said
    code, _, said = checked(capsys, recipe, lora, "layout={dp: 2, shard: full}")
    assert code == 2
    assert "shard: full would share out the frozen weights, which `lora.quantize` holds" in said


def test_the_small_recipe_trains_as_the_whole_one_does() -> None:
    whole = parse_recipe(RECIPE.format(model="{preset: tiny, init: random}", layout="{tp: 2}"))
    config, keys = model_preset("tiny"), whole.layout
    assert isinstance(keys, Layout)
    small = shrink(config, resolve_layout(keys, config), sequence_length=4096, batch_sizes=[16, 32, 48, 64])
    recipe = shrunk_recipe(whole, small, keys, Path("store"), steps=8)
    assert recipe.data.synthetic
    assert (recipe.data.seed, recipe.train.optimizer, recipe.seed) == (7, whole.train.optimizer, whole.seed)
    assert (recipe.train.steps, recipe.train.tokens, recipe.train.precision) == (8, None, "fp64")
    assert (recipe.train.schedule.name, recipe.train.schedule.warmup) == ("cosine", 2)
    ramp = recipe.train.batch_ramp
    assert ramp is not None
    assert (ramp.start, ramp.start + ramp.increment) == (small.batch_sizes[0], recipe.train.global_batch)
    assert (recipe.checkpoint.every, recipe.checkpoint.keep) == (4, None)
    assert recipe.checkpoint.to is None


def test_conversations_are_checked_as_rows_of_documents_kept_apart() -> None:
    text = RECIPE.format(model="{from: weights}\ntokenizer: weights", layout="{tp: 2}")
    whole = parse_recipe(text.replace("train:\n", "train:\n  mode: finetune\n"))
    config, keys = model_preset("tiny"), whole.layout
    assert isinstance(keys, Layout)
    small = shrink(config, resolve_layout(keys, config), sequence_length=4096, batch_sizes=[16, 32, 48, 64])
    recipe = shrunk_recipe(whole, small, keys, Path("store"), steps=8)
    assert (recipe.train.mode, recipe.document_mask) == ("pretrain", True)
    order = run_orders(recipe, RunTokens(()), Path(), build=False).train
    assert order.keeps_documents_apart
    assert (order.batch(0).document_starts > 0).any()
