"""Exports for transformers: they load as they are, hold the same bits under the same names, and say the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.models.tiny_models import VARIANTS, hf_model, save_tiny_hf
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.hf.writer import HfWeightsWriter
from trainshed.errors import InputError
from trainshed.storage import checksum_of

SHARD_BYTES = 20_000


def exported(source: Path, target: Path, **options: Any) -> HfWeightsWriter:
    target.mkdir(exist_ok=True)
    with HfWeights(source) as weights:
        writer = HfWeightsWriter(weights.config, **{"dtype": torch.float32, **options})
        for unit in writer.output_files():
            told: list[int] = []
            checksum = writer.write(unit, weights, target / unit.path, told.append)
            data = (target / unit.path).read_bytes()
            assert (checksum_of(data), len(data)) == (checksum, unit.bytes)
            assert sum(told) == unit.bytes
        writer.finish(target, [])
    return writer


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_export_is_what_transformers_saved_and_gives_its_logits(variant: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save_tiny_hf(variant, source, seed=1)
    writer = exported(source, target, shard_bytes=SHARD_BYTES)
    assert len(writer.output_files()) > 3
    before, after = tensors(source), tensors(target)
    assert before.keys() == after.keys(), "a tied head is stored once"
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert set(json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]) == after.keys()
    tokens = torch.arange(24)[None]
    assert torch.equal(hf_model(source)(tokens).logits, hf_model(target)(tokens).logits)


def test_one_file_has_no_index_and_shards_are_no_larger_than_asked(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_tiny_hf("llama", source, seed=1)
    assert [unit.path for unit in exported(source, tmp_path / "one").output_files()] == ["model.safetensors"]
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    many = exported(source, tmp_path / "many", shard_bytes=SHARD_BYTES).output_files()
    assert many[0].path == f"model-00001-of-{len(many):05d}.safetensors"
    assert all(unit.bytes < SHARD_BYTES + 2_000 for unit in many), "headers come on top"


def test_a_cast_is_said_in_the_config(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save_tiny_hf("qwen2", source, seed=1)
    exported(source, target, dtype=torch.bfloat16)
    before, after = tensors(source), tensors(target)
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_cast_leaves_what_is_no_weight_in_float32(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save_tiny_hf("deepseek_v3", source, seed=1)
    exported(source, target, dtype=torch.bfloat16, shard_bytes=SHARD_BYTES)
    before, after = tensors(source), tensors(target)
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if name in biases else tensor.bfloat16()), name
    total = json.loads((target / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in after.values())
    with HfWeights(target) as weights:
        assert weights.dtypes == ["bfloat16"]


def test_a_config_that_says_the_same_is_kept_with_all_it_says_besides(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_tiny_hf("llama", source, seed=1)
    kept = json.loads((source / "config.json").read_text()) | {"eos_token_id": [7, 8], "pretraining_tp": 2}
    companions = {"config.json": json.dumps(kept).encode(), "generation_config.json": b'{"temperature": 0.6}'}
    exported(source, tmp_path / "same", companions=companions)
    assert json.loads((tmp_path / "same" / "config.json").read_text()) == kept
    assert (tmp_path / "same" / "generation_config.json").read_bytes() == b'{"temperature": 0.6}'
    other = {"config.json": json.dumps(kept | {"rms_norm_eps": 0.1}).encode()}
    exported(source, tmp_path / "other", companions=other)
    written = json.loads((tmp_path / "other" / "config.json").read_text())
    assert written["rms_norm_eps"] == kept["rms_norm_eps"], "the weights' own architecture wins"
    assert written["eos_token_id"] == [7, 8]
    assert json.loads((tmp_path / "other" / "generation_config.json").read_text())["eos_token_id"] == [7, 8]


def test_token_ids_nobody_knows_are_said_to_be_none(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save_tiny_hf("llama", source, seed=1)
    exported(source, target)
    assert hf_model(target).config.eos_token_id is None, "left out, transformers would take Llama 1's"


def test_a_dtype_that_safetensors_of_ours_do_not_hold_is_refused(tmp_path: Path) -> None:
    save_tiny_hf("llama", tmp_path, seed=1)
    with HfWeights(tmp_path) as weights, pytest.raises(InputError, match=r"not exported as torch\.int8"):
        HfWeightsWriter(weights.config, dtype=torch.int8)
