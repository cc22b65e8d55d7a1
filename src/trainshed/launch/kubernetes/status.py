"""The status of a job: one sentence per stage, made from everything that the cluster lists about it.

`list_job_objects` asks the API server once; what follows is pure, so that every sentence has a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainshed.errors import InputError
from trainshed.launch.kubernetes.api import ApiForbidden, KubeApi
from trainshed.launch.kubernetes.conditions import (
    ObjectStatus,
    PodProblem,
    as_sentence,
    desired_pods,
    find_condition,
    first_failure,
    is_gated,
    last_termination_line,
    object_status,
    ready_replicas,
    scheduling_problem,
    should_recreate,
    startup_problem,
    why_queued,
)
from trainshed.launch.kubernetes.kinds import (
    COMPONENT_LABEL,
    DEPLOYMENT,
    EVENT,
    INSTANCE_LABEL,
    JOB,
    POD,
    QUEUE_LABEL,
    WORKLOAD,
    KubeKind,
    KubeObject,
    driver_name,
    kind_named,
    needs_driver,
)
from trainshed.launch.stage_state import StageState

_MAX_PODS_ASKED = 3
"""Of many pods that are not ready, the first few are enough to say why."""


@dataclass(frozen=True)
class JobObjects:
    """A job's objects as the API server has them."""

    stages: Mapping[str, KubeObject | None]
    """The object of each stage; None: it does not exist."""
    pods: tuple[KubeObject, ...] = ()
    workloads: tuple[KubeObject, ...] = ()
    """Workloads of Kueue."""
    driver_job: KubeObject | None = None
    has_driver: bool = field(default=False)
    """Whether a driver creates the stages."""
    probe_failures: tuple[KubeObject, ...] = ()
    """Events of servers that are not ready."""

    def pods_of(self, stage: str) -> list[KubeObject]:
        """Return a stage's pods in the order of their ranks."""
        pods = [pod for pod in self.pods if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == stage]
        return sorted(pods, key=pod_rank)

    def workload_of(self, stage_object: KubeObject) -> KubeObject | None:
        """Return Kueue's workload of an object."""
        uid = stage_object["metadata"].get("uid")
        for workload in self.workloads:
            if any(owner.get("uid") == uid for owner in workload["metadata"].get("ownerReferences", ())):
                return workload
        return None


def pod_rank(pod: KubeObject) -> tuple[int, str]:
    """Return the node rank of a pod and its name: its controller's index, or the master before the workers."""
    labels = pod["metadata"].get("labels", {})
    annotations = pod["metadata"].get("annotations", {})
    name = pod["metadata"]["name"]
    key = "batch.kubernetes.io/job-completion-index"
    completion_index = labels.get(key, annotations.get(key))
    if completion_index is not None:
        return int(completion_index), name
    replica_index = labels.get("training.kubeflow.org/replica-index")
    if replica_index is not None:
        return int(replica_index) + (labels.get("training.kubeflow.org/replica-type") == "worker"), name
    return int(labels.get("ray.io/node-type") == "worker"), name


def list_job_objects(api: KubeApi, job: str, ids: Mapping[str, str]) -> JobObjects:
    """Return everything that the API server lists about a job; what we may not list is left out."""
    stages = {}
    for stage, object_id in ids.items():
        kind, _, name = object_id.partition("/")
        stages[stage] = api.get(kind_named(kind), name)
    pods = api.list(POD, f"{INSTANCE_LABEL}={job}")
    workloads: list[KubeObject] = []
    for stage_object in stages.values():
        if stage_object is not None:
            try:
                workloads += api.list(WORKLOAD, f"kueue.x-k8s.io/job-uid={stage_object['metadata'].get('uid')}")
            except ApiForbidden:
                break
    unready = _unready_server_pods(stages, pods)
    for pod in filter(is_gated, unready[:_MAX_PODS_ASKED]):
        workloads += _list_if_allowed(api, WORKLOAD, f"kueue.x-k8s.io/job-uid={pod['metadata'].get('uid')}")
    probe_failures = [
        event
        for pod in unready[:_MAX_PODS_ASKED]
        for event in _list_if_allowed(
            api, EVENT, fields=f"involvedObject.name={pod['metadata']['name']},reason=Unhealthy"
        )
    ]
    has_driver = needs_driver(ids)
    driver_job = api.get(JOB, driver_name(job)) if has_driver else None
    return JobObjects(stages, tuple(pods), tuple(workloads), driver_job, has_driver, tuple(probe_failures))


def _unready_server_pods(stages: Mapping[str, KubeObject | None], pods: list[KubeObject]) -> list[KubeObject]:
    """Return the unready pods of servers that do not serve yet."""
    waiting = {
        stage
        for stage, deployment in stages.items()
        if deployment is not None
        and deployment["kind"] == DEPLOYMENT.name
        and object_status(deployment).phase != "serving"
    }
    return [
        pod for pod in pods if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) in waiting and not is_ready(pod)
    ]


def _list_if_allowed(api: KubeApi, kind: KubeKind, selector: str = "", *, fields: str = "") -> list[KubeObject]:
    try:
        return api.list(kind, selector, fields=fields)
    except ApiForbidden:
        return []


def serving_state(stage: str, object_id: str, deployment: KubeObject, objects: JobObjects) -> StageState:
    """Return the state of a serving stage; it is never done, and has failed only if waiting does not help."""
    pods = current_pods(stage, objects)
    names = tuple(pod["metadata"]["name"] for pod in pods if is_ready(pod)) or tuple(
        pod["metadata"]["name"] for pod in pods
    )
    ready, wanted = ready_replicas(deployment), desired_pods(deployment)
    restarts = sum(container.get("restartCount", 0) for pod in pods for container in _main_container_statuses(pod))
    if ready >= wanted:
        return StageState(stage, "serving", f"Serving, {ready} of {wanted} ready.", object_id, names, restarts)
    why = _why_unready(deployment, pods, wanted, objects)
    if ready:
        reason = as_sentence(f"serving, {ready} of {wanted} ready: {why.message}")
        return StageState(stage, "serving", reason, object_id, names, restarts)
    state = "failed" if why.is_final else "waiting"
    return StageState(stage, state, as_sentence(why.message), object_id, names, restarts, why.exit_code)


def current_pods(stage: str, objects: JobObjects) -> list[KubeObject]:
    """Return a server's pods without those that are being deleted."""
    return [pod for pod in objects.pods_of(stage) if "deletionTimestamp" not in pod["metadata"]]


def is_placed(stage: str, deployment: KubeObject, objects: JobObjects) -> bool:
    """Whether all replicas have a node, so that only their own start is left to wait for."""
    pods = current_pods(stage, objects)
    return len(pods) >= desired_pods(deployment) and all(pod.get("spec", {}).get("nodeName") for pod in pods)


def is_ready(pod: KubeObject) -> bool:
    """Whether a pod is ready."""
    return find_condition(pod, "Ready").get("status") == "True"


def _why_unready(deployment: KubeObject, pods: list[KubeObject], wanted: int, objects: JobObjects) -> PodProblem:
    """Return the first reason that applies; final if the time is up, or if another start would fail the same way."""
    gated = next((pod for pod in pods if is_gated(pod)), None)
    if gated is not None:
        queue = deployment["metadata"].get("labels", {}).get(QUEUE_LABEL, "its queue")
        return PodProblem(why_queued(queue, objects.workload_of(gated)), False)
    refused = find_condition(deployment, "ReplicaFailure")
    if len(pods) < wanted:
        refusal = refused.get("message", "").strip() if refused.get("status") == "True" else ""
        message = f"a pod cannot be made: {refusal}" if refusal else f"{len(pods)} of {wanted} pods are made"
        return PodProblem(message, False)
    unplaced = [pod for pod in pods if not pod.get("spec", {}).get("nodeName")]
    if unplaced:
        message = find_condition(unplaced[0], "PodScheduled").get("message", "").strip()
        detail = f": {message}" if message else ""
        return PodProblem(f"{len(unplaced)} of {wanted} pods have no node yet{detail}", False)
    late = object_status(deployment).phase == "failed"
    unready = [pod for pod in pods if not is_ready(pod)]
    problem = startup_problem(unready)
    crashed = first_failure(unready)
    if problem is None and crashed is not None:
        problem = PodProblem(f"{crashed.message} and was started again", False, crashed.exit_code)
    if problem is None:
        problem = PodProblem(_loading_progress(unready, objects), False)
    line = last_termination_line(unready)
    message = f"{problem.message}. Last line: {line}" if line else problem.message
    hopeless = crashed is not None and crashed.exit_code == InputError.exit_code
    return PodProblem(message, late or hopeless, problem.exit_code)


def _loading_progress(pods: list[KubeObject], objects: JobObjects) -> str:
    """Return what the probes say about pods that run and are not ready."""
    names = {pod["metadata"]["name"] for pod in pods}
    probe_events = [event for event in objects.probe_failures if event.get("involvedObject", {}).get("name") in names]
    running = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
    if not running:
        return f"{len(pods)} pods pull their image"
    text = "its server loads the weights" if running == 1 else f"{running} servers load the weights"
    if not probe_events:
        return text
    newest = max(probe_events, key=lambda event: event.get("lastTimestamp") or "")
    return f"{text} ({newest['message'].strip().splitlines()[0]})"


def _main_container_statuses(pod: KubeObject) -> list[KubeObject]:
    return pod.get("status", {}).get("containerStatuses") or []


def stage_states(ids: Mapping[str, str], objects: JobObjects) -> tuple[StageState, ...]:
    """Return the state of each stage, in order."""
    states: list[StageState] = []
    for stage, object_id in ids.items():
        stage_object = objects.stages.get(stage)
        previous = states[-1] if states else None
        states.append(
            _absent_stage_state(stage, object_id, previous, objects)
            if stage_object is None
            else _stage_state(stage, object_id, stage_object, objects)
        )
    return tuple(states)


def _stage_state(stage: str, object_id: str, stage_object: KubeObject, objects: JobObjects) -> StageState:
    if stage_object["kind"] == DEPLOYMENT.name:
        return serving_state(stage, object_id, stage_object, objects)
    status = object_status(stage_object)
    pods = objects.pods_of(stage)
    names = tuple(pod["metadata"]["name"] for pod in pods)
    if status.phase == "done":
        return StageState(stage, "done", "", object_id, names, status.restarts, 0)
    if status.phase == "failed":
        reason, code = _why_failed(status, pods)
        if (
            objects.driver_job is not None
            and object_status(objects.driver_job).phase == "active"
            and should_recreate(stage_object)
        ):
            reason_and_restart = f"{reason} The driver makes it anew."
            return StageState(stage, "waiting", reason_and_restart, object_id, names, status.restarts, code)
        return StageState(stage, "failed", reason, object_id, names, status.restarts, code)
    if status.phase == "suspended":
        return StageState(stage, "waiting", _why_suspended(stage_object, objects), object_id, (), status.restarts)
    problem = startup_problem(pods)
    if problem is not None:
        state = "waiting" if problem.is_final else "running"
        return StageState(
            stage, state, as_sentence(problem.message), object_id, names, status.restarts, problem.exit_code
        )
    missing = scheduling_problem(pods, desired_pods(stage_object))
    if missing is not None and not _has_ended(pods):
        return StageState(stage, "waiting", as_sentence(missing.message), object_id, names, status.restarts)
    if not all(_has_started(pod) for pod in pods):
        started = sum(map(_has_started, pods))
        reason = f"{started} of {len(pods)} pods run; the others pull their image or install the fabric's plugin"
        return StageState(stage, "waiting", as_sentence(reason), object_id, names, status.restarts)
    return StageState(stage, "running", _restart_note(status, pods), object_id, names, status.restarts)


def _absent_stage_state(stage: str, object_id: str, previous: StageState | None, objects: JobObjects) -> StageState:
    """Return the state of a stage whose object does not exist: not yet, never, or no longer."""
    if not objects.has_driver:
        return StageState(
            stage, "unknown", "It is not in the cluster (any more): cancelled, or ended long ago.", object_id
        )
    if previous is not None and previous.state in ("failed", "cancelled"):
        reason = f"It never starts: {previous.stage} failed." if previous.state == "failed" else previous.reason
        return StageState(stage, "cancelled", reason, object_id)
    if objects.driver_job is None:
        return StageState(stage, "unknown", "Neither it nor its driver is in the cluster.", object_id)
    if object_status(objects.driver_job).phase == "failed":
        pods = objects.pods_of("driver")
        reason, code = _why_failed(object_status(objects.driver_job), pods)
        return StageState(stage, "failed", f"The driver failed: {reason}", object_id, exit_code=code)
    if previous is not None and previous.state not in ("done",):
        return StageState(stage, "waiting", f"It starts when {previous.stage} is done.", object_id)
    pods = objects.pods_of("driver")
    problem = startup_problem(pods) or scheduling_problem(pods, 1)
    detail = f": {problem.message}" if problem is not None else ""
    return StageState(stage, "waiting", as_sentence(f"the driver is about to create it{detail}"), object_id)


def _why_failed(status: ObjectStatus, pods: list[KubeObject]) -> tuple[str, int | None]:
    reason = first_failure(pods)
    line = last_termination_line(pods)
    parts = [reason.message if reason is not None else status.message or "it failed"]
    if reason is not None and status.restarts:
        parts.append(f"after {status.restarts} restarts")
    text = as_sentence(" ".join(parts))
    return (f"{text} Last line: {line}" if line else text), (reason.exit_code if reason is not None else None)


def _why_suspended(stage_object: KubeObject, objects: JobObjects) -> str:
    """Return why an object is suspended: Kueue suspends what it has not admitted."""
    queue = stage_object["metadata"].get("labels", {}).get(QUEUE_LABEL)
    if queue is None:
        return "It is suspended, and no queue will start it: somebody has done that by hand."
    return why_queued(queue, objects.workload_of(stage_object))


def _restart_note(status: ObjectStatus, pods: list[KubeObject]) -> str:
    if not status.restarts:
        return ""
    line = last_termination_line(pods)
    return f"Started again {status.restarts} times." + (f" Last line before: {line}" if line else "")


def _has_started(pod: KubeObject) -> bool:
    return pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")


def _has_ended(pods: list[KubeObject]) -> bool:
    """Whether some pods have ended already: missing pods are not waited for then."""
    return any(pod.get("status", {}).get("phase") in ("Succeeded", "Failed") for pod in pods)
