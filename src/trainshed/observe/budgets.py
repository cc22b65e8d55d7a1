"""How long a rank may be in each phase without progress: what the recipe says, or a default that suits most runs.

The step's default follows the run itself: a large model has steps of many minutes, and nobody should have to know
that beforehand.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from trainshed.recipe import Recipe
from trainshed.recipe.section import format_short_duration

DEFAULT_BUDGET_SECONDS: Mapping[str, float] = {
    "rendezvous": 600,
    "load": 3600,
    "first_step": 3600,
    "step": 600,
    "validation": 3600,
    "checkpoint": 3600,
}
"""Budgets of phases that the recipe says nothing about."""

STEP_MULTIPLE = 10
"""The budget of a step in usual step times, where that is more than its default."""

_USUAL_STEPS = 20


class PhaseBudgets:
    """The budgets of one attempt's phases; `written` are those that the recipe has."""

    def __init__(self, written: Mapping[str, float] | None = None) -> None:
        self._written = dict(written or {})
        if unknown := self._written.keys() - DEFAULT_BUDGET_SECONDS.keys():
            raise ValueError(f"there is no phase '{min(unknown)}'; there are {', '.join(DEFAULT_BUDGET_SECONDS)}")
        self._recent: deque[float] = deque(maxlen=_USUAL_STEPS)

    @classmethod
    def of(cls, recipe: Recipe) -> PhaseBudgets:
        """Return the budgets of a recipe."""
        written = dict(recipe.budgets.written if recipe.budgets is not None else {})
        if recipe.data.stage != "direct":
            # A node that joins later copies all tokens first, and the others wait for its ranks.
            written.setdefault("rendezvous", DEFAULT_BUDGET_SECONDS["load"])
        return cls(written)

    def seconds(self, phase: str) -> float:
        """Return how long a rank may be in a phase without a heartbeat."""
        if phase in self._written:
            return self._written[phase]
        if phase not in DEFAULT_BUDGET_SECONDS:
            raise ValueError(f"no budget for the phase '{phase}'; there are {', '.join(DEFAULT_BUDGET_SECONDS)}")
        default = DEFAULT_BUDGET_SECONDS[phase]
        if phase == "step" and self._recent:
            return max(default, STEP_MULTIPLE * statistics.median(self._recent))
        return default

    def collective_seconds(self, phase: str) -> float:
        """Return how long a rank waits for others in one collective of a phase.

        In phases in which ranks load, compile or save, one may be that much later than another. In a step it is half
        the budget: the ranks that wait write down where they are before the late one is ended. NCCL counts from the
        launch, which may be a step earlier than the collective itself: ten steps leave room for that.
        """
        return self.seconds(phase) / 2 if phase == "step" else self.seconds(phase)

    def add_step(self, seconds: float) -> None:
        """Tell how long a step took; the first one, which also compiles, is forgotten after a few."""
        self._recent.append(seconds)

    def advice(self, phase: str) -> str:
        """Say which key of the recipe allows more time."""
        more = format_short_duration(2 * round(self.seconds(phase)) or 2 * self.seconds(phase))
        return f"where it was only slow, write `budgets: {{{phase}: {more}}}`"
