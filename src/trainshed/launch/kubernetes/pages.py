"""The page of a run in a pod: for one who looks at it now, a Job that ends by itself; to be kept, a Deployment.

The pod mounts the volumes of the cluster file and listens at its own loopback, so that `kubectl port-forward`, which
asks for permission, is the only way to it. It gets no secrets.
"""

from __future__ import annotations

import shlex
import time

from trainshed.errors import TrainshedError
from trainshed.launch.job import Job, ServingSpec, Stage
from trainshed.launch.kubernetes.api import KubeApi, connect
from trainshed.launch.kubernetes.kinds import DEPLOYMENT, JOB, SERVICE, KubeObject, split_documents
from trainshed.launch.kubernetes.objects import JOB_FOLDER, job_metadata, new_object, stage_object_name, to_documents
from trainshed.launch.kubernetes.pod import ContainerOptions, PlannedStage, pod_template, serving_port
from trainshed.launch.kubernetes.render import plan_stages
from trainshed.launch.kubernetes.status import list_job_objects, stage_states
from trainshed.launch.kubernetes.target import delete_job_objects
from trainshed.launch.kubernetes.workloads import fail_on_wrong_input
from trainshed.launch.packaging import job_code
from trainshed.launch.pages import LOOPBACK, Page, tensorboard_words
from trainshed.launch.target import RemoteCommand, kubectl_command
from trainshed.recipe import Cluster, to_yaml
from trainshed.reporting import Reporter
from trainshed.run_folder import CLUSTER_FILE, TENSORBOARD

_OPEN_SECONDS = 12 * 3600
"""A page ends after this time even if the command that opened it was killed."""
_SCHEDULING_SECONDS = 900.0
_LOOK_SECONDS = 2.0
_MEMORY = "2Gi"


def page_job(cluster: Cluster, page: Page, run: str, job: str | None, port: int) -> Job:
    """Return the job of a page: of one run, or with no `job` of all runs in the store, under the page's own name."""
    seen = _with_code_in_config_maps(cluster.without_secrets())
    name = page if job is None else stage_object_name(job, page, training=False)
    if page == "tensorboard":
        folder = f"{run}/{TENSORBOARD}" if job is not None else f"{cluster.store_root.rstrip('/')}/runs"
        script = f"exec {shlex.join(tensorboard_words(cluster.python, folder, port))}\n"
        stage = Stage(page, script="tensorboard.sh", serving=ServingSpec(port=port), cpus=1, memory=_MEMORY)
        return Job(name=name, run=run, cluster=seen, stages=(stage,), files={"tensorboard.sh": script}, code=None)
    what = (run,) if job is not None else ("--on", f"{JOB_FOLDER}/{CLUSTER_FILE}")
    words = ("dash", *what, "--host", LOOPBACK, "--no-browser")
    stage = Stage(page, serving=ServingSpec(words=words, port=port), cpus=1, memory=_MEMORY)
    files = {CLUSTER_FILE: to_yaml(seen)}
    return Job(name=name, run=run, cluster=seen, stages=(stage,), files=files, code=job_code(cluster))


def _with_code_in_config_maps(cluster: Cluster) -> Cluster:
    """Return the cluster with our code in ConfigMaps: who opens a page may have no access to the store."""
    kubernetes = cluster.on_kubernetes
    if kubernetes.code == "image":
        return cluster
    return cluster.model_copy(update={"kubernetes": kubernetes.model_copy(update={"code": "configmaps"})})


def page_objects(job: Job, *, keep: bool) -> list[KubeObject]:
    """Return what is applied: the job's files, and a Job; or a Service and a Deployment, named after the page."""
    (plan,), config_maps = plan_stages(job)
    content = [*config_maps.objects, *config_maps.programs, *config_maps.code.objects]
    page = plan.stage.name
    template = pod_template(plan, ContainerOptions(page), restart_policy="Always" if keep else "Never")
    container = template["spec"]["containers"][0]
    port = _port(job)
    container["ports"] = [{"name": "http", "containerPort": port, "protocol": "TCP"}]
    look = f"import urllib.request as r; r.urlopen('http://{LOOPBACK}:{port}/', timeout=5)"
    container["readinessProbe"] = {
        "exec": {"command": [job.cluster.python, "-c", look]},
        "periodSeconds": 5,
        "timeoutSeconds": 10,
        "failureThreshold": 3,
    }
    if keep:
        return [*content, *_kept(plan, template, port)]
    spec: KubeObject = {"suspend": True} if plan.placement.suspend else {}
    spec |= {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 1,
        "podFailurePolicy": {"rules": [fail_on_wrong_input(page)]},
        "activeDeadlineSeconds": _OPEN_SECONDS,
        "ttlSecondsAfterFinished": 600,
        "template": template,
    }
    metadata = plan.object_metadata
    metadata["name"] = job.name
    return [*content, new_object(JOB, metadata, spec=spec)]


def _kept(plan: PlannedStage, template: KubeObject, port: int) -> list[KubeObject]:
    labels = template["metadata"]["labels"]
    metadata = job_metadata(plan.job, plan.job.name, plan.stage.name)
    service: KubeObject = {
        "type": "ClusterIP",
        "selector": labels,
        "ports": [{"name": "http", "port": port, "targetPort": "http", "protocol": "TCP"}],
    }
    deployment: KubeObject = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "strategy": {"type": "Recreate"},
        "template": template,
    }
    placed = metadata | {"labels": metadata["labels"] | plan.placement.labels}
    return [
        new_object(SERVICE, metadata, spec=service),
        new_object(DEPLOYMENT, placed, spec=deployment),
    ]


def page_text(job: Job, *, keep: bool) -> str:
    """Return the manifests, as they are applied."""
    return to_documents(page_objects(job, keep=keep))


def _port(job: Job) -> int:
    serving = job.stages[0].serving
    assert serving is not None
    return serving_port(serving)


def forward_command(job: Job, *, keep: bool) -> RemoteCommand:
    """Return the command that brings the page to the same port of this machine."""
    page, port = job.stages[0].name, _port(job)
    object_name = f"service/{job.name}" if keep else f"job/{job.name}"
    words = ("port-forward", object_name, f"{port}:{port}")
    return RemoteCommand((*kubectl_command(job.cluster), *words), f"{page} of {job.run}")


def start_page(job: Job, reporter: Reporter, *, keep: bool) -> None:
    """Apply the objects and wait until the page answers in its pod; what it waits for is said."""
    kind = DEPLOYMENT if keep else JOB
    with connect(job.cluster) as api:
        for document in split_documents(page_text(job, keep=keep)):
            api.apply(document)
        _await_page(api, job, f"{kind.name}/{job.name}", reporter)


def _await_page(api: KubeApi, job: Job, object_id: str, reporter: Reporter) -> None:
    page = job.stages[0].name
    deadline = time.monotonic() + _SCHEDULING_SECONDS
    last_reason = ""
    while True:
        objects = list_job_objects(api, job.name, {page: object_id})
        (state,) = stage_states({page: object_id}, objects)
        if any(_is_ready(pod) for pod in objects.pods_of(page)):
            return
        if state.state in ("failed", "done", "cancelled") or time.monotonic() > deadline:
            ended = (
                "has ended" if state.state != "waiting" else f"is not ready after {_SCHEDULING_SECONDS / 60:.0f} min"
            )
            raise TrainshedError(
                f"the pod of {page} {ended}: {state.reason or state.state}",
                where=f"{object_id} in namespace {api.namespace}",
                hint=f"the image needs the package of the page: `pip install 'trainshed[{page}]'` there",
            )
        if state.reason and state.reason != last_reason:
            reporter.note(f"{page}: {state.reason}")
            last_reason = state.reason
        time.sleep(_LOOK_SECONDS)


def _is_ready(pod: KubeObject) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def stop_page(job: Job) -> list[str]:
    """Delete what `start_page` has applied; returns what it was, as Kind/name."""
    with connect(job.cluster) as api:
        return delete_job_objects(api, job.name)
