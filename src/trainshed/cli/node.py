"""The hidden verbs that the processes of a job run on its nodes. People use `run`, `train` and `submit`.

worker                  one rank of a training, or the one process of another stage
agent                   what every node of a job runs, on every target
ray-driver              the entrypoint of a Ray job
kubernetes meet         what the pods of a PyTorchJob run first
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import App

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions
    from trainshed.workflow import PreparedRun


def worker(
    stage: Literal["train", "fetch", "convert", "tokenise", "prepare", "upload", "export", "eval"],
    *overrides: str,
    run: Path | None = None,
    attempt: int | None = None,
    job: Path | None = None,
    part: str = "0/1",
    follow: bool = False,
    on: str = "local",
) -> int:
    """Run one stage: training as one rank of an attempt, anything else as the only process.

    Parameters
    ----------
    stage
        The stage.
    overrides
        Keys of the cluster file to change, as cluster.key=value.
    run
        Training, or checkpoints that are evaluated beside it: the run's folder.
    attempt
        Training: the attempt that whoever started this rank has taken.
    job
        Other stages: the folder of the job's files.
    part
        Which part of a stage that is cut into several, as 0/4.
    follow
        Of upload: go on beside a training until a signal ends it.
    on
        The cluster file that says where it runs.
    """
    from trainshed.errors import InputError

    if stage == "eval" and run is not None:
        from trainshed.cli.console import PlainReporter
        from trainshed.workflow.evaluation.stage import evaluate_held

        return evaluate_held(run, PlainReporter())
    if stage != "train":
        if job is None:
            raise InputError(f"the stage {stage} is told by --job DIR what to do")
        if follow:
            return _follow_training(stage, job)
        return _run_cpu_stage(stage, job, part)
    if run is None or attempt is None:
        raise InputError("a rank is told by --run and --attempt what to train")
    from trainshed.cli.console import reporter, training_progress
    from trainshed.engines.torch.rank import train_rank
    from trainshed.errors import TrainshedError
    from trainshed.launch.attempt import read_plan
    from trainshed.observe.health import health_folder, write_rank_error
    from trainshed.recipe import load_cluster, split_overrides
    from trainshed.workflow import open_run_folder, store_options, train_job

    cluster = load_cluster(on, split_overrides(overrides)[1])
    options = store_options(cluster)
    rank, health = int(os.environ.get("RANK", "0")), health_folder(run, attempt)
    try:
        opened = open_run_folder(run, cluster, attempt=attempt, reporter=reporter())
    except TrainshedError as error:
        write_rank_error(health, rank, error)
        raise
    if rank == 0:  # one look is enough, and a thousand ranks would each cost one
        _check_tokens(opened, options, health)
    # Its own log says how it goes: `trainshed logs` shows that of rank 0.
    with training_progress(opened.steps) as on_event:
        return train_rank(
            train_job(opened, read_plan(run, attempt), options),
            run_folder=run,
            attempt=attempt,
            listener=on_event,
        )


def _check_tokens(run: PreparedRun, options: StoreOptions, health: Path) -> None:
    """Check that the tokens are those that were prepared; an error is kept with the attempt's health."""
    from trainshed.cli.console import reporter
    from trainshed.errors import TrainshedError
    from trainshed.observe.health import write_rank_error

    try:
        run.data.check_files(options, reporter())
    except TrainshedError as error:
        write_rank_error(health, 0, error)
        raise


def _follow_training(stage: str, job: Path) -> int:
    from trainshed.cli.console import reporter
    from trainshed.errors import InputError
    from trainshed.workflow.stages import follow_training

    if stage != "upload":
        raise InputError(f"the stage {stage} runs beside no training", where="--follow", hint="only upload does")
    return follow_training(job, reporter=reporter())


def _run_cpu_stage(stage: str, job: Path, part: str) -> int:
    from trainshed.cli.console import reporter
    from trainshed.errors import InputError
    from trainshed.workflow.stages import run_stage

    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(number) < int(parts)):
        raise InputError(f"`{part}` is not a part of a stage", where="--part", hint="write for example --part 0/4")
    run_stage(stage, job, part=int(number), parts=int(parts), reporter=reporter())
    return 0


def agent(stage: str, *, job: Path, part: str | None = None) -> int:
    """Run one node's part of a stage and see it through.

    Parameters
    ----------
    stage
        The stage.
    job
        The folder with the job's files.
    part
        Which part of a stage with several, as 3/8 with parts counted from 0.
    """
    from trainshed.cli.console import PlainReporter
    from trainshed.launch.agent import run_agent

    return run_agent(stage, job, part=part, reporter=PlainReporter())


def ray_driver(stage: str | None = None, *, job: Path) -> int:
    """Run the stages of a job on the Ray cluster that this process is part of.

    Parameters
    ----------
    stage
        One stage alone; left out: all of them in order.
    job
        The folder of the job's files, which every node sees.
    """
    from trainshed.cli.console import reporter
    from trainshed.launch.ray.driver import drive

    return drive(job, stage, reporter=reporter())


app = App(name="kubernetes", help="What runs inside the pods of a job.")


@app.command
def meet() -> int:
    """Agree with the other pods of a PyTorchJob on a name for this start, and print it."""
    import os
    import sys

    from trainshed.launch.kubernetes.objects import LOCAL_FOLDER
    from trainshed.launch.kubernetes.rendezvous import fetch_start, next_start, publish_start
    from trainshed.launch.rendezvous import START_PORT_OFFSET

    rank, pods = int(os.environ["TRAINSHED_NODE_RANK"]), int(os.environ["TRAINSHED_MEET"])
    port = int(os.environ["MASTER_PORT"]) + START_PORT_OFFSET
    if rank:
        start = fetch_start(os.environ["MASTER_ADDR"], port, rank)
    else:
        folder = Path(os.environ.get("TRAINSHED_LOCAL_FOLDER", LOCAL_FOLDER))
        start = next_start(folder, os.environ["POD_UID"])
        publish_start(port, pods, start)
    sys.stdout.write(start)
    return 0
