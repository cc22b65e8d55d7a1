"""The stages of a recipe in order, each skipped where its artefact is already proven; `run` carries it through all."""

from trainshed.workflow.layout import automatic_layout, planned_layout, run_layout
from trainshed.workflow.prepare import (
    PREPARED,
    PreparedRun,
    checkpoint_home,
    keep_run,
    open_run,
    open_run_folder,
    prepare_run,
    resolve,
    store_options,
)
from trainshed.workflow.run import TrainedRun, run, train, watching
from trainshed.workflow.runnable import check_engine, check_runnable
from trainshed.workflow.start import RunStart, check_goes_on, find_start, note_other_runs
from trainshed.workflow.train import check_trainable, train_job

__all__ = [
    "PREPARED",
    "PreparedRun",
    "RunStart",
    "TrainedRun",
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
    "prepare_run",
    "resolve",
    "run",
    "run_layout",
    "store_options",
    "train",
    "train_job",
    "watching",
]
