"""What the status of one object means: its phase, why its pods wait or fail, and what Kueue says about it.

Each kind of object reports its phase in other words; `object_status` makes them one. Of several problems of pods
the worst is named first. Everything here is pure: objects in, sentences out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trainshed.launch.kubernetes.objects import MAX_RESTARTS_ANNOTATION, RESTARTS_ANNOTATION, KubeObject

ObjectPhase = Literal["suspended", "active", "serving", "done", "failed"]


@dataclass(frozen=True)
class ObjectStatus:
    """What the controller of an object says about it."""

    phase: ObjectPhase
    message: str = ""
    restarts: int = 0


def object_status(found: KubeObject) -> ObjectStatus:
    """Return how an object stands."""
    status = found.get("status") or {}
    if found["kind"] == "RayJob":
        return _rayjob_status(found, status)
    if found["kind"] == "Deployment":
        return _deployment_status(found, status)
    conditions = {each["type"]: each for each in status.get("conditions", ()) if each.get("status") == "True"}
    restarts = int(status.get("restarts") or _annotations(found).get(RESTARTS_ANNOTATION) or 0)
    if found["kind"] == "PyTorchJob" and "Restarting" in conditions:
        restarts = max(restarts, 1)
    for name in ("Complete", "Completed", "Succeeded", "SuccessCriteriaMet"):
        if name in conditions:
            return ObjectStatus("done", restarts=restarts)
    for name in ("Failed", "FailureTarget"):
        if name in conditions:
            return ObjectStatus("failed", _condition_message(conditions[name]), restarts)
    if "Suspended" in conditions or _is_suspended(found):
        return ObjectStatus("suspended", _condition_message(conditions.get("Suspended", {})), restarts)
    return ObjectStatus("active", restarts=restarts)


def should_recreate(found: KubeObject, restarts: int | None = None) -> bool:
    """Whether the driver makes a plain Job anew that has failed: wrong input would only fail again."""
    most = _annotations(found).get(MAX_RESTARTS_ANNOTATION)
    if most is None or object_status(found).phase != "failed" or _failure_reason(found) == "PodFailurePolicy":
        return False
    return deadline_exceeded(found) or (object_status(found).restarts if restarts is None else restarts) < int(most)


def deadline_exceeded(found: KubeObject) -> bool:
    """Whether a Job was ended by its own clock: it has saved, and goes on in a new one that is not counted."""
    return _failure_reason(found) == "DeadlineExceeded"


def _failure_reason(found: KubeObject) -> str:
    conditions = (found.get("status") or {}).get("conditions", ())
    failed = [each for each in conditions if each["type"] in ("Failed", "FailureTarget") and each["status"] == "True"]
    return failed[0].get("reason", "") if failed else ""


def _annotations(found: KubeObject) -> dict[str, str]:
    return found["metadata"].get("annotations") or {}


def desired_pods(found: KubeObject) -> int:
    """Return how many pods an object is to have."""
    spec = found.get("spec", {})
    if found["kind"] == "Deployment":
        return int(spec["replicas"])
    if found["kind"] == "Job":
        return int(spec.get("parallelism") or 1)
    if found["kind"] == "JobSet":
        return sum(
            int(job.get("replicas", 1)) * int(job["template"]["spec"].get("parallelism") or 1)
            for job in spec["replicatedJobs"]
        )
    if found["kind"] == "PyTorchJob":
        return sum(int(each.get("replicas") or 1) for each in spec["pytorchReplicaSpecs"].values())
    if found["kind"] == "TrainJob":
        return int(spec["trainer"]["numNodes"])
    return 1 + sum(int(group["replicas"]) for group in spec["rayClusterSpec"].get("workerGroupSpecs", ()))


def ready_replicas(found: KubeObject) -> int:
    """Return how many replicas of a Deployment answer; none while its controller has not seen the newest version."""
    status = found.get("status") or {}
    if int(status.get("observedGeneration") or 0) < int(found["metadata"].get("generation") or 0):
        return 0
    return min(int(status.get("readyReplicas") or 0), int(status.get("updatedReplicas") or 0))


def _deployment_status(found: KubeObject, status: KubeObject) -> ObjectStatus:
    """A server is never done; it has failed when it was not ready in the time that it was given."""
    if ready_replicas(found) >= desired_pods(found):
        return ObjectStatus("serving")
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    progressing = conditions.get("Progressing", {})
    if progressing.get("status") == "False" and progressing.get("reason") == "ProgressDeadlineExceeded":
        return ObjectStatus("failed", _condition_message(progressing))
    return ObjectStatus("active")


def _is_suspended(found: KubeObject) -> bool:
    spec = found.get("spec", {})
    return bool(spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"))


def _rayjob_status(found: KubeObject, status: KubeObject) -> ObjectStatus:
    deployment, job = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    restarts = int(status.get("failed") or 0)
    message = " ".join((status.get("message") or "").split())
    if job == "SUCCEEDED":
        return ObjectStatus("done", restarts=restarts)
    if deployment in ("Failed", "ValidationFailed") or job in ("FAILED", "STOPPED"):
        return ObjectStatus("failed", message or status.get("reason", ""), restarts)
    if deployment in ("Suspended", "Suspending") or (not deployment and _is_suspended(found)):
        return ObjectStatus("suspended", message, restarts)
    return ObjectStatus("active", message, restarts)


def _condition_message(condition: KubeObject) -> str:
    return (condition.get("message") or condition.get("reason") or "").strip().rstrip(".")


_PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_CONFIG_FAILURES = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
# Reasons of the condition DisruptionTarget, in people's words.
_DISRUPTIONS = {
    "PreemptionByScheduler": "was driven out by a job of higher priority",
    "DeletionByTaintManager": "lost its node: the node went down or was tainted",
    "EvictionByEvictionAPI": "was evicted: somebody drains its node",
    "DeletionByPodGC": "lost its node: the node is gone",
    "TerminationByKubelet": "was ended by its node, which shuts down or is short of resources",
}
OUT_OF_MEMORY_EXIT_CODE = 137


@dataclass(frozen=True)
class PodProblem:
    """Why a pod is not what it should be; `failed`: it will not become that by itself."""

    sentence: str
    failed: bool
    exit_code: int | None = None


def first_failure(pods: Sequence[KubeObject]) -> PodProblem | None:
    """Return why a gang failed: what ended first says it, the others followed."""
    ended = sorted(_failures(pods), key=lambda found: found[0])
    return ended[0][1] if ended else None


def startup_problem(pods: Sequence[KubeObject]) -> PodProblem | None:
    """Return what keeps pods that have a node from running: an image, a secret, a mount."""
    for pod in pods:
        for status in _container_statuses(pod):
            waiting = status.get("state", {}).get("waiting") or {}
            reason, message = waiting.get("reason", ""), _first_line(waiting.get("message", ""))
            if reason in _PULL_FAILURES:
                said = f" ({message})" if message else ""
                return PodProblem(f"the image {status.get('image') or 'of a container'} cannot be pulled{said}", True)
            if reason in _CONFIG_FAILURES:
                return PodProblem(f"{_pod_and_node(pod)} cannot start its container: {message or reason}", True)
            if reason == "CrashLoopBackOff":
                ended = (status.get("lastState") or {}).get("terminated")
                said = (
                    _termination_problem(pod, ended)
                    if ended
                    else PodProblem(f"{_pod_and_node(pod)} ends again and again", True)
                )
                return PodProblem(f"{said.sentence}; it is started again soon", False, said.exit_code)
    return None


def scheduling_problem(pods: Sequence[KubeObject], wanted: int) -> PodProblem | None:
    """Return why pods have no node; half a gang that has one holds it for nothing."""
    waiting = [pod for pod in pods if not pod.get("spec", {}).get("nodeName")]
    if not waiting and len(pods) >= wanted:
        return None
    placed = len(pods) - len(waiting)
    why = next((find_condition(pod, "PodScheduled").get("message") for pod in waiting), None)
    said = f": {_first_line(why)}" if why else ""
    if placed:
        return PodProblem(f"only {placed} of {wanted} pods have a node, which wait for the others{said}", False)
    return PodProblem(f"none of {wanted} pods has a node yet{said}", False)


def last_termination_line(pods: Sequence[KubeObject]) -> str:
    """Return the last line that the container which failed first has left."""
    for _, terminated in sorted(_terminations(pods), key=lambda found: found[0]):
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
        for when, terminated in _terminations([pod]):
            yield when, _termination_problem(pod, terminated)


def _terminations(pods: Sequence[KubeObject]) -> Iterator[tuple[str, KubeObject]]:
    """Containers that ended badly, with the time; earlier ends count while a container is being started again."""
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


def find_condition(found: KubeObject, kind: str) -> KubeObject:
    """Return a condition of an object; nothing where it has none such."""
    return next((each for each in (found.get("status") or {}).get("conditions", ()) if each["type"] == kind), {})


def as_sentence(text: str) -> str:
    """Write a text as a sentence."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _last_transition(pod: KubeObject) -> str:
    return max(
        (each.get("lastTransitionTime") or "" for each in pod.get("status", {}).get("conditions", ())), default=""
    )


def _pod_and_node(pod: KubeObject) -> str:
    node = pod.get("spec", {}).get("nodeName")
    return f"pod {pod['metadata']['name']}" + (f" on {node}" if node else "")


def _first_line(text: str) -> str:
    return next(iter((text or "").strip().splitlines()), "").rstrip(".")


ADMISSION_GATE = "kueue.x-k8s.io/admission"
"""The gate that keeps a pod from being scheduled before its workload is admitted."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def is_gated(pod: KubeObject) -> bool:
    """Whether Kueue still holds a pod back."""
    return any(gate["name"] == ADMISSION_GATE for gate in pod.get("spec", {}).get("schedulingGates", ()))


def why_queued(queue: str, workload: KubeObject | None) -> str:
    """Return what Kueue says about a workload that it has not admitted."""
    if workload is None:
        return f"Kueue has not looked at it yet: is there a queue {queue}?"
    status = workload.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions", ())}
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
