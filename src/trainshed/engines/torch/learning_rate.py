"""The learning rate of each step: a function of the step and the recipe alone."""

from __future__ import annotations

import math

from trainshed.recipe.train import Schedule


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule) -> float:
    """Return the learning rate of a step (counted from 0) in a run of `steps` steps.

    Warm-up is linear and reaches the peak at step `warmup`. Cosine and linear reach `min_lr` at step `decay`, which
    is the end of the run where the recipe does not say; wsd stays at the peak until `decay` steps before the end.
    """
    if step < schedule.warmup:
        return peak * (step + 1) / (schedule.warmup + 1)
    if schedule.name == "constant":
        return peak
    if schedule.name == "wsd":
        assert schedule.decay is not None, "the schema asks for it"
        start, end = max(schedule.warmup, steps - schedule.decay), steps
    else:
        start, end = schedule.warmup, schedule.decay or steps
    if step < start:
        return peak
    done = min(1.0, (step - start) / max(1, end - start))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule.name == "cosine" else 1.0 - done
    return schedule.min_lr + (peak - schedule.min_lr) * left
