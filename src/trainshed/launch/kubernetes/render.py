"""A job as the manifests that are applied, in order. Everything in them follows from the job.

A single stage is applied as it is. The manifests of several stages are stored in a ConfigMap of the driver, a small
CPU Job with few permissions, which creates them one after another inside the cluster. (A JobSet whose jobs depend on
each other is one workload to Kueue, which would hold the GPUs while data is prepared.) A DaemonSet can pull the image
on every GPU node before the job needs it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainshed.launch.fabric import FabricSetup, fabric_setup
from trainshed.launch.job import SETUP_FILE, Job, Stage, setup_script
from trainshed.launch.kubernetes.code import CodeDelivery, bucket_of_store
from trainshed.launch.kubernetes.driver_program import PROGRAM_FILE, driver_program
from trainshed.launch.kubernetes.kinds import (
    COMPONENT_LABEL,
    CONFIG_MAP,
    DAEMON_SET,
    DEPLOYMENT,
    DRIVER,
    EVENT,
    INSTANCE_LABEL,
    JOB,
    POD,
    QUEUE_LABEL,
    ROLE,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    STAGES_FILE,
    WORKLOAD,
    KubeKind,
    KubeObject,
    driver_name,
    fit_name,
    kind_of,
    needs_driver,
)
from trainshed.launch.kubernetes.objects import (
    RAY_DRIVER_FILE,
    is_training,
    job_labels,
    job_metadata,
    new_object,
    to_documents,
)
from trainshed.launch.kubernetes.placement import cpu_node_choice, pod_placement
from trainshed.launch.kubernetes.pod import (
    FINISHED_TTL_SECONDS,
    JobConfigMaps,
    PlannedStage,
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
    plans, config_maps = plan_stages(job)
    kubernetes = job.cluster.on_kubernetes
    parts = [RequestPart("content.yaml", None, to_documents(config_maps.objects))]
    if config_maps.programs:
        names = ", ".join(sorted(name for obj in config_maps.programs for name in obj["data"]))
        summary = f"ConfigMap/{config_maps.programs[0]['metadata']['name']}, programs of ours for other images: {names}"
        parts.append(RequestPart("programs.yaml", None, to_documents(config_maps.programs), summary))
    parts += _code_parts(job, config_maps.code)
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
        program = driver_program_object(job)
        summary = f"ConfigMap/{program['metadata']['name']}, the driver's program"
        parts.append(RequestPart(PROGRAM_PART, None, to_documents([program]), summary))
        parts.append(RequestPart(f"{DRIVER}.yaml", None, to_documents(driver_objects(job, program, stages))))
    notes = [note for plan in trainings for note in plan.fabric.notes]
    notes += [note for plan in trainings for note in _WORKLOAD_NOTES.get(kubernetes.kind, _no_notes)(plan)]
    notes += _code_notes(job, config_maps.code)
    return SubmitRequest(
        "kubernetes", job.name, tuple(parts), uploads=config_maps.code.uploads, notes=tuple(dict.fromkeys(notes))
    )


def _code_parts(job: Job, code: CodeDelivery) -> list[RequestPart]:
    """Return the ConfigMaps of our code; they are sent after the job's own, which say that the code is in use."""
    if not code.objects or job.code is None:
        return []
    first, last = code.objects[0]["metadata"]["name"], code.objects[-1]["metadata"]["name"]
    summary = f"ConfigMap/{first} to {last}, our code (sha256 {job.code.sha256}), for all jobs of the namespace"
    return [RequestPart(CODE_PART, None, to_documents(code.objects), summary)]


def _code_notes(job: Job, code: CodeDelivery) -> list[str]:
    """Say what must be somewhere before the job is applied by hand."""
    if code.objects:
        return [f"{CODE_PART}: `submit` applies our code first; by hand `render --out DIR` and `kubectl apply -f DIR`"]
    store = bucket_of_store(job)
    return [
        f"`submit` puts our code into the store; by hand `render --out DIR` and gcloud storage cp DIR/store/{path} "
        f"{store}/{path}"
        for path in code.uploads
    ]


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


def plan_stages(job: Job) -> tuple[list[PlannedStage], JobConfigMaps]:
    """Return the stages with all that their objects are built from, and the ConfigMaps of the job."""
    fabrics = {stage.name: _stage_fabric(job, stage) for stage in job.stages}
    scripts = {
        fabric_script_file(stage): script
        for stage in job.stages
        if (script := fabric_script(fabrics[stage.name], job.cluster, stage)) is not None
    }
    if job.cluster.on_kubernetes.kind == "rayjob" and any(
        is_training(stage) and stage.script is not None for stage in job.stages
    ):
        scripts[RAY_DRIVER_FILE] = _RAY_SCRIPT.read_text(encoding="utf-8")
    setup = setup_script(job.cluster)
    scripts |= {SETUP_FILE: setup} if setup is not None else {}
    config_maps = job_config_maps(replace(job, files=dict(job.files) | scripts))
    plans = [
        plan_stage(job, stage, config_maps, fabrics[stage.name], has_fabric_script=fabric_script_file(stage) in scripts)
        for stage in job.stages
    ]
    return plans, config_maps


def _stage_fabric(job: Job, stage: Stage) -> FabricSetup:
    """Return what the network between the nodes of a training needs; a CPU stage needs none."""
    return fabric_setup(job.cluster, nodes=stage.nodes + stage.spares if is_training(stage) else 1)


_RAY_SCRIPT = Path(__file__).parents[1] / "ray" / "script_driver.py"
"""A program for Linux: it is read here, never imported."""
PRE_PULL = "pre-pull"
_PAUSE_IMAGE = "registry.k8s.io/pause:3.10"
_PRE_PULL_RESOURCES = {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": "100m", "memory": "64Mi"}}


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
PROGRAM_FOLDER = "/etc/trainshed/driver"
CODE_PART = "code.yaml"
PROGRAM_PART = "driver-program.yaml"
_DRIVER_RETRIES = 20
"""Retries of a driver that is evicted or loses the API server for long; a failed stage ends it at once."""


def driver_program_object(job: Job) -> KubeObject:
    """Return the ConfigMap with the driver's program."""
    program = driver_program()
    digest = hashlib.sha256(program).hexdigest()[:10]
    return new_object(
        CONFIG_MAP,
        job_metadata(job, fit_name(job.name, f"-program-{digest}"), DRIVER),
        immutable=True,
        binaryData={PROGRAM_FILE: base64.b64encode(program).decode()},
    )


def driver_objects(job: Job, program: KubeObject, stages: Mapping[str, Sequence[KubeObject]]) -> list[KubeObject]:
    """Return the driver's objects; a ConfigMap has the manifests of the stages, in the order of their creation."""
    name = driver_name(job.name)
    files = {stage: f"{number:02d}-{stage}.yaml" for number, stage in enumerate(stages)}
    index = [
        {
            "stage": stage,
            "file": files[stage],
            "job": job.name,
            "objects": [f"{obj['kind']}/{obj['metadata']['name']}" for obj in stage_objects],
        }
        for stage, stage_objects in stages.items()
    ]
    texts = {files[stage]: to_documents(stage_objects) for stage, stage_objects in stages.items()}
    texts[STAGES_FILE] = json.dumps(index, indent=1) + "\n"
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:10]
    manifests = new_object(
        CONFIG_MAP, job_metadata(job, fit_name(job.name, f"-stages-{digest}"), DRIVER), immutable=True, data=texts
    )
    account = job.cluster.on_kubernetes.driver_account
    driver = _driver_job(job, account or name, manifests["metadata"]["name"], program["metadata"]["name"])
    if account is not None:
        return [manifests, driver]
    namespace = job.cluster.on_kubernetes.namespace
    objects = [obj for stage_objects in stages.values() for obj in stage_objects]
    return [
        manifests,
        new_object(SERVICE_ACCOUNT, job_metadata(job, name, DRIVER)),
        new_object(ROLE, job_metadata(job, name, DRIVER), rules=_rbac_rules(job, objects, manifests)),
        new_object(
            ROLE_BINDING,
            job_metadata(job, name, DRIVER),
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        ),
        driver,
    ]


def _rbac_rules(job: Job, objects: Sequence[KubeObject], manifests: KubeObject) -> list[KubeObject]:
    """Return the driver's permissions: to create, to read and to replace what it was given, and nothing else."""
    names: dict[KubeKind, list[str]] = {}
    for obj in objects:
        names.setdefault(kind_of(obj), []).append(obj["metadata"]["name"])
    kinds = list(names)
    rules = [_rbac_rule(kind, "get", "create", "patch") for kind in kinds]
    # By name: to recreate a training that failed, and to replace what an earlier release left.
    rules += [_rbac_rule(kind, "delete") | {"resourceNames": kind_names} for kind, kind_names in names.items()]
    rules.append(_rbac_rule(CONFIG_MAP, "get") | {"resourceNames": [manifests["metadata"]["name"]]})
    rules.append(_rbac_rule(POD, "list"))
    if DEPLOYMENT in kinds:
        rules.append(_rbac_rule(EVENT, "list"))  # only events say that a probe failed
    if job.cluster.on_kubernetes.queue is not None or job.cluster.on_kubernetes.cpu_queue is not None:
        rules.append(_rbac_rule(WORKLOAD, "list"))
    return rules


def _rbac_rule(kind: KubeKind, *verbs: str) -> KubeObject:
    return {"apiGroups": [kind.group], "resources": [kind.plural], "verbs": list(verbs)}


def _driver_job(job: Job, account: str, manifests: str, program: str) -> KubeObject:
    cluster, name = job.cluster, driver_name(job.name)
    words = [f"{PROGRAM_FOLDER}/{PROGRAM_FILE}", "--manifests", MANIFESTS_FOLDER, "--owner", manifests]
    container: KubeObject = {
        "name": DRIVER,
        "image": stage_image(job),
        # Isolated: it needs nothing of the image but Python.
        "command": [escape_var_references(cluster.python), "-I"],
        "args": [escape_var_references(word) for word in words],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        "volumeMounts": [
            {"name": "program", "mountPath": PROGRAM_FOLDER, "readOnly": True},
            {"name": "manifests", "mountPath": MANIFESTS_FOLDER, "readOnly": True},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod: KubeObject = {"restartPolicy": "Never", "serviceAccountName": account}
    if cluster.on_kubernetes.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in cluster.on_kubernetes.image_pull_secrets]
    pod |= cpu_node_choice(cluster)
    pod["containers"] = [container]
    pod["volumes"] = [
        {"name": "program", "configMap": {"name": program}},
        {"name": "manifests", "configMap": {"name": manifests}},
    ]
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
