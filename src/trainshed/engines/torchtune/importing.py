"""A torchtune file (`70B_full.yaml`, `70B_lora.yaml`) read as a recipe; the form of its data stays in `engine.args`."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from trainshed.engines.importing import ConfigImport, ImportedConfig
from trainshed.engines.torchtune.keys import (
    ATTENTION_PROJECTIONS,
    COSINE_SCHEDULER,
    DATASET_COMPONENTS,
    HUB_DATASETS,
    MLP_PROJECTIONS,
    TORCHTUNE_KEYS,
    TorchtuneBuilder,
    builder_named,
    fixed_settings,
)
from trainshed.errors import InputError
from trainshed.recipe.schema import MAX_NAME_LENGTH
from trainshed.recipe.yaml_io import parse_yaml

_HUB_OWNERS = {"llama": "meta-llama", "meta-llama": "meta-llama", "qwen": "Qwen", "mistral": "mistralai"}
# torch.optim.AdamW's own defaults, for files that leave them out.
_ADAMW_DEFAULTS = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
_PLACES_REASON = "places come from the cluster file"
_IMPLIED_KEYS = {
    "optimizer.fused": "off with tp, which it does not work with",
    "checkpointer._component_": "written by Trainshed in any case",
    "checkpointer.model_type": "follows model",
    "tensor_parallel_plan._component_": "follows layout.tp",
    "data_parallel_shard_dim": "layout.dp: what tp leaves",
    "batch_size_val": "follows layout.micro_batch",
    "optimizer._component_": "train.optimizer.name: adamw",
}


def read_torchtune(text: str, name: str, *, gpus: int | None = None) -> ImportedConfig:
    """Read torchtune's YAML; `name` is how its lines are called, `gpus` how many the run had, which no file says."""
    settings = ConfigImport(parse_yaml(text, name))
    builder = _find_builder(settings, name)
    lora = "lora_rank" in {key.removeprefix("model.") for key in settings.values}
    _read_model(settings, builder, lora=lora)
    read_data(settings)
    _read_training(settings, lora=lora)
    _read_layout(settings, gpus)
    settings.write("engine.name", "torchtune")
    _read_checkpoints(settings)
    for key, ours in _IMPLIED_KEYS.items():
        settings.mapped(key, ours)
    _drop_paths(settings)
    settings.keep_rest(TORCHTUNE_KEYS, fixed_settings(lora=lora, tied=builder.preset.startswith("llama3.2")))
    _note_mistakes(settings)
    return settings.imported("torchtune")


def _find_builder(settings: ConfigImport, name: str) -> TorchtuneBuilder:
    component = settings.get("model._component_", "")
    builder = builder_named(component)
    if builder is None:
        raise InputError(
            f"the model is {component or 'not named'}, and the catalog has no model that torchtune builds so",
            where=f"{name} (model._component_)",
            hint="Trainshed reads files of Llama, Mistral and Qwen text models",
        )
    return builder


def _read_model(settings: ConfigImport, builder: TorchtuneBuilder, *, lora: bool) -> None:
    folder = settings.get("checkpointer.checkpoint_dir", "")
    base = PurePosixPath(folder).name
    owner = next((owner for start, owner in _HUB_OWNERS.items() if base.lower().startswith(start)), None)
    run = re.sub(r"[^a-z0-9]+", "-", f"{base or builder.preset}-{'lora' if lora else 'full'}".lower()).strip("-")
    settings.write("name", run[:MAX_NAME_LENGTH].strip("-"))
    settings.take("model._component_", "model.preset", builder.preset)
    address = f"hf://{owner}/{base}" if owner else folder or "hf://org/name"
    settings.take("checkpointer.checkpoint_dir", "model.from", address)
    settings.take("tokenizer._component_", "tokenizer", address)
    if address == "hf://org/name":
        settings.ask("the file names no weights: write model.from and tokenizer")
    elif owner:
        settings.ask(f"no revision is named: pin the weights, model.from: {address}@<commit>, and the tokenizer")
    for key in ("tokenizer.path", "tokenizer.merges_file"):
        settings.drop(key, "files come with the tokenizer's address")
    settings.drop_section("checkpointer.checkpoint_files", "the files are found when the job starts")
    settings.drop("checkpointer.checkpoint_files", "the files are found when the job starts")
    if not lora:
        return
    targets = [
        ours for ours, theirs in ATTENTION_PROJECTIONS.items() if theirs in settings.get("model.lora_attn_modules", [])
    ]
    if settings.get("model.apply_lora_to_mlp"):
        targets += MLP_PROJECTIONS
    settings.take("model.lora_attn_modules", "train.lora.targets", targets)
    settings.mapped("model.apply_lora_to_mlp", "train.lora.targets")
    settings.take("model.lora_rank", "train.lora.rank", settings.get("model.lora_rank", 8))
    settings.take("model.lora_alpha", "train.lora.alpha", float(settings.get("model.lora_alpha", 16)))
    settings.take("model.lora_dropout", "train.lora.dropout", float(settings.get("model.lora_dropout", 0.0)))


def _read_training(settings: ConfigImport, *, lora: bool) -> None:
    settings.write("train.mode", "finetune")
    epochs, limit = settings.get("epochs", 1), settings.get("max_steps_per_epoch")
    if limit is None:
        settings.take("epochs", "train.epochs", float(epochs))
        settings.drop("max_steps_per_epoch", "says nothing")
    else:
        settings.take("max_steps_per_epoch", "train.steps", limit * epochs)
        settings.mapped("epochs", f"train.steps: {limit * epochs}")
        if epochs > 1:
            settings.mistake(
                "max_steps_per_epoch",
                f"each of the {epochs} epochs stops after {limit} steps: the same samples may be seen again, others "
                "never",
                f"train.steps: {limit * epochs}, one pass that goes on",
            )
    precision = "fp8" if settings.get("enable_fp8_training") else settings.get("dtype", "bf16")
    settings.take("dtype", "train.precision", precision)
    for key in ("enable_fp8_training", "fp8_recipe_name"):
        settings.mapped(key, f"train.precision: {precision}")
    for key, usual in {"lr": None, **_ADAMW_DEFAULTS}.items():
        value = settings.get(f"optimizer.{key}", usual)
        settings.take(f"optimizer.{key}", f"train.optimizer.{key}", _to_float(value))
    component = settings.get("optimizer._component_", "torch.optim.AdamW")
    if component != "torch.optim.AdamW":
        settings.ask(f"the optimiser is {component}: a recipe has AdamW only")
    clip = settings.get("clip_grad_norm")
    settings.take("clip_grad_norm", "train.optimizer.clip", None if clip is None else float(clip))
    _read_schedule(settings, lora=lora)
    seed = settings.get("seed")
    if seed is None:
        settings.mistake(
            "seed",
            "seed: null draws another seed for every start: a restart shuffles the data anew",
            "a number; the recipe has 1234",
        )
    settings.take("seed", "seed", 1234 if seed is None else seed)
    settings.write("data.seed", settings.recipe["seed"])


def _read_schedule(settings: ConfigImport, *, lora: bool) -> None:
    component = settings.get("lr_scheduler._component_")
    if component == COSINE_SCHEDULER:
        settings.take("lr_scheduler._component_", "train.schedule.name", "cosine")
        warmup = settings.get("lr_scheduler.num_warmup_steps", 0)
        settings.take("lr_scheduler.num_warmup_steps", "train.schedule.warmup", warmup)
    elif component is not None:
        settings.ask(f"the schedule is {component}, which a recipe has no word for: it is written as constant")
        settings.drop_section("lr_scheduler", "a recipe has no word for it")
    elif lora:
        settings.ask("the file has no lr_scheduler, which torchtune's LoRA recipe asks for: it is written as constant")


def _read_layout(settings: ConfigImport, gpus: int | None) -> None:
    tp, micro_batch = settings.get("tensor_parallel_dim", 1), settings.get("batch_size", 1)
    accumulation = settings.get("gradient_accumulation_steps", 1)
    dp = gpus // tp if gpus else 1
    settings.take("tensor_parallel_dim", "layout.tp", tp)
    if (cp := settings.get("context_parallel_dim", 1)) > 1:
        settings.ask(f"context_parallel_dim is {cp}, which the layouts of engine torchtune do not have")
    settings.drop("context_parallel_dim", "the layouts of engine torchtune do not have it")
    settings.write("layout.shard", "full")
    settings.take("batch_size", "layout.micro_batch", micro_batch)
    recompute = "full" if settings.get("enable_activation_checkpointing") else "none"
    settings.take("enable_activation_checkpointing", "layout.recompute", recompute)
    replicas = settings.get("data_parallel_replicate_dim", 1)
    settings.mapped("data_parallel_replicate_dim", f"layout.replicate: {replicas}")
    if replicas != 1:
        settings.write("layout.replicate", replicas)
    settings.take("gradient_accumulation_steps", "train.global_batch", micro_batch * accumulation * dp)
    if gpus is None:
        settings.ask(
            f"the file does not say how many GPUs: train.global_batch is batch_size {micro_batch} · "
            f"gradient_accumulation_steps {accumulation} for one replica (tp {tp}); write it times GPUs / {tp}, "
            "or import with --gpus N"
        )
    elif gpus % tp:
        settings.mistake("tensor_parallel_dim", f"{tp} does not divide {gpus} GPUs", f"a divisor of {gpus}")
    if accumulation > 1 and settings.get("optimizer_in_bwd"):
        settings.mistake(
            "optimizer_in_bwd", "updates in the backward pass do not work with gradient accumulation", "false"
        )


def _read_checkpoints(settings: ConfigImport) -> None:
    settings.take("save_every_n_steps", "checkpoint.every", settings.get("save_every_n_steps"))
    keep = settings.get("checkpointer.keep_last_n_checkpoints")
    settings.take("checkpointer.keep_last_n_checkpoints", "checkpoint.keep", keep)
    settings.take("enable_async_checkpointing", "checkpoint.async", False)
    settings.write("checkpoint.resume", "auto")
    settings.mapped("resume_from_checkpoint", "checkpoint.resume: auto")
    if not settings.get("resume_from_checkpoint"):
        settings.mistake(
            "resume_from_checkpoint",
            "a restart begins at the first step again, whatever checkpoints there are",
            "checkpoint.resume: auto, which the recipe has",
        )
    if settings.get("profiler.enabled"):
        start = settings.get("profiler.wait_steps", 0) + settings.get("profiler.warmup_steps", 0)
        settings.take(
            "profiler.enabled", "observe.profile", {"start": start, "steps": settings.get("profiler.active_steps", 1)}
        )
    why = "observe.profile says it" if settings.get("profiler.enabled") else "the profiler is off"
    settings.mapped("profiler._component_", "written by Trainshed in any case")
    settings.drop_section("profiler", why)


def _drop_paths(settings: ConfigImport) -> None:
    if str(settings.get("metric_logger._component_", "")).endswith(".TensorBoardLogger"):
        settings.take("metric_logger._component_", "observe.tensorboard", True)
    settings.mapped("metric_logger._component_", "written by Trainshed in any case")
    for key in ("output_dir", "checkpointer.output_dir", "metric_logger.log_dir", "checkpointer.recipe_checkpoint"):
        settings.drop(key, _PLACES_REASON)
    written = [value for value in settings.written.values() if isinstance(value, str)]
    for key in settings.left():
        if "." not in key and any(f"${{{key}}}" in value for value in written):
            settings.drop(key, "is only referred to by others")


def _note_mistakes(settings: ConfigImport) -> None:
    if "checkpoint_dir" in settings:
        settings.mistake(
            "checkpoint_dir",
            "a top-level checkpoint_dir is read by nobody: the weights are those of checkpointer.checkpoint_dir",
            "checkpointer.checkpoint_dir, here model.from",
        )
    if settings.get("tensor_parallel_dim", 1) > 1 and settings.get("optimizer.fused"):
        settings.mistake("optimizer.fused", "the fused AdamW does not work with tensor parallel", "fused: False")


def _to_float(value: Any) -> Any:
    return [float(item) for item in value] if isinstance(value, list) else float(value)


_BUILT_IN_DATASETS = {
    "torchtune.datasets.alpaca_dataset": "tatsu-lab/alpaca",
    "torchtune.datasets.alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
}
"""Datasets of the Hub that a component stands for."""
_TRAINS_ON_PROMPTS = tuple(_BUILT_IN_DATASETS)
_FILE_READERS = ("json", "parquet", "csv")
_SPLIT_PATTERN = re.compile(r"^train\[:(\d+)%\]$")
_SEQUENCE_LENGTH = 8192


def read_data(settings: ConfigImport) -> None:
    """Write `data`; what form the conversations have stays in `engine.args`."""
    _read_length(settings)
    component = settings.get("dataset._component_", "")
    if component not in DATASET_COMPONENTS:
        settings.ask(
            f"the dataset is {component or 'not named'}, which is not read here: write its form as engine.args"
        )
    settings.write("data.train", [{"path": _data_path(settings, component)}])
    share = _SPLIT_PATTERN.match(settings.get("dataset.split", "train"))
    every = settings.get("run_val_every_n_steps")
    if share and every:
        part = round(int(share[1]) / 100, 2)
        settings.write("data.split", {"train": part, "validation": round(1 - part, 2)})
    elif share:
        # Nothing is validated, yet what was kept apart stays apart.
        part = round(int(share[1]) / 100, 2)
        settings.write("data.split", {"train": part, "test": round(1 - part, 2)})
    if "split" in settings.recipe["data"]:
        settings.mapped("dataset.split", f"data.split.train: {settings.recipe['data']['split']['train']}")
    if every:
        settings.take("run_val_every_n_steps", "data.validation.every", every)
    settings.drop("run_val_every_n_steps", "nothing is validated")
    settings.drop("dataset.split", "the whole of it")
    on_prompts = settings.get("dataset.train_on_input", component in _TRAINS_ON_PROMPTS)
    if on_prompts:
        settings.mistake(
            "dataset.train_on_input" if "dataset.train_on_input" in settings else "dataset._component_",
            "the loss is taken on prompts too (train_on_input is true unless said otherwise)",
            "nothing to write: train.mode: finetune takes it on the answers only",
        )
    settings.mapped("dataset.train_on_input", "train.mode: finetune")
    if not every and "dataset_val._component_" in settings:
        settings.mistake(
            "run_val_every_n_steps" if "run_val_every_n_steps" in settings else "dataset_val",
            "dataset_val is set up and never measured: run_val_every_n_steps is null",
            "data.validation.every, and validation instead of test in data.split",
        )
    settings.drop_section("dataset_val", "follows data.validation" if every else "nothing is validated")
    if not every:
        settings.drop("batch_size_val", "nothing is validated")


def _read_length(settings: ConfigImport) -> None:
    length = settings.get("tokenizer.max_seq_len")
    if length is None:
        settings.ask(
            f"tokenizer.max_seq_len is null, so that no sample is cut: data.sequence_length is written as "
            f"{_SEQUENCE_LENGTH}; write the longest you want"
        )
    settings.take("tokenizer.max_seq_len", "data.sequence_length", length or _SEQUENCE_LENGTH)


def _data_path(settings: ConfigImport, component: str) -> Any:
    source, files = (
        settings.get("dataset.source") or _BUILT_IN_DATASETS.get(component),
        settings.get("dataset.data_files"),
    )
    settings.mapped("dataset.source", "data.train.path")
    settings.mapped("dataset.data_files", "data.train.path")
    if source in _FILE_READERS and files:
        return files
    if source is None:
        settings.ask("the file names no data: write data.train: [{path: hf://datasets/org/name}]")
        return f"{HUB_DATASETS}org/name"
    revision = settings.get("dataset.revision")
    settings.mapped("dataset.revision", "data.train.path")
    if revision is None:
        settings.ask(f"no revision is named: pin the data, data.train.0.path: {HUB_DATASETS}{source}@<commit>")
    return f"{HUB_DATASETS}{source}" + (f"@{revision}" if revision else "") + (f"/{files}" if files else "")
