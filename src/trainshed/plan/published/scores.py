"""How good predictions are: errors of a quantity, a yes or no, and what a wrong choice costs. All are fractions.

A score that nothing can be said about (no such rows) is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True)
class ErrorScores:
    """Relative errors of predicted amounts, predicted / measured - 1."""

    count: int = 0
    mape: float | None = None
    """Mean of the absolute errors."""
    median: float | None = None
    """Median of the absolute errors."""
    bias: float | None = None
    """Mean of the signed errors: above 0, predictions are too large."""
    worst: float | None = None
    """The largest absolute error."""


def error_scores(pairs: Iterable[tuple[float, float]]) -> ErrorScores:
    """Score (predicted, measured) amounts."""
    errors = [predicted / measured - 1 for predicted, measured in pairs]
    if not errors:
        return ErrorScores()
    sizes = [abs(error) for error in errors]
    return ErrorScores(len(errors), fmean(sizes), median(sizes), fmean(errors), max(sizes))


@dataclass(frozen=True)
class FitScores:
    """How well predictions tell what runs out of memory from what fits."""

    positives: int = 0
    """Rows that ran out of memory."""
    negatives: int = 0
    """Rows that ran."""
    precision: float | None = None
    """Of those predicted not to fit, the share that did not."""
    recall: float | None = None
    """Of those that did not fit, the share predicted so."""
    balanced_accuracy: float | None = None
    """Mean of the shares that were right among those that did not fit and among those that did."""


def fit_scores(answers: Iterable[tuple[bool, bool]]) -> FitScores:
    """Score (predicted, true) answers to the question whether memory runs out."""
    pairs = list(answers)
    positives = sum(true for _, true in pairs)
    negatives = len(pairs) - positives
    caught = sum(predicted and true for predicted, true in pairs)
    alarms = sum(predicted for predicted, _ in pairs)
    recall = caught / positives if positives else None
    specificity = (negatives - alarms + caught) / negatives if negatives else None
    balanced = (recall + specificity) / 2 if recall is not None and specificity is not None else None
    return FitScores(positives, negatives, caught / alarms if alarms else None, recall, balanced)


@dataclass(frozen=True)
class RegretScores:
    """How much slower the layouts we would have chosen are than the best measured ones."""

    groups: int = 0
    top1_mean: float | None = None
    top1_worst: float | None = None
    top3_mean: float | None = None
    """The best measured one of the three that we would have put first."""
    top3_worst: float | None = None


def regret_scores(groups: Iterable[Sequence[float]]) -> RegretScores:
    """Score groups of layouts that could have been chosen: their measured seconds, in the order we would choose."""
    first: list[float] = []
    three: list[float] = []
    for measured in groups:
        best = min(measured)
        first.append(measured[0] / best - 1)
        three.append(min(measured[:3]) / best - 1)
    if not first:
        return RegretScores()
    return RegretScores(len(first), fmean(first), max(first), fmean(three), max(three))
