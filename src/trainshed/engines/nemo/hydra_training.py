"""Training, layout and checkpoints in NeMo 24.07's Hydra file: functions for the rows of `hydra_keys.py`."""

from __future__ import annotations

from typing import Any

from trainshed.engines.importing import ConfigImport
from trainshed.engines.key_table import KEEP, OMIT
from trainshed.engines.launch import EngineTask
from trainshed.engines.profiles import task_profile
from trainshed.recipe import MoeLosses

CALLBACK = "exp_manager.checkpoint_callback_params"
SCHEDULER = "model.optim.sched"


def read_steps(config: ConfigImport) -> int:
    """Return `train.steps`."""
    steps = config.get("trainer.max_steps")
    if steps is not None and steps > 0:
        return steps
    config.ask("trainer.max_steps says no number of steps: train.steps is written as 1000")
    return 1000


def read_precision(config: ConfigImport) -> str:
    """Return `train.precision`: fp8 is a flag of its own."""
    precision = "fp8" if config.get("model.fp8") else str(config.get("trainer.precision", "bf16")).split("-")[0]
    return {"32": "fp32", "16": "fp16"}.get(precision, precision)


def render_ramp(task: EngineTask) -> list[int] | None:
    """Return the ramp of the batch as NeMo writes it, null where there is none."""
    ramp = task.recipe.train.batch_ramp
    return [ramp.start, ramp.increment, ramp.samples] if ramp else None


def read_ramp(config: ConfigImport) -> Any:
    """Return `train.batch_ramp`."""
    ramp = config.get("model.rampup_batch_size")
    return KEEP if ramp is None else dict(zip(("start", "increment", "samples"), ramp, strict=False))


def read_dropout(config: ConfigImport) -> Any:
    """Return `train.dropout`; attention's may differ, and is then left to `engine.args`."""
    dropout = float(config.get("model.hidden_dropout", 0.0))
    config.note_mapped(f"train.dropout: {dropout:g}", "model.hidden_dropout")
    if config.get("model.attention_dropout", dropout) == dropout:
        config.note_mapped(f"train.dropout: {dropout:g}", "model.attention_dropout")
    return dropout or OMIT


def read_optimizer(config: ConfigImport) -> Any:
    """Note what the optimizer stands for: a recipe has AdamW alone."""
    name = config.get("model.optim.name", "fused_adam")
    if "adam" not in name and name != "mcore_distributed_optim":
        config.ask(f"model.optim.name is {name}: a recipe has AdamW only")
    shards = "distributed" in name
    config.note_mapped("layout.shard: zero1" if shards else "train.optimizer.name: adamw", "model.optim.name")
    if name == "distributed_fused_adam":
        config.add_mistake(
            "model.optim.name",
            "distributed_fused_adam is Apex's; its checkpoints only load onto the same dp",
            "mcore_distributed_optim, which the recipe's layout.shard: zero1 renders",
        )
    return OMIT


def read_nan_check(config: ConfigImport) -> Any:
    """Drop a check that is switched off."""
    if config.get("model.optim.check_for_nan_in_grad") is False:
        config.drop("a recipe stops at a gradient that is not finite", "model.optim.check_for_nan_in_grad")
    return OMIT


_SCHEDULES = {
    "cosine": "CosineAnnealing",
    "linear": "WarmupAnnealing",
    "wsd": "PolynomialHoldDecayAnnealing",
    "constant": "WarmupPolicy",
}


def render_schedule(task: EngineTask) -> dict[str, Any]:
    """Return the schedule: each of NeMo's ends at `max_steps`, which is the run's end where it is not given."""
    schedule = task.recipe.train.schedule
    values: dict[str, Any] = {
        "name": _SCHEDULES[schedule.name],
        "warmup_steps": schedule.warmup,
        "min_lr": schedule.min_lr,
    }
    if schedule.name == "wsd":
        assert schedule.decay is not None, "the schema asks for it"
        values |= {"hold_steps": max(0, task.steps - schedule.decay - schedule.warmup), "power": 1.0}
    elif schedule.name == "cosine":
        values["constant_steps"] = 0
    if schedule.name in ("cosine", "linear") and schedule.decay is not None:
        values["max_steps"] = schedule.decay
    return {f"{SCHEDULER}.{key}": value for key, value in values.items()}


def read_schedule(config: ConfigImport) -> dict[str, Any]:
    """Return `train.schedule`."""
    name, shapes = config.get(f"{SCHEDULER}.name"), {theirs: ours for ours, theirs in _SCHEDULES.items()}
    if name is not None and name not in shapes:
        config.ask(f"{SCHEDULER}.name is {name}, which a recipe has no word for: train.schedule.name is constant")
    shape, warmup = shapes.get(name, "constant"), config.get(f"{SCHEDULER}.warmup_steps", 0)
    schedule: dict[str, Any] = {"name": shape, "warmup": warmup}
    config.note_mapped(f"train.schedule.name: {shape}", f"{SCHEDULER}.name")
    config.note_mapped(f"train.schedule.warmup: {warmup}", f"{SCHEDULER}.warmup_steps")
    if shape != "constant":
        schedule["min_lr"] = float(config.get(f"{SCHEDULER}.min_lr", 0.0))
        config.note_mapped(f"train.schedule.min_lr: {schedule['min_lr']}", f"{SCHEDULER}.min_lr")
    config.drop("a constant schedule has no decay", f"{SCHEDULER}.min_lr")
    end = config.get(f"{SCHEDULER}.max_steps") or config.get("trainer.max_steps")
    if isinstance(end, int):
        _read_decay(config, schedule, end)
    return schedule


def _read_decay(config: ConfigImport, schedule: dict[str, Any], end: int) -> None:
    shape, warmup, steps = schedule["name"], schedule["warmup"], config.get("trainer.max_steps")
    constant, held = config.get(f"{SCHEDULER}.constant_steps", 0), config.get(f"{SCHEDULER}.hold_steps", 0)
    if warmup + constant + held > end:
        peak = config.get("model.optim.lr", 2e-4)
        reached = f"reaches {peak * min(1.0, end / warmup):.3g} of {peak:g}" if warmup else "is never decayed"
        config.add_mistake(
            f"{SCHEDULER}.warmup_steps",
            f"warm-up {warmup} + constant {constant + held} are more than the {end} steps: the learning rate {reached}",
            "a warm-up below trainer.max_steps, and constant_steps: 0 in a run this short",
        )
        config.drop(f"does not fit into {end} steps", f"{SCHEDULER}.constant_steps", f"{SCHEDULER}.hold_steps")
    if shape == "wsd":
        _read_final_decay(config, schedule, end)
    elif constant and shape == "cosine" and warmup + constant <= end:
        schedule["decay"] = end - constant
        config.note_mapped(f"train.schedule.decay: {end - constant}", f"{SCHEDULER}.constant_steps")
    elif end != steps and shape != "constant":
        schedule["decay"] = end
    config.note_mapped(f"train.schedule.decay: {end}", f"{SCHEDULER}.max_steps")
    config.note_mapped("none", f"{SCHEDULER}.constant_steps")


def _read_final_decay(config: ConfigImport, schedule: dict[str, Any], end: int) -> None:
    """Read the decay of wsd: what warm-up and hold leave of the steps."""
    schedule["decay"] = max(1, end - schedule["warmup"] - config.get(f"{SCHEDULER}.hold_steps", 0))
    power = config.get(f"{SCHEDULER}.power", 1.0)
    if power != 1.0:
        config.ask(f"{SCHEDULER}.power is {power:g}: the final decay of train.schedule is linear")
    if end != config.get("trainer.max_steps"):
        config.drop("wsd ends with the run here", f"{SCHEDULER}.max_steps")
    config.note_mapped(f"train.schedule.decay: {schedule['decay']}", f"{SCHEDULER}.hold_steps", f"{SCHEDULER}.power")


RECOMPUTE = {
    "none": (None, None, None),
    "selective": ("selective", None, None),
    "full": ("full", "uniform", 1),  # groups of one layer: every layer is computed again
}


def read_expert_tensor_parallel(config: ConfigImport) -> Any:
    """Return `layout.etp`: NeMo 24.07 cuts experts by tp."""
    return config.recipe["layout"]["tp"] if "moe" in config.recipe["model"]["config"] else OMIT


def read_nodes(config: ConfigImport) -> Any:
    """Return `resources.nodes`, or ask for it."""
    layout, batch = config.recipe["layout"], config.recipe["train"]["global_batch"]
    if batch % layout["micro_batch"]:
        config.add_mistake(
            "model.global_batch_size",
            f"{batch} is not a multiple of micro_batch_size {layout['micro_batch']}: no number of ranks can share it",
            f"a multiple of {layout['micro_batch']}",
        )
    nodes = config.get("trainer.num_nodes")
    if nodes is not None:
        return nodes
    ranks = layout["tp"] * layout["pp"] * layout["cp"]
    config.ask(
        f"the file does not say how many nodes: resources.nodes, a multiple of {ranks} GPUs "
        f"(tp {layout['tp']} · pp {layout['pp']} · cp {layout['cp']}) whose quotient divides {batch}"
    )
    config.drop("--nodes, or resources.nodes, say it", "trainer.num_nodes")
    return OMIT


def read_saving(config: ConfigImport) -> Any:
    """Return `checkpoint.every`."""
    every = config.get(f"{CALLBACK}.every_n_train_steps")
    if config.get("exp_manager.create_checkpoint_callback") is False:
        config.add_mistake(
            "exp_manager.create_checkpoint_callback",
            "no checkpoint is ever written: a lost node loses the run, and nothing is left of it",
            "checkpoint.every; without it the recipe saves once, at the end",
        )
        every = None
    config.note_mapped(f"checkpoint.every: {every or 'null'}", "exp_manager.create_checkpoint_callback")
    config.note_mapped("Lightning's own checkpoints, which NeMo replaces", "trainer.enable_checkpointing")
    return every


def render_resume(task: EngineTask) -> dict[str, bool]:
    """Return what a start does with the checkpoints that are there."""
    resume = task.recipe.checkpoint.resume
    return {
        "exp_manager.resume_if_exists": resume != "fresh",
        "exp_manager.resume_ignore_no_checkpoint": resume != "must",
    }


def read_resume(config: ConfigImport) -> str:
    """Return `checkpoint.resume`."""
    if config.get("exp_manager.resume_if_exists") is False:
        config.add_mistake(
            "exp_manager.resume_if_exists",
            "a restart begins at the first step again, whatever checkpoints there are",
            "checkpoint.resume: auto, which the recipe has",
        )
        return "auto"
    return "must" if config.get("exp_manager.resume_ignore_no_checkpoint") is False else "auto"


def last_profiled_step(task: EngineTask) -> int:
    """Return the last step that is profiled, counted from 0."""
    return task_profile(task).recorded()[0][-1]


def read_profile(config: ConfigImport) -> Any:
    """Return `observe.profile`."""
    section = "model.nsys_profile"
    if not config.get(f"{section}.enabled"):
        config.drop("the profiler is off", f"{section}.*")
        return OMIT
    start, end = config.get(f"{section}.start_step", 10), config.get(f"{section}.end_step", 10)
    keys = ("start_step", "end_step", "ranks", "gen_shape")
    config.note_mapped("observe.profile", *(f"{section}.{key}" for key in keys))
    shapes = {"shapes": True} if config.get(f"{section}.gen_shape") else {}
    steps = {"start": start + 1, "steps": max(1, end - start + 1)}
    return steps | {"ranks": config.get(f"{section}.ranks", [0])} | shapes


def read_sharp(config: ConfigImport) -> Any:
    """Write `sharp` into the cluster file."""
    if config.get("model.sharp"):
        config.set_cluster("model.sharp", "sharp", True)
    return OMIT


def losses(task: EngineTask) -> MoeLosses:
    """Return the losses of the router: those of the schema where the recipe writes none."""
    return task.recipe.train.moe or MoeLosses()


def read_balance_loss(config: ConfigImport) -> Any:
    """Return `train.moe.balance_loss`."""
    return float(config.get("model.moe_aux_loss_coeff", 0.0)) if config.get("model.num_moe_experts") else OMIT


def read_router_loss(config: ConfigImport) -> Any:
    """Return `train.moe.z_loss`."""
    factor = config.get("model.moe_z_loss_coeff")
    return OMIT if factor is None or not config.get("model.num_moe_experts") else float(factor)
