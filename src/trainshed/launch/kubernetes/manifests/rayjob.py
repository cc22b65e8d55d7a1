"""Training as a RayJob: the head is a node like the others, and our driver in it starts one actor per GPU."""

from __future__ import annotations

import copy
import shlex

from trainshed.errors import InputError
from trainshed.launch.kubernetes.kinds import RAY_JOB, Object, new_object
from trainshed.launch.kubernetes.manifests.environment import variables
from trainshed.launch.kubernetes.manifests.naming import ENTRY_FILE, JOB_FOLDER, UNPACKED_FOLDER, labels
from trainshed.launch.kubernetes.manifests.pod import (
    Container,
    Planned,
    content_mounts,
    entry_variables,
    image_of,
    pod_template,
)

_HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


def rayjob(plan: Planned) -> Object:
    """Return the object of a gang."""
    if plan.fabric.profile_script is not None:
        raise InputError(
            f"{plan.fabric.fabric} is set up by a script that must run before each rank, which Ray's actors do not do",
            where=plan.job.cluster.where("kubernetes.kind"),
            hint="write `kind: jobset`",
        )
    command = [plan.job.cluster.python, "-P", "-m", "trainshed", "ray-driver", plan.stage.name, "--job", JOB_FOLDER]
    gpus = str(plan.stage.gpus_per_node)
    head: Object = {
        "rayStartParams": {"dashboard-host": "0.0.0.0", "num-gpus": gpus},
        "template": _pod(plan, "ray-head", head=True),
    }
    cluster: Object = {"headGroupSpec": head}
    if plan.pods > 1:
        workers = {"replicas": plan.pods - 1, "minReplicas": plan.pods - 1, "maxReplicas": plan.pods - 1}
        worker: Object = {"groupName": "workers", "numOfHosts": 1} | workers
        worker |= {"rayStartParams": {"num-gpus": gpus}, "template": _pod(plan, "ray-worker", head=False)}
        cluster["workerGroupSpecs"] = [worker]
    spec: Object = {"suspend": True} if plan.where.suspended else {}
    spec |= {
        "submissionMode": "K8sJobMode",
        "entrypoint": shlex.join(command),
        "shutdownAfterJobFinishes": True,
        # How long the cluster, with its GPUs, stays after the end.
        "ttlSecondsAfterFinished": 0,
        # The driver starts the ranks again by itself, on the same pods.
        "backoffLimit": 0,
        "submitterPodTemplate": _submitter(plan),
        "rayClusterSpec": cluster,
    }
    if plan.job.cluster.limits.hours is not None:
        spec["activeDeadlineSeconds"] = int(plan.job.cluster.limits.hours * 3600)
    return new_object(RAY_JOB, plan.metadata, spec=spec)


def _pod(plan: Planned, name: str, *, head: bool) -> Object:
    # Actors get the fabric's variables from the container: nothing runs between Ray's processes and ours.
    extra = dict(plan.fabric.environment)
    if plan.fabric.library_path:
        extra["LD_LIBRARY_PATH"] = ":".join(plan.fabric.library_path)
    if plan.job.code is not None:
        extra["PYTHONPATH"] = UNPACKED_FOLDER
    template = copy.deepcopy(pod_template(plan, Container(name, extra)))
    spec, container = template["spec"], template["spec"]["containers"][0]
    del spec["restartPolicy"]  # KubeRay's to set
    del container["command"], container["args"]
    container["env"] = [each for each in container["env"] if each["name"] not in ("NNODES", "MASTER_PORT")]
    if head:
        container["ports"] = [{"name": key, "containerPort": port} for key, port in _HEAD_PORTS.items()]
    if plan.job.code is not None:
        spec["initContainers"] = [*spec.get("initContainers", ()), _unpacking(plan)]
    return template


def _unpacking(plan: Planned) -> Object:
    """A container that puts our code into its place before Ray starts."""
    code = plan.job.code.name if plan.job.code is not None else ""
    return {
        "name": "trainshed-code",
        "image": image_of(plan.job, plan.stage),
        "command": ["bash", f"{JOB_FOLDER}/{ENTRY_FILE}", "true"],
        "env": variables(entry_variables(plan.job.cluster) | {"TRAINSHED_CODE": code}),
        "volumeMounts": content_mounts(plan),
    }


def _submitter(plan: Planned) -> Object:
    """The pod that hands the entrypoint to the head; Ray's own one would not know the pull secrets."""
    kubernetes = plan.job.cluster.on_kubernetes
    container = {
        "name": "ray-job-submitter",
        "image": image_of(plan.job, plan.stage),
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
    }
    spec: Object = {"restartPolicy": "Never", "containers": [container]}
    if kubernetes.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in kubernetes.image_pull_secrets]
    if kubernetes.cpu_node_selector:
        spec["nodeSelector"] = dict(kubernetes.cpu_node_selector)
    return {"metadata": {"labels": labels(plan.job, "submitter")}, "spec": spec}
