"""Llama 4 as it is published: the part that reads text is read, the part that sees pictures is left out by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models.one_process import token_rows
from support.models.tiny_models import hf_model, tiny_config, transformers_config
from support.runs.small_generators import Notes
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat, open_weights
from trainshed.checkpoints.prove.layerwise import layer_states
from trainshed.errors import InputError
from trainshed.models.families import read_hf_config
from trainshed.recipe import ModelConfig

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vision_output_dim": 16,
    "image_size": 8,
    "patch_size": 4,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}


def save_with_pictures(folder: Path) -> tuple[ModelConfig, Any]:
    """A tiny model as Meta saves it: with eyes."""
    import transformers as hf

    config = tiny_config("llama4_text")
    whole = hf.Llama4Config(text_config=transformers_config(config).to_dict(), vision_config=VISION)
    torch.manual_seed(3)
    model = hf.Llama4ForConditionalGeneration(whole)
    with torch.no_grad():
        for weight in model.language_model.parameters():
            weight.normal_(0.0 if weight.dim() > 1 else 1.0, config.hidden**-0.5)
    model.save_pretrained(folder)
    return config, model.language_model.eval()


def test_the_text_model_is_read_and_goes_out_alone(tmp_path: Path) -> None:
    config, theirs = save_with_pictures(tmp_path / "published")
    body = json.loads((tmp_path / "published" / "config.json").read_text())
    assert body["model_type"] == "llama4"
    assert read_hf_config(body, "config.json") == config
    tokens, notes = token_rows(config, 2, 24), Notes()
    with torch.no_grad():
        expected = theirs(tokens).logits
    with open_weights(tmp_path / "published", reporter=notes) as weights:
        *_, logits = layer_states(weights, tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits.values, expected, rtol=0, atol=1e-5)
    (note,) = notes.said
    assert "tensors of the part that sees pictures are left out: " in note
    assert "multi_modal_projector.linear_1.weight" in note
    result = convert_weights(str(tmp_path / "published"), str(tmp_path / "text"), TargetFormat("hf"))
    assert result.verdict.passed
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == "llama4_text"
    with torch.no_grad():
        torch.testing.assert_close(hf_model(tmp_path / "text")(tokens).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"text_config": None}, "`text_config` is missing"), ({"quantization_config": {}}, "the weights are quantised")],
)
def test_what_is_no_plain_text_model_is_refused(changes: dict[str, Any], what: str) -> None:
    text = transformers_config(tiny_config("llama4_text")).to_dict()
    body = {"model_type": "llama4", "text_config": text} | changes
    with pytest.raises(InputError, match=what):
        read_hf_config(body, "config.json")
