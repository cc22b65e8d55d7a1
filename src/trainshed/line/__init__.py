"""The line: a recipe's stages in order, each skipped when its artefact is already proven."""

from trainshed.line.preparing import (
    PREPARED,
    PreparedRun,
    keep_run,
    open_run,
    open_run_folder,
    resolve,
    run_line,
    store_options,
)
from trainshed.line.runnable import check_engine, check_runnable
from trainshed.line.starting import RunStart, check_goes_on, find_start, note_other_runs
from trainshed.line.training import (
    automatic_layout,
    check_trainable,
    checkpoint_home,
    planned_layout,
    run_layout,
    train_job,
)

__all__ = [
    "PREPARED",
    "PreparedRun",
    "RunStart",
    "automatic_layout",
    "check_engine",
    "check_goes_on",
    "check_runnable",
    "check_trainable",
    "checkpoint_home",
    "find_start",
    "keep_run",
    "note_other_runs",
    "open_run",
    "open_run_folder",
    "planned_layout",
    "resolve",
    "run_layout",
    "run_line",
    "store_options",
    "train_job",
]
