"""Stages without GPUs as plain Jobs, Indexed where they are cut into parts."""

from __future__ import annotations

from trainshed.launch.kubernetes.kinds import JOB, Object, new_object
from trainshed.launch.kubernetes.manifests.jobset import START, fail_on_wrong_input
from trainshed.launch.kubernetes.manifests.pod import KEPT_SECONDS, Container, Planned, pod_template

_RETRIES = 3
"""Of each part: downloads and nodes fail now and then, and whatever is done already is not done again."""


def cpu_job(plan: Planned) -> Object:
    """Return the object of a stage on CPUs."""
    stage = plan.stage
    spec: Object = {
        "completionMode": "Indexed",
        "completions": stage.parts,
        "parallelism": stage.parts,
        "backoffLimit": max(stage.restarts, _RETRIES) * stage.parts,
        "podFailurePolicy": {"rules": [fail_on_wrong_input(stage.name), ignore_disruption()]},
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "template": pod_template(plan, Container(stage.name, references=(START,))),
    }
    return new_object(JOB, plan.metadata, spec=({"suspend": True} if plan.where.suspended else {}) | spec)


def ignore_disruption() -> Object:
    """Return the rule by which a pod that was driven out does not count as failed."""
    return {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
