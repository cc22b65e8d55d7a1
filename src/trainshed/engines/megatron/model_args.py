"""The model in Megatron's arguments: its architecture and vocabulary in both directions, for rows of `keys.py`.

`checkpoints/megatron/args.py` is the home of the mapping itself. Every fact of the architecture is written, since
`--use-checkpoint-args` restores only a part.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from trainshed.catalog import model_preset, preset_names
from trainshed.checkpoints.megatron.args import architecture_args, computed_args, read_args
from trainshed.engines.importing import GPT2_VOCABULARY, vocabulary_of_sizes
from trainshed.engines.key_table import OMIT
from trainshed.engines.keys import format_value
from trainshed.engines.launch import EngineTask
from trainshed.engines.megatron.argument_import import ArgumentImport
from trainshed.engines.megatron.arguments import known_arguments
from trainshed.engines.megatron.versions import ROPE_TYPE_VERSIONS, rope_problem, since, task_version
from trainshed.errors import InputError
from trainshed.plan.legality.check import MEGATRON_VOCABULARY_MULTIPLE
from trainshed.plan.legality.rules import round_up
from trainshed.recipe import ModelConfig, to_plain

_ROPE_ARGUMENTS = ("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor")
_LATENT_ARGUMENTS = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
    *("rotary_scaling_factor", "mscale", "mscale_all_dim"),
)
ARCHITECTURE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention"),
    *("num_query_groups", "kv_channels", "max_position_embeddings", "position_embedding_type"),
    *("use_rotary_position_embeddings", "add_position_embedding", "rotary_base", "rotary_percent"),
    *("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor", "window_size"),
    *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "qk_layernorm", "add_bias_linear"),
    *("add_qkv_bias", "swiglu", "squared_relu", "bias_gelu_fusion", "untie_embeddings_and_output_weights"),
    *("init_method_std", "num_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk"),
    *("moe_router_pre_softmax", "moe_router_score_function", "moe_shared_expert_intermediate_size"),
    *("moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_topk_scaling_factor", "rotary_interleaved", "multi_latent_attention", *_LATENT_ARGUMENTS),
)
"""What `architecture_args` writes and `read_args` reads."""
_VOCABULARY = ("vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by")


def has_experts(task: EngineTask) -> bool:
    """Whether a task trains a mixture of experts."""
    return task.config.moe is not None


def has_latents(task: EngineTask) -> bool:
    """Whether a task trains a model with latent attention."""
    return task.config.mla is not None


def groups_experts(task: EngineTask) -> bool:
    """Whether the products of all experts are one; before 0.16 only bf16 has that, and fp8 on top of it."""
    any_precision = task_version(task) in since("0.16.1")
    return has_experts(task) and (any_precision or task.recipe.train.precision in ("bf16", "fp8"))


def sequence_length(task: EngineTask) -> int:
    """Return the tokens of a sample; synthetic data may leave it to the model."""
    return task.recipe.data.sequence_length or task.config.max_positions


def padded_vocabulary(task: EngineTask) -> int:
    """Return the rows of the embedding, as the planner counts them."""
    return round_up(task.config.vocab_size, MEGATRON_VOCABULARY_MULTIPLE * task.layout.tp)


def has_tokenizer(task: EngineTask) -> bool:
    """Whether Megatron reads a tokenizer; a NullTokenizer takes its place where there is none to read."""
    return task.recipe.tokenizer is not None and not task.recipe.data.synthetic


def vocabulary(task: EngineTask) -> int:
    """Return the vocabulary: until 0.18 a NullTokenizer counts its end of a document on top."""
    version = known_arguments(task_version(task))
    counts_more = not has_tokenizer(task) and not version.has("null_tokenizer_eod_id")
    return task.config.vocab_size - counts_more


def render_architecture(task: EngineTask) -> dict[str, Any]:
    """Return the arguments of the architecture, or refuse one that Megatron cannot be told."""
    config = task.config
    try:
        arguments = architecture_args(config)
    except InputError as error:
        raise InputError(error.what, where=task.recipe.where("model"), hint="write `engine: torch`") from None
    version = task_version(task)
    if problem := rope_problem(config, version):
        what, versions = problem
        hint = f"write engine.version: {' or '.join(versions)}, with an image that has it, or engine: torch"
        raise InputError(what, where=task.recipe.where("model"), hint=hint)
    arguments["max_position_embeddings"] = max(config.max_positions, sequence_length(task))
    if config.kv_heads == config.heads:
        arguments["num_query_groups"] = None
    if config.gated:
        arguments["bias_gelu_fusion"] = None
    if config.rope is None:
        arguments |= dict.fromkeys(_ROPE_ARGUMENTS)
    if not arguments["use_rope_scaling"]:
        arguments["rope_scaling_factor"] = None
    if config.mla is None:
        arguments |= dict.fromkeys(_LATENT_ARGUMENTS)
    elif version not in ROPE_TYPE_VERSIONS:
        # All there is before 0.14 is yarn, which turns as plain rope does by its factor of 1.
        arguments["rope_type"] = None
    if isinstance(pattern := arguments.get("moe_layer_freq"), list):
        dense = pattern.index(1)
        arguments["moe_layer_freq"] = f"([0]*{dense}+[1]*{len(pattern) - dense})"
    return arguments


def read_architecture(config: ArgumentImport) -> Any:
    """Write the model: a preset, or its architecture; neither where only a checkpoint knows it."""
    base = _base_checkpoint(config)
    if "num_layers" in config:
        model = _read_architecture(config)
        preset = _matching_preset(model)
        path, value = ("preset", preset) if preset else ("config", to_plain(model, defaults=False))
        config.set_recipe(f"model.{path}", value)
        config.note_mapped(f"model.{path}: {format_value(value)}", *ARCHITECTURE, *_VOCABULARY)
        config.model = model
    elif base is None:
        raise InputError(
            "it names no architecture (--num-layers, --hidden-size, …) and no checkpoint to read one from",
            where=config.name,
            hint="give the file that holds the model's arguments too, one after the other",
        )
    config.set_recipe(*(("model.init", "random") if base is None else ("model.from", base)))
    config.drop("the architecture is in the recipe, or read from the weights in full", "use_checkpoint_args")
    return OMIT


def _base_checkpoint(config: ArgumentImport) -> str | None:
    """Return the checkpoint whose weights are trained on; a --load that is also --save is the run's own."""
    pretrained, load = config.get("pretrained_checkpoint"), config.get("load")
    if pretrained is not None:
        config.note_mapped("model.from", "pretrained_checkpoint")
        return pretrained
    own = load is not None and load == config.get("save")
    weights_alone = config.get("finetune") or config.get("no_load_optim") or config.get("use_checkpoint_args")
    if load is None or own or not weights_alone:
        return None
    config.note_mapped("model.from", "load", "finetune", "no_load_optim", "no_load_rng")
    config.note_mapped("model.from, which must be there", "exit_on_missing_checkpoint")
    return load


def _read_architecture(config: ArgumentImport) -> ModelConfig:
    args = computed_args(config.parsed.namespace())
    args.mtp_num_layers = None  # a row of its own says what becomes of it
    # As `validate_args` fills them in.
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = int((4 * args.hidden_size * 2 / 3) / 64) * 64 if args.swiglu else 4 * args.hidden_size
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    size = vocabulary_size(config) or _preset_vocabulary(args, config.name)
    model = read_args(args, config.name, size)
    if config.get("tokenizer_type") == "NullTokenizer" and _matching_preset(model) is None:
        # Until 0.18 it counted its end of a document on top; which version is meant, a known model tells.
        larger = read_args(args, config.name, size + 1)
        return larger if _matching_preset(larger) is not None else model
    return model


def vocabulary_size(config: ArgumentImport) -> int | None:
    """Return how many tokens there are, where the arguments say it."""
    if config.get("vocab_size") is not None:
        return config.get("vocab_size")
    if config.get("tokenizer_type") in (None, "GPT2BPETokenizer"):
        return GPT2_VOCABULARY
    return config.get("padded_vocab_size")


def _preset_vocabulary(args: Namespace, name: str) -> int:
    """Return the vocabulary of the preset that has these sizes: a Hugging Face tokenizer's is not in the arguments."""
    sizes = (args.num_layers, args.hidden_size, args.num_attention_heads, args.ffn_hidden_size)
    size = vocabulary_of_sizes(*sizes, args.tokenizer_model)
    if size is None:
        raise InputError(
            f"its arguments do not say how many tokens {args.tokenizer_model or 'the tokenizer'} has",
            where=name,
            hint="add --vocab-size with the tokenizer's true size",
        )
    return size


def _matching_preset(config: ModelConfig) -> str | None:
    """Return the preset that is exactly this architecture."""
    return next((name for name in preset_names() if model_preset(name) == config), None)


def imports_experts(config: ArgumentImport) -> bool:
    """Whether a list of arguments is of a mixture of experts."""
    return bool(config.get("num_experts"))


def imports_latents(config: ArgumentImport) -> bool:
    """Whether a list of arguments is of a model with latent attention."""
    return bool(config.get("multi_latent_attention"))
