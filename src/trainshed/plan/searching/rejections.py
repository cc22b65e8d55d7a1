"""Why layouts were not taken: kept while a search goes on, and said for the most telling of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from trainshed.plan.layout import RankLayout
from trainshed.plan.performance.prediction import Job, Memory
from trainshed.recipe.section import Problem

_SHOWN_OF_A_KIND = 5
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Rejected:
    """A layout that was not taken, why, and how many were not for the same reason."""

    layout: RankLayout
    reason: str
    alike: int = 1


@dataclass
class _Unfit:
    """Layouts of the same dense axes that do not fit: the one that comes closest, and how many they are."""

    layout: RankLayout
    stage: int
    memory: Memory
    count: int = 0
    fits: bool = False
    """Whether one of them does fit, with another micro-batch, sharding or recomputation."""


class Rejections:
    """Counts rejected layouts by reason and remembers one of each."""

    def __init__(self, job: Job) -> None:
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

    def unfit(self, layout: RankLayout, stage: int, memory: Memory) -> None:
        """A layout does not fit, for a stage of it."""
        kind = _kind(layout)
        found = self._unfit.get(kind)
        if found is None:
            found = self._unfit[kind] = _Unfit(layout, stage, memory)
        elif memory.total < found.memory.total:
            found.layout, found.stage, found.memory = layout, stage, memory
        found.count += 1

    def fit(self, layout: RankLayout) -> None:
        """A layout fits: others of its axes that do not are no news."""
        found = self._unfit.get(_kind(layout))
        if found is not None:
            found.fits = True

    def telling(self) -> tuple[Rejected, ...]:
        """Return the closest of axes that do not fit at all, the fastest axes first; then one of every other reason."""
        hopeless = [each for each in self._unfit.values() if not each.fits][:_SHOWN_OF_A_KIND]
        unfit = [
            Rejected(each.layout, self.too_full(each.layout, each.stage, each.memory), each.count) for each in hopeless
        ]
        if self._states is not None:
            gib, layout = self._states
            reason = (
                f"weights, gradients and optimiser states alone are {gib:.1f} GiB or more on a GPU, "
                f"which has {self._job.hardware.memory_gib:.1f}"
            )
            unfit.append(Rejected(layout, reason, self._too_much_state))
        return (*unfit, *(Rejected(layout, broken.what, count) for layout, broken, count in self._by_count()))

    def reasons(self) -> list[str]:
        """Return what is illegal and what to write, the most frequent first."""
        return [f"{broken.what}; {broken.hint}" for _, broken, _ in self._by_count()[:_SHOWN_OF_A_KIND]]

    def _by_count(self) -> list[tuple[RankLayout, Problem, int]]:
        return sorted(self._illegal.values(), key=lambda each: -each[2])

    def too_full(self, layout: RankLayout, stage: int, memory: Memory) -> str:
        """Say by how much a layout misses, where, and what fills the card most."""
        parts = {part.name: getattr(memory, part.name) for part in fields(memory) if part.name != "capacity"}
        largest = max(parts, key=lambda name: parts[name])
        where = f"stage {stage} needs" if layout.pp > 1 else "needs"
        return (
            f"{where} {memory.total:.1f} GiB with micro_batch {layout.micro_batch} and recompute {layout.recompute}, "
            f"{memory.total - memory.capacity:.1f} GiB more than the {memory.capacity:.1f} GiB of "
            f"{self._job.hardware.gpu_name}; {parts[largest]:.1f} GiB are {largest}"
        )


def _kind(layout: RankLayout) -> tuple[int, ...]:
    return (layout.tp, layout.pp, layout.cp, layout.ep)
