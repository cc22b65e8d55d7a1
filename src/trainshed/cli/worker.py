"""`trainshed worker`: what a rank runs, on every target. People use `train` and `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def worker(stage: Literal["train"], *, run: Path, attempt: int) -> int:
    """Run one stage as one rank of an attempt.

    Parameters
    ----------
    stage
        The stage.
    run
        The run's folder.
    attempt
        The attempt that whoever started this rank has taken.
    """
    from trainshed.engines.torch.rank import train_rank
    from trainshed.launch.here import read_plan
    from trainshed.line import open_run_folder, train_job

    job = train_job(open_run_folder(run), read_plan(run, attempt))
    return train_rank(job, run_folder=run, attempt=attempt)
