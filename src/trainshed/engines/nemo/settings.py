"""A task in the words of NeMo 24.07: every key that recipe, plan or cluster decides, with who decides it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainshed.engines.config_tree import flatten
from trainshed.engines.engine_arguments import KnownKeys, Setting
from trainshed.engines.foreign import EngineTask
from trainshed.engines.nemo.architecture import architecture_settings
from trainshed.recipe import MoeLosses, Recipe, Schedule
from trainshed.recipe.yaml_source import parse

_FIXED_FILE = Path(__file__).with_name("fixed-24.07.yaml")
KNOWN = KnownKeys("NeMo 24.07", Path(__file__).with_name("keys-24.07.yaml"))
GPT2 = "gpt2"
"""The Hub's name of the tokenizer that NeMo has a class of its own for."""
_RECOMPUTE = {
    "none": (None, None, None),
    "selective": ("selective", None, None),
    "full": ("full", "uniform", 1),  # groups of one layer: every layer is computed again
}


def fixed_settings() -> dict[str, Any]:
    """Return what is written whatever the recipe says, by dotted key."""
    return flatten(parse(_FIXED_FILE.read_text(encoding="utf-8"), _FIXED_FILE.name).value)


def task_settings(task: EngineTask) -> list[Setting]:
    """Return what recipe, plan and cluster decide; places are in `place_settings`."""
    return [
        *_trainer(task),
        *_experiment(task),
        *_layout(task),
        *architecture_settings(task.config),
        *_losses(task),
        *_optimisation(task),
        *_data(task),
    ]


def place_settings(task: EngineTask) -> list[Setting]:
    """Return what hangs on where the job runs: given as overrides, so that the file is the same everywhere."""
    place, store = task.place, "the cluster's store"
    settings = [
        Setting("trainer.num_nodes", place.nodes, "the number of nodes"),
        Setting("exp_manager.name", task.recipe.name, "name"),
        Setting("exp_manager.explicit_log_dir", f"{place.run}/nemo", store),
        Setting("exp_manager.checkpoint_callback_params.dirpath", f"{place.run}/checkpoints", store),
        Setting("model.data.index_mapping_dir", f"{place.engine}/index", store),
    ]
    if task.recipe.observe.dllogger is not False:
        log = f"{place.run}/dllogger/rank-0/dllogger.json"
        settings.append(Setting("exp_manager.dllogger_logger_kwargs.json_file", log, store))
    folder = f"{place.engine}/tokenizer"
    if is_gpt2(task.recipe):
        settings.append(Setting("model.tokenizer.vocab_file", f"{folder}/vocab.json", "tokenizer"))
        settings.append(Setting("model.tokenizer.merge_file", f"{folder}/merges.txt", "tokenizer"))
    else:
        settings.append(Setting("model.tokenizer.type", folder, "tokenizer"))
    return settings


def is_gpt2(recipe: Recipe) -> bool:
    """Whether the recipe's tokenizer is GPT-2's own."""
    name = recipe.tokenizer if isinstance(recipe.tokenizer, str) else ""
    return name.startswith("hf://") and name.rpartition("/")[2].partition("@")[0] == GPT2


def _trainer(task: EngineTask) -> Iterator[Setting]:
    recipe, validation = task.recipe, task.recipe.data.validation
    clip = recipe.train.optimizer.clip
    yield Setting("trainer.devices", task.place.gpus_per_node, "the cluster's machine")
    yield Setting("trainer.precision", "bf16", "train.precision")
    yield Setting("trainer.max_steps", task.steps, "train.steps")
    yield Setting("trainer.val_check_interval", validation.every if validation else None, "data.validation.every")
    # Not validating is a float 0.0: NeMo counts an integer as batches and a float as a share.
    batches = validation.batches if validation else 0.0
    yield Setting("trainer.limit_val_batches", batches, "data.validation.batches")
    tested = validation.batches if validation and recipe.data.split and recipe.data.split.test else 0
    yield Setting("trainer.limit_test_batches", tested, "data.split.test")
    # megatron-core compares the number: 0.0 and not null is no clipping.
    yield Setting("trainer.gradient_clip_val", clip or 0.0, "train.optimizer.clip")


def _experiment(task: EngineTask) -> Iterator[Setting]:
    recipe, saving = task.recipe, task.recipe.checkpoint
    callback = "exp_manager.checkpoint_callback_params"
    yield Setting(
        "exp_manager.create_tensorboard_logger", recipe.observe.tensorboard is not False, "observe.tensorboard"
    )
    yield Setting("exp_manager.create_dllogger_logger", recipe.observe.dllogger is not False, "observe.dllogger")
    yield Setting("exp_manager.resume_if_exists", saving.resume != "fresh", "checkpoint.resume")
    yield Setting("exp_manager.resume_ignore_no_checkpoint", saving.resume != "must", "checkpoint.resume")
    yield Setting("exp_manager.create_checkpoint_callback", True, "checkpoint")
    yield Setting(f"{callback}.every_n_train_steps", saving.every, "checkpoint.every")
    yield Setting(f"{callback}.save_top_k", saving.keep or -1, "checkpoint.keep")
    yield Setting(f"{callback}.async_save", saving.async_, "checkpoint.async")
    yield Setting(f"{callback}.model_parallel_size", task.layout.tp * task.layout.pp, "layout")


def _layout(task: EngineTask) -> Iterator[Setting]:
    layout, train = task.layout, task.recipe.train
    ramp = train.batch_ramp
    interleaved = layout.vp > 1
    granularity, method, layers = _RECOMPUTE[layout.recompute]
    yield Setting("model.micro_batch_size", layout.micro_batch, "layout.micro_batch")
    yield Setting("model.global_batch_size", train.global_batch, "train.global_batch")
    ramped = [ramp.start, ramp.increment, ramp.samples] if ramp else None
    yield Setting("model.rampup_batch_size", ramped, "train.batch_ramp")
    yield Setting("model.tensor_model_parallel_size", layout.tp, "layout.tp")
    yield Setting("model.pipeline_model_parallel_size", layout.pp, "layout.pp")
    yield Setting("model.virtual_pipeline_model_parallel_size", layout.vp if interleaved else None, "layout.vp")
    yield Setting("model.context_parallel_size", layout.cp, "layout.cp")
    yield Setting("model.expert_model_parallel_size", layout.ep, "layout.ep")
    yield Setting("model.sequence_parallel", layout.tp > 1, "layout.tp")
    yield Setting("model.overlap_p2p_comm", interleaved, "layout.vp")
    yield Setting("model.batch_p2p_comm", not interleaved, "layout.vp")
    yield Setting("model.activations_checkpoint_granularity", granularity, "layout.recompute")
    yield Setting("model.activations_checkpoint_method", method, "layout.recompute")
    yield Setting("model.activations_checkpoint_num_layers", layers, "layout.recompute")


def _losses(task: EngineTask) -> Iterator[Setting]:
    train, fp8 = task.recipe.train, task.recipe.train.precision == "fp8"
    yield Setting("model.precision", "bf16", "train.precision")
    yield Setting("model.fp8", fp8, "train.precision")
    yield Setting("model.fp8_hybrid", fp8, "train.precision")
    yield Setting("model.hidden_dropout", train.dropout, "train.dropout")
    yield Setting("model.attention_dropout", train.dropout, "train.dropout")
    yield Setting("model.seed", task.recipe.seed, "seed")
    if task.place.sharp:
        yield Setting("model.sharp", True, "the cluster's sharp")
    if task.config.moe is not None:
        losses = train.moe or MoeLosses()
        yield Setting("model.moe_router_load_balancing_type", "aux_loss", "train.moe")
        yield Setting("model.moe_aux_loss_coeff", losses.balance_loss, "train.moe.balance_loss")
        yield Setting("model.moe_z_loss_coeff", losses.z_loss or None, "train.moe.z_loss")
        yield Setting("model.moe_grouped_gemm", True, "model")
        yield Setting("model.moe_token_dispatcher_type", "alltoall", "model")
    if (profile := task.recipe.observe.profile) is not None:
        yield Setting("model.nsys_profile.enabled", True, "observe.profile")
        yield Setting("model.nsys_profile.start_step", profile.steps_before, "observe.profile.start")
        yield Setting("model.nsys_profile.end_step", profile.steps_before + profile.steps - 1, "observe.profile.steps")
        yield Setting("model.nsys_profile.ranks", list(profile.ranks), "observe.profile.ranks")


def _optimisation(task: EngineTask) -> Iterator[Setting]:
    optimizer = task.recipe.train.optimizer
    yield Setting("model.optim.name", "mcore_distributed_optim", "layout.shard")
    yield Setting("model.optim.lr", optimizer.lr, "train.optimizer.lr")
    yield Setting("model.optim.weight_decay", optimizer.weight_decay, "train.optimizer.weight_decay")
    yield Setting("model.optim.betas", list(optimizer.betas), "train.optimizer.betas")
    yield Setting("model.optim.check_for_nan_in_grad", True, "train.non_finite")
    for key, value in _schedule(task.recipe.train.schedule, task.steps).items():
        yield Setting(f"model.optim.sched.{key}", value, "train.schedule")


def _schedule(schedule: Schedule, steps: int) -> dict[str, Any]:
    """Each of NeMo's schedules ends at `max_steps`, which is the run's end where it is not given."""
    keys: dict[str, Any] = {"warmup_steps": schedule.warmup, "min_lr": schedule.min_lr}
    if schedule.name == "constant":
        return {"name": "WarmupPolicy", **keys}
    if schedule.name == "wsd":
        assert schedule.decay is not None, "the schema asks for it"
        held = max(0, steps - schedule.decay - schedule.warmup)
        return {"name": "PolynomialHoldDecayAnnealing", **keys, "hold_steps": held, "power": 1.0}
    end = {} if schedule.decay is None else {"max_steps": schedule.decay}
    if schedule.name == "linear":
        return {"name": "WarmupAnnealing", **keys, **end}
    return {"name": "CosineAnnealing", **keys, "constant_steps": 0, **end}


def _data(task: EngineTask) -> Iterator[Setting]:
    data = task.recipe.data
    length = data.sequence_length or task.config.max_positions
    yield Setting("model.encoder_seq_length", length, "data.sequence_length")
    yield Setting("model.data.seq_length", length, "data.sequence_length")
    yield Setting("model.data.data_impl", "mock" if data.synthetic else "mmap", "data.synthetic")
    yield Setting("model.data.splits_string", split_text(task.recipe), "data.split")
    if data.synthetic:
        yield Setting("model.data.data_prefix", [], "data.synthetic")
    if is_gpt2(task.recipe):
        yield Setting("model.tokenizer.library", "megatron", "tokenizer")
        yield Setting("model.tokenizer.type", "GPT2BPETokenizer", "tokenizer")
    else:
        yield Setting("model.tokenizer.library", "huggingface", "tokenizer")
        yield Setting("model.tokenizer.use_fast", True, "tokenizer")
    yield Setting("model.tokenizer.model", None, "tokenizer")
    yield Setting("model.tokenizer.delimiter", None, "tokenizer")


def split_text(recipe: Recipe) -> str | None:
    """Return the parts of one corpus; None where validation has documents of its own and prefixes are by split."""
    split = recipe.data.split
    if split is None:
        own = recipe.data.validation is not None and recipe.data.validation.kind is not None
        return None if own else "100,0,0"
    return ",".join(f"{100 * part:g}" for part in (split.train, split.validation, split.test))
