"""LoRA adapters in PEFT's format: merged as PEFT merges, exported so that PEFT loads them, else refused by name."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.models.tiny_models import hf_model, save_tiny_hf
from trainshed.checkpoints.lora.merge import merge_adapter
from trainshed.errors import InputError, NotFound
from trainshed.storage import LocalStore, Manifest

Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model."
QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def write(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """An adapter by hand."""
    folder.mkdir(parents=True)
    body = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(body))
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def factors(module: str, rows: int, columns: int, rank: int = 4, seed: int = 0) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return {
        f"{module}.lora_A.weight": torch.randn(rank, columns, generator=random),
        f"{module}.lora_B.weight": torch.randn(rows, rank, generator=random),
    }


def loaded(folder: Path) -> Tensors:
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_tiny_hf("llama", tmp_path / "base", seed=1, shard_bytes=20_000)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    return tmp_path / "base"


def test_only_the_adapted_tensors_change_and_the_folder_stays_what_it_was(llama: Path, tmp_path: Path) -> None:
    added = factors(QUERY, 32, 32) | factors(DOWN, 32, 48, rank=2, seed=1) | {"lm_head.weight": torch.ones(96, 32)}
    patterns = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 32}}
    adapter = write(tmp_path / "adapter", added, use_rslora=True, modules_to_save=["lm_head"], **patterns)
    made = merge_adapter(llama, adapter, tmp_path / "out")
    assert (made.changed, made.tensors, made.rank) == (3, 21, 4)
    before, after = loaded(llama), loaded(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{QUERY}.weight", f"{DOWN}.weight", "lm_head.weight"}
    for module, scale in ((QUERY, 32 / math.sqrt(4)), (DOWN, 8 / math.sqrt(2))):
        product = added[f"{module}.lora_B.weight"] @ added[f"{module}.lora_A.weight"]
        torch.testing.assert_close(after[f"{module}.weight"], before[f"{module}.weight"] + scale * product)
    assert bool((after["lm_head.weight"] == 1).all())
    names = {path.name for path in llama.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"manifest.json", "verdict.json"}
    for name in names:
        assert (llama / name).stat().st_size == (tmp_path / "out" / name).stat().st_size
    Manifest.read(LocalStore(tmp_path / "out"), "manifest.json").verify_files(LocalStore(tmp_path / "out"))
    assert not list(tmp_path.glob(".*merging"))
    with pytest.raises(InputError, match="there is something already"):
        merge_adapter(llama, adapter, tmp_path / "out")


def test_a_merge_that_was_killed_goes_on_with_the_shards_that_are_missing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainshed.checkpoints.lora import merge as module

    adapter = write(tmp_path / "adapter", factors(QUERY, 32, 32))
    merge_adapter(llama, adapter, tmp_path / "whole")
    original, written = module._write_shard, []

    def killed(source: Path, *rest: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(source.name)
        original(source, *rest)

    monkeypatch.setattr(module, "_write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        merge_adapter(llama, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    again: list[str] = []
    monkeypatch.setattr(
        module, "_write_shard", lambda source, *rest: (again.append(source.name), original(source, *rest))
    )
    merge_adapter(llama, adapter, tmp_path / "out")
    assert not set(again) & set(written)
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "has lora_A, lora_B and not lora_A, lora_B, lora_magnitude_vector"),
        ({"some_later_trick": 1}, "`some_later_trick: 1`"),
        ({"peft_type": "IA3"}, "`peft_type: IA3` is not read"),
        ({"bias": "all"}, "`bias: all` is not read"),
        ({"init_lora_weights": "pissa"}, "`init_lora_weights: pissa` also changed the base weights"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(
    llama: Path, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    adapter = write(tmp_path / "adapter", factors(QUERY, 32, 32), **config)
    with pytest.raises(InputError) as caught:
        merge_adapter(llama, adapter, tmp_path / "out")
    assert said in caught.value.what
    assert caught.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"], "nothing is left behind"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (factors(QUERY, 32, 24), "the factors of `model.layers.0.self_attn.q_proj` are [4, 24] and [32, 4], not"),
        (factors(QUERY, 32, 32, rank=8), "are [8, 32] and [32, 8], not [4, 32] and [32, 4]"),
        (factors("model.layers.7.mlp.up_proj", 48, 32), "no tensor of its own for `model.layers.7.mlp.up_proj`"),
        ({"lm_head.weight": torch.ones(100, 32)}, "is [100, 32], in the base it is [96, 32]"),
        ({"score.weight": torch.ones(2, 32)}, "`base_model.model.score.weight` has no place in the base model"),
        ({f"{QUERY}.lora_A.weight": torch.ones(4, 32)}, "has lora_A and not lora_A, lora_B"),
    ],
)
def test_an_adapter_of_another_model_is_refused(llama: Path, tmp_path: Path, tensors: Tensors, said: str) -> None:
    with pytest.raises(InputError) as caught:
        merge_adapter(llama, write(tmp_path / "adapter", tensors), tmp_path / "out")
    assert said in caught.value.what


def test_an_embedding_that_is_the_head_too_is_not_changed_as_one(tmp_path: Path) -> None:
    save_tiny_hf("llama3", tmp_path / "base")
    adapter = write(tmp_path / "adapter", {"model.embed_tokens.weight": torch.ones(96, 32)})
    with pytest.raises(InputError, match="which is the head of this model too"):
        merge_adapter(tmp_path / "base", adapter, tmp_path / "out")


def test_folders_that_are_no_adapters(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"there is no adapter: neither adapter_config.json"):
        merge_adapter(llama, llama, tmp_path / "out")
    (write(tmp_path / "adapter", factors(QUERY, 32, 32)) / "adapter_model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"there is no adapter_model.safetensors"):
        merge_adapter(llama, tmp_path / "adapter", tmp_path / "out")


CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "patterns, embedding and a whole head": (
        "llama",
        torch.float32,
        {
            "target_modules": ["q_proj", "down_proj", "embed_tokens"],
            "modules_to_save": ["lm_head"],
            "use_rslora": True,
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {"0.self_attn.q_proj": 32},
        },
    ),
    "bf16": ("llama", torch.bfloat16, {"target_modules": "all-linear"}),
    "turned matrices": ("gpt2", torch.float32, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "experts beside": ("qwen3_moe", torch.float32, {"target_modules": ["q_proj", "o_proj"]}),
    "dora": ("llama", torch.float32, {"target_modules": "all-linear", "use_dora": True}),
    "dora in bf16": ("qwen2", torch.bfloat16, {"target_modules": ["q_proj", "up_proj"], "use_dora": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_merge_is_pefts_own_bit_by_bit(case: str, tmp_path: Path) -> None:
    peft = peft_or_skip()
    family, dtype, keys = CASES[case]
    save_tiny_hf(family, tmp_path / "fp32", seed=1)
    hf_model(tmp_path / "fp32").to(dtype).save_pretrained(tmp_path / "base", max_shard_size=20_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT has much to say about embeddings and Conv1D
        trained = peft.get_peft_model(
            hf_model(tmp_path / "base").to(dtype),
            peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **keys),
        )
        trained.save_pretrained(tmp_path / "adapter")
        base = hf_model(tmp_path / "base").to(dtype)
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
        theirs.save_pretrained(tmp_path / "theirs")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    ours, expected = loaded(tmp_path / "ours"), loaded(tmp_path / "theirs")
    assert ours.keys() == expected.keys()
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []
    assert {each.dtype for each in ours.values()} == {dtype}


def peft_or_skip() -> Any:
    return pytest.importorskip("peft", reason="peft is not installed: the merge is not held against its own")
