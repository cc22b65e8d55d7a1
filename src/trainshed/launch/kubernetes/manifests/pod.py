"""The pod of a stage: one container, with everything the cluster file, the fabric and the job ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainshed.errors import InputError
from trainshed.launch.fabric import FabricSetup, PodNeeds
from trainshed.launch.job import DEFAULT_PORT, Job, Serving, Stage
from trainshed.launch.kubernetes.kinds import Object
from trainshed.launch.kubernetes.manifests.content import Content
from trainshed.launch.kubernetes.manifests.environment import literal, secret_variables, variables
from trainshed.launch.kubernetes.manifests.naming import (
    ENTRY_FILE,
    JOB_FOLDER,
    is_training,
    labels,
    stage_name,
)
from trainshed.launch.kubernetes.manifests.placement import Placement, gpu_resource, placement
from trainshed.launch.kubernetes.manifests.volumes import pod_storage, shared_memory
from trainshed.launch.site_setup import SETUP_FILE
from trainshed.recipe import Cluster

MASTER_PORT = 29500
KEPT_SECONDS = 3 * 24 * 3600
"""How long a finished object stays for `status` and `logs`: over a weekend."""
_CPU_GRACE_SECONDS = 60
_EXIT_SECONDS = 30
"""Besides the time to drain: for a hook before it and the end of the process."""


@dataclass(frozen=True)
class Planned:
    """A stage with all that its object is made of."""

    job: Job
    stage: Stage
    content: Content
    fabric: FabricSetup
    name: str
    """Of its object."""
    where: Placement
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
    def needs(self) -> PodNeeds:
        """What the fabric asks of a pod."""
        return self.fabric.kubernetes.for_job(self.name)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the object."""
        return labels(self.job, self.stage.name) | self.where.labels

    @property
    def metadata(self) -> Object:
        """Metadata of the object."""
        found: Object = {"name": self.name, "namespace": self.job.cluster.on_kubernetes.namespace}
        found["labels"] = self.labels
        if self.where.annotations:
            found["annotations"] = self.where.annotations
        return found


@dataclass(frozen=True)
class Container:
    """What the kinds of objects do differently with their container."""

    name: str
    extra: Mapping[str, str] = field(default_factory=dict)
    """Further variables."""
    references: Sequence[Object] = ()
    """Variables whose value is taken from elsewhere."""


def planned(job: Job, stage: Stage, content: Content, fabric: FabricSetup, *, has_fabric_script: bool) -> Planned:
    """Decide everything about a stage that does not depend on the kind of its object."""
    name = stage_name(job.name, stage.name, training=is_training(stage))
    return Planned(job, stage, content, fabric, name, placement(job.cluster, stage), has_fabric_script)


def stage_command(job: Job, stage: Stage) -> list[str]:
    """Return what a node of a stage runs: the agent, our server, or the script of a foreign engine or server."""
    if stage.script is not None:
        return ["bash", f"{JOB_FOLDER}/{stage.script}"]
    if stage.serving is not None:
        port = ["--port", str(serving_port(stage.serving))]
        return [job.cluster.python, "-P", "-m", "trainshed", *stage.serving.words, *port]
    return [job.cluster.python, "-P", "-m", "trainshed", "agent", stage.name, "--job", JOB_FOLDER]


def serving_port(serving: Serving) -> int:
    """Return the port of a server in its pod."""
    return serving.port or DEFAULT_PORT


def grace_seconds(job: Job, stage: Stage) -> int:
    """Return how long a pod may take to end after TERM."""
    if stage.serving is not None:
        return stage.serving.drain_seconds + _EXIT_SECONDS
    return job.grace_seconds if is_training(stage) else _CPU_GRACE_SECONDS


def image_of(job: Job, stage: Stage | None = None) -> str:
    """Return the image of a stage, the cluster's where it has none."""
    image = (stage.image if stage is not None else None) or job.cluster.image
    if image is None:
        raise InputError(
            "pods need an image, and the cluster file names none",
            where=job.cluster.where("image"),
            hint="write `image: REGISTRY/NAME@sha256:…`; `trainshed image build` makes one",
        )
    return image


def pod_template(plan: Planned, container: Container, *, restart_policy: str = "Never") -> Object:
    """Return the template of a stage's pods."""
    cluster, needs = plan.job.cluster, plan.needs
    storage = pod_storage(cluster)
    memory_volume, _ = shared_memory(cluster.limits.shared_memory)
    annotations = (
        plan.where.pod_annotations | storage.annotations | dict(needs.annotations) | cluster.on_kubernetes.annotations
    )
    metadata: Object = {"labels": labels(plan.job, plan.stage.name)}
    if annotations:
        metadata["annotations"] = annotations
    spec: Object = {
        "restartPolicy": restart_policy,
        "terminationGracePeriodSeconds": grace_seconds(plan.job, plan.stage),
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
    spec["volumes"] = [*content_volumes(plan), *storage.volumes, memory_volume, *needs.volumes]
    return {"metadata": metadata, "spec": spec}


def main_container(plan: Planned, container: Container, *, command: Sequence[str] | None = None) -> Object:
    """Return the container that does the work."""
    cluster, stage, needs = plan.job.cluster, plan.stage, plan.needs
    _, memory_mount = shared_memory(cluster.limits.shared_memory)
    words = stage_command(plan.job, stage) if command is None else list(command)
    found: Object = {
        "name": container.name,
        "image": image_of(plan.job, stage),
        "command": ["bash", f"{JOB_FOLDER}/{ENTRY_FILE}"],
        "args": [literal(word) for word in words],
        "env": environment(plan, container),
        "resources": resources(plan),
        "volumeMounts": [*content_mounts(plan), *pod_storage(cluster).mounts, memory_mount, *needs.mounts],
        # The last lines of a container that failed are kept with its status: they say why.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if needs.security_context:
        found["securityContext"] = needs.security_context
    return found


def environment(plan: Planned, container: Container) -> list[Object]:
    """Return the variables of the container: ours, the cluster's, the stage's, and references to secrets."""
    cluster, stage = plan.job.cluster, plan.stage
    own = entry_variables(cluster)
    if plan.job.code is not None and plan.carries_code:
        own["TRAINSHED_CODE"] = plan.job.code.name
    if is_training(stage):
        own |= {"NNODES": str(stage.nodes), "MASTER_PORT": str(MASTER_PORT)}
    if stage.serving is not None and stage.script is not None:
        own["TRAINSHED_PORT"] = str(serving_port(stage.serving))
    if plan.has_fabric_script:
        own["TRAINSHED_FABRIC"] = f"{JOB_FOLDER}/{fabric_file(stage)}"
    values = own | dict(container.extra) | cluster.environment | dict(stage.environment)
    return [*variables(values), *container.references, *secret_variables(cluster)]


def entry_variables(cluster: Cluster) -> dict[str, str]:
    """Return what every container tells the script that it starts with."""
    found = {"TRAINSHED_PYTHON": cluster.python}
    return found | ({"TRAINSHED_SETUP": f"{JOB_FOLDER}/{SETUP_FILE}"} if cluster.setup else {})


def resources(plan: Planned) -> Object:
    """Return requests and limits: devices are asked for in both, memory too, processors only as a request."""
    cluster, stage = plan.job.cluster, plan.stage
    limits = cluster.limits
    devices: Object = {gpu_resource(cluster): str(stage.gpus_per_node)} if stage.gpus_per_node else {}
    devices |= {name: str(count) for name, count in plan.needs.resources.items()}
    among_gpus = is_training(stage) or stage.gpus_per_node > 0
    cpus = stage.cpus or (None if among_gpus else limits.cpu_stage_cpus)
    memory = stage.memory or (None if among_gpus else limits.cpu_stage_memory)
    bounded: Object = devices | ({"memory": memory} if memory is not None else {})
    requests: Object = ({"cpu": str(cpus)} if cpus is not None else {}) | bounded
    found: Object = {"requests": requests, "limits": bounded} if requests else {}
    return found | ({"claims": list(plan.needs.claims)} if plan.needs.claims else {})


def fabric_file(stage: Stage) -> str:
    """Return the name of the file that a node of a stage sources."""
    return f"fabric-{stage.name}.sh"


def content_volumes(plan: Planned) -> list[Object]:
    """Return the volumes of the job's files, and of our code where pods need it."""
    return [each for each in plan.content.volumes if plan.carries_code or each["name"] != "code"]


def content_mounts(plan: Planned) -> list[Object]:
    """Return where they are mounted."""
    return [each for each in plan.content.mounts if plan.carries_code or each["name"] != "code"]
