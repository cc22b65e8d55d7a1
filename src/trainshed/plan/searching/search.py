"""The search for the fastest layout that fits: branch and bound over the space of legal ones.

Layouts are taken in the order of what they cannot be faster than (`bounds.TimeBound`). Each is first held against the
card (`predict_memory`); one that does not fit comes again with more recomputation, which never makes a step faster; one
that fits is predicted. It ends when nothing left can be among the best asked for, so that the result is that of
predicting every layout. Of layouts within 1% of the fastest, one that leaves room on the card wins, then the simplest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from trainshed.errors import InputError
from trainshed.plan.layout import RankLayout
from trainshed.plan.legality import layout_notes, layout_problems, layout_warnings
from trainshed.plan.performance.memory import rank_memory
from trainshed.plan.performance.predict import NEARLY_FULL, predict, predict_memory
from trainshed.plan.performance.prediction import Job, Memory, Prediction
from trainshed.plan.searching.bounds import StateBound, TimeBound
from trainshed.plan.searching.choosing import CLOSE_WITHIN, in_order_of_choice, preference
from trainshed.plan.searching.rejections import Rejected, Rejections
from trainshed.plan.searching.space import Space
from trainshed.recipe.messages import as_recipe_error
from trainshed.recipe.places import Places

_MOST_GPUS = 2**17
"""Where looking for a number of GPUs that would do ends."""
_CLOSEST_LOOKED_AT = 32


@dataclass(frozen=True)
class Search:
    """What was found for a job: the layout to take, the next best, and why others were not taken."""

    job: Job
    engine: str
    chosen: Prediction
    runners_up: tuple[Prediction, ...]
    """In the order they would be tried; one may be less than 1% faster than the chosen, which is safer or simpler."""
    rejected: tuple[Rejected, ...]
    """The most telling, each with its reason in a sentence."""
    considered: int
    """Layouts looked at, with all their ways to recompute; those that a broken rule cut off count once."""
    notes: tuple[str, ...]


def search(
    job: Job,
    *,
    engine: str,
    fixed: Mapping[str, Any] | None = None,
    batch_sizes: Iterable[int] = (),
    top: int = 10,
) -> Search:
    """Find the fastest layout of all GPUs of a job, and the `top` - 1 next best.

    `fixed` are keys of the layout that somebody chose, with their values; `batch_sizes` are global batches of the run
    besides the job's own. Raises `InputError` where no layout is legal or none fits: then with the closest one, and
    with the number of GPUs that would do.
    """
    space = Space.of(job, engine, _given(fixed), batch_sizes)
    found = _Hunt(space, max(1, top)).run()
    if not found.fitting:
        raise _nothing(space, found)
    chosen, *others = in_order_of_choice(found.fitting)
    notes = [*_notes(job, engine, chosen, space.asked.batch_sizes), *why_not_the_fastest(chosen, others)]
    return Search(
        job, engine, chosen, tuple(others[: top - 1]), found.rejections.telling(), found.considered, tuple(notes)
    )


def best_that_fits(
    job: Job, *, engine: str, fixed: Mapping[str, Any] | None = None, batch_sizes: Iterable[int] = ()
) -> Prediction | None:
    """Find the layout that `search` would choose; None where no layout is legal or none fits, without saying why."""
    hunted = _Hunt(Space.of(job, engine, _given(fixed), batch_sizes), 1).run()
    return in_order_of_choice(hunted.fitting)[0] if hunted.fitting else None


def evaluate(
    job: Job,
    layout: RankLayout,
    *,
    engine: str,
    batch_sizes: Iterable[int] = (),
    stages_written: bool = False,
    places: Places | None = None,
) -> Search:
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
        raise as_recipe_error(problems, places or Places("--layout"))
    chosen = predict(job, layout)
    notes = _notes(job, engine, chosen, sizes)
    if not chosen.fits:
        fullest = max(chosen.stages, key=lambda stage: stage.memory.total)
        notes.insert(0, f"it does not fit: {Rejections(job).too_full(layout, fullest.stage, fullest.memory)}")
    return Search(job, engine, chosen, (), (), 1, tuple(notes))


def smallest_that_fits(space: Space) -> int | None:
    """Return a number of GPUs on which some layout fits, by doubling; None where no number does."""
    gpus = space.job.gpus
    while (gpus := 2 * gpus) <= _MOST_GPUS:
        wider = replace(space, job=replace(space.job, gpus=gpus))
        if _any_fits(wider):
            return gpus
    return None


def _any_fits(space: Space) -> bool:
    states, capacity = StateBound(space.job), space.job.hardware.memory_gib
    bounded = [(states(each), number, each) for number, each in enumerate(space.layouts(lambda layout, broken: None))]
    for bound, _, layout in sorted(bounded):
        if bound > capacity:
            return False
        if first_overfull(space.job, space.leanest(layout)) is None:
            return True
    return False


def first_overfull(job: Job, layout: RankLayout) -> tuple[int, Memory] | None:
    """Return the first pipeline rank that its card is too small for, with its memory; None where all fit."""
    for rank in range(layout.pp):
        memory = rank_memory(job, layout, rank)
        if not memory.fits:
            return rank, memory
    return None


def is_tight(prediction: Prediction) -> bool:
    """Whether a layout fits so barely that one which recomputes more may be faster."""
    return prediction.memory.total > NEARLY_FULL * prediction.memory.capacity


@dataclass
class _Found:
    rejections: Rejections
    fitting: list[Prediction] = field(default_factory=list)
    considered: int = 0
    closest: tuple[float, RankLayout] | None = None
    """GiB that the layout which comes closest to fitting misses, at its leanest."""


class _Hunt:
    """One search under way."""

    def __init__(self, space: Space, top: int) -> None:
        self.space, self.top, self.job = space, top, space.job
        self.bound = TimeBound(space.job)
        self.found = _Found(Rejections(space.job))
        self._best: list[float] = []

    def run(self) -> _Found:
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
        states, capacity = StateBound(self.job), self.job.hardware.memory_gib
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

    def _keep(self, prediction: Prediction) -> None:
        self.found.fitting.append(prediction)
        self.found.rejections.fit(prediction.layout)
        self._best.append(prediction.ranking_seconds)
        self._best.sort()
        del self._best[self.top :]

    def _note_miss(self, layout: RankLayout, gib: float) -> None:
        if self.found.closest is None or gib < self.found.closest[0]:
            self.found.closest = (gib, layout)


def _given(fixed: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (fixed or {}).items() if value is not None}


def _notes(job: Job, engine: str, chosen: Prediction, batch_sizes: Iterable[int]) -> list[str]:
    warnings = layout_warnings(
        chosen.layout,
        job.model,
        sequence_length=job.sequence_length,
        batch_sizes=batch_sizes,
        engine=engine,
        link_domain=job.hardware.link_domain,
    )
    return [*layout_notes(chosen.layout, job.model, engine=engine), *warnings, *_room(chosen)]


def _room(chosen: Prediction) -> list[str]:
    """Say so where a prediction of memory that is a little off would mean that it does not fit."""
    if not chosen.fits or not is_tight(chosen):
        return []
    memory = chosen.memory
    return [
        f"it fills {memory.total / memory.capacity:.0%} of the card, and predictions of memory are off by 3 to 10%: "
        "try it for a few steps first"
    ]


def why_not_the_fastest(chosen: Prediction, others: list[Prediction]) -> list[str]:
    """Say why a layout is chosen though another is predicted a little faster; nothing where none is."""
    if not others or others[0].step_seconds >= chosen.step_seconds:
        return []
    name, other = _told_apart(chosen.layout, others[0].layout)
    faster = f"{other} is predicted {1 - others[0].step_seconds / chosen.step_seconds:.1%} faster"
    if others[0].risk_seconds > chosen.risk_seconds:
        return [f"{faster}, but runs like it have been held up, by {others[0].risk_seconds:.3g} s a step on average"]
    emptier = preference(chosen)[0] < preference(others[0])[0]
    better = "leaves more of the card free" if emptier else "is simpler"
    return [f"{faster}, less than a prediction is off by: {name} {better}"]


def _told_apart(*layouts: RankLayout) -> list[str]:
    """Name layouts with as much as tells them apart: `cp16 full`, `cp16 full with micro_batch 2`."""
    names = [str(layout) for layout in layouts]
    for key in ("micro_batch", "recompute", "schedule"):
        values = [getattr(layout, key) for layout in layouts]
        if len(set(names)) < len(names) and len(set(values)) > 1:
            names = [f"{name} with {key} {value}" for name, value in zip(names, values, strict=True)]
    return names


def _nothing(space: Space, found: _Found) -> InputError:
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
    needed = smallest_that_fits(space)
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
