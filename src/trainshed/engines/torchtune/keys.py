"""torchtune's keys, each once: the table by which its configurations are written and read."""

from __future__ import annotations

import math
from functools import partial
from operator import index
from typing import Any

from trainshed.catalog import model_preset
from trainshed.engines.importing import ConfigImport
from trainshed.engines.key_table import (
    COMMON_UNSAID,
    OMIT,
    REFUSED,
    WRITTEN_ANYWAY,
    KeyRow,
    KeyTable,
    choice,
    follows,
    not_read,
    recipe_value,
    same,
    to_floats,
)
from trainshed.engines.keys import format_value
from trainshed.engines.launch import EngineTask
from trainshed.engines.profiles import profiles, task_profile
from trainshed.engines.torchtune.adapters import ADAPTER_ROWS, has_adapters, read_saving, trains_adapters
from trainshed.engines.torchtune.builders import config_builder, read_base, render_tokenizer_files, task_builder
from trainshed.engines.torchtune.dataset import (
    COMPONENTS,
    FOLLOWS_VALIDATION,
    dataset_keys,
    read_format,
    read_shares,
    read_system,
    read_train_on,
    read_training_data,
    read_validation,
    render_source,
    render_validation_source,
    split_text,
    validates,
)
from trainshed.engines.torchtune.versions import SOURCE_VERSION, VERSIONS, torchtune_version
from trainshed.run_folder import PROFILE

_FROM_SOURCE = (SOURCE_VERSION,)
"""Rows of keys that only torchtune's last state reads."""
_STORE = "the cluster's store"
_PLACES = "folders come from the cluster file"


def _trains_weights(task: EngineTask) -> bool:
    return task.recipe.train.lora is None


_SEQUENCE_LENGTH = 8192


def _read_length(config: ConfigImport) -> int:
    length = config.get("tokenizer.max_seq_len")
    if length is None:
        config.ask(
            f"tokenizer.max_seq_len is null, so that no sample is cut: data.sequence_length is written as "
            f"{_SEQUENCE_LENGTH}; write the longest you want"
        )
    return length or _SEQUENCE_LENGTH


_LOGGERS = "torchtune.training.metric_logging"


def _writes_tensorboard(task: EngineTask) -> bool:
    # It has one logger. Its own text is what `trainshed` reads.
    return bool(task.recipe.observe.tensorboard)


def _read_logger(config: ConfigImport) -> Any:
    if str(config.get("metric_logger._component_", "")).endswith(".TensorBoardLogger"):
        return True
    config.note_mapped(WRITTEN_ANYWAY, "metric_logger._component_")
    return OMIT


def _read_seed(config: ConfigImport) -> int:
    seed = config.get("seed")
    if seed is None:
        config.add_mistake(
            "seed",
            "seed: null draws another seed for every start: a restart shuffles the data anew",
            "a number; the recipe has 1234",
        )
        return 1234
    return seed


def _epochs(task: EngineTask) -> int:
    """Return the passes over the data; a last one that is not whole is cut when the job has counted the data."""
    epochs = task.recipe.train.epochs
    return 1 if epochs is None else math.ceil(epochs)


def _read_epochs(config: ConfigImport) -> Any:
    epochs, limit = config.get("epochs", 1), config.get("max_steps_per_epoch")
    if limit is None:
        return float(epochs)
    config.note_mapped(f"train.steps: {limit * epochs}", "epochs")
    return OMIT


def _read_steps(config: ConfigImport) -> Any:
    epochs, limit = config.get("epochs", 1), config.get("max_steps_per_epoch")
    if limit is None:
        config.drop("says nothing", "max_steps_per_epoch")
        return OMIT
    if epochs > 1:
        config.add_mistake(
            "max_steps_per_epoch",
            f"each of the {epochs} epochs stops after {limit} steps: the same samples may be seen again, others never",
            f"train.steps: {limit * epochs}, one pass that goes on",
        )
    return limit * epochs


def _render_precision(task: EngineTask) -> dict[str, Any]:
    precision = task.recipe.train.precision
    values: dict[str, Any] = {"dtype": "fp32" if precision == "fp32" else "bf16"}
    return values | ({"enable_fp8_training": True, "fp8_recipe_name": "tensorwise"} if precision == "fp8" else {})


def _read_precision(config: ConfigImport) -> str:
    return "fp8" if config.get("enable_fp8_training") else config.get("dtype", "bf16")


def _read_optimizer(config: ConfigImport) -> Any:
    component = config.get("optimizer._component_", _ADAMW)
    if component != _ADAMW:
        config.ask(f"the optimiser is {component}: a recipe has AdamW only")
    return OMIT


_ADAMW = "torch.optim.AdamW"
_COSINE_SCHEDULER = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"


def _render_schedule(task: EngineTask) -> dict[str, Any]:
    schedule = task.recipe.train.schedule
    if schedule.name != "cosine":
        return {}
    return {"lr_scheduler._component_": _COSINE_SCHEDULER, "lr_scheduler.num_warmup_steps": schedule.warmup}


def _read_schedule(config: ConfigImport) -> Any:
    component = config.get("lr_scheduler._component_")
    if component == _COSINE_SCHEDULER:
        warmup = config.get("lr_scheduler.num_warmup_steps", 0)
        config.note_mapped("train.schedule.name: cosine", "lr_scheduler._component_")
        config.note_mapped(f"train.schedule.warmup: {warmup}", "lr_scheduler.num_warmup_steps")
        return {"name": "cosine", "warmup": warmup}
    if component is not None:
        config.ask(f"the schedule is {component}, which a recipe has no word for: it is written as constant")
        config.drop("a recipe has no word for it", "lr_scheduler.*")
    elif has_adapters(config):
        config.ask("the file has no lr_scheduler, which torchtune's LoRA recipe asks for: it is written as constant")
    return OMIT


def _whole_tp(tensor_parallel_dim: int) -> int:
    # ml-cookbook's README writes 0 for no tensor parallel, which torchtune itself fails at.
    return index(tensor_parallel_dim) or 1


def _read_global_batch(config: ConfigImport) -> int:
    """Return the global batch; torchtune counts the accumulation steps of one replica."""
    tp, micro_batch = _whole_tp(config.get("tensor_parallel_dim", 1)), config.get("batch_size", 1)
    accumulation = config.get("gradient_accumulation_steps", 1)
    if config.gpus is None:
        config.ask(
            f"the file does not say how many GPUs: train.global_batch is batch_size {micro_batch} · "
            f"gradient_accumulation_steps {accumulation} for one replica (tp {tp}); write it times GPUs / {tp}, "
            "or import with --gpus N"
        )
    elif config.gpus % tp:
        config.add_mistake(
            "tensor_parallel_dim", f"{tp} does not divide {config.gpus} GPUs", f"a divisor of {config.gpus}"
        )
    if accumulation > 1 and config.get("optimizer_in_bwd"):
        config.add_mistake(
            "optimizer_in_bwd", "updates in the backward pass do not work with gradient accumulation", "false"
        )
    return micro_batch * accumulation * (config.gpus // tp if config.gpus else 1)


def _read_context_parallel(config: ConfigImport) -> Any:
    if (cp := config.get("context_parallel_dim", 1)) > 1:
        config.ask(f"context_parallel_dim is {cp}, which the layouts of engine torchtune do not have")
    config.drop("the layouts of engine torchtune do not have it", "context_parallel_dim")
    return OMIT


def _read_resume(config: ConfigImport) -> str:
    if not config.get("resume_from_checkpoint"):
        config.add_mistake(
            "resume_from_checkpoint",
            "a restart begins at the first step again, whatever checkpoints there are",
            "checkpoint.resume: auto, which the recipe has",
        )
    return "auto"


def _profiler_steps(task: EngineTask) -> dict[str, int]:
    profile = task_profile(task)
    return {
        "profiler.wait_steps": profile.steps_before - profile.warmup_steps,
        "profiler.warmup_steps": profile.warmup_steps,
    }


_PROFILER_OPTIONS = {"memory": "profile_memory", "stacks": "with_stack", "shapes": "record_shapes"}


def _read_profiler(config: ConfigImport) -> Any:
    if not config.get("profiler.enabled"):
        config.note_mapped(WRITTEN_ANYWAY, "profiler._component_")
        config.drop("the profiler is off", "profiler.*")
        return OMIT
    # Steps are counted from 1 in a recipe: the first that is profiled comes after those it waits for.
    warmup = config.get("profiler.warmup_steps", 0)
    before = config.get("profiler.wait_steps", 0) + warmup
    profile = {"start": before + 1, "steps": config.get("profiler.active_steps", 1)}
    if warmup != min(1, before):
        profile["warmup"] = warmup
    if (cycles := config.get("profiler.num_cycles", 1)) > 1:
        profile["cycles"] = cycles
    # torchtune records shapes where nothing says otherwise.
    defaults = {"shapes": True}
    chosen = {
        key: True
        for key, theirs in _PROFILER_OPTIONS.items()
        if config.get(f"profiler.{theirs}", defaults.get(key, False))
    }
    profile |= chosen
    config.note_mapped(f"observe.profile: {format_value(profile)}", "profiler.enabled")
    config.note_mapped(WRITTEN_ANYWAY, "profiler._component_")
    config.drop("observe.profile says it", "profiler.*")
    return profile


def _tied(preset: str) -> bool:
    return model_preset(preset).tied_embeddings


def _sharded_layers(tied: bool) -> list[str]:
    # Large vocabularies are sharded apart from the layers; a tied head is not a layer of its own.
    return ["tok_embeddings"] if tied else ["tok_embeddings", "output"]


# What is written whatever the recipe says: the values of ml-cookbook's Slurm recipe.
_CHOSEN_ROWS = (
    choice("shuffle", True),
    *(choice("loss._component_", torchtune_version(name).loss, versions=(name,)) for name in VERSIONS),
    choice("device", "cuda"),
    KeyRow(
        ("compile",),
        "engine.args",
        lambda task: not trains_adapters(task),
        lambda config: not has_adapters(config),
        chosen=True,
    ),
    choice("log_every_n_steps", 1),
    choice("log_peak_memory_stats", True),
    choice("log_level", "INFO", versions=_FROM_SOURCE),
    choice("profiler._component_", "torchtune.training.setup_torch_profiler"),
    choice("save_adapter_weights_only", True, when=trains_adapters),
    choice("model.apply_lora_to_output", False, when=trains_adapters),
    KeyRow(
        ("custom_sharded_layers",),
        "engine.args",
        lambda task: _sharded_layers(task.config.tied_embeddings),
        lambda config: _sharded_layers(_tied(config_builder(config).preset)),
        chosen=True,
        when=_trains_weights,
    ),
    choice("fsdp_cpu_offload", False, when=_trains_weights),
    choice("optimizer_in_bwd", False, when=_trains_weights),
)

TORCHTUNE_TABLE = KeyTable(
    rows=(
        KeyRow(
            ("model._component_",),
            "model.preset",
            lambda task: task_builder(task).component(lora=trains_adapters(task)),
            lambda config: config_builder(config).preset,
            decided_by="model",
        ),
        follows("checkpointer.model_type", "model", lambda task: task_builder(task).family.model_type, "follows model"),
        *ADAPTER_ROWS,
        KeyRow(("output_dir",), _STORE, lambda task: f"{task.site.run_folder}/checkpoints", drop=_PLACES),
        KeyRow(
            ("tokenizer._component_",),
            "tokenizer",
            lambda task: task_builder(task).family.tokenizer,
            lambda config: config.recipe["model"]["from"],
        ),
        KeyRow(
            ("tokenizer.path", "tokenizer.merges_file"),
            "tokenizer",
            render_tokenizer_files,
            drop="files come with the tokenizer's address",
        ),
        KeyRow(
            ("tokenizer.max_seq_len",),
            "data.sequence_length",
            lambda task: task.recipe.data.sequence_length,
            _read_length,
        ),
        follows(
            "checkpointer._component_",
            "checkpoint",
            lambda task: "torchtune.training.FullModelHFCheckpointer",
            WRITTEN_ANYWAY,
        ),
        KeyRow(
            ("checkpointer.checkpoint_dir",), "model.from", lambda task: f"{task.site.input_folder}/base", read_base
        ),
        KeyRow(("checkpointer.output_dir",), _STORE, lambda task: f"{task.site.run_folder}/checkpoints", drop=_PLACES),
        same("checkpointer.keep_last_n_checkpoints", "checkpoint.keep", versions=_FROM_SOURCE),
        KeyRow(
            ("save_every_n_steps",),
            "checkpoint.every",
            lambda task: None if trains_adapters(task) else task.recipe.checkpoint.every,
            read_saving,
            versions=_FROM_SOURCE,
        ),
        KeyRow(
            ("metric_logger._component_",),
            "observe.tensorboard",
            lambda task: f"{_LOGGERS}.{'TensorBoardLogger' if _writes_tensorboard(task) else 'DiskLogger'}",
            _read_logger,
        ),
        KeyRow(
            ("metric_logger.log_dir",),
            _STORE,
            lambda task: f"{task.site.run_folder}/{'tensorboard' if _writes_tensorboard(task) else 'torchtune'}",
            drop=_PLACES,
        ),
        KeyRow(
            ("dataset._component_",), "data.format", lambda task: COMPONENTS[task.recipe.sample_format], read_format
        ),
        KeyRow(
            dataset_keys("dataset"),
            "data.train",
            lambda task: render_source("dataset", task.recipe, task.recipe.data.train[0]),
            read_training_data,
        ),
        # Always said: alpaca_dataset would train on prompts if not told.
        KeyRow(
            ("dataset.train_on_input",), "data.train_on", lambda task: task.recipe.data.train_on == "all", read_train_on
        ),
        KeyRow(
            ("dataset.new_system_prompt",),
            "data.system",
            lambda task: OMIT if task.recipe.data.system is None else task.recipe.data.system,
            read_system,
        ),
        same(
            "dataset.packed",
            "data.packing",
            default=False,
            unless=True,
            to_engine=lambda packing: packing is not False,
            to_recipe=bool,
        ),
        KeyRow((), "train.mode", read=lambda config: "finetune"),
        KeyRow(("dataset.split",), "data.split", lambda task: split_text(task.recipe.data, "train"), read_shares),
        KeyRow(
            ("run_val_every_n_steps",),
            "data.validation",
            lambda task: task.recipe.data.validation.every if task.recipe.data.validation else None,
            read_validation,
            decided_by="data.validation.every",
            versions=_FROM_SOURCE,
        ),
        KeyRow(
            ("dataset_val._component_",),
            "data.validation",
            lambda task: COMPONENTS[task.recipe.sample_format],
            drop=FOLLOWS_VALIDATION,
            decided_by="data.format",
            when=validates,
        ),
        KeyRow(
            dataset_keys("dataset_val"),
            "data.validation",
            render_validation_source,
            drop=FOLLOWS_VALIDATION,
            when=validates,
        ),
        KeyRow(
            ("dataset_val.train_on_input",),
            "data.validation",
            lambda task: task.recipe.data.train_on == "all",
            drop=FOLLOWS_VALIDATION,
            decided_by="data.train_on",
            when=validates,
        ),
        KeyRow(
            ("dataset_val.new_system_prompt",),
            "data.validation",
            lambda task: OMIT if task.recipe.data.system is None else task.recipe.data.system,
            drop=FOLLOWS_VALIDATION,
            decided_by="data.system",
            when=validates,
        ),
        KeyRow(
            ("dataset_val.split",),
            "data.validation",
            lambda task: split_text(task.recipe.data, "validation"),
            drop=FOLLOWS_VALIDATION,
            decided_by="data.split",
            when=validates,
        ),
        KeyRow(("seed",), "seed", lambda task: task.recipe.seed, _read_seed),
        KeyRow((), "data.seed", read=lambda config: config.recipe["seed"]),
        KeyRow(("epochs",), "train.epochs", _epochs, _read_epochs),
        KeyRow(
            ("max_steps_per_epoch",),
            "train.steps",
            lambda task: task.length if task.recipe.train.epochs is None else None,
            _read_steps,
        ),
        KeyRow(
            ("dtype", "enable_fp8_training", "fp8_recipe_name"), "train.precision", _render_precision, _read_precision
        ),
        KeyRow(
            ("optimizer._component_",),
            "train.optimizer.name",
            lambda task: _ADAMW,
            _read_optimizer,
            note="train.optimizer.name: adamw",
        ),
        # Defaults are torch.optim.AdamW's own.
        same("optimizer.lr", "train.optimizer.lr", to_recipe=to_floats),
        same("optimizer.betas", "train.optimizer.betas", default=[0.9, 0.999], to_recipe=to_floats),
        same("optimizer.eps", "train.optimizer.eps", default=1e-8, to_recipe=to_floats),
        same("optimizer.weight_decay", "train.optimizer.weight_decay", default=0.01, to_recipe=to_floats),
        # PyTorch's fused AdamW does not take the DTensors of tensor parallel beside plain ones.
        follows(
            "optimizer.fused",
            "layout.tp",
            lambda task: task.layout.tp == 1,
            "off with tp, which it does not work with",
        ),
        same("clip_grad_norm", "train.optimizer.clip", to_recipe=lambda clip: None if clip is None else float(clip)),
        KeyRow(
            ("lr_scheduler._component_", "lr_scheduler.num_warmup_steps"),
            "train.schedule",
            _render_schedule,
            _read_schedule,
        ),
        same("batch_size", "layout.micro_batch", default=1),
        KeyRow(
            ("gradient_accumulation_steps",),
            "train.global_batch",
            lambda task: task.layout.micro_batches(task.recipe.train.global_batch),
            _read_global_batch,
        ),
        same(
            "enable_activation_checkpointing",
            "layout.recompute",
            to_engine=lambda recompute: recompute == "full",
            to_recipe=lambda enabled: "full" if enabled else "none",
        ),
        same(
            "enable_activation_offloading",
            "layout.offload",
            to_engine=lambda offload: offload is not None,
            to_recipe=lambda enabled: "activations" if enabled else OMIT,
        ),
        follows(
            "batch_size_val",
            "layout.micro_batch",
            lambda task: task.layout.micro_batch,
            "follows layout.micro_batch",
            when=validates,
        ),
        same("tensor_parallel_dim", "layout.tp", default=1, to_recipe=_whole_tp, when=_trains_weights),
        follows(
            "tensor_parallel_plan._component_",
            "layout.tp",
            lambda task: task_builder(task).family.tp_plan if task.layout.tp > 1 else OMIT,
            "follows layout.tp",
            when=_trains_weights,
        ),
        follows(
            "data_parallel_shard_dim",
            "layout.dp",
            lambda task: task.layout.dp,
            "layout.dp: what tp leaves",
            when=_trains_weights,
            versions=_FROM_SOURCE,
        ),
        same(
            "data_parallel_replicate_dim",
            "layout.replicate",
            default=1,
            unless=1,
            when=_trains_weights,
            versions=_FROM_SOURCE,
        ),
        KeyRow(("profiler.enabled",), "observe.profile", profiles, _read_profiler),
        KeyRow(
            ("profiler.output_dir",),
            _STORE,
            lambda task: f"{task.site.run_folder}/{PROFILE}",
            drop=_PLACES,
            when=profiles,
        ),
        KeyRow(
            ("profiler.wait_steps", "profiler.warmup_steps"),
            "observe.profile.start",
            _profiler_steps,
            note="observe.profile",
            when=profiles,
        ),
        follows(
            "profiler.active_steps",
            "observe.profile.steps",
            lambda task: recipe_value(task, "observe.profile.steps"),
            "observe.profile",
            when=profiles,
        ),
        follows(
            "profiler.num_cycles",
            "observe.profile.cycles",
            lambda task: task_profile(task).cycles,
            "observe.profile",
            when=profiles,
        ),
        *(
            follows(
                f"profiler.{theirs}",
                f"observe.profile.{key}",
                partial(recipe_value, path=f"observe.profile.{key}"),
                "observe.profile",
                when=profiles,
            )
            for key, theirs in _PROFILER_OPTIONS.items()
        ),
        KeyRow(("resume_from_checkpoint",), "checkpoint.resume", read=_read_resume),
        KeyRow(("enable_async_checkpointing",), "checkpoint.async", read=lambda config: False),
        KeyRow((), "layout.shard", read=lambda config: "full"),
        KeyRow(("context_parallel_dim",), "layout.cp", read=_read_context_parallel),
        not_read(
            "the files are found when the job starts",
            "checkpointer.checkpoint_files",
            "checkpointer.checkpoint_files.*",
        ),
        not_read(_PLACES, "checkpointer.recipe_checkpoint"),
        *_CHOSEN_ROWS,
    ),
    read_order=(
        *("model.preset", "model.from", "tokenizer", "train.lora"),
        *("data.sequence_length", "data.format", "data.system", "data.train_on", "data.packing", "data.train"),
        *("data.split", "data.validation", "train.mode"),
        *("train.epochs", "train.steps", "train.precision", "train.optimizer", "train.schedule", "seed", "data.seed"),
        *(
            "layout.tp",
            "layout.cp",
            "layout.shard",
            "layout.micro_batch",
            "layout.recompute",
            "layout.offload",
            "layout.replicate",
            "train.global_batch",
        ),
        *("checkpoint.every", "checkpoint.keep", "checkpoint.async", "checkpoint.resume", "observe"),
    ),
    unsaid={
        **COMMON_UNSAID,
        "model.config": "a builder is named after the preset",
        "data.template": REFUSED,
        "data.thinking": "torchtune learns answers as they stand, and dropping traces is refused",
        "data.on_too_long": "torchtune truncates, and all else is refused",
        "data.document_mask": "torchtune keeps packed samples apart, as conversations always are",
        "train.optimizer.states": "they have the precision of the weights, and another is refused",
        "train.lora.rslora": REFUSED,
        **dict.fromkeys(
            (f"data.{key}" for key in ("synthetic", "shards", "eod", "bos", "on_bad_line")),
            "torchtune reads and tokenises text by itself",
        ),
        **dict.fromkeys((f"train.{key}" for key in ("batch_ramp", "moe", "dropout", "deterministic")), REFUSED),
        **dict.fromkeys((f"layout.{key}" for key in ("pp", "vp", "ep", "etp", "stages")), REFUSED),
        "observe.dllogger": REFUSED,
        "checkpoint.resume": "an argument of the program that starts torchtune",
    },
)
