"""The learning rate of each step: a function of the step and the recipe alone. No torch here."""

from __future__ import annotations

import math

from trainshed.checkpoints.native.folder import CompleteCheckpoint
from trainshed.errors import InputError
from trainshed.recipe import Recipe
from trainshed.recipe.train import LENGTH_KEYS, Schedule

DecaySpan = tuple[int, int]
"""Steps (counted from 0) between which the learning rate falls from its peak to `min_lr`."""


def decay_span(steps: int, schedule: Schedule) -> DecaySpan | None:
    """Return where the learning rate of a run of `steps` steps decays; None where it does not.

    Cosine and linear reach `min_lr` at step `decay`, or at the end of the run if the recipe has no `decay`; wsd stays
    at the peak until `decay` steps before the end.
    """
    if schedule.name == "constant":
        return None
    if schedule.name == "wsd":
        assert schedule.decay is not None, "the schema asks for it"
        return max(schedule.warmup, steps - schedule.decay), steps
    return schedule.warmup, schedule.decay or steps


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule) -> float:
    """Return the learning rate of a step (counted from 0) in a run of `steps` steps.

    Warm-up is linear and reaches the peak at step `warmup`.
    """
    return _rate(step, decay_span(steps, schedule), peak, schedule)


def _rate(step: int, span: DecaySpan | None, peak: float, schedule: Schedule) -> float:
    if step < schedule.warmup:
        return peak * (step + 1) / (schedule.warmup + 1)
    if span is None or step < span[0]:
        return peak
    start, end = span
    done = min(1.0, (step - start) / max(1, end - start))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule.name == "cosine" else 1.0 - done
    return schedule.min_lr + (peak - schedule.min_lr) * left


def check_decay(recipe: Recipe, steps: int, done: int, before: DecaySpan | None) -> str | None:
    """Refuse to resume if the steps already done would have had other learning rates, unless the recipe asks for it.

    `before` is the decay span of the `done` steps, from their checkpoint. A run that is made longer would stretch its
    decay, and its learning rate would jump. A recipe asks for that with `train.schedule.decay`; then the result is a
    sentence about the jump.
    """
    schedule, peak = recipe.train.schedule, recipe.train.optimizer.lr
    now = decay_span(steps, schedule)
    if before is None or now is None or before == now or done - 1 <= min(before[0], now[0]):
        return None
    written = schedule.name != "wsd" and schedule.decay is not None
    if done >= steps:
        trained = f"this run is trained, and its learning rate decayed until step {before[1]:,}, not {now[1]:,}"
        return f"{trained}; --id starts another" if written else None
    old, new = _rate(done - 1, before, peak, schedule), _rate(done, now, peak, schedule)
    jump = f"from {old:.3g} in step {done:,} to {new:.3g} in step {done + 1:,}"
    if written:
        return f"the learning rate goes {jump}: it decays until step {now[1]:,} now, not {before[1]:,}"
    length = next(key for key in LENGTH_KEYS if getattr(recipe.train, key) is not None)
    hint = (
        f"write train.schedule.decay={before[1]} to keep the curve and stay at min_lr after it, "
        f"or train.schedule.decay={steps} to change it knowingly"
    )
    if schedule.name == "wsd":
        hint = "start another run with --id and `model.from` the checkpoint, or keep the length of this one"
    raise InputError(
        f"this run's learning rate decays until step {before[1]:,}; with {steps:,} steps it would go {jump}",
        where=recipe.where(f"train.{length}"),
        hint=hint,
    )


def check_resumed_decay(recipe: Recipe, steps: int, checkpoint: CompleteCheckpoint) -> str | None:
    """Call `check_decay` for a checkpoint; one of an earlier version does not say how its learning rate decays."""
    if "lr_decay" in checkpoint.facts:
        before = checkpoint.facts["lr_decay"]
        return check_decay(recipe, steps, checkpoint.step, before and (before[0], before[1]))
    span = decay_span(steps, recipe.train.schedule)
    if span is None or checkpoint.step >= steps or checkpoint.step - 1 <= span[0]:
        return None
    return (
        f"the checkpoint of step {checkpoint.step:,} does not say until which step its learning rate decays: "
        f"taken to be {span[1]:,}"
    )
