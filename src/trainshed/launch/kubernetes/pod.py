"""The pod of a stage: the ConfigMaps it mounts, its variables, and one container with all that the job asks for.

The files of a job are sent in ConfigMaps that are named by a hash of their content. `kubectl apply` keeps a copy of
each object in an annotation of at most 256 KiB, so no ConfigMap holds more than fits there: files are spread over
several. The kubelet puts them together again in one folder. How our code is sent is in `code.py`.

The value of a variable that the user wrote is never changed, and a secret is only ever a reference.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainshed.catalog import find_machine
from trainshed.engines.launch import PROGRAMS
from trainshed.errors import InputError
from trainshed.launch.fabric import FabricSetup, PodRequirements
from trainshed.launch.job import DEFAULT_PORT, MASTER_PORT, SETUP_FILE, Job, ServingSpec, Stage
from trainshed.launch.kubernetes.code import CodeDelivery, code_delivery, code_label
from trainshed.launch.kubernetes.kinds import CONFIG_MAP, KubeObject, fit_name
from trainshed.launch.kubernetes.objects import (
    ENTRY_FILE,
    JOB_FOLDER,
    LOCAL_FOLDER,
    is_training,
    job_labels,
    job_metadata,
    new_object,
    stage_object_name,
)
from trainshed.launch.kubernetes.placement import PodPlacement, gpu_resource, pod_placement
from trainshed.launch.kubernetes.storage import pod_volumes, shared_memory_volume
from trainshed.recipe import Cluster

MAX_TEXT_BYTES = 200 * 1024
"""The size of the files in one ConfigMap, as JSON."""
MAX_FILE_BYTES = 1000 * 1024
"""The API server refuses a ConfigMap of more than 1 MiB."""
_CONFIG_MAP_KEY = re.compile(r"[-_a-zA-Z0-9][-._a-zA-Z0-9]{0,252}")


@dataclass(frozen=True)
class JobConfigMaps:
    """The ConfigMaps of a job's files, its code, and how pods mount them."""

    objects: tuple[KubeObject, ...]
    programs: tuple[KubeObject, ...]
    """Those of our programs among the files: nobody reads them in a rendered job."""
    volumes: tuple[KubeObject, ...]
    mounts: tuple[KubeObject, ...]
    code: CodeDelivery


def job_config_maps(job: Job) -> JobConfigMaps:
    """Return a job's files as ConfigMaps, and how its code is sent."""
    files = dict(job.files) | {ENTRY_FILE: entry_script()}
    programs = {name: text for name, text in files.items() if name.startswith(f"{PROGRAMS}/")}
    own_files = {name: text for name, text in files.items() if name not in programs}
    file_maps = list(_file_config_maps(job, own_files, "files"))
    program_maps = list(_file_config_maps(job, programs, PROGRAMS)) if programs else []
    sources = [source for _, source in (*file_maps, *program_maps)]
    volumes: list[KubeObject] = [{"name": "job", "projected": {"sources": sources}}]
    mounts: list[KubeObject] = [{"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}]
    code = code_delivery(job)
    if code.volume is not None and code.mount is not None:
        volumes.append(code.volume)
        mounts.append(code.mount)
    volumes.append({"name": "local", "emptyDir": {}})
    mounts.append({"name": "local", "mountPath": LOCAL_FOLDER})
    return JobConfigMaps(
        tuple(config_map for config_map, _ in file_maps),
        tuple(config_map for config_map, _ in program_maps),
        tuple(volumes),
        tuple(mounts),
        code,
    )


def entry_script() -> str:
    """Return the script that every container starts with."""
    return (Path(__file__).with_name(ENTRY_FILE)).read_text(encoding="utf-8")


def _file_config_maps(job: Job, files: Mapping[str, str], suffix: str) -> Iterator[tuple[KubeObject, KubeObject]]:
    """Yield ConfigMaps of files, each with the source that mounts it; a path that is not a valid key gets one."""
    digest = hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()[:10]
    for number, group in enumerate(_group_files(job, files)):
        name = fit_name(job.name, f"-{suffix}-{digest}" + (f"-{number}" if number else ""))
        paths = {_config_map_key(path, index): path for index, path in enumerate(group)}
        config_map = new_object(
            CONFIG_MAP,
            _labelled(job_metadata(job, name, "content"), code_label(job.code)),
            immutable=True,
            data={key: group[path] for key, path in paths.items()},
        )
        source: KubeObject = {"name": name}
        if any(key != path for key, path in paths.items()):
            source["items"] = [{"key": key, "path": path} for key, path in paths.items()]
        yield config_map, {"configMap": source}


def _config_map_key(path: str, index: int) -> str:
    name = path.removeprefix(f"{PROGRAMS}/")
    return name if _CONFIG_MAP_KEY.fullmatch(name) else f"path-{index}"


def _labelled(metadata: KubeObject, labels: Mapping[str, str]) -> KubeObject:
    return metadata | {"labels": metadata["labels"] | dict(labels)}


def _group_files(job: Job, files: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Distribute files over ConfigMaps; a large file has its own."""
    group: dict[str, str] = {}
    group_bytes = 0
    for name in sorted(files):
        size = len(json.dumps(files[name]))
        if size > MAX_FILE_BYTES:
            raise InputError(
                f"the job's file {name} has {size // 1024} KiB, and a ConfigMap holds 1 MiB",
                where=job.name,
                hint="put it into the store, or into the image",
            )
        if group and group_bytes + size > MAX_TEXT_BYTES:
            yield group
            group, group_bytes = {}, 0
        group[name] = files[name]
        group_bytes += size
    yield group


def escape_var_references(text: str) -> str:
    """Escape a text for the kubelet, which replaces `$(NAME)` by variables."""
    return re.sub(r"\$\$+|\$(?=\()", lambda match: match.group() * 2, text)


def env_vars(values: Mapping[str, str]) -> list[KubeObject]:
    """Return values as a container's `env`."""
    return [{"name": name, "value": escape_var_references(value)} for name, value in values.items()]


def env_var_from_label(name: str, label: str) -> KubeObject:
    """Return a variable whose value is a label of its pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}


def secret_env_vars(cluster: Cluster) -> list[KubeObject]:
    """Return the cluster's secrets as references to Kubernetes Secrets."""
    variables = []
    for name, reference in cluster.secrets.items():
        if reference.k8s is None:
            source = "an environment variable" if reference.env is not None else "a file"
            raise InputError(
                f"{source} of this machine is not there in a pod",
                where=cluster.where(f"secrets.{name}"),
                hint=f"kubectl create secret generic NAME --from-literal=KEY=…, then write {name}: {{k8s: NAME/KEY}}",
            )
        secret, _, key = reference.k8s.partition("/")
        variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return variables


def fabric_script(setup: FabricSetup, cluster: Cluster, stage: Stage) -> str | None:
    """Return the script that a node sources before its command, None if the fabric needs none.

    The vendor's script sets variables too; the cluster file's are exported again after it, so that they win.
    """
    lines = setup.shell_prologue()
    if not lines:
        return None
    written = cluster.environment | dict(stage.environment)
    exports_again = [f"export {name}={shlex.quote(value)}" for name, value in written.items()]
    head = [f"# {setup.name} {setup.version}: the network between nodes.".replace("  ", " ")]
    if setup.profile_script is not None:
        # Otherwise a missing script would only be a line in the log.
        head.append(f"[ -r {shlex.quote(setup.profile_script)} ] || return 1")
    return "\n".join([*head, *lines, *exports_again]) + "\n"


FINISHED_TTL_SECONDS = 3 * 24 * 3600
"""How long a finished object is kept for `status` and `logs`: over a weekend."""
_CPU_GRACE_SECONDS = 60
_EXIT_SECONDS = 30
"""Added to the time to drain: for a preStop hook before it, and for the process to end."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage with everything that its object is built from."""

    job: Job
    stage: Stage
    config_maps: JobConfigMaps
    fabric: FabricSetup
    name: str
    """Of its object."""
    placement: PodPlacement
    has_fabric_script: bool = False

    @property
    def mounts_code(self) -> bool:
        """Whether pods unpack our code: a foreign engine's image runs nothing of ours but files of the job."""
        return self.job.code is not None and self.stage.script is None

    @property
    def pods(self) -> int:
        """Number of pods: replicas of a server, nodes of a training with its spares, or parts of a CPU stage."""
        if self.stage.serving is not None:
            return self.stage.serving.replicas
        return self.stage.nodes + self.stage.spares if is_training(self.stage) else self.stage.parts

    @property
    def fabric_needs(self) -> PodRequirements:
        """What the fabric needs from a pod."""
        return self.fabric.kubernetes.for_job(self.name)

    @property
    def object_labels(self) -> dict[str, str]:
        """Labels of the object."""
        return job_labels(self.job, self.stage.name) | self.placement.labels

    @property
    def object_metadata(self) -> KubeObject:
        """Metadata of the object."""
        metadata: KubeObject = {"name": self.name, "namespace": self.job.cluster.on_kubernetes.namespace}
        metadata["labels"] = self.object_labels
        if self.placement.annotations:
            metadata["annotations"] = self.placement.annotations
        return metadata


@dataclass(frozen=True)
class ContainerOptions:
    """What the kinds of objects do differently with their container."""

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables."""
    env_references: Sequence[KubeObject] = ()
    """Variables that refer to a field, a label or a secret."""
    uploads: bool = True
    """Whether a sidecar copies checkpoints, where the stage asks for it: the first pod's does."""


def plan_stage(
    job: Job, stage: Stage, config_maps: JobConfigMaps, fabric: FabricSetup, *, has_fabric_script: bool
) -> PlannedStage:
    """Decide everything about a stage that does not depend on the kind of its object."""
    name = stage_object_name(job.name, stage.name, training=is_training(stage))
    return PlannedStage(job, stage, config_maps, fabric, name, pod_placement(job.cluster, stage), has_fabric_script)


def stage_command(job: Job, stage: Stage) -> list[str]:
    """Return what a node of a stage runs: the agent, our server, or the script of a foreign engine or server."""
    if stage.script is not None:
        return ["bash", f"{JOB_FOLDER}/{stage.script}"]
    if stage.serving is not None:
        port = ["--port", str(serving_port(stage.serving))]
        return [job.cluster.python, "-P", "-m", "trainshed", *stage.serving.words, *port]
    return [job.cluster.python, "-P", "-m", "trainshed", "agent", stage.name, "--job", JOB_FOLDER]


def serving_port(serving: ServingSpec) -> int:
    """Return the port of a server in its pod."""
    return serving.port or DEFAULT_PORT


def termination_grace_seconds(job: Job, stage: Stage) -> int:
    """Return how long a pod may take to end after TERM."""
    if stage.serving is not None:
        return stage.serving.drain_seconds + _EXIT_SECONDS
    return job.grace_seconds if is_training(stage) else _CPU_GRACE_SECONDS


def stage_image(job: Job, stage: Stage | None = None) -> str:
    """Return the image of a stage, the cluster's where it has none."""
    image = (stage.image if stage is not None else None) or job.cluster.image
    if image is None:
        raise InputError(
            "pods need an image, and the cluster file names none",
            where=job.cluster.where("image"),
            hint="write `image: REGISTRY/NAME@sha256:…`; `trainshed image build` makes one",
        )
    return image


def pod_template(plan: PlannedStage, container: ContainerOptions, *, restart_policy: str = "Never") -> KubeObject:
    """Return the template of a stage's pods."""
    cluster, needs = plan.job.cluster, plan.fabric_needs
    storage = pod_volumes(cluster, host_network=uses_host_network(plan))
    memory_volume, _ = shared_memory_volume(cluster.limits.shared_memory)
    annotations = (
        plan.placement.pod_annotations
        | storage.annotations
        | dict(needs.annotations)
        | scrape_annotations(plan.stage)
        | cluster.on_kubernetes.annotations
    )
    metadata: KubeObject = {"labels": job_labels(plan.job, plan.stage.name)}
    if annotations:
        metadata["annotations"] = annotations
    spec: KubeObject = {
        "restartPolicy": restart_policy,
        "terminationGracePeriodSeconds": termination_grace_seconds(plan.job, plan.stage),
        # Nothing in the pods uses the API server.
        "automountServiceAccountToken": False,
    }
    if cluster.service_account is not None:
        # Clouds give credentials for the account's own token, which they mount themselves.
        spec["serviceAccountName"] = cluster.service_account
        del spec["automountServiceAccountToken"]
    if cluster.on_kubernetes.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in cluster.on_kubernetes.image_pull_secrets]
    spec |= plan.placement.pod_spec
    if needs.tolerations:
        spec["tolerations"] = [*spec.get("tolerations", ()), *needs.tolerations]
    if uses_host_network(plan):
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if needs.resource_claims:
        spec["resourceClaims"] = list(needs.resource_claims)
    init_containers = [with_resources(plan, dict(needed)) for needed in needs.init_containers]
    if plan.stage.uploads and container.uploads:
        init_containers.append(upload_sidecar(plan))
    if init_containers:
        spec["initContainers"] = init_containers
    spec["containers"] = [main_container(plan, container)]
    spec["volumes"] = [*config_map_volumes(plan), *storage.volumes, memory_volume, *needs.volumes]
    return {"metadata": metadata, "spec": spec}


def uses_host_network(plan: PlannedStage) -> bool:
    """Whether pods use the node's network: only those of a training talk to other nodes.

    Two servers or CPU stages on one node would use the same port, and lack the identity of their service account.
    """
    wanted = plan.job.cluster.on_kubernetes.host_network or plan.fabric_needs.host_network
    return bool(wanted) and is_training(plan.stage)


UPLOAD_CONTAINER = "upload"
_UPLOAD_RESOURCES: KubeObject = {
    "requests": {"cpu": "500m", "memory": "1Gi"},
    "limits": {"cpu": "8", "memory": "8Gi"},
}
"""Sixteen files at a time, in pieces of some megabytes."""


def upload_sidecar(plan: PlannedStage) -> KubeObject:
    """Return the container that copies checkpoints to the bucket while the engine trains, in our own image.

    An init container that is always restarted is a sidecar: it starts before the engine and ends after it.
    """
    cluster, code = plan.job.cluster, plan.config_maps.code
    words = [cluster.python, "-P", "-m", "trainshed", "worker", "upload", "--follow", "--job", JOB_FOLDER]
    values = entry_env_vars(cluster) | dict(code.environment) | cluster.environment
    return {
        "name": UPLOAD_CONTAINER,
        "image": stage_image(plan.job),
        "restartPolicy": "Always",
        "command": ["bash", f"{JOB_FOLDER}/{ENTRY_FILE}"],
        "args": [escape_var_references(word) for word in words],
        "env": [*env_vars(values), *secret_env_vars(cluster)],
        **resources_of(plan, _UPLOAD_RESOURCES),
        "volumeMounts": [*plan.config_maps.mounts, *pod_volumes(cluster).mounts],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def scrape_annotations(stage: Stage) -> dict[str, str]:
    """Return what the usual configuration of Prometheus looks for at pods. Rank 0 is in the first pod of a training."""
    if stage.metrics_port is None:
        return {}
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(stage.metrics_port),
        "prometheus.io/path": "/metrics",
    }


def main_container(
    plan: PlannedStage, container: ContainerOptions, *, command: Sequence[str] | None = None
) -> KubeObject:
    """Return the container that does the work."""
    cluster, stage, needs = plan.job.cluster, plan.stage, plan.fabric_needs
    _, memory_mount = shared_memory_volume(cluster.limits.shared_memory)
    arguments = stage_command(plan.job, stage) if command is None else list(command)
    body: KubeObject = {
        "name": container.name,
        "image": stage_image(plan.job, stage),
        "command": ["bash", f"{JOB_FOLDER}/{ENTRY_FILE}"],
        "args": [escape_var_references(word) for word in arguments],
        "env": container_env(plan, container),
        **resources_of(plan, container_resources(plan)),
        "volumeMounts": [*config_map_mounts(plan), *pod_volumes(cluster).mounts, memory_mount, *needs.mounts],
        # The last lines of a container that failed are kept with its status: they say why.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if needs.security_context:
        body["securityContext"] = needs.security_context
    return body


def container_env(plan: PlannedStage, container: ContainerOptions) -> list[KubeObject]:
    """Return the variables of the container: ours, the cluster's, the stage's, and references to secrets."""
    cluster, stage = plan.job.cluster, plan.stage
    values = entry_env_vars(cluster)
    if plan.mounts_code:
        values |= plan.config_maps.code.environment
    if is_training(stage):
        values |= {"NNODES": str(stage.nodes), "MASTER_PORT": str(MASTER_PORT)}
    if stage.serving is not None and stage.script is not None:
        values["TRAINSHED_PORT"] = str(serving_port(stage.serving))
    if plan.has_fabric_script:
        values["TRAINSHED_FABRIC"] = f"{JOB_FOLDER}/{fabric_script_file(stage)}"
    values |= dict(container.env) | cluster.environment | dict(stage.environment)
    return [*env_vars(values), *container.env_references, *secret_env_vars(cluster)]


def entry_env_vars(cluster: Cluster) -> dict[str, str]:
    """Return the variables that `entry.sh` reads in every container."""
    variables = {"TRAINSHED_PYTHON": cluster.python}
    return variables | ({"TRAINSHED_SETUP": f"{JOB_FOLDER}/{SETUP_FILE}"} if cluster.setup else {})


def container_resources(plan: PlannedStage) -> KubeObject:
    """Return requests and limits: every pod has both, since a quota refuses pods that lack one.

    A stage that asks for CPUs may use twice as many for a while. A stage with GPUs asks for three quarters of its share
    of the node by default: the rest is for the node's own pods and the sidecars. It may use the whole share.
    """
    cluster, stage = plan.job.cluster, plan.stage
    devices: KubeObject = {gpu_resource(cluster): str(stage.gpus_per_node)} if stage.gpus_per_node else {}
    devices |= {name: str(count) for name, count in plan.fabric_needs.resources.items()}
    if stage.gpus_per_node and cluster.gpu_machine is not None:
        machine = find_machine(cluster.gpu_machine)
        share = min(1.0, stage.gpus_per_node / machine.gpus)
        cpus = stage.cpus or max(1, int(machine.cpus * share * _REQUESTED_SHARE))
        most_cpus = max(cpus, int(machine.cpus * share))
        memory = stage.memory or f"{int(machine.memory_gib * share * _REQUESTED_SHARE)}Gi"
        most_memory = stage.memory or f"{int(machine.memory_gib * share)}Gi"
    else:
        cpus = stage.cpus or cluster.limits.cpu_stage_cpus
        memory = most_memory = stage.memory or cluster.limits.cpu_stage_memory
        most_cpus = 2 * cpus
    resources: KubeObject = {
        "requests": {"cpu": str(cpus), "memory": memory} | devices,
        "limits": {"cpu": str(most_cpus), "memory": most_memory} | devices,
    }
    return resources | ({"claims": list(plan.fabric_needs.claims)} if plan.fabric_needs.claims else {})


_REQUESTED_SHARE = 0.75
_SETUP_RESOURCES: KubeObject = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "4", "memory": "4Gi"},
}
"""Of init containers that copy files and end."""
_SIDECAR_RESOURCES: KubeObject = {
    "requests": {"cpu": "1", "memory": "1Gi"},
    "limits": {"cpu": "32", "memory": "64Gi"},
}
"""Of a fabric's daemon: its vendor states no figures, so the limits are only there for quotas."""


def with_resources(plan: PlannedStage, container: KubeObject) -> KubeObject:
    """Return an init container that has requests and limits."""
    defaults = _SIDECAR_RESOURCES if container.get("restartPolicy") == "Always" else _SETUP_RESOURCES
    return container if "resources" in container else container | resources_of(plan, defaults)


def resources_of(plan: PlannedStage, resources: KubeObject) -> KubeObject:
    """Return a container's `resources`, without CPUs and memory where the queue of its pods covers devices alone.

    Kueue admits nothing that asks for what its queue does not cover.
    """
    if plan.job.cluster.on_kubernetes.requests == "devices" and plan.stage.gpus_per_node:
        devices = {
            kind: {name: count for name, count in amounts.items() if name not in ("cpu", "memory")}
            for kind, amounts in resources.items()
            if kind != "claims"
        }
        claims = {"claims": resources["claims"]} if "claims" in resources else {}
        resources = {kind: amounts for kind, amounts in devices.items() if amounts} | claims
    return {"resources": resources} if resources else {}


def fabric_script_file(stage: Stage) -> str:
    """Return the name of the file that a node of a stage sources."""
    return f"fabric-{stage.name}.sh"


def config_map_volumes(plan: PlannedStage) -> list[KubeObject]:
    """Return the volumes of the job's files, and of our code where pods need it."""
    has_code = plan.mounts_code or plan.stage.uploads
    return [volume for volume in plan.config_maps.volumes if has_code or volume["name"] != "code"]


def config_map_mounts(plan: PlannedStage) -> list[KubeObject]:
    """Return the mounts of the job's files, and of our code where pods need it."""
    return [mount for mount in plan.config_maps.mounts if plan.mounts_code or mount["name"] != "code"]
