"""The agent's entry: which job and stage, which node, and what runs there: training, or a CPU stage.

A CPU stage is one `trainshed worker` as a child, with its log in the run's folder and its exit code kept.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.agent.training import NodeTraining
from trainshed.launch.attempt import worker_command
from trainshed.launch.job import JOB_FILE, JobFile, Stage, version_problem
from trainshed.launch.ranks import RankProcesses, RanksResult, forward_stop_signals
from trainshed.launch.rendezvous import AgentOrder, AgentTimeouts, NodeEnv, Rendezvous, send_heartbeats, stage_part
from trainshed.reporting import SILENT, Reporter

TRAIN_STAGE = "train"


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
    node_env = NodeEnv.from_environment(found)
    timeouts = AgentTimeouts.from_environment()
    if stage == TRAIN_STAGE:
        return NodeTraining(job, found, folder, node_env, timeouts, reporter).run()
    return run_cpu_stage(job, found, folder, node_env, timeouts, reporter, part=stage_part(found, part))


def run_cpu_stage(
    job: JobFile,
    stage: Stage,
    folder: Path,
    node_env: NodeEnv,
    timeouts: AgentTimeouts,
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
    rendezvous = Rendezvous(run, f"{node_env.start}-part-{number:04d}" if part else node_env.start)
    logs = run / "logs" / stage.name
    name = f"part-{number:04d}.log"
    command = worker_command(stage.name, "--job", str(folder), *(["--part", part] if part else []))
    with send_heartbeats(rendezvous, node_env.slot, timeouts):
        result = _run_to_end(command, logs, name, job.grace_seconds)
    if result.exit_code == 0:
        rendezvous.publish(AgentOrder(1, exit_code=0))
        return 0
    if not result.failed:
        rendezvous.publish(AgentOrder(1, exit_code=result.exit_code, what="asked to stop"))
        return result.exit_code
    failure = result.failed[0]
    said = last_error_line(failure.log_tail)
    what = f"{stage.name} {failure.how}" + (f": {said}" if said else "")
    code = InputError.exit_code if failure.exit_code == InputError.exit_code else TrainshedError.exit_code
    rendezvous.publish(AgentOrder(1, exit_code=code, what=what))
    kind = InputError if code == InputError.exit_code else TrainshedError
    raise kind(what, where=str(logs / name))


def _run_to_end(command: list[str], logs: Path, name: str, grace_seconds: float) -> RanksResult:
    group = RankProcesses(grace_seconds=grace_seconds, failure_grace_seconds=0.0)
    with ExitStack() as stack:
        stack.enter_context(forward_stop_signals(group))
        stack.callback(group.close)
        group.start(command, 0, logs, {"PYTHONUNBUFFERED": "1", **os.environ}, log=name)
        while group.wait(0.2):
            pass
    return group.result()


def last_error_line(log_tail: str) -> str:
    """Return the last error that a log tells of, or else its last line."""
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else (lines[-1] if lines else "")
