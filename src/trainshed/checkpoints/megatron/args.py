"""Translate the arguments in Megatron's checkpoints to an architecture and back.

Megatron's `--use-checkpoint-args` reads some of them; the others must be on its command line. All are stored, so that
nothing about a model is lost. An architecture for which Megatron has no argument is refused, and so is an argument
that our decoder does not implement.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainshed.errors import InputError
from trainshed.models.megatron_tensors import ExpertNaming, LayerSpec
from trainshed.recipe import ModelConfig
from trainshed.recipe.model import FIXED_BY_FAMILY
from trainshed.recipe.model_parts import Moe
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import SourceMap, YamlDocument

if TYPE_CHECKING:
    import torch


FAMILY_ARG = "trainshed_family"
"""The one argument that is ours: Megatron has no argument for a family."""
_MISSING = object()


@dataclass(frozen=True)
class MegatronLayout:
    """The layout that the files of a checkpoint are sharded for; `torch_dist` depends on none."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int = 1


def to_args(
    config: ModelConfig,
    *,
    layout: MegatronLayout,
    spec: LayerSpec,
    experts: ExpertNaming,
    dtype: torch.dtype,
    padded_vocab_size: int,
    vocab_divisible_by: int,
    checkpoint_format: str,
) -> Namespace:
    """Return the arguments of a checkpoint, or raise for what Megatron has no argument."""
    args: dict[str, Any] = {
        FAMILY_ARG: config.family,
        **architecture_args(config),
        # Names of versions before 0.16 for the above, and arguments that only they have.
        "norm_epsilon": config.norm_eps,
        "apply_layernorm_1p": False,
        "disable_bias_linear": not config.output_bias,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": config.rope is not None,
        "seq_length": config.max_positions,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "apply_query_key_layer_scaling": False,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "make_vocab_size_divisible_by": vocab_divisible_by,
        "tokenizer_type": None,
        "tokenizer_model": None,
        "params_dtype": dtype,
        "bf16": str(dtype) == "torch.bfloat16",
        "fp16": str(dtype) == "torch.float16",
        "transformer_impl": "transformer_engine" if spec == "te" else "local",
        "ckpt_format": checkpoint_format,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": config.layers // layout.pp // layout.vp if layout.vp > 1 else None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }
    if config.moe is not None:
        args["moe_grouped_gemm"] = experts == "grouped"
    return Namespace(**args)


def architecture_args(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments that describe an architecture to Megatron, by their names in version 0.16 and later.

    The one home of this mapping: checkpoints hold it, `engines/megatron` writes it on the command line, and
    `read_args` is its inverse. Raises `InputError` where Megatron has no argument.
    """
    refuse_unsupported_config(config)
    rope, scaling, moe = config.rope, config.rope.scaling if config.rope else None, config.moe
    llama3 = scaling is not None and scaling.kind == "llama3"
    args: dict[str, Any] = {
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.ffn if moe is None else moe.ffn,
        "num_attention_heads": config.heads,
        "group_query_attention": config.kv_heads != config.heads,
        "num_query_groups": config.kv_heads,
        "kv_channels": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "position_embedding_type": "rope" if rope else "learned_absolute",
        "rotary_base": int(rope.base) if rope else 10000,
        "rotary_percent": rope.fraction if rope else 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": int(scaling.factor) if scaling and not llama3 else None,
        "use_rope_scaling": llama3,
        "rope_scaling_factor": LLAMA3_ROPE_SCALING["factor"],
        "window_size": (config.sliding_window - 1, 0) if config.sliding_window else None,
        "normalization": "RMSNorm" if config.norm == "rms" else "LayerNorm",
        "layernorm_epsilon": config.norm_eps,
        "layernorm_zero_centered_gamma": False,
        "qk_layernorm": config.qk_norm,
        "add_bias_linear": config.output_bias,
        "add_qkv_bias": config.qkv_bias,
        "swiglu": config.gated,
        "squared_relu": False,
        "bias_gelu_fusion": config.activation == "gelu_tanh",
        "untie_embeddings_and_output_weights": not config.tied_embeddings,
        "init_method_std": config.init_std,
        "num_experts": moe.experts if moe else None,
    }
    if moe is not None:
        args |= {
            "moe_ffn_hidden_size": moe.ffn,
            "moe_layer_freq": 1,
            "moe_router_topk": moe.top_k,
            # The weights of the chosen sum to 1 if the softmax comes after the choice.
            "moe_router_pre_softmax": not moe.normalize_top_k,
            "moe_router_score_function": "softmax",
            "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
        }
    return args


def has_zero_centered_norms(args: Namespace | None) -> bool:
    """Return whether a checkpoint's norms are stored as gamma - 1; versions have two names for this argument."""
    return any(bool(getattr(args, name, False)) for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"))


def read_layout(args: Namespace) -> MegatronLayout:
    """Return the layout of the ranks that wrote a checkpoint."""
    tp = _positive(args, "tensor_model_parallel_size")
    ep = _positive(args, "expert_model_parallel_size")
    return MegatronLayout(
        tp=tp,
        pp=_positive(args, "pipeline_model_parallel_size"),
        vp=_positive(args, "virtual_pipeline_model_parallel_size"),
        ep=ep,
        etp=getattr(args, "expert_tensor_parallel_size", None) or tp,
    )


def read_args(namespace: Namespace, where: str, vocab_size: int | None = None) -> ModelConfig:
    """Return the architecture that a checkpoint's arguments describe; `vocab_size` replaces the one in them."""
    arg = _ArgsReader(namespace, where)
    refuse_unsupported_args(namespace, where)
    config: dict[str, Any] = {
        "layers": arg("num_layers"),
        "hidden": arg("hidden_size"),
        "heads": arg("num_attention_heads"),
        "head_dim": arg("kv_channels", None) or arg("hidden_size") // arg("num_attention_heads"),
        "max_positions": arg("max_position_embeddings"),
        "norm": {"RMSNorm": "rms", "LayerNorm": "layer"}.get(arg("normalization", "LayerNorm")),
        # Called `layernorm_epsilon` since 0.16.
        "norm_eps": arg("layernorm_epsilon", None) or arg("norm_epsilon"),
        "gated": bool(arg("swiglu", False)),
        "tied_embeddings": not arg("untie_embeddings_and_output_weights", False),
        "qk_norm": bool(arg("qk_layernorm", False)),
        "init_std": arg("init_method_std", 0.02),
        "vocab_size": vocab_size or _true_vocab_size(arg),
    }
    config["kv_heads"] = arg("num_query_groups") if arg("group_query_attention", False) else config["heads"]
    biases = bool(arg("add_bias_linear", True)) and not arg("disable_bias_linear", False)
    config |= {"output_bias": biases, "mlp_bias": biases, "qkv_bias": biases or bool(arg("add_qkv_bias", False))}
    if config["gated"]:
        config["activation"] = "silu"
    else:
        # Fused with its bias, Megatron's gelu is the tanh approximation; by itself it is the exact one.
        config["activation"] = "gelu_tanh" if biases and arg("bias_gelu_fusion", True) else "gelu"
    window = arg("window_size", None)
    if window is not None:
        if window[1] != 0:
            raise arg.error(f"`window_size: {tuple(window)}` looks ahead", "only causal attention is read")
        config["sliding_window"] = window[0] + 1
    positions = arg("position_embedding_type", "learned_absolute")
    if positions not in ("rope", "learned_absolute"):
        raise arg.error(f"`position_embedding_type: {positions}` is not known", "known: rope, learned_absolute")
    config["positions"] = "rope" if positions == "rope" else "learned"
    if positions == "rope":
        config["rope"] = {
            "base": float(arg("rotary_base", 10000)),
            "scaling": _rope_scaling(arg),
            "fraction": float(arg("rotary_percent", 1.0)),
        }
    experts = arg("num_experts", None)
    if experts:
        config["moe"] = _moe(arg, experts)
    else:
        config["ffn"] = arg("ffn_hidden_size")
    config["family"] = _family(config, arg)
    return validate(ModelConfig, YamlDocument(config, SourceMap(where, keys={})))


def computed_args(args: Namespace) -> Namespace:
    """Return the arguments of Megatron-LM's program as it computes with them: it takes some of rope and ignores them.

    Checkpoints that Trainshed wrote keep theirs, which belong to their weights.
    """
    if hasattr(args, FAMILY_ARG):
        return args
    computed = Namespace(**vars(args))
    computed.rope_scaling_factor = LLAMA3_ROPE_SCALING["factor"]
    if not hasattr(args, _SINCE_LINEAR_ROPE):
        computed.rotary_seq_len_interpolation_factor = None
    return computed


class _ArgsReader:
    """Arguments by name; a missing one is an error that names the checkpoint."""

    def __init__(self, args: Namespace, where: str) -> None:
        self._args, self._where = args, where

    def __call__(self, name: str, default: Any = _MISSING) -> Any:
        value = getattr(self._args, name, default)
        if value is _MISSING or (value is None and default is _MISSING):
            raise self.error(f"its args have no `{name}`", "only checkpoints that Megatron-LM wrote say what they are")
        return value

    def error(self, what: str, hint: str) -> InputError:
        return InputError(what, where=self._where, hint=hint)


def _true_vocab_size(arg: _ArgsReader) -> int:
    """Return the true size. Megatron always stores the padded one, the true one only if it was on the command line."""
    vocab_size = arg("vocab_size", None)
    if vocab_size is None:
        padded = arg("padded_vocab_size", None)
        raise arg.error(
            f"its args do not say how many of the {padded} rows of the embedding are tokens",
            "say the tokenizer's true size: vocab_size",
        )
    # NullTokenizer does not count its end-of-document token; since 0.18 that one has an argument of its own.
    has_extra = arg("tokenizer_type", None) == "NullTokenizer" and arg("null_tokenizer_eod_id", "none") == "none"
    return vocab_size + 1 if has_extra else vocab_size


def _rope_scaling(arg: _ArgsReader) -> dict[str, Any] | None:
    factor = arg("rotary_seq_len_interpolation_factor", None)
    if arg("use_rope_scaling", False):
        if factor is not None:
            raise arg.error("its positions are scaled twice", "only one kind of scaling is read")
        return {"kind": "llama3", **LLAMA3_ROPE_SCALING, "factor": float(arg("rope_scaling_factor", 8.0))}
    return None if factor is None else {"kind": "linear", "factor": float(factor)}


def _moe(arg: _ArgsReader, experts: int) -> dict[str, Any]:
    frequency = arg("moe_layer_freq", 1)
    if frequency != 1 and not (isinstance(frequency, list) and all(value == 1 for value in frequency)):
        raise arg.error(f"`moe_layer_freq: {frequency}` gives some layers no experts", "all layers must have them")
    return {
        "experts": experts,
        "top_k": arg("moe_router_topk"),
        "ffn": arg("moe_ffn_hidden_size", None) or arg("ffn_hidden_size"),
        "shared_ffn": arg("moe_shared_expert_intermediate_size", None) or 0,
        "normalize_top_k": not arg("moe_router_pre_softmax", False),
    }


def _family(config: Mapping[str, Any], arg: _ArgsReader) -> str:
    family = arg(FAMILY_ARG, None)
    if family is not None:
        return family
    plain = FIXED_BY_FAMILY["llama"]  # of keys that Megatron has no argument for
    fits = [
        family
        for family, fixed in FIXED_BY_FAMILY.items()
        if all(config.get(key, plain[key]) == value for key, value in fixed.items())
        and ("moe" in config) == _has_experts(family)
    ]
    if not fits:
        shown = ", ".join(f"{key}: {str(config[key]).lower()}" for key in plain if key in config)
        raise arg.error(f"no family here is put together like this: {shown}", f"known: {', '.join(FIXED_BY_FAMILY)}")
    # Llama, Phi-3 and Mistral differ in two things: only Phi-3 turns a part of each head, only Mistral has a window.
    if "phi3" in fits and config["rope"]["fraction"] != 1.0:
        return "phi3"
    return "mistral" if "mistral" in fits and config.get("sliding_window") else fits[0]


def _has_experts(family: str) -> bool:
    return family in ("mixtral", "qwen3_moe")


def _positive(args: Namespace, name: str) -> int:
    return getattr(args, name, None) or 1


# pretrain_gpt.py reads --rotary-seq-len-interpolation-factor from 0.19 on, which has this argument too, and older ones
# have not.
_SINCE_LINEAR_ROPE = "step_batch_size_schedule"
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
        f"rope.scaling.kind: {kind}": kind == "yarn",
    }
    return [name for name, missing in named.items() if missing]


def refuse_unsupported_config(config: ModelConfig) -> None:
    """Raise where Megatron has no argument for a part of an architecture."""
    scaling = config.rope.scaling if config.rope else None
    no_argument = "`{}` has no argument of Megatron's"
    if unwritten := unwritten_parts(config):
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


def unwritten_parts(config: ModelConfig) -> list[str]:
    """Return what an architecture has that nothing here writes in Megatron's words: keys of `model.config`."""
    parts = [] if config.mla is None else ["`mla`"]
    if config.rope is not None and config.rope.scaling is not None and config.rope.scaling.kind == "yarn":
        parts.append("`rope.scaling.kind: yarn`")
    if config.moe is not None:
        usual = Moe(experts=1, top_k=1, ffn=1)
        keys = ("scores", "score_bias", "groups", "scale", "dense_first", "router_bias", "every", "scale_inputs")
        changed = [key for key in keys if getattr(config.moe, key) != getattr(usual, key)]
        parts += [f"`moe.{key}: {str(getattr(config.moe, key)).lower()}`" for key in changed]
    return parts


def _no_argument_for(what: str, hint: str) -> InputError:
    return InputError(f"Megatron cannot be told: {what}", hint=f"{hint}; keep the model native, or as hf")


def refuse_unsupported_args(args: Namespace, where: str) -> None:
    """Raise where arguments ask for something that our decoder does not implement."""
    refused = [
        f"`{name}: {getattr(args, name)}`"
        for name, allowed in _SUPPORTED_VALUES.items()
        if getattr(args, name, allowed[0]) not in allowed
    ]
    if refused:
        raise InputError(
            f"the decoder here has nothing for {', '.join(refused)}", where=where, hint="no argument is ignored"
        )
