"""Mistakes that argument lists for Megatron-LM make again and again, whatever reads them."""

from __future__ import annotations

from collections.abc import Iterator

from trainshed.engines.imported import Mistake
from trainshed.engines.megatron.importing.found_model import GPT2_VOCABULARY, size_in_words, vocabulary
from trainshed.engines.megatron.importing.notebook import Notebook
from trainshed.models.parameters import parameter_count
from trainshed.recipe import ModelConfig

# What `load_args_from_checkpoint` of 0.16.1 and d98e8a64dd does not restore, although it changes what is computed.
_NOT_RESTORED = (
    *("layernorm_epsilon", "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"),
    *("qk_layernorm", "window_size"),
)
# bf16 weights, fp32 gradients, and Adam's two averages with fp32 weights: what mixed precision keeps of a parameter.
STATE_BYTES = 18
USUAL_GPU_GB = 80
"""Of the H100s and A100s that these scripts are for."""
_NAMED_WRONG = 1.5
_FAR_BEYOND = 2


def find_mistakes(book: Notebook, config: ModelConfig | None) -> Iterator[Mistake]:
    """Yield what the arguments get wrong."""
    for written, fate in book.parsed.retired.items():
        yield Mistake(written, str(fate), fate.instead or "delete it")
    for written, near in book.parsed.unknown.items():
        yield Mistake(written, "no version of Megatron-LM known here has this argument", near or "delete it")
    yield from _model(book, config)
    yield from _schedule(book)
    yield from _batch(book, config)
    yield from _keeping(book)
    yield from _data(book)


def _model(book: Notebook, config: ModelConfig | None) -> Iterator[Mistake]:
    parsed = book.parsed
    if config is None:
        missing = [dest for dest in _NOT_RESTORED if dest not in parsed.given]
        if parsed["use_checkpoint_args"] and missing:
            options = ", ".join(parsed.known.setting(dest)[0].option for dest in missing)
            yield Mistake(
                "--use-checkpoint-args",
                f"it restores none of {options}: they are Megatron's defaults, whatever the model was trained with",
                "write them out; Trainshed writes every one",
            )
        return
    if config.rope is not None and config.gated and vocabulary(book) == GPT2_VOCABULARY:
        yield Mistake(
            parsed.written.get("tokenizer_type", "--tokenizer-type (GPT2BPETokenizer by default)"),
            f"GPT-2's vocabulary of {GPT2_VOCABULARY} on a model that is put together like a Llama",
            "name the model's own tokenizer: --tokenizer-type HuggingFaceTokenizer --tokenizer-model …",
        )
    if config.rope is not None and parsed["hidden_dropout"] and not book.given("hidden_dropout"):
        yield Mistake(
            "--hidden-dropout",
            f"nobody says it, and Megatron's default of {parsed['hidden_dropout']} holds: such models have none",
            "--hidden-dropout 0 --attention-dropout 0",
        )
    count = parameter_count(config)
    for size in book.found.sizes:
        said = float(size[:-1]) * (1e9 if size[-1] in "bB" else 1e6)
        if max(said / count, count / said) > _NAMED_WRONG:
            yield Mistake(
                size, f"it is called {size} and has {size_in_words(config)} parameters", size_in_words(config)
            )
    length, positions = parsed["seq_length"], parsed["max_position_embeddings"]
    if length and positions and length > positions:
        yield Mistake(
            parsed.written["seq_length"],
            f"Megatron refuses sequences of {length} with {positions} positions",
            f"--max-position-embeddings {length}",
        )


def _schedule(book: Notebook) -> Iterator[Mistake]:
    parsed, steps = book.parsed, book.steps
    end = parsed["lr_decay_iters"]
    if end and steps and end > _FAR_BEYOND * steps and parsed["lr_decay_style"] not in ("constant", "WSD"):
        yield Mistake(
            parsed.written["lr_decay_iters"],
            f"the rate is to reach its minimum at step {end:,}, and the run ends at {steps:,}: it hardly falls",
            f"--lr-decay-iters {steps}",
        )
    warmup = book.recipe["train"]["schedule"]["warmup"]
    if steps and warmup >= steps:
        where = next(
            (parsed.written[dest] for dest in ("lr_warmup_fraction", "lr_warmup_iters") if dest in parsed.written), ""
        )
        yield Mistake(where, f"a warm-up of {warmup} steps, and the run has {steps}", "a shorter warm-up")
    if parsed["rampup_batch_size"]:
        yield Mistake(
            parsed.written["rampup_batch_size"],
            "Megatron-core 0.18 and later take it and ignore it",
            "--step-batch-size-schedule; Trainshed writes what the version reads",
        )


def _batch(book: Notebook, config: ModelConfig | None) -> Iterator[Mistake]:
    parsed, found = book.parsed, book.found
    tp, pp, cp = (parsed[f"{axis}_parallel_size"] for axis in ("tensor_model", "pipeline_model", "context"))
    if parsed["num_experts"] and tp > 1 and not parsed["sequence_parallel"]:
        yield Mistake(
            "--num-experts", "Megatron refuses experts with tp and no sequence parallel", "--sequence-parallel"
        )
    if found.nodes is None or found.gpus_per_node is None:
        return
    gpus = found.nodes * found.gpus_per_node
    shown = f"{found.nodes} nodes of {found.gpus_per_node} GPUs"
    if gpus % (tp * pp * cp):
        yield Mistake(
            f"{shown}, tp {tp} · pp {pp} · cp {cp}",
            f"one copy of the model is cut for {tp * pp * cp} GPUs, and there are {gpus}",
            f"{-(-tp * pp * cp // found.gpus_per_node)} nodes, or a smaller layout",
        )
    else:
        step = (parsed["micro_batch_size"] or 1) * (gpus // (tp * pp * cp))
        batch = parsed["global_batch_size"] or step
        if batch % step:
            yield Mistake(
                parsed.written["global_batch_size"],
                f"micro batch · dp = {parsed['micro_batch_size']} · {gpus // (tp * pp * cp)} does not divide {batch}",
                f"a multiple of {step}",
            )
    if config is not None:
        needed = STATE_BYTES * parameter_count(config) / 1e9
        if needed > gpus * USUAL_GPU_GB:
            yield Mistake(
                shown,
                f"weights, gradients and Adam's state of {size_in_words(config)} parameters take {needed:,.0f} GB "
                f"({STATE_BYTES} bytes each), and {gpus} GPUs of {USUAL_GPU_GB} GB have {gpus * USUAL_GPU_GB:,}",
                f"{-(-int(needed) // (USUAL_GPU_GB * found.gpus_per_node))} nodes or more",
            )


def _keeping(book: Notebook) -> Iterator[Mistake]:
    parsed = book.parsed
    if parsed["no_save_optim"]:
        yield Mistake(
            "--no-save-optim", "a checkpoint without the optimiser's state cannot be resumed from", "delete it"
        )
    if parsed["async_save"] and not parsed["use_persistent_ckpt_worker"]:
        yield Mistake("--async-save", "Megatron switches it off with a warning", "add --use-persistent-ckpt-worker")
    if parsed["save"] and not parsed["save_interval"]:
        yield Mistake(parsed.written["save"], "Megatron refuses --save without --save-interval", "--save-interval 500")


def _data(book: Notebook) -> Iterator[Mistake]:
    parsed = book.parsed
    if book.found.prepares_without_eod:
        yield Mistake("preprocess_data.py", "without --append-eod documents run into each other", "--append-eod")
    if parsed["merge_file"] is not None and parsed["merge_file"] == parsed["vocab_file"]:
        yield Mistake(parsed.written["merge_file"], "merges and vocabulary are one file", "--merge-file merges.txt")
    split = [float(each) for each in (parsed["split"] or "").split(",") if each.strip()]
    if parsed["eval_iters"] and len(split) > 1 and split[1] == 0:
        yield Mistake(
            parsed.written["split"],
            f"nothing is left to measure the loss on, and --eval-iters is {parsed['eval_iters']}: Megatron stops",
            "--eval-iters 0, or a share for validation",
        )
