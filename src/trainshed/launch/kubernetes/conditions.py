"""What the status of one object means: its phase, why its pods wait or fail, and what Kueue says about it.

Each kind of object reports its phase in its own way; `object_status` translates them all into an `ObjectPhase`.
Everything here is pure: objects in, sentences out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trainshed.launch.kubernetes.kinds import KUEUE, MAX_RESTARTS_ANNOTATION, RESTARTS_ANNOTATION, KubeObject

ObjectPhase = Literal["suspended", "active", "serving", "done", "failed"]


@dataclass(frozen=True)
class ObjectStatus:
    """What the controller of an object says about it."""

    phase: ObjectPhase
    message: str = ""
    restarts: int = 0


def object_status(stage_object: KubeObject) -> ObjectStatus:
    """Return the phase of an object of any kind that can be a stage."""
    status = stage_object.get("status") or {}
    if stage_object["kind"] == "RayJob":
        return _rayjob_status(stage_object, status)
    if stage_object["kind"] == "Deployment":
        return _deployment_status(stage_object, status)
    conditions = {
        condition["type"]: condition for condition in status.get("conditions", ()) if condition.get("status") == "True"
    }
    restarts = int(status.get("restarts") or _annotations(stage_object).get(RESTARTS_ANNOTATION) or 0)
    if stage_object["kind"] == "PyTorchJob" and "Restarting" in conditions:
        restarts = max(restarts, 1)
    for name in ("Complete", "Completed", "Succeeded", "SuccessCriteriaMet"):
        if name in conditions:
            return ObjectStatus("done", restarts=restarts)
    for name in ("Failed", "FailureTarget"):
        if name in conditions:
            return ObjectStatus("failed", _condition_message(conditions[name]), restarts)
    if "Suspended" in conditions or _is_suspended(stage_object):
        return ObjectStatus("suspended", _condition_message(conditions.get("Suspended", {})), restarts)
    return ObjectStatus("active", restarts=restarts)


def should_recreate(job: KubeObject, restarts: int | None = None) -> bool:
    """Whether the driver recreates a failed plain Job: not after wrong input, which would only fail again."""
    max_restarts = _annotations(job).get(MAX_RESTARTS_ANNOTATION)
    if max_restarts is None or object_status(job).phase != "failed" or _failure_reason(job) == "PodFailurePolicy":
        return False
    return deadline_exceeded(job) or (object_status(job).restarts if restarts is None else restarts) < int(max_restarts)


def deadline_exceeded(job: KubeObject) -> bool:
    """Whether a Job reached its own time limit: it has saved, and continues in a new Job without using up a restart."""
    return _failure_reason(job) == "DeadlineExceeded"


def _failure_reason(job: KubeObject) -> str:
    conditions = (job.get("status") or {}).get("conditions", ())
    failed = [
        condition
        for condition in conditions
        if condition["type"] in ("Failed", "FailureTarget") and condition["status"] == "True"
    ]
    return failed[0].get("reason", "") if failed else ""


def _annotations(obj: KubeObject) -> dict[str, str]:
    return obj["metadata"].get("annotations") or {}


def desired_pods(stage_object: KubeObject) -> int:
    """Return how many pods an object is to have."""
    spec = stage_object.get("spec", {})
    if stage_object["kind"] == "Deployment":
        return int(spec["replicas"])
    if stage_object["kind"] == "Job":
        return int(spec.get("parallelism") or 1)
    if stage_object["kind"] == "JobSet":
        return sum(
            int(job.get("replicas", 1)) * int(job["template"]["spec"].get("parallelism") or 1)
            for job in spec["replicatedJobs"]
        )
    if stage_object["kind"] == "PyTorchJob":
        return sum(int(replica_spec.get("replicas") or 1) for replica_spec in spec["pytorchReplicaSpecs"].values())
    if stage_object["kind"] == "TrainJob":
        return int(spec["trainer"]["numNodes"])
    return 1 + sum(int(group["replicas"]) for group in spec["rayClusterSpec"].get("workerGroupSpecs", ()))


def ready_replicas(deployment: KubeObject) -> int:
    """Return how many replicas of a Deployment are ready; 0 while its controller has not seen the newest version."""
    status = deployment.get("status") or {}
    if int(status.get("observedGeneration") or 0) < int(deployment["metadata"].get("generation") or 0):
        return 0
    return min(int(status.get("readyReplicas") or 0), int(status.get("updatedReplicas") or 0))


def _deployment_status(deployment: KubeObject, status: KubeObject) -> ObjectStatus:
    """Return the phase of a server: it is never done, and has failed if it was not ready before its deadline."""
    if ready_replicas(deployment) >= desired_pods(deployment):
        return ObjectStatus("serving")
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    progressing = conditions.get("Progressing", {})
    if progressing.get("status") == "False" and progressing.get("reason") == "ProgressDeadlineExceeded":
        return ObjectStatus("failed", _condition_message(progressing))
    return ObjectStatus("active")


def _is_suspended(stage_object: KubeObject) -> bool:
    spec = stage_object.get("spec", {})
    return bool(spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"))


def _rayjob_status(rayjob: KubeObject, status: KubeObject) -> ObjectStatus:
    deployment, job = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    restarts = int(status.get("failed") or 0)
    message = " ".join((status.get("message") or "").split())
    if job == "SUCCEEDED":
        return ObjectStatus("done", restarts=restarts)
    if deployment in ("Failed", "ValidationFailed") or job in ("FAILED", "STOPPED"):
        return ObjectStatus("failed", message or status.get("reason", ""), restarts)
    if deployment in ("Suspended", "Suspending") or (not deployment and _is_suspended(rayjob)):
        return ObjectStatus("suspended", message, restarts)
    return ObjectStatus("active", message, restarts)


def _condition_message(condition: KubeObject) -> str:
    return (condition.get("message") or condition.get("reason") or "").strip().rstrip(".")


_PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_CONFIG_FAILURES = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
# Reasons of the condition DisruptionTarget, in plain words.
_DISRUPTIONS = {
    "PreemptionByScheduler": "was driven out by a job of higher priority",
    "DeletionByTaintManager": "lost its node: the node went down or was tainted",
    "EvictionByEvictionAPI": "was evicted: somebody drains its node",
    "DeletionByPodGC": "lost its node: the node is gone",
    "TerminationByKubelet": "was ended by its node, which shuts down or is short of resources",
}


@dataclass(frozen=True)
class PodProblem:
    """Why a pod does not run; `is_final`: waiting will not help."""

    message: str
    is_final: bool
    exit_code: int | None = None


def first_failure(pods: Sequence[KubeObject]) -> PodProblem | None:
    """Return why pods failed: the problem of the one that ended first, since the others follow it."""
    ended = sorted(_failures(pods), key=lambda time_and_problem: time_and_problem[0])
    return ended[0][1] if ended else None


def startup_problem(pods: Sequence[KubeObject]) -> PodProblem | None:
    """Return why pods that have a node do not run: an image, a secret, a mount."""
    for pod in pods:
        for status in _container_statuses(pod):
            waiting = status.get("state", {}).get("waiting") or {}
            reason, message = waiting.get("reason", ""), _first_line(waiting.get("message", ""))
            if reason in _PULL_FAILURES:
                detail = f" ({message})" if message else ""
                return PodProblem(f"the image {status.get('image') or 'of a container'} cannot be pulled{detail}", True)
            if reason in _CONFIG_FAILURES:
                return PodProblem(f"{_pod_and_node(pod)} cannot start its container: {message or reason}", True)
            if reason == "CrashLoopBackOff":
                ended = (status.get("lastState") or {}).get("terminated")
                problem = (
                    _termination_problem(pod, ended)
                    if ended
                    else PodProblem(f"{_pod_and_node(pod)} ends again and again", True)
                )
                return PodProblem(f"{problem.message}; it is started again soon", False, problem.exit_code)
    return None


def scheduling_problem(pods: Sequence[KubeObject], wanted: int) -> PodProblem | None:
    """Return why pods have no node; pods that have one hold it while they wait for the others."""
    waiting = [pod for pod in pods if not pod.get("spec", {}).get("nodeName")]
    if not waiting and len(pods) >= wanted:
        return None
    placed = len(pods) - len(waiting)
    message = next((find_condition(pod, "PodScheduled").get("message") for pod in waiting), None)
    detail = f": {_first_line(message)}" if message else ""
    if placed:
        return PodProblem(f"only {placed} of {wanted} pods have a node, which wait for the others{detail}", False)
    return PodProblem(f"none of {wanted} pods has a node yet{detail}", False)


def last_termination_line(pods: Sequence[KubeObject]) -> str:
    """Return the last line in the log of the container that failed first."""
    for _, terminated in sorted(_terminations(pods), key=lambda time_and_end: time_and_end[0]):
        lines = [line for line in (terminated.get("message") or "").splitlines() if line.strip()]
        if lines:
            return lines[-1].strip()
    return ""


def _failures(pods: Sequence[KubeObject]) -> Iterator[tuple[str, PodProblem]]:
    for pod in pods:
        status = pod.get("status", {})
        disruption = find_condition(pod, "DisruptionTarget")
        if disruption.get("status") == "True":
            what = _DISRUPTIONS.get(disruption.get("reason", ""), _first_line(disruption.get("message", "was ended")))
            yield disruption.get("lastTransitionTime", ""), PodProblem(f"{_pod_and_node(pod)} {what}", True)
            continue
        if status.get("reason") in ("NodeLost", "Evicted", "Shutdown", "NodeShutdown", "Terminated"):
            message = _first_line(status.get("message", "")) or status["reason"]
            lost = "lost its node" if status["reason"] == "NodeLost" else "was evicted"
            yield _last_transition(pod), PodProblem(f"{_pod_and_node(pod)} {lost}: {message}", True)
            continue
        for time, terminated in _terminations([pod]):
            yield time, _termination_problem(pod, terminated)


def _terminations(pods: Sequence[KubeObject]) -> Iterator[tuple[str, KubeObject]]:
    """Yield failed ends of containers, each with its time; also the end before the current start of a container."""
    for pod in pods:
        for status in _container_statuses(pod):
            for state in (status.get("state"), status.get("lastState")):
                terminated = (state or {}).get("terminated")
                if terminated and terminated.get("exitCode"):
                    yield terminated.get("finishedAt", ""), terminated


def _termination_problem(pod: KubeObject, terminated: KubeObject) -> PodProblem:
    code = terminated.get("exitCode")
    if terminated.get("reason") == "OOMKilled":
        return PodProblem(f"{_pod_and_node(pod)} was killed for using more memory than it may (OOMKilled)", True, code)
    if code is not None and code > 128:
        return PodProblem(f"{_pod_and_node(pod)} was ended by signal {code - 128}", True, code)
    return PodProblem(f"{_pod_and_node(pod)} exited with {code}", True, code)


def _container_statuses(pod: KubeObject) -> list[KubeObject]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def find_condition(obj: KubeObject, type: str) -> KubeObject:
    """Return a condition of an object by its type; empty if it has none."""
    conditions = (obj.get("status") or {}).get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == type), {})


def as_sentence(text: str) -> str:
    """Write a text as a sentence."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _last_transition(pod: KubeObject) -> str:
    return max(
        (condition.get("lastTransitionTime") or "" for condition in pod.get("status", {}).get("conditions", ())),
        default="",
    )


def _pod_and_node(pod: KubeObject) -> str:
    node = pod.get("spec", {}).get("nodeName")
    return f"pod {pod['metadata']['name']}" + (f" on {node}" if node else "")


def _first_line(text: str) -> str:
    return next(iter((text or "").strip().splitlines()), "").rstrip(".")


ADMISSION_GATE = f"{KUEUE}/admission"
"""The scheduling gate of a pod whose workload is not admitted yet."""


def is_gated(pod: KubeObject) -> bool:
    """Whether a pod waits for Kueue to admit its workload."""
    return any(gate["name"] == ADMISSION_GATE for gate in pod.get("spec", {}).get("schedulingGates", ()))


def why_queued(queue: str, workload: KubeObject | None) -> str:
    """Return what Kueue says about a workload that it has not admitted."""
    if workload is None:
        return f"Kueue has not looked at it yet: is there a queue {queue}?"
    status = workload.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    evicted = conditions.get("Evicted", {})
    reserved = conditions.get("QuotaReserved", {})
    if conditions.get("Admitted", {}).get("status") == "True":
        return "Kueue has admitted it; its pods are about to be made."
    if reserved.get("status") == "True":
        checks = [
            f"{check['name']} is {check['state']}" + (f" ({check['message']})" if check.get("message") else "")
            for check in status.get("admissionChecks", ())
            if check.get("state") != "Ready"
        ]
        return as_sentence(f"it has quota in {queue} and waits for nodes: {', '.join(checks) or 'being admitted'}")
    if evicted.get("status") == "True":
        return as_sentence(f"Kueue has taken its nodes ({evicted.get('reason')}): {evicted.get('message', '')}")
    message = (reserved.get("message") or "it is its turn later").strip()
    return as_sentence(f"it waits for quota in {queue}: {message}")
