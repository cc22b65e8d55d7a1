"""The status of a job: one sentence per stage, made from everything that the cluster lists about it.

`list_job_objects` asks the API server once; what follows is pure, so that every sentence has a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainshed.launch.kubernetes.api import ApiForbidden, KubeApi
from trainshed.launch.kubernetes.conditions import (
    QUEUE_LABEL,
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
from trainshed.launch.kubernetes.objects import (
    COMPONENT_LABEL,
    DEPLOYMENT,
    EVENT,
    INSTANCE_LABEL,
    JOB,
    POD,
    WORKLOAD,
    KubeKind,
    KubeObject,
    driver_name,
    kind_named,
    needs_driver,
)
from trainshed.launch.target import StageState

_MAX_PODS_ASKED = 3
"""Of many pods that are not ready the first few say why."""


@dataclass(frozen=True)
class JobObjects:
    """A job's objects as the API server has them."""

    stages: Mapping[str, KubeObject | None]
    """The object of each stage; None: not there."""
    pods: tuple[KubeObject, ...] = ()
    workloads: tuple[KubeObject, ...] = ()
    """Kueue's."""
    driver: KubeObject | None = None
    has_driver: bool = field(default=False)
    """Whether a driver creates the stages."""
    probe_failures: tuple[KubeObject, ...] = ()
    """Events of servers that are not ready."""

    def pods_of(self, stage: str) -> list[KubeObject]:
        """Return a stage's pods in the order of their ranks."""
        found = [pod for pod in self.pods if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) == stage]
        return sorted(found, key=pod_rank)

    def workload_of(self, found: KubeObject) -> KubeObject | None:
        """Return Kueue's workload of an object."""
        uid = found["metadata"].get("uid")
        for workload in self.workloads:
            if any(owner.get("uid") == uid for owner in workload["metadata"].get("ownerReferences", ())):
                return workload
        return None


def pod_rank(pod: KubeObject) -> tuple[int, str]:
    """Return the node rank of a pod by what its controller says: an index, or master before workers."""
    labels = pod["metadata"].get("labels", {})
    annotations = pod["metadata"].get("annotations", {})
    name = pod["metadata"]["name"]
    for key in ("batch.kubernetes.io/job-completion-index",):
        written = labels.get(key, annotations.get(key))
        if written is not None:
            return int(written), name
    index = labels.get("training.kubeflow.org/replica-index")
    if index is not None:
        return int(index) + (labels.get("training.kubeflow.org/replica-type") == "worker"), name
    return int(labels.get("ray.io/node-type") == "worker"), name


def list_job_objects(api: KubeApi, job: str, ids: Mapping[str, str]) -> JobObjects:
    """Ask for everything of a job; what may not be listed is left out."""
    stages = {}
    for stage, written in ids.items():
        kind, _, name = written.partition("/")
        stages[stage] = api.get(kind_named(kind), name)
    pods = api.list(POD, f"{INSTANCE_LABEL}={job}")
    workloads: list[KubeObject] = []
    for found in stages.values():
        if found is not None:
            try:
                workloads += api.list(WORKLOAD, f"kueue.x-k8s.io/job-uid={found['metadata'].get('uid')}")
            except ApiForbidden:
                break
    unready = _unready_server_pods(stages, pods)
    for pod in filter(is_gated, unready[:_MAX_PODS_ASKED]):
        workloads += _list_if_allowed(api, WORKLOAD, f"kueue.x-k8s.io/job-uid={pod['metadata'].get('uid')}")
    failures = [
        event
        for pod in unready[:_MAX_PODS_ASKED]
        for event in _list_if_allowed(
            api, EVENT, fields=f"involvedObject.name={pod['metadata']['name']},reason=Unhealthy"
        )
    ]
    has_driver = needs_driver(ids)
    driver = api.get(JOB, driver_name(job)) if has_driver else None
    return JobObjects(stages, tuple(pods), tuple(workloads), driver, has_driver, tuple(failures))


def _unready_server_pods(stages: Mapping[str, KubeObject | None], pods: list[KubeObject]) -> list[KubeObject]:
    """The pods of servers that are not all ready."""
    waiting = {
        stage
        for stage, found in stages.items()
        if found is not None and found["kind"] == DEPLOYMENT.name and object_status(found).phase != "serving"
    }
    return [
        pod
        for pod in pods
        if pod["metadata"].get("labels", {}).get(COMPONENT_LABEL) in waiting
        and find_condition(pod, "Ready").get("status") != "True"
    ]


def _list_if_allowed(api: KubeApi, kind: KubeKind, selector: str = "", *, fields: str = "") -> list[KubeObject]:
    try:
        return api.list(kind, selector, fields=fields)
    except ApiForbidden:
        return []


_WRONG_INPUT_EXIT_CODE = 2
"""The exit code of what would only fail again, of ours (`errors.py`) as of any program that refuses its flags."""


def serving_state(stage: str, written: str, found: KubeObject, listing: JobObjects) -> StageState:
    """Return how a stage that serves stands; it is never done, and failed only where waiting does not help."""
    pods = current_pods(stage, listing)
    names = tuple(pod["metadata"]["name"] for pod in pods if is_ready(pod)) or tuple(
        pod["metadata"]["name"] for pod in pods
    )
    ready, wanted = ready_replicas(found), desired_pods(found)
    restarts = sum(each.get("restartCount", 0) for pod in pods for each in _main_container_statuses(pod))
    if ready >= wanted:
        return StageState(stage, "serving", f"Serving, {ready} of {wanted} ready.", written, names, restarts)
    why = _why_unready(found, pods, wanted, listing)
    if ready:
        said = as_sentence(f"serving, {ready} of {wanted} ready: {why.sentence}")
        return StageState(stage, "serving", said, written, names, restarts)
    state = "failed" if why.failed else "waiting"
    return StageState(stage, state, as_sentence(why.sentence), written, names, restarts, why.exit_code)


def current_pods(stage: str, listing: JobObjects) -> list[KubeObject]:
    """Return a server's pods without those that are being ended."""
    return [pod for pod in listing.pods_of(stage) if "deletionTimestamp" not in pod["metadata"]]


def is_placed(stage: str, found: KubeObject, listing: JobObjects) -> bool:
    """Whether all replicas have a node, so that nothing but they themselves keeps them from being ready."""
    pods = current_pods(stage, listing)
    return len(pods) >= desired_pods(found) and all(pod.get("spec", {}).get("nodeName") for pod in pods)


def is_ready(pod: KubeObject) -> bool:
    """Whether a pod answers."""
    return find_condition(pod, "Ready").get("status") == "True"


def _why_unready(found: KubeObject, pods: list[KubeObject], wanted: int, listing: JobObjects) -> PodProblem:
    """The first reason that applies; `failed` where time is up or another start would fail alike."""
    gated = next((pod for pod in pods if is_gated(pod)), None)
    if gated is not None:
        queue = found["metadata"].get("labels", {}).get(QUEUE_LABEL, "its queue")
        return PodProblem(why_queued(queue, listing.workload_of(gated)), False)
    refused = find_condition(found, "ReplicaFailure")
    if len(pods) < wanted:
        message = refused.get("message", "").strip() if refused.get("status") == "True" else ""
        said = f"a pod cannot be made: {message}" if message else f"{len(pods)} of {wanted} pods are made"
        return PodProblem(said, False)
    unplaced = [pod for pod in pods if not pod.get("spec", {}).get("nodeName")]
    if unplaced:
        message = find_condition(unplaced[0], "PodScheduled").get("message", "").strip()
        said = f": {message}" if message else ""
        return PodProblem(f"{len(unplaced)} of {wanted} pods have no node yet{said}", False)
    late = object_status(found).phase == "failed"
    unready = [pod for pod in pods if not is_ready(pod)]
    trouble = startup_problem(unready)
    crashed = first_failure(unready)
    if trouble is None and crashed is not None:
        trouble = PodProblem(f"{crashed.sentence} and was started again", False, crashed.exit_code)
    if trouble is None:
        trouble = PodProblem(_loading_progress(unready, listing), False)
    line = last_termination_line(unready)
    said = f"{trouble.sentence}. Last line: {line}" if line else trouble.sentence
    hopeless = crashed is not None and crashed.exit_code == _WRONG_INPUT_EXIT_CODE
    return PodProblem(said, late or hopeless, trouble.exit_code)


def _loading_progress(pods: list[KubeObject], listing: JobObjects) -> str:
    """What the probes say about pods that run and are not ready."""
    names = {pod["metadata"]["name"] for pod in pods}
    told = [each for each in listing.probe_failures if each.get("involvedObject", {}).get("name") in names]
    up = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
    if not up:
        return f"{len(pods)} pods pull their image"
    said = "its server loads the weights" if up == 1 else f"{up} servers load the weights"
    if not told:
        return said
    newest = max(told, key=lambda each: each.get("lastTimestamp") or "")
    return f"{said} ({newest['message'].strip().splitlines()[0]})"


def _main_container_statuses(pod: KubeObject) -> list[KubeObject]:
    return pod.get("status", {}).get("containerStatuses") or []


def stage_states(ids: Mapping[str, str], listing: JobObjects) -> tuple[StageState, ...]:
    """Return how each stage stands, in order."""
    states: list[StageState] = []
    for stage, written in ids.items():
        found = listing.stages.get(stage)
        before = states[-1] if states else None
        states.append(
            _absent_stage_state(stage, written, before, listing)
            if found is None
            else _stage_state(stage, written, found, listing)
        )
    return tuple(states)


def _stage_state(stage: str, written: str, found: KubeObject, listing: JobObjects) -> StageState:
    if found["kind"] == DEPLOYMENT.name:
        return serving_state(stage, written, found, listing)
    stands = object_status(found)
    pods = listing.pods_of(stage)
    names = tuple(pod["metadata"]["name"] for pod in pods)
    if stands.phase == "done":
        return StageState(stage, "done", "", written, names, stands.restarts, 0)
    if stands.phase == "failed":
        reason, code = _why_failed(stands, pods)
        if listing.driver is not None and object_status(listing.driver).phase == "active" and should_recreate(found):
            again = f"{reason} The driver makes it anew."
            return StageState(stage, "waiting", again, written, names, stands.restarts, code)
        return StageState(stage, "failed", reason, written, names, stands.restarts, code)
    if stands.phase == "suspended":
        return StageState(stage, "waiting", _why_suspended(found, listing), written, (), stands.restarts)
    trouble = startup_problem(pods)
    if trouble is not None:
        state = "waiting" if trouble.failed else "running"
        return StageState(
            stage, state, as_sentence(trouble.sentence), written, names, stands.restarts, trouble.exit_code
        )
    missing = scheduling_problem(pods, desired_pods(found))
    if missing is not None and not _has_ended(pods):
        return StageState(stage, "waiting", as_sentence(missing.sentence), written, names, stands.restarts)
    if not all(_has_started(pod) for pod in pods):
        up = sum(map(_has_started, pods))
        reason = f"{up} of {len(pods)} pods run; the others pull their image or install the fabric's plugin"
        return StageState(stage, "waiting", as_sentence(reason), written, names, stands.restarts)
    return StageState(stage, "running", _restart_note(stands, pods), written, names, stands.restarts)


def _absent_stage_state(stage: str, written: str, before: StageState | None, listing: JobObjects) -> StageState:
    """A stage whose object is not there: not yet, never, or no more."""
    if not listing.has_driver:
        return StageState(
            stage, "unknown", "It is not in the cluster (any more): cancelled, or ended long ago.", written
        )
    if before is not None and before.state in ("failed", "cancelled"):
        reason = f"It never starts: {before.stage} failed." if before.state == "failed" else before.reason
        return StageState(stage, "cancelled", reason, written)
    if listing.driver is None:
        return StageState(stage, "unknown", "Neither it nor its driver is in the cluster.", written)
    if object_status(listing.driver).phase == "failed":
        pods = listing.pods_of("driver")
        reason, code = _why_failed(object_status(listing.driver), pods)
        return StageState(stage, "failed", f"The driver failed: {reason}", written, exit_code=code)
    if before is not None and before.state not in ("done",):
        return StageState(stage, "waiting", f"It starts when {before.stage} is done.", written)
    pods = listing.pods_of("driver")
    trouble = startup_problem(pods) or scheduling_problem(pods, 1)
    why = f": {trouble.sentence}" if trouble is not None else ""
    return StageState(stage, "waiting", as_sentence(f"the driver is about to create it{why}"), written)


def _why_failed(stands: ObjectStatus, pods: list[KubeObject]) -> tuple[str, int | None]:
    reason = first_failure(pods)
    line = last_termination_line(pods)
    said = [reason.sentence if reason is not None else stands.message or "it failed"]
    if reason is not None and stands.restarts:
        said.append(f"after {stands.restarts} restarts")
    whole = as_sentence(" ".join(said))
    return (f"{whole} Last line: {line}" if line else whole), (reason.exit_code if reason is not None else None)


def _why_suspended(found: KubeObject, listing: JobObjects) -> str:
    """What Kueue says; it suspends what it has not admitted."""
    queue = found["metadata"].get("labels", {}).get(QUEUE_LABEL)
    if queue is None:
        return "It is suspended, and no queue will start it: somebody has done that by hand."
    return why_queued(queue, listing.workload_of(found))


def _restart_note(stands: ObjectStatus, pods: list[KubeObject]) -> str:
    if not stands.restarts:
        return ""
    line = last_termination_line(pods)
    return f"Started again {stands.restarts} times." + (f" Last line before: {line}" if line else "")


def _has_started(pod: KubeObject) -> bool:
    return pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")


def _has_ended(pods: list[KubeObject]) -> bool:
    """Whether some pods have ended already: those that are missing then are not waited for."""
    return any(pod.get("status", {}).get("phase") in ("Succeeded", "Failed") for pod in pods)
