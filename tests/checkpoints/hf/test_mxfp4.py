"""Weights of gpt-oss as they are published, in blocks of 4 bits, are what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.models.one_process import token_rows
from support.models.tiny_models import save_tiny_hf, tiny_config
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat
from trainshed.checkpoints.hf.mxfp4 import dequantize_mxfp4
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.prove.layerwise import TransformersOracle, layer_states
from trainshed.errors import CorruptData
from trainshed.models.parameters import parameters
from trainshed.recipe import ModelConfig

EXPERTS = {"moe": {"experts": 3, "top_k": 2, "ffn": 64, "router_bias": True}}
PUBLISHED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}}


def save_published(folder: Path) -> ModelConfig:
    """A tiny gpt-oss whose experts are 4 random bits, as OpenAI stores them."""
    config = save_tiny_hf("gpt_oss", folder, seed=4, **EXPERTS)
    state, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        state[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        # Exponents that leave weights near those of the other tensors.
        state[f"{name}_scales"] = torch.randint(121, 126, shape, dtype=torch.uint8, generator=generator)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    body = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(body | PUBLISHED))
    return config


def test_every_byte_and_every_exponent_is_what_transformers_makes_of_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    byte = torch.arange(256, dtype=torch.uint8)
    blocks = byte.view(16, 1, 16).repeat(1, 255, 1)[None]  # every byte with every exponent that is a number
    scales = byte[:255].expand(1, 16, 255)
    theirs = convert_moe_packed_tensors(blocks, scales)  # transposed
    ours = dequantize_mxfp4(blocks[0], scales[0])
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(ours.view(torch.int16), theirs[0].t().contiguous().view(torch.int16))


def test_any_box_of_the_experts_is_that_part_of_what_transformers_makes(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = save_published(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    with HfWeights(tmp_path) as weights:
        assert weights.config == config
        for parameter in parameters(config):
            if parameter.layer != 1 or not parameter.name.endswith(("experts.gate_up", "experts.down")):
                continue
            name = f"model.layers.1.mlp.experts.{parameter.name.rsplit('.', 1)[1]}_proj"
            whole = convert_moe_packed_tensors(state[f"{name}_blocks"], state[f"{name}_scales"]).transpose(1, 2)
            offset, shape = (1, 3, 5), (2, parameter.shape[1] - 7, parameter.shape[2] - 9)
            box = weights.read(parameter, offset, shape, torch.float32)
            parts = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
            assert torch.equal(box, whole[parts].float()), parameter.name


def test_logits_are_those_of_transformers_and_go_out_in_bf16(tmp_path: Path) -> None:
    config = save_published(tmp_path / "published")
    tokens = token_rows(config, 2, 16)
    with HfWeights(tmp_path / "published") as weights:
        assert weights.dtypes == ["bfloat16", "float32"]
        states = zip(layer_states(weights, tokens), TransformersOracle(weights).states(tokens), strict=True)
        for ours, theirs in states:
            torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=2e-5, msg=ours.name)
    result = convert_weights(str(tmp_path / "published"), str(tmp_path / "plain"), TargetFormat("hf"), dtype="bf16")
    assert result.verdict.passed
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert load_file(tmp_path / "plain" / "model.safetensors")["model.layers.0.mlp.experts.down_proj"].shape == (
        3,
        64,
        config.hidden,
    )


def test_blocks_without_their_scales_are_refused(tmp_path: Path) -> None:
    save_published(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptData, match=r"`model.layers.0.mlp.experts.down_proj_blocks` \[3, 32, 2, 16\]"):
        HfWeights(tmp_path)
    assert tiny_config("gpt_oss", **EXPERTS).hidden == 32
