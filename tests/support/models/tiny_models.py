"""Tiny models of every Hugging Face family: their architecture by hand, and random weights as transformers saves them.

Nothing here uses our own reading or writing of configs and weights: it is what those are held against.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainshed.recipe import ModelConfig

_SIZES: dict[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn": 48,
    "vocab_size": 96,
    "max_positions": 64,
}
_EXPERTS: dict[str, Any] = {key: value for key, value in _SIZES.items() if key != "ffn"}
_ATTENTION_BIASES = {"qkv_bias": True, "output_bias": True}
_ALL_BIASES = {**_ATTENTION_BIASES, "mlp_bias": True}
_LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
    "original_positions": 32,
}
_YARN = {"kind": "yarn", "factor": 8.0, "original_positions": 16}
_DEEPSEEK_YARN = {
    "kind": "yarn",
    "factor": 4.0,
    "original_positions": 16,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_LATENT: dict[str, Any] = {key: value for key, value in _SIZES.items() if key not in ("kv_heads", "head_dim")}
_LATENT["layers"] = 3
_DEEPSEEK_EXPERTS: dict[str, Any] = {
    "experts": 8,
    "top_k": 3,
    "ffn": 12,
    "shared_ffn": 24,
    "scores": "sigmoid",
    "score_bias": True,
    "scale": 2.5,
}
_LLAMA4_EXPERTS: dict[str, Any] = {
    "experts": 4,
    "top_k": 1,
    "ffn": 24,
    "shared_ffn": 24,
    "scores": "sigmoid",
    "normalize_top_k": False,
    "scale_inputs": True,
}
_TINY: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", **_SIZES, "rope": {"base": 10000.0}},
    # As Llama 3.1 and 3.2: stretched frequencies (some of each kind at these sizes), one embedding.
    "llama3": {"family": "llama", **_SIZES, "rope": {"base": 100.0, "scaling": _LLAMA3}, "tied_embeddings": True},
    "llama-linear": {"family": "llama", **_SIZES, "rope": {"base": 1e4, "scaling": {"kind": "linear", "factor": 4.0}}},
    "mistral": {"family": "mistral", **_SIZES, "rope": {"base": 10000.0}, "sliding_window": 8},
    "qwen2": {"family": "qwen2", **_SIZES, "rope": {"base": 1e6}, "tied_embeddings": True},
    # A head wider than hidden / heads, and three query heads to a key head.
    "qwen3": {"family": "qwen3", **_SIZES, "heads": 6, "hidden": 48, "head_dim": 16, "rope": {"base": 1e6}},
    "mixtral": {
        "family": "mixtral",
        **_EXPERTS,
        "rope": {"base": 1e6},
        "moe": {"experts": 4, "top_k": 2, "ffn": 24},
    },
    "qwen3_moe": {
        "family": "qwen3_moe",
        **_EXPERTS,
        "layers": 3,
        "head_dim": 16,
        "rope": {"base": 1e6},
        "moe": {"experts": 4, "top_k": 2, "ffn": 24, "normalize_top_k": False},
    },
    # As Granite's first code models: biases on all projections.
    "llama-biases": {"family": "llama", **_SIZES, "rope": {"base": 1e4}, **_ALL_BIASES},
    "qwen3-biases": {"family": "qwen3", **_SIZES, "head_dim": 12, "rope": {"base": 1e6}, **_ATTENTION_BIASES},
    "qwen3_moe-biases": {
        "family": "qwen3_moe",
        **_EXPERTS,
        "rope": {"base": 1e6},
        "moe": {"experts": 4, "top_k": 2, "ffn": 24},
        **_ATTENTION_BIASES,
    },
    "olmo2-biases": {"family": "olmo2", **_SIZES, "rope": {"base": 500000.0}, **_ATTENTION_BIASES},
    "gemma2-biases": {
        "family": "gemma2",
        **_SIZES,
        "rope": {"base": 1e4},
        "sliding_window": 8,
        "attention_pattern": ["window", "full"],
        "query_scalar": 12,
        "attention_soft_cap": 2.0,
        "logit_soft_cap": 3.0,
        **_ATTENTION_BIASES,
    },
    "nemotron-biases": {
        "family": "nemotron",
        **_SIZES,
        "rope": {"base": 10000.0, "fraction": 0.5},
        **_ALL_BIASES,
    },
    "llama-yarn": {"family": "llama", **_SIZES, "rope": {"base": 1e4, "scaling": _YARN}},
    # Some layers windowed and others not, as Qwen's `max_window_layers` has it.
    "qwen2-mixed": {
        "family": "qwen2",
        **_SIZES,
        "layers": 3,
        "rope": {"base": 1e6},
        "sliding_window": 8,
        "attention_pattern": ["full", "window", "window"],
    },
    "olmo2": {"family": "olmo2", **_SIZES, "rope": {"base": 500000.0}},
    "olmo3": {
        "family": "olmo3",
        **_SIZES,
        "layers": 5,
        "kv_heads": 4,
        "rope": {"base": 500000.0, "local_base": 500000.0, "scaling": _YARN | {"attention_factor": 1.2}},
        "sliding_window": 8,
        "attention_pattern": ["window", "window", "window", "full"],
    },
    "gemma2": {
        "family": "gemma2",
        **_SIZES,
        "layers": 3,
        "rope": {"base": 10000.0},
        "sliding_window": 8,
        "attention_pattern": ["window", "full"],
        "query_scalar": 12,
        # Low enough that a good part of the scores and logits is bent.
        "attention_soft_cap": 2.0,
        "logit_soft_cap": 3.0,
    },
    # Two rotary tables, one of them stretched; one key head; a head wider than hidden / heads.
    "gemma3_text": {
        "family": "gemma3_text",
        **_SIZES,
        "layers": 7,
        "kv_heads": 1,
        "head_dim": 12,
        "rope": {"base": 1e6, "local_base": 10000.0, "scaling": {"kind": "linear", "factor": 8.0}},
        "sliding_window": 8,
        "attention_pattern": ["window"] * 5 + ["full"],
    },
    "phi3": {"family": "phi3", **_SIZES, "rope": {"base": 250000.0}},
    # As Phi-4-mini: a part of each head is turned, one embedding; and Phi-3's window.
    "phi3-partial": {
        "family": "phi3",
        **_SIZES,
        "rope": {"base": 10000.0, "fraction": 0.75},
        "sliding_window": 8,
        "tied_embeddings": True,
    },
    # As Phi-4-mini: each pair of channels has a divisor, and another one in texts of more than 20 tokens.
    "phi3-longrope": {
        "family": "phi3",
        **_SIZES,
        "head_dim": 16,
        "hidden": 64,
        "rope": {
            "base": 10000.0,
            "fraction": 0.75,
            "scaling": {
                "kind": "longrope",
                "factor": 3.2,
                "original_positions": 20,
                "short_factors": [1.0, 1.02, 1.03, 1.1, 1.3, 1.4],
                "long_factors": [1.0, 1.3, 2.5, 4.0, 7.5, 9.0],
            },
        },
        "tied_embeddings": True,
    },
    "nemotron": {"family": "nemotron", **_SIZES, "head_dim": 12, "rope": {"base": 10000.0, "fraction": 0.5}},
    # As DeepSeek-V3: all widths differ, every key of routing counts, YaRN makes cosines and scores larger.
    "deepseek_v3": {
        "family": "deepseek_v3",
        **_LATENT,
        "rope": {"base": 100.0, "scaling": _DEEPSEEK_YARN},
        "mla": {"query_rank": 12, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5},
        "moe": _DEEPSEEK_EXPERTS | {"groups": 4, "top_groups": 2, "dense_first": 1},
    },
    # As Moonlight: queries without a low rank, one group, positions not stretched, and another epsilon.
    "deepseek-plain": {
        "family": "deepseek_v3",
        **_LATENT,
        "norm_eps": 1e-3,
        "rope": {"base": 50000.0},
        "mla": {"kv_rank": 16, "nope_dim": 8, "rope_dim": 6, "value_dim": 10, "rope_interleaved": False},
        "moe": _DEEPSEEK_EXPERTS | {"normalize_top_k": False, "scale": 1.5, "dense_first": 2},
    },
    # The same two as Megatron's arguments can say them: positions stretched from 4096 on, pairs that are neighbours,
    # weights of experts that sum to 1, groups chosen by top_k / top_groups = 2 experts.
    "deepseek-megatron": {
        "family": "deepseek_v3",
        **_LATENT,
        "max_positions": 16384,
        "rope": {
            "base": 10000.0,
            "scaling": {
                "kind": "yarn",
                "factor": 4.0,
                "original_positions": 4096,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
        "mla": {"query_rank": 12, "kv_rank": 10, "nope_dim": 6, "rope_dim": 8, "value_dim": 5},
        "moe": _DEEPSEEK_EXPERTS | {"experts": 12, "top_k": 4, "groups": 4, "top_groups": 2, "dense_first": 1},
    },
    "moonlight-megatron": {
        "family": "deepseek_v3",
        **_LATENT,
        "norm_eps": 1e-5,
        "rope": {"base": 50000.0},
        "mla": {"kv_rank": 16, "nope_dim": 8, "rope_dim": 6, "value_dim": 10},
        "moe": _DEEPSEEK_EXPERTS | {"scale": 2.446, "dense_first": 2},
    },
    # As gpt-oss: YaRN with bounds that are not rounded; a limit that bends a good part of gates and ups.
    "gpt_oss": {
        "family": "gpt_oss",
        **_EXPERTS,
        "layers": 3,
        "head_dim": 16,
        "rope": {"base": 150000.0, "scaling": _YARN | {"truncate": False, "beta_fast": 8.0}},
        "sliding_window": 8,
        "attention_pattern": ["window", "full"],
        "swiglu_limit": 1.0,
        "moe": {"experts": 4, "top_k": 2, "ffn": 24, "router_bias": True},
    },
    # No window, positions that are not stretched, three query heads to a key head, another gate.
    "gpt-oss-plain": {
        "family": "gpt_oss",
        **_EXPERTS,
        "heads": 6,
        "rope": {"base": 10000.0},
        "swiglu_alpha": 1.2,
        "tied_embeddings": True,
        "moe": {"experts": 5, "top_k": 3, "ffn": 20, "router_bias": True},
    },
    # As Maverick: experts in every second layer, no norm of queries; positions that are not stretched.
    "llama4_text": {
        "family": "llama4_text",
        **_SIZES,
        "layers": 5,
        "rope": {"base": 500000.0, "interleaved": True, "local_only": True},
        "attention_chunk": 7,
        "attention_pattern": ["chunk", "chunk", "chunk", "full"],
        # So short that most of a text is past several steps.
        "attention_temperature": {"scale": 0.3, "tokens": 4},
        "moe": _LLAMA4_EXPERTS | {"every": 2},
    },
    # As Scout: experts in all layers, normed queries and keys, Llama 3's stretch; two experts for a token.
    "llama4-scout": {
        "family": "llama4_text",
        **_EXPERTS,
        "layers": 3,
        "heads": 6,
        "head_dim": 12,
        "rope": {"base": 100.0, "interleaved": True, "local_only": True, "scaling": _LLAMA3},
        "attention_chunk": 8,
        "attention_pattern": ["chunk", "full"],
        "qk_l2_norm": True,
        "moe": _LLAMA4_EXPERTS | {"top_k": 2},
    },
    # Chunks in all layers.
    "llama4-chunks": {
        "family": "llama4_text",
        **_EXPERTS,
        "rope": {"base": 10000.0, "interleaved": True},
        "attention_chunk": 16,
        "qk_l2_norm": True,
        "tied_embeddings": True,
        "moe": _LLAMA4_EXPERTS,
    },
    "gpt2": {"family": "gpt2", **_SIZES, "kv_heads": 4, "ffn": 128},
    "gpt2-untied": {"family": "gpt2", **_SIZES, "kv_heads": 4, "ffn": 96, "tied_embeddings": False, "norm_eps": 1e-3},
}
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "gpt2",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "nemotron",
    "gpt_oss",
    "llama4_text",
)
"""One tiny model of each family."""
VARIANTS = tuple(_TINY)
"""All tiny models: the families, and what a family can be besides."""
LATENT = ("deepseek_v3", "deepseek-plain")
"""Tiny models with latent attention."""
MEGATRON_LATENT = ("deepseek-megatron", "moonlight-megatron")
"""Those that Megatron's arguments can say."""
_NOT_IN_MEGATRON = (
    "phi3-longrope",
    "llama-biases",
    "qwen3-biases",
    "qwen3_moe-biases",
    "olmo2-biases",
    "gemma2-biases",
    "nemotron-biases",
    "llama-yarn",
    "qwen2-mixed",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "nemotron",
    "gpt_oss",
    "gpt-oss-plain",
    "llama4_text",
    "llama4-scout",
    "llama4-chunks",
    *LATENT,
)
MEGATRON_VARIANTS = tuple(variant for variant in VARIANTS if variant not in _NOT_IN_MEGATRON)
"""Those that Megatron's arguments can say."""
MEGATRON_FAMILIES = (*(family for family in FAMILIES if family not in _NOT_IN_MEGATRON), MEGATRON_LATENT[0])


def tiny_config(family: str, **changes: Any) -> ModelConfig:
    """Return the architecture of a tiny model (one of VARIANTS), with some keys changed."""
    return ModelConfig.model_validate(_TINY[family] | changes)


def save_tiny_hf(
    family: str, folder: Path, seed: int = 0, *, shard_bytes: int | None = None, **changes: Any
) -> ModelConfig:
    """Save a tiny random model as transformers does and return its architecture."""
    config = tiny_config(family, **changes)
    model = random_hf_model(config, seed)
    model.save_pretrained(folder, max_shard_size=shard_bytes or "50GB")
    return config


def hf_model(folder: Path) -> Any:
    """Load a saved model with transformers, in fp32, for evaluation."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if hasattr(model, "set_experts_implementation"):  # transformers 5: its grouped products round otherwise
        model.set_experts_implementation("eager")
    return model


def random_hf_model(config: ModelConfig, seed: int) -> Any:
    """Make a transformers model in which no weight is 0 or 1: norms and biases are random too."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(transformers_config(config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                # Activations stay near 1, so that a difference in the maths is seen in the logits.
                weight.copy_(noise * config.hidden**-0.5)
            else:
                around_zero = name.endswith("bias") or config.zero_centered_norms
                weight.copy_(0.3 * noise + (0.0 if around_zero else 1.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                # As large as the differences between scores: some choices depend on it, others do not.
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def transformers_config(config: ModelConfig) -> Any:
    """Say an architecture in transformers' words."""
    import transformers as hf

    if config.family == "gpt2":
        return hf.GPT2Config(
            n_layer=config.layers,
            n_embd=config.hidden,
            n_head=config.heads,
            n_inner=config.ffn,
            vocab_size=config.vocab_size,
            n_positions=config.max_positions,
            layer_norm_epsilon=config.norm_eps,
            tie_word_embeddings=config.tied_embeddings,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    assert config.rope is not None
    keys: dict[str, Any] = {
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_parameters": _rope_parameters(config),
    }
    if config.ffn is not None:
        keys["intermediate_size"] = config.ffn
    if config.output_bias and config.family != "gpt_oss":
        keys["attention_bias"] = True
    if config.mlp_bias and config.family != "gpt_oss":
        keys["mlp_bias"] = True
    if config.family != "qwen2":
        keys["head_dim"] = config.head_dim
    match config.family:
        case "llama":
            return hf.LlamaConfig(**keys)
        case "mistral":
            return hf.MistralConfig(**keys, sliding_window=config.sliding_window)
        case "qwen2":
            if config.attention_pattern is None:
                return hf.Qwen2Config(**keys)
            return hf.Qwen2Config(
                **keys, use_sliding_window=True, sliding_window=config.sliding_window, max_window_layers=1
            )
        case "gemma2" | "gemma3_text":
            keys |= {
                "pad_token_id": None,  # transformers gives the row of a padding token no gradient
                "sliding_window": config.sliding_window,
                "query_pre_attn_scalar": config.query_scalar or config.head_dim,
                "final_logit_softcapping": config.logit_soft_cap,
            }
            if config.family == "gemma2":
                return hf.Gemma2Config(**keys, attn_logit_softcapping=config.attention_soft_cap)
            local = {"rope_type": "default", "rope_theta": config.rope.local_base or config.rope.base}
            keys["rope_parameters"] = {"full_attention": keys["rope_parameters"], "sliding_attention": local}
            return hf.Gemma3TextConfig(**keys)
        case "phi3":
            keys["rope_parameters"]["partial_rotary_factor"] = config.rope.fraction
            if config.rope.scaling is not None:
                keys["original_max_position_embeddings"] = config.rope.scaling.original_positions
            return hf.Phi3Config(**keys, sliding_window=config.sliding_window, pad_token_id=None)
        case "nemotron":
            keys["rope_parameters"]["partial_rotary_factor"] = config.rope.fraction
            keys["norm_eps"] = keys.pop("rms_norm_eps")
            return hf.NemotronConfig(**keys, initializer_range=config.init_std)
        case "olmo2":
            return hf.Olmo2Config(**keys, pad_token_id=None)
        case "olmo3":
            local = {"rope_type": "default", "rope_theta": config.rope.local_base or config.rope.base}
            keys["rope_parameters"] = {"full_attention": keys["rope_parameters"], "sliding_attention": local}
            return hf.Olmo3Config(**keys, sliding_window=config.sliding_window, pad_token_id=None)
        case "qwen3":
            return hf.Qwen3Config(**keys)
    moe = config.moe
    assert moe is not None
    keys["num_experts_per_tok"] = moe.top_k
    if config.family == "deepseek_v3":
        return _deepseek_config(config, keys)
    if config.family == "gpt_oss":
        kinds = ["full" if config.layer_window(layer) is None else "sliding" for layer in range(config.layers)]
        return hf.GptOssConfig(
            **keys,
            intermediate_size=moe.ffn,
            num_local_experts=moe.experts,
            sliding_window=config.sliding_window or 128,
            layer_types=[f"{kind}_attention" for kind in kinds],
            swiglu_alpha=config.swiglu_alpha,
            swiglu_limit=config.swiglu_limit,
        )
    if config.family == "llama4_text":
        temperature = config.attention_temperature
        return hf.Llama4TextConfig(
            **(keys | {"intermediate_size": moe.ffn}),
            intermediate_size_mlp=config.ffn or 16384,
            num_local_experts=moe.experts,
            interleave_moe_layer_step=moe.every,
            use_qk_norm=config.qk_l2_norm,
            no_rope_layers=[int(config.layer_chunk(layer) is not None) for layer in range(config.layers)],
            attention_chunk_size=config.attention_chunk,
            attn_temperature_tuning=temperature is not None,
            attn_scale=0.1 if temperature is None else temperature.scale,
            floor_scale=8192 if temperature is None else temperature.tokens,
            bos_token_id=None,
            eos_token_id=None,
        )
    if config.family == "mixtral":
        return hf.MixtralConfig(**keys, intermediate_size=moe.ffn, num_local_experts=moe.experts)
    return hf.Qwen3MoeConfig(
        **keys, moe_intermediate_size=moe.ffn, num_experts=moe.experts, norm_topk_prob=moe.normalize_top_k
    )


def _deepseek_config(config: ModelConfig, keys: dict[str, Any]) -> Any:
    import transformers as hf

    moe, mla = config.moe, config.mla
    assert moe is not None
    assert mla is not None
    del keys["head_dim"]
    return hf.DeepseekV3Config(
        **keys,
        moe_intermediate_size=moe.ffn,
        n_routed_experts=moe.experts,
        n_shared_experts=moe.shared_ffn // moe.ffn,
        routed_scaling_factor=moe.scale,
        n_group=moe.groups,
        topk_group=moe.top_groups,
        norm_topk_prob=moe.normalize_top_k,
        first_k_dense_replace=moe.dense_first,
        q_lora_rank=mla.query_rank,
        kv_lora_rank=mla.kv_rank,
        qk_nope_head_dim=mla.nope_dim,
        qk_rope_head_dim=mla.rope_dim,
        v_head_dim=mla.value_dim,
        rope_interleave=mla.rope_interleaved,
        num_mtp_layers=0,
    )


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    assert config.rope is not None
    found: dict[str, Any] = {"rope_theta": config.rope.base, "rope_type": "default"}
    scaling = config.rope.scaling
    if scaling is not None:
        found |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "yarn":
        found["original_max_position_embeddings"] = scaling.original_positions
        found |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    if scaling is not None and scaling.kind == "longrope":
        found["original_max_position_embeddings"] = scaling.original_positions
        assert scaling.short_factors is not None
        assert scaling.long_factors is not None
        found |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
        found |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    if scaling is not None and scaling.kind == "llama3":
        found["low_freq_factor"] = scaling.low_frequency_factor
        found["high_freq_factor"] = scaling.high_frequency_factor
        found["original_max_position_embeddings"] = scaling.original_positions
    if scaling is not None and scaling.kind == "yarn":
        found["original_max_position_embeddings"] = scaling.original_positions
        for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"):
            if getattr(scaling, key) is not None:
                found[key] = getattr(scaling, key)
    return found
