"""`trainshed model compare`, `inspect` and `merge`: what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.models.lora_checkpoints import save_lora_checkpoint
from support.models.tiny_models import save_tiny_hf
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.cli import run_cli
from trainshed.recipe import Lora


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for transformers with a tokenizer, the same as a native checkpoint, and one with another norm."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("models")
    for name in ("hf", "other"):
        save_tiny_hf("llama", root / name, seed=1)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "three": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(root / "hf" / "tokenizer.json"))
    state = load_file(root / "other" / "model.safetensors")
    state["model.layers.1.input_layernorm.weight"] *= 2
    save_file(state, root / "other" / "model.safetensors", {"format": "pt"})
    convert_weights(str(root / "hf"), str(root / "native"), TargetFormat("native"))
    return root


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = run_cli(["model", *map(str, arguments), "-o", "json"])
    return code, json.loads(capsys.readouterr().out)


def test_equal_models_in_two_formats_exit_with_0(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = report(capsys, "compare", models / "hf", models / "native", "--logits")
    assert (code, data["schema"], data["equal"]) == (0, "trainshed.model.compare/1", True)
    assert data["tensors"]["compared"] == 15
    assert data["logits"]["passed"] is True
    assert "layer by layer" in data["logits"]["computed_by"][1]
    assert run_cli(["model", "compare", str(models / "hf"), str(models / "native")]) == 0
    assert capsys.readouterr().out.startswith("equal: 15 of 15 tensors the same")


def test_different_models_exit_with_1_and_say_where(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two three\n\ntwo\n")
    asked = ["--logits", "--prompts", str(prompts)]
    assert run_cli(["model", "compare", str(models / "native"), str(models / "other"), *asked]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("DIFFERENT: 14 of 15 tensors the same")
    assert "`layers.1.attention.norm.weight`: 32 of 32 differ by" in shown
    assert "logits  DIFFERENT, apart from layer 1 on" in shown
    assert "of 4 (" in shown, "four tokens were asked, with the tokenizer that went with the conversion"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["hf", "native", "--prompts", "x"], 2, "--prompts are for --logits"),
        (["hf", "native", "--workers", "0"], 2, "--workers 0 is less than one"),
        (["hf", "native", "--logits", "--prompts", "none.txt"], 2, "there is no such file"),
        (["hf", "nowhere"], 2, "there is no such folder, and no such run"),
    ],
)
def test_wrong_input_says_what_to_write(
    models: Path,
    arguments: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(models)
    assert run_cli(["model", "compare", *arguments]) == code
    assert said in capsys.readouterr().err


def test_inspect_shows_the_parts_the_vocabulary_and_the_verdict(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data = report(capsys, "inspect", models / "native")
    assert (code, data["schema"], data["format"], data["family"]) == (0, "trainshed.model.inspect/1", "native", "llama")
    assert sum(data["parts"].values()) == data["parameters"]
    assert (data["vocab_size"], data["padded_vocab_size"], data["tokens"]) == (96, 96, 4)
    assert data["verdict"]["passed"] is True
    assert run_cli(["model", "inspect", str(models / "hf")]) == 0
    shown = capsys.readouterr().out
    assert "family      llama: 2 layers, hidden 32, 4 heads (2 for keys and values)" in shown
    assert "96; the tokenizer knows 4 tokens" in shown
    assert "verdict     none" in shown


def test_merge_makes_a_folder_that_compares_as_expected(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter").mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = {f"{module}.lora_A.weight": torch.ones(2, 32), f"{module}.lora_B.weight": torch.ones(32, 2)}
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 1}))
    arguments = ["merge", models / "hf", tmp_path / "adapter", tmp_path / "out"]
    code, data = report(capsys, *arguments)
    assert (code, data["schema"], data["changed"], data["rank"]) == (0, "trainshed.model.merge/1", 1, 2)
    code, data = report(capsys, "compare", models / "hf", tmp_path / "out")
    assert code == 1
    (difference,) = data["tensors"]["differences"]
    assert (difference["name"], difference["different"]) == ("layers.0.attention.qkv.weight", 32 * 32)
    assert difference["max_absolute"] == pytest.approx(1.0)
    assert run_cli(["model", *map(str, arguments)]) == 2
    assert "there is something already" in capsys.readouterr().err


def test_the_adapters_of_a_run_are_inspected_and_merged(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HfWeights(models / "hf") as weights:
        config = weights.config
    lora = Lora(rank=2, alpha=4.0, targets=("attn",), dora=True)
    run = save_lora_checkpoint(tmp_path / "run", config, lora, models / "hf")
    code, data = report(capsys, "inspect", run)
    assert (code, data["adapters"]["rank"], data["adapters"]["base"]) == (0, 2, str(models / "hf"))
    assert data["adapters"]["parameters"] == 2 * (2 * (32 * 4 + 32 + 16 + 16 + 32) + 32 + 16 + 16 + 32)
    assert run_cli(["model", "inspect", str(run)]) == 0
    assert "weights of rank 2 on attn; the others are in" in capsys.readouterr().out
    code, data = report(capsys, "merge", models / "hf", run, tmp_path / "out")
    assert (code, data["changed"], data["verdict"]["passed"]) == (0, 8, True)
    assert data["verdict"]["logits"]["ran"]
    code, data = report(capsys, "compare", run, tmp_path / "out")
    assert code == 0
    assert run_cli(["model", "merge", str(models / "native"), str(run), str(tmp_path / "other")]) == 2
    assert "merged into weights for transformers, and these are native" in capsys.readouterr().err
