"""Adapters beside one base: what each request is answered by is what PEFT computes, whoever else is answered."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models.lora_checkpoints import save_lora_checkpoint
from support.models.made_tokenizers import CONFIGS, KINDS, save
from support.models.one_process import token_rows
from support.models.tiny_models import hf_model, save_tiny_hf
from support.runs.small_generators import Notes, ask, begin, generating
from trainshed.checkpoints.lora.export import export_adapter
from trainshed.errors import InputError, NotFound, TrainshedError
from trainshed.models.layers import Linear, linear
from trainshed.recipe import Lora, ModelConfig
from trainshed.serve.adapters import RowRuns
from trainshed.serve.loading import load_model
from trainshed.serve.request import GenerationFinished
from trainshed.serve.scheduler import ModelGenerator, OutputText

DRAWN = {"max_tokens": 10, "temperature": 0.9, "seed": 5, "logprobs": 2, "ignore_eos": True}


def lora(**keys: Any) -> Lora:
    return Lora.model_validate({"rank": 4, "alpha": 8.0, "targets": ["attn", "mlp"], **keys})


def saved_adapter(folder: Path, config: ModelConfig, base: Path, *, seed: int = 0, **keys: Any) -> str:
    """A PEFT folder of a LoRA run with random adapters."""
    run = save_lora_checkpoint(folder.with_name(f"{folder.name}-run"), config, lora(**keys), base, seed=seed)
    export_adapter(str(run), str(folder), dtype="fp32")
    return str(folder)


@contextmanager
def serving(base: Path, adapters: dict[str, str], **options: Any) -> Iterator[ModelGenerator]:
    model = load_model(str(base), adapters=adapters, device="cpu", **options)
    generator = model.generator(max_sequences=4, max_length=model.config.max_positions)
    try:
        yield generator
    finally:
        generator.close()


def peft_model(base: Path, adapter: str) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(hf_model(base), adapter).eval()


def prompt_logprobs(generator: ModelGenerator, prompt: list[int], adapter: str | None) -> list[float | None]:
    answer = ask(generator, prompt, adapter=adapter, max_tokens=0, prompt_logprobs=True)
    return [piece.logprob for piece in answer.prompt_pieces]


def expected_logprobs(model: Any, prompt: list[int]) -> list[float]:
    with torch.no_grad():
        scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return [float(scores[position, token]) for position, token in enumerate(prompt[1:])]


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"rslora": True},
    "qwen3": {"dora": True},
    "gpt2": {"dora": True},
    "mixtral": {"targets": ["attn"]},
    "olmo2": {},
    "phi3": {},
    "mistral": {"targets": ["k_proj", "gate_proj"]},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_with_an_adapter_are_pefts(family: str, tmp_path: Path) -> None:
    config = save_tiny_hf(family, tmp_path / "base", seed=2)
    adapter = saved_adapter(tmp_path / "adapter", config, tmp_path / "base", **FAMILIES[family])
    prompt = token_rows(config, 1, 30, seed=3)[0].tolist()
    expected = expected_logprobs(peft_model(tmp_path / "base", adapter), prompt)
    plain = expected_logprobs(hf_model(tmp_path / "base"), prompt)
    assert max(abs(one - other) for one, other in zip(expected, plain, strict=True)) > 0.05
    with serving(tmp_path / "base", {"mine": adapter}) as generator:
        assert prompt_logprobs(generator, prompt, "mine") == pytest.approx(expected, abs=1e-5)
        assert prompt_logprobs(generator, prompt, None) == pytest.approx(plain, abs=1e-5)
        greedy = ask(generator, prompt, adapter="mine", max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    # Decode steps apply adapters row by row: as one pass over the whole text does.
    whole = expected_logprobs(peft_model(tmp_path / "base", adapter), prompt + greedy.tokens)[len(prompt) - 1 :]
    assert [piece.logprob for piece in greedy.pieces] == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_adapters_in_one_batch_answer_as_each_does_alone_to_the_bit(family: str, tmp_path: Path) -> None:
    config = save_tiny_hf(family, tmp_path / "base", seed=2)
    dense = ["attn", "mlp"] if family == "llama" else ["attn"]
    adapters = {
        "wide": saved_adapter(tmp_path / "wide", config, tmp_path / "base", seed=1, rank=6, targets=dense),
        "dora": saved_adapter(tmp_path / "dora", config, tmp_path / "base", seed=2, dora=True, targets=["q_proj"]),
        "third": saved_adapter(tmp_path / "third", config, tmp_path / "base", seed=3, rank=2, targets=["v_proj"]),
    }
    asked = [(name, token_rows(config, 1, length, seed=length)[0].tolist()) for length in (3, 17) for name in adapters]
    asked += [(None, asked[0][1]), (None, asked[3][1])]
    with serving(tmp_path / "base", adapters) as generator:
        alone = [ask(generator, prompt, adapter=name, **DRAWN) for name, prompt in asked]
        among = [begin(generator, prompt, adapter=name, **DRAWN) for name, prompt in asked]
        for one, other in zip(alone, among, strict=True):
            assert other.wait().events == one.events
    assert len({tuple(answer.tokens) for answer in alone}) == len(alone), "each says something else"
    for name, place in adapters.items():
        with serving(tmp_path / "base", {name: place}) as single:
            for (of, prompt), answer in zip(asked, alone, strict=True):
                if of == name:
                    assert ask(single, prompt, adapter=name, **DRAWN).tokens == answer.tokens


def test_adapters_that_peft_trained_are_served_and_so_are_lora_runs(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = save_tiny_hf("llama", tmp_path / "base", seed=2)
    rows = token_rows(config, 4, 24, seed=1).long()
    for name, keys in {"plain": {"r": 8}, "dora": {"r": 3, "use_dora": True, "lora_dropout": 0.1}}.items():
        torch.manual_seed(0)
        model = get_peft_model(hf_model(tmp_path / "base"), LoraConfig(target_modules="all-linear", **keys))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for _ in range(5):
            loss = model(rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(tmp_path / name)
    run = save_lora_checkpoint(tmp_path / "run", config, lora(dora=True), tmp_path / "base")
    export_adapter(str(run), str(tmp_path / "exported"), dtype="fp32")
    adapters = {name: str(tmp_path / name) for name in ("plain", "dora", "run")}
    prompt = rows[0].tolist()
    with serving(tmp_path / "base", adapters) as generator:
        for name in adapters:
            folder = str(tmp_path / ("exported" if name == "run" else name))
            expected = expected_logprobs(peft_model(tmp_path / "base", folder), prompt)
            assert prompt_logprobs(generator, prompt, name) == pytest.approx(expected, abs=1e-5)


def test_a_lora_run_alone_is_merged_into_the_base_that_it_names(tmp_path: Path) -> None:
    config = save_tiny_hf("qwen3_moe", tmp_path / "base", seed=2)
    run = save_lora_checkpoint(tmp_path / "run", config, lora(targets=["all-linear"]), tmp_path / "base")
    export_adapter(str(run), str(tmp_path / "adapter"), dtype="fp32")
    prompt = token_rows(config, 1, 20, seed=3)[0].tolist()
    expected = expected_logprobs(peft_model(tmp_path / "base", str(tmp_path / "adapter")), prompt)
    (step,) = (run / "checkpoints").glob("step-*")
    for address in (run, step, tmp_path / "adapter"):
        notes = Notes()
        model = load_model(str(address), device="cpu", reporter=notes)
        assert any(f"its base is {tmp_path / 'base'}" in text for text in notes.said)
        assert all(module.matmul is linear for module in model.decoder.modules() if isinstance(module, Linear))
        generator = model.generator(max_sequences=1)
        assert prompt_logprobs(generator, prompt, None) == pytest.approx(expected, abs=1e-5)
        with pytest.raises(InputError, match="there is no adapter `x`: none is loaded"):
            ask(generator, prompt, adapter="x")
        generator.close()


def test_an_adapter_beside_others_becomes_one_of_them(tmp_path: Path) -> None:
    config = save_tiny_hf("llama", tmp_path / "base", seed=2)
    first = save_lora_checkpoint(tmp_path / "first", config, lora(), tmp_path / "base", seed=1)
    second = saved_adapter(tmp_path / "second", config, tmp_path / "base", seed=2)
    prompt = token_rows(config, 1, 20, seed=3)[0].tolist()
    model = load_model(str(first), adapters={"second": second}, device="cpu")
    assert model.name == "first-base"
    assert model.adapters is not None
    assert model.adapters.bank.names == ("first", "second")
    generator = model.generator(max_sequences=2)
    plain = expected_logprobs(hf_model(tmp_path / "base"), prompt)
    assert prompt_logprobs(generator, prompt, None) == pytest.approx(plain, abs=1e-5)
    with pytest.raises(InputError, match="there is no adapter `third`") as refused:
        ask(generator, prompt, adapter="third")
    assert refused.value.hint == "loaded are first, second"
    generator.close()
    with pytest.raises(InputError, match="the model and an adapter are both called `first`"):
        load_model(str(first), adapters={"first": second}, device="cpu")


def test_an_adapter_brings_its_words_and_its_end(tmp_path: Path) -> None:
    config = save_tiny_hf("llama", tmp_path / "base", vocab_size=2000)
    save(KINDS["gpt2"](), CONFIGS["gpt2"], tmp_path / "base")
    own = saved_adapter(tmp_path / "own", config, tmp_path / "base")
    other = saved_adapter(tmp_path / "other", config, tmp_path / "base", seed=1)
    save(KINDS["qwen"](), CONFIGS["qwen"] | {"chat_template": "{{ messages[0].content }}"}, Path(own))
    model = load_model(str(tmp_path / "base"), adapters={"own": own, "other": other}, device="cpu")
    assert model.tokenizer is not None
    assert model.adapters is not None
    words = model.adapters.tokenizers
    assert words["own"] is not None
    assert words["own"].can_chat
    assert not model.tokenizer.can_chat
    assert words["other"] is None
    generator = model.generator(max_sequences=2)
    prompt = model.tokenizer.encode("Return the value of")
    keys: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    answer = ask(generator, prompt, adapter="own", **keys)
    assert answer.text == words["own"].decode_plain(prompt + answer.tokens)[len(words["own"].decode_plain(prompt)) :]
    generator.close()
    ending = OutputText(eos_tokens=frozenset(answer.tokens[2:3]))
    with generating(model.decoder, adapters=model.adapters.bank, adapter_texts={"own": ending}) as generator:
        keys["ignore_eos"] = False
        assert ask(generator, prompt, adapter="own", **keys).end == GenerationFinished("stop")
        assert ask(generator, prompt, adapter="other", **keys).end == GenerationFinished("length")


def test_what_cannot_be_one_of_several_says_how_it_is_served(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = save_tiny_hf("mixtral", tmp_path / "base", seed=2)
    experts = saved_adapter(tmp_path / "experts", config, tmp_path / "base", targets=["experts"])
    with pytest.raises(InputError, match=r"changes .* which all requests share") as refused:
        load_model(str(tmp_path / "base"), adapters={"x": experts}, device="cpu")
    assert "serve it alone" in (refused.value.hint or "")
    head = get_peft_model(
        hf_model(tmp_path / "base"), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    head.save_pretrained(tmp_path / "head")
    with pytest.raises(InputError, match=r"replaces `lm_head.weight` as a whole"):
        load_model(str(tmp_path / "base"), adapters={"x": str(tmp_path / "head")}, device="cpu")
    for alone in (experts, str(tmp_path / "head")):
        assert load_model(alone, device="cpu").adapters is None


def test_bad_adapters_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    config = save_tiny_hf("llama", tmp_path / "base")
    save_tiny_hf("llama", tmp_path / "wide", ffn=64)
    adapter = saved_adapter(tmp_path / "adapter", config, tmp_path / "base")
    run = tmp_path / "adapter-run"

    def load(place: Path | str, base: str = "base") -> None:
        load_model(str(tmp_path / base), adapters={"x": str(place)}, device="cpu")

    with pytest.raises(InputError, match=r"down_proj` are \[4, 48\] and \[32, 4\], not \[4, 64\]"):
        load(adapter, "wide")
    with pytest.raises(InputError, match="trained on another model: `ffn` is 48, of the weights it is 64"):
        load(run, "wide")
    with pytest.raises(NotFound, match=r"there is no adapter: neither adapter_config.json nor"):
        load(tmp_path / "base")
    with pytest.raises(NotFound):
        load(tmp_path / "nothing")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, key: torch.full((4, 32), torch.nan)}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"its factors of `layers.0.attention.qkv.weight` are not finite"):
        load(adapter)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"there is no adapter_model.safetensors"):
        load(adapter)
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(InputError, match="does not say what it was trained on"):
        load_model(adapter, device="cpu")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "/not/here"}')
    with pytest.raises(TrainshedError, match="its base is /not/here, and there is no such folder"):
        load_model(adapter, device="cpu")


def test_rows_of_one_adapter_that_follow_each_other_are_one_run() -> None:
    assert RowRuns.of([3, 2, 4, 1], [1, 1, 0, 2]) == RowRuns(((0, 5, 1), (9, 10, 2)))
    assert RowRuns.of([3, 2], [0, 0]) is None


@pytest.mark.s3
def test_adapters_in_a_bucket_are_fetched_once(tmp_path: Path, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainshed.storage import copy_tree

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = save_tiny_hf("llama", tmp_path / "base", seed=2)
    folder = saved_adapter(tmp_path / "adapter", config, tmp_path / "base")
    save(KINDS["gpt2"](), CONFIGS["gpt2"], Path(folder))
    copy_tree(folder, f"s3://{s3_bucket}/adapter")
    copy_tree(str(tmp_path / "adapter-run"), f"s3://{s3_bucket}/run")
    prompt = token_rows(config, 1, 20, seed=3)[0].tolist()
    places = {"here": folder, "folder": f"s3://{s3_bucket}/adapter", "run": f"s3://{s3_bucket}/run"}
    for _ in range(2):
        model = load_model(str(tmp_path / "base"), adapters=places, device="cpu")
        assert model.adapters is not None
        assert model.adapters.tokenizers["folder"] is not None
        generator = model.generator(max_sequences=2)
        answers = {name: tuple(ask(generator, prompt, adapter=name, **DRAWN).tokens) for name in places}
        generator.close()
        assert len(set(answers.values())) == 1
    assert len(list((tmp_path / "cache").rglob("adapter_model.safetensors"))) == 1
    alone = load_model(places["folder"], device="cpu")
    assert alone.tokenizer is not None
