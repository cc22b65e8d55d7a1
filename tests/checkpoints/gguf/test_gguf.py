"""GGUF: what is written is read back bit by bit, transformers and llama.cpp compute the same from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from support.missing_parts import missing_part
from support.models import made_tokenizers
from support.models.tiny_models import hf_model, save_tiny_hf, tiny_config
from trainshed.checkpoints.convert.convert import Conversion, Dtype, convert_weights
from trainshed.checkpoints.formats import TargetFormat, open_weights
from trainshed.checkpoints.gguf.tokenizer_keys import gguf_vocabulary
from trainshed.checkpoints.quantization import GgufBlocks
from trainshed.cli import run_cli
from trainshed.errors import CorruptData, InputError, TokenizerError
from trainshed.models.export_support import gguf_architecture

SIZES = {"vocab_size": 2016, "hidden": 64, "head_dim": 16, "ffn": 96}
LLAMA31 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
    "original_positions": 32,
}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer."""
    tokenizer = made_tokenizers.gpt2()
    assert tokenizer.get_vocab_size() <= SIZES["vocab_size"]
    return made_tokenizers.save(tokenizer, made_tokenizers.CONFIGS["gpt2"], tmp_path_factory.mktemp("words"))


def exported(tmp_path: Path, words: Path, family: str, dtype: Dtype, **changes: Any) -> tuple[Path, Conversion]:
    save_tiny_hf(family, tmp_path / "model", seed=3, **{**SIZES, **changes})
    target = tmp_path / "out"
    made = convert_weights(
        str(tmp_path / "model"), str(target), TargetFormat("gguf"), dtype=dtype, tokenizer=str(words)
    )
    return target, made


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 43)[None]).logits[0]


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "q8_0"), ("qwen2", "fp16"), ("qwen3", "bf16"), ("mistral", "fp32")]
)
def test_transformers_loads_it_and_computes_the_same(tmp_path: Path, words: Path, family: str, dtype: Dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers takes 128 for the heads of any Qwen3 in GGUF.
    changes = {"mistral": {"sliding_window": None}, "qwen3": {"head_dim": 128}}.get(family, {})
    target, made = exported(tmp_path, words, family, dtype, **changes)
    assert made.verdict.passed
    assert made.verdict.tensors.equal == made.verdict.tensors.compared
    assert (made.format, made.units) == ("gguf", 1)
    assert sorted(path.name for path in target.iterdir()) == ["manifest.json", "model.gguf", "verdict.json"]
    theirs = AutoModelForCausalLM.from_pretrained(target, gguf_file="model.gguf", dtype=torch.float32).eval()
    apart = (logits(theirs) - logits(hf_model(tmp_path / "model"))).abs().max()
    bound = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2, "q8_0": 5e-2}[dtype] * logits(theirs).abs().max()
    assert apart < bound
    assert apart > 0 or dtype == "fp32"
    text = "def read(self, size=-1): return 42"
    ids = AutoTokenizer.from_pretrained(target, gguf_file="model.gguf")(text)["input_ids"]
    assert ids == made_tokenizers.gpt2().encode(text).ids


def test_q8_0_says_how_far_off_it_is(tmp_path: Path, words: Path) -> None:
    _, made = exported(tmp_path, words, "qwen3", "q8_0")
    quantization = made.verdict.quantization
    assert quantization is not None
    assert 0.5 < quantization["largest_error"] <= 1
    assert 0.99 < quantization["logits_cosine"] < 1
    assert made.verdict.tensors.dtype == made.dtype == "q8_0"
    assert any("q8_0: the worst value is off by" in line for line in made.verdict.lines())


def test_the_bound_of_q8_0_holds_for_any_values_and_is_not_loose() -> None:
    scheme = GgufBlocks()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(512, 256, generator=generator) * torch.logspace(-6, 4, 512)[:, None]
    share = (scheme.round_trip(rows) - rows).abs() / scheme.bound(rows)
    assert 0.8 < float(share.max()) <= 1


def test_a_changed_byte_or_key_is_noticed(tmp_path: Path, words: Path) -> None:
    target, _ = exported(tmp_path, words, "qwen2", "bf16")
    file = target / "model.gguf"
    reader = gguf.GGUFReader(file, "r+")
    reader.fields["qwen2.rope.freq_base"].parts[-1][0] *= 2
    reader.data.flush()
    del reader
    with pytest.raises(CorruptData, match=r"qwen2\.rope\.freq_base"):
        open_weights(target)
    reader = gguf.GGUFReader(file, "r+")
    reader.fields["qwen2.rope.freq_base"].parts[-1][0] /= 2
    next(tensor for tensor in reader.tensors if tensor.name == "output_norm.weight").data[5] += np.float32(0.01)
    reader.data.flush()
    del reader
    (target / "verdict.json").unlink()
    assert run_cli(["model", "compare", str(tmp_path / "model"), str(target)]) == 1


def test_llama_31_stretches_its_positions_in_gguf_as_transformers_does(tmp_path: Path, words: Path) -> None:
    target, made = exported(tmp_path, words, "llama", "fp32", rope={"base": 10000.0, "scaling": LLAMA31})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config.get("rope_parameters") or config["rope_scaling"])["rope_type"] == "llama3"
    assert made.verdict.passed
    factors = next(t.data for t in gguf.GGUFReader(target / "model.gguf").tensors if t.name == "rope_freqs.weight")
    stretched = hf_model(tmp_path / "model").model.rotary_emb.inv_freq
    plain = 1 / (10000.0 if "rope_parameters" not in config else config["rope_parameters"]["rope_theta"]) ** (
        torch.arange(0, 16, 2) / 16
    )
    assert torch.allclose(plain / torch.from_numpy(np.array(factors)), stretched, rtol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "gpt2", "olmo2", "deepseek_v3"])
def test_other_families_are_refused_by_name(tmp_path: Path, words: Path, family: str) -> None:
    save_tiny_hf(family, tmp_path / "model")
    with pytest.raises(InputError, match=f"{family} is not written as GGUF"):
        convert_weights(str(tmp_path / "model"), str(tmp_path / "out"), TargetFormat("gguf"), tokenizer=str(words))
    assert not (tmp_path / "out").exists()


def test_what_gguf_cannot_say_is_refused(tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_hf("mistral", tmp_path / "windowed", **SIZES)
    with pytest.raises(InputError, match="has no word for `output_bias`"):
        gguf_architecture(tiny_config("llama-biases"))
    with pytest.raises(InputError, match="has no word for `sliding_window`"):
        convert_weights(str(tmp_path / "windowed"), str(tmp_path / "out"), TargetFormat("gguf"), tokenizer=str(words))
    save_tiny_hf("qwen3", tmp_path / "model", **SIZES)
    with pytest.raises(TokenizerError, match=r"there is no tokenizer\.json"):
        convert_weights(str(tmp_path / "model"), str(tmp_path / "out"), TargetFormat("gguf"))
    sentences = made_tokenizers.save(made_tokenizers.llama2(), {}, tmp_path / "sentences")
    with pytest.raises(TokenizerError, match="byte fallback"):
        convert_weights(str(tmp_path / "model"), str(tmp_path / "out"), TargetFormat("gguf"), tokenizer=str(sentences))
    asked = ["model", "convert", str(tmp_path / "model"), str(tmp_path / "out"), "--to", "hf", "--dtype", "q8_0"]
    assert run_cli(asked) == 2
    assert "hf is not written in q8_0" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_loads_it_and_predicts_the_same_tokens(tmp_path: Path, words: Path, family: str) -> None:
    try:
        import xllamacpp
    except ImportError:
        missing_part("no llama.cpp: pip install xllamacpp")
    changes = {"mistral": {"sliding_window": None}, "llama": {"rope": {"base": 10000.0, "scaling": LLAMA31}}}
    target, _ = exported(tmp_path, words, family, "fp32", **changes.get(family, {}))
    params = xllamacpp.CommonParams()
    params.model.path = str(target / "model.gguf")
    params.n_ctx, params.warmup, params.cpuparams.n_threads = 64, False, 1
    prompt = list(range(3, 35))
    model = hf_model(tmp_path / "model")
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    answer = xllamacpp.Server(params).handle_completions(
        {"prompt": prompt, "n_predict": 1, "n_probs": 20, "temperature": 0.0, "cache_prompt": False}
    )
    shown = json.loads(answer) if isinstance(answer, str) else answer
    best = shown["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["id"] for entry in best[:3]] == wanted.topk(3).indices.tolist()
    # llama.cpp keeps keys and values in float16.
    assert max(abs(entry["logprob"] - float(wanted[entry["id"]])) for entry in best) < 2e-2


TEMPLATES = {
    "list": ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": "{{ messages }}"}]}),
    "file": ("chat_template.json", {"chat_template": "{{ messages }}"}),
}


@pytest.mark.parametrize("place", TEMPLATES)
def test_the_chat_template_goes_along_wherever_it_stands(words: Path, place: str) -> None:
    name, settings = TEMPLATES[place]
    companions = {file.name: file.read_bytes() for file in words.iterdir()}
    companions[name] = json.dumps(json.loads(companions.get(name, b"{}")) | settings).encode()
    assert gguf_vocabulary(companions, SIZES["vocab_size"]).chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("normalizer", "refused"),
    [
        (None, None),
        ({"type": "NFC"}, None),
        ({"type": "Lowercase"}, "Lowercase"),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, "Lowercase"),
    ],
)
def test_a_tokenizer_that_changes_text_is_refused(
    words: Path, normalizer: dict[str, Any] | None, refused: str | None
) -> None:
    companions = {file.name: file.read_bytes() for file in words.iterdir()}
    companions["tokenizer.json"] = json.dumps(
        json.loads(companions["tokenizer.json"]) | {"normalizer": normalizer}
    ).encode()
    if refused is None:
        assert gguf_vocabulary(companions, SIZES["vocab_size"]).tokens
    else:
        with pytest.raises(TokenizerError, match=rf"changes text before it cuts it \({refused}\)"):
            gguf_vocabulary(companions, SIZES["vocab_size"])
