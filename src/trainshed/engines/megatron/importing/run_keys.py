"""Data, checkpoints, logs and all other arguments of Megatron's, as keys of the recipe or as `engine.args`."""

from __future__ import annotations

import re
from typing import Any

from trainshed.engines.megatron.importing.notebook import Notebook
from trainshed.recipe import ModelConfig

GPT2_TOKENIZER = "hf://openai-community/gpt2"
_TOKENS = "write the prefix of the .bin/.idx files here"
_PATHS = "the run has its own folder"
_OURS = "Trainshed decides it"
# Why an argument is left out, where it is no key of a recipe and not to be handed on.
_DROPPED = {
    "save": _PATHS,
    "load": _PATHS,
    "data_cache_path": "the index is built in the run's folder, before GPUs are asked for",
    "ckpt_format": "checkpoints are torch_dist (with Megatron's FSDP its own), which load on any layout",
    "tensorboard_dir": _PATHS,
    "log_interval": "every step is logged",
    "log_throughput": "it is always on",
    "distributed_backend": _OURS,
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
    "recompute_activations": _OURS,
    "exit_signal_handler": "it is always on",
    "wandb_project": "runs are kept in the store",
    "wandb_exp_name": "runs are kept in the store",
    "wandb_save_dir": "runs are kept in the store",
    "async_strategy": _OURS,
    "legacy_tokenizer": _OURS,
    "tokenizer_hf_use_fast": _OURS,
}


def read_data(book: Notebook, config: ModelConfig | None) -> None:
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


def _read_sources(book: Notebook) -> None:
    parsed = book.parsed
    train = _sources(parsed["data_path"] or parsed["train_data_path"])
    if not train:
        files = [parsed[dest] for dest in ("data_args_path", "per_split_data_args_path") if parsed[dest]]
        lies = f"; they are listed in {files[0]}" if files else ""
        book.questions.append(f"data.train: the arguments do not say where the tokens lie{lies}")
        train = [{"tokens": _TOKENS}]
    book.put("data.train", train, "data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
    _read_validation(book)
    book.drop("a recipe measures one validation set; keep the test set for later", "test_data_path")


def _read_validation(book: Notebook) -> None:
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
        measured["tokens"] = _TOKENS
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


def _read_tokenizer(book: Notebook) -> None:
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


def read_checkpoints(book: Notebook) -> None:
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


def read_rest(book: Notebook) -> None:
    """Say what becomes of all other arguments: hints for the cluster, reasons to drop, `engine.args`."""
    parsed, found = book.parsed, book.found
    if parsed["use_sharp"]:
        book.cluster["sharp"] = True
        book.note("sharp: true in the cluster file", "use_sharp")
    if found.nodes is not None:
        book.recipe["resources"] = {"nodes": found.nodes}
        book.cluster["nodes"] = {"default": found.nodes}
    for dest, why in _DROPPED.items():
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
            next(each for each in parsed.known.setting(dest) if _sets(each.kind, value))
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


def _sets(kind: str, value: Any) -> bool:
    """Tell whether an argument of a kind is what was written to set this value."""
    if isinstance(value, bool):
        return kind == ("flag" if value else "unflag") or kind == "switch"
    return kind not in ("flag", "unflag", "switch")
