"""`trainshed worker`: what a rank runs, on every target. People use `train` and `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def worker(
    stage: Literal["train"],
    *overrides: str,
    run: Path,
    attempt: int,
    on: str = "local",
    collective_seconds: float | None = None,
    step_seconds: float | None = None,
) -> int:
    """Run one stage as one rank of an attempt.

    Parameters
    ----------
    stage
        The stage.
    overrides
        Keys of the cluster file to change, as cluster.key=value.
    run
        The run's folder.
    attempt
        The attempt that whoever started this rank has taken.
    on
        The cluster file that says where it runs.
    collective_seconds
        How long it waits for other ranks in one collective.
    step_seconds
        How long a step may take before it counts as stuck.
    """
    from trainshed.engines.torch.rank import COLLECTIVE_SECONDS, train_rank
    from trainshed.engines.torch.watchdog import BUDGET_SECONDS
    from trainshed.launch.here import read_plan
    from trainshed.line import open_run_folder, store_options, train_job
    from trainshed.recipe import load_cluster, split_overrides

    options = store_options(load_cluster(on, split_overrides(overrides)[1]))
    job = train_job(open_run_folder(run), read_plan(run, attempt), options)
    return train_rank(
        job,
        run_folder=run,
        attempt=attempt,
        collective_seconds=collective_seconds or COLLECTIVE_SECONDS,
        budget_seconds={**BUDGET_SECONDS, "step": step_seconds or BUDGET_SECONDS["step"]},
    )
