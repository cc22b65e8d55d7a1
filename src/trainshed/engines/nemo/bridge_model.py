"""The model in a script for Megatron-Bridge: its architecture in both directions, for a row of `bridge_keys.py`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from trainshed.checkpoints.megatron.args import read_args
from trainshed.checkpoints.megatron.unsupported import parts_without_argument
from trainshed.engines.importing import GPT2_VOCABULARY, ConfigImport, vocabulary_of_sizes
from trainshed.engines.key_table import OMIT
from trainshed.engines.launch import EngineTask
from trainshed.errors import InputError
from trainshed.recipe import ModelConfig, to_plain


class SourceCode(str):
    """A value that is written into a script as it is, not quoted."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


# torch.nn.functional's; megatron-core asks for the function itself.
_ACTIVATIONS = {
    "silu": SourceCode("F.silu"),
    "gelu": SourceCode("F.gelu"),
    "gelu_tanh": SourceCode("partial(F.gelu, approximate='tanh')"),
    "relu": SourceCode("F.relu"),
}


def has_architecture(task: EngineTask) -> bool:
    """Whether the script says the architecture; base weights bring their own."""
    return task.recipe.model.from_ is None


ARCHITECTURE = (
    *("num_layers", "hidden_size", "activation_func", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "init_method_std", "normalization", "layernorm_epsilon", "add_bias_linear", "add_qkv_bias"),
    *("qk_layernorm", "gated_linear_unit", "bias_activation_fusion", "position_embedding_type"),
    *("share_embeddings_and_output_weights", "vocab_size", "window_size", "rotary_base", "rope_scaling"),
    *("rope_scaling_factor", "seq_len_interpolation_factor", "num_moe_experts", "moe_router_topk"),
    *("moe_ffn_hidden_size", "moe_router_pre_softmax", "moe_shared_expert_intermediate_size"),
)


def render_architecture(task: EngineTask) -> dict[str, Any]:
    """Return the fields of the model's provider, or refuse an architecture that these fields do not say."""
    config = task.config
    if missing := [*parts_without_argument(config), *_missing_fields(config)]:
        raise InputError(
            f"Megatron-Bridge's provider cannot be told `{'`, `'.join(missing)}`",
            where=task.recipe.where("model"),
            hint="write `engine: torch`, or `model.from: hf://…`, which brings an architecture that the bridge knows",
        )
    fields: dict[str, Any] = {
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "activation_func": _ACTIVATIONS[config.activation],
        "ffn_hidden_size": config.ffn or (config.moe.ffn if config.moe else None),
        "num_attention_heads": config.heads,
        "num_query_groups": config.kv_heads,
        "kv_channels": config.head_dim,
        "init_method_std": config.init_std,
        "normalization": "RMSNorm" if config.norm == "rms" else "LayerNorm",
        "layernorm_epsilon": config.norm_eps,
        "add_bias_linear": config.mlp_bias,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "gated_linear_unit": config.gated,
        "bias_activation_fusion": config.activation == "silu",
        "position_embedding_type": "rope" if config.positions == "rope" else "learned_absolute",
        "share_embeddings_and_output_weights": config.tied_embeddings,
    }
    if config.vocab_size % task.layout.tp == 0:
        # Written out, the vocabulary is not padded; left out, it is the tokenizer's, padded to a multiple of tp.
        fields["vocab_size"] = config.vocab_size
    if config.sliding_window is not None:
        fields["window_size"] = (config.sliding_window - 1, 0)
    if config.rope is not None:
        fields["rotary_base"] = int(config.rope.base)
        if (scaling := config.rope.scaling) is not None:
            if scaling.kind == "llama3":
                fields |= {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
            else:
                fields["seq_len_interpolation_factor"] = scaling.factor
    if (moe := config.moe) is not None:
        fields |= {
            "num_moe_experts": moe.experts,
            "moe_router_topk": moe.top_k,
            "moe_ffn_hidden_size": moe.ffn,
            "moe_router_pre_softmax": not moe.normalize_top_k,
            "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
        }
    return {f"model.{key}": value for key, value in fields.items()}


def _missing_fields(config: ModelConfig) -> list[str]:
    fraction = 1.0 if config.rope is None else config.rope.fraction
    activation = [] if config.activation in _ACTIVATIONS else [f"activation: {config.activation}"]
    return [*activation, *([] if fraction == 1.0 else [f"rope.fraction: {fraction}"])]


# Where Megatron-LM's arguments, which `read_args` reads, have other names than the fields of megatron-core.
_ARGUMENT_NAMES = {
    "gated_linear_unit": "swiglu",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "num_moe_experts": "num_experts",
}


def read_architecture(config: ConfigImport) -> Any:
    """Return `model.config`, by the same home of the mapping that Megatron's arguments have."""
    if "model.num_layers" not in config:
        return OMIT
    given = {key: config.values[f"model.{key}"] for key in ARCHITECTURE if f"model.{key}" in config}
    args = Namespace(**{_ARGUMENT_NAMES.get(key, key): value for key, value in given.items()})
    args.untie_embeddings_and_output_weights = not given.get("share_embeddings_and_output_weights", True)
    args.group_query_attention = True
    args.max_position_embeddings = config.get("model.seq_length")
    model = read_args(args, config.name, config.get("model.vocab_size") or _vocabulary(config))
    activation = next((ours for ours, theirs in _ACTIVATIONS.items() if theirs == given.get("activation_func")), None)
    plain = to_plain(model, defaults=False)
    return plain if activation in (None, model.activation) else plain | {"activation": activation}


def _vocabulary(config: ConfigImport) -> int:
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
    tokenizer = config.get("tokenizer.tokenizer_model") or config.get("from_hf_pretrained")
    known = vocabulary_of_sizes(*(config.get(f"model.{key}") for key in sizes), tokenizer=tokenizer)
    if known is None:
        config.ask("the script leaves the size of the vocabulary to the tokenizer: write model.config.vocab_size")
    return known or GPT2_VOCABULARY


def read_base(config: ConfigImport) -> Any:
    """Return `model.from`, or write that weights are random."""
    base = config.get("from_hf_pretrained")
    if base is None:
        config.set_recipe("model.init", "random")
        return OMIT
    return base
