"""The agent's entry: which job and stage, which node, and what is run there."""

from __future__ import annotations

from pathlib import Path

from trainshed.errors import InputError
from trainshed.launch.agent.place import AgentTimes, NodePlace, part_of
from trainshed.launch.agent.processors import run_on_processors
from trainshed.launch.agent.training import NodeTraining
from trainshed.launch.job import JOB_FILE, JobFile
from trainshed.reporting import SILENT, Reporter

TRAIN = "train"


def run_agent(stage: str, folder: Path, *, part: str | None = None, reporter: Reporter = SILENT) -> int:
    """Do this node's part of a stage; returns its exit code, and raises what ended it where that is known.

    `folder` holds the files of the job. `part` is which part of a stage with several, as `3/8` counted from 0.
    """
    if not (folder / JOB_FILE).is_file():
        raise InputError("there are no files of a job", where=str(folder / JOB_FILE), hint="--job names their folder")
    job = JobFile.read(folder)
    found = next((each for each in job.stages if each.name == stage), None)
    if found is None:
        known = ", ".join(each.name for each in job.stages)
        raise InputError(f"this job has no stage `{stage}`", where=str(folder / JOB_FILE), hint=f"it has {known}")
    place = NodePlace.from_environment(found)
    times = AgentTimes.from_environment()
    if stage == TRAIN:
        return NodeTraining(job, found, folder, place, times, reporter).run()
    return run_on_processors(job, found, folder, place, times, reporter, part=part_of(found, part))
