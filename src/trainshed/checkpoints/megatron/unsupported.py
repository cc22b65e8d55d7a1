"""What Megatron cannot be told of an architecture, and which of its arguments our decoder has nothing for.

Both are refused by name: no part of a model and no argument is ignored.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from trainshed.errors import InputError
from trainshed.recipe import ModelConfig
from trainshed.recipe.model import open_biases
from trainshed.recipe.model_parts import LATENT_NORM_EPS, YARN_USUAL, Mla, Moe, Rope, RopeScaling

# What `--use-rope-scaling` means: RotaryEmbedding._apply_scaling (rotary_pos_embedding.py) has only the factor as a
# variable, and pretrain_gpt.py of every version (0.12 to d98e8a64dd) does not hand `--rope-scaling-factor` to it.
LLAMA3_ROPE_SCALING: dict[str, Any] = {
    "factor": 8.0,
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
    "original_positions": 8192,
}
# Arguments that change what is computed, with the values that our decoder implements. An argument that a version of
# Megatron does not have counts as the first value.
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "rotary_interleaved": (False,),
    "no_rope_freq": (None,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "qk_l2_norm": (False,),
    "softmax_type": ("vanilla",),
    "softmax_scale": (None,),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "window_attn_skip_freq": (None,),
    "apply_residual_connection_post_layernorm": (False,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "moe_shared_expert_gate": (False,),
    "moe_latent_size": (None,),
    "moe_expert_capacity_factor": (None,),
    "moe_apply_probs_on_input": (False,),
}
# The same of models without latent attention, and of those with it: only one family here has such routers.
_WITHOUT_LATENTS: dict[str, tuple[Any, ...]] = {
    "mtp_num_layers": (None, 0),
    "moe_router_score_function": ("softmax",),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_group_topk": (None,),
}
_WITH_LATENTS: dict[str, tuple[Any, ...]] = {
    "qk_layernorm": (True,),
    "moe_router_score_function": ("sigmoid",),
    "rotary_percent": (1.0,),
    # Its rotary table is made without these.
    "use_rope_scaling": (False,),
    "rotary_seq_len_interpolation_factor": (None,),
    "mla_down_proj_fusion": (False,),
}
YARN_POSITIONS = 4096
"""The context before YaRN's stretch: Megatron has no argument for it, and none for the bounds of the ramp."""
LARGEST_LATENT_EPS = 1e-5
"""Megatron's norms of latents have the model's epsilon, and transformers' have 1e-6. Up to this one, which Moonlight
has, the difference is below what bf16 rounds away of latents whose mean square is 0.003 or more."""


def parts_without_argument(config: ModelConfig) -> list[str]:
    """Return the keys of an architecture, with their values, that no argument of Megatron's stands for."""
    rope = config.rope
    kind = rope.scaling.kind if rope is not None and rope.scaling is not None else None
    named = {
        f"norm_placement: {config.norm_placement}": config.norm_placement != "pre",
        "zero_centered_norms: true": config.zero_centered_norms,
        f"qk_norm_span: {config.qk_norm_span}": config.qk_norm_span != "head",
        "scaled_embeddings: true": config.scaled_embeddings,
        f"query_scalar: {config.query_scalar}": config.query_scalar is not None,
        f"attention_soft_cap: {config.attention_soft_cap}": config.attention_soft_cap is not None,
        f"logit_soft_cap: {config.logit_soft_cap}": config.logit_soft_cap is not None,
        "attention_sinks: true": config.attention_sinks,
        f"attention_chunk: {config.attention_chunk}": config.attention_chunk is not None,
        "attention_temperature": config.attention_temperature is not None,
        "qk_l2_norm: true": config.qk_l2_norm,
        "rope.local_only: true": rope is not None and rope.local_only,
        "rope.interleaved: true": rope is not None and rope.interleaved,
        "attention_pattern": config.attention_pattern is not None,
        "rope.local_base": rope is not None and rope.local_base is not None,
        f"rope.scaling.kind: {kind}": kind == "longrope" or (kind == "yarn" and config.mla is None),
    }
    return [name for name, missing in named.items() if missing]


def refuse_unsupported_config(config: ModelConfig) -> None:
    """Raise where Megatron has no argument for a part of an architecture."""
    scaling = config.rope.scaling if config.rope else None
    no_argument = "`{}` has no argument of Megatron's"
    if unwritten := [part for key, part in uncommon_parts(config).items() if config.mla is None or key in _NEVER]:
        raise _no_argument_for(", ".join(unwritten), "these parts of a model are not written for Megatron")
    if missing := parts_without_argument(config):
        raise _no_argument_for(
            no_argument.format("`, `".join(missing)), f"the family {config.family} is not one that it builds from them"
        )
    if config.gated and config.activation != "silu":
        raise _no_argument_for(
            no_argument.format(f"activation: {config.activation}, gated: true"), "only SwiGLU is gated there"
        )
    if not config.gated and config.activation not in ("gelu", "gelu_tanh"):
        raise _no_argument_for(no_argument.format(f"activation: {config.activation}"), "there is gelu and squared relu")
    if config.output_bias != config.mlp_bias or (config.output_bias and not config.qkv_bias):
        raise _no_argument_for("biases on some linear layers and not on others", "all have one, or only qkv, or none")
    if config.activation == "gelu_tanh" and not config.mlp_bias:
        raise _no_argument_for(no_argument.format("activation: gelu_tanh"), "without biases its gelu is the exact one")
    if config.rope and not config.rope.base.is_integer():
        raise _no_argument_for(no_argument.format(f"rope.base: {config.rope.base}"), "--rotary-base is a whole number")
    if scaling is not None and scaling.kind == "linear" and not scaling.factor.is_integer():
        raise _no_argument_for(
            no_argument.format(f"rope.scaling.factor: {scaling.factor}"),
            "--rotary-seq-len-interpolation-factor is a whole number",
        )
    if scaling is not None and scaling.kind == "llama3":
        for key, fixed in LLAMA3_ROPE_SCALING.items():
            if getattr(scaling, key) != fixed:
                raise _no_argument_for(
                    no_argument.format(f"rope.scaling.{key}: {getattr(scaling, key)}"), f"it is {fixed} there"
                )
    if config.moe is not None and config.moe.top_k == 1 and config.moe.normalize_top_k:
        raise _no_argument_for(
            no_argument.format("moe.top_k: 1, normalize_top_k: true"), "its router refuses one expert of weight 1"
        )
    if config.mla is not None and config.moe is not None:
        problems = dict((*_latent_problems(config, config.mla), *_routing_problems(config.moe)))
        if problems:
            raise _no_argument_for(no_argument.format("`, `".join(problems)), "; ".join(problems.values()))


# Parts that are not written for Megatron beside latent attention either.
_NEVER = ("moe.router_bias", "moe.every", "moe.scale_inputs")


def uncommon_parts(config: ModelConfig) -> dict[str, str]:
    """Return what an architecture has beside the parts of Llama and Mixtral: keys of `model.config`, with values."""
    parts = {} if config.mla is None else {"mla": "`mla`"}
    scaling = None if config.rope is None else config.rope.scaling
    if scaling is not None and scaling.kind in ("yarn", "longrope"):
        parts["rope.scaling.kind"] = f"`rope.scaling.kind: {scaling.kind}`"
    for key, usual_bias in open_biases(config.family).items():
        if getattr(config, key) != usual_bias:
            parts[key] = f"`{key}: {str(getattr(config, key)).lower()}`"
    if config.moe is not None:
        usual = Moe(experts=1, top_k=1, ffn=1)
        keys = ("scores", "score_bias", "groups", "scale", "dense_first", "router_bias", "every", "scale_inputs")
        changed = [key for key in keys if getattr(config.moe, key) != getattr(usual, key)]
        parts |= {f"moe.{key}": f"`moe.{key}: {str(getattr(config.moe, key)).lower()}`" for key in changed}
    return parts


def _latent_problems(config: ModelConfig, mla: Mla) -> Iterator[tuple[str, str]]:
    """Yield what Megatron's latent attention cannot be told, and what it does instead."""
    if not mla.rope_interleaved:
        yield "mla.rope_interleaved: false", "its latent attention turns pairs of neighbours"
    if not LATENT_NORM_EPS <= config.norm_eps <= LARGEST_LATENT_EPS:
        yield (
            f"norm_eps: {config.norm_eps:g}, with {LATENT_NORM_EPS:g} in the norms of latents",
            f"all norms have one epsilon there: from {LATENT_NORM_EPS:g} to {LARGEST_LATENT_EPS:g} it is taken",
        )
    if config.rope is not None:
        yield from _latent_rope_problems(config.rope)


def _latent_rope_problems(rope: Rope) -> Iterator[tuple[str, str]]:
    if rope.fraction != 1.0:
        yield f"rope.fraction: {rope.fraction:g}", "its latent attention turns all of `mla.rope_dim`"
    scaling = rope.scaling
    if scaling is None:
        return
    if scaling.kind != "yarn":
        yield f"rope.scaling.kind: {scaling.kind}", "its latent attention has yarn, or no scaling"
        return
    yield from _yarn_problems(scaling)


def _yarn_problems(scaling: RopeScaling) -> Iterator[tuple[str, str]]:
    if scaling.factor <= 1.0:
        yield f"rope.scaling.factor: {scaling.factor:g}", "that stretches nothing: leave `rope.scaling` out"
    for key, value in {"original_positions": YARN_POSITIONS, **YARN_USUAL}.items():
        written = getattr(scaling, key)
        if written not in (None, value):
            shown = [str(item).lower() if isinstance(item, bool) else f"{item:g}" for item in (written, value)]
            yield f"rope.scaling.{key}: {shown[0]}", f"it is {shown[1]} there"
    if scaling.attention_factor is not None:
        yield f"rope.scaling.attention_factor: {scaling.attention_factor:g}", "it follows from mscale there"
    if (scaling.mscale is None) != (scaling.mscale_all_dim is None):
        yield "rope.scaling: one of mscale and mscale_all_dim", "write both, or none"


def _routing_problems(moe: Moe) -> Iterator[tuple[str, str]]:
    """Yield what Megatron's router does otherwise."""
    if moe.scores != "sigmoid":
        yield f"mla, moe.scores: {moe.scores}", "beside latent attention scores are written as sigmoid only"
    if not moe.normalize_top_k and moe.top_k > 1:
        yield (
            "moe.scores: sigmoid, normalize_top_k: false",
            "its router makes the weights of a token's experts sum to 1",
        )
    best = moe.top_k // moe.top_groups
    if moe.groups > moe.top_groups and best != 2:
        yield (
            f"moe.top_k: {moe.top_k}, top_groups: {moe.top_groups}",
            f"it chooses groups by their {best} best experts, top_k / top_groups, and here two count",
        )


def latent_norm_note(config: ModelConfig) -> str | None:
    """Return what Megatron computes otherwise in the norms of latents, for a person to read; None where nothing."""
    if config.mla is None or config.norm_eps == LATENT_NORM_EPS:
        return None
    return (
        f"the norms of latents have the epsilon {config.norm_eps:g} in Megatron, as its other norms, and "
        f"{LATENT_NORM_EPS:g} elsewhere"
    )


def _no_argument_for(what: str, hint: str) -> InputError:
    return InputError(f"Megatron cannot be told: {what}", hint=f"{hint}; keep the model native, or as hf")


def refuse_unsupported_args(args: Namespace, where: str) -> None:
    """Raise where arguments ask for something that our decoder does not implement."""
    latent = bool(getattr(args, "multi_latent_attention", False))
    refused = [
        f"`{name}: {getattr(args, name)}`"
        for name, allowed in (_SUPPORTED_VALUES | (_WITH_LATENTS if latent else _WITHOUT_LATENTS)).items()
        if getattr(args, name, allowed[0]) not in allowed
    ]
    if refused:
        raise InputError(
            f"the decoder here has nothing for {', '.join(refused)}", where=where, hint="no argument is ignored"
        )
