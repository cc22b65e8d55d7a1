"""The architecture and the starting weights in Megatron's arguments."""

from __future__ import annotations

from argparse import Namespace

from trainshed.catalog.models import model_preset, preset_names
from trainshed.checkpoints.megatron.args import read_args
from trainshed.engines.megatron.importing.notebook import Notebook
from trainshed.errors import InputError
from trainshed.models.parameters import parameter_count
from trainshed.recipe import ModelConfig, to_plain

GPT2_VOCABULARY = 50257
"""Of the tokenizer that `--tokenizer-type GPT2BPETokenizer` means, and that Megatron takes where none is named."""

_ARCHITECTURE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention"),
    *("num_query_groups", "kv_channels", "max_position_embeddings", "position_embedding_type"),
    *("use_rotary_position_embeddings", "add_position_embedding", "rotary_base", "rotary_percent"),
    *("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor", "window_size"),
    *("normalization", "layernorm_epsilon", "qk_layernorm", "add_bias_linear", "add_qkv_bias", "swiglu"),
    *("bias_gelu_fusion", "untie_embeddings_and_output_weights", "init_method_std", "num_experts"),
    *("moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk", "moe_router_pre_softmax"),
    *("moe_router_score_function", "moe_shared_expert_intermediate_size", "rotary_interleaved"),
    *("vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by"),
)


def read_model(book: Notebook) -> ModelConfig | None:
    """Find the model; None where its architecture is only known from a checkpoint."""
    base = _base(book)
    config = None
    if "num_layers" in book.parsed.given:
        config = _architecture(book)
        _name_it(book, config)
    elif base is None:
        raise InputError(
            "it names no architecture (--num-layers, --hidden-size, …) and no checkpoint to read one from",
            where=book.name,
            hint="give the file that holds the model's arguments too, one after the other",
        )
    if base is None:
        book.put("model.init", "random")
    else:
        book.put("model.from", base)
    book.drop("the architecture is in the recipe, or read from the weights in full", "use_checkpoint_args")
    return config


def _base(book: Notebook) -> str | None:
    """Return the checkpoint whose weights are trained on; a --load that is also --save is the run's own."""
    parsed = book.parsed
    pretrained, load = parsed["pretrained_checkpoint"], parsed["load"]
    if pretrained is not None:
        book.note("model.from", "pretrained_checkpoint")
        return pretrained
    own = load is not None and load == parsed["save"]
    weights_alone = parsed["finetune"] or parsed["no_load_optim"] or parsed["use_checkpoint_args"]
    if load is None or own or not weights_alone:
        return None
    book.note("model.from", "load", "finetune", "no_load_optim", "no_load_rng")
    book.note("model.from, which must be there", "exit_on_missing_checkpoint")
    return load


def _architecture(book: Notebook) -> ModelConfig:
    parsed = book.parsed
    args = parsed.namespace()
    # As `validate_args` fills them in.
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = int((4 * args.hidden_size * 2 / 3) / 64) * 64 if args.swiglu else 4 * args.hidden_size
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    size = vocabulary(book) or _preset_vocabulary(args, book.name)
    config = read_args(args, book.name, size)
    if parsed["tokenizer_type"] == "NullTokenizer" and _preset(config) is None:
        # Until 0.18 it counted its end of a document besides; which version is meant, a known model tells.
        larger = read_args(args, book.name, size + 1)
        return larger if _preset(larger) is not None else config
    return config


def vocabulary(book: Notebook) -> int | None:
    """Return how many tokens there are, where the arguments say it."""
    parsed = book.parsed
    if parsed["vocab_size"] is not None:
        return parsed["vocab_size"]
    if parsed["tokenizer_type"] in (None, "GPT2BPETokenizer"):
        return GPT2_VOCABULARY
    return parsed["padded_vocab_size"]


def _preset_vocabulary(args: Namespace, name: str) -> int:
    """Return the vocabulary of the preset that has these sizes: a Hugging Face tokenizer's is not in the arguments."""
    sizes = (args.num_layers, args.hidden_size, args.num_attention_heads, args.ffn_hidden_size)
    for preset in preset_names():
        config = model_preset(preset)
        width = config.ffn if config.moe is None else config.moe.ffn
        if (config.layers, config.hidden, config.heads, width) == sizes:
            return config.vocab_size
    raise InputError(
        f"its arguments do not say how many tokens {args.tokenizer_model or 'the tokenizer'} has",
        where=name,
        hint="add --vocab-size with the tokenizer's true size",
    )


def _name_it(book: Notebook, config: ModelConfig) -> None:
    preset = _preset(config)
    if preset is not None:
        book.put("model.preset", preset, *_ARCHITECTURE)
        return
    book.put("model.config", to_plain(config, defaults=False), *_ARCHITECTURE)


def _preset(config: ModelConfig) -> str | None:
    """Return the preset that is exactly this architecture."""
    return next((name for name in preset_names() if model_preset(name) == config), None)


def size_in_words(config: ModelConfig) -> str:
    """Return the number of parameters as people say it: `64M`, `8.0B`."""
    count = parameter_count(config)
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
