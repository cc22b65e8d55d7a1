"""fp8 for vLLM: compressed-tensors itself reads what is written, and the bound of the rounding holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.models.tiny_models import hf_model, save_tiny_hf
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat, open_weights
from trainshed.checkpoints.hf.weights import list_tensors
from trainshed.checkpoints.quantization import Float8Rows
from trainshed.errors import CorruptData, InputError
from trainshed.models.parameters import parameters


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 43)[None]).logits[0].float()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_compressed_tensors_loads_it_and_computes_within_the_bound_of_8_bits(tmp_path: Path, family: str) -> None:
    from compressed_tensors.quantization import QuantizationConfig
    from transformers import AutoModelForCausalLM

    save_tiny_hf(family, tmp_path / "model", seed=3, hidden=64, head_dim=16, ffn=96)
    made = convert_weights(str(tmp_path / "model"), str(tmp_path / "out"), TargetFormat("hf"), dtype="fp8")
    assert made.verdict.passed
    assert made.dtype == made.verdict.tensors.dtype == "fp8"
    assert made.verdict.quantization is not None
    assert 0.9 < made.verdict.quantization["largest_error"] <= 1
    assert 0.98 < made.verdict.quantization["logits_cosine"] < 1
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(written)
    weights, activations = parsed.config_groups["group_0"].weights, parsed.config_groups["group_0"].input_activations
    assert (weights.strategy, activations.strategy, activations.dynamic) == ("channel", "token", True)

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    linear = theirs.model.layers[0].self_attn.q_proj
    assert linear.quantization_scheme.weights.type == "float"
    # What a server computes: our rounded weights, and activations in 8 bits token by token.
    ours = hf_model(tmp_path / "model")
    matrices = {id(module.weight) for layer in ours.model.layers for module in layer.modules() if is_linear(module)}
    for parameter in ours.parameters():
        if id(parameter) not in matrices:
            parameter.data = parameter.data.bfloat16().float()
    for layer in ours.model.layers:
        for module in layer.modules():
            if is_linear(module):
                module.weight.data = Float8Rows().round_trip(module.weight.data)
                module.register_forward_pre_hook(round_activations)
    cosine = torch.nn.functional.cosine_similarity(logits(theirs), logits(ours), dim=-1).min()
    assert cosine > 0.9999
    assert (
        torch.nn.functional.cosine_similarity(logits(theirs), logits(hf_model(tmp_path / "model")), dim=-1).min() > 0.9
    )


def is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def round_activations(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    scales = inputs[0].abs().amax(-1, keepdim=True) / 448
    return ((inputs[0] / scales).to(torch.float8_e4m3fn).float() * scales,)


def test_their_values_are_those_that_we_read_back(tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor

    config = save_tiny_hf("llama", tmp_path / "model", seed=3)
    convert_weights(str(tmp_path / "model"), str(tmp_path / "out"), TargetFormat("hf"), dtype="fp8", logits=False)
    assert "float-quantized" in BaseCompressor.registered_names()
    tensors = list_tensors(tmp_path / "out")
    name = "model.layers.1.mlp.down_proj"
    assert (tensors[f"{name}.weight"].dtype, tensors[f"{name}.weight_scale"].shape) == ("F8_E4M3", (32, 1))
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "out" / "model.safetensors")
    wanted = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"].float()
    parameter = next(one for one in parameters(config) if one.name == "layers.1.mlp.down.weight")
    with open_weights(tmp_path / "out") as weights:
        assert torch.equal(weights.read(parameter, (0, 0), parameter.shape, torch.float32), wanted)
        part = weights.read(parameter, (3, 5), (7, 11), torch.float32)
    assert torch.equal(part, wanted[3:10, 5:16])


def test_the_bound_of_fp8_holds_for_any_values_and_is_not_loose() -> None:
    scheme = Float8Rows()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(512, 256, generator=generator) * torch.logspace(-30, 30, 512)[:, None]
    rows[7] = 0
    error, bound = (scheme.round_trip(rows) - rows).abs(), scheme.bound(rows)
    assert bool((error <= bound).all())
    assert float((error / bound).nan_to_num().max()) > 0.95


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "deepseek_v3"])
def test_models_with_other_matrices_are_refused_by_name(tmp_path: Path, family: str) -> None:
    save_tiny_hf(family, tmp_path / "model")
    with pytest.raises(InputError, match=f"{family} is not exported in fp8"):
        convert_weights(str(tmp_path / "model"), str(tmp_path / "out"), TargetFormat("hf"), dtype="fp8")


def test_matrices_whose_scales_are_gone_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny_hf("llama", tmp_path / "model")
    convert_weights(str(tmp_path / "model"), str(tmp_path / "out"), TargetFormat("hf"), dtype="fp8", logits=False)
    file = tmp_path / "out" / "model.safetensors"
    stored = load_file(file)
    del stored["model.layers.0.self_attn.q_proj.weight_scale"]
    save_file(stored, file)
    with pytest.raises(CorruptData, match="has no scale for each of its rows"):
        open_weights(tmp_path / "out")
