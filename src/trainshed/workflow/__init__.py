"""The stages of a recipe in order, each skipped where its artefact is already proven; `run` carries it through all."""

from trainshed.workflow.evaluation.evaluate import EvaluationReport, evaluate
from trainshed.workflow.evaluation.measures import EvaluationRequest, ModelLoading
from trainshed.workflow.evaluation.stage import evaluate_run
from trainshed.workflow.layout import automatic_layout, planned_layout, run_layout
from trainshed.workflow.prepare import (
    PreparedRun,
    open_run,
    open_run_folder,
    prepare_run,
    prepared_steps,
    resolve,
    save_run,
    store_options,
)
from trainshed.workflow.run import (
    RunStart,
    TrainedRun,
    check_resumable,
    check_trainable,
    find_start,
    note_other_runs,
    run,
    train,
    train_job,
    watching,
)
from trainshed.workflow.run_checkpoints import checkpoint_home
from trainshed.workflow.runnable import check_engine, check_runnable

__all__ = [
    "EvaluationReport",
    "EvaluationRequest",
    "ModelLoading",
    "PreparedRun",
    "RunStart",
    "TrainedRun",
    "automatic_layout",
    "check_engine",
    "check_resumable",
    "check_runnable",
    "check_trainable",
    "checkpoint_home",
    "evaluate",
    "evaluate_run",
    "find_start",
    "note_other_runs",
    "open_run",
    "open_run_folder",
    "planned_layout",
    "prepare_run",
    "prepared_steps",
    "resolve",
    "run",
    "run_layout",
    "save_run",
    "store_options",
    "train",
    "train_job",
    "watching",
]
