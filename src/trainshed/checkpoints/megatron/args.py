"""Translate the arguments in Megatron's checkpoints to an architecture and back.

Megatron's `--use-checkpoint-args` reads some of them; the others must be on its command line. All are stored, so that
nothing about a model is lost. An architecture for which Megatron has no argument is refused, and so is an argument
that our decoder does not implement (`unsupported.py`).
"""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainshed.checkpoints.megatron.unsupported import (
    LLAMA3_ROPE_SCALING,
    YARN_POSITIONS,
    refuse_unsupported_args,
    refuse_unsupported_config,
)
from trainshed.errors import InputError
from trainshed.models.megatron_tensors import ExpertNaming, LayerSpec
from trainshed.recipe import ModelConfig
from trainshed.recipe.model import FIXED_BY_FAMILY, open_biases
from trainshed.recipe.model_parts import Mla, RopeScaling
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import SourceMap, YamlDocument

if TYPE_CHECKING:
    import torch


FAMILY_ARG = "trainshed_family"
"""The one argument that is ours: Megatron has no argument for a family."""
_MISSING = object()
_MAX_LAYERS = 10_000
"""More than any model has: a pattern that asks for more is not computed."""


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
    if config.mtp_layers:
        args["mtp_num_layers"] = config.mtp_layers
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
        "ffn_hidden_size": moe.ffn if moe is not None and not config.has_dense_layers else config.ffn,
        "num_attention_heads": config.heads,
        "group_query_attention": config.kv_heads != config.heads,
        "num_query_groups": config.kv_heads,
        "kv_channels": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "position_embedding_type": "rope" if rope else "learned_absolute",
        "rotary_base": int(rope.base) if rope else 10000,
        "rotary_percent": rope.fraction if rope else 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": int(scaling.factor) if scaling and scaling.kind == "linear" else None,
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
        "multi_latent_attention": config.mla is not None,
        "num_experts": moe.experts if moe else None,
    }
    if config.mla is not None:
        args |= _latent_args(config.mla, scaling)
    if moe is not None:
        args |= {
            "moe_ffn_hidden_size": moe.ffn,
            "moe_layer_freq": [int(config.has_experts(layer)) for layer in range(config.layers)]
            if config.has_dense_layers
            else 1,
            "moe_router_topk": moe.top_k,
            # The weights of the chosen sum to 1 if the softmax comes after the choice; sigmoids' always do.
            "moe_router_pre_softmax": moe.scores == "softmax" and not moe.normalize_top_k,
            "moe_router_score_function": moe.scores,
            "moe_router_enable_expert_bias": moe.score_bias,
            "moe_router_num_groups": moe.groups if moe.groups > 1 else None,
            "moe_router_group_topk": moe.top_groups if moe.groups > 1 else None,
            "moe_router_topk_scaling_factor": moe.scale if moe.scale != 1.0 else None,
            "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
        }
    return args


def _latent_args(mla: Mla, yarn: RopeScaling | None) -> dict[str, Any]:
    """Return the arguments of latent attention, and those that have another value beside it."""
    # Left out, transformers' mscale is 1 for cosines and sines, and scores do not grow.
    mscale, all_channels = (yarn.mscale, yarn.mscale_all_dim) if yarn and yarn.mscale else (1.0, 0.0)
    return {
        "q_lora_rank": mla.query_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.nope_dim,
        "qk_pos_emb_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "rope_type": "rope" if yarn is None else "yarn",
        "rotary_scaling_factor": 1.0 if yarn is None else yarn.factor,
        "mscale": mscale,
        "mscale_all_dim": all_channels,
        # What attention gives has this width for each head in the layers of `local`.
        "kv_channels": mla.value_dim,
        # The norms of latents.
        "qk_layernorm": True,
    }


def has_zero_centered_norms(args: Namespace | None) -> bool:
    """Whether a checkpoint's norms are stored as gamma - 1; versions have two names for this argument."""
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
        "max_positions": arg("max_position_embeddings"),
        "norm": {"RMSNorm": "rms", "LayerNorm": "layer"}.get(arg("normalization", "LayerNorm")),
        # Called `layernorm_epsilon` since 0.16.
        "norm_eps": arg("layernorm_epsilon", None) or arg("norm_epsilon"),
        "gated": bool(arg("swiglu", False)),
        "tied_embeddings": not arg("untie_embeddings_and_output_weights", False),
        "init_std": arg("init_method_std", 0.02),
        "vocab_size": vocab_size or _true_vocab_size(arg),
    }
    config["kv_heads"] = arg("num_query_groups") if arg("group_query_attention", False) else config["heads"]
    latent = bool(arg("multi_latent_attention", False))
    if latent:
        config["mla"] = _mla(arg)
        config["mtp_layers"] = arg("mtp_num_layers", None) or 0
    else:
        config["head_dim"] = arg("kv_channels", None) or config["hidden"] // config["heads"]
    config["qk_norm"] = bool(arg("qk_layernorm", False)) and not latent
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
            "scaling": _yarn_scaling(arg) if latent else _rope_scaling(arg),
            "fraction": float(arg("rotary_percent", 1.0)),
        }
    experts = arg("num_experts", None)
    if experts:
        config["moe"] = _moe(arg, experts) | (_routing(arg) if latent else {})
    if not experts or config["moe"].get("dense_first"):
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
        self.args, self._where = args, where

    def __call__(self, name: str, default: Any = _MISSING) -> Any:
        value = getattr(self.args, name, default)
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


def _mla(arg: _ArgsReader) -> dict[str, Any]:
    return {
        "query_rank": arg("q_lora_rank", None),
        "kv_rank": arg("kv_lora_rank"),
        "nope_dim": arg("qk_head_dim"),
        "rope_dim": arg("qk_pos_emb_head_dim"),
        "value_dim": arg("v_head_dim"),
    }


def _yarn_scaling(arg: _ArgsReader) -> dict[str, Any] | None:
    """Return how latent attention stretches positions: not by its factor of 1, which it has anyway."""
    factor = float(arg("rotary_scaling_factor", 1.0))
    # The default of megatron-core is yarn; before 0.14 it is all there is.
    kind = arg("rope_type", None) or "yarn"
    mscale, all_channels = float(arg("mscale", 1.0)), float(arg("mscale_all_dim", 0.0))
    if factor == 1.0:
        return None
    if kind != "yarn":
        if all_channels:
            raise arg.error(
                f"`rope_type: {kind}, rotary_scaling_factor: {factor:g}` stretches no position and makes scores grow",
                "only yarn is read with a factor",
            )
        return None
    # Versions that have no `rope_type` take the longest text for the context before the stretch.
    original = YARN_POSITIONS if hasattr(arg.args, "rope_type") else arg("max_position_embeddings")
    scaling = {"kind": "yarn", "factor": factor, "original_positions": original}
    if (mscale, all_channels) == (1.0, 0.0):
        return scaling
    if not mscale or not all_channels:
        raise arg.error(
            f"`mscale: {mscale:g}, mscale_all_dim: {all_channels:g}` is not that of a model here",
            "both count, or 1.0 and 0.0",
        )
    return scaling | {"mscale": mscale, "mscale_all_dim": all_channels}


def _moe(arg: _ArgsReader, experts: int) -> dict[str, Any]:
    return {
        "experts": experts,
        "top_k": arg("moe_router_topk"),
        "ffn": arg("moe_ffn_hidden_size", None) or arg("ffn_hidden_size"),
        "shared_ffn": arg("moe_shared_expert_intermediate_size", None) or 0,
        "normalize_top_k": not arg("moe_router_pre_softmax", False),
        "dense_first": _dense_first(arg),
    }


def _routing(arg: _ArgsReader) -> dict[str, Any]:
    """Return how the routers of models with latent attention choose experts."""
    if arg("moe_router_score_function", "softmax") != "sigmoid":
        raise arg.error("its routers have no sigmoid", "beside latent attention only `sigmoid` is read")
    routing: dict[str, Any] = {
        "scores": "sigmoid",
        "score_bias": bool(arg("moe_router_enable_expert_bias", False)),
        # The weights of several experts sum to 1, that of one is its score.
        "normalize_top_k": arg("moe_router_topk") > 1,
        "scale": float(arg("moe_router_topk_scaling_factor", None) or 1.0),
    }
    if arg("moe_router_group_topk", None):
        routing |= {"groups": arg("moe_router_num_groups"), "top_groups": arg("moe_router_group_topk")}
        best = arg("moe_router_topk") // routing["top_groups"]
        if routing["groups"] > routing["top_groups"] and best != 2:
            raise arg.error(f"its groups are chosen by their {best} best experts", "two count here")
    return routing


def _dense_first(arg: _ArgsReader) -> int:
    """Return how many first layers have no experts; no other layer may lack them."""
    frequency, layers = arg("moe_layer_freq", 1), arg("num_layers")
    pattern = evaluate_pattern(frequency) if isinstance(frequency, str) else frequency
    if pattern == 1:
        return 0
    if isinstance(pattern, list) and len(pattern) == layers and 1 in pattern:
        first = pattern.index(1)
        latent = bool(arg("multi_latent_attention", False))
        if pattern == [0] * first + [1] * (layers - first) and (latent or not first):
            return first
    raise arg.error(
        f"`moe_layer_freq: {frequency}` gives some layers no experts",
        "all layers must have them; with latent attention the first ones may lack them",
    )


def evaluate_pattern(text: str) -> list[int] | int | None:
    """Return what Megatron makes of a pattern of layers, `([0]*3+[1]*58)`; None where it is no such."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int()):
                return node.value
            case ast.List():
                return [value(item) for item in node.elts]
            case ast.BinOp(op=ast.Add()):
                return value(node.left) + value(node.right)
            case ast.BinOp(op=ast.Mult()):
                parts = value(node.left), value(node.right)
                sizes = [len(part) if isinstance(part, list) else part for part in parts]
                if sizes[0] * sizes[1] <= _MAX_LAYERS:
                    return parts[0] * parts[1]
        raise ValueError(text)

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError):
        return None


def _family(config: Mapping[str, Any], arg: _ArgsReader) -> str:
    family = arg(FAMILY_ARG, None)
    if family is not None:
        return family
    if "mla" in config:
        return "deepseek_v3"
    plain = FIXED_BY_FAMILY["mistral"]  # of keys that Megatron has no argument for
    fits = [
        family
        for family, fixed in FIXED_BY_FAMILY.items()
        if all(config.get(key, plain[key]) == value for key, value in (fixed | open_biases(family)).items())
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
