"""The adapters of a LoRA run are exported for PEFT, merged, and read as weights: PEFT itself is the oracle."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.models.lora_checkpoints import random_adapters, save_lora_checkpoint
from support.models.made_tokenizers import CONFIGS, KINDS, save
from support.models.tiny_models import hf_model, save_tiny_hf, tiny_config
from support.runs.small_generators import Notes
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat, open_weights
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.lora import export as export_module
from trainshed.checkpoints.lora.export import export_adapter
from trainshed.checkpoints.lora.merge import merge_adapter
from trainshed.checkpoints.prove.compare import compare_weights
from trainshed.checkpoints.prove.verdict import read_verdict
from trainshed.errors import InputError, TrainshedError
from trainshed.models.parameters import AddedRows
from trainshed.recipe import Lora
from trainshed.serve.loading import load_model
from trainshed.storage import LocalStore, Manifest

TOKENS = torch.arange(3, 23)[None]
ALL_DENSE = ("attn", "mlp")


def lora(**keys: Any) -> Lora:
    return Lora.model_validate({"rank": 4, "alpha": 8.0, "targets": ALL_DENSE, **keys})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def with_peft(base: Path, adapter: Path) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed: exports are not held against it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT has much to say about Conv1D
        return peft.PeftModel.from_pretrained(hf_model(base), adapter).eval()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, rsLoRA": ("llama", {"rslora": True, "targets": ["q_proj", "v_proj"], "alpha": 5.0}),
    "llama, DoRA": ("llama", {"dora": True, "dropout": 0.1}),
    "qwen2 (tied, biases), DoRA": ("qwen2", {"dora": True}),
    "qwen3": ("qwen3", {"targets": ["o_proj", "up_proj"]}),
    "gpt2: q, k and v are one matrix": ("gpt2", {}),
    "gpt2, some of q, k and v, rsLoRA": ("gpt2", {"targets": ["q_proj", "v_proj", "down_proj"], "rslora": True}),
    "gpt2, DoRA": ("gpt2", {"dora": True}),
    "phi3: q, k and v are one matrix, gate and up another": ("phi3", {}),
    "gemma3": ("gemma3_text", {"dora": True}),
    "nemotron": ("nemotron", {"targets": ["attn", "mlp"]}),
    "mixtral": ("mixtral", {"targets": ["attn"]}),
    "mixtral with experts": ("mixtral", {"targets": ["all-linear"], "alpha": 7.0, "dropout": 0.1}),
    "qwen3_moe with experts, rsLoRA": ("qwen3_moe", {"targets": ["all-linear"], "rslora": True}),
    "mixtral, experts alone": ("mixtral", {"targets": ["experts"]}),
    "gpt_oss": ("gpt_oss", {"targets": ["attn"], "dora": True}),
    "llama4": ("llama4_text", {"targets": ["attn", "mlp"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_peft_answers_with_our_export_as_the_merged_weights_do(case: str, tmp_path: Path) -> None:
    family, keys = CASES[case]
    config = save_tiny_hf(family, tmp_path / "base", seed=1)
    run = save_lora_checkpoint(tmp_path / "run", config, lora(**keys), tmp_path / "base")
    made = export_adapter(str(run), str(tmp_path / "adapter"), dtype="fp32")
    assert made.verdict.passed
    assert made.verdict.tensors.compared == made.tensors > 0
    merged = merge_adapter(tmp_path / "base", run, tmp_path / "merged")
    assert merged.verdict.passed
    assert merged.verdict.logits["ran"]
    theirs = with_peft(tmp_path / "base", tmp_path / "adapter")
    expected = logits(theirs)
    assert float((expected - logits(hf_model(tmp_path / "base"))).abs().max()) > 0.1, "the adapters say something"
    torch.testing.assert_close(logits(hf_model(tmp_path / "merged")), expected, rtol=0, atol=1e-5)
    again = merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "again", logits=False)
    assert again.verdict.passed
    assert again.changed == merged.changed
    for name, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        torch.testing.assert_close(
            tensor, load_file(tmp_path / "merged" / "model.safetensors")[name], rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])  # an own head; one that is tied; another name for both
@pytest.mark.parametrize("grown", [0, 3])
def test_peft_answers_with_the_rows_of_added_tokens(family: str, grown: int, tmp_path: Path) -> None:
    config = save_tiny_hf(family, tmp_path / "base", seed=1)
    rows = config.vocab_size
    added = AddedRows(rows - 5 + grown, 5, rows)
    run = save_lora_checkpoint(tmp_path / "run", config, lora(dora=True), tmp_path / "base", added=added)
    reporter = Notes()
    made = export_adapter(str(run), str(tmp_path / "adapter"), dtype="fp32", reporter=reporter)
    assert made.verdict.passed
    assert any(f"resize_token_embeddings({rows + grown})" in note for note in reporter.said) == bool(grown)
    peft = pytest.importorskip("peft", reason="peft is not installed: exports are not held against it")
    theirs = hf_model(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.resize_token_embeddings(rows + grown, mean_resizing=False)
        theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    tokens = torch.cat([TOKENS, torch.arange(added.start, added.stop)[None]], dim=1)
    with torch.no_grad():
        expected = theirs(tokens).logits
        # The run itself, and PEFT's folder over a base without the rows, converted to whole weights.
        convert_weights(str(run), str(tmp_path / "merged"), TargetFormat("hf"), dtype="fp32")
        found = hf_model(tmp_path / "merged")(tokens).logits
        ours = load_model(str(tmp_path / "adapter"), device="cpu")
    assert found.shape == expected.shape == (1, tokens.shape[1], rows + grown)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    table = ours.decoder.embedding.weight[added.start : added.stop]
    assert table.equal(
        load_file(tmp_path / "adapter" / "adapter_model.safetensors")[
            f"base_model.model.{'transformer.wte' if family == 'gpt2' else 'model.embed_tokens'}"
            ".token_adapter.trainable_tokens_delta"
        ]
    )
    if not grown:
        merged = merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "in-place")
        assert merged.verdict.passed
        torch.testing.assert_close(hf_model(tmp_path / "in-place")(tokens).logits, expected, rtol=0, atol=1e-5)


def test_an_adapter_that_peft_trained_with_token_indices_is_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: its adapters are not made here")
    save_tiny_hf("llama", tmp_path / "base", seed=1)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[7, 3])
    model = peft.get_peft_model(hf_model(tmp_path / "base"), settings)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.requires_grad:
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
    model.save_pretrained(tmp_path / "adapter")
    merged = merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert merged.verdict.passed
    torch.testing.assert_close(logits(hf_model(tmp_path / "merged")), logits(model), rtol=0, atol=1e-5)


def test_the_folder_says_what_peft_reads_and_brings_the_words(tmp_path: Path) -> None:
    config = save_tiny_hf("llama", tmp_path / "base")
    save(KINDS["gpt2"](), CONFIGS["gpt2"], tmp_path / "words")
    settings = lora(targets=["q_proj", "down_proj"], dropout=0.25, rslora=True, dora=True)
    run = save_lora_checkpoint(tmp_path / "run", config, settings, "hf://org/name@0123abc")
    made = export_adapter(
        str(run), str(tmp_path / "out"), dtype="bf16", tokenizer=str(tmp_path / "words"), chat_template="{{ messages }}"
    )
    body = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    expected = {
        "r": 4, "lora_alpha": 8, "lora_dropout": 0.25, "use_rslora": True, "use_dora": True, "bias": "none",
        "target_modules": ["down_proj", "q_proj"], "base_model_name_or_path": "org/name", "revision": "0123abc",
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    assert {key: body[key] for key in expected} == expected
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {each.dtype for each in stored.values()} == {torch.bfloat16}
    assert len(stored) == 2 * 2 * 3
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "verdict.json", "manifest.json"}
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    Manifest.read(LocalStore(tmp_path / "out"), "manifest.json").verify_files(LocalStore(tmp_path / "out"))
    verdict = read_verdict(tmp_path / "out")
    assert verdict == made.verdict
    assert (made.verdict.tensors.dtype, made.verdict.tensors.equal) == ("bfloat16", 4)


def test_some_layers_alone_are_named_in_full(tmp_path: Path) -> None:
    config = save_tiny_hf("llama", tmp_path / "base", seed=1)
    settings = lora(targets=["q_proj"])
    second = {name: each for name, each in random_adapters(config, settings).items() if name.startswith("layers.1.")}
    run = save_lora_checkpoint(tmp_path / "run", config, settings, tmp_path / "base", tensors=second)
    export_adapter(str(run), str(tmp_path / "out"), dtype="fp32")
    body = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert body["target_modules"] == ["model.layers.1.self_attn.q_proj"]
    merge_adapter(tmp_path / "base", run, tmp_path / "merged", logits=False)
    expected = logits(with_peft(tmp_path / "base", tmp_path / "out"))
    torch.testing.assert_close(logits(hf_model(tmp_path / "merged")), expected, rtol=0, atol=1e-5)


def test_a_finished_export_is_kept_and_another_checkpoint_is_not_written_over_it(tmp_path: Path) -> None:
    config = save_tiny_hf("llama", tmp_path / "base")
    run = save_lora_checkpoint(tmp_path / "run", config, lora(), tmp_path / "base")
    first = export_adapter(str(run), str(tmp_path / "out"))
    notes = Notes()
    assert export_adapter(str(run), str(tmp_path / "out"), reporter=notes) == first
    assert any("done already" in text for text in notes.said)
    other = save_lora_checkpoint(tmp_path / "other", config, lora(), tmp_path / "base", seed=1)
    with pytest.raises(InputError, match="there is the export of"):
        export_adapter(str(other), str(tmp_path / "out"))


def test_an_export_that_differs_from_the_run_fails_its_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = save_tiny_hf("llama", tmp_path / "base")
    run = save_lora_checkpoint(tmp_path / "run", config, lora(), tmp_path / "base")
    original = export_module.write_peft_folder

    def damaged(folder: Path, *rest: Any, **keys: Any) -> None:
        original(folder, *rest, **keys)
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors[max(tensors)][0, 0] += 1e-3
        save_file(tensors, folder / "adapter_model.safetensors")

    monkeypatch.setattr(export_module, "write_peft_folder", damaged)
    made = export_adapter(str(run), str(tmp_path / "out"), dtype="fp32")
    assert not made.verdict.passed
    assert made.verdict.tensors.equal == made.verdict.tensors.compared - 1
    assert "is changed otherwise" in (made.verdict.tensors.first_difference or "")


def test_what_pefts_format_cannot_hold_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    config = save_tiny_hf("mixtral", tmp_path / "base")
    run = save_lora_checkpoint(tmp_path / "run", config, lora(targets=["experts"], dora=True), tmp_path / "base")
    with pytest.raises(InputError, match="PEFT has no DoRA of experts") as refused:
        export_adapter(str(run), str(tmp_path / "out"))
    assert "merge: true" in (refused.value.hint or "")
    moe = {"experts": 4, "top_k": 2, "ffn": 24, "shared_ffn": 16}
    run = save_lora_checkpoint(tmp_path / "shared", tiny_config("mixtral", moe=moe), lora(targets=["mlp"]), "hf://a/b")
    with pytest.raises(InputError, match=r"has no module for `layers.0.mlp.shared.down.weight:0`"):
        export_adapter(str(run), str(tmp_path / "out"))
    config = save_tiny_hf("gpt2", tmp_path / "gpt2")
    run = save_lora_checkpoint(tmp_path / "part", config, lora(targets=["q_proj"], dora=True), tmp_path / "gpt2")
    with pytest.raises(InputError, match="DoRA has a length for some rows"):
        export_adapter(str(run), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("targets", [("experts",), ("attn", "experts")])
@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "llama4-scout"])
def test_peft_answers_with_adapters_of_stacked_experts(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """gpt-oss alternates rows of gate and up; of Llama 4 PEFT takes inputs for outputs."""
    config = save_tiny_hf(family, tmp_path / "base", seed=1)
    run = save_lora_checkpoint(tmp_path / "run", config, lora(targets=targets, alpha=7.0), tmp_path / "base")
    made = export_adapter(str(run), str(tmp_path / "adapter"), dtype="fp32")
    assert made.verdict.passed
    expected = logits(with_peft(tmp_path / "base", tmp_path / "adapter"))
    assert float((expected - logits(hf_model(tmp_path / "base"))).abs().max()) > 0.1, "the adapters say something"
    assert convert_weights(str(run), str(tmp_path / "whole"), TargetFormat("hf")).verdict.passed
    torch.testing.assert_close(logits(hf_model(tmp_path / "whole")), expected, rtol=0, atol=1e-5)
    ours = load_model(str(tmp_path / "adapter"), device="cpu")
    torch.testing.assert_close(ours.logits(TOKENS[0].tolist()), expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("parameters", [("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj")])
@pytest.mark.parametrize("family", ["gpt_oss", "llama4-scout"])
def test_adapters_of_stacked_experts_that_peft_trained_are_read(
    family: str, parameters: tuple[str, ...], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: its adapters are not made here")
    save_tiny_hf(family, tmp_path / "base", seed=1)
    block = "mlp" if family == "gpt_oss" else "feed_forward"
    names = [f"{block}.experts.{parameter}" for parameter in parameters]
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(hf_model(tmp_path / "base"), settings).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(tmp_path / "adapter")
    ours = load_model(str(tmp_path / "adapter"), base=str(tmp_path / "base"), device="cpu")
    torch.testing.assert_close(ours.logits(TOKENS[0].tolist()), logits(model)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_adapters_of_stacked_experts_are_merged_by_converting_alone(family: str, tmp_path: Path) -> None:
    config = save_tiny_hf(family, tmp_path / "base", seed=1)
    run = save_lora_checkpoint(tmp_path / "run", config, lora(targets=["experts"]), tmp_path / "base")
    with pytest.raises(InputError, match=r"has no tensor of its own for layers.\d.mlp.experts.down:0:0") as refused:
        merge_adapter(tmp_path / "base", run, tmp_path / "merged", logits=False)
    assert "--to hf" in (refused.value.hint or "")


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_a_lora_run_is_read_as_the_weights_that_a_merge_writes(family: str, dora: bool, tmp_path: Path) -> None:
    config = save_tiny_hf(family, tmp_path / "base", seed=1)
    settings = lora(targets=["all-linear"], dora=dora)
    run = save_lora_checkpoint(tmp_path / "run", config, settings, tmp_path / "base")
    merge_adapter(tmp_path / "base", run, tmp_path / "merged", logits=False)
    with open_weights(run) as ours, HfWeights(tmp_path / "merged") as written:
        assert compare_weights(ours, written).equal
    for to in (TargetFormat("hf"), TargetFormat("native"), TargetFormat("megatron")):
        if family == "gpt2" and to.to == "megatron":
            continue
        made = convert_weights(str(run), str(tmp_path / to.to), to, logits=to.to == "hf")
        assert made.verdict.passed, made.verdict.lines()
    torch.testing.assert_close(
        logits(hf_model(tmp_path / "hf")), logits(hf_model(tmp_path / "merged")), rtol=0, atol=1e-5
    )


def test_a_base_of_ours_is_merged_as_well_as_one_of_transformers(tmp_path: Path) -> None:
    config = save_tiny_hf("llama", tmp_path / "hf", seed=1)
    convert_weights(str(tmp_path / "hf"), str(tmp_path / "native"), TargetFormat("native"), logits=False)
    for base in ("hf", "native"):
        run = save_lora_checkpoint(tmp_path / f"run-{base}", config, lora(), tmp_path / base)
        convert_weights(str(run), str(tmp_path / f"merged-{base}"), TargetFormat("hf"), logits=False)
    one, other = (load_file(tmp_path / f"merged-{base}" / "model.safetensors") for base in ("hf", "native"))
    assert all(torch.equal(one[name], other[name]) for name in one)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another rank": ({"rank": 8}, r"are a \[4, 32\], b \[32, 4\], not a \[8, 32\], b \[32, 8\]"),
    "no magnitudes": ({"dora": True}, r"not a \[4, 32\], b \[32, 4\], magnitude \[32\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_adapters_that_are_not_what_their_spec_says_are_refused(case: str, tmp_path: Path) -> None:
    keys, message = WRONG[case]
    config = tiny_config("llama")
    tensors = random_adapters(config, lora())
    run = save_lora_checkpoint(tmp_path / "run", config, lora(**keys), "hf://a/b", tensors=tensors)
    with pytest.raises(InputError, match=message):
        export_adapter(str(run), str(tmp_path / "out"))


def test_a_checkpoint_with_half_an_adapter_or_something_else_is_refused(tmp_path: Path) -> None:
    config = tiny_config("llama")
    tensors = random_adapters(config, lora(targets=["q_proj"]))
    half = {name: each for name, each in tensors.items() if name != "layers.0.attention.qkv.lora.q_proj.b"}
    run = save_lora_checkpoint(tmp_path / "half", config, lora(), "hf://a/b", tensors=half)
    with pytest.raises(InputError, match=r"q_proj.weight` are a \[4, 32\], not a \[4, 32\], b \[32, 4\]"):
        export_adapter(str(run), str(tmp_path / "out"))
    run = save_lora_checkpoint(tmp_path / "x", config, lora(), "hf://a/b", tensors={"layers.0.x": torch.ones(2)})
    with pytest.raises(InputError, match=r"`layers.0.x` is not an adapter of its model"):
        export_adapter(str(run), str(tmp_path / "out"))


def test_another_base_than_the_run_began_with_is_refused(tmp_path: Path) -> None:
    config = save_tiny_hf("llama", tmp_path / "base")
    wide = save_tiny_hf("llama", tmp_path / "wide", ffn=64)
    run = save_lora_checkpoint(tmp_path / "run", config, lora(), tmp_path / "base")
    with pytest.raises(InputError, match="trained on another model: `ffn` is 48, of the weights it is 64"):
        merge_adapter(tmp_path / "wide", run, tmp_path / "out")
    export_adapter(str(run), str(tmp_path / "adapter"))
    with pytest.raises(InputError, match=r"down_proj` are \[4, 48\] and \[32, 4\], not \[4, 64\]"):
        merge_adapter(tmp_path / "wide", tmp_path / "adapter", tmp_path / "out")
    away = save_lora_checkpoint(tmp_path / "away", wide, lora(), "hf://org/name@abc")
    with pytest.raises(InputError, match="adapters to hf://org/name@abc, which is not on this disk") as refused:
        open_weights(away)
    assert "model fetch hf://org/name@abc" in (refused.value.hint or "")
    with pytest.raises(TrainshedError):
        merge_adapter(tmp_path / "base", tmp_path / "nothing", tmp_path / "out")
