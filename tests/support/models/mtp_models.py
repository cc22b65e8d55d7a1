"""Tiny models with a layer for multi-token prediction, which transformers itself does not compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from support.models.tiny_models import save_tiny_hf, tiny_config
from trainshed.recipe import ModelConfig


def save_with_mtp(
    folder: Path, variant: str = "deepseek_v3", dense_first: int = 1
) -> tuple[ModelConfig, Any, dict[str, torch.Tensor]]:
    """Save a tiny DeepSeek-V3 whose last layer is one for multi-token prediction, with the published names.

    Returns its architecture, transformers' model with all layers, and the tensors that only such a layer has.
    """
    import transformers

    experts = tiny_config(variant).moe
    assert experts is not None
    moe = experts.model_dump() | {"dense_first": dense_first}
    config = save_tiny_hf(variant, folder, seed=3, moe=moe, ffn=48 if dense_first else None)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    last, hidden = config.layers - 1, config.hidden
    torch.manual_seed(5)
    extra = {
        "enorm.weight": 1 + 0.1 * torch.randn(hidden, dtype=torch.float64),
        "hnorm.weight": 1 + 0.1 * torch.randn(hidden, dtype=torch.float64),
        "shared_head.norm.weight": 1 + 0.1 * torch.randn(hidden, dtype=torch.float64),
        "eh_proj.weight": 0.1 * torch.randn(hidden, 2 * hidden, dtype=torch.float64),
    }
    stored = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    stored |= {f"model.layers.{last}.{name}": tensor for name, tensor in extra.items()}
    # Published checkpoints have the shared tables a second time.
    stored[f"model.layers.{last}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    stored[f"model.layers.{last}.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    body = json.loads((folder / "config.json").read_text())
    body |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(body))
    return config.model_copy(update={"layers": last, "mtp_layers": 1}), model, extra


def both_logits(model: Any, extra: dict[str, torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the next token and of the one after it, by transformers' layers and plain formulas.

    `rows` have a token more than logits. Each call takes the last layer off the model.
    """

    def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, model.config.rms_norm_eps)

    inner, tokens = model.model, rows[:, :-1]
    further_layer = inner.layers[-1]
    inner.layers = inner.layers[:-1]
    hidden = inner(tokens).last_hidden_state
    following = F.pad(tokens[:, 1:], (0, 1))
    following[:, -1] = rows[:, -1]
    embedded = inner.embed_tokens(following)
    joined = torch.cat([normalized(embedded, extra["enorm.weight"]), normalized(hidden, extra["hnorm.weight"])], -1)
    positions = torch.arange(tokens.shape[1])[None]
    out = further_layer(
        joined @ extra["eh_proj.weight"].t(),
        attention_mask=None,
        position_ids=positions,
        position_embeddings=inner.rotary_emb(joined, positions),
    )
    out = out[0] if isinstance(out, tuple) else out
    further = model.lm_head(normalized(out, extra["shared_head.norm.weight"]))
    return model.lm_head(hidden), further
