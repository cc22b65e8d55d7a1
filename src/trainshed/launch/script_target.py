"""The base class of a target that a plugin brings: a scheduler which runs one bash script per stage.

A script is complete in itself: it writes the job's files into the run's folder, puts our code in place and starts the
node agent, as a Slurm job does. A subclass says how a script is sent, and may say how a stage stands and how it is
ended. `TARGETS` (`target.py`) is the table that it is registered in; the cluster file's `target` names it.
"""

from __future__ import annotations

import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from trainshed.errors import InputError
from trainshed.launch.fabric import fabric_setup
from trainshed.launch.job import SETUP_FILE, Job, Stage, setup_script
from trainshed.launch.slurm.render import (
    FIRST_COMMAND,
    export_line,
    link_job_files,
    node_script,
    node_script_file,
    write_job_files,
)
from trainshed.launch.target import RequestPart, StageState, SubmitRequest, SubmittedJob
from trainshed.recipe import Cluster


class ScriptTarget(ABC):
    """A scheduler that runs scripts. Options (`target_options` of the cluster file) are keyword arguments of the class.

    A stage of several nodes runs its script on each of them. The scheduler must then set TRAINSHED_NODE_RANK,
    MASTER_ADDR, MASTER_PORT, and TRAINSHED_START, which names this start and is the same on all of them.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    """Keys of the cluster file that it reads besides those that every scheduler does, such as `image`."""
    several_nodes: ClassVar[bool] = False
    """Whether it runs a stage on several nodes at once."""
    serves: ClassVar[bool] = False
    """Whether it runs a stage that does not end: `serve`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @abstractmethod
    def send(self, part: RequestPart, after: str | None) -> str:
        """Give the scheduler the script of a stage, to run when the job `after` has succeeded; return its id."""

    def render(self, job: Job) -> SubmitRequest:
        """Return the script of each stage, and what must be in the store before they run."""
        parts = tuple(RequestPart(f"{stage.name}.sh", stage.name, stage_script(job, stage)) for stage in job.stages)
        uploads = {f"code/{job.code.sha256}/{job.code.name}": job.code.data} if job.code is not None else {}
        return SubmitRequest(self.cluster.target, job.name, parts, uploads)

    def check(self, job: Job) -> Sequence[str]:
        """Say why the scheduler could not take the job."""
        most = max(stage.nodes + stage.spares for stage in job.stages)
        if most > 1 and not self.several_nodes:
            return [f"a job of {most} nodes, and the target {self.cluster.target} runs a stage on one"]
        return ()

    def submit(self, request: SubmitRequest, job: Job) -> SubmittedJob:
        """Put our code into the store, which must be mounted here, then send the scripts in order."""
        store = Path(_store(job))
        for name, data in request.uploads.items():
            file = store / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.is_file() or file.stat().st_size != len(data):
                file.write_bytes(data)
        ids: dict[str, str] = {}
        before: str | None = None
        for part in request.parts:
            assert part.stage is not None
            before = ids[part.stage] = self.send(part, before)
        return SubmittedJob(request.job, job.run, request.target, ids)

    def status(self, submitted: SubmittedJob) -> tuple[StageState, ...]:
        """Say how each stage stands."""
        why = f"the target {submitted.target} does not say; {submitted.run} has its events and logs"
        return tuple(StageState(stage, "unknown", why, id) for stage, id in submitted.ids.items())

    def logs(
        self,
        submitted: SubmittedJob,
        stage: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yield the lines of a stage's log as the scheduler has them; the run's folder is asked first."""
        raise InputError(
            f"the target {submitted.target} keeps no logs of its own", hint=f"they are in {submitted.run}/logs"
        )

    def cancel(self, submitted: SubmittedJob) -> tuple[str, ...]:
        """End every stage that has not ended."""
        raise InputError(f"the target {submitted.target} ends no jobs", hint="end them by the scheduler's own command")


def stage_script(job: Job, stage: Stage) -> str:
    """Return the bash script that runs a stage on one node."""
    setup = fabric_setup(job.cluster, nodes=stage.nodes) if stage.name == "train" else None
    files = dict(job.files) | {node_script_file(stage): node_script(job, stage, _store(job), setup)}
    site = setup_script(job.cluster)
    files |= {SETUP_FILE: site} if site is not None else {}
    command = f'bash "$files"/{node_script_file(stage)}'
    lines = [
        "#!/bin/bash",
        f"# The stage {stage.name} of {job.name}, written by Trainshed.",
        FIRST_COMMAND,
        export_line("run", job.run),
        'TRAINSHED_BEGAN="$(date +%s)"',
        'export TRAINSHED_BEGAN SLURM_NODEID="${TRAINSHED_NODE_RANK:-0}"',
        'mkdir -p "$run"',
        *write_job_files(files),
        *link_job_files(),
    ]
    if stage.parts > 1:
        lines += [f"for part in $(seq 0 {stage.parts - 1}); do", f"  SLURM_ARRAY_TASK_ID=$part {command}", "done"]
    else:
        lines.append(f"exec {command}")
    return "\n".join(lines) + "\n"


def _store(job: Job) -> str:
    return posixpath.dirname(posixpath.dirname(posixpath.dirname(job.run)))
