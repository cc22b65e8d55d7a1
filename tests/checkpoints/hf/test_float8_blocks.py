"""fp8 with a scale for each block of a matrix, as DeepSeek-V3 and Qwen3's FP8 models are published, is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.models.one_process import token_rows
from support.models.tiny_models import hf_model, save_tiny_hf
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat, open_weights
from trainshed.checkpoints.prove.layerwise import layer_states
from trainshed.errors import CorruptData, InputError
from trainshed.models.parameters import parameters
from trainshed.recipe import ModelConfig

BLOCK = (8, 5)
"""Does not divide the widths of these models: the last blocks are cut."""


def dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """DeepSeek's `weight_dequant` (inference/kernel.py), block by block."""
    out = values.float()
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (slice(row * BLOCK[0], (row + 1) * BLOCK[0]), slice(column * BLOCK[1], (column + 1) * BLOCK[1]))
            out[block] *= scales[row, column]
    return out


def publish(folder: Path, family: str, **changes: Any) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Save a tiny model in fp8 blocks; returns its architecture and the values that the files stand for."""
    config = save_tiny_hf(family, folder, seed=3, **changes)
    stored = load_file(folder / "model.safetensors")
    written, plain = {}, dict(stored)
    for name, matrix in stored.items():
        if "_proj" not in name or not name.endswith(".weight"):
            written[name] = matrix
            continue
        rows, columns = (-(-size // length) for size, length in zip(matrix.shape, BLOCK, strict=True))
        scales = torch.empty(rows, columns)
        values = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                block = (
                    slice(row * BLOCK[0], (row + 1) * BLOCK[0]),
                    slice(column * BLOCK[1], (column + 1) * BLOCK[1]),
                )
                scales[row, column] = matrix[block].abs().max() / 448
                values[block] = (matrix[block] / scales[row, column]).to(torch.float8_e4m3fn)
        written[name], written[f"{name}_scale_inv"] = values, scales
        plain[name] = dequantized(values, scales)
    save_file(written, folder / "model.safetensors")
    body = json.loads((folder / "config.json").read_text())
    body["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    }
    (folder / "config.json").write_text(json.dumps(body))
    return config, plain


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3", "qwen3_moe"])
def test_it_is_the_model_of_its_values_and_converts_with_a_verdict(tmp_path: Path, family: str) -> None:
    config, plain = publish(tmp_path / "fp8", family)
    save_tiny_hf(family, tmp_path / "plain", seed=3)
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    tokens = token_rows(config, 2, 24)
    with torch.no_grad():
        expected = hf_model(tmp_path / "plain")(tokens).logits
    with open_weights(tmp_path / "fp8") as weights:
        *_, logits = layer_states(weights, tokens)
        with open_weights(tmp_path / "plain") as others:
            for parameter in parameters(config):
                whole = (0,) * len(parameter.shape), parameter.shape, torch.float32
                assert torch.equal(weights.read(parameter, *whole), others.read(parameter, *whole)), parameter.name
            wide = next(one for one in parameters(config) if one.name == "layers.1.attention.out.weight")
            box = (3, 2), (9, 11), torch.bfloat16
            assert torch.equal(weights.read(wide, *box), others.read(wide, *box))
    torch.testing.assert_close(logits.values, expected, rtol=0, atol=1e-5)
    made = convert_weights(str(tmp_path / "fp8"), str(tmp_path / "out"), TargetFormat("hf"), dtype="fp32")
    assert made.verdict.passed
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    with torch.no_grad():
        torch.testing.assert_close(hf_model(tmp_path / "out")(tokens).logits, expected, rtol=0, atol=1e-5)


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    publish(tmp_path, "qwen3")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    stored[name] = stored[name][:-1].clone()
    save_file(stored, file)
    with pytest.raises(CorruptData, match="no scale for each of its blocks of 8 x 5"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"weight_block_size": None}, {"weight_block_size": [128]}, {"fmt": "e5m2"}, {"quant_method": "gptq"}]
)
def test_other_ways_to_quantise_are_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    publish(tmp_path, "qwen3")
    body = json.loads((tmp_path / "config.json").read_text())
    body["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(body))
    with pytest.raises(InputError, match="quantization_config"):
        open_weights(tmp_path)
