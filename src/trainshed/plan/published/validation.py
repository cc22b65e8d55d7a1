"""Predictions compared with published measurements: `validate_rows` predicts every row, or skips it with a reason.

- Step time: predicted seconds / measured seconds - 1. The null model, which knows no layouts, is compared too: a
  constant TFLOP/s per GPU, the median of the rows of the same source, GPU and precision. `above_10_percent_mfu` leaves
  out rows that are so slow that the model's arithmetic hardly explains them.
- Memory: the figure that the source reports, on the rank that it reports: tensors alone for `allocated`, `active` and
  where nothing is stated, with the reserve for `reserved` and `nvidia-smi`.
- Out of memory: rows that ran out of memory and rows that ran; a row is predicted to run out if it does not fit its
  GPU. The sweep does not distinguish memory from other crashes, so a layout that its engine cannot build counts too.
- Regret: how much slower our choice is than the best measured layout, in groups of three or more layouts of one source,
  model, engine, GPU, number of GPUs, sequence length, global batch and precision. We choose as the search does
  (`rank_predictions`). A layout that was measured several times counts once, with its median.

All scores are fractions. A score without any rows is None, never 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf
from statistics import fmean, median
from typing import Any

from trainshed.errors import TrainshedError
from trainshed.plan.performance.prediction import LayoutPrediction, predict
from trainshed.plan.published.cases import PublishedCase, row_case
from trainshed.plan.published.rows import PublishedRow, SkippedRow
from trainshed.plan.search.search import rank_predictions


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
class OutOfMemoryScores:
    """How well predictions separate what runs out of memory from what fits."""

    positives: int = 0
    """Rows that ran out of memory."""
    negatives: int = 0
    """Rows that ran."""
    precision: float | None = None
    """Share of those predicted not to fit that did not fit."""
    recall: float | None = None
    """Share of those that did not fit that were predicted so."""
    balanced_accuracy: float | None = None
    """Mean of the shares predicted right among those that did not fit and among those that did."""


def out_of_memory_scores(outcomes: Iterable[tuple[bool, bool]]) -> OutOfMemoryScores:
    """Score pairs of whether memory was predicted to run out and whether it did."""
    pairs = list(outcomes)
    positives = sum(true for _, true in pairs)
    negatives = len(pairs) - positives
    caught = sum(predicted and true for predicted, true in pairs)
    alarms = sum(predicted for predicted, _ in pairs)
    recall = caught / positives if positives else None
    specificity = (negatives - alarms + caught) / negatives if negatives else None
    balanced = (recall + specificity) / 2 if recall is not None and specificity is not None else None
    return OutOfMemoryScores(positives, negatives, caught / alarms if alarms else None, recall, balanced)


@dataclass(frozen=True)
class RegretScores:
    """How much slower the layouts we would have chosen are than the best measured ones."""

    groups: int = 0
    top1_mean: float | None = None
    top1_worst: float | None = None
    top3_mean: float | None = None
    """Of the best of the three that we would have tried first."""
    top3_worst: float | None = None


def regret_scores(groups: Iterable[Sequence[float]]) -> RegretScores:
    """Score groups of layouts by their measured seconds, in the order in which we would choose them."""
    first: list[float] = []
    three: list[float] = []
    for measured in groups:
        best = min(measured)
        first.append(measured[0] / best - 1)
        three.append(min(measured[:3]) / best - 1)
    if not first:
        return RegretScores()
    return RegretScores(len(first), fmean(first), max(first), fmean(three), max(three))


SLOW_MFU = 0.1
_LAYOUTS_TO_CHOOSE_FROM = 3


@dataclass(frozen=True)
class JudgedRow:
    """One row with its prediction."""

    row: PublishedRow
    case: PublishedCase
    prediction: LayoutPrediction
    step_seconds: float | None
    """Measured; None if the row has none."""
    memory_gib: float | None
    """Measured; None if the row has none."""

    @cached_property
    def measured_tflops(self) -> float:
        """TFLOP/s per GPU that was measured, as the planner counts FLOPs."""
        assert self.step_seconds is not None
        # The predicted rate has the same FLOPs: only the seconds differ.
        return self.prediction.tflops_per_gpu * self.prediction.step_seconds / self.step_seconds

    @property
    def mfu(self) -> float:
        """The published MFU, or the measured one as the planner counts FLOPs."""
        return self.row.mfu if self.row.mfu is not None else self.measured_tflops / self.prediction.peak_tflops

    @cached_property
    def predicted_gib(self) -> float:
        """The predicted memory that corresponds to the measured one."""
        stages = [stage.memory for stage in self.prediction.stages]
        if (stage := self.row.memory_stage) in ("first", "last"):
            stages = [stages[0 if stage == "first" else -1]]
        with_reserve = self.row.memory_metric in ("reserved", "nvidia-smi")
        return max(memory.total if with_reserve else memory.allocated for memory in stages)

    @property
    def predicted_to_fail(self) -> bool:
        """Whether it is predicted not to run: for lack of memory, or because its engine has no such layout."""
        return not self.prediction.fits or self.case.cannot_run is not None

    @property
    def description(self) -> str:
        """The model, the GPUs and the layout of the row."""
        training, layout = self.case.training, self.case.layout
        recompute = "" if layout.recompute == "none" else f", recompute {layout.recompute}"
        where = f"{training.gpus} x {training.hardware.gpu_name} {training.precision}"
        return f"{self.row.model} on {where}, {layout}, micro-batch {layout.micro_batch}{recompute}"

    def to_plain(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        predicted = {"step_seconds": self.prediction.step_seconds, "memory_gib": self.predicted_gib}
        measured = {"step_seconds": self.step_seconds, "memory_gib": self.memory_gib}
        return {
            "source": self.row.source,
            "row": self.row.number,
            "what": self.description,
            "predicted": predicted,
            "measured": measured,
            "mfu": self.mfu if self.step_seconds else None,
        }


@dataclass(frozen=True)
class StepTimeScores(ErrorScores):
    """Errors of step times, and the mean error of the null model."""

    null_mape: float | None = None


@dataclass(frozen=True)
class ValidationScores:
    """All scores of a set of rows."""

    rows: int
    skipped: int
    step_time: StepTimeScores
    above_10_percent_mfu: StepTimeScores
    memory: ErrorScores
    out_of_memory: OutOfMemoryScores
    regret: RegretScores

    def to_plain(self) -> dict[str, Any]:
        """Return the scores as JSON has them."""
        plain = asdict(self)
        plain["step_time"]["above_10_percent_mfu"] = plain.pop("above_10_percent_mfu")
        return plain


@dataclass(frozen=True)
class PlannerValidation:
    """All rows, judged or skipped."""

    judged: tuple[JudgedRow, ...]
    skipped: tuple[tuple[PublishedRow, str], ...]
    """Rows that were not predicted, with the reason."""

    def scores(self) -> ValidationScores:
        """Score all rows together."""
        return self._scores(self.judged, len(self.skipped))

    def scores_by(self, key: Callable[[PublishedRow], str]) -> dict[str, ValidationScores]:
        """Score rows by what `key` says of them, most rows first."""
        judged: defaultdict[str, list[JudgedRow]] = defaultdict(list)
        for one in self.judged:
            judged[key(one.row)].append(one)
        skipped = Counter(key(row) for row, _ in self.skipped)
        scores = {name: self._scores(judged[name], skipped[name]) for name in {**judged, **skipped}}
        return dict(sorted(scores.items(), key=lambda item: (-item[1].rows, item[0])))

    def worst(self, count: int) -> list[JudgedRow]:
        """Return the rows whose step time was predicted worst, by how many times off it is either way."""
        timed = [(one.prediction.step_seconds / one.step_seconds, one) for one in self.judged if one.step_seconds]
        timed.sort(key=lambda pair: -max(pair[0], 1 / pair[0]))
        return [one for _, one in timed[:count]]

    def reasons(self) -> dict[str, int]:
        """Count why rows were skipped."""
        return dict(Counter(reason for _, reason in self.skipped).most_common())

    def to_plain(self) -> dict[str, Any]:
        """Return the report as JSON has it: fractions, null where there is nothing to judge by."""
        by_source = {name: scores.to_plain() for name, scores in self.scores_by(lambda row: row.source).items()}
        return {**self.scores().to_plain(), "skipped_reasons": self.reasons(), "by_source": by_source}

    def _scores(self, judged: Sequence[JudgedRow], skipped: int) -> ValidationScores:
        timed = [one for one in judged if one.step_seconds is not None]
        return ValidationScores(
            rows=len(judged) + skipped,
            skipped=skipped,
            step_time=step_time_scores(timed),
            above_10_percent_mfu=step_time_scores([one for one in timed if one.mfu > SLOW_MFU]),
            memory=error_scores((one.predicted_gib, one.memory_gib) for one in judged if one.memory_gib is not None),
            out_of_memory=out_of_memory_scores(
                (one.predicted_to_fail, one.row.out_of_memory) for one in judged if _says_whether_it_fits(one)
            ),
            regret=regret_scores(_ranked_groups(timed)),
        )


def validate_rows(rows: Iterable[PublishedRow]) -> PlannerValidation:
    """Predict every row, or skip it and say why."""
    judged: list[JudgedRow] = []
    skipped: list[tuple[PublishedRow, str]] = []
    for row in rows:
        try:
            judged.append(_judge(row))
        except SkippedRow as skip:
            skipped.append((row, str(skip)))
        except TrainshedError as error:
            skipped.append((row, error.what))
        except (ArithmeticError, AssertionError, LookupError, ValueError, TypeError) as error:
            # A row that no rule foresaw must not stop the others.
            skipped.append((row, f"its figures do not go together ({type(error).__name__}: {error})"))
    return PlannerValidation(tuple(judged), tuple(skipped))


def _judge(row: PublishedRow) -> JudgedRow:
    case = row_case(row)
    if (
        min(*case.layout.dense_shape, *case.layout.expert_shape, case.layout.micro_batch, case.training.tokens_per_step)
        < 1
    ):
        raise SkippedRow("one of its sizes is not above 0")
    judged = JudgedRow(
        row,
        case,
        predict(case.training, case.layout),
        _positive_or_none(row.step_seconds),
        _positive_or_none(row.memory_gib),
    )
    if not _says_whether_it_fits(judged):
        raise SkippedRow("the row has no step time and no memory, and did not run out of it")
    if _positive_or_none(judged.prediction.step_seconds) is None:
        raise SkippedRow(f"there is no prediction for it: {judged.prediction.step_seconds} s")
    return judged


def _positive_or_none(value: float | None) -> float | None:
    """A measured amount; None if it is not a positive number."""
    return value if value is not None and 0 < value < inf else None


def step_time_scores(timed: Sequence[JudgedRow]) -> StepTimeScores:
    """Score the step times of rows that have one, and the null model on the same rows."""
    pairs = [(one.prediction.step_seconds, one.step_seconds or inf) for one in timed]
    null = error_scores(_null_pairs(timed))
    return StepTimeScores(**asdict(error_scores(pairs)), null_mape=null.mape)


def _null_pairs(timed: Sequence[JudgedRow]) -> list[tuple[float, float]]:
    """Rates in place of seconds, as the FLOPs are the same: (measured, constant) for (predicted, measured) seconds."""
    groups = _grouped(
        timed, lambda one: (one.row.source, one.case.training.hardware.gpu_name, one.case.training.precision)
    )
    pairs: list[tuple[float, float]] = []
    for group in groups:
        constant = median(one.measured_tflops for one in group)
        pairs += [(one.measured_tflops, constant) for one in group]
    return pairs


def _ranked_groups(timed: Sequence[JudgedRow]) -> list[list[float]]:
    """Measured seconds of the layouts of each group, in the order in which we would choose them."""
    groups: defaultdict[Hashable, defaultdict[PublishedCase, list[JudgedRow]]] = defaultdict(lambda: defaultdict(list))
    for one in timed:
        groups[one.row.group][one.case].append(one)
    choices: list[list[float]] = []
    for cases in groups.values():
        if len(cases) >= _LAYOUTS_TO_CHOOSE_FROM:
            # Rows of one case have equal predictions: the first stands for all.
            firsts = [same[0].prediction for same in cases.values()]
            medians = (median(one.step_seconds or inf for one in same) for same in cases.values())
            measured = {id(prediction): seconds for prediction, seconds in zip(firsts, medians, strict=True)}
            choices.append([measured[id(prediction)] for prediction in rank_predictions(firsts)])
    return choices


def _grouped(rows: Iterable[JudgedRow], key: Callable[[JudgedRow], Hashable]) -> list[list[JudgedRow]]:
    groups: defaultdict[Hashable, list[JudgedRow]] = defaultdict(list)
    for one in rows:
        groups[key(one)].append(one)
    return list(groups.values())


def _says_whether_it_fits(one: JudgedRow) -> bool:
    return one.row.out_of_memory or one.step_seconds is not None or one.memory_gib is not None
