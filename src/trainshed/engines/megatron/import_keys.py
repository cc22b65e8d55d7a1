"""Megatron's arguments as keys of the recipe: `train`, `layout`, `data`, `checkpoint`, and the rest as `engine.args`.

`ArgumentImport` collects one import: the keys of the recipe, and what became of each argument.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from trainshed.data.sampling.schedule import BatchRampUp, BatchSchedule
from trainshed.engines.importing import DroppedSetting, ImportedConfig, ImportMistake, MappedSetting
from trainshed.engines.megatron.arguments import ParsedArguments
from trainshed.engines.megatron.script import ScriptArguments
from trainshed.errors import InputError
from trainshed.recipe import ModelConfig
from trainshed.recipe.schema import MAX_NAME_LENGTH
from trainshed.recipe.section import parse_count

_SECTION_ORDER = ("name", "model", "tokenizer", "data", "train", "layout", "engine", "checkpoint", "observe")


class ArgumentImport:
    """One import under way."""

    def __init__(self, parsed: ParsedArguments, found: ScriptArguments, name: str) -> None:
        self.parsed, self.found, self.name = parsed, found, name
        self.recipe: dict[str, Any] = {"name": _run_name(name)}
        self.cluster: dict[str, Any] = {}
        self.questions: list[str] = []
        self._mapped: list[MappedSetting] = []
        self._dropped: list[DroppedSetting] = []
        self._done: set[str] = set()

    @property
    def steps(self) -> int | None:
        """The length of the run, where it is known."""
        return self.recipe.get("train", {}).get("steps")

    def put(self, key: str, value: Any, *dests: str) -> None:
        """Write a key of the recipe, and say which arguments it comes from; those not given are Megatron's defaults."""
        section = self.recipe
        *parents, last = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
        self.note(f"{key}: {_shown(value)}", *dests)

    def note(self, ours: str, *dests: str) -> None:
        """Say what some arguments became."""
        for dest in dests:
            if dest in self.parsed.written and dest not in self._done:
                self._mapped.append(MappedSetting(self.parsed.written[dest], ours))
            self._done.add(dest)

    def drop(self, why: str, *dests: str) -> None:
        """Say that some arguments have no place in a recipe."""
        for dest in dests:
            if dest in self.parsed.written and dest not in self._done:
                self._dropped.append(DroppedSetting(self.parsed.written[dest], why))
            self._done.add(dest)

    def left(self) -> list[str]:
        """Return the given arguments that nothing was said about yet."""
        return [dest for dest in self.parsed.written if dest not in self._done]

    def given(self, *dests: str) -> bool:
        """Tell whether one of some arguments is there."""
        return any(dest in self.parsed.given for dest in dests)

    def imported(self, mistakes: tuple[ImportMistake, ...]) -> ImportedConfig:
        """Close the book."""
        for written, near in self.parsed.unknown.items():
            meant = f"; did you mean {near}?" if near else ""
            self._dropped.append(DroppedSetting(written, f"no version of Megatron-LM known here has it{meant}"))
        for written, fate in self.parsed.retired.items():
            if not any(each.theirs == written for each in (*self._mapped, *self._dropped)):
                self._dropped.append(DroppedSetting(written, str(fate)))
        ordered = {key: self.recipe[key] for key in _SECTION_ORDER if key in self.recipe}
        return ImportedConfig(
            kind="megatron",
            recipe=ordered | self.recipe,
            cluster=self.cluster,
            mapped=tuple(self._mapped),
            dropped=tuple(self._dropped),
            mistakes=mistakes,
            open_questions=tuple(self.questions),
        )


def _run_name(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", PurePath(name).stem.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"megatron-{plain}".strip("-")
    return named[:MAX_NAME_LENGTH].rstrip("-")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}


def read_training(book: ArgumentImport) -> None:
    """Read `train`, with Megatron's defaults for what is not given: they are not ours."""
    parsed = book.parsed
    micro = parsed["micro_batch_size"] or 1
    stepped = _stepped_ramp(book)
    batch = stepped[0] if stepped else parsed["global_batch_size"]
    if batch is None:
        batch = micro
        book.questions.append("train.global_batch: the arguments leave it to the number of GPUs (micro batch · dp)")
    schedule = _read_length(book, batch, stepped[1] if stepped else parsed["rampup_batch_size"])
    book.put("train.global_batch", batch, "global_batch_size")
    book.put("train.precision", _precision(book), "bf16", "fp16", "fp8")
    if parsed["lr"] is None:
        raise InputError("it names no learning rate", where=book.name, hint="add --lr")
    book.put("train.optimizer.lr", parsed["lr"], "lr")
    book.put("train.optimizer.betas", [parsed["adam_beta1"], parsed["adam_beta2"]], "adam_beta1", "adam_beta2")
    book.put("train.optimizer.eps", parsed["adam_eps"], "adam_eps")
    book.put("train.optimizer.weight_decay", parsed["weight_decay"], "weight_decay")
    book.put("train.optimizer.clip", parsed["clip_grad"] or None, "clip_grad")
    if parsed["optimizer"] == "adam":
        book.note("train.optimizer.name: adamw", "optimizer")
    else:
        book.drop("a recipe has adamw", "optimizer")
    _read_schedule(book, schedule)
    _read_dropout(book)
    book.put("seed", parsed["seed"], "seed")
    if parsed["num_experts"]:
        _read_router(book)
    if parsed["deterministic_mode"]:
        book.put("train.deterministic", True, "deterministic_mode")


def _read_dropout(book: ArgumentImport) -> None:
    parsed = book.parsed
    if parsed["use_checkpoint_args"] and not book.given("hidden_dropout", "attention_dropout"):
        return  # restored from the checkpoint; our models have none
    hidden, attention = parsed["hidden_dropout"], parsed["attention_dropout"]
    if hidden != attention:
        book.questions.append(
            f"train.dropout: one number here, and {hidden} (hidden) and {attention} (attention) in the arguments"
        )
    book.put("train.dropout", hidden, "hidden_dropout", "attention_dropout")


def _stepped_ramp(book: ArgumentImport) -> tuple[int, list[int]] | None:
    """Read --step-batch-size-schedule, `TOKENS:BATCH …`, as the full batch and a ramp, where its steps are equal."""
    parsed = book.parsed
    if not parsed["step_batch_size_schedule"]:
        return None
    pairs = [each.split(":") for each in parsed["step_batch_size_schedule"].replace(",", " ").split()]
    sizes = [int(size) for _, size in pairs]
    samples = [parse_count(tokens) // (parsed["seq_length"] or 1) for tokens, _ in pairs]
    increments = len(sizes) - 1
    even = increments > 0 and len({after - before for before, after in pairwise(sizes)}) == 1
    if not even or samples != [-(-stage * samples[-1] // increments) for stage in range(increments + 1)]:
        book.questions.append("train.batch_ramp: it grows in equal steps here, and not in the arguments")
        return sizes[-1], []
    book.note("train.batch_ramp", "step_batch_size_schedule")
    return sizes[-1], [sizes[0], sizes[1] - sizes[0], samples[-1]]


def _read_length(book: ArgumentImport, batch: int, ramp: list[int] | None) -> BatchSchedule:
    parsed = book.parsed
    schedule = BatchSchedule(batch, BatchRampUp(*ramp) if ramp else None)
    if ramp:
        book.put(
            "train.batch_ramp", dict(zip(("start", "increment", "samples"), ramp, strict=True)), "rampup_batch_size"
        )
    steps = parsed["train_iters"]
    if steps is None and parsed["train_samples"] is not None:
        steps = schedule.steps_for(parsed["train_samples"])
    if steps is None:
        steps = 1000
        book.questions.append("train.steps: the arguments do not say how long to train")
    book.put("train.steps", steps, "train_iters", "train_samples")
    return schedule


def _precision(book: ArgumentImport) -> str:
    parsed = book.parsed
    if parsed["fp8"] is not None:
        if parsed["fp8"] != "hybrid":
            book.questions.append(f"train.precision: fp8 is hybrid here, and the arguments say {parsed['fp8']}")
        return "fp8"
    return "bf16" if parsed["bf16"] else "fp16" if parsed["fp16"] else "fp32"


def _read_schedule(book: ArgumentImport, batches: BatchSchedule) -> None:
    parsed, steps = book.parsed, book.steps
    assert steps is not None, "the length is read first"

    def in_steps(iterations: str, samples: str) -> int | None:
        return parsed[iterations] or (batches.steps_for(parsed[samples]) if parsed[samples] else None)

    style = parsed["lr_decay_style"]
    name = _SCHEDULES.get(style, "cosine")
    if style not in _SCHEDULES:
        book.questions.append(f"train.schedule: there is no `{style}` schedule; cosine is written in its place")
    book.put("train.schedule.name", name, "lr_decay_style")
    end = in_steps("lr_decay_iters", "lr_decay_samples") or steps
    warmup = in_steps("lr_warmup_iters", "lr_warmup_samples") or 0
    if parsed["lr_warmup_fraction"]:
        warmup = round(parsed["lr_warmup_fraction"] * end)
    book.put(
        "train.schedule.warmup", warmup, "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init"
    )
    if name == "wsd":
        book.put("train.schedule.decay", in_steps("lr_wsd_decay_iters", "lr_wsd_decay_samples") or 1)
        if parsed["lr_wsd_decay_style"] != "linear":
            book.drop("the final decay of wsd is linear here", "lr_wsd_decay_style")
        book.note("train.schedule.decay", "lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style")
        if end != steps:
            book.drop("wsd ends with the run here", "lr_decay_iters", "lr_decay_samples")
    elif name != "constant" and end != steps:
        book.put("train.schedule.decay", end, "lr_decay_iters", "lr_decay_samples")
    if name != "constant":
        book.put("train.schedule.min_lr", parsed["min_lr"], "min_lr")
    book.note(f"train.schedule, which ends with the run ({steps} steps)", "lr_decay_iters", "lr_decay_samples")
    book.drop("a constant rate has no end", "min_lr")


def _read_router(book: ArgumentImport) -> None:
    parsed = book.parsed
    kinds, factors = parsed["moe_router_load_balancing_type"], parsed["moe_aux_loss_coeff"]
    kind = kinds[0] if isinstance(kinds, list) else kinds
    factor = factors[0] if isinstance(factors, list) else factors
    if kind not in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        factor = 0.0
    if kind != "seq_aux_loss" and factor:
        book.questions.append(f"train.moe.balance_loss: per sequence here, and {kind} in the arguments")
    losses = {"balance_loss": factor, "z_loss": parsed["moe_z_loss_coeff"] or 0.0}
    book.put("train.moe", losses, "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")


def read_layout(book: ArgumentImport) -> None:
    """Read `layout`; keys that are 1 are left out."""
    parsed = book.parsed
    layout: dict[str, Any] = {}

    def put(key: str, value: Any, usual: Any, *dests: str) -> None:
        if value != usual:
            layout[key] = value
        book.note(f"layout.{key}: {value}", *dests)

    tp, pp = parsed["tensor_model_parallel_size"], parsed["pipeline_model_parallel_size"]
    put("tp", tp, 1, "tensor_model_parallel_size")
    book.note("layout.tp, which has it always", "sequence_parallel")
    put("pp", pp, 1, "pipeline_model_parallel_size")
    put(
        "vp",
        _virtual_stages(book, pp),
        1,
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    )
    put("cp", parsed["context_parallel_size"], 1, "context_parallel_size")
    if parsed["num_experts"]:
        put("ep", parsed["expert_model_parallel_size"], 1, "expert_model_parallel_size")
        put("etp", parsed["expert_tensor_parallel_size"] or tp, 1, "expert_tensor_parallel_size")
    put("micro_batch", parsed["micro_batch_size"] or 1, 1, "micro_batch_size")
    put(
        "shard",
        _shard(book),
        "zero1",
        "use_distributed_optimizer",
        "use_megatron_fsdp",
        "data_parallel_sharding_strategy",
    )
    put("replicate", parsed["num_distributed_optimizer_instances"], 1, "num_distributed_optimizer_instances")
    recompute = "selective" if parsed["recompute_activations"] else parsed["recompute_granularity"] or "none"
    put("recompute", recompute, "none", "recompute_granularity", "recompute_activations")
    if recompute == "full" and (parsed["recompute_method"], parsed["recompute_num_layers"]) == ("uniform", 1):
        book.note("layout.recompute: full", "recompute_method", "recompute_num_layers")
    else:
        book.drop("full recomputes every layer here", "recompute_method", "recompute_num_layers")
    stages = _stages(book, pp)
    put("stages", stages, None, "pipeline_model_parallel_layout")
    book.note("layout.stages", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    book.recipe["layout"] = layout


def _virtual_stages(book: ArgumentImport, pp: int) -> int:
    parsed = book.parsed
    if parsed["num_virtual_stages_per_pipeline_rank"]:
        return parsed["num_virtual_stages_per_pipeline_rank"]
    if parsed["num_layers_per_virtual_pipeline_stage"] and parsed["num_layers"]:
        return max(1, parsed["num_layers"] // pp // parsed["num_layers_per_virtual_pipeline_stage"])
    written = parsed["pipeline_model_parallel_layout"]
    return len(_unroll_layout(written).split("|")) // pp if written else 1


def _shard(book: ArgumentImport) -> str:
    parsed = book.parsed
    if parsed["use_megatron_fsdp"]:
        return {"optim_grads": "zero2", "optim_grads_params": "full"}.get(
            parsed["data_parallel_sharding_strategy"], "zero1"
        )
    return "zero1" if parsed["use_distributed_optimizer"] else "none"


def _stages(book: ArgumentImport, pp: int) -> list[int] | None:
    parsed = book.parsed
    written = parsed["pipeline_model_parallel_layout"]
    if written:
        return [chunk.count("t") for chunk in _unroll_layout(written).split("|")]
    first, last = parsed["decoder_first_pipeline_num_layers"], parsed["decoder_last_pipeline_num_layers"]
    if pp == 1 or (first is None and last is None) or not parsed["num_layers"]:
        return None
    middle = pp - (first is not None) - (last is not None)
    left = parsed["num_layers"] - (first or 0) - (last or 0)
    each = [left // middle] * middle if middle else []
    return [*([] if first is None else [first]), *each, *([] if last is None else [last])]


def _unroll_layout(layout: str) -> str:
    """Unroll Megatron's shorthand: `Et*3|(tt|)*2L` has four chunks."""
    layout = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), layout)
    return layout


GPT2_TOKENIZER = "hf://openai-community/gpt2"
_TOKENS_PLACEHOLDER = "write the prefix of the .bin/.idx files here"
_RUN_FOLDER = "the run has its own folder"
_DECIDED_HERE = "Trainshed decides it"
# Why an argument is left out, where it is no key of a recipe and not to be handed on.
_DROP_REASONS = {
    "save": _RUN_FOLDER,
    "load": _RUN_FOLDER,
    "data_cache_path": "the index is built in the run's folder, before GPUs are asked for",
    "ckpt_format": "checkpoints are torch_dist (with Megatron's FSDP its own), which load on any layout",
    "tensorboard_dir": _RUN_FOLDER,
    "log_interval": "every step is logged",
    "log_throughput": "it is always on",
    "distributed_backend": _DECIDED_HERE,
    "use_persistent_ckpt_worker": "it comes with checkpoint.async",
    "dataloader_type": "samples come in the order of the index, once each",
    "no_load_optim": "base weights bring no state, own checkpoints are loaded whole",
    "no_load_rng": "base weights bring no state, own checkpoints are loaded whole",
    "no_save_optim": "a run that cannot resume is none here: state is always saved",
    "no_save_rng": "a run that cannot resume is none here: state is always saved",
    "finetune": "own checkpoints are loaded whole",
    "override_opt_param_scheduler": "the recipe's schedule always counts",
    "use_checkpoint_opt_param_scheduler": "the recipe's schedule always counts",
    "trust_remote_code": "code of strangers is never run",
    "vocab_file": "the tokenizer's own files are found by its address",
    "merge_file": "the tokenizer's own files are found by its address",
    "recompute_activations": _DECIDED_HERE,
    "exit_signal_handler": "it is always on",
    "wandb_project": "runs are kept in the store",
    "wandb_exp_name": "runs are kept in the store",
    "wandb_save_dir": "runs are kept in the store",
    "async_strategy": _DECIDED_HERE,
    "legacy_tokenizer": _DECIDED_HERE,
    "tokenizer_hf_use_fast": _DECIDED_HERE,
}


def read_data(book: ArgumentImport, config: ModelConfig | None) -> None:
    """Read `data` and `tokenizer`."""
    parsed = book.parsed
    length = parsed["seq_length"] or (config.max_positions if config else 2048)
    book.put("data.sequence_length", length, "seq_length")
    book.put("data.seed", parsed["seed"], "seed")
    if parsed["mock_data"]:
        book.put("data.synthetic", True, "mock_data")
        book.drop("synthetic data has no tokenizer", "tokenizer_type", "tokenizer_model")
    else:
        _read_sources(book)
        _read_tokenizer(book)
    for dest in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        book.drop("documents follow each other in a sample and every token counts here", dest)
    book.note("engine: megatron, which needs no tensor of the mask", "create_attention_mask_in_dataloader")


def _read_sources(book: ArgumentImport) -> None:
    parsed = book.parsed
    train = _sources(parsed["data_path"] or parsed["train_data_path"])
    if not train:
        files = [parsed[dest] for dest in ("data_args_path", "per_split_data_args_path") if parsed[dest]]
        lies = f"; they are listed in {files[0]}" if files else ""
        book.questions.append(f"data.train: the arguments do not say where the tokens lie{lies}")
        train = [{"tokens": _TOKENS_PLACEHOLDER}]
    book.put("data.train", train, "data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
    _read_validation(book)
    book.drop("a recipe measures one validation set; keep the test set for later", "test_data_path")


def _read_validation(book: ArgumentImport) -> None:
    """Read what the loss is measured on: a set of its own, or a share of the training documents."""
    parsed = book.parsed
    valid = _sources(parsed["valid_data_path"])
    batches = parsed["eval_iters"]
    apart = valid or parsed["train_data_path"] or parsed["per_split_data_args_path"]
    shares = None if apart else _fractions(parsed["split"])
    if shares is not None and not batches:
        # Documents that Megatron keeps from training and never measures are a test set to a recipe.
        shares = {"train": shares["train"], "test": round(1 - shares["train"], 9)}
    if shares is not None:
        book.put("data.split", shares, "split")
    if not batches or (shares is None and not apart):
        book.drop("no batch of it is asked for, or no document is left for it", "eval_interval", "eval_iters", "split")
        return
    measured: dict[str, Any] = {}
    if apart and not valid:
        measured["tokens"] = _TOKENS_PLACEHOLDER
        book.questions.append("data.validation: the arguments do not say where its tokens lie")
    elif valid:
        measured["tokens"] = valid[0]["tokens"]
    if len(valid) > 1:
        book.questions.append("data.validation: one source here; the arguments blend several, the first is written")
    measured |= {"every": parsed["eval_interval"] or 1000, "batches": batches}
    book.put("data.validation", measured, "valid_data_path", "eval_interval", "eval_iters")
    book.drop("the validation set is apart", "split")


def _sources(words: list[str] | None) -> list[dict[str, Any]]:
    """Read `0.7 a 0.3 b`, or prefixes alone."""
    if not words:
        return []
    weights = [_number(word) for word in words[::2]]
    if len(words) > 1 and len(words) % 2 == 0 and all(weight is not None for weight in weights):
        return [{"tokens": path, "weight": weight} for weight, path in zip(weights, words[1::2], strict=True)]
    return [{"tokens": path} for path in words]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _fractions(split: str | None) -> dict[str, float] | None:
    """Read `99,1,0` or `969, 30, 1`, which is what Megatron takes where nothing is said."""
    parts = [float(each) for each in re.findall(r"[.0-9]+", split or "969,30,1")]
    parts = [*parts, 0.0, 0.0][:3]
    whole = sum(parts)
    shares = {key: round(part / whole, 9) for key, part in zip(("train", "validation", "test"), parts, strict=True)}
    return None if shares["train"] == 1 else {key: share for key, share in shares.items() if share}


def _read_tokenizer(book: ArgumentImport) -> None:
    parsed = book.parsed
    kind, model = parsed["tokenizer_type"], parsed["tokenizer_model"]
    if kind in (None, "GPT2BPETokenizer"):
        book.put("tokenizer", GPT2_TOKENIZER, "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    elif kind == "NullTokenizer":
        book.note("no tokenizer: tokens are prepared", "tokenizer_type")
    elif kind == "HuggingFaceTokenizer" and model is not None:
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", model)
        book.put("tokenizer", f"hf://{model}" if hub else model, "tokenizer_type", "tokenizer_model")
    else:
        book.questions.append(f"tokenizer: {kind} is not read here; write the address of a Hugging Face tokenizer")
        book.drop("only Hugging Face tokenizers are read", "tokenizer_type", "tokenizer_model")


def read_checkpoints(book: ArgumentImport) -> None:
    """Read `checkpoint` and `observe`."""
    parsed = book.parsed
    book.put("checkpoint.every", parsed["save_interval"] if parsed["save"] else None, "save_interval")
    book.put("checkpoint.async", bool(parsed["async_save"] and parsed["use_persistent_ckpt_worker"]), "async_save")
    if parsed["exit_on_missing_checkpoint"] and "from" not in book.recipe["model"]:
        book.put("checkpoint.resume", "must", "exit_on_missing_checkpoint")
    if parsed["tensorboard_dir"] is None:
        book.put("observe.tensorboard", False)
    book.note("observe.tensorboard, which Megatron writes where it is left out", "tensorboard_dir")
    if parsed["profile"]:
        start = parsed["profile_step_start"]
        profile = {
            "start": start + 1,
            "steps": max(1, parsed["profile_step_end"] - start),
            "ranks": parsed["profile_ranks"],
        }
        book.put("observe.profile", profile, "profile", "profile_step_start", "profile_step_end", "profile_ranks")
        book.drop("PyTorch's profiler is the only one", "use_pytorch_profiler")


def read_rest(book: ArgumentImport) -> None:
    """Say what becomes of all other arguments: hints for the cluster, reasons to drop, `engine.args`."""
    parsed, found = book.parsed, book.found
    if parsed["use_sharp"]:
        book.cluster["sharp"] = True
        book.note("sharp: true in the cluster file", "use_sharp")
    if found.nodes is not None:
        book.recipe["resources"] = {"nodes": found.nodes}
        book.cluster["nodes"] = {"default": found.nodes}
    for dest, why in _DROP_REASONS.items():
        book.drop(why, dest)
    engine: dict[str, Any] = {"name": "megatron"}
    if parsed.known.version != "head":
        engine["version"] = parsed.known.version
    args: dict[str, Any] = {}
    for dest in book.left():
        if dest not in parsed.given:
            book.questions.append(f"engine.args: `{parsed.open[dest]}` holds what only a running shell knows")
            book.drop("only a running shell knows its value", dest)
            continue
        value = parsed.given[dest]
        option = (
            next(each for each in parsed.known.setting(dest) if _can_set(each.kind, value))
            if parsed.known.has(dest)
            else None
        )
        if option is None:
            book.drop(f"Megatron-LM {parsed.known.version} has it no more", dest)
            continue
        key = option.option.removeprefix("--")
        args[key] = True if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value
        book.note(f"engine.args.{key}", dest)
    if args:
        engine["args"] = args
    book.recipe["engine"] = engine
    for dest, written in parsed.open.items():
        if dest in parsed.given:
            book.questions.append(f"`{written}` holds what only a running shell knows")
    if found.conditions:
        book.questions.append("the script has branches; all of them are read, and the last one wins")


def _can_set(kind: str, value: Any) -> bool:
    """Tell whether an argument of a kind is what was written to set this value."""
    if isinstance(value, bool):
        return kind == ("flag" if value else "unflag") or kind == "switch"
    return kind not in ("flag", "unflag", "switch")
