"""The arguments in Megatron's checkpoints, as an architecture and back.

`--use-checkpoint-args` takes a part of them; the rest must be on the command line, and is here so that nothing about
a model is lost. An architecture for which Megatron has no argument is refused, and so is an argument that our
decoder does not implement.
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
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import SourceMap, YamlDocument

if TYPE_CHECKING:
    import torch


FAMILY_ARG = "trainshed_family"
"""The one argument that is ours: Megatron has no word for a family."""
_MISSING = object()


@dataclass(frozen=True)
class MegatronLayout:
    """How the files of a checkpoint are cut; `torch_dist` is cut in no way."""

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
    """Return the arguments of a checkpoint, or say what Megatron cannot be told."""
    written: dict[str, Any] = {
        FAMILY_ARG: config.family,
        **architecture_args(config),
        # As versions before 0.16 call what is above, and what they have besides.
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
        written["moe_grouped_gemm"] = experts == "grouped"
    return Namespace(**written)


def architecture_args(config: ModelConfig) -> dict[str, Any]:
    """Return what tells Megatron an architecture, by the names of its arguments in version 0.16 and later.

    The one home of this mapping: checkpoints carry it, `engines/megatron` writes it on the command line, and
    `read_args` is its inverse. Raises `InputError` for what Megatron cannot be told.
    """
    refuse_unsupported_config(config)
    rope, scaling, moe = config.rope, config.rope.scaling if config.rope else None, config.moe
    llama3 = scaling is not None and scaling.kind == "llama3"
    written: dict[str, Any] = {
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
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": int(scaling.factor) if scaling and not llama3 else None,
        "use_rope_scaling": llama3,
        "rope_scaling_factor": scaling.factor if scaling and llama3 else 8.0,
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
        written |= {
            "moe_ffn_hidden_size": moe.ffn,
            "moe_layer_freq": 1,
            "moe_router_topk": moe.top_k,
            # The weights of the chosen sum to 1 if the softmax comes after the choice.
            "moe_router_pre_softmax": not moe.normalize_top_k,
            "moe_router_score_function": "softmax",
            "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
        }
    return written


def has_zero_centered_norms(args: Namespace | None) -> bool:
    """Tell whether a checkpoint's norms are stored as gamma - 1, under either name that versions have for it."""
    return any(bool(getattr(args, name, False)) for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"))


def read_layout(args: Namespace) -> MegatronLayout:
    """Return how a checkpoint's ranks shared it out."""
    tp = _positive(args, "tensor_model_parallel_size")
    ep = _positive(args, "expert_model_parallel_size")
    return MegatronLayout(
        tp=tp,
        pp=_positive(args, "pipeline_model_parallel_size"),
        vp=_positive(args, "virtual_pipeline_model_parallel_size"),
        ep=ep,
        etp=getattr(args, "expert_tensor_parallel_size", None) or tp,
    )


def read_args(args: Namespace, where: str, vocab_size: int | None = None) -> ModelConfig:
    """Return the architecture that a checkpoint's arguments describe; `vocab_size` is the true one, where given."""
    taken = _ArgsReader(args, where)
    refuse_unsupported_args(args, where)
    found: dict[str, Any] = {
        "layers": taken("num_layers"),
        "hidden": taken("hidden_size"),
        "heads": taken("num_attention_heads"),
        "head_dim": taken("kv_channels", None) or taken("hidden_size") // taken("num_attention_heads"),
        "max_positions": taken("max_position_embeddings"),
        "norm": {"RMSNorm": "rms", "LayerNorm": "layer"}.get(taken("normalization", "LayerNorm")),
        # Called `layernorm_epsilon` since 0.16.
        "norm_eps": taken("layernorm_epsilon", None) or taken("norm_epsilon"),
        "gated": bool(taken("swiglu", False)),
        "tied_embeddings": not taken("untie_embeddings_and_output_weights", False),
        "qk_norm": bool(taken("qk_layernorm", False)),
        "init_std": taken("init_method_std", 0.02),
        "vocab_size": vocab_size or _true_vocab_size(taken),
    }
    found["kv_heads"] = taken("num_query_groups") if taken("group_query_attention", False) else found["heads"]
    biases = bool(taken("add_bias_linear", True)) and not taken("disable_bias_linear", False)
    found |= {"output_bias": biases, "mlp_bias": biases, "qkv_bias": biases or bool(taken("add_qkv_bias", False))}
    if found["gated"]:
        found["activation"] = "silu"
    else:
        # Fused with its bias, Megatron's gelu is the tanh approximation; by itself it is the exact one.
        found["activation"] = "gelu_tanh" if biases and taken("bias_gelu_fusion", True) else "gelu"
    window = taken("window_size", None)
    if window is not None:
        if window[1] != 0:
            raise taken.error(f"`window_size: {tuple(window)}` looks ahead", "only causal attention is read")
        found["sliding_window"] = window[0] + 1
    positions = taken("position_embedding_type", "learned_absolute")
    if positions not in ("rope", "learned_absolute"):
        raise taken.error(f"`position_embedding_type: {positions}` is not known", "known: rope, learned_absolute")
    found["positions"] = "rope" if positions == "rope" else "learned"
    if positions == "rope":
        found["rope"] = {"base": float(taken("rotary_base", 10000)), "scaling": _rope_scaling(taken)}
    experts = taken("num_experts", None)
    if experts:
        found["moe"] = _moe(taken, experts)
    else:
        found["ffn"] = taken("ffn_hidden_size")
    found["family"] = _family(found, taken)
    return validate(ModelConfig, YamlDocument(found, SourceMap(where, keys={})))


class _ArgsReader:
    """Arguments by name, with an error that says where they are missing."""

    def __init__(self, args: Namespace, where: str) -> None:
        self._args, self._where = args, where

    def __call__(self, name: str, default: Any = _MISSING) -> Any:
        value = getattr(self._args, name, default)
        if value is _MISSING or (value is None and default is _MISSING):
            raise self.error(f"its args have no `{name}`", "only checkpoints that Megatron-LM wrote say what they are")
        return value

    def error(self, what: str, hint: str) -> InputError:
        return InputError(what, where=self._where, hint=hint)


def _true_vocab_size(taken: _ArgsReader) -> int:
    """Megatron notes the padded size always, the true one only where it was on the command line."""
    found = taken("vocab_size", None)
    if found is None:
        padded = taken("padded_vocab_size", None)
        raise taken.error(
            f"its args do not say how many of the {padded} rows of the embedding are tokens",
            "say the tokenizer's true size: vocab_size",
        )
    # NullTokenizer counted its end-of-document token besides, until 0.18 gave that an argument of its own.
    besides = taken("tokenizer_type", None) == "NullTokenizer" and taken("null_tokenizer_eod_id", "none") == "none"
    return found + 1 if besides else found


def _rope_scaling(taken: _ArgsReader) -> dict[str, Any] | None:
    factor = taken("rotary_seq_len_interpolation_factor", None)
    if taken("use_rope_scaling", False):
        if factor is not None:
            raise taken.error("its positions are scaled twice", "only one kind of scaling is read")
        return {"kind": "llama3", "factor": float(taken("rope_scaling_factor", 8.0)), **LLAMA3_ROPE_SCALING}
    return None if factor is None else {"kind": "linear", "factor": float(factor)}


def _moe(taken: _ArgsReader, experts: int) -> dict[str, Any]:
    frequency = taken("moe_layer_freq", 1)
    if frequency != 1 and not (isinstance(frequency, list) and all(each == 1 for each in frequency)):
        raise taken.error(f"`moe_layer_freq: {frequency}` gives some layers no experts", "all layers must have them")
    return {
        "experts": experts,
        "top_k": taken("moe_router_topk"),
        "ffn": taken("moe_ffn_hidden_size", None) or taken("ffn_hidden_size"),
        "shared_ffn": taken("moe_shared_expert_intermediate_size", None) or 0,
        "normalize_top_k": not taken("moe_router_pre_softmax", False),
    }


def _family(found: Mapping[str, Any], taken: _ArgsReader) -> str:
    said = taken(FAMILY_ARG, None)
    if said is not None:
        return said
    fits = [
        family
        for family, fixed in FIXED_BY_FAMILY.items()
        if all(found[key] == value for key, value in fixed.items()) and ("moe" in found) == _has_experts(family)
    ]
    if not fits:
        shown = ", ".join(f"{key}: {str(found[key]).lower()}" for key in FIXED_BY_FAMILY["llama"])
        raise taken.error(f"no family here is put together like this: {shown}", f"known: {', '.join(FIXED_BY_FAMILY)}")
    # Llama and Mistral differ in one thing: transformers gives only Mistral a window.
    return "mistral" if "mistral" in fits and found.get("sliding_window") else fits[0]


def _has_experts(family: str) -> bool:
    return family in ("mixtral", "qwen3_moe")


def _positive(args: Namespace, name: str) -> int:
    return getattr(args, name, None) or 1


# `--use-rope-scaling` knows the factor; the rest stands in rotary_pos_embedding.py, RotaryEmbedding._apply_scaling.
LLAMA3_ROPE_SCALING: dict[str, Any] = {
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
    "original_positions": 8192,
}
# Arguments that change what is computed, with the only values that the decoder here has something for. One that a
# version does not have is as if left out.
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
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


def refuse_unsupported_config(config: ModelConfig) -> None:
    """Raise where Megatron has no argument for something of an architecture."""
    scaling = config.rope.scaling if config.rope else None
    said = "`{}` has no argument of Megatron's"
    if config.gated and config.activation != "silu":
        raise _no_argument_for(
            said.format(f"activation: {config.activation}, gated: true"), "only SwiGLU is gated there"
        )
    if not config.gated and config.activation not in ("gelu", "gelu_tanh"):
        raise _no_argument_for(said.format(f"activation: {config.activation}"), "there is gelu and squared relu")
    if config.output_bias != config.mlp_bias or (config.output_bias and not config.qkv_bias):
        raise _no_argument_for("biases on some linear layers and not on others", "all have one, or only qkv, or none")
    if config.activation == "gelu_tanh" and not config.mlp_bias:
        raise _no_argument_for(said.format("activation: gelu_tanh"), "without biases its gelu is the exact one")
    if config.rope and not config.rope.base.is_integer():
        raise _no_argument_for(said.format(f"rope.base: {config.rope.base}"), "--rotary-base is a whole number")
    if scaling is not None and scaling.kind == "linear" and not scaling.factor.is_integer():
        raise _no_argument_for(
            said.format(f"rope.scaling.factor: {scaling.factor}"),
            "--rotary-seq-len-interpolation-factor is a whole number",
        )
    if scaling is not None and scaling.kind == "llama3":
        for key, fixed in LLAMA3_ROPE_SCALING.items():
            if getattr(scaling, key) != fixed:
                raise _no_argument_for(
                    said.format(f"rope.scaling.{key}: {getattr(scaling, key)}"), f"it is {fixed} there"
                )
    if config.moe is not None and config.moe.top_k == 1 and config.moe.normalize_top_k:
        raise _no_argument_for(
            said.format("moe.top_k: 1, normalize_top_k: true"), "its router refuses one expert of weight 1"
        )


def _no_argument_for(what: str, hint: str) -> InputError:
    return InputError(f"Megatron cannot be told: {what}", hint=f"{hint}; keep the model native, or as hf")


def refuse_unsupported_args(args: Namespace, where: str) -> None:
    """Raise where arguments ask for something that the decoder here does not have."""
    refused = [
        f"`{name}: {getattr(args, name)}`"
        for name, allowed in _SUPPORTED_VALUES.items()
        if getattr(args, name, allowed[0]) not in allowed
    ]
    if refused:
        raise InputError(
            f"the decoder here has nothing for {', '.join(refused)}", where=where, hint="no argument is ignored"
        )
