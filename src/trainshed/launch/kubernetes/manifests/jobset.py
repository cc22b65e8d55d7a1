"""Training as a JobSet: one Indexed job is the gang, a failure starts the whole set again, wrong input does not."""

from __future__ import annotations

from trainshed.launch.kubernetes.kinds import JOB_SET, Object, new_object
from trainshed.launch.kubernetes.manifests.environment import from_label
from trainshed.launch.kubernetes.manifests.pod import KEPT_SECONDS, Container, Planned, pod_template

# The uid of the job that a pod belongs to. JobSet makes its jobs anew for a restart, so that it names one start.
START = from_label("TRAINSHED_START", "batch.kubernetes.io/controller-uid")
WRONG_INPUT = 2
"""The exit code of what would only fail again (`errors.py`)."""


def jobset(plan: Planned) -> Object:
    """Return the object of a gang."""
    stage, limits = plan.stage, plan.job.cluster.limits
    first = f"{plan.name}-{stage.name}-0-0.{plan.name}"
    container = Container(stage.name, {"MASTER_ADDR": first}, (START,))
    gang: Object = {
        "completionMode": "Indexed",
        "completions": plan.pods,
        "parallelism": plan.pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [fail_on_wrong_input(stage.name)]},
        "template": pod_template(plan, container),
    }
    # Reasons that no rule names restart the set and are counted.
    rules: list[Object] = [_rule("wrong-input", "FailJobSet", "PodFailurePolicy", stage.name)]
    if limits.hours is not None:
        gang["activeDeadlineSeconds"] = int(limits.hours * 3600)
        rules.append(_rule("time-is-up", "RestartJobSetAndIgnoreMaxRestarts", "DeadlineExceeded", stage.name))
    spec: Object = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [stage.name]},
        "failurePolicy": {"maxRestarts": stage.restarts, "rules": rules},
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "replicatedJobs": [{"name": stage.name, "replicas": 1, "template": {"spec": gang}}],
    }
    return new_object(JOB_SET, plan.metadata, spec=({"suspend": True} if plan.where.suspended else {}) | spec)


def fail_on_wrong_input(container: str) -> Object:
    """Return the rule by which a job fails at once where another start would fail alike."""
    codes = {"containerName": container, "operator": "In", "values": [WRONG_INPUT]}
    return {"action": "FailJob", "onExitCodes": codes}


def _rule(name: str, action: str, reason: str, job: str) -> Object:
    return {"name": name, "action": action, "onJobFailureReasons": [reason], "targetReplicatedJobs": [job]}
