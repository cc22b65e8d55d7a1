"""Which steps of a run each phase of `train.phases` is, and what it says as a recipe of its own.

Phases follow one another in the steps of the run. The counter of samples belongs to the data: phases that read the
same data at the same sequence length share one, so that the later goes on where the earlier stopped. A phase depends
on itself and on those before it: to extend the last one changes nothing of the past.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from trainshed.recipe.data import DataSection
from trainshed.recipe.model import ModelConfig
from trainshed.recipe.phases import TrainPhase
from trainshed.recipe.schema import Recipe


@dataclass(frozen=True)
class PhaseRate:
    """The learning rate of a phase: from `begin` to `end` in a shape.

    Over n steps, step i (from 0) of a falling rate has `end` + (`begin` - `end`) · left, where left is 1 - i / n, or
    (1 + cos(π · i / n)) / 2. A rising rate counts (i + 1) / (n + 1) instead, so that the first step is not lost at 0.
    """

    begin: float
    end: float
    shape: Literal["constant", "linear", "cosine"]

    @property
    def varies(self) -> bool:
        """Whether it depends on the length of the phase."""
        return self.shape != "constant" and self.begin != self.end

    def at(self, step: int, steps: int) -> float:
        """Return the learning rate of a step (from 0) of a phase of `steps` steps."""
        if not self.varies:
            return self.end
        if self.end > self.begin:
            if self.shape == "linear":
                return self.begin + (self.end - self.begin) * (step + 1) / (steps + 1)
            return self.begin + (self.end - self.begin) * 0.5 * (1.0 - math.cos(math.pi * (step + 1) / (steps + 1)))
        done = step / steps
        left = 0.5 * (1.0 + math.cos(math.pi * done)) if self.shape == "cosine" else 1.0 - done
        return self.end + (self.begin - self.end) * left


@dataclass(frozen=True)
class PhaseSpan:
    """One phase in the steps [start, end) of the run."""

    number: int
    """From 0."""
    name: str
    start: int
    end: int
    recipe: Recipe
    """What this phase says as a recipe without phases; its `train.steps` are those of the phase."""
    rate: PhaseRate
    first_sample: int
    """Samples of its data that earlier phases have taken."""
    run_samples: int
    """Samples of any data that the run has taken before it."""
    run_tokens: int
    own_sources: bool
    """Whether it has sources of its own."""
    rope_base: float | None
    """Base of the rotary frequencies, where this phase or an earlier one says it."""
    own_layout: bool
    """Whether it has a layout of its own."""
    data_key: str
    """The key of the section that its `skip` is in."""

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return self.end - self.start

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        assert self.recipe.data.sequence_length is not None, "phases ask for it"
        return self.recipe.data.sequence_length

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step of the run (from 0)."""
        return self.rate.at(step - self.start, self.steps)


def phase_spans(recipe: Recipe) -> tuple[PhaseSpan, ...]:
    """Return the phases of a recipe in order; none where it has no `train.phases`."""
    spans: list[PhaseSpan] = []
    consumed: list[tuple[DataSection, int]] = []
    step = run_samples = run_tokens = 0
    rate: float | None = None
    rope_base: float | None = None
    for number, phase in enumerate(recipe.train.phases or ()):
        rope_base = phase.rope_base or rope_base
        alone = _phase_recipe(recipe, phase, rope_base)
        data, batch = alone.data, alone.train.global_batch
        assert data.sequence_length is not None, "phases ask for it"
        steps = phase.phase_steps(data.sequence_length, batch)
        alone = alone.model_copy(update={"train": alone.train.model_copy(update={"steps": steps})})
        first_sample = next((samples for section, samples in consumed if section == data), 0)
        curve = _phase_rate(phase, recipe.train.optimizer.lr, rate)
        spans.append(
            PhaseSpan(
                number=number,
                name=phase.name or f"phase-{number + 1}",
                start=step,
                end=step + steps,
                recipe=alone,
                rate=curve,
                first_sample=first_sample,
                run_samples=run_samples,
                run_tokens=run_tokens,
                own_sources=phase.data is not None and bool(phase.data.train),
                rope_base=rope_base,
                own_layout=phase.layout is not None,
                data_key="data" if phase.data is None else f"train.phases.{number}.data",
            )
        )
        consumed = [item for item in consumed if item[0] != data] + [(data, first_sample + steps * batch)]
        step, rate = step + steps, curve.end
        run_samples, run_tokens = run_samples + steps * batch, run_tokens + steps * batch * data.sequence_length
    return tuple(spans)


def written_steps(recipe: Recipe) -> int | None:
    """Return the length of a run in steps, where the recipe or its phases say it; None: it follows from the data."""
    spans = phase_spans(recipe)
    return spans[-1].end if spans else recipe.train.steps


def with_rope_base(config: ModelConfig, base: float | None) -> ModelConfig:
    """Return an architecture with another base of its rotary frequencies; the same where none is given."""
    if base is None or config.rope is None:
        return config
    return config.model_copy(update={"rope": config.rope.model_copy(update={"base": base})})


def _phase_rate(phase: TrainPhase, peak: float, before: float | None) -> PhaseRate:
    if before is None:
        return PhaseRate(0.0, peak if phase.lr is None else phase.lr, phase.shape)
    return PhaseRate(before, before if phase.lr is None else phase.lr, phase.shape)


def _phase_recipe(recipe: Recipe, phase: TrainPhase, rope_base: float | None) -> Recipe:
    data: dict[str, Any] = {"sequence_length": phase.sequence_length or recipe.data.sequence_length}
    if phase.data is not None:
        data |= {"train": phase.data.train or recipe.data.train, "skip": phase.data.skip}
        data["seed"] = recipe.data.seed if phase.data.seed is None else phase.data.seed
    train = {"phases": None, "global_batch": phase.global_batch or recipe.train.global_batch}
    config = recipe.model.config
    model = recipe.model
    if config is not None:
        model = model.model_copy(update={"config": with_rope_base(config, rope_base)})
    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update=data),
            "train": recipe.train.model_copy(update=train),
            "model": model,
            "layout": recipe.layout if phase.layout is None else phase.layout,
        }
    )
