"""An argument list or a launch script for Megatron-LM read as a recipe: the entrance, the model, usual mistakes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from trainshed.catalog.models import model_preset, preset_names
from trainshed.checkpoints.megatron.args import read_args
from trainshed.engines.importing import ImportedConfig, ImportMistake
from trainshed.engines.megatron.arguments import parse_arguments
from trainshed.engines.megatron.import_keys import (
    ArgumentImport,
    read_checkpoints,
    read_data,
    read_layout,
    read_rest,
    read_training,
)
from trainshed.engines.megatron.script import find_arguments
from trainshed.errors import InputError
from trainshed.models.parameters import parameter_count
from trainshed.recipe import ModelConfig, to_plain


def read_megatron(text: str, name: str) -> ImportedConfig:
    """Read a file's text as a recipe; `name` is the file's, for errors and for the run's name.

    Arguments that are no key of a recipe and that Megatron still has are kept as `engine.args`. Nothing in the text is
    executed. Raises `InputError` where it holds no arguments, or values that Megatron would refuse.
    """
    found = find_arguments(text, name)
    book = ArgumentImport(parse_arguments(found.words, name), found, name)
    config = read_model(book)
    read_training(book)
    read_layout(book)
    read_data(book, config)
    read_checkpoints(book)
    read_rest(book)
    return book.imported(tuple(find_mistakes(book, config)))


GPT2_VOCABULARY = 50257
"""Of the tokenizer that `--tokenizer-type GPT2BPETokenizer` means, and that Megatron takes where none is named."""

_ARCHITECTURE_ARGUMENTS = (
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


def read_model(book: ArgumentImport) -> ModelConfig | None:
    """Find the model; None where its architecture is only known from a checkpoint."""
    base = _base_checkpoint(book)
    config = None
    if "num_layers" in book.parsed.given:
        config = _architecture(book)
        _write_model(book, config)
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


def _base_checkpoint(book: ArgumentImport) -> str | None:
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


def _architecture(book: ArgumentImport) -> ModelConfig:
    parsed = book.parsed
    args = parsed.namespace()
    # As `validate_args` fills them in.
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = int((4 * args.hidden_size * 2 / 3) / 64) * 64 if args.swiglu else 4 * args.hidden_size
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    size = vocabulary_size(book) or _preset_vocabulary(args, book.name)
    config = read_args(args, book.name, size)
    if parsed["tokenizer_type"] == "NullTokenizer" and _matching_preset(config) is None:
        # Until 0.18 it counted its end of a document besides; which version is meant, a known model tells.
        larger = read_args(args, book.name, size + 1)
        return larger if _matching_preset(larger) is not None else config
    return config


def vocabulary_size(book: ArgumentImport) -> int | None:
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


def _write_model(book: ArgumentImport, config: ModelConfig) -> None:
    preset = _matching_preset(config)
    if preset is not None:
        book.put("model.preset", preset, *_ARCHITECTURE_ARGUMENTS)
        return
    book.put("model.config", to_plain(config, defaults=False), *_ARCHITECTURE_ARGUMENTS)


def _matching_preset(config: ModelConfig) -> str | None:
    """Return the preset that is exactly this architecture."""
    return next((name for name in preset_names() if model_preset(name) == config), None)


def format_size(config: ModelConfig) -> str:
    """Return the number of parameters as people say it: `64M`, `8.0B`."""
    count = parameter_count(config)
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


# What `load_args_from_checkpoint` of 0.16.1 and d98e8a64dd does not restore, although it changes what is computed.
_NOT_RESTORED = (
    *("layernorm_epsilon", "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"),
    *("qk_layernorm", "window_size"),
)
# bf16 weights, fp32 gradients, and Adam's two averages with fp32 weights: what mixed precision keeps of a parameter.
STATE_BYTES = 18
USUAL_GPU_GB = 80
"""Of the H100s and A100s that these scripts are for."""
_WRONG_NAME_RATIO = 1.5
_LATE_DECAY_RATIO = 2


def find_mistakes(book: ArgumentImport, config: ModelConfig | None) -> Iterator[ImportMistake]:
    """Yield what the arguments get wrong."""
    for written, fate in book.parsed.retired.items():
        yield ImportMistake(written, str(fate), fate.instead or "delete it")
    for written, near in book.parsed.unknown.items():
        yield ImportMistake(written, "no version of Megatron-LM known here has this argument", near or "delete it")
    yield from _model_mistakes(book, config)
    yield from _schedule_mistakes(book)
    yield from _batch_mistakes(book, config)
    yield from _checkpoint_mistakes(book)
    yield from _data_mistakes(book)


def _model_mistakes(book: ArgumentImport, config: ModelConfig | None) -> Iterator[ImportMistake]:
    parsed = book.parsed
    if config is None:
        missing = [dest for dest in _NOT_RESTORED if dest not in parsed.given]
        if parsed["use_checkpoint_args"] and missing:
            options = ", ".join(parsed.known.setting(dest)[0].option for dest in missing)
            yield ImportMistake(
                "--use-checkpoint-args",
                f"it restores none of {options}: they are Megatron's defaults, whatever the model was trained with",
                "write them out; Trainshed writes every one",
            )
        return
    if config.rope is not None and config.gated and vocabulary_size(book) == GPT2_VOCABULARY:
        yield ImportMistake(
            parsed.written.get("tokenizer_type", "--tokenizer-type (GPT2BPETokenizer by default)"),
            f"GPT-2's vocabulary of {GPT2_VOCABULARY} on a model that is put together like a Llama",
            "name the model's own tokenizer: --tokenizer-type HuggingFaceTokenizer --tokenizer-model …",
        )
    if config.rope is not None and parsed["hidden_dropout"] and not book.given("hidden_dropout"):
        yield ImportMistake(
            "--hidden-dropout",
            f"nobody says it, and Megatron's default of {parsed['hidden_dropout']} holds: such models have none",
            "--hidden-dropout 0 --attention-dropout 0",
        )
    count = parameter_count(config)
    for size in book.found.sizes:
        said = float(size[:-1]) * (1e9 if size[-1] in "bB" else 1e6)
        if max(said / count, count / said) > _WRONG_NAME_RATIO:
            yield ImportMistake(
                size, f"it is called {size} and has {format_size(config)} parameters", format_size(config)
            )
    length, positions = parsed["seq_length"], parsed["max_position_embeddings"]
    if length and positions and length > positions:
        yield ImportMistake(
            parsed.written["seq_length"],
            f"Megatron refuses sequences of {length} with {positions} positions",
            f"--max-position-embeddings {length}",
        )


def _schedule_mistakes(book: ArgumentImport) -> Iterator[ImportMistake]:
    parsed, steps = book.parsed, book.steps
    end = parsed["lr_decay_iters"]
    if end and steps and end > _LATE_DECAY_RATIO * steps and parsed["lr_decay_style"] not in ("constant", "WSD"):
        yield ImportMistake(
            parsed.written["lr_decay_iters"],
            f"the rate is to reach its minimum at step {end:,}, and the run ends at {steps:,}: it hardly falls",
            f"--lr-decay-iters {steps}",
        )
    warmup = book.recipe["train"]["schedule"]["warmup"]
    if steps and warmup >= steps:
        where = next(
            (parsed.written[dest] for dest in ("lr_warmup_fraction", "lr_warmup_iters") if dest in parsed.written), ""
        )
        yield ImportMistake(where, f"a warm-up of {warmup} steps, and the run has {steps}", "a shorter warm-up")
    if parsed["rampup_batch_size"]:
        yield ImportMistake(
            parsed.written["rampup_batch_size"],
            "Megatron-core 0.18 and later take it and ignore it",
            "--step-batch-size-schedule; Trainshed writes what the version reads",
        )


def _batch_mistakes(book: ArgumentImport, config: ModelConfig | None) -> Iterator[ImportMistake]:
    parsed, found = book.parsed, book.found
    tp, pp, cp = (parsed[f"{axis}_parallel_size"] for axis in ("tensor_model", "pipeline_model", "context"))
    if parsed["num_experts"] and tp > 1 and not parsed["sequence_parallel"]:
        yield ImportMistake(
            "--num-experts", "Megatron refuses experts with tp and no sequence parallel", "--sequence-parallel"
        )
    if found.nodes is None or found.gpus_per_node is None:
        return
    gpus = found.nodes * found.gpus_per_node
    shown = f"{found.nodes} nodes of {found.gpus_per_node} GPUs"
    if gpus % (tp * pp * cp):
        yield ImportMistake(
            f"{shown}, tp {tp} · pp {pp} · cp {cp}",
            f"one copy of the model is cut for {tp * pp * cp} GPUs, and there are {gpus}",
            f"{-(-tp * pp * cp // found.gpus_per_node)} nodes, or a smaller layout",
        )
    else:
        step = (parsed["micro_batch_size"] or 1) * (gpus // (tp * pp * cp))
        batch = parsed["global_batch_size"] or step
        if batch % step:
            yield ImportMistake(
                parsed.written["global_batch_size"],
                f"micro batch · dp = {parsed['micro_batch_size']} · {gpus // (tp * pp * cp)} does not divide {batch}",
                f"a multiple of {step}",
            )
    if config is not None:
        needed = STATE_BYTES * parameter_count(config) / 1e9
        if needed > gpus * USUAL_GPU_GB:
            yield ImportMistake(
                shown,
                f"weights, gradients and Adam's state of {format_size(config)} parameters take {needed:,.0f} GB "
                f"({STATE_BYTES} bytes each), and {gpus} GPUs of {USUAL_GPU_GB} GB have {gpus * USUAL_GPU_GB:,}",
                f"{-(-int(needed) // (USUAL_GPU_GB * found.gpus_per_node))} nodes or more",
            )


def _checkpoint_mistakes(book: ArgumentImport) -> Iterator[ImportMistake]:
    parsed = book.parsed
    if parsed["no_save_optim"]:
        yield ImportMistake(
            "--no-save-optim", "a checkpoint without the optimiser's state cannot be resumed from", "delete it"
        )
    if parsed["async_save"] and not parsed["use_persistent_ckpt_worker"]:
        yield ImportMistake(
            "--async-save", "Megatron switches it off with a warning", "add --use-persistent-ckpt-worker"
        )
    if parsed["save"] and not parsed["save_interval"]:
        yield ImportMistake(
            parsed.written["save"], "Megatron refuses --save without --save-interval", "--save-interval 500"
        )


def _data_mistakes(book: ArgumentImport) -> Iterator[ImportMistake]:
    parsed = book.parsed
    if book.found.prepares_without_eod:
        yield ImportMistake("preprocess_data.py", "without --append-eod documents run into each other", "--append-eod")
    if parsed["merge_file"] is not None and parsed["merge_file"] == parsed["vocab_file"]:
        yield ImportMistake(
            parsed.written["merge_file"], "merges and vocabulary are one file", "--merge-file merges.txt"
        )
    split = [float(each) for each in (parsed["split"] or "").split(",") if each.strip()]
    if parsed["eval_iters"] and len(split) > 1 and split[1] == 0:
        yield ImportMistake(
            parsed.written["split"],
            f"nothing is left to measure the loss on, and --eval-iters is {parsed['eval_iters']}: Megatron stops",
            "--eval-iters 0, or a share for validation",
        )
