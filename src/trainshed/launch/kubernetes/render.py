"""A job as the manifests that are applied, in order. Everything in them follows from the job.

A single stage is applied as it is. The manifests of several stages are stored in a ConfigMap of the driver, a small
CPU Job with few permissions, which creates them one after another inside the cluster. (A JobSet whose jobs depend on
each other is one workload to Kueue, which would hold the GPUs while data is prepared.) A DaemonSet can pull the image
on every GPU node before the job needs it.
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

    The manifests of several stages are in the driver's ConfigMap, so that `kubectl apply` starts only the driver.
    """
    plans, objects = plan_stages(job)
    kubernetes = job.cluster.on_kubernetes
    parts = [RequestPart("content.yaml", None, to_documents(objects))]
    trainings = [plan for plan in plans if is_training(plan.stage)]
    if kubernetes.pre_pull and trainings:
        parts.append(RequestPart("pre-pull.yaml", None, to_documents([pre_pull_daemon_set(job, trainings[0].stage)])))
    stages = {plan.stage.name: stage_objects(plan) for plan in plans}
    if not needs_driver(_object_ids(stages)):
        parts += [
            RequestPart(f"{name}.yaml", name, to_documents(objects_of_stage))
            for name, objects_of_stage in stages.items()
        ]
    else:
        parts.append(
            RequestPart(f"{DRIVER}.yaml", None, to_documents(driver_objects(job, plans[0].config_maps, stages)))
        )
    notes = [note for plan in trainings for note in plan.fabric.notes]
    notes += [note for plan in trainings for note in _WORKLOAD_NOTES.get(kubernetes.kind, _no_notes)(plan)]
    return SubmitRequest("kubernetes", job.name, tuple(parts), notes=tuple(dict.fromkeys(notes)))


def _no_notes(plan: PlannedStage) -> tuple[str, ...]:
    return ()


def stage_objects(plan: PlannedStage) -> list[KubeObject]:
    """Return the objects of a stage; the last one is the workload that represents it."""
    if plan.stage.serving is not None:
        return [serving_service(plan), serving_deployment(plan)]
    kind = plan.job.cluster.on_kubernetes.kind
    build = _TRAINING_WORKLOADS[kind] if is_training(plan.stage) else cpu_job
    companions = [
        {**obj, "metadata": {**plan.object_metadata, **obj["metadata"], "labels": plan.object_labels}}
        for obj in plan.fabric_needs.objects
    ]
    if is_training(plan.stage) and kind == "job":
        companions.append(headless_service(plan))
    return [*companions, build(plan)]


def stage_ids(job: Job) -> dict[str, str]:
    """Return the workload of each stage, as Kind/name."""
    plans, _ = plan_stages(job)
    return _object_ids({plan.stage.name: stage_objects(plan) for plan in plans})


def _object_ids(stages: Mapping[str, Sequence[KubeObject]]) -> dict[str, str]:
    last_objects = {stage: objects[-1] for stage, objects in stages.items()}
    return {stage: f"{kind_of(obj).name}/{obj['metadata']['name']}" for stage, obj in last_objects.items()}


def plan_stages(job: Job) -> tuple[list[PlannedStage], tuple[KubeObject, ...]]:
    """Return the stages with all that their objects are built from, and the ConfigMaps of the job's files."""
    fabrics = {stage.name: _stage_fabric(job, stage) for stage in job.stages}
    scripts = {
        fabric_script_file(stage): script
        for stage in job.stages
        if (script := fabric_script(fabrics[stage.name], job.cluster, stage)) is not None
    }
    setup = setup_script(job.cluster)
    scripts |= {SETUP_FILE: setup} if setup is not None else {}
    config_maps = job_config_maps(replace(job, files=dict(job.files) | scripts))
    plans = [
        plan_stage(job, stage, config_maps, fabrics[stage.name], has_fabric_script=fabric_script_file(stage) in scripts)
        for stage in job.stages
    ]
    return plans, config_maps.objects


def _stage_fabric(job: Job, stage: Stage) -> FabricSetup:
    """Return what the network between the nodes of a training needs; a CPU stage needs none."""
    return fabric_setup(job.cluster, nodes=stage.nodes + stage.spares if is_training(stage) else 1)


PRE_PULL = "pre-pull"
_PAUSE_IMAGE = "registry.k8s.io/pause:3.10"
_PRE_PULL_RESOURCES = {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}}


def pre_pull_daemon_set(job: Job, stage: Stage) -> KubeObject:
    """Return the DaemonSet that pulls a stage's image on the nodes that the stage may run on."""
    kubernetes = job.cluster.on_kubernetes
    puller = {"name": "pull", "image": stage_image(job, stage), "command": ["true"], "resources": _PRE_PULL_RESOURCES}
    spec: KubeObject = {"terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False}
    if kubernetes.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in kubernetes.image_pull_secrets]
    spec |= pod_placement(job.cluster, stage).pod_spec
    spec["initContainers"] = [puller]
    spec["containers"] = [{"name": "wait", "image": _PAUSE_IMAGE, "resources": _PRE_PULL_RESOURCES}]
    selector = {INSTANCE_LABEL: job.name, COMPONENT_LABEL: PRE_PULL}
    return new_object(
        DAEMON_SET,
        job_metadata(job, fit_name(job.name, f"-{PRE_PULL}"), PRE_PULL),
        spec={
            "selector": {"matchLabels": selector},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}},
            "template": {"metadata": {"labels": job_labels(job, PRE_PULL)}, "spec": spec},
        },
    )


MANIFESTS_FOLDER = "/etc/trainshed/manifests"
_DRIVER_RETRIES = 20
"""Retries of a driver that is evicted or loses the API server for long; a failed stage ends it at once."""


def driver_objects(
    job: Job, config_maps: JobConfigMaps, stages: Mapping[str, Sequence[KubeObject]]
) -> list[KubeObject]:
    """Return the driver's objects; a ConfigMap has the manifests of the stages, in the order of their creation."""
    name = driver_name(job.name)
    # Numbered, so that sorting by name gives their order.
    texts = {
        f"{number:02d}-{stage}.yaml": to_documents(stage_objects)
        for number, (stage, stage_objects) in enumerate(stages.items())
    }
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:10]
    manifests = new_object(
        CONFIG_MAP, job_metadata(job, fit_name(job.name, f"-stages-{digest}"), DRIVER), immutable=True, data=texts
    )
    namespace = job.cluster.on_kubernetes.namespace
    objects = [obj for stage_objects in stages.values() for obj in stage_objects]
    kinds = dict.fromkeys(kind_of(obj) for obj in objects)
    recreated_names = [
        obj["metadata"]["name"] for obj in objects if MAX_RESTARTS_ANNOTATION in obj["metadata"].get("annotations", {})
    ]
    return [
        manifests,
        new_object(SERVICE_ACCOUNT, job_metadata(job, name, DRIVER)),
        new_object(ROLE, job_metadata(job, name, DRIVER), rules=_rbac_rules(job, list(kinds), recreated_names)),
        new_object(
            ROLE_BINDING,
            job_metadata(job, name, DRIVER),
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        ),
        _driver_job(job, config_maps, name, manifests["metadata"]["name"]),
    ]


def _rbac_rules(job: Job, kinds: Sequence[KubeKind], recreated_names: Sequence[str]) -> list[KubeObject]:
    """Return the driver's permissions: to create and to read what it was given, and nothing else."""
    rules = [_rbac_rule(kind, "get", "create", "patch") for kind in kinds]
    # Only its own trainings, to recreate them.
    rules += [_rbac_rule(JOB, "delete") | {"resourceNames": [name]} for name in recreated_names]
    rules.append(_rbac_rule(POD, "list"))
    if DEPLOYMENT in kinds:
        rules.append(_rbac_rule(EVENT, "list"))  # only events say that a probe failed
    if job.cluster.on_kubernetes.queue is not None or job.cluster.on_kubernetes.cpu_queue is not None:
        rules.append(_rbac_rule(WORKLOAD, "list"))
    return rules


def _rbac_rule(kind: KubeKind, *verbs: str) -> KubeObject:
    return {"apiGroups": [kind.group], "resources": [kind.plural], "verbs": list(verbs)}


def _driver_job(job: Job, config_maps: JobConfigMaps, name: str, manifests: str) -> KubeObject:
    cluster = job.cluster
    env = entry_env_vars(cluster) | ({"TRAINSHED_CODE": job.code.name} if job.code is not None else {})
    command = [cluster.python, "-P", "-m", "trainshed", "kubernetes", "drive", "--manifests", MANIFESTS_FOLDER]
    container: KubeObject = {
        "name": DRIVER,
        "image": stage_image(job),
        "command": ["bash", f"{JOB_FOLDER}/{ENTRY_FILE}"],
        "args": [escape_var_references(word) for word in command],
        "env": env_vars(env),
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
        "volumeMounts": [*config_maps.mounts, {"name": "manifests", "mountPath": MANIFESTS_FOLDER, "readOnly": True}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod: KubeObject = {"restartPolicy": "Never", "serviceAccountName": name}
    if cluster.on_kubernetes.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in cluster.on_kubernetes.image_pull_secrets]
    if cluster.on_kubernetes.cpu_node_selector:
        pod["nodeSelector"] = dict(cluster.on_kubernetes.cpu_node_selector)
    pod["containers"] = [container]
    pod["volumes"] = [*config_maps.volumes, {"name": "manifests", "configMap": {"name": manifests}}]
    fail_rule = {"action": "FailJob", "onExitCodes": {"containerName": DRIVER, "operator": "In", "values": [1, 2]}}
    metadata = job_metadata(job, name, DRIVER)
    spec: KubeObject = {}
    if cluster.on_kubernetes.cpu_queue is not None:
        metadata["labels"] = metadata["labels"] | {QUEUE_LABEL: cluster.on_kubernetes.cpu_queue}
        spec["suspend"] = True
    spec |= {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": _DRIVER_RETRIES,
        "podFailurePolicy": {"rules": [fail_rule, ignore_disruption()]},
        "ttlSecondsAfterFinished": FINISHED_TTL_SECONDS,
        "template": {"metadata": {"labels": job_labels(job, DRIVER)}, "spec": pod},
    }
    return new_object(JOB, metadata, spec=spec)
