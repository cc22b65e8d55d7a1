"""`trainshed ray-driver`: the entrypoint of a Ray job, which carries it through its stages inside the cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainshed.launch.job import JobFile


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

    return drive(job, stage, reporter=reporter(), watching=_watching)


@contextmanager
def _watching(job: JobFile) -> Generator[Callable[[dict[str, Any]], None]]:
    from trainshed.cli.progress import training_progress
    from trainshed.workflow import open_run_folder

    with training_progress(open_run_folder(Path(job.run)).steps) as on_event:
        yield on_event
