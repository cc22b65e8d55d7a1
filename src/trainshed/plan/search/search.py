"""The search for the fastest layout that fits: branch and bound over the space of legal layouts.

Layouts are tried in the order of a lower bound on their step time (`StepTimeBound`). First the memory is predicted. A
layout that does not fit is queued again with more recomputation, which never makes a step faster; one that fits is
predicted. The search ends when no layout that is left can be among the best, so the result is the same as if every
layout was predicted.

The layout with the fewest seconds is chosen, with the risk of stalls counted. Among layouts within 1% of it, the one
that leaves the most room on the GPU wins, then the simplest. Where runs may stall, the runners-up are those that do
best together with the chosen one: a layout that stalls independently is a better second try than a faster one.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import inf, log, prod
from typing import Any

from trainshed.catalog import find_machine, machine_of_gpu
from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout, distinct_names
from trainshed.plan.legality import layout_notes, layout_problems, layout_warnings
from trainshed.plan.performance.memory import GpuMemory, offloaded_bytes, rank_memory
from trainshed.plan.performance.prediction import (
    NEARLY_FULL,
    LayoutPrediction,
    predict,
    predict_memory,
)
from trainshed.plan.search.space import OFFLOADING_ENGINES, SearchSpace, StateMemoryBound, StepTimeBound
from trainshed.plan.training_shape import TrainingShape
from trainshed.recipe.section import Problem
from trainshed.recipe.validation import recipe_error
from trainshed.recipe.yaml_io import SourceMap

_SHOWN_OF_A_KIND = 5
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class RejectedLayout:
    """A layout that was not chosen, why, and how many have the same reason."""

    layout: RankLayout
    reason: str
    alike: int = 1


@dataclass
class _Unfit:
    """Layouts of the same dense axes that do not fit: the one that comes closest, and their number."""

    layout: RankLayout
    stage: int
    memory: GpuMemory
    count: int = 0
    fits: bool = False
    """Whether one with these axes does fit, with another micro-batch, sharding or recomputation."""


class RejectionLog:
    """Counts rejected layouts by reason and remembers one of each."""

    def __init__(self, training: TrainingShape) -> None:
        self._training = training
        self._illegal: dict[str, tuple[RankLayout, Problem, int]] = {}
        self._unfit: dict[tuple[int, ...], _Unfit] = {}
        self._states: tuple[float, RankLayout] | None = None
        self._too_much_state = 0

    def add_illegal(self, layout: RankLayout, broken: Problem) -> None:
        """Add a layout that breaks a rule, or that stands for all with its outer axes."""
        kind = _NUMBER.sub("", broken.what)
        first, problem, count = self._illegal.get(kind, (layout, broken, 0))
        self._illegal[kind] = (first, problem, count + 1)

    def add_too_much_state(self, layout: RankLayout, gib: float) -> None:
        """Add a layout whose weights, gradients and optimizer states alone are more than the GPU has."""
        self._too_much_state += 1
        if self._states is None or gib < self._states[0]:
            self._states = (gib, layout)

    def add_unfit(self, layout: RankLayout, stage: int, memory: GpuMemory) -> None:
        """Add a layout one of whose stages does not fit."""
        axes = _dense_axes(layout)
        closest = self._unfit.get(axes)
        if closest is None:
            closest = self._unfit[axes] = _Unfit(layout, stage, memory)
        elif memory.total < closest.memory.total:
            closest.layout, closest.stage, closest.memory = layout, stage, memory
        closest.count += 1

    def mark_fitting(self, layout: RankLayout) -> None:
        """Say that a layout fits: those with the same axes that do not fit are not worth showing."""
        closest = self._unfit.get(_dense_axes(layout))
        if closest is not None:
            closest.fits = True

    def most_telling(self) -> tuple[RejectedLayout, ...]:
        """Return the closest of axes that never fit, the fastest axes first; then one layout of every other reason."""
        never_fit = [closest for closest in self._unfit.values() if not closest.fits][:_SHOWN_OF_A_KIND]
        unfit = [
            RejectedLayout(closest.layout, self.too_full(closest.layout, closest.stage, closest.memory), closest.count)
            for closest in never_fit
        ]
        if self._states is not None:
            gib, layout = self._states
            reason = (
                f"weights, gradients and optimiser states alone are {gib:.1f} GiB or more on a GPU, "
                f"which has {self._training.hardware.memory_gib:.1f}"
            )
            unfit.append(RejectedLayout(layout, reason, self._too_much_state))
        return (*unfit, *(RejectedLayout(layout, broken.what, count) for layout, broken, count in self._by_count()))

    def reasons(self) -> list[str]:
        """Return which rules are broken and what to write instead, the most frequent first."""
        return [f"{broken.what}; {broken.hint}" for _, broken, _ in self._by_count()[:_SHOWN_OF_A_KIND]]

    def _by_count(self) -> list[tuple[RankLayout, Problem, int]]:
        return sorted(self._illegal.values(), key=lambda entry: -entry[2])

    def too_full(self, layout: RankLayout, stage: int, memory: GpuMemory) -> str:
        """Say how much memory a layout lacks, on which stage, and what fills most of it."""
        parts = {part.name: getattr(memory, part.name) for part in fields(memory) if part.name != "capacity"}
        largest = max(parts, key=lambda name: parts[name])
        where = f"stage {stage} needs" if layout.pp > 1 else "needs"
        return (
            f"{where} {memory.total:.1f} GiB with micro_batch {layout.micro_batch} and recompute {layout.recompute}, "
            f"{memory.total - memory.capacity:.1f} GiB more than the {memory.capacity:.1f} GiB of "
            f"{self._training.hardware.gpu_name}; {parts[largest]:.1f} GiB are {largest}"
        )


def _dense_axes(layout: RankLayout) -> tuple[int, ...]:
    return (layout.tp, layout.pp, layout.cp, layout.ep)


CLOSE_WITHIN = 0.01
"""How much slower than the fastest a safer or simpler layout may be and still be chosen: less than the error of any
prediction."""
ROOMY = 0.6
"""Share of the GPU's memory below which less is not safer. With constants that were fitted without a model of the
ultra-scale sweep, choosing by it made the first choice 7% slower than the best on average; by simplicity alone 11%."""
_LAYOUTS_TRIED = 3
"""How many layouts a person would try."""
_RECOMPUTE_ORDER = ("none", "selective", "full")
_SHARD_ORDER = ("none", "zero1", "zero2", "full")


def rank_predictions(predictions: Iterable[LayoutPrediction]) -> list[LayoutPrediction]:
    """Return the layout to choose, then those to try next, then the others by time."""
    by_time = sorted(predictions, key=lambda one: (one.ranking_seconds, layout_complexity(one.layout)))
    close = [one for one in by_time if one.ranking_seconds <= (1 + CLOSE_WITHIN) * by_time[0].ranking_seconds]
    first = [min(close, key=tie_break)]
    left = [one for one in by_time if one is not first[0]]
    may_stall = any(one.stall_likelihood for one in by_time)
    while may_stall and left and len(first) < _LAYOUTS_TRIED:
        # Where several are equally good, the fastest one is taken: `left` is sorted by time.
        best = min(left, key=lambda one: _expected_log_seconds([*first, one]))
        first.append(best)
        left = [one for one in left if one is not best]
    return [*first, *left]


def tie_break(prediction: LayoutPrediction) -> tuple[float, tuple[int, ...]]:
    """Return what decides between layouts that are equally fast: memory above the roomy share, then complexity."""
    memory = prediction.memory
    return max(0.0, memory.total / memory.capacity - ROOMY), layout_complexity(prediction.layout)


def _expected_log_seconds(tried: Sequence[LayoutPrediction]) -> float:
    """Logarithm of the seconds of the best of them, averaged over which of them stall."""
    expected = 0.0
    for which_stall in product((False, True), repeat=len(tried)):
        chances = (
            prediction.stall_likelihood if stalls else 1 - prediction.stall_likelihood
            for prediction, stalls in zip(tried, which_stall, strict=True)
        )
        seconds = (
            prediction.step_seconds + (prediction.stall_seconds if stalls else 0.0)
            for prediction, stalls in zip(tried, which_stall, strict=True)
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
"""Where the search for a number of GPUs that would do ends."""
_CLOSEST_LOOKED_AT = 32


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the chosen layout, the next best, and why others were not chosen."""

    training: TrainingShape
    engine: str
    chosen: LayoutPrediction
    runners_up: tuple[LayoutPrediction, ...]
    """In the order to try them; one may be up to 1% faster than the chosen one, which is safer or simpler."""
    rejected: tuple[RejectedLayout, ...]
    """The most telling ones, each with its reason."""
    considered: int
    """Number of layouts, each way to recompute counted; all that one broken rule excludes count once."""
    notes: tuple[str, ...]


def search_layouts(
    training: TrainingShape,
    *,
    engine: str,
    fixed: Mapping[str, Any] | None = None,
    batch_sizes: Iterable[int] = (),
    top: int = 10,
) -> SearchResult:
    """Find the fastest layout of a training on all its GPUs, and the `top` - 1 next best.

    `fixed` are keys of the layout with given values; `batch_sizes` are further global batch sizes of the run. Where
    nothing fits otherwise, layouts whose activations wait in the host's memory are searched too. Raises `InputError`
    where no layout is legal, or where none fits: then with the closest one, and with a number of GPUs that would do.
    """
    space = SearchSpace.for_training(training, engine, _without_none(fixed), batch_sizes)
    state = _LayoutSearch(space, max(1, top)).run()
    if not state.fitting:
        offloaded = _search_offloaded(space, top)
        if offloaded is None:
            raise _nothing_fits_error(space, state)
        space, state = offloaded
    chosen, *others = rank_predictions(state.fitting)
    notes = [*_notes(training, engine, chosen, space.context.batch_sizes), *why_not_the_fastest(chosen, others)]
    return SearchResult(
        training,
        engine,
        chosen,
        tuple(others[: top - 1]),
        state.rejections.most_telling(),
        state.considered,
        tuple(notes),
    )


def best_fitting_layout(
    training: TrainingShape, *, engine: str, fixed: Mapping[str, Any] | None = None, batch_sizes: Iterable[int] = ()
) -> LayoutPrediction | None:
    """Find the layout that `search_layouts` would choose; None where no layout is legal, or none fits."""
    space = SearchSpace.for_training(training, engine, _without_none(fixed), batch_sizes)
    state: _SearchState | None = _LayoutSearch(space, 1).run()
    if state is not None and not state.fitting:
        _, state = _search_offloaded(space, 1) or (space, None)
    return rank_predictions(state.fitting)[0] if state is not None else None


def _search_offloaded(space: SearchSpace, top: int) -> tuple[SearchSpace, _SearchState] | None:
    """Search layouts whose activations wait in the host's memory; None where that is settled, or where none fits."""
    if "offload" in space.fixed or space.engine not in OFFLOADING_ENGINES or "selective" in space.fixed.values():
        return None
    ways = [space.fixed["recompute"]] if "recompute" in space.fixed else OFFLOADING_ENGINES[space.engine]
    for recompute in ways:
        keys = {**space.fixed, "offload": "activations", "recompute": recompute}
        offloaded = replace(space, fixed=keys)
        state = _LayoutSearch(offloaded, max(1, top)).run()
        state.fitting = [
            prediction
            for prediction in state.fitting
            if offloaded_gib(space.training, prediction.layout) <= host_memory_gib(space.training)
        ]
        if state.fitting:
            return offloaded, state
    return None


def offloaded_gib(training: TrainingShape, layout: RankLayout) -> float:
    """Return how much of a node's memory the activations of its GPUs take with `layout.offload`."""
    fullest = max(offloaded_bytes(training, layout, rank) for rank in range(layout.pp))
    return fullest * min(training.gpus, training.hardware.gpus_per_node) / 2**30


_HOST_SHARE = 0.7
"""Share of a node's memory that activations may take: data, checkpoints and the system need the rest."""


def host_memory_gib(training: TrainingShape) -> float:
    """Return the memory of a node that activations may take."""
    name = training.hardware.machine
    machine = find_machine(name) if name is not None else machine_of_gpu(training.hardware.gpu)
    return _HOST_SHARE * machine.memory_gib


def evaluate_layout(
    training: TrainingShape,
    layout: RankLayout,
    *,
    engine: str,
    batch_sizes: Iterable[int] = (),
    stages_written: bool = False,
    places: SourceMap | None = None,
) -> SearchResult:
    """Predict a given layout.

    An illegal one is an `InputError` with all its problems. One that does not fit is predicted too, and a note says how
    much memory it lacks. `places` are the lines of the recipe that it was written in.
    """
    if layout.world_size != training.gpus:
        raise InputError(
            f"the layout {layout} is {layout.world_size} GPUs, and there are {training.gpus}",
            where="layout",
            hint="leave dp out: it takes the GPUs that are left",
        )
    sizes = sorted({training.global_batch, *batch_sizes})
    problems = layout_problems(
        layout,
        training.model,
        sequence_length=training.sequence_length,
        batch_sizes=sizes,
        engine=engine,
        lora=training.lora is not None,
        quantized=training.quantized,
        stages_written=stages_written,
    )
    if problems:
        raise recipe_error(problems, places or SourceMap("--layout"))
    chosen = predict(training, layout)
    notes = _notes(training, engine, chosen, sizes)
    if not chosen.fits:
        fullest = max(chosen.stages, key=lambda stage: stage.memory.total)
        notes.insert(0, f"it does not fit: {RejectionLog(training).too_full(layout, fullest.stage, fullest.memory)}")
    return SearchResult(training, engine, chosen, (), (), 1, tuple(notes))


def smallest_fitting_gpus(space: SearchSpace) -> int | None:
    """Return a number of GPUs on which some layout fits, found by doubling; None where there is none."""
    gpus = space.training.gpus
    while (gpus := 2 * gpus) <= _MOST_GPUS:
        wider = replace(space, training=replace(space.training, gpus=gpus))
        if _any_fits(wider):
            return gpus
    return None


def _any_fits(space: SearchSpace) -> bool:
    states, capacity = StateMemoryBound(space.training), space.training.hardware.memory_gib
    bounded = [
        (states(layout), number, layout) for number, layout in enumerate(space.layouts(lambda layout, broken: None))
    ]
    for bound, _, layout in sorted(bounded):
        if bound > capacity:
            return False
        if first_overfull(space.training, space.with_most_recompute(layout)) is None:
            return True
    return False


def first_overfull(training: TrainingShape, layout: RankLayout) -> tuple[int, GpuMemory] | None:
    """Return the first pipeline rank that does not fit, with its memory; None where all fit."""
    for rank in range(layout.pp):
        memory = rank_memory(training, layout, rank)
        if not memory.fits:
            return rank, memory
    return None


def is_tight(prediction: LayoutPrediction) -> bool:
    """Whether a layout fills the GPU so much that one which recomputes more may be faster."""
    return prediction.memory.total > NEARLY_FULL * prediction.memory.capacity


@dataclass
class _SearchState:
    """What a search knows so far."""

    rejections: RejectionLog
    fitting: list[LayoutPrediction] = field(default_factory=list)
    considered: int = 0
    closest: tuple[float, RankLayout] | None = None
    """The layout that comes closest to fitting, with the most recomputation, and the GiB it lacks."""


class _LayoutSearch:
    """One search."""

    def __init__(self, space: SearchSpace, top: int) -> None:
        self.space, self.top, self.training = space, top, space.training
        self.bound = StepTimeBound(space.training)
        self.state = _SearchState(RejectionLog(space.training))
        self._best: list[float] = []

    def run(self) -> _SearchState:
        """Try layouts in the order of their bounds until the rest cannot matter."""
        queue = self._queue()
        number = len(queue)
        while queue:
            seconds, _, layout = heapq.heappop(queue)
            if seconds > self._cut():
                self.state.considered += len(queue) + 1
                break
            self.state.considered += 1
            overfull = first_overfull(self.training, layout)
            if overfull is None:
                prediction = self.bound.predict(layout)
                self._keep(prediction)
                if not is_tight(prediction):
                    continue
            else:
                self.state.rejections.add_unfit(layout, *overfull)
            leaner = self.space.with_more_recompute(layout)
            if leaner is not None:
                number += 1
                heapq.heappush(queue, (max(seconds, self.bound(leaner)), number, leaner))
            elif overfull is not None:
                self._note_miss(layout, overfull[1].total - overfull[1].capacity)
        return self.state

    def _queue(self) -> list[tuple[float, int, RankLayout]]:
        states, capacity = StateMemoryBound(self.training), self.training.hardware.memory_gib
        queue: list[tuple[float, int, RankLayout]] = []
        hopeless: list[tuple[float, RankLayout]] = []
        for layout in self.space.layouts(self._illegal):
            state_gib = states(layout)
            if state_gib > capacity:
                self.state.considered += 1
                self.state.rejections.add_too_much_state(layout, state_gib)
                hopeless.append((state_gib - capacity, layout))
            else:
                queue.append((self.bound(layout), len(queue), layout))
        if not queue:
            # The bound leaves out activations: the closest is among those with the least state.
            hopeless.sort(key=lambda entry: (entry[0], entry[1].micro_batch))
            for _, layout in hopeless[:_CLOSEST_LOOKED_AT]:
                leanest = self.space.with_most_recompute(layout)
                memories = predict_memory(self.training, leanest)
                self._note_miss(leanest, max(memory.total - memory.capacity for memory in memories))
        heapq.heapify(queue)
        return queue

    def _illegal(self, layout: RankLayout, broken: Any) -> None:
        self.state.considered += 1
        self.state.rejections.add_illegal(layout, broken)

    def _cut(self) -> float:
        """Seconds above which a layout is neither among the best nor close enough to the fastest to replace it."""
        if len(self._best) < self.top:
            return inf
        return max(self._best[self.top - 1], (1 + CLOSE_WITHIN) * self._best[0])

    def _keep(self, prediction: LayoutPrediction) -> None:
        self.state.fitting.append(prediction)
        self.state.rejections.mark_fitting(prediction.layout)
        self._best.append(prediction.ranking_seconds)
        self._best.sort()
        del self._best[self.top :]

    def _note_miss(self, layout: RankLayout, gib: float) -> None:
        if self.state.closest is None or gib < self.state.closest[0]:
            self.state.closest = (gib, layout)


def _without_none(fixed: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (fixed or {}).items() if value is not None}


def _notes(training: TrainingShape, engine: str, chosen: LayoutPrediction, batch_sizes: Iterable[int]) -> list[str]:
    warnings = layout_warnings(
        chosen.layout,
        training.model,
        sequence_length=training.sequence_length,
        batch_sizes=batch_sizes,
        engine=engine,
        link_domain=training.hardware.link_domain,
    )
    notes = layout_notes(chosen.layout, training.model, engine=engine)
    return [*notes, *warnings, *_offload_note(training, chosen), *_tight_memory_note(chosen)]


def _offload_note(training: TrainingShape, chosen: LayoutPrediction) -> list[str]:
    """Say how much of the host's memory activations take."""
    if chosen.layout.offload is None:
        return []
    needed, there = offloaded_gib(training, chosen.layout), host_memory_gib(training)
    note = f"activations wait in the host's memory: {needed:,.1f} GiB on a node"
    if needed > there:
        note += f", more than the {there:,.0f} GiB that can be spared there; write recompute: full beside it"
    return [note]


def _tight_memory_note(chosen: LayoutPrediction) -> list[str]:
    """Say that a layout may not fit where a small error of the predicted memory would decide it."""
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
    name, other = distinct_names(chosen.layout, others[0].layout)
    faster = f"{other} is predicted {1 - others[0].step_seconds / chosen.step_seconds:.1%} faster"
    if others[0].risk_seconds > chosen.risk_seconds:
        return [f"{faster}, but runs like it have been held up, by {others[0].risk_seconds:.3g} s a step on average"]
    emptier = tie_break(chosen)[0] < tie_break(others[0])[0]
    better = "leaves more of the card free" if emptier else "is simpler"
    return [f"{faster}, less than a prediction is off by: {name} {better}"]


def _nothing_fits_error(space: SearchSpace, state: _SearchState) -> InputError:
    """Say why there is no layout: rules, or memory."""
    training, fixed = space.training, ", ".join(f"{key}: {value}" for key, value in space.fixed.items())
    given = f" with {fixed}" if fixed else ""
    name = training.model.name or "the model"
    if state.closest is None:
        reasons = state.rejections.reasons()
        hint = "\n".join(reasons) or f"write keys whose product divides {training.gpus}"
        return InputError(
            f"no layout of {training.gpus} GPUs{given} is legal for {name} on {space.engine}", where="layout", hint=hint
        )
    gib, layout = state.closest
    needed = smallest_fitting_gpus(space)
    more = (
        f"{needed} GPUs would do"
        if needed is not None
        else "no number of GPUs would do; write a smaller sequence_length, or take GPUs with more memory"
    )
    return InputError(
        f"{name} does not fit on {training.gpus} {training.hardware.gpu_name}{given}: the closest layout, {layout} "
        f"with micro_batch {layout.micro_batch} and recompute {layout.recompute}, needs {gib:.1f} GiB more than the "
        f"{training.hardware.memory_gib:.1f} GiB of a GPU",
        where="layout",
        hint=more,
    )
