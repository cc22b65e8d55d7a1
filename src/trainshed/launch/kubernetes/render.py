"""A job as the manifests that are applied, in order. Nothing is decided here that the job does not say.

A single stage is applied as it is. Several stages lie in a ConfigMap of the driver, a small CPU Job with its own
narrow rights, which creates them one after another inside the cluster. (A JobSet whose jobs depend on each other
is one workload to Kueue, which would hold the GPUs while data is prepared.) A DaemonSet can pull the image on
every GPU node before the job needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trainshed.launch.fabric import FabricSetup, fabric_setup
from trainshed.launch.job import SETUP_FILE, Job, Stage, setup_script
from trainshed.launch.kubernetes.objects import (
    COMPONENT_LABEL,
    CONFIG_MAP,
    DAEMON_SET,
    DEPLOYMENT,
    DRIVER,
    ENTRY_FILE,
    EVENT,
    INSTANCE_LABEL,
    JOB,
    JOB_FOLDER,
    MAX_RESTARTS_ANNOTATION,
    POD,
    QUEUE_LABEL,
    ROLE,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    WORKLOAD,
    KubeKind,
    KubeObject,
    driver_name,
    fit_name,
    is_training,
    job_labels,
    job_metadata,
    kind_of,
    needs_driver,
    new_object,
    to_documents,
)
from trainshed.launch.kubernetes.placement import pod_placement
from trainshed.launch.kubernetes.pod import (
    FINISHED_TTL_SECONDS,
    JobConfigMaps,
    PlannedStage,
    entry_env_vars,
    env_vars,
    escape_var_references,
    fabric_script,
    fabric_script_file,
    job_config_maps,
    plan_stage,
    stage_image,
)
from trainshed.launch.kubernetes.workloads import (
    cpu_job,
    headless_service,
    ignore_disruption,
    jobset,
    plain_job,
    plain_job_notes,
    pytorchjob,
    pytorchjob_notes,
    rayjob,
    serving_deployment,
    serving_service,
    trainjob,
    trainjob_notes,
)
from trainshed.launch.target import RequestPart, SubmitRequest

_TRAINING_WORKLOADS: dict[str, Callable[[PlannedStage], KubeObject]] = {
    "jobset": jobset,
    "pytorchjob": pytorchjob,
    "trainjob": trainjob,
    "rayjob": rayjob,
    "job": plain_job,
}
_WORKLOAD_NOTES: dict[str, Callable[[PlannedStage], tuple[str, ...]]] = {
    "pytorchjob": pytorchjob_notes,
    "trainjob": trainjob_notes,
    "job": plain_job_notes,
}


def render(job: Job) -> SubmitRequest:
    """Turn a job into manifests; the same job gives the same bytes.

    With several stages, theirs lie in the driver's ConfigMap: `kubectl apply` of everything starts the driver alone.
    """
    plans, objects = _plan_stages(job)
    kubernetes = job.cluster.on_kubernetes
    parts = [RequestPart("content.yaml", None, to_documents(objects))]
    gangs = [plan for plan in plans if is_training(plan.stage)]
    if kubernetes.pre_pull and gangs:
        parts.append(RequestPart("pre-pull.yaml", None, to_documents([pre_pull_daemon_set(job, gangs[0].stage)])))
    stages = {plan.stage.name: stage_objects(plan) for plan in plans}
    if not needs_driver(_object_ids(stages)):
        parts += [RequestPart(f"{name}.yaml", name, to_documents(found)) for name, found in stages.items()]
    else:
        parts.append(RequestPart(f"{DRIVER}.yaml", None, to_documents(driver_objects(job, plans[0].content, stages))))
    notes = [note for plan in gangs for note in plan.fabric.notes]
    notes += [note for plan in gangs for note in _WORKLOAD_NOTES.get(kubernetes.kind, _no_notes)(plan)]
    return SubmitRequest("kubernetes", job.name, tuple(parts), notes=tuple(dict.fromkeys(notes)))


def _no_notes(plan: PlannedStage) -> tuple[str, ...]:
    return ()


def stage_objects(plan: PlannedStage) -> list[KubeObject]:
    """Return the objects of a stage; its own is the last, and stands for it."""
    if plan.stage.serving is not None:
        return [serving_service(plan), serving_deployment(plan)]
    kind = plan.job.cluster.on_kubernetes.kind
    make = _TRAINING_WORKLOADS[kind] if is_training(plan.stage) else cpu_job
    beside = [
        {**found, "metadata": {**plan.metadata, **found["metadata"], "labels": plan.labels}}
        for found in plan.needs.objects
    ]
    if is_training(plan.stage) and kind == "job":
        beside.append(headless_service(plan))
    return [*beside, make(plan)]


def stage_ids(job: Job) -> dict[str, str]:
    """Return what stands for each stage, as Kind/name."""
    plans, _ = _plan_stages(job)
    return _object_ids({plan.stage.name: stage_objects(plan) for plan in plans})


def _object_ids(stages: Mapping[str, Sequence[KubeObject]]) -> dict[str, str]:
    own = {stage: found[-1] for stage, found in stages.items()}
    return {stage: f"{kind_of(each).name}/{each['metadata']['name']}" for stage, each in own.items()}


def _plan_stages(job: Job) -> tuple[list[PlannedStage], tuple[KubeObject, ...]]:
    fabrics = {stage.name: _stage_fabric(job, stage) for stage in job.stages}
    scripts = {
        fabric_script_file(stage): script
        for stage in job.stages
        if (script := fabric_script(fabrics[stage.name], job.cluster, stage)) is not None
    }
    site = setup_script(job.cluster)
    scripts |= {SETUP_FILE: site} if site is not None else {}
    carried = job_config_maps(replace(job, files=dict(job.files) | scripts))
    plans = [
        plan_stage(job, stage, carried, fabrics[stage.name], has_fabric_script=fabric_script_file(stage) in scripts)
        for stage in job.stages
    ]
    return plans, carried.objects


def _stage_fabric(job: Job, stage: Stage) -> FabricSetup:
    """What the network between a gang's nodes needs; a CPU stage has none."""
    return fabric_setup(job.cluster, nodes=stage.nodes + stage.spares if is_training(stage) else 1)


PRE_PULL = "pre-pull"
_PAUSE_IMAGE = "registry.k8s.io/pause:3.10"
_PRE_PULL_RESOURCES = {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}}


def pre_pull_daemon_set(job: Job, stage: Stage) -> KubeObject:
    """Return the DaemonSet for a stage's image, on the nodes that the stage may run on."""
    kubernetes = job.cluster.on_kubernetes
    puller = {"name": "pull", "image": stage_image(job, stage), "command": ["true"], "resources": _PRE_PULL_RESOURCES}
    spec: KubeObject = {"terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False}
    if kubernetes.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in kubernetes.image_pull_secrets]
    spec |= pod_placement(job.cluster, stage).pod
    spec["initContainers"] = [puller]
    spec["containers"] = [{"name": "wait", "image": _PAUSE_IMAGE, "resources": _PRE_PULL_RESOURCES}]
    selected = {INSTANCE_LABEL: job.name, COMPONENT_LABEL: PRE_PULL}
    return new_object(
        DAEMON_SET,
        job_metadata(job, fit_name(job.name, f"-{PRE_PULL}"), PRE_PULL),
        spec={
            "selector": {"matchLabels": selected},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}},
            "template": {"metadata": {"labels": job_labels(job, PRE_PULL)}, "spec": spec},
        },
    )


MANIFESTS_FOLDER = "/etc/trainshed/manifests"
_DRIVER_RETRIES = 20
"""Of a driver that is driven out or loses the API server for long; a stage that failed ends it at once."""


def driver_objects(job: Job, content: JobConfigMaps, stages: Mapping[str, Sequence[KubeObject]]) -> list[KubeObject]:
    """Return the driver's objects; the manifests of the stages lie in a ConfigMap, in the order of their creation."""
    name = driver_name(job.name)
    # Numbered, so that their order is the order of their names.
    texts = {f"{number:02d}-{stage}.yaml": to_documents(found) for number, (stage, found) in enumerate(stages.items())}
    mark = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:10]
    manifests = new_object(
        CONFIG_MAP, job_metadata(job, fit_name(job.name, f"-stages-{mark}"), DRIVER), immutable=True, data=texts
    )
    namespace = job.cluster.on_kubernetes.namespace
    objects = [each for found in stages.values() for each in found]
    kinds = dict.fromkeys(kind_of(each) for each in objects)
    remade = [
        each["metadata"]["name"]
        for each in objects
        if MAX_RESTARTS_ANNOTATION in each["metadata"].get("annotations", {})
    ]
    return [
        manifests,
        new_object(SERVICE_ACCOUNT, job_metadata(job, name, DRIVER)),
        new_object(ROLE, job_metadata(job, name, DRIVER), rules=_rbac_rules(job, list(kinds), remade)),
        new_object(
            ROLE_BINDING,
            job_metadata(job, name, DRIVER),
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        ),
        _driver_job(job, content, name, manifests["metadata"]["name"]),
    ]


def _rbac_rules(job: Job, kinds: Sequence[KubeKind], remade: Sequence[str]) -> list[KubeObject]:
    """Create what it was given and look at it; nothing else."""
    rules = [_rbac_rule(kind, "get", "create", "patch") for kind in kinds]
    # Only its own trainings, to make them anew.
    rules += [_rbac_rule(JOB, "delete") | {"resourceNames": [name]} for name in remade]
    rules.append(_rbac_rule(POD, "list"))
    if DEPLOYMENT in kinds:
        rules.append(_rbac_rule(EVENT, "list"))  # a probe that fails is told there and nowhere else
    if job.cluster.on_kubernetes.queue is not None or job.cluster.on_kubernetes.cpu_queue is not None:
        rules.append(_rbac_rule(WORKLOAD, "list"))
    return rules


def _rbac_rule(kind: KubeKind, *verbs: str) -> KubeObject:
    return {"apiGroups": [kind.group], "resources": [kind.plural], "verbs": list(verbs)}


def _driver_job(job: Job, content: JobConfigMaps, name: str, manifests: str) -> KubeObject:
    cluster = job.cluster
    own = entry_env_vars(cluster) | ({"TRAINSHED_CODE": job.code.name} if job.code is not None else {})
    command = [cluster.python, "-P", "-m", "trainshed", "kubernetes", "drive", "--manifests", MANIFESTS_FOLDER]
    container: KubeObject = {
        "name": DRIVER,
        "image": stage_image(job),
        "command": ["bash", f"{JOB_FOLDER}/{ENTRY_FILE}"],
        "args": [escape_var_references(word) for word in command],
        "env": env_vars(own),
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
        "volumeMounts": [*content.mounts, {"name": "manifests", "mountPath": MANIFESTS_FOLDER, "readOnly": True}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod: KubeObject = {"restartPolicy": "Never", "serviceAccountName": name}
    if cluster.on_kubernetes.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": each} for each in cluster.on_kubernetes.image_pull_secrets]
    if cluster.on_kubernetes.cpu_node_selector:
        pod["nodeSelector"] = dict(cluster.on_kubernetes.cpu_node_selector)
    pod["containers"] = [container]
    pod["volumes"] = [*content.volumes, {"name": "manifests", "configMap": {"name": manifests}}]
    ended = {"action": "FailJob", "onExitCodes": {"containerName": DRIVER, "operator": "In", "values": [1, 2]}}
    found = job_metadata(job, name, DRIVER)
    spec: KubeObject = {}
    if cluster.on_kubernetes.cpu_queue is not None:
        found["labels"] = found["labels"] | {QUEUE_LABEL: cluster.on_kubernetes.cpu_queue}
        spec["suspend"] = True
    spec |= {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": _DRIVER_RETRIES,
        "podFailurePolicy": {"rules": [ended, ignore_disruption()]},
        "ttlSecondsAfterFinished": FINISHED_TTL_SECONDS,
        "template": {"metadata": {"labels": job_labels(job, DRIVER)}, "spec": pod},
    }
    return new_object(JOB, found, spec=spec)
