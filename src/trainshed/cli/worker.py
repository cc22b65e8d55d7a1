"""`trainshed worker`: what a process of a job runs, on every target. People use `train`, `run` and `submit`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions
    from trainshed.workflow import PreparedRun


def worker(
    stage: Literal["train", "fetch", "convert", "tokenise", "prepare", "export"],
    *overrides: str,
    run: Path | None = None,
    attempt: int | None = None,
    job: Path | None = None,
    part: str = "0/1",
    on: str = "local",
    collective_seconds: float | None = None,
    step_seconds: float | None = None,
) -> int:
    """Run one stage: training as one rank of an attempt, anything else as the only process.

    Parameters
    ----------
    stage
        The stage.
    overrides
        Keys of the cluster file to change, as cluster.key=value.
    run
        Training: the run's folder.
    attempt
        Training: the attempt that whoever started this rank has taken.
    job
        Other stages: the folder of the job's files.
    part
        Which part of a stage that is cut into several, as 0/4.
    on
        The cluster file that says where it runs.
    collective_seconds
        How long it waits for other ranks in one collective.
    step_seconds
        How long a step may take before it counts as stuck.
    """
    from trainshed.errors import InputError

    if stage != "train":
        if job is None:
            raise InputError(f"the stage {stage} is told by --job DIR what to do")
        return _on_cpus(stage, job, part)
    if run is None or attempt is None:
        raise InputError("a rank is told by --run and --attempt what to train")
    from trainshed.cli.progress import training_progress
    from trainshed.engines.torch.rank import train_rank
    from trainshed.engines.torch.watchdog import BUDGET_SECONDS, COLLECTIVE_SECONDS
    from trainshed.launch.here import read_plan
    from trainshed.observe.rank_error import health_folder
    from trainshed.recipe import load_cluster, split_overrides
    from trainshed.workflow import open_run_folder, store_options, train_job

    cluster = load_cluster(on, split_overrides(overrides)[1])
    options = store_options(cluster)
    opened = open_run_folder(run, cluster)
    if os.environ.get("RANK", "0") == "0":  # one look is enough, and a thousand ranks would each cost one
        _check_tokens(opened, options, health_folder(run, attempt))
    # Its own log says how it goes: `trainshed logs` shows that of rank 0.
    with training_progress(opened.steps) as on_event:
        return train_rank(
            train_job(opened, read_plan(run, attempt), options),
            run_folder=run,
            attempt=attempt,
            listener=on_event,
            collective_seconds=collective_seconds or COLLECTIVE_SECONDS,
            budget_seconds={**BUDGET_SECONDS, "step": step_seconds or BUDGET_SECONDS["step"]},
        )


def _check_tokens(run: PreparedRun, options: StoreOptions, health: Path) -> None:
    """See that the tokens are those that were prepared; whoever explains the end of the attempt is told if not."""
    from trainshed.cli.console import reporter
    from trainshed.errors import TrainshedError
    from trainshed.observe.rank_error import write_error

    try:
        run.data.check_files(options, reporter())
    except TrainshedError as error:
        write_error(health, 0, error)
        raise


def _on_cpus(stage: str, job: Path, part: str) -> int:
    from trainshed.cli.console import reporter
    from trainshed.errors import InputError
    from trainshed.workflow.stages import run_stage

    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(number) < int(parts)):
        raise InputError(f"`{part}` is no part of a stage", where="--part", hint="write for example --part 0/4")
    run_stage(stage, job, part=int(number), parts=int(parts), reporter=reporter())
    return 0
