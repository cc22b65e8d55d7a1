"""How the object of a stage stands, whatever its kind: each says it in other words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainshed.launch.kubernetes.kinds import Object
from trainshed.launch.kubernetes.manifests.naming import MOST_RESTARTS, RESTARTS

Phase = Literal["suspended", "active", "serving", "done", "failed"]


@dataclass(frozen=True)
class Standing:
    """What the controller of an object says about it."""

    phase: Phase
    message: str = ""
    restarts: int = 0


def standing(found: Object) -> Standing:
    """Return how an object stands."""
    status = found.get("status") or {}
    if found["kind"] == "RayJob":
        return _ray(found, status)
    if found["kind"] == "Deployment":
        return _deployment(found, status)
    conditions = {each["type"]: each for each in status.get("conditions", ()) if each.get("status") == "True"}
    restarts = int(status.get("restarts") or _annotations(found).get(RESTARTS) or 0)
    if found["kind"] == "PyTorchJob" and "Restarting" in conditions:
        restarts = max(restarts, 1)
    for name in ("Complete", "Completed", "Succeeded", "SuccessCriteriaMet"):
        if name in conditions:
            return Standing("done", restarts=restarts)
    for name in ("Failed", "FailureTarget"):
        if name in conditions:
            return Standing("failed", _message(conditions[name]), restarts)
    if "Suspended" in conditions or _suspended(found):
        return Standing("suspended", _message(conditions.get("Suspended", {})), restarts)
    return Standing("active", restarts=restarts)


def is_made_anew(found: Object, restarts: int | None = None) -> bool:
    """Whether the driver makes a plain Job anew that has failed: wrong input would only fail again."""
    most = _annotations(found).get(MOST_RESTARTS)
    if most is None or standing(found).phase != "failed" or _failed_by(found) == "PodFailurePolicy":
        return False
    return ran_out_of_time(found) or (standing(found).restarts if restarts is None else restarts) < int(most)


def ran_out_of_time(found: Object) -> bool:
    """Whether a Job was ended by its own clock: it has saved, and goes on in a new one that is not counted."""
    return _failed_by(found) == "DeadlineExceeded"


def _failed_by(found: Object) -> str:
    conditions = (found.get("status") or {}).get("conditions", ())
    failed = [each for each in conditions if each["type"] in ("Failed", "FailureTarget") and each["status"] == "True"]
    return failed[0].get("reason", "") if failed else ""


def _annotations(found: Object) -> dict[str, str]:
    return found["metadata"].get("annotations") or {}


def wanted_pods(found: Object) -> int:
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


def ready_replicas(found: Object) -> int:
    """Return how many replicas of a Deployment answer; none while its controller has not seen the newest version."""
    status = found.get("status") or {}
    if int(status.get("observedGeneration") or 0) < int(found["metadata"].get("generation") or 0):
        return 0
    return min(int(status.get("readyReplicas") or 0), int(status.get("updatedReplicas") or 0))


def _deployment(found: Object, status: Object) -> Standing:
    """A server is never done; it has failed when it was not ready in the time that it was given."""
    if ready_replicas(found) >= wanted_pods(found):
        return Standing("serving")
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    progressing = conditions.get("Progressing", {})
    if progressing.get("status") == "False" and progressing.get("reason") == "ProgressDeadlineExceeded":
        return Standing("failed", _message(progressing))
    return Standing("active")


def _suspended(found: Object) -> bool:
    spec = found.get("spec", {})
    return bool(spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"))


def _ray(found: Object, status: Object) -> Standing:
    deployment, job = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    restarts = int(status.get("failed") or 0)
    message = " ".join((status.get("message") or "").split())
    if job == "SUCCEEDED":
        return Standing("done", restarts=restarts)
    if deployment in ("Failed", "ValidationFailed") or job in ("FAILED", "STOPPED"):
        return Standing("failed", message or status.get("reason", ""), restarts)
    if deployment in ("Suspended", "Suspending") or (not deployment and _suspended(found)):
        return Standing("suspended", message, restarts)
    return Standing("active", message, restarts)


def _message(condition: Object) -> str:
    return (condition.get("message") or condition.get("reason") or "").strip().rstrip(".")
