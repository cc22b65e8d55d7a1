"""An argument list or a launch script for Megatron-LM read as a recipe: the entrance, and usual mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from trainshed.checkpoints.megatron.unsupported import LLAMA3_ROPE_SCALING
from trainshed.engines.importing import GPT2_VOCABULARY, ImportedConfig, ImportMistake, recipe_name
from trainshed.engines.megatron.argument_import import ArgumentImport
from trainshed.engines.megatron.arguments import DEFAULT_VERSION, parse_arguments
from trainshed.engines.megatron.keys import MEGATRON_TABLE
from trainshed.engines.megatron.model_args import vocabulary_size
from trainshed.engines.megatron.script import ScriptArguments, find_arguments
from trainshed.engines.megatron.versions import LINEAR_ROPE_VERSIONS
from trainshed.models.parameters import parameter_count
from trainshed.recipe import ModelConfig


def read_megatron(text: str, name: str) -> ImportedConfig:
    """Read a file's text as a recipe; `name` is the file's, for errors and for the run's name.

    Arguments that are not keys of a recipe and that Megatron still has are kept as `engine.args`. Nothing in the text
    is executed. Raises `InputError` where it holds no arguments, or values that Megatron would refuse.
    """
    script = find_arguments(text, name)
    config = ArgumentImport(parse_arguments(script.words, name), script, name)
    config.set_recipe("name", recipe_name(PurePath(name).stem, "megatron"))
    MEGATRON_TABLE.read(config)
    config.set_recipe("engine.name", "megatron")
    if config.parsed.known.version != DEFAULT_VERSION:
        config.set_recipe("engine.version", config.parsed.known.version)
    config.keep_arguments()
    _read_script(config, script)
    return config.finish(tuple(find_mistakes(config)))


def _read_script(config: ArgumentImport, script: ScriptArguments) -> None:
    if script.nodes is not None:
        config.set_recipe("resources.nodes", script.nodes)
        config.cluster["nodes"] = {"default": script.nodes}
    for dest, written in config.parsed.open.items():
        if dest in config:
            config.ask(f"`{written}` holds what only a running shell knows")
    if script.conditions:
        config.ask("the script has branches; all of them are read, and the last one wins")


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


def find_mistakes(config: ArgumentImport) -> Iterator[ImportMistake]:
    """Yield what the arguments get wrong."""
    for written, fate in config.parsed.retired.items():
        yield ImportMistake(written, str(fate), fate.instead or "delete it")
    for written, near in config.parsed.unknown.items():
        yield ImportMistake(written, "no version of Megatron-LM known here has this argument", near or "delete it")
    yield from _model_mistakes(config)
    yield from _schedule_mistakes(config)
    yield from _batch_mistakes(config)
    yield from _checkpoint_mistakes(config)
    yield from _data_mistakes(config)


def _model_mistakes(config: ArgumentImport) -> Iterator[ImportMistake]:
    parsed, model = config.parsed, config.model
    if model is None:
        missing = [dest for dest in _NOT_RESTORED if dest not in parsed.given]
        if parsed["use_checkpoint_args"] and missing:
            options = ", ".join(parsed.known.setting(dest)[0].option for dest in missing)
            yield ImportMistake(
                "--use-checkpoint-args",
                f"it restores none of {options}: they are Megatron's defaults, whatever the model was trained with",
                "write them out; Trainshed writes every one",
            )
        return
    yield from _rope_mistakes(config)
    if model.rope is not None and model.gated and vocabulary_size(config) == GPT2_VOCABULARY:
        yield ImportMistake(
            parsed.written.get("tokenizer_type", "--tokenizer-type (GPT2BPETokenizer by default)"),
            f"GPT-2's vocabulary of {GPT2_VOCABULARY} on a model that is put together like a Llama",
            "name the model's own tokenizer: --tokenizer-type HuggingFaceTokenizer --tokenizer-model …",
        )
    if model.rope is not None and parsed["hidden_dropout"] and not config.has_any("hidden_dropout"):
        yield ImportMistake(
            "--hidden-dropout",
            f"not set, so Megatron's default of {parsed['hidden_dropout']} applies; such models have no dropout",
            "--hidden-dropout 0 --attention-dropout 0",
        )
    count = parameter_count(model)
    for size in config.script.sizes:
        named = float(size[:-1]) * (1e9 if size[-1] in "bB" else 1e6)
        if max(named / count, count / named) > _WRONG_NAME_RATIO:
            yield ImportMistake(
                size, f"it is called {size} and has {format_size(model)} parameters", format_size(model)
            )
    length, positions = parsed["seq_length"], parsed["max_position_embeddings"]
    if length and positions and length > positions:
        yield ImportMistake(
            parsed.written["seq_length"],
            f"Megatron refuses sequences of {length} with {positions} positions",
            f"--max-position-embeddings {length}",
        )


def _rope_mistakes(config: ArgumentImport) -> Iterator[ImportMistake]:
    """Yield what scales positions and does not reach the model."""
    parsed = config.parsed
    if parsed["use_rope_scaling"] and parsed["rope_scaling_factor"] != (factor := LLAMA3_ROPE_SCALING["factor"]):
        yield ImportMistake(
            parsed.written["rope_scaling_factor"],
            f"pretrain_gpt.py of every version known here takes it and computes with {factor:g}",
            f"--rope-scaling-factor {factor:g}, or `engine: torch` for a model with another",
        )
    if "rotary_seq_len_interpolation_factor" in parsed.given and parsed.known.version not in LINEAR_ROPE_VERSIONS:
        yield ImportMistake(
            parsed.written["rotary_seq_len_interpolation_factor"],
            f"pretrain_gpt.py reads it from {LINEAR_ROPE_VERSIONS[0]} on; before, positions are not scaled",
            "a newer Megatron-LM and its engine.version, or `engine: torch`",
        )


def _schedule_mistakes(config: ArgumentImport) -> Iterator[ImportMistake]:
    parsed, steps = config.parsed, config.steps
    end = parsed["lr_decay_iters"]
    if end and steps and end > _LATE_DECAY_RATIO * steps and parsed["lr_decay_style"] not in ("constant", "WSD"):
        yield ImportMistake(
            parsed.written["lr_decay_iters"],
            f"the rate is to reach its minimum at step {end:,}, and the run ends at {steps:,}: it hardly falls",
            f"--lr-decay-iters {steps}",
        )
    warmup = config.recipe["train"]["schedule"]["warmup"]
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


def _batch_mistakes(config: ArgumentImport) -> Iterator[ImportMistake]:
    parsed, script, model = config.parsed, config.script, config.model
    tp, pp, cp = (parsed[f"{axis}_parallel_size"] for axis in ("tensor_model", "pipeline_model", "context"))
    if parsed["num_experts"] and tp > 1 and not parsed["sequence_parallel"]:
        yield ImportMistake(
            "--num-experts", "Megatron refuses experts with tp and no sequence parallel", "--sequence-parallel"
        )
    if script.nodes is None or script.gpus_per_node is None:
        return
    gpus = script.nodes * script.gpus_per_node
    shown = f"{script.nodes} nodes of {script.gpus_per_node} GPUs"
    if gpus % (tp * pp * cp):
        yield ImportMistake(
            f"{shown}, tp {tp} · pp {pp} · cp {cp}",
            f"one copy of the model is cut for {tp * pp * cp} GPUs, and there are {gpus}",
            f"{-(-tp * pp * cp // script.gpus_per_node)} nodes, or a smaller layout",
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
    if model is not None:
        needed = STATE_BYTES * parameter_count(model) / 1e9
        if needed > gpus * USUAL_GPU_GB:
            yield ImportMistake(
                shown,
                f"weights, gradients and Adam's state of {format_size(model)} parameters take {needed:,.0f} GB "
                f"({STATE_BYTES} bytes each), and {gpus} GPUs of {USUAL_GPU_GB} GB have {gpus * USUAL_GPU_GB:,}",
                f"{-(-int(needed) // (USUAL_GPU_GB * script.gpus_per_node))} nodes or more",
            )


def _checkpoint_mistakes(config: ArgumentImport) -> Iterator[ImportMistake]:
    parsed = config.parsed
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


def _data_mistakes(config: ArgumentImport) -> Iterator[ImportMistake]:
    parsed = config.parsed
    if config.script.prepares_without_eod:
        yield ImportMistake("preprocess_data.py", "without --append-eod documents run into each other", "--append-eod")
    if parsed["merge_file"] is not None and parsed["merge_file"] == parsed["vocab_file"]:
        yield ImportMistake(
            parsed.written["merge_file"], "merges and vocabulary are one file", "--merge-file merges.txt"
        )
    split = [float(part) for part in (parsed["split"] or "").split(",") if part.strip()]
    if parsed["eval_iters"] and len(split) > 1 and split[1] == 0:
        yield ImportMistake(
            parsed.written["split"],
            f"nothing is left to measure the loss on, and --eval-iters is {parsed['eval_iters']}: Megatron stops",
            "--eval-iters 0, or a share for validation",
        )
