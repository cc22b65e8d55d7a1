"""The profile of a recipe: which steps and ranks are recorded, and what of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from trainshed.recipe.section import NotNegativeInt, PositiveInt, Problem, Section


class Profile(Section):
    """A profile of some steps, once or in cycles.

    A cycle is `steps` recorded steps after `warmup` steps in which the profiler runs and keeps nothing. `wait` steps
    without it lie between two cycles.
    """

    start: PositiveInt = Field(10, description="First step that is profiled, counted from 1 as everywhere")
    steps: PositiveInt = Field(3, description="Number of steps that are recorded in a cycle")
    ranks: Annotated[tuple[NotNegativeInt, ...], Field(strict=False, min_length=1)] = Field(
        (0,), description="Ranks that are profiled"
    )
    warmup: NotNegativeInt | None = Field(
        None,
        description="Steps before each cycle in which the profiler runs and keeps nothing; left out: 1, where there is "
        "a step before (NeMo 24.07: none)",
    )
    cycles: PositiveInt = Field(1, description="How often so many steps are recorded")
    wait: NotNegativeInt | None = Field(
        None,
        description="Steps between two cycles without the profiler; left out: as many as before the first",
    )
    memory: bool = Field(False, description="Record memory too: on GPUs a snapshot for pytorch.org/memory_viz")
    stacks: bool = Field(False, description="Record the Python stack of each operation; slow")
    shapes: bool = Field(False, description="Record the shapes that each operation is given")

    @property
    def steps_before(self) -> int:
        """Steps of the run before the first that is recorded."""
        return self.start - 1

    @property
    def warmup_steps(self) -> int:
        """Steps before each cycle in which the profiler runs and keeps nothing."""
        return min(1, self.steps_before) if self.warmup is None else self.warmup

    @property
    def wait_steps(self) -> int:
        """Steps before each further cycle without the profiler."""
        return self.steps_before - self.warmup_steps if self.wait is None else self.wait

    def recorded(self) -> tuple[range, ...]:
        """Return the recorded steps of every cycle, counted from 0."""
        period = self.wait_steps + self.warmup_steps + self.steps
        starts = (self.steps_before + cycle * period for cycle in range(self.cycles))
        return tuple(range(start, start + self.steps) for start in starts)

    def problems(self) -> Iterator[Problem]:
        """Warm-up that does not fit before the first step, and waiting for nothing."""
        if self.warmup_steps > self.steps_before:
            yield Problem(
                ("warmup",),
                f"{self.warmup} steps do not fit before step {self.start}",
                f"write start: {self.warmup_steps + 1} or later, or a smaller one",
            )
        if self.wait is not None and self.cycles == 1:
            yield Problem(("wait",), "is not read with one cycle", "write cycles: 2 or more, or delete it")

    def length_problems(self, steps: int) -> Iterator[Problem]:
        """Yield which cycles a run of `steps` steps does not reach."""
        period = self.wait_steps + self.warmup_steps + self.steps
        reached = min(self.cycles, max(0, -(-(steps - self.steps_before) // period)))
        if not reached:
            yield Problem(("start",), f"the run ends after {steps} steps, before it", "write a smaller one")
        elif reached < self.cycles:
            yield Problem(
                ("cycles",),
                f"the run ends after {steps} steps, before cycle {reached + 1} of {self.cycles}",
                f"write cycles: {reached}, or a shorter `wait`",
            )
