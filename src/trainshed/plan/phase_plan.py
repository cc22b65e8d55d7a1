"""The phases of a run in a plan (`train.phases`): each is predicted by itself, and their times add up.

The layout is searched for the phase with the longest sequences among those that leave the layout to the recipe: it
needs the most memory. The others are predicted on the same layout, and those with a layout of their own on that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout, layout_plain, resolve_layout
from trainshed.plan.performance.prediction import LayoutPrediction
from trainshed.plan.search.search import evaluate_layout
from trainshed.plan.training_shape import TrainingShape
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.yaml_io import SourceMap


@dataclass(frozen=True)
class PlannedPhase:
    """What a phase is, for a plan: its length and what differs from the other phases."""

    name: str
    steps: int
    config: ModelConfig
    sequence_length: int
    global_batch: int
    layout: Layout | None
    """Its own; None: that of the run."""
    document_length: float | None = None


@dataclass(frozen=True)
class PhasePrediction:
    """A phase and what its layout would do."""

    phase: PlannedPhase
    prediction: LayoutPrediction

    @property
    def seconds(self) -> float:
        """All its steps, without saves and failures."""
        return self.phase.steps * self.prediction.step_seconds

    def text(self) -> str:
        """One line for people."""
        phase, chosen = self.phase, self.prediction
        return (
            f"phase {phase.name}: {phase.steps:,} steps of {phase.global_batch:,} × {phase.sequence_length:,} tokens "
            f"on {chosen.layout}: {chosen.step_seconds:.3g} s a step, {chosen.mfu:.1%} MFU, "
            f"{chosen.memory.total:.0f} GiB, {self.seconds / 3600:.1f} hours"
        )

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        phase, chosen = self.phase, self.prediction
        return {
            "name": phase.name,
            "steps": phase.steps,
            "sequence_length": phase.sequence_length,
            "global_batch": phase.global_batch,
            "layout": layout_plain(chosen.layout),
            "step_seconds": chosen.step_seconds,
            "mfu": chosen.mfu,
            "memory_gib": chosen.memory.total,
            "fits": chosen.fits,
            "hours": self.seconds / 3600,
        }


def predict_phases(
    phases: tuple[PlannedPhase, ...], training: TrainingShape, layout: RankLayout, engine: str, places: SourceMap | None
) -> tuple[PhasePrediction, ...]:
    """Predict every phase on its own layout or on `layout`; an illegal one is an `InputError` that names its phase."""
    predictions: list[PhasePrediction] = []
    for number, phase in enumerate(phases):
        shape = replace(
            training,
            sequence_length=phase.sequence_length,
            global_batch=phase.global_batch,
            document_length=phase.document_length,
        )
        try:
            chosen = evaluate_layout(shape, phase_layout(phase, layout), engine=engine, places=places).chosen
        except InputError as error:
            own = ("train", "phases", number, *(() if phase.layout is None else ("layout",)))
            where = error.where if places is None else places.where(own)
            raise type(error)(f"phase {phase.name}: {error.what}", where=where, hint=error.hint) from None
        predictions.append(PhasePrediction(phase, chosen))
    return tuple(predictions)


def phase_layout(phase: PlannedPhase, layout: RankLayout) -> RankLayout:
    """Return the layout of a phase, on as many ranks as the run has."""
    if phase.layout is None:
        return layout
    return resolve_layout(phase.layout, phase.config, world_size=layout.world_size)


def mean_step_seconds(phases: tuple[PhasePrediction, ...]) -> float | None:
    """Return the mean step over all phases; None where there are none."""
    steps = sum(phase.phase.steps for phase in phases)
    return sum(phase.seconds for phase in phases) / steps if steps else None
