"""Batch, length, schedule, precision and losses in Megatron's arguments: both directions, for rows of `keys.py`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trainshed.data.sampling.schedule import BatchRampUp, BatchSchedule
from trainshed.engines.key_table import KEEP, OMIT
from trainshed.engines.launch import EngineTask
from trainshed.engines.megatron.argument_import import ArgumentImport
from trainshed.engines.megatron.model_args import sequence_length
from trainshed.engines.megatron.versions import since, task_version
from trainshed.errors import InputError
from trainshed.recipe import MoeLosses
from trainshed.recipe.section import parse_count
from trainshed.recipe.train import USUAL_BIAS_UPDATE, score_bias_update

STEPPED_VERSIONS = since("0.19.0")
"""Versions that read --step-batch-size-schedule; they take --rampup-batch-size and ignore it."""


@dataclass(frozen=True)
class RunLength:
    """How long a run is: steps, and the samples they take."""

    steps: int
    schedule: BatchSchedule

    def samples(self, steps: int) -> int:
        """Return how many samples the first `steps` steps take."""
        return self.schedule.consumed(steps)


def run_length(task: EngineTask) -> RunLength:
    """Return the length of a run with its ramp."""
    train = task.recipe.train
    ramp = train.batch_ramp
    return RunLength(
        task.steps,
        BatchSchedule(train.global_batch, BatchRampUp(ramp.start, ramp.increment, ramp.samples) if ramp else None),
    )


def has_ramp(task: EngineTask) -> bool:
    """Whether the batch grows: Megatron then counts in samples, not in steps."""
    return task.recipe.train.batch_ramp is not None


def _is_stepped(task: EngineTask) -> bool:
    return has_ramp(task) and task_version(task) in STEPPED_VERSIONS


def render_global_batch(task: EngineTask) -> int | None:
    """Return the full batch; a stepped schedule names it itself."""
    return None if _is_stepped(task) else task.recipe.train.global_batch


def read_global_batch(config: ArgumentImport) -> int:
    """Return `train.global_batch`."""
    if not _stepped_batches(config) and config.get("global_batch_size") is None:
        config.ask("train.global_batch: the arguments leave it to the number of GPUs (micro batch · dp)")
    return _global_batch(config)


def _global_batch(config: ArgumentImport) -> int:
    stepped = _stepped_batches(config)
    return stepped[-1] if stepped else config.get("global_batch_size") or config.get("micro_batch_size", 1)


def render_steps(task: EngineTask) -> dict[str, int | None]:
    """Return the length of the run, in samples where there is a ramp."""
    ramp = task.recipe.train.batch_ramp
    if ramp is None:
        return {"train_iters": task.steps, "train_samples": None}
    samples = run_length(task).samples(task.steps)
    if samples <= ramp.samples:
        # Megatron 0.16 counts one step more than there are samples for where the ramp does not end.
        raise InputError(
            f"the {task.steps} steps take {samples:,} samples, and the ramp takes {ramp.samples:,}: "
            "Megatron counts the steps of a ramp that does not end wrongly",
            where=task.recipe.where("train.batch_ramp"),
            hint="write a shorter ramp, or a longer run",
        )
    return {"train_iters": None, "train_samples": samples}


def read_steps(config: ArgumentImport) -> int:
    """Return `train.steps`."""
    if (steps := config.get("train_iters")) is not None:
        return steps
    if (samples := config.get("train_samples")) is not None:
        return _batches(config).steps_for(samples)
    config.ask("train.steps: the arguments do not say how long to train")
    return 1000


def render_ramp(task: EngineTask) -> tuple[int, int, int] | None:
    """Return the ramp of versions that read it."""
    ramp = task.recipe.train.batch_ramp
    return None if ramp is None or _is_stepped(task) else (ramp.start, ramp.increment, ramp.samples)


def render_stepped_ramp(task: EngineTask) -> str:
    """Return the ramp as thresholds, counted in tokens."""
    train, ramp = task.recipe.train, task.recipe.train.batch_ramp
    assert ramp is not None, "asked for a ramp"
    increments = (train.global_batch - ramp.start) // ramp.increment
    thresholds = [
        (-(-stage * ramp.samples // increments) * sequence_length(task), ramp.start + stage * ramp.increment)
        for stage in range(increments + 1)
    ]
    return " ".join(f"{tokens}:{size}" for tokens, size in thresholds)


def read_ramp(config: ArgumentImport) -> Any:
    """Return `train.batch_ramp`."""
    ramp = _ramp(config)
    if _stepped_batches(config):
        if ramp is None:
            config.ask("train.batch_ramp: it grows in equal steps here, and not in the arguments")
            return KEEP
        config.note_mapped("train.batch_ramp", "step_batch_size_schedule")
    if ramp is None:
        return KEEP
    return {"start": ramp.start, "increment": ramp.increment, "samples": ramp.samples}


def _stepped_pairs(config: ArgumentImport) -> list[tuple[int, int]]:
    """Read --step-batch-size-schedule, `TOKENS:BATCH …`, as samples and batches."""
    words = (config.get("step_batch_size_schedule") or "").replace(",", " ").split()
    pairs = [word.split(":") for word in words]
    return [(parse_count(tokens) // config.get("seq_length", 1), int(size)) for tokens, size in pairs]


def _stepped_batches(config: ArgumentImport) -> list[int]:
    return [size for _, size in _stepped_pairs(config)]


def _ramp(config: ArgumentImport) -> BatchRampUp | None:
    pairs = _stepped_pairs(config)
    if not pairs:
        ramp = config.get("rampup_batch_size")
        return BatchRampUp(*ramp) if ramp else None
    samples, sizes = [samples for samples, _ in pairs], [size for _, size in pairs]
    increments = len(sizes) - 1
    even = increments > 0 and len({after - before for before, after in pairwise(sizes)}) == 1
    if not even or samples != [-(-stage * samples[-1] // increments) for stage in range(increments + 1)]:
        return None
    return BatchRampUp(sizes[0], sizes[1] - sizes[0], samples[-1])


def _batches(config: ArgumentImport) -> BatchSchedule:
    return BatchSchedule(_global_batch(config), _ramp(config))


def _in_steps(config: ArgumentImport, name: str) -> int | None:
    """Return a length that is given in iterations or in samples."""
    if iterations := config.get(f"{name}_iters"):
        return iterations
    samples = config.get(f"{name}_samples")
    return _batches(config).steps_for(samples) if samples else None


def _counted(task: EngineTask, steps: int) -> int:
    return run_length(task).samples(steps) if has_ramp(task) else steps


def _by_unit(task: EngineTask, name: str, value: int | None) -> dict[str, int | None]:
    """Return a length under the argument that counts in the unit of the run, and the other one unset."""
    unit, other = ("samples", "iters") if has_ramp(task) else ("iters", "samples")
    return {f"{name}_{unit}": value, f"{name}_{other}": None}


def render_warmup(task: EngineTask) -> dict[str, Any]:
    """Return the warm-up: Megatron's first step has the initial rate; ours is one share of the way up."""
    train = task.recipe.train
    warmup = train.schedule.warmup
    return {
        **_by_unit(task, "lr_warmup", _counted(task, warmup) or None),
        "lr_warmup_fraction": None,
        "lr_warmup_init": train.optimizer.lr / (warmup + 1) if warmup else None,
    }


def read_warmup(config: ArgumentImport) -> int:
    """Return `train.schedule.warmup`."""
    if fraction := config.get("lr_warmup_fraction"):
        return round(fraction * (_in_steps(config, "lr_decay") or config.steps))
    return _in_steps(config, "lr_warmup") or 0


def render_decay(task: EngineTask) -> dict[str, Any]:
    """Return the end of the decay, or refuse a warm-up that leaves nothing of it."""
    schedule = task.recipe.train.schedule
    end = schedule.decay if schedule.decay is not None and schedule.name != "wsd" else task.steps
    if schedule.name == "constant":
        end = max(end, schedule.warmup + 1)  # not read, but Megatron wants it after the warm-up
    elif schedule.warmup >= end:
        raise InputError(
            f"a warm-up of {schedule.warmup} steps leaves nothing of the {end} for the decay",
            where=task.recipe.where("train.schedule.warmup"),
            hint=f"write less than {end}",
        )
    return _by_unit(task, "lr_decay", _counted(task, end))


def render_final_decay(task: EngineTask) -> dict[str, Any]:
    """Return the decay of wsd, which ends with the run."""
    schedule = task.recipe.train.schedule
    if schedule.name != "wsd":
        return {"lr_wsd_decay_style": None, **_by_unit(task, "lr_wsd_decay", None)}
    decay = min(schedule.decay or 0, task.steps - schedule.warmup)
    length = _counted(task, task.steps) - _counted(task, task.steps - decay)
    return {"lr_wsd_decay_style": "linear", **_by_unit(task, "lr_wsd_decay", length)}


def _final_decay(config: ArgumentImport) -> int:
    """Return how many steps the decay of wsd takes: the last of the run, whose batch a ramp has filled."""
    if iterations := config.get("lr_wsd_decay_iters"):
        return iterations
    samples = config.get("lr_wsd_decay_samples") or 1
    batches = _batches(config)
    return config.steps - batches.steps_for(batches.consumed(config.steps) - samples)


def read_decay(config: ArgumentImport) -> Any:
    """Return `train.schedule.decay`."""
    shape = config.recipe["train"]["schedule"]["name"]
    end = _in_steps(config, "lr_decay") or config.steps
    ends = ("lr_decay_iters", "lr_decay_samples")
    if shape == "wsd":
        if config.get("lr_wsd_decay_style") != "linear":
            config.drop("the final decay of wsd is linear here", "lr_wsd_decay_style")
        config.note_mapped("train.schedule.decay", "lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style")
        if end != config.steps:
            config.drop("wsd ends with the run here", *ends)
        config.note_mapped(f"train.schedule, which ends with the run ({config.steps} steps)", *ends)
        return _final_decay(config)
    if shape != "constant" and end != config.steps:
        return end
    config.note_mapped(f"train.schedule, which ends with the run ({config.steps} steps)", *ends)
    return OMIT


SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}


def read_shape(config: ArgumentImport) -> str:
    """Return `train.schedule.name`."""
    style = config.get("lr_decay_style")
    shape = next((ours for ours, theirs in SCHEDULES.items() if theirs == style), None)
    if shape is None:
        config.ask(f"train.schedule: there is no `{style}` schedule; cosine is written in its place")
    return shape or "cosine"


def read_lowest_rate(config: ArgumentImport) -> Any:
    """Return `train.schedule.min_lr`."""
    if config.recipe["train"]["schedule"]["name"] != "constant":
        return config.get("min_lr")
    config.drop("a constant rate has no end", "min_lr")
    return OMIT


def read_rate(config: ArgumentImport) -> float:
    """Return `train.optimizer.lr`."""
    if config.get("lr") is None:
        raise InputError("it names no learning rate", where=config.name, hint="add --lr")
    return config.get("lr")


def read_optimizer(config: ArgumentImport) -> Any:
    """Drop an optimizer that a recipe does not have."""
    if config.get("optimizer") != "adam":
        config.drop("a recipe for Megatron has adamw", "optimizer")
    return OMIT


STATE_TYPES = ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")


def render_states(task: EngineTask) -> dict[str, Any]:
    """Return the precision of Adam's averages; where the recipe does not say it, `engine.args` may."""
    states = task.recipe.train.optimizer.states
    return {} if states is None else dict(zip(STATE_TYPES, (states == "bf16", states, states), strict=True))


def read_states(config: ArgumentImport) -> Any:
    """Return `train.optimizer.states`; what a recipe has no word for (fp8, two precisions) stays in `engine.args`."""
    aware, *types = (config.get(key) for key in STATE_TYPES)
    return "bf16" if aware and types == ["bf16", "bf16"] else KEEP


def read_dropout(config: ArgumentImport) -> Any:
    """Return `train.dropout`: one number here, two in the arguments."""
    if config.get("use_checkpoint_args") and not config.has_any("hidden_dropout", "attention_dropout"):
        return OMIT  # restored from the checkpoint; our models have none
    hidden, attention = config.get("hidden_dropout"), config.get("attention_dropout")
    if hidden != attention:
        config.ask(
            f"train.dropout: one number here, and {hidden} (hidden) and {attention} (attention) in the arguments"
        )
    return hidden


def render_precision(task: EngineTask) -> dict[str, Any]:
    """Return the precision; fp8 is bf16 elsewhere."""
    precision = task.recipe.train.precision
    return {
        "bf16": precision in ("bf16", "fp8"),
        "fp16": precision == "fp16",
        "fp8": "hybrid" if precision == "fp8" else None,
    }


def read_precision(config: ArgumentImport) -> str:
    """Return `train.precision`."""
    fp8 = config.get("fp8")
    if fp8 is not None:
        if fp8 != "hybrid":
            config.ask(f"train.precision: fp8 is hybrid here, and the arguments say {fp8}")
        return "fp8"
    return "bf16" if config.get("bf16") else "fp16" if config.get("fp16") else "fp32"


def is_fp8(task: EngineTask) -> bool:
    """Whether products are made in fp8."""
    return task.recipe.train.precision == "fp8"


def render_router(task: EngineTask) -> dict[str, Any]:
    """Return the router's losses: what the recipe does not write is as the schema defaults it."""
    losses = task.recipe.train.moe or MoeLosses()
    has_bias = task.config.moe is not None and task.config.moe.score_bias
    return {
        # Per sequence, as the recipe means it: it does not change with the layout.
        "moe_router_load_balancing_type": "seq_aux_loss" if losses.balance_loss else "none",
        "moe_aux_loss_coeff": losses.balance_loss or None,
        "moe_z_loss_coeff": losses.z_loss or None,
        "moe_router_bias_update_rate": score_bias_update(losses.bias_update, task.config) if has_bias else None,
    }


def read_router(config: ArgumentImport) -> Any:
    """Return `train.moe`."""
    if not config.get("num_experts"):
        return KEEP
    kinds, factors = config.get("moe_router_load_balancing_type"), config.get("moe_aux_loss_coeff")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    factor = factors[0] if isinstance(factors, list) else factors
    if kind not in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        factor = 0.0
    if kind != "seq_aux_loss" and factor:
        config.ask(f"train.moe.balance_loss: per sequence here, and {kind} in the arguments")
    losses = {"balance_loss": factor, "z_loss": config.get("moe_z_loss_coeff") or 0.0}
    rate = config.get("moe_router_bias_update_rate")
    if config.get("moe_router_enable_expert_bias") and rate != USUAL_BIAS_UPDATE:
        losses["bias_update"] = rate
    return losses


def imports_fp8(config: ArgumentImport) -> bool:
    """Whether a list of arguments makes products in fp8."""
    return config.get("fp8") is not None
