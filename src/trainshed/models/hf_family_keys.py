"""Keys of `config.json` that one family alone writes, that say how its weights are stored, or that change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainshed.errors import InputError
from trainshed.recipe import ModelConfig

MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
"""DeepSeek-V3's layers that predict more than the next token; the first is the published name."""
HARMLESS_KEYS = frozenset({
    "model_type", "architectures", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash",
    "torch_dtype", "dtype",
    "use_cache", "return_dict", "output_hidden_states", "output_attentions", "is_decoder", "tokenizer_class",
    "gradient_checkpointing",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "chunk_size_feed_forward",
    "use_bfloat16",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout",
    "output_router_logits", "router_aux_loss_coef", "pretraining_tp", "reorder_and_upcast_attn", "n_ctx",
    "max_window_layers",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "id2label", "label2id", "num_labels", "problem_type", "unsloth_version", "unsloth_fixed",
    "transformers.js_config",
    "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups", "num_return_sequences",
    "repetition_penalty",
    "length_penalty", "encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "diversity_penalty", "max_length",
    "min_length", "do_sample",
})  # fmt: skip
"""What is stored beside an architecture and changes no logit: names, token ids, generation, heads for other tasks, and
settings of a training, which are the recipe's (dropout, the router's losses)."""
WITH_PICTURES: Mapping[str, Mapping[str, Any]] = {
    "llama4": {},
    # transformers leaves out of the part what its configuration class takes anyway (4.50 to 5.22).
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    },
}
"""Kinds of models with a part that sees pictures, of which the part that reads text is a family here.

The values are those of keys that this part may leave out, sizes among them."""


def text_part(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the part of a config that describes what reads text, of a model that sees pictures too."""
    kind = config.get("model_type")
    if kind not in WITH_PICTURES:
        return config
    text = config.get("text_config")
    if not isinstance(text, Mapping) or "quantization_config" in config:
        what = "`text_config` is missing" if not isinstance(text, Mapping) else "the weights are quantised"
        raise InputError(what, where=where, hint="read are bf16, fp16 and fp32, with the config of the text model")
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config and key not in text}
    return {"architectures": None, **WITH_PICTURES[kind], **text, **tied}


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
    """Return `quantization_config` where it says E4M3 as it is read: a scale for each row, or for each block.

    compressed-tensors stores the first, DeepSeek-V3 and Qwen3's FP8 models are published as the second.
    """
    written = config.get("quantization_config")
    if not isinstance(written, Mapping):
        return frozenset()
    if written.get("quant_method") == "fp8":
        return frozenset({"quantization_config"} if float8_block(config) is not None else ())
    groups = written.get("config_groups")
    if not isinstance(groups, Mapping) or written.get("quant_method") != "compressed-tensors":
        return frozenset()
    schemes = [group.get("weights") or {} for group in groups.values() if isinstance(group, Mapping)]
    by_row = [(scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy")) for scheme in schemes]
    is_read = written.get("format") == "float-quantized" and set(by_row) == {("float", 8, "channel")}
    return frozenset({"quantization_config"} if is_read else ())


def float8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of the blocks of E4M3 that have a scale each; None where there are none."""
    written = config.get("quantization_config")
    if not isinstance(written, Mapping) or written.get("quant_method") != "fp8":
        return None
    size = written.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or any(type(part) is not int or part < 1 for part in size):
        return None
    return (size[0], size[1]) if written.get("fmt", "e4m3") == "e4m3" else None
