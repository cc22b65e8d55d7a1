"""Keys of `config.json` that one family alone writes, or that say how its weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainshed.errors import InputError
from trainshed.recipe import ModelConfig

MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
"""DeepSeek-V3's layers that predict more than the next token; the first is the published name."""


def deepseek_keys(config: ModelConfig, latent: Mapping[str, str]) -> dict[str, Any]:
    """Return what only DeepSeek-V3's config has: latent attention, shared experts, the kind of routing.

    `latent` maps our keys of `mla` to theirs.
    """
    moe, mla = config.moe, config.mla
    assert moe is not None, "the family has experts"
    assert mla is not None, "the family has latent attention"
    written = {hf_key: getattr(mla, native_key) for native_key, hf_key in latent.items()}
    written |= {"num_key_value_heads": config.heads, "attention_bias": False, MTP_KEYS[0]: config.mtp_layers}
    # Read by no layer where all have experts; transformers takes no null.
    written["intermediate_size"] = config.ffn or moe.ffn
    written["n_shared_experts"], rest = divmod(moe.shared_ffn, moe.ffn)
    if rest or not moe.shared_ffn:
        raise InputError(
            f"Hugging Face's {config.family} cannot be told `moe.shared_ffn: {moe.shared_ffn}`",
            hint=f"write a multiple of the {moe.ffn} of one expert, or keep it native",
        )
    return written | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def llama4_keys(config: ModelConfig) -> dict[str, Any]:
    """Return what only Llama 4's config has: dense layers between those with experts, what NoPE layers do."""
    assert config.moe is not None, "the family has experts"
    temperature, every = config.attention_temperature, config.moe.every
    written: dict[str, Any] = {
        # Read by no layer where all have experts; transformers takes no null.
        "intermediate_size_mlp": config.ffn or 2 * config.moe.ffn,
        "moe_layers": list(range(every - 1, config.layers, every)),
        "attn_temperature_tuning": temperature is not None,
        "attention_bias": False,
    }
    if temperature is not None:
        written |= {"attn_scale": temperature.scale, "floor_scale": temperature.tokens}
    return written


def float8_keys(config: Mapping[str, Any]) -> frozenset[str]:
    """Return `quantization_config` where it says E4M3 with a scale for each row, as compressed-tensors stores it."""
    written = config.get("quantization_config")
    if not isinstance(written, Mapping):
        return frozenset()
    groups = written.get("config_groups")
    if not isinstance(groups, Mapping) or written.get("quant_method") != "compressed-tensors":
        return frozenset()
    schemes = [group.get("weights") or {} for group in groups.values() if isinstance(group, Mapping)]
    by_row = [(scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy")) for scheme in schemes]
    is_read = written.get("format") == "float-quantized" and set(by_row) == {("float", 8, "channel")}
    return frozenset({"quantization_config"} if is_read else ())
