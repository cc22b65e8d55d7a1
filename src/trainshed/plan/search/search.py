"""The search for the fastest layout that fits: branch and bound over the space of legal ones.

Layouts are taken in the order of what they cannot be faster than (`StepTimeBound`). Each is first compared with the
card's memory; one that does not fit comes again with more recomputation, which never makes a step faster; one that
fits is predicted. The search ends when nothing left can be among the best asked for, so the result is that of
predicting every layout.

The fastest is chosen, risk counted. Of layouts within 1% of it, one that leaves room on the card wins, then the
simplest. Where runs stall by chance, the runners-up are those that do best together with the chosen one: three
layouts that are a little slower but stall independently are a better bet than three that stall together.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import inf, log, prod
from typing import Any

from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout
from trainshed.plan.legality import layout_notes, layout_problems, layout_warnings
from trainshed.plan.performance.memory import GpuMemory, rank_memory
from trainshed.plan.performance.prediction import NEARLY_FULL, LayoutPrediction, predict, predict_memory
from trainshed.plan.search.space import SearchSpace, StateMemoryBound, StepTimeBound
from trainshed.plan.training_shape import TrainingShape
from trainshed.recipe.section import Problem
from trainshed.recipe.validation import recipe_error
from trainshed.recipe.yaml_io import SourceMap

_SHOWN_OF_A_KIND = 5
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class RejectedLayout:
    """A layout that was not taken, why, and how many were not for the same reason."""

    layout: RankLayout
    reason: str
    alike: int = 1


@dataclass
class _Unfit:
    """Layouts of the same dense axes that do not fit: the one that comes closest, and how many they are."""

    layout: RankLayout
    stage: int
    memory: GpuMemory
    count: int = 0
    fits: bool = False
    """Whether one of them does fit, with another micro-batch, sharding or recomputation."""


class RejectionLog:
    """Counts rejected layouts by reason and remembers one of each."""

    def __init__(self, job: TrainingShape) -> None:
        self._job = job
        self._illegal: dict[str, tuple[RankLayout, Problem, int]] = {}
        self._unfit: dict[tuple[int, ...], _Unfit] = {}
        self._states: tuple[float, RankLayout] | None = None
        self._too_much_state = 0

    def illegal(self, layout: RankLayout, broken: Problem) -> None:
        """A layout, or all that have its outer axes, breaks a rule."""
        kind = _NUMBER.sub("", broken.what)
        first, problem, count = self._illegal.get(kind, (layout, broken, 0))
        self._illegal[kind] = (first, problem, count + 1)

    def too_much_state(self, layout: RankLayout, gib: float) -> None:
        """Weights, gradients and optimiser states alone are more than the card."""
        self._too_much_state += 1
        if self._states is None or gib < self._states[0]:
            self._states = (gib, layout)

    def unfit(self, layout: RankLayout, stage: int, memory: GpuMemory) -> None:
        """A layout does not fit, for a stage of it."""
        kind = _dense_axes(layout)
        found = self._unfit.get(kind)
        if found is None:
            found = self._unfit[kind] = _Unfit(layout, stage, memory)
        elif memory.total < found.memory.total:
            found.layout, found.stage, found.memory = layout, stage, memory
        found.count += 1

    def fit(self, layout: RankLayout) -> None:
        """A layout fits: others of its axes that do not are no news."""
        found = self._unfit.get(_dense_axes(layout))
        if found is not None:
            found.fits = True

    def telling(self) -> tuple[RejectedLayout, ...]:
        """Return the closest of axes that do not fit at all, the fastest axes first; then one of every other reason."""
        hopeless = [each for each in self._unfit.values() if not each.fits][:_SHOWN_OF_A_KIND]
        unfit = [
            RejectedLayout(each.layout, self.too_full(each.layout, each.stage, each.memory), each.count)
            for each in hopeless
        ]
        if self._states is not None:
            gib, layout = self._states
            reason = (
                f"weights, gradients and optimiser states alone are {gib:.1f} GiB or more on a GPU, "
                f"which has {self._job.hardware.memory_gib:.1f}"
            )
            unfit.append(RejectedLayout(layout, reason, self._too_much_state))
        return (*unfit, *(RejectedLayout(layout, broken.what, count) for layout, broken, count in self._by_count()))

    def reasons(self) -> list[str]:
        """Return what is illegal and what to write, the most frequent first."""
        return [f"{broken.what}; {broken.hint}" for _, broken, _ in self._by_count()[:_SHOWN_OF_A_KIND]]

    def _by_count(self) -> list[tuple[RankLayout, Problem, int]]:
        return sorted(self._illegal.values(), key=lambda each: -each[2])

    def too_full(self, layout: RankLayout, stage: int, memory: GpuMemory) -> str:
        """Say by how much a layout misses, where, and what fills the card most."""
        parts = {part.name: getattr(memory, part.name) for part in fields(memory) if part.name != "capacity"}
        largest = max(parts, key=lambda name: parts[name])
        where = f"stage {stage} needs" if layout.pp > 1 else "needs"
        return (
            f"{where} {memory.total:.1f} GiB with micro_batch {layout.micro_batch} and recompute {layout.recompute}, "
            f"{memory.total - memory.capacity:.1f} GiB more than the {memory.capacity:.1f} GiB of "
            f"{self._job.hardware.gpu_name}; {parts[largest]:.1f} GiB are {largest}"
        )


def _dense_axes(layout: RankLayout) -> tuple[int, ...]:
    return (layout.tp, layout.pp, layout.cp, layout.ep)


CLOSE_WITHIN = 0.01
"""How much slower than the fastest a safer or simpler layout may be and still be chosen: less than any prediction is
off."""
ROOMY = 0.6
"""Share of the card up to which emptier is no safer. With constants that never saw a model of the ultra-scale sweep,
choosing by it made the first choice 7% slower than the best on average; by simplicity alone 11%."""
_LAYOUTS_TRIED = 3
"""Layouts that somebody would try."""
_RECOMPUTE_ORDER = ("none", "selective", "full")
_SHARD_ORDER = ("none", "zero1", "zero2", "full")


def rank_predictions(predictions: Iterable[LayoutPrediction]) -> list[LayoutPrediction]:
    """Return the one to take, then what to try beside it, then the others by time."""
    by_time = sorted(predictions, key=lambda each: (each.ranking_seconds, layout_complexity(each.layout)))
    close = [each for each in by_time if each.ranking_seconds <= (1 + CLOSE_WITHIN) * by_time[0].ranking_seconds]
    first = [min(close, key=tie_break)]
    left = [each for each in by_time if each is not first[0]]
    may_stall = any(each.stall_likelihood for each in by_time)
    while may_stall and left and len(first) < _LAYOUTS_TRIED:
        # Where one more adds nothing, the faster one stands first.
        best = min(left, key=lambda each: _expected_log_seconds([*first, each]))
        first.append(best)
        left = [each for each in left if each is not best]
    return [*first, *left]


def tie_break(found: LayoutPrediction) -> tuple[float, tuple[int, ...]]:
    """Return what is compared of layouts that are as fast: how far beyond roomy the card is filled, then complexity."""
    return max(0.0, found.memory.total / found.memory.capacity - ROOMY), layout_complexity(found.layout)


def _expected_log_seconds(tried: Sequence[LayoutPrediction]) -> float:
    """Logarithm of the seconds of the best of them, averaged over which of them are held up."""
    expected = 0.0
    for held_up in product((False, True), repeat=len(tried)):
        chances = (
            each.stall_likelihood if held else 1 - each.stall_likelihood
            for each, held in zip(tried, held_up, strict=True)
        )
        seconds = (
            each.step_seconds + (each.stall_seconds if held else 0.0) for each, held in zip(tried, held_up, strict=True)
        )
        expected += prod(chances) * log(min(seconds))
    return expected


def layout_complexity(layout: RankLayout) -> tuple[int, ...]:
    """Return how complicated a layout is, to compare: axes in use first, then their sizes."""
    axes = (layout.tp, layout.pp, layout.cp, layout.ep)
    return (
        sum(size > 1 for size in axes),
        layout.tp * layout.pp * layout.cp * layout.ep,
        layout.vp,
        layout.etp,
        _RECOMPUTE_ORDER.index(layout.recompute),
        layout.replicate,
        _SHARD_ORDER.index(layout.shard),
        -layout.micro_batch,
        *axes,
    )


_MOST_GPUS = 2**17
"""Where looking for a number of GPUs that would do ends."""
_CLOSEST_LOOKED_AT = 32


@dataclass(frozen=True)
class SearchResult:
    """What was found for a job: the layout to take, the next best, and why others were not taken."""

    job: TrainingShape
    engine: str
    chosen: LayoutPrediction
    runners_up: tuple[LayoutPrediction, ...]
    """In the order they would be tried; one may be less than 1% faster than the chosen, which is safer or simpler."""
    rejected: tuple[RejectedLayout, ...]
    """The most telling, each with its reason in a sentence."""
    considered: int
    """Layouts looked at, with all their ways to recompute; those that a broken rule cut off count once."""
    notes: tuple[str, ...]


def search_layouts(
    job: TrainingShape,
    *,
    engine: str,
    fixed: Mapping[str, Any] | None = None,
    batch_sizes: Iterable[int] = (),
    top: int = 10,
) -> SearchResult:
    """Find the fastest layout of all GPUs of a job, and the `top` - 1 next best.

    `fixed` are keys of the layout that somebody chose, with their values; `batch_sizes` are global batches of the run
    besides the job's own. Raises `InputError` where no layout is legal or none fits: then with the closest one, and
    with the number of GPUs that would do.
    """
    space = SearchSpace.of(job, engine, _without_none(fixed), batch_sizes)
    found = _LayoutSearch(space, max(1, top)).run()
    if not found.fitting:
        raise _nothing_fits_error(space, found)
    chosen, *others = rank_predictions(found.fitting)
    notes = [*_notes(job, engine, chosen, space.asked.batch_sizes), *why_not_the_fastest(chosen, others)]
    return SearchResult(
        job, engine, chosen, tuple(others[: top - 1]), found.rejections.telling(), found.considered, tuple(notes)
    )


def best_fitting_layout(
    job: TrainingShape, *, engine: str, fixed: Mapping[str, Any] | None = None, batch_sizes: Iterable[int] = ()
) -> LayoutPrediction | None:
    """Find the layout that `search_layouts` would choose; None where no layout is legal, or none fits."""
    hunted = _LayoutSearch(SearchSpace.of(job, engine, _without_none(fixed), batch_sizes), 1).run()
    return rank_predictions(hunted.fitting)[0] if hunted.fitting else None


def evaluate_layout(
    job: TrainingShape,
    layout: RankLayout,
    *,
    engine: str,
    batch_sizes: Iterable[int] = (),
    stages_written: bool = False,
    places: SourceMap | None = None,
) -> SearchResult:
    """Predict a layout that somebody chose.

    An illegal one is an `InputError` with all its problems; one that does not fit is predicted all the same, and a note
    says by how much. `places` are those of the recipe it was written in.
    """
    if layout.world_size != job.gpus:
        raise InputError(
            f"the layout {layout} is {layout.world_size} GPUs, and there are {job.gpus}",
            where="layout",
            hint="leave dp out: it takes the GPUs that are left",
        )
    sizes = sorted({job.global_batch, *batch_sizes})
    problems = layout_problems(
        layout,
        job.model,
        sequence_length=job.sequence_length,
        batch_sizes=sizes,
        engine=engine,
        lora=job.habits.adapters,
        stages_written=stages_written,
    )
    if problems:
        raise recipe_error(problems, places or SourceMap("--layout"))
    chosen = predict(job, layout)
    notes = _notes(job, engine, chosen, sizes)
    if not chosen.fits:
        fullest = max(chosen.stages, key=lambda stage: stage.memory.total)
        notes.insert(0, f"it does not fit: {RejectionLog(job).too_full(layout, fullest.stage, fullest.memory)}")
    return SearchResult(job, engine, chosen, (), (), 1, tuple(notes))


def smallest_fitting_gpus(space: SearchSpace) -> int | None:
    """Return a number of GPUs on which some layout fits, by doubling; None where no number does."""
    gpus = space.job.gpus
    while (gpus := 2 * gpus) <= _MOST_GPUS:
        wider = replace(space, job=replace(space.job, gpus=gpus))
        if _any_fits(wider):
            return gpus
    return None


def _any_fits(space: SearchSpace) -> bool:
    states, capacity = StateMemoryBound(space.job), space.job.hardware.memory_gib
    bounded = [(states(each), number, each) for number, each in enumerate(space.layouts(lambda layout, broken: None))]
    for bound, _, layout in sorted(bounded):
        if bound > capacity:
            return False
        if first_overfull(space.job, space.leanest(layout)) is None:
            return True
    return False


def first_overfull(job: TrainingShape, layout: RankLayout) -> tuple[int, GpuMemory] | None:
    """Return the first pipeline rank that its card is too small for, with its memory; None where all fit."""
    for rank in range(layout.pp):
        memory = rank_memory(job, layout, rank)
        if not memory.fits:
            return rank, memory
    return None


def is_tight(prediction: LayoutPrediction) -> bool:
    """Whether a layout fits so barely that one which recomputes more may be faster."""
    return prediction.memory.total > NEARLY_FULL * prediction.memory.capacity


@dataclass
class _SearchState:
    rejections: RejectionLog
    fitting: list[LayoutPrediction] = field(default_factory=list)
    considered: int = 0
    closest: tuple[float, RankLayout] | None = None
    """GiB that the layout which comes closest to fitting misses, at its leanest."""


class _LayoutSearch:
    """One search under way."""

    def __init__(self, space: SearchSpace, top: int) -> None:
        self.space, self.top, self.job = space, top, space.job
        self.bound = StepTimeBound(space.job)
        self.found = _SearchState(RejectionLog(space.job))
        self._best: list[float] = []

    def run(self) -> _SearchState:
        """Take layouts in the order of their bounds until the rest cannot matter."""
        queue = self._queue()
        number = len(queue)
        while queue:
            seconds, _, layout = heapq.heappop(queue)
            if seconds > self._cut():
                self.found.considered += len(queue) + 1
                break
            self.found.considered += 1
            overfull = first_overfull(self.job, layout)
            if overfull is None:
                prediction = self.bound.predict(layout)
                self._keep(prediction)
                if not is_tight(prediction):
                    continue
            else:
                self.found.rejections.unfit(layout, *overfull)
            leaner = self.space.relieved(layout)
            if leaner is not None:
                number += 1
                heapq.heappush(queue, (max(seconds, self.bound(leaner)), number, leaner))
            elif overfull is not None:
                self._note_miss(layout, overfull[1].total - overfull[1].capacity)
        return self.found

    def _queue(self) -> list[tuple[float, int, RankLayout]]:
        states, capacity = StateMemoryBound(self.job), self.job.hardware.memory_gib
        queue: list[tuple[float, int, RankLayout]] = []
        hopeless: list[tuple[float, RankLayout]] = []
        for layout in self.space.layouts(self._illegal):
            held = states(layout)
            if held > capacity:
                self.found.considered += 1
                self.found.rejections.too_much_state(layout, held)
                hopeless.append((held - capacity, layout))
            else:
                queue.append((self.bound(layout), len(queue), layout))
        if not queue:
            # The bound leaves out activations: the closest is among those with the least state.
            hopeless.sort(key=lambda each: (each[0], each[1].micro_batch))
            for _, layout in hopeless[:_CLOSEST_LOOKED_AT]:
                leanest = self.space.leanest(layout)
                self._note_miss(leanest, max(each.total - each.capacity for each in predict_memory(self.job, leanest)))
        heapq.heapify(queue)
        return queue

    def _illegal(self, layout: RankLayout, broken: Any) -> None:
        self.found.considered += 1
        self.found.rejections.illegal(layout, broken)

    def _cut(self) -> float:
        """Seconds from which a layout is neither among the best nor close enough to the fastest to replace it."""
        if len(self._best) < self.top:
            return inf
        return max(self._best[self.top - 1], (1 + CLOSE_WITHIN) * self._best[0])

    def _keep(self, prediction: LayoutPrediction) -> None:
        self.found.fitting.append(prediction)
        self.found.rejections.fit(prediction.layout)
        self._best.append(prediction.ranking_seconds)
        self._best.sort()
        del self._best[self.top :]

    def _note_miss(self, layout: RankLayout, gib: float) -> None:
        if self.found.closest is None or gib < self.found.closest[0]:
            self.found.closest = (gib, layout)


def _without_none(fixed: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (fixed or {}).items() if value is not None}


def _notes(job: TrainingShape, engine: str, chosen: LayoutPrediction, batch_sizes: Iterable[int]) -> list[str]:
    warnings = layout_warnings(
        chosen.layout,
        job.model,
        sequence_length=job.sequence_length,
        batch_sizes=batch_sizes,
        engine=engine,
        link_domain=job.hardware.link_domain,
    )
    return [*layout_notes(chosen.layout, job.model, engine=engine), *warnings, *_tight_memory_note(chosen)]


def _tight_memory_note(chosen: LayoutPrediction) -> list[str]:
    """Say so where a prediction of memory that is a little off would mean that it does not fit."""
    if not chosen.fits or not is_tight(chosen):
        return []
    memory = chosen.memory
    return [
        f"it fills {memory.total / memory.capacity:.0%} of the card, and predictions of memory are off by 3 to 10%: "
        "try it for a few steps first"
    ]


def why_not_the_fastest(chosen: LayoutPrediction, others: list[LayoutPrediction]) -> list[str]:
    """Say why a layout is chosen though another is predicted a little faster; nothing where none is."""
    if not others or others[0].step_seconds >= chosen.step_seconds:
        return []
    name, other = _distinct_names(chosen.layout, others[0].layout)
    faster = f"{other} is predicted {1 - others[0].step_seconds / chosen.step_seconds:.1%} faster"
    if others[0].risk_seconds > chosen.risk_seconds:
        return [f"{faster}, but runs like it have been held up, by {others[0].risk_seconds:.3g} s a step on average"]
    emptier = tie_break(chosen)[0] < tie_break(others[0])[0]
    better = "leaves more of the card free" if emptier else "is simpler"
    return [f"{faster}, less than a prediction is off by: {name} {better}"]


def _distinct_names(*layouts: RankLayout) -> list[str]:
    """Name layouts with as much as tells them apart: `cp16 full`, `cp16 full with micro_batch 2`."""
    names = [str(layout) for layout in layouts]
    for key in ("micro_batch", "recompute", "schedule"):
        values = [getattr(layout, key) for layout in layouts]
        if len(set(names)) < len(names) and len(set(values)) > 1:
            names = [f"{name} with {key} {value}" for name, value in zip(names, values, strict=True)]
    return names


def _nothing_fits_error(space: SearchSpace, found: _SearchState) -> InputError:
    """Say what is in the way: rules, or memory."""
    job, fixed = space.job, ", ".join(f"{key}: {value}" for key, value in space.fixed.items())
    given = f" with {fixed}" if fixed else ""
    name = job.model.name or "the model"
    if found.closest is None:
        reasons = found.rejections.reasons()
        hint = "\n".join(reasons) or f"write keys whose product divides {job.gpus}"
        return InputError(
            f"no layout of {job.gpus} GPUs{given} is legal for {name} on {space.engine}", where="layout", hint=hint
        )
    gib, layout = found.closest
    needed = smallest_fitting_gpus(space)
    more = (
        f"{needed} GPUs would do"
        if needed is not None
        else "no number of GPUs would do; write a smaller sequence_length, or take GPUs with more memory"
    )
    return InputError(
        f"{name} does not fit on {job.gpus} {job.hardware.gpu_name}{given}: the closest layout, {layout} with "
        f"micro_batch {layout.micro_batch} and recompute {layout.recompute}, needs {gib:.1f} GiB more than the "
        f"{job.hardware.memory_gib:.1f} GiB of a GPU",
        where="layout",
        hint=more,
    )
