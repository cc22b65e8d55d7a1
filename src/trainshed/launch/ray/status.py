"""How the stages of a Ray job stand, from what Ray says of the job and the driver's log says of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainshed.launch.ray.stage_lines import last_error, read_stage_lines
from trainshed.launch.target import StageState


def stage_states(stages: Sequence[str], id: str, job: Mapping[str, Any] | None, log: str) -> tuple[StageState, ...]:
    """Say how each stage stands and why; `job` is Ray's answer, None where it knows no such job."""
    if job is None:
        reason = "Ray knows no such job: its cluster was started anew, or the job was deleted there"
        return tuple(StageState(stage, "unknown", reason, id) for stage in stages)
    told, states = read_stage_lines(log), []
    open_stage = next((stage for stage in stages if stage not in told or told[stage].word != "done"), None)
    for stage in stages:
        if job["status"] == "SUCCEEDED" or (stage in told and told[stage].word == "done"):
            states.append(StageState(stage, "done", "", id))
        elif stage == open_stage:
            states.append(_open(stage, id, job, log))
        else:
            states.append(_later(stage, id, job, open_stage))
    return tuple(states)


def _open(stage: str, id: str, job: Mapping[str, Any], log: str) -> StageState:
    """The stage that the job is at."""
    line = read_stage_lines(log).get(stage)
    if job["status"] == "PENDING":
        return StageState(stage, "waiting", f"Ray has not started the driver yet: {_message(job)}", id)
    if job["status"] == "STOPPED":
        return StageState(stage, "cancelled", "stopped on request", id)
    if job["status"] == "FAILED":
        code = job.get("driver_exit_code")
        reason = last_error(log) or _message(job)
        return StageState(stage, "failed", reason, id, exit_code=code)
    if line is None:
        return StageState(stage, "waiting", "the driver is starting", id)
    if line.word == "waits":
        return StageState(stage, "waiting", line.detail, id)
    return StageState(stage, "running", "", id, nodes=tuple(line.detail.split()))


def _later(stage: str, id: str, job: Mapping[str, Any], open_stage: str | None) -> StageState:
    if job["status"] in ("FAILED", "STOPPED"):
        ended = "failed" if job["status"] == "FAILED" else "was stopped"
        return StageState(stage, "cancelled", f"{open_stage} {ended} before it", id)
    return StageState(stage, "waiting", f"comes after {open_stage}", id)


def _message(job: Mapping[str, Any]) -> str:
    """Ray's own words, to the end of their first line."""
    return next(iter((job.get("message") or "").strip().splitlines()), "it does not say why")
