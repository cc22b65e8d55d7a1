"""The section `budgets`: how long each phase of a run may last (`observe/budgets.py` has the defaults)."""

from __future__ import annotations

from pydantic import Field

from trainshed.recipe.section import Duration, Section


class Budgets(Section):
    """How long a rank may be in a phase without progress before the attempt ends as stuck: seconds, or `20m`.

    Megatron and Megatron-Bridge have one limit up to the first step and one after it: each is the longest that is
    written.
    """

    rendezvous: Duration | None = Field(
        None, description="Until all ranks have started and met; left out: 10 minutes", examples=["30m"]
    )
    load: Duration | None = Field(
        None, description="Building the model and loading weights or a checkpoint; left out: 1 hour", examples=["2h"]
    )
    first_step: Duration | None = Field(
        None,
        description="A step in which ranks compile: the first, and those after the first validation and checkpoint; "
        "left out: 1 hour",
        examples=["90m"],
    )
    step: Duration | None = Field(
        None,
        description="Any other step; within it a rank waits half as long for others. "
        "Left out: 10 minutes, or 10 times a usual step of this run if that is longer",
        examples=["20m"],
    )
    validation: Duration | None = Field(None, description="One validation; left out: 1 hour", examples=["30m"])
    checkpoint: Duration | None = Field(
        None, description="Writing a checkpoint, also in the background; left out: 1 hour", examples=["2h"]
    )

    @property
    def written(self) -> dict[str, float]:
        """The budgets that the recipe has, in seconds, by their phases."""
        written: dict[str, float] = {}
        for phase in type(self).model_fields:
            if (seconds := getattr(self, phase)) is not None:
                written[phase] = seconds
        return written
