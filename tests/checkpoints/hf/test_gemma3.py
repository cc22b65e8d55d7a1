"""Gemma 3 as it is published: 4B, 12B and 27B see pictures too, and their part that reads text is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.models.one_process import token_rows
from support.models.tiny_models import hf_model, tiny_config, transformers_config
from support.runs.small_generators import Notes
from trainshed.catalog import model_preset
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat, open_weights
from trainshed.checkpoints.prove.layerwise import layer_states
from trainshed.errors import InputError
from trainshed.models.families import read_hf_config
from trainshed.recipe import ModelConfig

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_SCALING = {"factor": 8.0, "rope_type": "linear"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma3-4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "gemma3-12b": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
    "gemma3-27b": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
}
"""What `text_config` of google/gemma-3-*-pt says; what it leaves out is what transformers takes."""


def with_pictures(text: dict[str, Any]) -> dict[str, Any]:
    common = {"model_type": "gemma3_text", "rope_scaling": _SCALING, "sliding_window": 1024}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": common | text,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_catalogs_preset_and_what_transformers_reads(name: str) -> None:
    from transformers import AutoConfig

    body = with_pictures(PUBLISHED[name])
    assert read_hf_config(body, "config.json") == model_preset(name)
    theirs = AutoConfig.for_model(**body).text_config.to_dict() | {"architectures": None}
    assert read_hf_config(theirs, "config.json") == model_preset(name)


def save_with_pictures(folder: Path) -> tuple[ModelConfig, Any]:
    """A tiny model as Google saves it: with eyes."""
    import transformers as hf

    config = tiny_config("gemma3_text")
    text = transformers_config(config).to_dict()
    whole = hf.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    torch.manual_seed(3)
    model = hf.Gemma3ForConditionalGeneration(whole)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, config.hidden**-0.5 if weight.dim() > 1 else 0.3)
    model.save_pretrained(folder)
    return config, model.eval()


@pytest.mark.parametrize("newer_names", [False, True])
def test_the_text_model_is_read_and_goes_out_alone(tmp_path: Path, newer_names: bool) -> None:
    config, theirs = save_with_pictures(tmp_path / "published")
    assert json.loads((tmp_path / "published" / "config.json").read_text())["model_type"] == "gemma3"
    file = tmp_path / "published" / "model.safetensors"
    if newer_names:
        # transformers 4.52 and later put both parts into one `model`; what they save has the published names again.
        stored = {name.removeprefix("language_model.model."): tensor for name, tensor in load_file(file).items()}
        renamed = {
            f"model.{name}" if name.startswith(("vision", "multi")) else f"model.language_model.{name}": tensor
            for name, tensor in stored.items()
        }
        save_file(renamed, file)
    tokens, notes = token_rows(config, 2, 24), Notes()
    with torch.no_grad():
        expected = theirs(tokens).logits
    with open_weights(tmp_path / "published", reporter=notes) as weights:
        assert weights.config == config
        *_, logits = layer_states(weights, tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits.values, expected, rtol=0, atol=1e-5)
    (note,) = notes.said
    assert "tensors of the part that sees pictures are left out: " in note
    assert "vision_tower." in note
    assert "multi_modal_projector." in note
    result = convert_weights(str(tmp_path / "published"), str(tmp_path / "text"), TargetFormat("hf"))
    assert result.verdict.passed
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == "gemma3_text"
    with torch.no_grad():
        torch.testing.assert_close(hf_model(tmp_path / "text")(tokens).logits, expected, rtol=0, atol=1e-5)


def test_a_config_without_its_text_part_is_refused() -> None:
    body = with_pictures({}) | {"text_config": None}
    with pytest.raises(InputError, match="`text_config` is missing"):
        read_hf_config(body, "config.json")
