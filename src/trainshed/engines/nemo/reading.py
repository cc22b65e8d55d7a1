"""A NeMo 24.07 file (`llama3-70b-fp8.yaml`) read as a recipe."""

from __future__ import annotations

import re
from typing import Any

from trainshed.engines.foreign_settings import ForeignSettings
from trainshed.engines.imported import Imported
from trainshed.engines.nemo.launching import HYDRA, IMAGES
from trainshed.engines.nemo.reading_data import read_data, read_tokenizer
from trainshed.engines.nemo.reading_model import read_model
from trainshed.engines.nemo.settings import KNOWN, fixed_settings
from trainshed.recipe.schema import LONGEST_NAME
from trainshed.recipe.yaml_source import parse

_LAYOUT = {
    "model.tensor_model_parallel_size": "tp",
    "model.pipeline_model_parallel_size": "pp",
    "model.virtual_pipeline_model_parallel_size": "vp",
    "model.context_parallel_size": "cp",
    "model.expert_model_parallel_size": "ep",
    "model.micro_batch_size": "micro_batch",
}
_FOLLOWS = {
    "model.sequence_parallel": "on with tp",
    "model.overlap_p2p_comm": "on with vp",
    "model.batch_p2p_comm": "off with vp",
    "model.fp8_hybrid": "follows train.precision",
    "model.precision": "follows train.precision",
    "exp_manager.checkpoint_callback_params.model_parallel_size": "tp · pp",
    "model.activations_checkpoint_method": "follows layout.recompute",
    "model.activations_checkpoint_num_layers": "follows layout.recompute",
    "model.data.data_impl": "follows data",
}
_PLACES = {
    "run": "belongs to NeMo's launcher",
    "exp_manager.exp_dir": "places come from the cluster file",
    "exp_manager.explicit_log_dir": "places come from the cluster file",
    "exp_manager.name": "the run's name and id take its place",
    "exp_manager.checkpoint_callback_params.dirpath": "places come from the cluster file",
    "exp_manager.checkpoint_callback_params.filename": "Trainshed names checkpoints by step and samples",
    "exp_manager.checkpoint_callback_params.monitor": "the newest checkpoints are kept, not the best",
    "exp_manager.checkpoint_callback_params.mode": "the newest checkpoints are kept, not the best",
    "trainer.max_time": "the cluster's time limit takes its place",
    "trainer.num_nodes": "--nodes, or resources.nodes, say it",
    "trainer.limit_test_batches": "follows data.split",
    "model.nsys_profile": "the profiler is off",
    "name": "the recipe has a name of its own",
}

_TIME = re.compile(r"^(?:(\d+)-)?(\d+):(\d+):\d+$")
"""Slurm's `[days-]hours:minutes:seconds`."""


def read_nemo(text: str, name: str) -> Imported:
    """Read NeMo's YAML; `name` is how its lines are called."""
    settings = ForeignSettings(parse(text, name))
    settings.write("name", _run_name(settings.get("run.name") or settings.get("name") or "imported"))
    settings.mapped("run.name", f"name: {settings.recipe['name']}")
    read_model(settings)
    read_tokenizer(settings)
    read_data(settings)
    _read_training(settings)
    _read_layout(settings)
    settings.write("engine.name", "nemo")
    settings.write("engine.version", HYDRA)
    _read_cluster(settings)
    _read_keeping(settings)
    for key, why in _FOLLOWS.items():
        settings.mapped(key, why)
    for key, why in _PLACES.items():
        settings.drop(key, why)
        settings.drop_section(key, why)
    settings.keep_rest(KNOWN, fixed_settings())
    return settings.imported("nemo")


def _run_name(text: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}"[:LONGEST_NAME].strip("-")


def _read_training(settings: ForeignSettings) -> None:
    steps = settings.get("trainer.max_steps")
    if steps is not None and steps > 0:
        settings.take("trainer.max_steps", "train.steps", steps)
    else:
        settings.write("train.steps", 1000)
        settings.ask("trainer.max_steps says no number of steps: train.steps is written as 1000")
    settings.take("model.global_batch_size", "train.global_batch", settings.get("model.global_batch_size", 1))
    if (ramp := settings.get("model.rampup_batch_size")) is not None:
        keys = dict(zip(("start", "increment", "samples"), ramp, strict=False))
        settings.take("model.rampup_batch_size", "train.batch_ramp", keys)
    precision = "fp8" if settings.get("model.fp8") else str(settings.get("trainer.precision", "bf16")).split("-")[0]
    precision = {"32": "fp32", "16": "fp16"}.get(precision, precision)
    settings.take("model.fp8", "train.precision", precision)
    settings.mapped("trainer.precision", f"train.precision: {precision}")
    _read_optimizer(settings)
    _read_schedule(settings, steps)
    dropout = settings.get("model.hidden_dropout", 0.0)
    if dropout:
        settings.write("train.dropout", float(dropout))
    settings.mapped("model.hidden_dropout", f"train.dropout: {dropout:g}")
    if settings.get("model.attention_dropout", dropout) == dropout:
        settings.mapped("model.attention_dropout", f"train.dropout: {dropout:g}")
    seed = settings.get("model.seed", 1234)
    settings.take("model.seed", "seed", seed)
    settings.write("data.seed", seed)


def _read_optimizer(settings: ForeignSettings) -> None:
    name = settings.get("model.optim.name", "fused_adam")
    if "adam" not in name and name != "mcore_distributed_optim":
        settings.ask(f"model.optim.name is {name}: a recipe has AdamW only")
    settings.mapped("model.optim.name", "layout.shard: zero1" if _is_sharded(name) else "train.optimizer.name: adamw")
    for theirs, ours, usual in (
        ("model.optim.lr", "lr", 2e-4),
        ("model.optim.weight_decay", "weight_decay", 0.01),
        ("model.optim.betas", "betas", [0.9, 0.98]),
    ):
        settings.take(theirs, f"train.optimizer.{ours}", _float(settings.get(theirs, usual)))
    if name == "distributed_fused_adam":
        settings.mistake(
            "model.optim.name",
            "distributed_fused_adam is Apex's; its checkpoints only load onto the same dp",
            "mcore_distributed_optim, which the recipe's layout.shard: zero1 renders",
        )
    clip = settings.get("trainer.gradient_clip_val")
    settings.take("trainer.gradient_clip_val", "train.optimizer.clip", _float(clip) if clip else None)


def _read_schedule(settings: ForeignSettings, steps: Any) -> None:
    sched = "model.optim.sched"
    name = settings.get(f"{sched}.name")
    shapes = {"CosineAnnealing": "cosine", "WarmupAnnealing": "linear", "WarmupPolicy": "constant", None: "constant"}
    if name not in shapes:
        settings.ask(f"{sched}.name is {name}, which a recipe has no word for: train.schedule.name is constant")
    shape = shapes.get(name, "constant")
    warmup, constant = settings.get(f"{sched}.warmup_steps", 0), settings.get(f"{sched}.constant_steps", 0)
    settings.take(f"{sched}.name", "train.schedule.name", shape)
    settings.take(f"{sched}.warmup_steps", "train.schedule.warmup", warmup)
    if shape != "constant":
        settings.take(f"{sched}.min_lr", "train.schedule.min_lr", _float(settings.get(f"{sched}.min_lr", 0.0)))
    settings.drop(f"{sched}.min_lr", "a constant schedule has no decay")
    end = settings.get(f"{sched}.max_steps") or steps
    if not isinstance(end, int):
        return
    if warmup + constant > end:
        peak = settings.get("model.optim.lr", 2e-4)
        reached = f"reaches {peak * min(1.0, end / warmup):.3g} of {peak:g}" if warmup else "is never decayed"
        settings.mistake(
            f"{sched}.warmup_steps",
            f"warm-up {warmup} + constant {constant} are more than the {end} steps: the learning rate {reached}",
            "a warm-up below trainer.max_steps, and constant_steps: 0 in a run this short",
        )
        settings.drop(f"{sched}.constant_steps", f"does not fit into {end} steps")
    elif constant and shape == "cosine":
        settings.take(f"{sched}.constant_steps", "train.schedule.decay", end - constant)
    elif end != steps and shape != "constant":
        settings.write("train.schedule.decay", end)
    settings.mapped(f"{sched}.max_steps", f"train.schedule.decay: {end}")
    settings.mapped(f"{sched}.constant_steps", "none")


def _read_layout(settings: ForeignSettings) -> None:
    for theirs, ours in _LAYOUT.items():
        settings.take(theirs, f"layout.{ours}", settings.get(theirs, 1))
    if "moe" in settings.recipe["model"]["config"]:
        # NeMo 24.07 cuts experts by tp.
        settings.write("layout.etp", settings.recipe["layout"]["tp"])
    granularity = settings.get("model.activations_checkpoint_granularity", "none")
    settings.take("model.activations_checkpoint_granularity", "layout.recompute", granularity)
    settings.write("layout.shard", "zero1")
    settings.mapped("trainer.devices", "cluster file, machine: one with as many GPUs")
    layout, batch = settings.recipe["layout"], settings.recipe["train"]["global_batch"]
    if batch % layout["micro_batch"]:
        settings.mistake(
            "model.global_batch_size",
            f"{batch} is no multiple of micro_batch_size {layout['micro_batch']}: no number of ranks can share it",
            f"a multiple of {layout['micro_batch']}",
        )
    if settings.get("trainer.num_nodes") is None:
        ranks = layout["tp"] * layout["pp"] * layout["cp"]
        settings.ask(
            f"the file does not say how many nodes: resources.nodes, a multiple of {ranks} GPUs "
            f"(tp {layout['tp']} · pp {layout['pp']} · cp {layout['cp']}) whose quotient divides {batch}"
        )
    else:
        settings.take("trainer.num_nodes", "resources.nodes", settings.get("trainer.num_nodes"))


def _read_cluster(settings: ForeignSettings) -> None:
    settings.cluster["image"] = IMAGES[HYDRA]
    limit = _TIME.match(str(settings.get("run.time_limit", "")))
    if limit:
        days, hours, minutes = (int(part or 0) for part in limit.groups())
        settings.hint("run.time_limit", "limits.hours", 24.0 * days + hours + round(minutes / 60, 3))


def _read_keeping(settings: ForeignSettings) -> None:
    callback = "exp_manager.checkpoint_callback_params"
    every = settings.get(f"{callback}.every_n_train_steps")
    if settings.get("exp_manager.create_checkpoint_callback") is False:
        settings.mistake(
            "exp_manager.create_checkpoint_callback",
            "no checkpoint is ever written: a lost node loses the run, and nothing is left of it",
            "checkpoint.every; without it the recipe saves once, at the end",
        )
        every = None
    settings.take(f"{callback}.every_n_train_steps", "checkpoint.every", every)
    settings.mapped("exp_manager.create_checkpoint_callback", f"checkpoint.every: {every or 'null'}")
    settings.mapped("trainer.enable_checkpointing", "Lightning's own checkpoints, which NeMo replaces")
    keep = settings.get(f"{callback}.save_top_k", 3)
    settings.take(f"{callback}.save_top_k", "checkpoint.keep", keep if keep > 0 else None)
    settings.take(f"{callback}.async_save", "checkpoint.async", bool(settings.get(f"{callback}.async_save", False)))
    resume = "auto"
    if settings.get("exp_manager.resume_if_exists") is False:
        settings.mistake(
            "exp_manager.resume_if_exists",
            "a restart begins at the first step again, whatever checkpoints there are",
            "checkpoint.resume: auto, which the recipe has",
        )
    elif settings.get("exp_manager.resume_ignore_no_checkpoint") is False:
        resume = "must"
    settings.take("exp_manager.resume_if_exists", "checkpoint.resume", resume)
    settings.mapped("exp_manager.resume_ignore_no_checkpoint", f"checkpoint.resume: {resume}")
    for logger in ("tensorboard", "dllogger"):
        key = f"exp_manager.create_{logger}_logger"
        usual = logger == "tensorboard"
        settings.take(key, f"observe.{logger}", bool(settings.get(key, usual)))
    if settings.get("model.nsys_profile.enabled"):
        start, end = settings.get("model.nsys_profile.start_step", 10), settings.get("model.nsys_profile.end_step", 10)
        ranks = settings.get("model.nsys_profile.ranks", [0])
        settings.take(
            "model.nsys_profile.enabled",
            "observe.profile",
            {"start": start + 1, "steps": max(1, end - start + 1), "ranks": ranks},
        )
        for key in ("start_step", "end_step", "ranks"):
            settings.mapped(f"model.nsys_profile.{key}", "observe.profile")


def _is_sharded(optimizer: str) -> bool:
    return "distributed" in optimizer


def _float(value: Any) -> Any:
    return [float(item) for item in value] if isinstance(value, list) else float(value)
