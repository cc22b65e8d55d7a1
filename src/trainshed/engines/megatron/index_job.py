"""The CPU stage before training: its job file, and the settings it is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainshed.engines.foreign import CpuStage, EngineTask
from trainshed.engines.megatron.keeping import checkpoint_folder
from trainshed.engines.megatron.settings import Settings
from trainshed.engines.megatron.training import run_length

SCRIPT, ASKED = "build_index.py", "index.json"
# What pretrain_gpt.py hands to GPTDatasetConfig, by Megatron's names of the arguments; a version takes what it has.
_CONFIG = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "split": "split",
    "path_to_cache": "data_cache_path",
    "mmap_bin_files": "mmap_bin_files",
    "reset_position_ids": "reset_position_ids",
    "reset_attention_mask": "reset_attention_mask",
    "eod_mask_loss": "eod_mask_loss",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "mid_level_dataset_surplus": "mid_level_dataset_surplus",
    "allow_ambiguous_pad_tokens": "allow_ambiguous_pad_tokens",
    "multiple_validation_sets": "multiple_validation_sets",
    "full_validation": "full_validation",
    "inter_document_masking": "dataloader_inter_document_masking",
}
# What `build_tokenizer` reads of its arguments, in any version.
_TOKENIZER = (
    *("tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file", "trust_remote_code"),
    *("tokenizer_metadata", "metadata_path", "tokenizer_special_tokens", "special_tokens", "chat_template"),
    *("tokenizer_hf_use_fast", "tokenizer_hf_include_special_tokens", "use_gigatoken"),
    *("tokenizer_hf_no_use_fast", "tokenizer_hf_no_include_special_tokens"),
    *("null_tokenizer_eod_id", "null_tokenizer_pad_id"),
    *("padded_vocab_size", "pad_vocab_size"),
)


def sample_counts(task: EngineTask) -> tuple[int, int, int]:
    """Return how many samples of each split Megatron asks its datasets for, which is a part of their cache's name.

    As `get_train_valid_test_num_samples` of its training.py counts them.
    """
    train, length = task.recipe.train, run_length(task)
    validation = task.recipe.data.validation
    every, batches = (validation.every, validation.batches) if validation else (task.steps, 0)
    rounds = task.steps // every + 1
    return (length.samples(task.steps), rounds * batches * train.global_batch, batches * train.global_batch)


def index_files(settings: Settings, task: EngineTask, program: str) -> dict[str, str]:
    """Return the job's files for the stage."""
    known, place, data = settings.known, task.place, task.recipe.data
    asked: dict[str, Any] = {
        "program": program,
        "resume": task.recipe.checkpoint.resume,
        "checkpoints": checkpoint_folder(place),
        "data": None if data.synthetic else f"{place.engine}/data.json",
        "data_args": settings.value("data_args_path"),
        "samples": sample_counts(task),
        "config": {field: settings.value(dest) for field, dest in _CONFIG.items() if known.has(dest)},
        "tokenizer": {dest: settings.value(dest) for dest in _TOKENIZER if known.has(dest)},
    }
    script = (Path(__file__).parent / "job" / SCRIPT).read_text(encoding="utf-8")
    return {SCRIPT: script, ASKED: json.dumps(asked, indent=1) + "\n"}


def index_stage(task: EngineTask) -> CpuStage:
    """Return the stage that runs before training: checks first, then the index."""
    return CpuStage("index", ("python3", f"{task.place.job}/{SCRIPT}", f"{task.place.job}/{ASKED}"))
