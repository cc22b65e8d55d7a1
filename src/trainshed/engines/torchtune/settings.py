"""A task in the words of torchtune: every key that recipe, plan or cluster decides, and those written in any case."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainshed.engines.engine_arguments import KnownKeys, Setting
from trainshed.engines.foreign import EngineTask
from trainshed.engines.torchtune.builders import Builder
from trainshed.engines.torchtune.datasets import dataset_settings
from trainshed.recipe import Lora

KNOWN = KnownKeys("torchtune 0.7.0", Path(__file__).with_name("keys-0.7.0.yaml"))
MLP = ("gate_proj", "up_proj", "down_proj")
"""torchtune adapts all three of a feed-forward block or none."""
ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
"""Our names of the attention's projections to torchtune's."""
COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
_LOGGERS = "torchtune.training.metric_logging"
_WARMUP_OF_PROFILER = 3


def fixed_settings(*, lora: bool, tied: bool = False) -> dict[str, Any]:
    """Return what is written whatever the recipe says: the values of ml-cookbook's Slurm recipe."""
    values: dict[str, Any] = {
        "dataset.packed": False,
        "shuffle": True,
        "loss._component_": "torchtune.modules.loss.LinearCrossEntropyLoss",
        "device": "cuda",
        "enable_activation_offloading": False,
        "compile": not lora,
        "log_every_n_steps": 1,
        "log_peak_memory_stats": True,
        "log_level": "INFO",
        "profiler._component_": "torchtune.training.setup_torch_profiler",
    }
    if lora:
        return values | {"save_adapter_weights_only": True, "model.apply_lora_to_output": False}
    # Large vocabularies are sharded apart from the layers; a tied head is no layer of its own.
    sharded = ["tok_embeddings"] if tied else ["tok_embeddings", "output"]
    return values | {"custom_sharded_layers": sharded, "fsdp_cpu_offload": False, "optimizer_in_bwd": False}


def task_settings(task: EngineTask, builder: Builder) -> list[Setting]:
    """Return what recipe, plan and cluster decide."""
    return [
        *_model(task, builder),
        *_places(task, builder),
        *dataset_settings(task.recipe),
        *_training(task),
        *_layout(task, builder),
        *_profile(task),
    ]


def _model(task: EngineTask, builder: Builder) -> Iterator[Setting]:
    lora = task.recipe.train.lora
    yield Setting("model._component_", builder.component(lora=lora is not None), "model")
    yield Setting("checkpointer.model_type", builder.family.model_type, "model")
    if lora is not None:
        yield from _adapter(lora)


def _adapter(lora: Lora) -> Iterator[Setting]:
    modules = [theirs for ours, theirs in ATTENTION.items() if ours in lora.targets]
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    yield Setting("model.lora_attn_modules", modules, "train.lora.targets")
    yield Setting("model.apply_lora_to_mlp", all(name in lora.targets for name in MLP), "train.lora.targets")
    yield Setting("model.lora_rank", lora.rank, "train.lora.rank")
    yield Setting("model.lora_alpha", alpha, "train.lora.alpha")
    yield Setting("model.lora_dropout", lora.dropout, "train.lora.dropout")


def _places(task: EngineTask, builder: Builder) -> Iterator[Setting]:
    run, engine, store = task.place.run, task.place.engine, "the cluster's store"
    tokenizer, length = f"{engine}/tokenizer", task.recipe.data.sequence_length
    names = {"tiktoken": "original/tokenizer.model", "sentencepiece": "tokenizer.model", "vocabulary": "vocab.json"}
    yield Setting("output_dir", f"{run}/checkpoints", store)
    yield Setting("tokenizer._component_", builder.family.tokenizer, "tokenizer")
    yield Setting("tokenizer.path", f"{tokenizer}/{names[builder.family.files]}", "tokenizer")
    if builder.family.files == "vocabulary":
        yield Setting("tokenizer.merges_file", f"{tokenizer}/merges.txt", "tokenizer")
    yield Setting("tokenizer.max_seq_len", length, "data.sequence_length")
    yield Setting("checkpointer._component_", "torchtune.training.FullModelHFCheckpointer", "checkpoint")
    yield Setting("checkpointer.checkpoint_dir", f"{engine}/base", "model.from")
    yield Setting("checkpointer.output_dir", f"{run}/checkpoints", store)
    yield Setting("checkpointer.keep_last_n_checkpoints", task.recipe.checkpoint.keep, "checkpoint.keep")
    yield Setting("save_every_n_steps", task.recipe.checkpoint.every, "checkpoint.every")
    # It has one logger. Its own text is what `trainshed` reads.
    tensorboard = bool(task.recipe.observe.tensorboard)
    logger = "TensorBoardLogger" if tensorboard else "DiskLogger"
    yield Setting("metric_logger._component_", f"{_LOGGERS}.{logger}", "observe.tensorboard")
    yield Setting("metric_logger.log_dir", f"{run}/{'tensorboard' if tensorboard else 'torchtune'}", store)


def _training(task: EngineTask) -> Iterator[Setting]:
    train = task.recipe.train
    optimizer, schedule = train.optimizer, train.schedule
    whole = train.epochs is not None and train.epochs.is_integer()
    yield Setting("seed", task.recipe.seed, "seed")
    yield Setting("epochs", int(train.epochs) if whole and train.epochs else 1, "train.epochs")
    yield Setting("max_steps_per_epoch", None if whole else task.steps, "train.steps")
    yield Setting("dtype", "fp32" if train.precision == "fp32" else "bf16", "train.precision")
    if train.precision == "fp8":
        yield Setting("enable_fp8_training", True, "train.precision")
        yield Setting("fp8_recipe_name", "tensorwise", "train.precision")
    yield Setting("optimizer._component_", "torch.optim.AdamW", "train.optimizer.name")
    yield Setting("optimizer.lr", optimizer.lr, "train.optimizer.lr")
    yield Setting("optimizer.betas", list(optimizer.betas), "train.optimizer.betas")
    yield Setting("optimizer.eps", optimizer.eps, "train.optimizer.eps")
    yield Setting("optimizer.weight_decay", optimizer.weight_decay, "train.optimizer.weight_decay")
    # PyTorch's fused AdamW does not take the DTensors of tensor parallel beside plain ones.
    yield Setting("optimizer.fused", task.layout.tp == 1, "layout.tp")
    yield Setting("clip_grad_norm", optimizer.clip, "train.optimizer.clip")
    if schedule.name == "cosine":
        yield Setting("lr_scheduler._component_", COSINE, "train.schedule.name")
        yield Setting("lr_scheduler.num_warmup_steps", schedule.warmup, "train.schedule.warmup")


def _layout(task: EngineTask, builder: Builder) -> Iterator[Setting]:
    layout, batch = task.layout, task.recipe.train.global_batch
    yield Setting("batch_size", layout.micro_batch, "layout.micro_batch")
    yield Setting("gradient_accumulation_steps", layout.micro_batches(batch), "train.global_batch")
    yield Setting("enable_activation_checkpointing", layout.recompute == "full", "layout.recompute")
    if task.recipe.data.validation is not None:
        yield Setting("batch_size_val", layout.micro_batch, "layout.micro_batch")
    if task.recipe.train.lora is not None:
        return
    yield Setting("tensor_parallel_dim", layout.tp, "layout.tp")
    if layout.tp > 1:
        yield Setting("tensor_parallel_plan._component_", builder.family.tp_plan, "layout.tp")
    yield Setting("data_parallel_shard_dim", layout.dp, "layout.dp")
    yield Setting("data_parallel_replicate_dim", 1, "layout.replicate")


def _profile(task: EngineTask) -> Iterator[Setting]:
    profile = task.recipe.observe.profile
    yield Setting("profiler.enabled", profile is not None, "observe.profile")
    if profile is None:
        return
    warmup = min(_WARMUP_OF_PROFILER, profile.steps_before)
    yield Setting("profiler.output_dir", f"{task.place.run}/profiles", "the cluster's store")
    yield Setting("profiler.wait_steps", profile.steps_before - warmup, "observe.profile.start")
    yield Setting("profiler.warmup_steps", warmup, "observe.profile.start")
    yield Setting("profiler.active_steps", profile.steps, "observe.profile.steps")
    yield Setting("profiler.num_cycles", 1, "observe.profile")
