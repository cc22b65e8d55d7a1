"""The Soperator seed, scaled down: torchtune 0.6.1 of PyPI on a real Slurm, from chat data to generated words.

The job runs as it is rendered. The model is a tiny Llama, which the tests teach torchtune and the catalog of its
builders; torchtune runs on CPUs (`cpu_torchtune/sitecustomize.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

import trainshed
from support import TESTS
from support.clusters.slurm_runs import NO_CODE, SlurmRun, SlurmRuns
from support.models.tiny_torchtune import write_base, write_conversations, write_tokenizer
from trainshed.catalog import model_preset
from trainshed.checkpoints.foreign import list_foreign
from trainshed.cli import run_cli
from trainshed.engines.torchtune import builders
from trainshed.models.families import read_hf_config
from trainshed.recipe import ModelConfig, load_recipe
from trainshed.workflow.submit import build_job

pytestmark = [pytest.mark.slurm, pytest.mark.full]

RECIPE = """
trainshed: 1
name: soperator-tiny
model: {{from: {folder}/model}}
tokenizer: {folder}/model
data:
  sequence_length: 128
  train: [{{path: {folder}/talks.jsonl}}]
  packing: false
train:
  mode: finetune
  epochs: 2
  global_batch: 4
  precision: fp32
  optimizer: {{lr: 1.0e-2, clip: null}}
  schedule: {{name: cosine, warmup: 1}}
layout: {{dp: 2, shard: full, micro_batch: 2}}
engine:
  name: torchtune
  args: {{device: cpu, compile: false, tokenizer.special_tokens_path: {folder}/model/tokenizer.json}}
checkpoint: {{async: false}}
export: {{dtype: fp32}}
"""
LORA = ("train.lora={rank: 2, alpha: 4, targets: [q_proj, k_proj, v_proj, o_proj, mlp]}",)
TINY = "llama3-tiny"


class TorchtuneRuns:
    """Submits the recipe with some keys changed."""

    def __init__(self, runs: SlurmRuns, folder: Path) -> None:
        self.runs, self.folder = runs, folder
        self.recipe = folder / "soperator-tiny.yaml"
        self.vocabulary = write_tokenizer(folder / "model").get_vocab_size()
        write_base(folder / "model", self.vocabulary)
        write_conversations(folder / "talks.jsonl")
        self.recipe.write_text(RECIPE.format(folder=folder))

    def submit(self, *overrides: str) -> SlurmRun:
        paths = [str(TESTS / "support" / "clusters" / "cpu_torchtune"), str(Path(trainshed.__file__).parents[1])]
        environment = {
            "PYTHONPATH": ":".join(paths),
            "TINY_VOCABULARY": str(self.vocabulary),
            "HF_DATASETS_CACHE": f"{self.folder}/cache",
        }
        cluster = self.runs.cluster(environment=environment)
        job = build_job(load_recipe(str(self.recipe), overrides), cluster, code=NO_CODE)
        return self.runs.submit(replace(job, code=None))


@pytest.fixture
def torchtune_runs(slurm_runs: SlurmRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchtuneRuns]:
    runs = TorchtuneRuns(slurm_runs, tmp_path)
    tiny = read_hf_config(json.loads((tmp_path / "model/config.json").read_text()), "tiny")

    def preset(name: str) -> ModelConfig:
        return tiny if name == TINY else model_preset(name)

    monkeypatch.setattr(builders, "model_preset", preset)
    monkeypatch.setitem(builders._BUILDERS, TINY, ("llama3_tiny",))
    return runs


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits


def test_all_weights_are_trained_exported_and_generated_from(
    torchtune_runs: TorchtuneRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    run = torchtune_runs.submit()
    assert run.wait("export", seconds=900).state == "done", run.all_logs()
    saved = list_foreign(run.folder)
    assert saved is not None
    assert [(row.path.name, row.reason) for row in saved.checkpoints] == [("epoch_1", None), ("epoch_0", None)]
    # 12 conversations in batches of 4, twice.
    log = next((run.folder / "torchtune").glob("log_*.txt")).read_text()
    losses = [float(line.partition("loss:")[2].split()[0]) for line in log.splitlines() if line.startswith("Step")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert json.loads((run.folder / "export" / "verdict.json").read_text())["passed"]
    exported = LlamaForCausalLM.from_pretrained(run.folder / "export")
    assert torch.equal(logits(exported), logits(LlamaForCausalLM.from_pretrained(saved.checkpoints[0].path)))
    for weights in (run.folder / "export", run.folder):
        assert run_cli(["generate", str(weights), "--prompt", "What is 2 plus 3?", "--max-tokens", "4"]) == 0
        assert capsys.readouterr().out.strip()
    assert run_cli(["checkpoints", str(run.folder), "--verify"]) == 0
    # Submitted once more it finds that it has ended.
    again = torchtune_runs.submit()
    assert again.wait("export", seconds=900).state == "done", again.all_logs()
    assert "this run has ended already (epochs=2)" in again.all_logs()


def test_adapters_are_trained_and_exported_as_peft_has_them(
    torchtune_runs: TorchtuneRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = torchtune_runs.submit(*LORA)
    assert run.wait("export", seconds=900).state == "done", run.all_logs()
    assert json.loads((run.folder / "export" / "verdict.json").read_text())["passed"]
    base = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    before = logits(base)
    with_adapters = PeftModel.from_pretrained(base, run.folder / "export")
    expected = logits(with_adapters)
    assert not torch.equal(expected, before)
    # The run itself, which names no base, and its adapters merged into one.
    assert run_cli(["generate", str(run.folder), "--prompt", "What is 2 plus 3?", "--max-tokens", "4"]) == 0
    merged = tmp_path / "merged"
    weights = str(run.folder / "checkpoints" / "epoch_1")
    assert run_cli(["model", "convert", weights, str(merged), "--to", "hf"]) == 0
    assert torch.allclose(logits(LlamaForCausalLM.from_pretrained(merged)), expected, atol=1e-4)


def test_a_run_that_cannot_start_is_queued_once(torchtune_runs: TorchtuneRuns) -> None:
    """Both recipes of the seed were queued four times for a module that was not there."""
    run = torchtune_runs.submit('engine.args."optimizer.foreach"=true')  # torch refuses it beside `fused`
    state = run.wait("train", seconds=900)
    assert (state.state, state.restarts, state.exit_code) == ("failed", 0, 2), run.all_logs()
    assert "failed before its first step, and a new start would fail the same way" in run.all_logs()


def test_an_option_that_torchtune_does_not_have_ends_the_job_before_data_is_prepared(
    torchtune_runs: TorchtuneRuns,
) -> None:
    run = torchtune_runs.submit('engine.args."optimizer.no_such_option"=1')
    assert run.wait("train", seconds=900).state == "cancelled", run.all_logs()
    image, fetch = run.states()["image"], run.states()["fetch"]
    assert (image.state, image.restarts, image.exit_code) == ("failed", 0, 2), run.all_logs()
    assert fetch.state == "cancelled"
    assert "no_such_option" in run.all_logs()
