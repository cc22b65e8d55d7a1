"""Everything of a job that a cluster knows, listed once: what `status` is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainshed.launch.kubernetes.kinds import DEPLOYMENT, EVENT, JOB, POD, WORKLOAD, Kind, Object, kind_named
from trainshed.launch.kubernetes.live.api import Api, Forbidden
from trainshed.launch.kubernetes.live.queueing import is_gated
from trainshed.launch.kubernetes.live.reasons import condition
from trainshed.launch.kubernetes.live.standing import standing
from trainshed.launch.kubernetes.manifests.driver_objects import driver_name
from trainshed.launch.kubernetes.manifests.naming import COMPONENT, INSTANCE, is_driven

_MOST_ASKED = 3
"""Of many pods that are not ready the first few say why."""


@dataclass(frozen=True)
class Listing:
    """A job's objects as the API server has them."""

    stages: Mapping[str, Object | None]
    """The object of each stage; None: not there."""
    pods: tuple[Object, ...] = ()
    workloads: tuple[Object, ...] = ()
    """Kueue's."""
    driver: Object | None = None
    has_driver: bool = field(default=False)
    """Whether a driver creates the stages."""
    probe_failures: tuple[Object, ...] = ()
    """Events of servers that are not ready."""

    def pods_of(self, stage: str) -> list[Object]:
        """Return a stage's pods in the order of their ranks."""
        found = [pod for pod in self.pods if pod["metadata"].get("labels", {}).get(COMPONENT) == stage]
        return sorted(found, key=pod_rank)

    def workload_of(self, found: Object) -> Object | None:
        """Return Kueue's workload of an object."""
        uid = found["metadata"].get("uid")
        for workload in self.workloads:
            if any(owner.get("uid") == uid for owner in workload["metadata"].get("ownerReferences", ())):
                return workload
        return None


def pod_rank(pod: Object) -> tuple[int, str]:
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


def list_job(api: Api, job: str, ids: Mapping[str, str]) -> Listing:
    """Ask for everything of a job; what may not be listed is left out."""
    stages = {}
    for stage, written in ids.items():
        kind, _, name = written.partition("/")
        stages[stage] = api.get(kind_named(kind), name)
    pods = api.list(POD, f"{INSTANCE}={job}")
    workloads: list[Object] = []
    for found in stages.values():
        if found is not None:
            try:
                workloads += api.list(WORKLOAD, f"kueue.x-k8s.io/job-uid={found['metadata'].get('uid')}")
            except Forbidden:
                break
    unready = _unready(stages, pods)
    for pod in filter(is_gated, unready[:_MOST_ASKED]):
        workloads += _tolerant(api, WORKLOAD, f"kueue.x-k8s.io/job-uid={pod['metadata'].get('uid')}")
    failures = [
        event
        for pod in unready[:_MOST_ASKED]
        for event in _tolerant(api, EVENT, fields=f"involvedObject.name={pod['metadata']['name']},reason=Unhealthy")
    ]
    has_driver = is_driven(ids)
    driver = api.get(JOB, driver_name(job)) if has_driver else None
    return Listing(stages, tuple(pods), tuple(workloads), driver, has_driver, tuple(failures))


def _unready(stages: Mapping[str, Object | None], pods: list[Object]) -> list[Object]:
    """The pods of servers that are not all ready."""
    waiting = {
        stage
        for stage, found in stages.items()
        if found is not None and found["kind"] == DEPLOYMENT.name and standing(found).phase != "serving"
    }
    return [
        pod
        for pod in pods
        if pod["metadata"].get("labels", {}).get(COMPONENT) in waiting
        and condition(pod, "Ready").get("status") != "True"
    ]


def _tolerant(api: Api, kind: Kind, selector: str = "", *, fields: str = "") -> list[Object]:
    try:
        return api.list(kind, selector, fields=fields)
    except Forbidden:
        return []
