"""The planner against published measurements: every row predicted, or skipped with its reason.

What is compared with what:

- Step time: predicted seconds / measured seconds - 1. Beside it the null model, which knows no layouts: a constant
  TFLOP/s per GPU, the median of the very rows of the same source, GPU and precision. `above_10_percent_mfu` leaves out
  rows so slow that what held them up is hardly the model's arithmetic.
- Memory: the figure that the source means, on the rank it means: what tensors fill for `allocated`, `active` and where
  nothing is said, with the reserve for `reserved` and `nvidia-smi`.
- Out of memory: rows that ran out against rows that ran; predicted to run out is what does not fit its card. The sweep
  does not tell memory from other crashes, so a layout that its engine cannot build counts as predicted too.
- Regret: among the measured layouts of one source, model, engine, GPU, number of GPUs, sequence length, global batch
  and precision, three or more of them, how much slower the one we would choose is than the best. We choose as the
  search does (`rank_predictions`). A layout that was measured several times counts once, with its median.

All scores are fractions. A score that nothing can be said about (no such rows) is None, never 0.
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


def out_of_memory_scores(answers: Iterable[tuple[bool, bool]]) -> OutOfMemoryScores:
    """Score (predicted, true) answers to the question whether memory runs out."""
    pairs = list(answers)
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


SLOW_MFU = 0.1
_LAYOUTS_TO_CHOOSE_FROM = 3


@dataclass(frozen=True)
class JudgedRow:
    """One row with its prediction."""

    row: PublishedRow
    case: PublishedCase
    prediction: LayoutPrediction
    step_seconds: float | None
    """Measured; None where the row has none."""
    memory_gib: float | None
    """Measured; None where the row has none."""

    @cached_property
    def measured_tflops(self) -> float:
        """TFLOP/s per GPU that was measured, as the planner counts FLOPs."""
        assert self.step_seconds is not None
        # The prediction's rate is over the same FLOPs: only the seconds differ.
        return self.prediction.tflops_per_gpu * self.prediction.step_seconds / self.step_seconds

    @property
    def mfu(self) -> float:
        """The utilisation that the source gives, or the measured one as the planner counts it."""
        return self.row.mfu if self.row.mfu is not None else self.measured_tflops / self.prediction.peak_tflops

    @cached_property
    def predicted_gib(self) -> float:
        """What the measured memory is compared with."""
        stages = [stage.memory for stage in self.prediction.stages]
        if (whose := self.row.memory_stage) in ("first", "last"):
            stages = [stages[0 if whose == "first" else -1]]
        with_reserve = self.row.memory_metric in ("reserved", "nvidia-smi")
        return max(memory.total if with_reserve else memory.allocated for memory in stages)

    @property
    def fails(self) -> bool:
        """Whether the planner says that it cannot run: of memory, or because its engine has no such layout."""
        return not self.prediction.fits or self.case.cannot_run is not None

    @property
    def words(self) -> str:
        """What the row is of."""
        job, layout = self.case.job, self.case.layout
        recompute = "" if layout.recompute == "none" else f", recompute {layout.recompute}"
        where = f"{job.gpus} x {job.hardware.gpu_name} {job.precision}"
        return f"{self.row.model} on {where}, {layout}, micro-batch {layout.micro_batch}{recompute}"

    def to_plain(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        predicted = {"step_seconds": self.prediction.step_seconds, "memory_gib": self.predicted_gib}
        measured = {"step_seconds": self.step_seconds, "memory_gib": self.memory_gib}
        found = {"source": self.row.source, "row": self.row.number, "what": self.words}
        return {**found, "predicted": predicted, "measured": measured, "mfu": self.mfu if self.step_seconds else None}


@dataclass(frozen=True)
class StepTimeScores(ErrorScores):
    """Errors of step times, beside those of the null model."""

    null_mape: float | None = None


@dataclass(frozen=True)
class ValidationScores:
    """What is known of a set of rows."""

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
        found = {name: self._scores(judged[name], skipped[name]) for name in {**judged, **skipped}}
        return dict(sorted(found.items(), key=lambda item: (-item[1].rows, item[0])))

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
                (one.fails, one.row.out_of_memory) for one in judged if _says_whether_it_fits(one)
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
            # A row that no rule foresaw must not cost the report of the others.
            skipped.append((row, f"its figures do not go together ({type(error).__name__}: {error})"))
    return PlannerValidation(tuple(judged), tuple(skipped))


def _judge(row: PublishedRow) -> JudgedRow:
    case = row_case(row)
    if min(*case.layout.dense_shape, *case.layout.expert_shape, case.layout.micro_batch, case.job.tokens_per_step) < 1:
        raise SkippedRow("one of its sizes is not above 0")
    judged = JudgedRow(
        row,
        case,
        predict(case.job, case.layout),
        _positive_or_none(row.step_seconds),
        _positive_or_none(row.memory_gib),
    )
    if not _says_whether_it_fits(judged):
        raise SkippedRow("the row has no step time and no memory, and did not run out of it")
    if _positive_or_none(judged.prediction.step_seconds) is None:
        raise SkippedRow(f"there is no prediction for it: {judged.prediction.step_seconds} s")
    return judged


def _positive_or_none(value: float | None) -> float | None:
    """A measured amount; one that is no positive number was not measured."""
    return value if value is not None and 0 < value < inf else None


def step_time_scores(timed: Sequence[JudgedRow]) -> StepTimeScores:
    """Score the step times of rows that have one, and the null model on the same rows."""
    pairs = [(one.prediction.step_seconds, one.step_seconds or inf) for one in timed]
    null = error_scores(_null_pairs(timed))
    return StepTimeScores(**asdict(error_scores(pairs)), null_mape=null.mape)


def _null_pairs(timed: Sequence[JudgedRow]) -> list[tuple[float, float]]:
    """What a constant TFLOP/s per GPU predicts, and what was measured: inversely, as the FLOPs are the same."""
    groups = _grouped(timed, lambda one: (one.row.source, one.case.job.hardware.gpu_name, one.case.job.precision))
    pairs: list[tuple[float, float]] = []
    for group in groups:
        constant = median(one.measured_tflops for one in group)
        pairs += [(one.measured_tflops, constant) for one in group]
    return pairs


def _ranked_groups(timed: Sequence[JudgedRow]) -> list[list[float]]:
    return ranked_measurements((one.row.group, one.case, one.prediction, one.step_seconds or inf) for one in timed)


def ranked_measurements(timed: Iterable[tuple[Hashable, PublishedCase, LayoutPrediction, float]]) -> list[list[float]]:
    """Return the layouts of each group that one could have chosen from: measured seconds, in the order of our choice.

    What goes in is the group of a row, the row as a case, what is predicted of it, and its measured seconds.
    """
    groups: defaultdict[Hashable, defaultdict[PublishedCase, list[tuple[LayoutPrediction, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for group, case, prediction, seconds in timed:
        groups[group][case].append((prediction, seconds))
    choices: list[list[float]] = []
    for cases in groups.values():
        if len(cases) >= _LAYOUTS_TO_CHOOSE_FROM:
            # Rows of one case are predicted alike: any of them stands for all.
            measured = {id(same[0][0]): median(seconds for _, seconds in same) for same in cases.values()}
            order = rank_predictions(same[0][0] for same in cases.values())
            choices.append([measured[id(prediction)] for prediction in order])
    return choices


def _grouped(rows: Iterable[JudgedRow], key: Callable[[JudgedRow], Hashable]) -> list[list[JudgedRow]]:
    groups: defaultdict[Hashable, list[JudgedRow]] = defaultdict(list)
    for one in rows:
        groups[key(one)].append(one)
    return list(groups.values())


def _says_whether_it_fits(one: JudgedRow) -> bool:
    return one.row.out_of_memory or one.step_seconds is not None or one.memory_gib is not None
