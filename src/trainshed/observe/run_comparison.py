"""Compare two trainings step by step by their events: batches, losses and gradient norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from trainshed.errors import TrainshedError

_DIFFERENCES = ("loss_difference", "grad_norm_difference")


@dataclass(frozen=True)
class Tolerance:
    """By how much, relative to their size, losses and gradient norms may differ."""

    loss: float
    grad_norm: float


FLOAT64_TOLERANCE = Tolerance(1e-9, 1e-9)
"""What rounding in another order may cost in float64, over tens of steps."""
BITWISE_TOLERANCE = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class ComparedStep:
    """One step (counted from 1) of two trainings; a figure that is not finite is None."""

    step: int
    loss: float | None
    other_loss: float | None
    grad_norm: float | None
    other_grad_norm: float | None
    same_batch: bool

    @property
    def loss_difference(self) -> float:
        """The relative difference of the losses."""
        return relative_difference(self.loss, self.other_loss)

    @property
    def grad_norm_difference(self) -> float:
        """The relative difference of the gradient norms."""
        return relative_difference(self.grad_norm, self.other_grad_norm)

    def to_plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self) | _differences(self)


@dataclass(frozen=True)
class RunComparison:
    """Two trainings, and how far apart they may be."""

    steps: tuple[ComparedStep, ...]
    bound: Tolerance

    @property
    def loss_difference(self) -> float:
        """The largest relative difference of the losses."""
        return max(step.loss_difference for step in self.steps)

    @property
    def grad_norm_difference(self) -> float:
        """The largest relative difference of the gradient norms."""
        return max(step.grad_norm_difference for step in self.steps)

    @property
    def same_batches(self) -> bool:
        """Whether every step has seen the same tokens in the same order."""
        return all(step.same_batch for step in self.steps)

    @property
    def equal(self) -> bool:
        """Whether the batches are the same and everything is within the bound."""
        within = self.loss_difference <= self.bound.loss and self.grad_norm_difference <= self.bound.grad_norm
        return within and self.same_batches

    def to_plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "equal": self.equal,
            "bounds": asdict(self.bound),
            "same_batches": self.same_batches,
            **_differences(self),
            "rows": [step.to_plain() for step in self.steps],
        }


def compare_runs(
    expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]], bound: Tolerance
) -> RunComparison:
    """Hold the step events of one training against those of another, which must be of the same steps."""
    steps, others = ([event["step"] for event in events] for events in (expected, found))
    if steps != others or not steps:
        raise TrainshedError(f"one training has {_span(steps)}, the other {_span(others)}: they cannot be compared")
    compared = (
        ComparedStep(
            step=one["step"] + 1,
            loss=one["loss"],
            other_loss=other["loss"],
            grad_norm=one["grad_norm"],
            other_grad_norm=other["grad_norm"],
            same_batch=one["batch_hash"] == other["batch_hash"],
        )
        for one, other in zip(expected, found, strict=True)
    )
    return RunComparison(tuple(compared), bound)


def relative_difference(one: float | None, other: float | None) -> float:
    """The difference of two figures relative to the larger; infinite where one of them is not finite."""
    if one is None or other is None:
        return inf
    return 0.0 if one == other else abs(one - other) / max(abs(one), abs(other))


def _differences(of: ComparedStep | RunComparison) -> dict[str, float | None]:
    """The differences by name, null where infinite: JSON knows no infinity."""
    found = {key: getattr(of, key) for key in _DIFFERENCES}
    return {key: None if value == inf else value for key, value in found.items()}


def _span(steps: list[int]) -> str:
    return f"steps {steps[0] + 1} to {steps[-1] + 1}" if steps else "no steps"
