"""Where the two sides have no word for each other: what Megatron cannot be told, and what the decoder here has not."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from trainshed.errors import InputError
from trainshed.recipe import ModelConfig

# `--use-rope-scaling` knows the factor; the rest stands in rotary_pos_embedding.py, RotaryEmbedding._apply_scaling.
LLAMA3: dict[str, Any] = {"low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_positions": 8192}
# Arguments that change what is computed, with the only values that the decoder here has something for. One that a
# version does not have is as if left out.
_ONLY: dict[str, tuple[Any, ...]] = {
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "no_rope_freq": (None,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "multi_latent_attention": (False,),
    "qk_l2_norm": (False,),
    "softmax_type": ("vanilla",),
    "softmax_scale": (None,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "window_attn_skip_freq": (None,),
    "apply_residual_connection_post_layernorm": (False,),
    "mtp_num_layers": (None, 0),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "moe_router_score_function": ("softmax",),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_group_topk": (None,),
    "moe_shared_expert_gate": (False,),
    "moe_latent_size": (None,),
    "moe_expert_capacity_factor": (None,),
    "moe_apply_probs_on_input": (False,),
}


def refuse_unsayable(config: ModelConfig) -> None:
    """Raise where Megatron has no argument for something of an architecture."""
    scaling = config.rope.scaling if config.rope else None
    said = "`{}` has no argument of Megatron's"
    if config.gated and config.activation != "silu":
        raise _unsayable(said.format(f"activation: {config.activation}, gated: true"), "only SwiGLU is gated there")
    if not config.gated and config.activation not in ("gelu", "gelu_tanh"):
        raise _unsayable(said.format(f"activation: {config.activation}"), "there is gelu and squared relu")
    if config.output_bias != config.mlp_bias or (config.output_bias and not config.qkv_bias):
        raise _unsayable("biases on some linear layers and not on others", "all have one, or only qkv, or none")
    if config.activation == "gelu_tanh" and not config.mlp_bias:
        raise _unsayable(said.format("activation: gelu_tanh"), "without biases its gelu is the exact one")
    if config.rope and not config.rope.base.is_integer():
        raise _unsayable(said.format(f"rope.base: {config.rope.base}"), "--rotary-base is a whole number")
    if scaling is not None and scaling.kind == "linear" and not scaling.factor.is_integer():
        raise _unsayable(
            said.format(f"rope.scaling.factor: {scaling.factor}"),
            "--rotary-seq-len-interpolation-factor is a whole number",
        )
    if scaling is not None and scaling.kind == "llama3":
        for key, fixed in LLAMA3.items():
            if getattr(scaling, key) != fixed:
                raise _unsayable(said.format(f"rope.scaling.{key}: {getattr(scaling, key)}"), f"it is {fixed} there")
    if config.moe is not None and config.moe.top_k == 1 and config.moe.normalize_top_k:
        raise _unsayable(
            said.format("moe.top_k: 1, normalize_top_k: true"), "its router refuses one expert of weight 1"
        )


def _unsayable(what: str, hint: str) -> InputError:
    return InputError(f"Megatron cannot be told: {what}", hint=f"{hint}; keep the model native, or as hf")


def refuse_unknown(args: Namespace, where: str) -> None:
    """Raise where arguments ask for something that the decoder here does not have."""
    refused = [
        f"`{name}: {getattr(args, name)}`"
        for name, allowed in _ONLY.items()
        if getattr(args, name, allowed[0]) not in allowed
    ]
    if refused:
        raise InputError(
            f"the decoder here has nothing for {', '.join(refused)}", where=where, hint="no argument is ignored"
        )
