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
  search does (`searching/choosing.py`). A layout that was measured several times counts once, with its median.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf
from statistics import median
from typing import Any

from trainshed.errors import TrainshedError
from trainshed.plan.performance.predict import predict
from trainshed.plan.performance.prediction import Prediction
from trainshed.plan.published.cases import Case, case_of
from trainshed.plan.published.rows import Row, Skip
from trainshed.plan.published.scores import (
    ErrorScores,
    FitScores,
    RegretScores,
    error_scores,
    fit_scores,
    regret_scores,
)
from trainshed.plan.searching.choosing import in_order_of_choice

SLOW_MFU = 0.1
_LAYOUTS_TO_CHOOSE_FROM = 3


@dataclass(frozen=True)
class Judged:
    """One row with its prediction."""

    row: Row
    case: Case
    prediction: Prediction
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
class Scores:
    """What is known of a set of rows."""

    rows: int
    skipped: int
    step_time: StepTimeScores
    above_10_percent_mfu: StepTimeScores
    memory: ErrorScores
    out_of_memory: FitScores
    regret: RegretScores

    def to_plain(self) -> dict[str, Any]:
        """Return the scores as JSON has them."""
        plain = asdict(self)
        plain["step_time"]["above_10_percent_mfu"] = plain.pop("above_10_percent_mfu")
        return plain


@dataclass(frozen=True)
class Validation:
    """All rows, judged or skipped."""

    judged: tuple[Judged, ...]
    skipped: tuple[tuple[Row, str], ...]
    """Rows that were not predicted, with the reason."""

    def scores(self) -> Scores:
        """Score all rows together."""
        return self._scores(self.judged, len(self.skipped))

    def scores_by(self, key: Callable[[Row], str]) -> dict[str, Scores]:
        """Score rows by what `key` says of them, most rows first."""
        judged: defaultdict[str, list[Judged]] = defaultdict(list)
        for one in self.judged:
            judged[key(one.row)].append(one)
        skipped = Counter(key(row) for row, _ in self.skipped)
        found = {name: self._scores(judged[name], skipped[name]) for name in {**judged, **skipped}}
        return dict(sorted(found.items(), key=lambda item: (-item[1].rows, item[0])))

    def worst(self, count: int) -> list[Judged]:
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

    def _scores(self, judged: Sequence[Judged], skipped: int) -> Scores:
        timed = [one for one in judged if one.step_seconds is not None]
        return Scores(
            rows=len(judged) + skipped,
            skipped=skipped,
            step_time=step_time_scores(timed),
            above_10_percent_mfu=step_time_scores([one for one in timed if one.mfu > SLOW_MFU]),
            memory=error_scores((one.predicted_gib, one.memory_gib) for one in judged if one.memory_gib is not None),
            out_of_memory=fit_scores(
                (one.fails, one.row.out_of_memory) for one in judged if _says_whether_it_fits(one)
            ),
            regret=regret_scores(_choices(timed)),
        )


def validate(rows: Iterable[Row]) -> Validation:
    """Predict every row, or skip it and say why."""
    judged: list[Judged] = []
    skipped: list[tuple[Row, str]] = []
    for row in rows:
        try:
            judged.append(_judge(row))
        except Skip as skip:
            skipped.append((row, str(skip)))
        except TrainshedError as error:
            skipped.append((row, error.what))
        except (ArithmeticError, AssertionError, LookupError, ValueError, TypeError) as error:
            # A row that no rule foresaw must not cost the report of the others.
            skipped.append((row, f"its figures do not go together ({type(error).__name__}: {error})"))
    return Validation(tuple(judged), tuple(skipped))


def _judge(row: Row) -> Judged:
    case = case_of(row)
    if min(*case.layout.dense_shape, *case.layout.expert_shape, case.layout.micro_batch, case.job.tokens_per_step) < 1:
        raise Skip("one of its sizes is not above 0")
    judged = Judged(row, case, predict(case.job, case.layout), _amount(row.step_seconds), _amount(row.memory_gib))
    if not _says_whether_it_fits(judged):
        raise Skip("the row has no step time and no memory, and did not run out of it")
    if _amount(judged.prediction.step_seconds) is None:
        raise Skip(f"there is no prediction for it: {judged.prediction.step_seconds} s")
    return judged


def _amount(value: float | None) -> float | None:
    """A measured amount; one that is no positive number was not measured."""
    return value if value is not None and 0 < value < inf else None


def step_time_scores(timed: Sequence[Judged]) -> StepTimeScores:
    """Score the step times of rows that have one, and the null model on the same rows."""
    pairs = [(one.prediction.step_seconds, one.step_seconds or inf) for one in timed]
    null = error_scores(_null_pairs(timed))
    return StepTimeScores(**asdict(error_scores(pairs)), null_mape=null.mape)


def _null_pairs(timed: Sequence[Judged]) -> list[tuple[float, float]]:
    """What a constant TFLOP/s per GPU predicts, and what was measured: inversely, as the FLOPs are the same."""
    groups = _grouped(timed, lambda one: (one.row.source, one.case.job.hardware.gpu_name, one.case.job.precision))
    pairs: list[tuple[float, float]] = []
    for group in groups:
        constant = median(one.measured_tflops for one in group)
        pairs += [(one.measured_tflops, constant) for one in group]
    return pairs


def _choices(timed: Sequence[Judged]) -> list[list[float]]:
    return in_order_chosen((one.row.group, one.case, one.prediction, one.step_seconds or inf) for one in timed)


def in_order_chosen(timed: Iterable[tuple[Hashable, Case, Prediction, float]]) -> list[list[float]]:
    """Return the layouts of each group that one could have chosen from: measured seconds, in the order of our choice.

    What goes in is the group of a row, the row as a case, what is predicted of it, and its measured seconds.
    """
    groups: defaultdict[Hashable, defaultdict[Case, list[tuple[Prediction, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for group, case, prediction, seconds in timed:
        groups[group][case].append((prediction, seconds))
    choices: list[list[float]] = []
    for cases in groups.values():
        if len(cases) >= _LAYOUTS_TO_CHOOSE_FROM:
            # Rows of one case are predicted alike: any of them stands for all.
            measured = {id(same[0][0]): median(seconds for _, seconds in same) for same in cases.values()}
            order = in_order_of_choice(same[0][0] for same in cases.values())
            choices.append([measured[id(prediction)] for prediction in order])
    return choices


def _grouped(rows: Iterable[Judged], key: Callable[[Judged], Hashable]) -> list[list[Judged]]:
    groups: defaultdict[Hashable, list[Judged]] = defaultdict(list)
    for one in rows:
        groups[key(one)].append(one)
    return list(groups.values())


def _says_whether_it_fits(one: Judged) -> bool:
    return one.row.out_of_memory or one.step_seconds is not None or one.memory_gib is not None
