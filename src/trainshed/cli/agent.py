"""`trainshed agent`: what every node of a job runs, on every target. People use `submit`."""

from __future__ import annotations

from pathlib import Path


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
