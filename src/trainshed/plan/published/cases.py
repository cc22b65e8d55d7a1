"""Published rows as jobs the planner can predict.

A table says little about the software behind it; what a row leaves out is filled in by stated rules, and a row that
stays ambiguous is skipped with its reason, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainshed.plan.layout import RankLayout
from trainshed.plan.performance.prediction import Job
from trainshed.plan.performance.stacks import stack
from trainshed.plan.published.row_layout import cannot_run, global_batch_of, habits_of, layout_of
from trainshed.plan.published.row_machine import engine_of, hardware_of_row, precision_of
from trainshed.plan.published.row_model import model_of
from trainshed.plan.published.rows import Row, Skip


@dataclass(frozen=True)
class Case:
    """A row as the planner takes it."""

    job: Job
    layout: RankLayout
    cannot_run: str | None = None
    """Why its engine cannot run the layout, whatever the memory; published failures do not tell the two apart."""


def case_of(row: Row) -> Case:
    """Return the job and the layout of a row, or raise `Skip`."""
    for word in ("qlora", "8bit", "offload", "optimizer-in-bwd"):
        if f"technique: {word}" in row.notes.replace("+", "").replace("activation ", ""):
            raise Skip(f"it is of a technique that no key here names: {word}")
    model = model_of(row)
    hardware = hardware_of_row(row)
    layout = layout_of(row, model)
    job = Job(
        model=model,
        sequence_length=row.count("seq_len"),
        global_batch=global_batch_of(row, layout.dp * layout.micro_batch * layout.pp),
        precision=precision_of(row),
        hardware=hardware,
        gpus=layout.world_size,
        stack=stack(engine_of(row)),
        habits=habits_of(row, model, layout),
    )
    return Case(job, layout, cannot_run(row, model, layout))
