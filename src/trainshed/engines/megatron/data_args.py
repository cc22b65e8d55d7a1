"""Data, tokenizer, checkpoints and profile in Megatron's arguments: both directions, for rows of `keys.py`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from trainshed.engines.importing import GPT2_TOKENIZER
from trainshed.engines.key_table import KEEP, OMIT
from trainshed.engines.keys import format_value
from trainshed.engines.launch import EngineTask
from trainshed.engines.megatron.argument_import import ArgumentImport
from trainshed.engines.megatron.versions import since, task_version
from trainshed.engines.profiles import profiles

BOUNDARIES = "dataloader_inter_document_masking"
BOUNDARY_VERSIONS = since("0.19.0")
"""Versions that tell TransformerEngine where documents begin (--dataloader-inter-document-masking)."""
_TOKENS_PLACEHOLDER = "write the prefix of the .bin/.idx files here"


def read_length(config: ArgumentImport) -> int:
    """Return `data.sequence_length`."""
    return config.get("seq_length") or (config.model.max_positions if config.model else 2048)


def read_synthetic(config: ArgumentImport) -> Any:
    """Return `data.synthetic`."""
    if not config.get("mock_data"):
        return KEEP
    config.drop("synthetic data has no tokenizer", "tokenizer_type", "tokenizer_model")
    config.drop("synthetic data is not validated on", "split", "eval_interval", "eval_iters")
    return True


def read_sources(config: ArgumentImport) -> Any:
    """Return `data.train`."""
    if config.get("mock_data"):
        return KEEP
    train = _sources(config.get("data_path") or config.get("train_data_path"))
    if not train:
        lists = [config.get(dest) for dest in ("data_args_path", "per_split_data_args_path") if config.get(dest)]
        listed = f"; they are listed in {lists[0]}" if lists else ""
        config.ask(f"data.train: the arguments do not say where the tokens lie{listed}")
        train = [{"tokens": _TOKENS_PLACEHOLDER}]
    config.drop("a recipe measures one validation set; keep the test set for later", "test_data_path")
    dests = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
    config.note_mapped(f"data.train: {format_value(train)}", *dests)
    return train


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


def render_split(task: EngineTask) -> str | None:
    """Return the shares of the documents, never as 1e-05: Megatron picks digits and points out of the text."""
    split = task.recipe.data.split
    if split is None:
        return None
    shares = (split.train, split.validation, split.test)
    return ",".join(format(Decimal(repr(share)), "f") for share in shares)


def _shares(config: ArgumentImport) -> dict[str, float] | None:
    """Read `99,1,0`, or `969, 30, 1`, which is what Megatron takes where nothing is said."""
    if _has_own_documents(config):
        return None
    parts = [float(part) for part in re.findall(r"[.0-9]+", config.get("split") or "969,30,1")]
    parts = [*parts, 0.0, 0.0][:3]
    shares = {
        name: round(part / sum(parts), 9) for name, part in zip(("train", "validation", "test"), parts, strict=True)
    }
    return None if shares["train"] == 1 else {name: share for name, share in shares.items() if share}


def _has_own_documents(config: ArgumentImport) -> bool:
    """Whether validation has documents of its own."""
    return any(config.get(dest) for dest in ("valid_data_path", "train_data_path", "per_split_data_args_path"))


def read_split(config: ArgumentImport) -> Any:
    """Return `data.split`."""
    if config.get("mock_data") or (shares := _shares(config)) is None:
        return KEEP
    if not config.get("eval_iters"):
        # Documents that Megatron keeps from training and never measures are a test set to a recipe.
        return {"train": shares["train"], "test": round(1 - shares["train"], 9)}
    return shares


def read_validation(config: ArgumentImport) -> Any:
    """Return `data.validation`: a set of its own, or a share of the training documents."""
    batches, own = config.get("eval_iters"), _has_own_documents(config)
    if config.get("mock_data"):
        return KEEP
    if not batches or (not own and _shares(config) is None):
        why = "no batch of it is asked for, or no document is left for it"
        config.drop(why, "eval_interval", "eval_iters", "split")
        return OMIT
    valid = _sources(config.get("valid_data_path"))
    validation: dict[str, Any] = {}
    if own and not valid:
        validation["tokens"] = _TOKENS_PLACEHOLDER
        config.ask("data.validation: the arguments do not say where its tokens lie")
    elif valid:
        validation["tokens"] = valid[0]["tokens"]
    if len(valid) > 1:
        config.ask("data.validation: one source here; the arguments blend several, the first is written")
    validation |= {"every": config.get("eval_interval") or 1000, "batches": batches}
    config.note_mapped(f"data.validation: {format_value(validation)}", "valid_data_path")
    config.drop("the validation set is apart", "split")
    return validation


def read_tokenizer(config: ArgumentImport) -> Any:
    """Return `tokenizer`: the address of a Hugging Face one."""
    if config.get("mock_data"):
        return KEEP
    kind, model = config.get("tokenizer_type"), config.get("tokenizer_model")
    files = ("tokenizer_type", "tokenizer_model")
    if kind in (None, "GPT2BPETokenizer"):
        config.note_mapped(f"tokenizer: {GPT2_TOKENIZER}", *files, "vocab_file", "merge_file")
        return GPT2_TOKENIZER
    if kind == "NullTokenizer":
        config.note_mapped("no tokenizer: tokens are prepared", "tokenizer_type")
        return KEEP
    if kind == "HuggingFaceTokenizer" and model is not None:
        address = f"hf://{model}" if re.fullmatch(r"[\w.-]+/[\w.-]+", model) else model
        config.note_mapped(f"tokenizer: {address}", *files)
        return address
    config.ask(f"tokenizer: {kind} is not read here; write the address of a Hugging Face tokenizer")
    config.drop("only Hugging Face tokenizers are read", *files)
    return OMIT


def marks_boundaries(task: EngineTask) -> bool:
    """Whether the version of a task tells TransformerEngine where documents begin."""
    return task_version(task) in BOUNDARY_VERSIONS


def has_boundaries(config: ArgumentImport) -> bool:
    """Whether a list of arguments tells TransformerEngine where documents begin."""
    return config.parsed.known.has(BOUNDARIES) and bool(config.get(BOUNDARIES))


def reads_mask(config: ArgumentImport) -> bool:
    """Whether attention reads the mask that --reset-attention-mask makes: Megatron's own, unfused, does."""
    return config.get("transformer_impl") == "local" and not config.get("masked_softmax_fusion")


def read_resume(config: ArgumentImport) -> Any:
    """Return `checkpoint.resume`; base weights must be there in any case."""
    if not config.get("save"):
        return OMIT
    must = config.get("exit_on_missing_checkpoint") and "from" not in config.recipe["model"]
    return "must" if must else KEEP


def writes_tensorboard(task: EngineTask) -> bool:
    """Whether there is a folder for TensorBoard: the profiler writes its traces there, too."""
    return task.recipe.observe.tensorboard is not False or profiles(task)


def render_profile(task: EngineTask) -> dict[str, Any]:
    """Return the steps that are profiled, counted from 0."""
    profile = task.recipe.observe.profile
    if profile is None:
        return {"profile": False}
    return {
        "profile": True,
        "use_pytorch_profiler": True,
        "profile_step_start": profile.recorded()[0].start,
        "profile_step_end": profile.recorded()[0].stop,
        "profile_ranks": profile.ranks,
    }


def read_profile(config: ArgumentImport) -> Any:
    """Return `observe.profile`."""
    if not config.get("profile"):
        return KEEP
    start = config.get("profile_step_start")
    config.drop("PyTorch's profiler is the only one", "use_pytorch_profiler")
    return {
        "start": start + 1,
        "steps": max(1, config.get("profile_step_end") - start),
        "ranks": config.get("profile_ranks") or [0],
        **{key: True for key, theirs in PROFILE_OPTIONS.items() if config.values.get(theirs)},
    }


PROFILE_OPTIONS = {"shapes": "pytorch_profiler_collect_shapes", "stacks": "pytorch_profiler_collect_callstack"}
"""Options of a profile, by Megatron's names; versions without them always record both."""
PROFILE_OPTION_VERSIONS = since("0.19.0")


def read_tensorboard(config: ArgumentImport) -> Any:
    """Return `observe.tensorboard`."""
    return False if config.get("tensorboard_dir") is None else OMIT


def read_save(config: ArgumentImport) -> Any:
    """Return `checkpoint.save`: Megatron saves nothing, not even at its end, where it is told no place to save in."""
    config.drop("the run has its own folder", "save")
    if config.get("save"):
        return OMIT
    config.drop("without --save there is no checkpoint", "save_interval", "async_save", "exit_on_missing_checkpoint")
    return False


def read_save_interval(config: ArgumentImport) -> Any:
    """Return `checkpoint.every`."""
    return config.get("save_interval") if config.get("save") else OMIT
