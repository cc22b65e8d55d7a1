"""Batch, optimiser, learning rate and precision on Megatron's command line."""

from __future__ import annotations

from dataclasses import dataclass

from trainshed.data.sampling.schedule import BatchSchedule, RampUp
from trainshed.engines.foreign import EngineTask
from trainshed.engines.megatron.model import sequence_length
from trainshed.engines.megatron.settings import Settings
from trainshed.errors import InputError


@dataclass(frozen=True)
class Length:
    """How long a run is: steps, and the samples they take."""

    steps: int
    schedule: BatchSchedule

    def samples(self, steps: int) -> int:
        """Return how many samples the first `steps` steps take."""
        return self.schedule.consumed(steps)


def run_length(task: EngineTask) -> Length:
    """Return the length of a run with its ramp."""
    train = task.recipe.train
    ramp = train.batch_ramp
    return Length(
        task.steps,
        BatchSchedule(train.global_batch, RampUp(ramp.start, ramp.increment, ramp.samples) if ramp else None),
    )


def put_training(settings: Settings, task: EngineTask) -> None:
    """Decide how a model is trained."""
    train = task.recipe.train
    settings.put("layout.micro_batch", micro_batch_size=task.layout.micro_batch)
    if train.batch_ramp is None:
        settings.put("train.global_batch", global_batch_size=train.global_batch)
        settings.put("train.steps", train_iters=task.steps, train_samples=None)
        settings.put("train.batch_ramp", rampup_batch_size=None)
    else:
        _put_ramp(settings, task)
    _put_schedule(settings, task)
    optimizer = train.optimizer
    settings.put("train.optimizer.name", optimizer="adam")
    settings.put("train.optimizer.betas", adam_beta1=optimizer.betas[0], adam_beta2=optimizer.betas[1])
    settings.put("train.optimizer.eps", adam_eps=optimizer.eps)
    settings.put("train.optimizer.weight_decay", weight_decay=optimizer.weight_decay)
    settings.put("train.optimizer.clip", clip_grad=optimizer.clip or 0.0)
    settings.put("seed", seed=task.recipe.seed)
    settings.put("train.non_finite", check_for_nan_in_loss_and_grad=True)
    settings.put("train.deterministic", deterministic_mode=train.deterministic)
    _put_precision(settings, train.precision)


def _put_ramp(settings: Settings, task: EngineTask) -> None:
    train, ramp, length = task.recipe.train, task.recipe.train.batch_ramp, run_length(task)
    assert ramp is not None, "asked for a ramp"
    if length.samples(task.steps) <= ramp.samples:
        # Megatron 0.16 counts one step more than there are samples for where the ramp does not end.
        raise InputError(
            f"the {task.steps} steps take {length.samples(task.steps):,} samples, and the ramp takes {ramp.samples:,}: "
            "Megatron counts the steps of a ramp that does not end wrongly",
            where=task.recipe.where("train.batch_ramp"),
            hint="write a shorter ramp, or a longer run",
        )
    settings.put("train.steps", train_iters=None, train_samples=length.samples(task.steps))
    if not settings.known.has("step_batch_size_schedule"):
        settings.put("train.global_batch", global_batch_size=train.global_batch)
        settings.put("train.batch_ramp", rampup_batch_size=(ramp.start, ramp.increment, ramp.samples))
        return
    # Versions that have this one take --rampup-batch-size and ignore it. Thresholds are counted in tokens.
    increments = (train.global_batch - ramp.start) // ramp.increment
    thresholds = [
        (-(-stage * ramp.samples // increments) * sequence_length(task), ramp.start + stage * ramp.increment)
        for stage in range(increments + 1)
    ]
    settings.put("train.global_batch", global_batch_size=None)
    settings.put(
        "train.batch_ramp",
        rampup_batch_size=None,
        step_batch_size_schedule=" ".join(f"{tokens}:{size}" for tokens, size in thresholds),
    )


def _put_schedule(settings: Settings, task: EngineTask) -> None:
    schedule, peak = task.recipe.train.schedule, task.recipe.train.optimizer.lr
    end = schedule.decay if schedule.decay is not None and schedule.name != "wsd" else task.steps
    if schedule.name == "constant":
        end = max(end, schedule.warmup + 1)  # not read, but Megatron wants it after the warm-up
    elif schedule.warmup >= end:
        raise InputError(
            f"a warm-up of {schedule.warmup} steps leaves nothing of the {end} for the decay",
            where=task.recipe.where("train.schedule.warmup"),
            hint=f"write less than {end}",
        )
    settings.put("train.optimizer.lr", lr=peak)
    settings.put("train.schedule.min_lr", min_lr=schedule.min_lr)
    settings.put("train.schedule.name", lr_decay_style={"wsd": "WSD"}.get(schedule.name, schedule.name))
    in_samples = task.recipe.train.batch_ramp is not None
    unit, other = ("samples", "iters") if in_samples else ("iters", "samples")

    def counted(steps: int) -> int:
        return run_length(task).samples(steps) if in_samples else steps

    # Megatron's first step of a warm-up has the initial rate; ours is one share of the way up.
    first = peak / (schedule.warmup + 1) if schedule.warmup else None
    settings.put(
        "train.schedule.warmup",
        **{f"lr_warmup_{unit}": counted(schedule.warmup) or None, f"lr_warmup_{other}": None},
        lr_warmup_fraction=None,
        lr_warmup_init=first,
    )
    settings.put("train.schedule.decay", **{f"lr_decay_{unit}": counted(end), f"lr_decay_{other}": None})
    anneal = min(schedule.decay or 0, task.steps - schedule.warmup) if schedule.name == "wsd" else None
    settings.put(
        "train.schedule.decay",
        lr_wsd_decay_style=None if anneal is None else "linear",
        **{
            f"lr_wsd_decay_{unit}": None if anneal is None else counted(task.steps) - counted(task.steps - anneal),
            f"lr_wsd_decay_{other}": None,
        },
    )


def _put_precision(settings: Settings, precision: str) -> None:
    settings.put(
        "train.precision",
        bf16=precision in ("bf16", "fp8"),
        fp16=precision == "fp16",
        fp8="hybrid" if precision == "fp8" else None,
        fp4=None,
    )
    if precision == "fp8":
        # Delayed scaling as NVIDIA's recipes have it (GKE's llama3-70b-fp8: history 1024, algorithm max).
        settings.choose(fp8_recipe="delayed", fp8_amax_history_len=1024, fp8_amax_compute_algo="max")
