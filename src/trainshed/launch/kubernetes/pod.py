"""The pod of a stage: the ConfigMaps it mounts, its variables, and one container with all that the job asks for.

The files of a job and our code travel in ConfigMaps that are named by their content. `kubectl apply` keeps a copy
of each object in an annotation of at most 256 KiB, so no ConfigMap holds more than fits there: files are spread
over several, and the code is split into pieces. The kubelet puts them together again in one folder.

The value of a variable that the user wrote is never changed, and a secret is only ever a reference.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainshed.errors import InputError
from trainshed.launch.fabric import FabricSetup, PodRequirements
from trainshed.launch.job import DEFAULT_PORT, SETUP_FILE, CodeArchive, Job, ServingSpec, Stage
from trainshed.launch.kubernetes.objects import (
    CODE_FOLDER,
    CONFIG_MAP,
    ENTRY_FILE,
    JOB_FOLDER,
    LOCAL_FOLDER,
    KubeObject,
    fit_name,
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
"""Of files in one ConfigMap, as JSON writes them."""
CODE_PIECE_BYTES = 150 * 1024
"""Of code in one ConfigMap: base64 makes 200 KiB of it."""
MAX_CODE_BYTES = 900 * 1024
MAX_FILE_BYTES = 1000 * 1024
"""The API server refuses a ConfigMap of more than 1 MiB."""
_CONFIG_MAP_KEY = re.compile(r"[-_a-zA-Z0-9][-._a-zA-Z0-9]{0,252}")
_BAKE_IN_HINT = "bake it into the image (`trainshed image build`)"


@dataclass(frozen=True)
class JobConfigMaps:
    """ConfigMaps, and how pods mount them."""

    objects: tuple[KubeObject, ...]
    volumes: tuple[KubeObject, ...]
    mounts: tuple[KubeObject, ...]


def job_config_maps(job: Job) -> JobConfigMaps:
    """Return a job's files and code as ConfigMaps."""
    files = dict(job.files) | {ENTRY_FILE: entry_script()}
    dealt = list(_file_config_maps(job, files))
    objects = [found for found, _ in dealt]
    volumes: list[KubeObject] = [{"name": "job", "projected": {"sources": [source for _, source in dealt]}}]
    mounts: list[KubeObject] = [{"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}]
    if job.code is not None:
        pieces = list(_code_config_maps(job, job.code))
        sources = [{"configMap": {"name": piece["metadata"]["name"]}} for piece in pieces]
        volumes.append({"name": "code", "projected": {"sources": sources}})
        mounts.append({"name": "code", "mountPath": CODE_FOLDER, "readOnly": True})
        objects += pieces
    volumes.append({"name": "local", "emptyDir": {}})
    mounts.append({"name": "local", "mountPath": LOCAL_FOLDER})
    return JobConfigMaps(tuple(objects), tuple(volumes), tuple(mounts))


def entry_script() -> str:
    """Return what every container starts with."""
    return (Path(__file__).with_name(ENTRY_FILE)).read_text(encoding="utf-8")


def _file_config_maps(job: Job, files: Mapping[str, str]) -> Iterator[tuple[KubeObject, KubeObject]]:
    """ConfigMaps of files, each with the source that mounts it: a path in folders has a key that stands for it."""
    mark = hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()[:10]
    for number, dealt in enumerate(_group_files(job, files)):
        name = fit_name(job.name, f"-files-{mark}" + (f"-{number}" if number else ""))
        paths = {path if _CONFIG_MAP_KEY.fullmatch(path) else f"path-{place}": path for place, path in enumerate(dealt)}
        found = new_object(
            CONFIG_MAP,
            job_metadata(job, name, "content"),
            immutable=True,
            data={key: dealt[path] for key, path in paths.items()},
        )
        source: KubeObject = {"name": name}
        if any(key != path for key, path in paths.items()):
            source["items"] = [{"key": key, "path": path} for key, path in paths.items()]
        yield found, {"configMap": source}


def _group_files(job: Job, files: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Deal files among ConfigMaps; a large one has its own."""
    group: dict[str, str] = {}
    taken = 0
    for name in sorted(files):
        size = len(json.dumps(files[name]))
        if size > MAX_FILE_BYTES:
            raise InputError(
                f"the job's file {name} has {size // 1024} KiB, and a ConfigMap holds 1 MiB",
                where=job.name,
                hint="put it into the store, or into the image",
            )
        if group and taken + size > MAX_TEXT_BYTES:
            yield group
            group, taken = {}, 0
        group[name] = files[name]
        taken += size
    yield group


def _code_config_maps(job: Job, code: CodeArchive) -> Iterator[KubeObject]:
    if len(code.data) > MAX_CODE_BYTES:
        raise InputError(
            f"the code has {len(code.data) // 1024} KiB, and ConfigMaps carry {MAX_CODE_BYTES // 1024} at most",
            where=job.cluster.where("image"),
            hint=_BAKE_IN_HINT,
        )
    for number, start in enumerate(range(0, len(code.data), CODE_PIECE_BYTES)):
        piece = base64.b64encode(code.data[start : start + CODE_PIECE_BYTES]).decode()
        yield new_object(
            CONFIG_MAP,
            job_metadata(job, fit_name(job.name, f"-code-{code.sha256[:10]}-{number}"), "content"),
            immutable=True,
            binaryData={f"piece-{number:03d}": piece},
        )


def escape_var_references(text: str) -> str:
    """Write a text so that the kubelet, which puts variables in the place of `$(NAME)`, leaves it as it is."""
    return re.sub(r"\$\$+|\$(?=\()", lambda found: found.group() * 2, text)


def env_vars(values: Mapping[str, str]) -> list[KubeObject]:
    """Return values as a container's `env`."""
    return [{"name": name, "value": escape_var_references(value)} for name, value in values.items()]


def env_var_from_label(name: str, label: str) -> KubeObject:
    """Return a variable that has the value of a label of its pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}


def secret_env_vars(cluster: Cluster) -> list[KubeObject]:
    """Return the cluster's secrets as references to Kubernetes' own."""
    found = []
    for name, reference in cluster.secrets.items():
        if reference.k8s is None:
            written = "an environment variable" if reference.env is not None else "a file"
            raise InputError(
                f"{written} of this machine is not there in a pod",
                where=cluster.where(f"secrets.{name}"),
                hint=f"kubectl create secret generic NAME --from-literal=KEY=…, then write {name}: {{k8s: NAME/KEY}}",
            )
        secret, _, key = reference.k8s.partition("/")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return found


def fabric_script(setup: FabricSetup, cluster: Cluster, stage: Stage) -> str | None:
    """Return what a node sources before its command, None where the fabric asks for nothing.

    The vendor's script sets variables too; what the cluster file says is said once more behind it, so that it holds.
    """
    lines = setup.shell_prologue()
    if not lines:
        return None
    written = cluster.environment | dict(stage.environment)
    again = [f"export {name}={shlex.quote(value)}" for name, value in written.items()]
    head = [f"# {setup.name} {setup.version}: the network between nodes.".replace("  ", " ")]
    if setup.profile_script is not None:
        # Sourcing what is not there would only be a line in the log.
        head.append(f"[ -r {shlex.quote(setup.profile_script)} ] || return 1")
    return "\n".join([*head, *lines, *again]) + "\n"


MASTER_PORT = 29500
FINISHED_TTL_SECONDS = 3 * 24 * 3600
"""How long a finished object stays for `status` and `logs`: over a weekend."""
_CPU_GRACE_SECONDS = 60
_EXIT_SECONDS = 30
"""Besides the time to drain: for a hook before it and the end of the process."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage with all that its object is made of."""

    job: Job
    stage: Stage
    content: JobConfigMaps
    fabric: FabricSetup
    name: str
    """Of its object."""
    where: PodPlacement
    has_fabric_script: bool = False

    @property
    def carries_code(self) -> bool:
        """Whether pods unpack our code; a foreign engine's image does without, unless Ray starts it."""
        by_ray = is_training(self.stage) and self.job.cluster.on_kubernetes.kind == "rayjob"
        return self.job.code is not None and (self.stage.script is None or by_ray)

    @property
    def pods(self) -> int:
        """How many there are: replicas of a server, a gang's nodes with its spares, or the parts of a CPU stage."""
        if self.stage.serving is not None:
            return self.stage.serving.replicas
        return self.stage.nodes + self.stage.spares if is_training(self.stage) else self.stage.parts

    @property
    def needs(self) -> PodRequirements:
        """What the fabric asks of a pod."""
        return self.fabric.kubernetes.for_job(self.name)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the object."""
        return job_labels(self.job, self.stage.name) | self.where.labels

    @property
    def metadata(self) -> KubeObject:
        """Metadata of the object."""
        found: KubeObject = {"name": self.name, "namespace": self.job.cluster.on_kubernetes.namespace}
        found["labels"] = self.labels
        if self.where.annotations:
            found["annotations"] = self.where.annotations
        return found


@dataclass(frozen=True)
class ContainerOptions:
    """What the kinds of objects do differently with their container."""

    name: str
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further variables."""
    references: Sequence[KubeObject] = ()
    """Variables whose value is taken from elsewhere."""


def plan_stage(
    job: Job, stage: Stage, content: JobConfigMaps, fabric: FabricSetup, *, has_fabric_script: bool
) -> PlannedStage:
    """Decide everything about a stage that does not depend on the kind of its object."""
    name = stage_object_name(job.name, stage.name, training=is_training(stage))
    return PlannedStage(job, stage, content, fabric, name, pod_placement(job.cluster, stage), has_fabric_script)


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
    cluster, needs = plan.job.cluster, plan.needs
    storage = pod_volumes(cluster)
    memory_volume, _ = shared_memory_volume(cluster.limits.shared_memory)
    annotations = (
        plan.where.pod_annotations | storage.annotations | dict(needs.annotations) | cluster.on_kubernetes.annotations
    )
    metadata: KubeObject = {"labels": job_labels(plan.job, plan.stage.name)}
    if annotations:
        metadata["annotations"] = annotations
    spec: KubeObject = {
        "restartPolicy": restart_policy,
        "terminationGracePeriodSeconds": termination_grace_seconds(plan.job, plan.stage),
        # Nothing in the pods asks the API for anything.
        "automountServiceAccountToken": False,
    }
    if cluster.service_account is not None:
        # Clouds hand out credentials by the account's own token, which they mount themselves.
        spec["serviceAccountName"] = cluster.service_account
        del spec["automountServiceAccountToken"]
    if cluster.on_kubernetes.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in cluster.on_kubernetes.image_pull_secrets]
    spec |= plan.where.pod
    if needs.tolerations:
        spec["tolerations"] = [*spec.get("tolerations", ()), *needs.tolerations]
    # A server speaks to no other node, and two on one node would want the same port.
    if (cluster.on_kubernetes.host_network or needs.host_network) and plan.stage.serving is None:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if needs.resource_claims:
        spec["resourceClaims"] = list(needs.resource_claims)
    if needs.init_containers:
        spec["initContainers"] = list(needs.init_containers)
    spec["containers"] = [main_container(plan, container)]
    spec["volumes"] = [*config_map_volumes(plan), *storage.volumes, memory_volume, *needs.volumes]
    return {"metadata": metadata, "spec": spec}


def main_container(
    plan: PlannedStage, container: ContainerOptions, *, command: Sequence[str] | None = None
) -> KubeObject:
    """Return the container that does the work."""
    cluster, stage, needs = plan.job.cluster, plan.stage, plan.needs
    _, memory_mount = shared_memory_volume(cluster.limits.shared_memory)
    words = stage_command(plan.job, stage) if command is None else list(command)
    found: KubeObject = {
        "name": container.name,
        "image": stage_image(plan.job, stage),
        "command": ["bash", f"{JOB_FOLDER}/{ENTRY_FILE}"],
        "args": [escape_var_references(word) for word in words],
        "env": container_env(plan, container),
        "resources": container_resources(plan),
        "volumeMounts": [*config_map_mounts(plan), *pod_volumes(cluster).mounts, memory_mount, *needs.mounts],
        # The last lines of a container that failed are kept with its status: they say why.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if needs.security_context:
        found["securityContext"] = needs.security_context
    return found


def container_env(plan: PlannedStage, container: ContainerOptions) -> list[KubeObject]:
    """Return the variables of the container: ours, the cluster's, the stage's, and references to secrets."""
    cluster, stage = plan.job.cluster, plan.stage
    own = entry_env_vars(cluster)
    if plan.job.code is not None and plan.carries_code:
        own["TRAINSHED_CODE"] = plan.job.code.name
    if is_training(stage):
        own |= {"NNODES": str(stage.nodes), "MASTER_PORT": str(MASTER_PORT)}
    if stage.serving is not None and stage.script is not None:
        own["TRAINSHED_PORT"] = str(serving_port(stage.serving))
    if plan.has_fabric_script:
        own["TRAINSHED_FABRIC"] = f"{JOB_FOLDER}/{fabric_script_file(stage)}"
    values = own | dict(container.extra) | cluster.environment | dict(stage.environment)
    return [*env_vars(values), *container.references, *secret_env_vars(cluster)]


def entry_env_vars(cluster: Cluster) -> dict[str, str]:
    """Return what every container tells the script that it starts with."""
    found = {"TRAINSHED_PYTHON": cluster.python}
    return found | ({"TRAINSHED_SETUP": f"{JOB_FOLDER}/{SETUP_FILE}"} if cluster.setup else {})


def container_resources(plan: PlannedStage) -> KubeObject:
    """Return requests and limits: devices are asked for in both, memory too, processors only as a request."""
    cluster, stage = plan.job.cluster, plan.stage
    limits = cluster.limits
    devices: KubeObject = {gpu_resource(cluster): str(stage.gpus_per_node)} if stage.gpus_per_node else {}
    devices |= {name: str(count) for name, count in plan.needs.resources.items()}
    among_gpus = is_training(stage) or stage.gpus_per_node > 0
    cpus = stage.cpus or (None if among_gpus else limits.cpu_stage_cpus)
    memory = stage.memory or (None if among_gpus else limits.cpu_stage_memory)
    bounded: KubeObject = devices | ({"memory": memory} if memory is not None else {})
    requests: KubeObject = ({"cpu": str(cpus)} if cpus is not None else {}) | bounded
    found: KubeObject = {"requests": requests, "limits": bounded} if requests else {}
    return found | ({"claims": list(plan.needs.claims)} if plan.needs.claims else {})


def fabric_script_file(stage: Stage) -> str:
    """Return the name of the file that a node of a stage sources."""
    return f"fabric-{stage.name}.sh"


def config_map_volumes(plan: PlannedStage) -> list[KubeObject]:
    """Return the volumes of the job's files, and of our code where pods need it."""
    return [each for each in plan.content.volumes if plan.carries_code or each["name"] != "code"]


def config_map_mounts(plan: PlannedStage) -> list[KubeObject]:
    """Return where they are mounted."""
    return [each for each in plan.content.mounts if plan.carries_code or each["name"] != "code"]
