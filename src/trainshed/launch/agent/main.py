"""The agent's entry: it reads the job, the stage and which node this is, and runs training or a CPU stage.

A CPU stage is one `trainshed worker` as a child. Its log and its exit code are kept in the run's folder.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from trainshed.errors import InputError, error_with_exit_code
from trainshed.launch.agent.notices import notify_of_job
from trainshed.launch.agent.training import NodeTraining
from trainshed.launch.attempt import worker_command
from trainshed.launch.job import JOB_FILE, JobFile, Stage, version_problem
from trainshed.launch.ranks import RankProcesses, RanksResult
from trainshed.launch.rendezvous import AgentOrder, AgentTimeouts, NodeEnv, Rendezvous, send_heartbeats, stage_part
from trainshed.observe.stages import StageRecorder, recorded_stage
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import LOGS
from trainshed.signals import StopSignals
from trainshed.storage import LocalStore

TRAIN_STAGE = "train"


def run_agent(stage: str, folder: Path, *, part: str | None = None, reporter: Reporter = SILENT) -> int:
    """Do this node's part of a stage; returns its exit code, and raises what ended it where that is known.

    `folder` holds the files of the job. `part` names one part of a stage that has several, as `3/8` counted from 0.
    """
    if not (folder / JOB_FILE).is_file():
        raise InputError("there are no files of a job", where=str(folder / JOB_FILE), hint="--job names their folder")
    job = JobFile.read(folder)
    known = {known_stage.name: known_stage for known_stage in job.stages}
    if stage not in known:
        where = str(folder / JOB_FILE)
        raise InputError(f"this job has no stage `{stage}`", where=where, hint=f"it has {', '.join(known)}")
    node_env = NodeEnv.from_environment(known[stage])
    timeouts = AgentTimeouts.from_environment()
    if stage == TRAIN_STAGE:
        return NodeTraining(job, known[stage], folder, node_env, timeouts, reporter).run()
    return run_cpu_stage(job, known[stage], folder, node_env, timeouts, part=stage_part(known[stage], part))


def run_cpu_stage(
    job: JobFile,
    stage: Stage,
    folder: Path,
    node_env: NodeEnv,
    timeouts: AgentTimeouts,
    *,
    part: str | None,
) -> int:
    """Run a stage or one part of it; returns 0, or 128 + the signal of a requested stop; raises why it failed."""
    problem = version_problem(job)
    if problem is not None:
        raise InputError(problem, hint="submit it again, so that its own code travels with it")
    run = Path(job.run)
    number = int(part.partition("/")[0]) if part else 0
    rendezvous = Rendezvous(run, start_of_part(stage, node_env.start, number))
    log = part_log(run, stage, number)
    command = worker_command(stage.name, "--job", str(folder), *(["--part", part] if part else []))
    with send_heartbeats(rendezvous, node_env.slot, timeouts):
        result = _run_to_end(command, log, job.grace_seconds)
    if result.exit_code == 0:
        rendezvous.publish(AgentOrder(1, exit_code=0))
        return 0
    recorder, name = StageRecorder(LocalStore(run)), recorded_stage(stage.name, number, stage.parts)
    if not result.failed:
        recorder.emit(name, "failed", what="asked to stop")
        rendezvous.publish(AgentOrder(1, exit_code=result.exit_code, what="asked to stop"))
        return result.exit_code
    failure = result.failed[0]
    line = last_error_line(failure.log_tail)
    what = f"{stage.name} {failure.end_text}" + (f": {line}" if line else "")
    error = error_with_exit_code(failure.exit_code, what, where=str(log))
    if failure.signal is not None:  # otherwise it has written the event itself
        recorder.emit(name, "failed", what=failure.end_text)
    rendezvous.publish(AgentOrder.failed(1, error))
    with notify_of_job(job, folder) as notifier:
        notifier.fail(what)
    raise error


def start_of_part(stage: Stage, start: str, part: int) -> str:
    """Return the name of the start of one part of a stage."""
    return f"{start}-part-{part:04d}" if stage.parts > 1 else start


def part_log(run_folder: Path, stage: Stage, part: int) -> Path:
    """Return the log of one part of a stage."""
    return run_folder / LOGS / stage.name / f"part-{part:04d}.log"


def _run_to_end(command: list[str], log: Path, grace_seconds: float) -> RanksResult:
    group = RankProcesses(grace_seconds=grace_seconds, failure_grace_seconds=0.0)
    with ExitStack() as stack:
        stack.enter_context(StopSignals(on_signal=group.ask_to_stop))
        stack.callback(group.close)
        group.start(command, 0, log.parent, {"PYTHONUNBUFFERED": "1", **os.environ}, log=log.name)
        while group.wait(0.2):
            pass
    return group.result()


def last_error_line(log_tail: str) -> str:
    """Return the last error in a log, or else its last line."""
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else (lines[-1] if lines else "")
