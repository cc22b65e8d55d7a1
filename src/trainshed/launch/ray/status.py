"""The state of each stage of a Ray job. Ray knows only the job as a whole; the driver's log has a line per stage."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainshed.launch.target import StageState

StageLogState = Literal["waits", "runs", "done"]

_STAGE_LINE = re.compile(r"stage (\S+) (waits|runs|done)(?:: (.*))?")
_ERROR_LINE = re.compile(r"error: (.*)")


@dataclass(frozen=True)
class StageLogLine:
    """A line of the driver's log about a stage."""

    stage: str
    state: StageLogState
    detail: str = ""

    def __str__(self) -> str:
        return f"stage {self.stage} {self.state}" + (f": {self.detail}" if self.detail else "")


def read_stage_lines(log: str) -> dict[str, StageLogLine]:
    """Return the last line about each stage in a driver's log, in the order of the stages."""
    lines: dict[str, StageLogLine] = {}
    for line in log.splitlines():
        if match := _STAGE_LINE.fullmatch(line.strip()):
            state: StageLogState = "waits" if match[2] == "waits" else "runs" if match[2] == "runs" else "done"
            lines[match[1]] = StageLogLine(match[1], state, match[3] or "")
    return lines


def stage_log_lines(log: str, stage: str) -> list[str]:
    """Return the part of a driver's log that was written during a stage."""
    lines, current = [], None
    for line in log.splitlines():
        if match := _STAGE_LINE.fullmatch(line.strip()):
            current = match[1]
        if current == stage:
            lines.append(line)
    return lines


def last_error(log: str) -> str | None:
    """Return the error that ended a driver, as its command line printed it."""
    errors = [match[1] for line in log.splitlines() if (match := _ERROR_LINE.match(line.strip()))]
    return errors[-1] if errors else None


def stage_states(stages: Sequence[str], id: str, job: Mapping[str, Any] | None, log: str) -> tuple[StageState, ...]:
    """Return the state of each stage and why; `job` is Ray's answer, None where it knows no such job."""
    if job is None:
        reason = "Ray knows no such job: its cluster was started anew, or the job was deleted there"
        return tuple(StageState(stage, "unknown", reason, id) for stage in stages)
    lines, states = read_stage_lines(log), []
    done = {stage for stage, line in lines.items() if line.state == "done"}
    open_stage = next((stage for stage in stages if stage not in done), None)
    for stage in stages:
        if job["status"] == "SUCCEEDED" or stage in done:
            states.append(StageState(stage, "done", "", id))
        elif stage == open_stage:
            states.append(_open_stage_state(stage, id, job, lines.get(stage), log))
        else:
            states.append(_later_stage_state(stage, id, job, open_stage))
    return tuple(states)


def _open_stage_state(stage: str, id: str, job: Mapping[str, Any], line: StageLogLine | None, log: str) -> StageState:
    """The state of the first stage that is not done."""
    if job["status"] == "PENDING":
        return StageState(stage, "waiting", f"Ray has not started the driver yet: {_ray_message(job)}", id)
    if job["status"] == "STOPPED":
        return StageState(stage, "cancelled", "stopped on request", id)
    if job["status"] == "FAILED":
        code = job.get("driver_exit_code")
        reason = last_error(log) or _killed_text(code) or _ray_message(job)
        return StageState(stage, "failed", reason, id, exit_code=code)
    if line is None:
        return StageState(stage, "waiting", "the driver is starting", id)
    if line.state == "waits":
        return StageState(stage, "waiting", line.detail, id)
    return StageState(stage, "running", "", id, nodes=tuple(line.detail.split()))


def _later_stage_state(stage: str, id: str, job: Mapping[str, Any], open_stage: str | None) -> StageState:
    if job["status"] in ("FAILED", "STOPPED"):
        ended = "failed" if job["status"] == "FAILED" else "was stopped"
        return StageState(stage, "cancelled", f"{open_stage} {ended} before it", id)
    return StageState(stage, "waiting", f"comes after {open_stage}", id)


def _killed_text(code: int | None) -> str | None:
    """Say what ended a driver that could not: the system, or a person; None where it ended by itself."""
    if code is None or code >= 0:
        return None
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its driver was killed by {name} (memory of the head node?); submitted again, the run goes on"


def _ray_message(job: Mapping[str, Any]) -> str:
    """The first line of Ray's own message."""
    return next(iter((job.get("message") or "").strip().splitlines()), "it does not say why")
