"""Whether a cluster could take a job, asked before anything is sent.

What may not be looked at is not held against it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from trainshed.launch.fabric import fabric_setup
from trainshed.launch.job import Job, Stage
from trainshed.launch.kubernetes.kinds import (
    CLAIM,
    CLUSTER_QUEUE,
    DEPLOYMENT,
    JOB,
    LOCAL_QUEUE,
    NAMESPACE,
    NODE,
    PRIORITY_CLASS,
    SERVICE_ACCOUNT,
    TRAINING,
    Kind,
    Object,
)
from trainshed.launch.kubernetes.live.api import Api, Forbidden
from trainshed.launch.kubernetes.manifests.naming import is_training
from trainshed.launch.kubernetes.manifests.placement import gpu_resource

_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def refusals(api: Api, job: Job) -> list[str]:
    """Return sentences that say why the cluster could not take a job."""
    return [sentence for check in _CHECKS for sentence in _tolerant(check(api, job))]


def _tolerant(found: Iterator[str]) -> Iterator[str]:
    """Yield until something may not be looked at."""
    try:
        yield from found
    except Forbidden:
        return


def _namespace(api: Api, job: Job) -> Iterator[str]:
    if api.get(NAMESPACE, api.namespace) is None:
        yield f"there is no namespace {api.namespace}"


def _kinds(api: Api, job: Job) -> Iterator[str]:
    training = TRAINING[job.cluster.on_kubernetes.kind]
    kinds = {
        DEPLOYMENT if stage.serving is not None else training if is_training(stage) else JOB for stage in job.stages
    }
    for kind in sorted(kinds, key=lambda each: each.name):
        if kind.name not in api.resources(kind):
            yield f"the cluster does not know {kind.name} ({kind.api_version}): its controller is not installed"


def _queue(api: Api, job: Job) -> Iterator[str]:
    kubernetes = job.cluster.on_kubernetes
    for name in dict.fromkeys(filter(None, (kubernetes.queue, kubernetes.cpu_queue))):
        queue = api.get(LOCAL_QUEUE, name)
        if queue is None:
            known = ", ".join(each["metadata"]["name"] for each in api.list(LOCAL_QUEUE)) or "none"
            yield f"there is no queue {name} in namespace {api.namespace} (there: {known})"
        elif name == kubernetes.queue:
            yield from _tolerant(_quota(api, job, name, queue))
    priority = kubernetes.priority
    if priority is not None and api.get(PRIORITY_CLASS, priority) is None:
        yield f"there is no WorkloadPriorityClass {priority}"


def _quota(api: Api, job: Job, name: str, queue: Object) -> Iterator[str]:
    """Compare GPUs with what the queue may ever have; what others use now is a matter of waiting."""
    found = api.get(CLUSTER_QUEUE, queue["spec"]["clusterQueue"])
    wanted = max((stage.gpus_per_node * _nodes(stage) for stage in job.stages), default=0)
    if found is None or not wanted or found["spec"].get("cohort") or found["spec"].get("cohortName"):
        return  # a cohort lends
    resource = gpu_resource(job.cluster)
    offered = [
        _amount(each["nominalQuota"])
        for group in found["spec"].get("resourceGroups", ())
        for flavor in group["flavors"]
        for each in flavor["resources"]
        if each["name"] == resource
    ]
    if sum(offered) < wanted:
        yield f"the queue {name} may have {sum(offered):g} {resource} at most, and the job needs {wanted}"


def _nodes(stage: Stage) -> int:
    return stage.serving.replicas if stage.serving is not None else stage.nodes + stage.spares


def _places(api: Api, job: Job) -> Iterator[str]:
    for volume in job.cluster.volumes:
        if volume.pvc is not None and api.get(CLAIM, volume.pvc) is None:
            how = f": `trainshed storage up --on {job.cluster.name}` makes it" if volume.create is not None else ""
            yield f"there is no claim {volume.pvc} in namespace {api.namespace}{how}"


def _devices(api: Api, job: Job) -> Iterator[str]:
    """Look for the network's devices on nodes with GPUs; where there is none yet, an autoscaler may make it."""
    gangs = [stage for stage in job.stages if is_training(stage) and stage.gpus_per_node]
    wanted = {name for stage in gangs for name in fabric_setup(job.cluster, nodes=_nodes(stage)).kubernetes.resources}
    if not wanted:
        return
    offers = [node.get("status", {}).get("allocatable", {}) for node in api.list(NODE)]
    gpus = gpu_resource(job.cluster)
    with_gpus = [offer for offer in offers if _amount(offer.get(gpus, 0)) > 0]
    for name in sorted(wanted) if with_gpus else ():
        if not any(_amount(offer.get(name, 0)) > 0 for offer in with_gpus):
            others = sorted({other for offer in with_gpus for other in offer if "/" in other and other != gpus})
            yield (
                f"no node with {gpus} offers {name}; they offer {', '.join(others) or 'no other device'} "
                f"(kubernetes.resources says what pods ask for)"
            )


def _account(api: Api, job: Job) -> Iterator[str]:
    account = job.cluster.service_account
    if account is not None and api.get(SERVICE_ACCOUNT, account) is None:
        yield f"there is no service account {account} in namespace {api.namespace}"


def _secrets(api: Api, job: Job) -> Iterator[str]:
    secret = Kind("v1", "Secret", "secrets")
    references = {each.k8s.partition("/")[::2] for each in job.cluster.secrets.values() if each.k8s is not None}
    for name, key in sorted(references):
        found = api.get(secret, name)
        if found is None:
            yield f"there is no secret {name} in namespace {api.namespace}"
        elif key not in found.get("data", {}):
            yield f"the secret {name} has no key {key}"


_CHECKS: tuple[Callable[[Api, Job], Iterator[str]], ...] = (
    _namespace,
    _kinds,
    _queue,
    _devices,
    _places,
    _account,
    _secrets,
)


def _amount(written: str | int) -> float:
    """Read a quantity as Kubernetes writes it."""
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(written))
    return float(found[1]) * _FACTORS.get(found[2], 1) if found else 0.0
