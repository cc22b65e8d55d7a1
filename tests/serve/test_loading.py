"""A model is the same model in every format it is loaded from, with the words that belong to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models.made_tokenizers import CONFIGS, KINDS, save
from support.models.tiny_models import save_tiny_hf
from support.runs.small_generators import Notes, ask, generating
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat
from trainshed.checkpoints.prove.verdict import VERDICT
from trainshed.errors import InputError, TokenizerError
from trainshed.models.moe import GroupedExperts
from trainshed.serve.loading import LoadedModel, load_model

FORMATS = {
    "native": TargetFormat("native"),
    "megatron": TargetFormat("megatron"),
    "megatron-legacy": TargetFormat("megatron", "torch", tp=2, pp=2),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer that has exactly its tokens."""
    folder = tmp_path_factory.mktemp("models") / "hf"
    save_tiny_hf("qwen3_moe", folder, seed=1, layers=2, vocab_size=2000)
    save(KINDS["qwen"](), CONFIGS["qwen"] | {"chat_template": "{{ messages[0].content }}"}, folder)
    return folder


def answered(model: LoadedModel) -> list[Any]:
    assert model.tokenizer is not None
    with generating(model.decoder, decode=model.tokenizer.decode_plain) as generator:
        prompt = model.tokenizer.encode("Return the value of")
        return ask(generator, prompt, max_tokens=8, temperature=0.0, logprobs=1).events


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_gives_the_same_answer_with_the_same_words(format: str, hf: Path, tmp_path: Path) -> None:
    convert_weights(str(hf), str(tmp_path / format), FORMATS[format], logits=False)
    expected, found = load_model(str(hf), device="cpu"), load_model(str(tmp_path / format), device="cpu")
    assert answered(found) == answered(expected)
    assert (found.name, expected.name) == (format, "hf")
    assert found.tokenizer is not None
    assert found.tokenizer.can_chat


def test_a_step_has_the_words_of_the_whole(hf: Path, tmp_path: Path) -> None:
    convert_weights(str(hf), str(tmp_path / "native"), TargetFormat("native"), logits=False)
    (step,) = (tmp_path / "native" / "checkpoints").glob("step-*")
    assert answered(load_model(str(step), device="cpu")) == answered(load_model(str(hf), device="cpu"))


@pytest.mark.s3
def test_weights_in_a_bucket_are_fetched_once(
    hf: Path, tmp_path: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainshed.storage import copy_tree

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copy_tree(str(hf), f"s3://{s3_bucket}/model")
    expected = answered(load_model(str(hf), device="cpu"))
    for _ in range(2):
        assert answered(load_model(f"s3://{s3_bucket}/model", device="cpu")) == expected
    assert len(list(tmp_path.glob("trainshed/weights/*/source-*/model.safetensors"))) == 1


def test_an_adapter_is_loaded_with_its_base(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from support.models.tiny_models import hf_model

    base = tmp_path / "base"
    save_tiny_hf("llama", base, seed=1)
    wrapped = get_peft_model(hf_model(base), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    wrapped.save_pretrained(tmp_path / "adapter")
    tokens = torch.arange(5, 25)
    with torch.no_grad():
        expected = wrapped(tokens[None]).logits[0].log_softmax(-1)
    for given in (None, str(base)):
        notes = Notes()
        model = load_model(str(tmp_path / "adapter"), base=given, device="cpu", reporter=notes)
        with generating(model.decoder) as generator:
            told = ask(generator, tokens.tolist(), max_tokens=0, prompt_logprobs=True).prompt_pieces
        own = [float(expected[at, token]) for at, token in enumerate(tokens[1:])]
        assert [piece.logprob for piece in told] == pytest.approx(own, abs=1e-4)
        assert any("its base is" in said for said in notes.said) == (given is None)
    with pytest.raises(InputError, match="--base is for a LoRA adapter"):
        load_model(str(base), base=str(base))


def test_weights_whose_proof_failed_are_refused_unless_one_insists(hf: Path, tmp_path: Path) -> None:
    convert_weights(str(hf), str(tmp_path / "made"), TargetFormat("native"), logits=False)
    verdict = json.loads((tmp_path / "made" / VERDICT).read_bytes())
    (tmp_path / "made" / VERDICT).write_text(json.dumps(verdict | {"passed": False}))
    with pytest.raises(InputError, match="failed the proof of their conversion") as refused:
        load_model(str(tmp_path / "made"), device="cpu")
    assert "--ignore-verdict" in (refused.value.hint or "")
    (step,) = (tmp_path / "made" / "checkpoints").glob("step-*")
    with pytest.raises(InputError, match="failed the proof"):
        load_model(str(step), device="cpu")
    assert load_model(str(tmp_path / "made"), device="cpu", ignore_verdict=True).tokenizer is not None


def test_the_dtype_is_fp32_on_a_cpu_and_told_unless_it_is_asked_for(hf: Path) -> None:
    notes = Notes()
    model = load_model(str(hf), device="cpu", reporter=notes)
    assert {weight.dtype for weight in model.decoder.parameters()} == {torch.float32}
    assert any("in fp32 on cpu (stored in float32" in said for said in notes.said)
    model = load_model(str(hf), device="cpu", dtype="bf16")
    assert {weight.dtype for weight in model.decoder.parameters()} == {torch.bfloat16}
    assert len(answered(model)) == 10


def test_gates_are_put_in_order_once(hf: Path) -> None:
    model = load_model(str(hf), device="cpu")
    assert not any(
        module.gate_up_interleaved for module in model.decoder.modules() if isinstance(module, GroupedExperts)
    )


def test_a_prompt_that_is_not_utf_8_is_refused(hf: Path) -> None:
    with pytest.raises(InputError, match="the prompt is not UTF-8"):
        load_model(str(hf)).encode("caf\udce9")


def test_another_tokenizer_can_be_named(hf: Path, tmp_path: Path) -> None:
    save(KINDS["gpt2"](), CONFIGS["gpt2"], tmp_path / "words")
    for named in (tmp_path / "words", tmp_path / "words" / "tokenizer.json"):
        model = load_model(str(hf), device="cpu", tokenizer=str(named))
        assert model.tokenizer is not None
        assert not model.tokenizer.can_chat


def test_weights_without_a_tokenizer_have_no_words(tmp_path: Path) -> None:
    save_tiny_hf("llama", tmp_path)
    assert load_model(str(tmp_path), device="cpu").tokenizer is None


def test_a_gguf_file_says_that_its_tokenizer_is_not_read_back(tmp_path: Path) -> None:
    save_tiny_hf("qwen3", tmp_path / "hf", seed=1, layers=2, vocab_size=2000, hidden=64, head_dim=16)
    save(KINDS["qwen"](), CONFIGS["qwen"], tmp_path / "hf")
    convert_weights(str(tmp_path / "hf"), str(tmp_path / "gguf"), TargetFormat("gguf"), logits=False)
    model = load_model(str(tmp_path / "gguf"), device="cpu")
    with pytest.raises(TokenizerError, match="tokenizer inside a GGUF file is not read back") as caught:
        model.encode("Return")
    assert "--tokenizer FOLDER" in (caught.value.hint or "")


def test_a_tokenizer_with_more_tokens_than_the_model_is_pointed_out(tmp_path: Path) -> None:
    save_tiny_hf("llama", tmp_path)
    save(KINDS["gpt2"](), CONFIGS["gpt2"], tmp_path)
    notes = Notes()
    load_model(str(tmp_path), device="cpu", reporter=notes)
    assert any("2,000 tokens" in said and "96" in said for said in notes.said)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused(device: str, hf: Path) -> None:
    with pytest.raises(InputError, match=f"there is no device `{device}` here") as refused:
        load_model(str(hf), device=device)
    assert "cpu" in (refused.value.hint or "")
