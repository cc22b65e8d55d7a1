"""A stage on CPUs: one `trainshed worker` as a child, its log in the run's folder, its exit code kept."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.agent.meeting import Meeting, Order
from trainshed.launch.agent.place import AgentTimes, NodePlace
from trainshed.launch.agent.pulse import pulse
from trainshed.launch.agent.training import version_problem
from trainshed.launch.here import worker_command
from trainshed.launch.job import JobFile, Stage
from trainshed.launch.ranks import Ranks, RanksResult, forwarding
from trainshed.reporting import Reporter


def run_on_processors(
    job: JobFile,
    stage: Stage,
    folder: Path,
    place: NodePlace,
    times: AgentTimes,
    reporter: Reporter,
    *,
    part: str | None,
) -> int:
    """Do a stage, or one part of it; returns 0 or 128 + the signal of a requested stop, else raises why it failed."""
    problem = version_problem(job)
    if problem is not None:
        raise InputError(problem, hint="submit it again, so that its own code travels with it")
    run = Path(job.run)
    number = int(part.partition("/")[0]) if part else 0
    meeting = Meeting(run, f"{place.start}-part-{number:04d}" if part else place.start)
    logs = run / "logs" / stage.name
    name = f"part-{number:04d}.log"
    command = worker_command(stage.name, "--job", str(folder), *(["--part", part] if part else []))
    with pulse(meeting, place.slot, times):
        result = _see_through(command, logs, name, job.grace_seconds)
    if result.exit_code == 0:
        meeting.give(Order(1, exit_code=0))
        return 0
    if not result.failed:
        meeting.give(Order(1, exit_code=result.exit_code, what="asked to stop"))
        return result.exit_code
    failure = result.failed[0]
    said = last_words(failure.log_tail)
    what = f"{stage.name} {failure.how}" + (f": {said}" if said else "")
    code = InputError.exit_code if failure.exit_code == InputError.exit_code else TrainshedError.exit_code
    meeting.give(Order(1, exit_code=code, what=what))
    kind = InputError if code == InputError.exit_code else TrainshedError
    raise kind(what, where=str(logs / name))


def _see_through(command: list[str], logs: Path, name: str, grace_seconds: float) -> RanksResult:
    group = Ranks(grace_seconds=grace_seconds, failure_grace_seconds=0.0)
    with ExitStack() as stack:
        stack.enter_context(forwarding(group))
        stack.callback(group.close)
        group.start(command, 0, logs, {"PYTHONUNBUFFERED": "1", **os.environ}, log=name)
        while group.wait(0.2):
            pass
    return group.result()


def last_words(log_tail: str) -> str:
    """Return the last error that a log tells of, or else its last line."""
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else (lines[-1] if lines else "")
