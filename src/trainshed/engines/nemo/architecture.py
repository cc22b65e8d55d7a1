"""A model's architecture in the words of NeMo 24.07, and back."""

from __future__ import annotations

from collections.abc import Iterator

from trainshed.engines.engine_arguments import Setting
from trainshed.recipe import ModelConfig
from trainshed.recipe.section import Problem

NORMALIZATION = {"rms": "rmsnorm", "layer": "layernorm"}
POSITIONS = {"rope": "rope", "learned": "learned_absolute"}
# (our activation, gated) to NeMo's name. Its tanh approximation is a flag of `gelu`.
ACTIVATIONS = {
    ("silu", True): "fast-swiglu",
    ("gelu", True): "fast-geglu",
    ("gelu", False): "gelu",
    ("gelu_tanh", False): "gelu",
}


def architecture_settings(config: ModelConfig) -> Iterator[Setting]:
    """Yield the keys that a model's sizes decide."""
    usual_head = config.hidden // config.heads
    for key, value in {
        "max_position_embeddings": config.max_positions,
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.moe.ffn if config.moe else config.ffn,
        "num_attention_heads": config.heads,
        "num_query_groups": config.kv_heads,
        "kv_channels": None if config.head_dim == usual_head else config.head_dim,
        "init_method_std": config.init_std,
        "normalization": NORMALIZATION[config.norm],
        "layernorm_epsilon": config.norm_eps,
        "bias": config.mlp_bias,
        "activation": ACTIVATIONS.get((config.activation, config.gated)),
        "openai_gelu": config.activation == "gelu_tanh",
        # megatron-core's fused kernel is the tanh approximation: neither of the two others may use it.
        "bias_activation_fusion": config.activation == "silu",
        "position_embedding_type": POSITIONS[config.positions],
        "apply_rope_fusion": config.positions == "rope",
        "share_embeddings_and_output_weights": config.tied_embeddings,
    }.items():
        yield Setting(f"model.{key}", value, "model")
    if config.qkv_bias and not config.mlp_bias:
        yield Setting("model.qkv_bias", True, "model")
    if config.rope is not None:
        scaling = config.rope.scaling
        yield Setting("model.rotary_base", config.rope.base, "model")
        yield Setting("model.seq_len_interpolation_factor", scaling.factor if scaling else None, "model")
    if config.moe is not None:
        yield Setting("model.num_moe_experts", config.moe.experts, "model")
        yield Setting("model.moe_router_topk", config.moe.top_k, "model")


def architecture_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield what NeMo 24.07 cannot build."""
    newer = 'write engine: {name: nemo, version: "26.06"}, which can'
    for absent, what in (
        (config.qk_norm, "normalised queries and keys (qk_norm)"),
        (
            config.rope is not None and config.rope.scaling is not None and config.rope.scaling.kind == "llama3",
            "Llama 3.1's stretched rotary frequencies",
        ),
        (config.sliding_window is not None, "a sliding window"),
        (config.moe is not None and config.moe.shared_ffn > 0, "a shared expert"),
        (config.moe is not None and not config.moe.normalize_top_k, "expert weights that do not sum to 1"),
    ):
        if absent:
            yield Problem(("model",), f"NeMo 24.07 has no {what}", newer)
    if (config.activation, config.gated) not in ACTIVATIONS:
        gate = "with" if config.gated else "without"
        yield Problem(("model",), f"NeMo 24.07 has no {config.activation} {gate} a gate", "write engine: megatron")
