"""Each stage as the object that runs it: JobSet, Job, PyTorchJob, TrainJob, RayJob, or a Deployment for serving.

JobSet: the pods of a training are one Indexed Job. A failure restarts the whole set; wrong input does not.

Job, for a training where no gang controller is installed: an Indexed Job and a headless Service. Kubernetes gives
each pod of an Indexed Job a rank and a hostname, and the Service makes that a DNS name. A pod that fails ends all
of them (`backoffLimit: 0`). A Job cannot restart all of its pods: the driver deletes and recreates it,
`limits.restarts` times, and the uid of the new Job names the new start.

Job, for a stage without GPUs: Indexed, with one index for each part of the stage.

PyTorchJob (Kubeflow's training operator v1): a master, workers, and our own ranks inside. The operator sets RANK
and means the pod; the agent derives the ranks of processes from it. The operator restarts containers one by one,
so a restart of the whole gang counts as many restarts as there are pods.

TrainJob (Kubeflow Trainer v2): the runtime defines the pods, and we patch in what they lack. A patch cannot add init
containers or change the network, so fabrics that need them are refused. The trainer's resources per node replace
those of the runtime, so the devices of the fabric are listed there too (NVIDIA/aicr#2275: EFA devices were lost that
way).

RayJob: the head is a node like the others, and our driver in it starts one actor per node. In a foreign engine's image
the driver is a file of the job (`launch/ray/script_driver.py`).

Deployment, with a Service in front of it: probes say when a server is up, ready and alive. Our own server needs
no preStop hook: after TERM it is unready but accepts requests for some more seconds, until the Service has removed
its pod, and then finishes its answers. vLLM accepts no request after TERM, so its pods wait before they get it.
"""

from __future__ import annotations

import copy
import shlex
from math import ceil

from trainshed.errors import InputError
from trainshed.launch.job import CPU_STAGE_RETRIES, MASTER_PORT, SERVICE_PORT, ServingSpec
from trainshed.launch.kubernetes.kinds import (
    COMPONENT_LABEL,
    DEPLOYMENT,
    INSTANCE_LABEL,
    JOB,
    JOB_SET,
    MAX_RESTARTS_ANNOTATION,
    PYTORCH_JOB,
    RAY_JOB,
    SERVICE,
    TRAIN_JOB,
    KubeObject,
)
from trainshed.launch.kubernetes.objects import (
    ENTRY_FILE,
    JOB_FOLDER,
    RAY_DRIVER_FILE,
    UNPACKED_FOLDER,
    job_labels,
    job_metadata,
    new_object,
)
from trainshed.launch.kubernetes.placement import cpu_node_choice
from trainshed.launch.kubernetes.pod import (
    FINISHED_TTL_SECONDS,
    ContainerOptions,
    PlannedStage,
    config_map_mounts,
    entry_env_vars,
    env_var_from_label,
    env_vars,
    pod_template,
    resources_of,
    serving_port,
    stage_image,
    with_resources,
)
from trainshed.launch.kubernetes.storage import pod_volumes

# The uid of the Job that a pod belongs to. JobSet recreates its Jobs for a restart, so that the uid names one start.
START_ENV_VAR = env_var_from_label("TRAINSHED_START", "batch.kubernetes.io/controller-uid")


def jobset(plan: PlannedStage) -> KubeObject:
    """Return the JobSet of a training."""
    stage, limits = plan.stage, plan.job.cluster.limits
    first = f"{plan.name}-{stage.name}-0-0.{plan.name}"
    container = ContainerOptions(stage.name, {"MASTER_ADDR": first}, (START_ENV_VAR,))
    gang: KubeObject = {
        "completionMode": "Indexed",
        "completions": plan.pods,
        "parallelism": plan.pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [fail_on_wrong_input(stage.name)]},
        "template": pod_template(plan, container),
    }
    # A failure that no rule names restarts the set and counts as a restart.
    rules: list[KubeObject] = [_jobset_rule("wrong-input", "FailJobSet", "PodFailurePolicy", stage.name)]
    if limits.hours is not None:
        gang["activeDeadlineSeconds"] = int(limits.hours * 3600)
        rules.append(_jobset_rule("time-is-up", "RestartJobSetAndIgnoreMaxRestarts", "DeadlineExceeded", stage.name))
    spec: KubeObject = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [stage.name]},
        "failurePolicy": {"maxRestarts": stage.restarts, "rules": rules},
        "ttlSecondsAfterFinished": FINISHED_TTL_SECONDS,
        "replicatedJobs": [{"name": stage.name, "replicas": 1, "template": {"spec": gang}}],
    }
    return new_object(JOB_SET, plan.object_metadata, spec=({"suspend": True} if plan.placement.suspend else {}) | spec)


def fail_on_wrong_input(container: str) -> KubeObject:
    """Return the rule by which a Job fails at once if another start would fail the same way."""
    codes = {"containerName": container, "operator": "In", "values": [InputError.exit_code]}
    return {"action": "FailJob", "onExitCodes": codes}


def _jobset_rule(name: str, action: str, reason: str, job: str) -> KubeObject:
    return {"name": name, "action": action, "onJobFailureReasons": [reason], "targetReplicatedJobs": [job]}


def plain_job(plan: PlannedStage) -> KubeObject:
    """Return the Job of a training."""
    stage, limits = plan.stage, plan.job.cluster.limits
    container = ContainerOptions(stage.name, {"MASTER_ADDR": f"{plan.name}-0.{plan.name}"}, (START_ENV_VAR,))
    template = pod_template(plan, container)
    template["spec"] = {"subdomain": plan.name} | template["spec"]
    spec: KubeObject = {"suspend": True} if plan.placement.suspend else {}
    spec |= {
        "completionMode": "Indexed",
        "completions": plan.pods,
        "parallelism": plan.pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [fail_on_wrong_input(stage.name)]},
        "ttlSecondsAfterFinished": FINISHED_TTL_SECONDS,
    }
    if limits.hours is not None:
        spec["activeDeadlineSeconds"] = int(limits.hours * 3600)
    metadata = plan.object_metadata
    metadata["annotations"] = metadata.get("annotations", {}) | {MAX_RESTARTS_ANNOTATION: str(stage.restarts)}
    return new_object(JOB, metadata, spec=spec | {"template": template})


def headless_service(plan: PlannedStage) -> KubeObject:
    """Return the Service that gives pods their DNS names, also before they are ready: they need them to rendezvous."""
    spec: KubeObject = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {INSTANCE_LABEL: plan.job.name, COMPONENT_LABEL: plan.stage.name},
        "ports": [{"name": "rendezvous", "port": MASTER_PORT, "targetPort": MASTER_PORT, "protocol": "TCP"}],
    }
    return new_object(SERVICE, job_metadata(plan.job, plan.name, plan.stage.name), spec=spec)


def plain_job_notes(plan: PlannedStage) -> tuple[str, ...]:
    """Say how a plain Job differs from a JobSet."""
    return (
        "a plain Job is started again by the driver, a small pod on CPUs: without it a training that fails stays so; "
        "all pods of a gang have their nodes at once only where a queue or a JobSet sees to it",
    )


def cpu_job(plan: PlannedStage) -> KubeObject:
    """Return the object of a stage on CPUs."""
    stage = plan.stage
    spec: KubeObject = {
        "completionMode": "Indexed",
        "completions": stage.parts,
        "parallelism": stage.parts,
        "backoffLimit": max(stage.restarts, CPU_STAGE_RETRIES) * stage.parts,
        "podFailurePolicy": {"rules": [fail_on_wrong_input(stage.name), ignore_disruption()]},
        "ttlSecondsAfterFinished": FINISHED_TTL_SECONDS,
        "template": pod_template(plan, ContainerOptions(stage.name, env_references=(START_ENV_VAR,))),
    }
    return new_object(JOB, plan.object_metadata, spec=({"suspend": True} if plan.placement.suspend else {}) | spec)


def ignore_disruption() -> KubeObject:
    """Return the rule by which an evicted pod does not count as failed."""
    return {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


# Names that the operator looks for.
_PYTORCHJOB_CONTAINER = "pytorch"
_RAY_HEAD_CONTAINER, _RAY_WORKER_CONTAINER = "ray-head", "ray-worker"
_PYTORCHJOB_PORT = "pytorchjob-port"


def pytorchjob(plan: PlannedStage) -> KubeObject:
    """Return the PyTorchJob of a training."""
    stage, limits = plan.stage, plan.job.cluster.limits
    policy: KubeObject = {
        "cleanPodPolicy": "Running",
        "ttlSecondsAfterFinished": FINISHED_TTL_SECONDS,
        # The operator gives up when this many restarts have happened, not when one more would be needed.
        "backoffLimit": stage.restarts * plan.pods + 1 if stage.restarts else 0,
    }
    if limits.hours is not None:
        policy["activeDeadlineSeconds"] = int(limits.hours * 3600)
    if plan.placement.suspend:
        policy["suspend"] = True
    replicas: KubeObject = {"Master": _pytorchjob_replicas(plan, 1, first=True)}
    if plan.pods > 1:
        replicas["Worker"] = _pytorchjob_replicas(plan, plan.pods - 1, first=False)
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return new_object(PYTORCH_JOB, plan.object_metadata, spec=spec)


def pytorchjob_notes(plan: PlannedStage) -> tuple[str, ...]:
    """Say how a PyTorchJob differs from a JobSet."""
    if not plan.stage.restarts:
        return ()
    return ("a PyTorchJob is started again whatever ended it, wrong input too; a JobSet tells these apart",)


def _pytorchjob_replicas(plan: PlannedStage, count: int, *, first: bool) -> KubeObject:
    restart_policy = "OnFailure" if plan.stage.restarts else "Never"
    # The operator sets MASTER_ADDR and MASTER_PORT, but nothing that names one start of all pods: `rendezvous.py`.
    rendezvous_env = {"TRAINSHED_MEET": str(plan.pods)} if plan.pods > 1 and plan.stage.script is None else {}
    uid = {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    template = pod_template(
        plan,
        ContainerOptions(_PYTORCHJOB_CONTAINER, rendezvous_env, (uid,) if rendezvous_env else (), uploads=first),
        restart_policy=restart_policy,
    )
    container = template["spec"]["containers"][0]
    container["ports"] = [{"name": _PYTORCHJOB_PORT, "containerPort": MASTER_PORT}]
    container["env"] = [variable for variable in container["env"] if variable["name"] != "MASTER_PORT"]
    del template["spec"]["restartPolicy"]  # the operator takes it from beside the template
    return {"replicas": count, "restartPolicy": restart_policy, "template": template}


# The name of the replicated job that trains, and of its container, in the runtimes that Kubeflow ships.
_TRAINJOB_NODE = "node"
WORK_CONTAINERS = (_PYTORCHJOB_CONTAINER, _TRAINJOB_NODE, _RAY_HEAD_CONTAINER, _RAY_WORKER_CONTAINER)
"""Containers that train and are not named after their stage."""
_TRAINJOB_MANAGER = "trainshed.io/launch"


def trainjob(plan: PlannedStage) -> KubeObject:
    """Return the TrainJob of a training."""
    _refuse_unpatchable_needs(plan)
    cluster = plan.job.cluster
    first = f"{plan.name}-{_TRAINJOB_NODE}-0-0.{plan.name}"
    template = pod_template(plan, ContainerOptions(_TRAINJOB_NODE, {"MASTER_ADDR": first}, (START_ENV_VAR,), False))
    spec, container = template["spec"], template["spec"]["containers"][0]
    patch: KubeObject = {"name": _TRAINJOB_NODE, "volumeMounts": container["volumeMounts"]}
    if "securityContext" in container:
        patch["securityContext"] = container["securityContext"]
    patched = {key: spec[key] for key in _TRAINJOB_PATCHED_KEYS if key in spec} | {"containers": [patch]}
    pods = {"metadata": template["metadata"], "spec": patched}
    jobs = [{"name": _TRAINJOB_NODE, "template": {"spec": {"template": pods}}}]
    job_spec: KubeObject = {"suspend": True} if plan.placement.suspend else {}
    job_spec |= {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": cluster.on_kubernetes.runtime,
        },
        "trainer": {
            "numNodes": plan.pods,
            "image": container["image"],
            "command": container["command"],
            "args": container["args"],
            "env": container["env"],
            "resourcesPerNode": container["resources"],
        },
        "runtimePatches": [
            {"manager": _TRAINJOB_MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
        ],
    }
    if cluster.limits.hours is not None:
        job_spec["activeDeadlineSeconds"] = int(cluster.limits.hours * 3600)
    return new_object(TRAIN_JOB, plan.object_metadata, spec=job_spec)


def trainjob_notes(plan: PlannedStage) -> tuple[str, ...]:
    """Say how a TrainJob differs from a JobSet."""
    runtime = plan.job.cluster.on_kubernetes.runtime
    return (f"how often a TrainJob is started again is the business of its runtime ({runtime}), not of this file",)


_TRAINJOB_PATCHED_KEYS = (
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "tolerations",
    "volumes",
)


def _refuse_unpatchable_needs(plan: PlannedStage) -> None:
    needs, cluster = plan.fabric_needs, plan.job.cluster
    lacking = [
        word
        for word, needed in (
            ("init containers", needs.init_containers),
            ("the node's network", needs.host_network or cluster.on_kubernetes.host_network),
            ("resource claims", needs.resource_claims),
        )
        if needed
    ]
    if lacking:
        raise InputError(
            f"{plan.fabric.fabric or plan.fabric.name} needs {' and '.join(lacking)}, which a TrainJob cannot ask for",
            where=cluster.where("kubernetes.kind"),
            hint="write `kind: jobset`",
        )


_RAY_HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


RAY_SUBMITTER, RAY_SUBMITTER_CONTAINER = "submitter", "ray-job-submitter"
"""The component label of the pod that submits the entrypoint to the head, and its container."""


def rayjob(plan: PlannedStage) -> KubeObject:
    """Return the RayJob of a training."""
    if plan.fabric.profile_script is not None:
        raise InputError(
            f"{plan.fabric.fabric} is set up by a script that must run before each rank, which Ray's actors do not do",
            where=plan.job.cluster.where("kubernetes.kind"),
            hint="write `kind: jobset`",
        )
    driver = ["-P", "-m", "trainshed", "ray-driver"]
    if plan.stage.script is not None:
        driver = [f"{JOB_FOLDER}/{RAY_DRIVER_FILE}"]
    command = [plan.job.cluster.python, *driver, plan.stage.name, "--job", JOB_FOLDER]
    gpus = str(plan.stage.gpus_per_node)
    head: KubeObject = {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-gpus": gpus},
        "template": _ray_pod(plan, _RAY_HEAD_CONTAINER, head=True),
    }
    cluster: KubeObject = {"headGroupSpec": head}
    if plan.pods > 1:
        workers = {"replicas": plan.pods - 1, "minReplicas": plan.pods - 1, "maxReplicas": plan.pods - 1}
        worker: KubeObject = {"groupName": "workers", "numOfHosts": 1} | workers
        worker |= {"rayStartParams": {"num-gpus": gpus}, "template": _ray_pod(plan, _RAY_WORKER_CONTAINER, head=False)}
        cluster["workerGroupSpecs"] = [worker]
    spec: KubeObject = {"suspend": True} if plan.placement.suspend else {}
    spec |= {
        "submissionMode": "K8sJobMode",
        "entrypoint": shlex.join(command),
        "shutdownAfterJobFinishes": True,
        # How long the Ray cluster, with its GPUs, is kept after the end.
        "ttlSecondsAfterFinished": 0,
        # The driver starts the ranks again by itself, on the same pods.
        "backoffLimit": 0,
        "submitterPodTemplate": _ray_submitter_pod(plan),
        "rayClusterSpec": cluster,
    }
    if plan.job.cluster.limits.hours is not None:
        spec["activeDeadlineSeconds"] = int(plan.job.cluster.limits.hours * 3600)
    return new_object(RAY_JOB, plan.object_metadata, spec=spec)


def _ray_pod(plan: PlannedStage, name: str, *, head: bool) -> KubeObject:
    # Actors get the fabric's variables from the container: no script runs between Ray's processes and ours.
    env = dict(plan.fabric.environment)
    if plan.fabric.library_path:
        env["LD_LIBRARY_PATH"] = ":".join(plan.fabric.library_path)
    if plan.mounts_code:
        env["PYTHONPATH"] = UNPACKED_FOLDER
    template = copy.deepcopy(pod_template(plan, ContainerOptions(name, env, uploads=head)))
    spec, container = template["spec"], template["spec"]["containers"][0]
    del spec["restartPolicy"]  # KubeRay's to set
    del container["command"], container["args"]
    container["env"] = [variable for variable in container["env"] if variable["name"] not in ("NNODES", "MASTER_PORT")]
    if head:
        container["ports"] = [{"name": key, "containerPort": port} for key, port in _RAY_HEAD_PORTS.items()]
    if plan.mounts_code:
        spec["initContainers"] = [*spec.get("initContainers", ()), _code_init_container(plan)]
    return template


def _code_init_container(plan: PlannedStage) -> KubeObject:
    """Return the init container that unpacks our code before Ray starts."""
    container: KubeObject = {
        "name": "trainshed-code",
        "image": stage_image(plan.job, plan.stage),
        "command": ["bash", f"{JOB_FOLDER}/{ENTRY_FILE}", "true"],
        "env": env_vars(entry_env_vars(plan.job.cluster) | dict(plan.config_maps.code.environment)),
        "volumeMounts": [*config_map_mounts(plan), *pod_volumes(plan.job.cluster).mounts],
    }
    return with_resources(plan, container)


_SUBMITTER_RESOURCES: KubeObject = {
    "requests": {"cpu": "500m", "memory": "512Mi"},
    "limits": {"cpu": "1", "memory": "1Gi"},
}


def _ray_submitter_pod(plan: PlannedStage) -> KubeObject:
    """Return the pod that submits the entrypoint to the head; KubeRay's default has no pull secrets."""
    kubernetes = plan.job.cluster.on_kubernetes
    container = {
        "name": RAY_SUBMITTER_CONTAINER,
        "image": stage_image(plan.job, plan.stage),
        **resources_of(plan, _SUBMITTER_RESOURCES),
    }
    spec: KubeObject = {"restartPolicy": "Never", "containers": [container]}
    if kubernetes.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in kubernetes.image_pull_secrets]
    spec |= cpu_node_choice(plan.job.cluster)
    return {"metadata": {"labels": job_labels(plan.job, RAY_SUBMITTER)}, "spec": spec}


_HTTP_PORT = "http"
_PROBE_PERIOD_SECONDS = 5
_PROBE_TIMEOUT_SECONDS = 5
# Failures in a row: one long pause of a busy process must not make it load all weights again.
_LIVENESS_FAILURES = 6
_ENDPOINT_REMOVAL_SECONDS = 10
"""How long the proxies of a cluster may still send requests to a pod that is ending."""
_IMAGE_PULL_SECONDS = 900
"""For images of some ten gigabytes, before the server itself starts."""


def serving_service(plan: PlannedStage) -> KubeObject:
    """Return the Service in front of all replicas."""
    ports = [{"name": _HTTP_PORT, "port": SERVICE_PORT, "targetPort": _HTTP_PORT, "protocol": "TCP"}]
    spec = {"type": "ClusterIP", "selector": _serving_selector(plan), "ports": ports}
    return new_object(SERVICE, job_metadata(plan.job, plan.name, plan.stage.name), spec=spec)


def serving_deployment(plan: PlannedStage) -> KubeObject:
    """Return the Deployment of a serving stage."""
    serving = _serving_of(plan)
    template = pod_template(plan, ContainerOptions(plan.stage.name), restart_policy="Always")
    container = template["spec"]["containers"][0]
    container["ports"] = [{"name": _HTTP_PORT, "containerPort": serving_port(serving), "protocol": "TCP"}]
    container |= _probes(serving)
    if plan.stage.script is not None:
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(_ENDPOINT_REMOVAL_SECONDS)]}}}
    # A new version starts one pod more than `replicas` and never has less; a single server has no second GPU for that.
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    spec: KubeObject = {
        "replicas": serving.replicas,
        "selector": {"matchLabels": _serving_selector(plan)},
        "strategy": rolling if serving.replicas > 1 else {"type": "Recreate"},
        "progressDeadlineSeconds": serving.startup_seconds + _IMAGE_PULL_SECONDS,
        "revisionHistoryLimit": 2,
        "template": template,
    }
    return new_object(DEPLOYMENT, plan.object_metadata, spec=spec)


def _probes(serving: ServingSpec) -> KubeObject:
    timing = {"periodSeconds": _PROBE_PERIOD_SECONDS, "timeoutSeconds": _PROBE_TIMEOUT_SECONDS}
    starts = ceil(serving.startup_seconds / _PROBE_PERIOD_SECONDS)
    return {
        "startupProbe": {"httpGet": _http_get(serving.live)} | timing | {"failureThreshold": starts},
        "readinessProbe": {"httpGet": _http_get(serving.ready)} | timing | {"failureThreshold": 2},
        "livenessProbe": {"httpGet": _http_get(serving.live)} | timing | {"failureThreshold": _LIVENESS_FAILURES},
    }


def _http_get(path: str) -> KubeObject:
    return {"path": path, "port": _HTTP_PORT}


def _serving_selector(plan: PlannedStage) -> dict[str, str]:
    return {INSTANCE_LABEL: plan.job.name, COMPONENT_LABEL: plan.stage.name}


def _serving_of(plan: PlannedStage) -> ServingSpec:
    assert plan.stage.serving is not None
    return plan.stage.serving
