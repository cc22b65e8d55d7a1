"""What a batch without an update gives: its loss, by how many labels it counts, and whether a rank is to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EvaluationResult:
    """The loss of a batch on all ranks: the mean over its labelled tokens (or pairs), and how many those are."""

    loss: float
    labelled: int
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Those of `StepMetrics`, where pairs are compared."""
    stop_signal: int | None = None
    """The signal that some rank has received."""

    @classmethod
    def mean(cls, results: Sequence[EvaluationResult]) -> EvaluationResult:
        """Return the result of several batches together; NaN where nothing has a label.

        A batch weighs as many times the first one as it has labels. Where all have the same number, this is the plain
        mean of their losses, without any rounding of its own.
        """
        weights = [result.labelled / (results[0].labelled or 1) for result in results]

        def mean(values: Sequence[float]) -> float:
            weighted = (weight * value for weight, value in zip(weights, values, strict=True) if weight)
            return sum(weighted) / sum(weights) if sum(weights) else float("nan")

        return cls(
            mean([result.loss for result in results]),
            sum(result.labelled for result in results),
            {name: mean([result.rewards[name] for result in results]) for name in results[0].rewards},
            results[-1].stop_signal,
        )
