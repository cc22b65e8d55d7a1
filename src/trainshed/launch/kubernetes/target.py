"""Kubernetes as a target: render, check, apply exactly what was rendered, and report on it afterwards.

`check` asks whether the cluster could run a job before anything is sent. A check that we have no permission for is
left out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from trainshed.errors import NotFound, StorageError, TrainshedError
from trainshed.launch.job import Job
from trainshed.launch.kubernetes.api import ApiForbidden, KubeApi, connect
from trainshed.launch.kubernetes.code import CODE_COMPONENT, CODE_LABEL, bucket_of_store
from trainshed.launch.kubernetes.conditions import object_status
from trainshed.launch.kubernetes.kinds import (
    CLAIM,
    CLUSTER_QUEUE,
    COMPONENT_LABEL,
    CONFIG_MAP,
    CREATED_KINDS,
    DEPLOYMENT,
    DRIVER,
    INSTANCE_LABEL,
    JOB,
    LOCAL_QUEUE,
    NAMESPACE,
    NODE,
    PRIORITY_CLASS,
    QUEUE_LABEL,
    RAY_JOB,
    SERVICE_ACCOUNT,
    STORAGE_CLASS,
    TRAINING_KINDS,
    VOLUME,
    KubeKind,
    KubeObject,
    kind_named,
    split_documents,
)
from trainshed.launch.kubernetes.objects import is_training
from trainshed.launch.kubernetes.placement import gpu_resource
from trainshed.launch.kubernetes.pod import ContainerOptions, PlannedStage, pod_template
from trainshed.launch.kubernetes.render import plan_stages, render, stage_ids
from trainshed.launch.kubernetes.status import JobObjects, list_job_objects, stage_states
from trainshed.launch.kubernetes.workloads import RAY_SUBMITTER, RAY_SUBMITTER_CONTAINER, WORK_CONTAINERS
from trainshed.launch.target import StageState, SubmitRequest, SubmittedJob
from trainshed.recipe import Cluster
from trainshed.storage import StoreOptions, open_folder

_KEPT_KINDS = (CLAIM, VOLUME, STORAGE_CLASS)
_DELETION_SECONDS = 120.0


class KubernetesTarget:
    """A namespace of a Kubernetes cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def render(self, job: Job) -> SubmitRequest:
        """Turn a job into manifests."""
        return render(job)

    def check(self, job: Job) -> Sequence[str]:
        """Return why the cluster could not run the job."""
        with connect(self.cluster) as api:
            return unschedulable_reasons(api, job)

    def submit(self, request: SubmitRequest, job: Job) -> SubmittedJob:
        """Apply the request's objects in order, after deleting those of an earlier, ended submission of the run."""
        submitted = SubmittedJob(job.name, job.run, "kubernetes", stage_ids(job))
        with connect(self.cluster) as api:
            _delete_earlier_submission(api, submitted)
            _upload_code(request, job)
            for part in request.parts:
                for document in split_documents(part.text):
                    api.apply(document)
            delete_unused_code(api)
        return submitted

    def status(self, submitted: SubmittedJob) -> tuple[StageState, ...]:
        """Return the state of each stage, in order, and why."""
        with connect(self.cluster) as api:
            return stage_states(submitted.ids, list_job_objects(api, submitted.job, submitted.ids))

    def logs(
        self,
        submitted: SubmittedJob,
        stage: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yield the log of the pod of a rank. Pods of earlier attempts are gone; their logs are in the run's folder."""
        with connect(self.cluster) as api:
            objects = list_job_objects(api, submitted.job, submitted.ids)
            # What Ray's nodes print about a job is in the log of the pod that has submitted it to them.
            on_ray = submitted.ids.get(stage, "").startswith(f"{RAY_JOB.name}/")
            submitters = objects.pods_of(RAY_SUBMITTER) if on_ray and rank is None and attempt is None else []
            if submitters:
                yield from api.log(submitters[-1]["metadata"]["name"], RAY_SUBMITTER_CONTAINER, follow=follow)
                return
            pods = objects.pods_of(stage)
            ranks_per_node = submitted.ranks_per_node if stage == "train" else 1
            default_rank = submitted.losses_rank if stage == "train" else 0
            node_index = (default_rank if rank is None else rank) // ranks_per_node
            if attempt is not None:
                raise NotFound(
                    f"Kubernetes keeps no logs of attempt {attempt} of {stage}",
                    where=submitted.run,
                    hint="they are in the run's folder, which is not reachable from here",
                )
            if node_index >= len(pods):
                raise NotFound(
                    f"{stage} has {len(pods)} pods now, none for rank {default_rank if rank is None else rank}",
                    where=submitted.job,
                    hint="`trainshed status RUN` says what it waits for",
                )
            pod = pods[node_index]
            yield from api.log(pod["metadata"]["name"], _main_container(pod), follow=follow)

    def cancel(self, submitted: SubmittedJob) -> tuple[str, ...]:
        """Delete all objects of the job, the driver first; claims and volumes are never touched."""
        with connect(self.cluster) as api:
            return tuple(delete_job_objects(api, submitted.job))


def _main_container(pod: KubeObject) -> str:
    """Return the container that does the work: injected ones (a proxy, GCS FUSE) may come before it."""
    names = [container["name"] for container in pod["spec"]["containers"]]
    labels = pod["metadata"].get("labels", {})
    ours = (labels.get(COMPONENT_LABEL), *WORK_CONTAINERS)
    return next((name for name in ours if name in names), names[0])


def _upload_code(request: SubmitRequest, job: Job) -> None:
    """Put our code into the bucket that pods mount; it is named by its hash, so that once is enough."""
    if not request.uploads:
        return
    address = bucket_of_store(job)
    assert address is not None, "only a bucket has uploads"
    options = StoreOptions.from_mapping({key: endpoint.model_dump() for key, endpoint in job.cluster.stores.items()})
    try:
        store = open_folder(address, options)
        for path, data in request.uploads.items():
            there = store.head(path)
            if there is None or there.size != len(data):
                store.put(path, data)
    except StorageError as error:
        raise type(error)(
            f"our code cannot be put into the store: {error.what}",
            where=error.where or address,
            hint="log in to it (gcloud auth application-default login), or write `kubernetes: {code: configmaps}`",
        ) from None


UNUSED_CODE_SECONDS = 24 * 3600
"""How long code that no job uses is kept: somebody may be about to apply a job that was rendered with it."""


def delete_unused_code(api: KubeApi) -> list[str]:
    """Delete ConfigMaps of code that no job of the namespace uses; returns their names."""
    try:
        config_maps = api.list(CONFIG_MAP, CODE_LABEL)
    except ApiForbidden:
        return []
    used = {
        config_map["metadata"]["labels"][CODE_LABEL]
        for config_map in config_maps
        if config_map["metadata"]["labels"].get(COMPONENT_LABEL) != CODE_COMPONENT
    }
    oldest_kept = datetime.now(UTC) - timedelta(seconds=UNUSED_CODE_SECONDS)
    removed = []
    for config_map in config_maps:
        metadata = config_map["metadata"]
        created = metadata.get("creationTimestamp")
        if metadata["labels"][CODE_LABEL] in used or created is None:
            continue
        if datetime.fromisoformat(created) < oldest_kept:
            api.delete(CONFIG_MAP, metadata["name"])
            removed.append(metadata["name"])
    return removed


def _delete_earlier_submission(api: KubeApi, submitted: SubmittedJob) -> None:
    """Delete what an earlier submission left. Objects are named after the run, so that it cannot be submitted twice."""
    objects = list_job_objects(api, submitted.job, submitted.ids)
    active = _unfinished(objects)
    if active is not None:
        raise TrainshedError(
            f"{submitted.job} is under way already: {active} has not ended",
            where=f"namespace {api.namespace}",
            hint="`trainshed status` says how it stands, `trainshed cancel` ends it",
        )
    removed = delete_job_objects(api, submitted.job)
    deadline = time.monotonic() + _DELETION_SECONDS
    while removed and any(_exists(api, object_id) for object_id in removed):
        if time.monotonic() > deadline:
            raise TrainshedError(
                f"what an earlier submission of {submitted.job} left does not go away",
                where=f"namespace {api.namespace}",
                hint=f"kubectl get all --selector {INSTANCE_LABEL}={submitted.job}",
            )
        time.sleep(0.5)


def _unfinished(objects: JobObjects) -> str | None:
    """Return what has not ended: a stage, or the driver, which would create the next stage."""
    stage_objects = {**objects.stages, DRIVER: objects.driver_job}
    final_phases = ("done", "failed")
    return next(
        (
            name
            for name, stage_object in stage_objects.items()
            if stage_object is not None and object_status(stage_object).phase not in final_phases
        ),
        None,
    )


def delete_job_objects(api: KubeApi, job: str) -> list[str]:
    """Delete all objects of a job but storage; returns what they were, as Kind/name."""
    removed = []
    # The driver first: it would create the next stage while this one is being removed.
    for kind in (JOB, *(other for other in CREATED_KINDS if other not in (JOB, *_KEPT_KINDS))):
        for obj in _list_driver_first(api, kind, f"{INSTANCE_LABEL}={job}"):
            if kind is JOB and obj["metadata"].get("ownerReferences"):
                continue  # deleted with its owner
            api.delete(kind, obj["metadata"]["name"])
            removed.append(f"{kind.name}/{obj['metadata']['name']}")
    return removed


def _list_driver_first(api: KubeApi, kind: KubeKind, selector: str) -> list[dict]:
    try:
        objects = api.list(kind, selector)
    except ApiForbidden:
        return []
    return sorted(objects, key=lambda obj: obj["metadata"].get("labels", {}).get(COMPONENT_LABEL) != DRIVER)


def _exists(api: KubeApi, object_id: str) -> bool:
    kind, _, name = object_id.partition("/")
    return api.get(kind_named(kind), name) is not None


_QUANTITY_FACTORS = {"m": 1e-3, "": 1} | {
    prefix + suffix: base ** (power + 1)
    for suffix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kMGTPE" if base == 1000 else "KMGTPE")
}


def unschedulable_reasons(api: KubeApi, job: Job) -> list[str]:
    """Return why the cluster could not run a job, in sentences."""
    return [sentence for check in _CHECKS for sentence in _until_forbidden(check(api, job))]


def _until_forbidden(reasons: Iterator[str]) -> Iterator[str]:
    """Yield reasons until a request is forbidden."""
    try:
        yield from reasons
    except ApiForbidden:
        return


def _check_namespace(api: KubeApi, job: Job) -> Iterator[str]:
    if api.get(NAMESPACE, api.namespace) is None:
        yield f"there is no namespace {api.namespace}"


def _check_kinds(api: KubeApi, job: Job) -> Iterator[str]:
    training = TRAINING_KINDS[job.cluster.on_kubernetes.kind]
    kinds = {
        DEPLOYMENT if stage.serving is not None else training if is_training(stage) else JOB for stage in job.stages
    }
    for kind in sorted(kinds, key=lambda kind: kind.name):
        if kind.name not in api.served_kinds(kind):
            yield f"the cluster does not know {kind.name} ({kind.api_version}): its controller is not installed"


def _check_queues(api: KubeApi, job: Job) -> Iterator[str]:
    kubernetes = job.cluster.on_kubernetes
    for name in dict.fromkeys(filter(None, (kubernetes.queue, kubernetes.cpu_queue))):
        queue = api.get(LOCAL_QUEUE, name)
        if queue is None:
            known = ", ".join(local_queue["metadata"]["name"] for local_queue in api.list(LOCAL_QUEUE)) or "none"
            yield f"there is no queue {name} in namespace {api.namespace} (there: {known})"
        elif name == kubernetes.queue:
            yield from _until_forbidden(_check_quota(api, job, name, queue))
    priority = kubernetes.priority
    if priority is not None and api.get(PRIORITY_CLASS, priority) is None:
        yield f"there is no WorkloadPriorityClass {priority}"


def _check_quota(api: KubeApi, job: Job, name: str, queue: KubeObject) -> Iterator[str]:
    """Compare what pods ask for with the queue's nominal quota; a job can wait for what others use now."""
    cluster_queue = api.get(CLUSTER_QUEUE, queue["spec"]["clusterQueue"])
    if cluster_queue is None or not cluster_queue["spec"].get("resourceGroups"):
        return
    offered: dict[str, float] = {}
    for group in cluster_queue["spec"]["resourceGroups"]:
        for quota in (quota for flavor in group["flavors"] for quota in flavor["resources"]):
            offered[quota["name"]] = offered.get(quota["name"], 0.0) + _parse_quantity(quota["nominalQuota"])
    stages = [plan for plan in plan_stages(job)[0] if plan.placement.labels.get(QUEUE_LABEL) == name]
    requested = [{resource: count * plan.pods for resource, count in _pod_requests(plan).items()} for plan in stages]
    wanted = {
        resource: max(stage.get(resource, 0.0) for stage in requested)
        for resource in dict.fromkeys(resource for stage in requested for resource in stage)
    }
    if uncovered := [resource for resource in wanted if resource not in offered]:
        hint = (
            "write `kubernetes: {requests: devices}`, or let an administrator add them to it"
            if set(uncovered) <= {"cpu", "memory"}
            else "an administrator adds them to it"
        )
        yield (
            f"the queue {name} ({queue['spec']['clusterQueue']}) covers {', '.join(offered)} only, and pods ask for "
            f"{' and '.join(uncovered)} too: Kueue would never admit them; {hint}"
        )
    if cluster_queue["spec"].get("cohort") or cluster_queue["spec"].get("cohortName"):
        return  # a cohort lends quota
    for resource, amount in wanted.items():
        if offered.get(resource, amount) < amount:
            most, needed = (_show_quantity(resource, value) for value in (offered[resource], amount))
            less = " (limits.stages says what pods ask for)" if resource in ("cpu", "memory") else ""
            yield f"the queue {name} may have {most} {resource} at most, and the job needs {needed}{less}"


def _pod_requests(plan: PlannedStage) -> dict[str, float]:
    """Return what one pod asks for, as Kueue adds it up: its containers and those beside them."""
    spec = pod_template(plan, ContainerOptions(plan.stage.name, uploads=False))["spec"]
    beside = [container for container in spec.get("initContainers", ()) if container.get("restartPolicy") == "Always"]
    total: dict[str, float] = {}
    for container in (*spec["containers"], *beside):
        for resource, quantity in container.get("resources", {}).get("requests", {}).items():
            total[resource] = total.get(resource, 0.0) + _parse_quantity(quantity)
    return total


def _show_quantity(resource: str, amount: float) -> str:
    return f"{amount / 2**30:,.0f}Gi" if resource == "memory" else f"{amount:g}"


def _check_claims(api: KubeApi, job: Job) -> Iterator[str]:
    for volume in job.cluster.volumes:
        if volume.pvc is not None and api.get(CLAIM, volume.pvc) is None:
            hint = f": `trainshed storage up --on {job.cluster.name}` makes it" if volume.create is not None else ""
            yield f"there is no claim {volume.pvc} in namespace {api.namespace}{hint}"


def _check_nodes(api: KubeApi, job: Job) -> Iterator[str]:
    """Compare what a pod asks for with nodes that have its GPUs; if there is none yet, an autoscaler may make one."""
    plans = [plan for plan in plan_stages(job)[0] if plan.stage.gpus_per_node]
    if not plans:
        return
    gpus, labels = gpu_resource(job.cluster), job.cluster.on_kubernetes.node_selector.items()
    nodes = [node for node in api.list(NODE) if labels <= node["metadata"].get("labels", {}).items()]
    allocatable = [node.get("status", {}).get("allocatable", {}) for node in nodes]
    offers = [{name: _parse_quantity(quantity) for name, quantity in offer.items()} for offer in allocatable]
    for plan in plans:
        wanted = _pod_requests(plan)
        with_gpus = [offer for offer in offers if offer.get(gpus, 0.0) >= wanted[gpus]]
        for resource, amount in wanted.items() if with_gpus else ():
            most = max(offer.get(resource, 0.0) for offer in with_gpus)
            if most >= amount:
                continue
            key = "limits.stages" if resource in ("cpu", "memory") else "kubernetes.resources"
            if most:
                needed, largest = _show_quantity(resource, amount), _show_quantity(resource, most)
                what = f"has {needed} {resource}, but {largest} at most"
            else:
                others = sorted({other for offer in with_gpus for other in offer if "/" in other and other != gpus})
                what = f"offers {resource}; they offer {', '.join(others) or 'no other device'}"
            yield f"no node with {gpus} {what} ({key} says what pods ask for)"


def _check_service_account(api: KubeApi, job: Job) -> Iterator[str]:
    accounts = (job.cluster.service_account, job.cluster.on_kubernetes.driver_account)
    for account in dict.fromkeys(account for account in accounts if account is not None):
        if api.get(SERVICE_ACCOUNT, account) is None:
            yield f"there is no service account {account} in namespace {api.namespace}"


def _check_secrets(api: KubeApi, job: Job) -> Iterator[str]:
    secret_kind = KubeKind("v1", "Secret", "secrets")
    references = {
        reference.k8s.partition("/")[::2] for reference in job.cluster.secrets.values() if reference.k8s is not None
    }
    for name, key in sorted(references):
        stored = api.get(secret_kind, name)
        if stored is None:
            yield f"there is no secret {name} in namespace {api.namespace}"
        elif key not in stored.get("data", {}):
            yield f"the secret {name} has no key {key}"


_CHECKS: tuple[Callable[[KubeApi, Job], Iterator[str]], ...] = (
    _check_namespace,
    _check_kinds,
    _check_queues,
    _check_nodes,
    _check_claims,
    _check_service_account,
    _check_secrets,
)


def _parse_quantity(quantity: str | int) -> float:
    """Read a quantity as Kubernetes writes it."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][0-9]+)?)([A-Za-z]*)", str(quantity))
    return float(match[1]) * _QUANTITY_FACTORS.get(match[2], 1) if match else 0.0
