"""What each target needs besides: the sections `slurm`, `kubernetes` and `ray` of a cluster file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, Tag

from trainshed.recipe.cluster.places import MountPath
from trainshed.recipe.section import URL_PATTERN, PositiveInt, Problem, Quantity, Section, Text, by_shape

Words = Annotated[tuple[Text, ...], Field(strict=False)]
# A name in a domain, as device plugins offer it, or pages of a size, which Kubernetes itself offers.
_DEVICE = re.compile(r"(?=.{1,253}/)[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_PAGES = re.compile(r"hugepages-[0-9]+[KMG]i")
DeviceCount = Annotated[
    Annotated[PositiveInt, Tag("(a number)")] | Annotated[Quantity, Tag("(text)")],
    by_shape,
]
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")


class Slurm(Section):
    """How jobs are given to Slurm."""

    partition: Text | None = Field(None, description="Partition of training")
    cpu_partition: Text | None = Field(None, description="Partition of stages without GPUs; left out: `partition`")
    account: Text | None = Field(None, description="Account that is charged")
    qos: Text | None = Field(None, description="Quality of service")
    constraint: Text | None = Field(None, description="Features nodes must have")
    login: Text | None = Field(
        None, description="Node to submit from by the user's own ssh; left out: Slurm's programs are here"
    )
    gpus: Text | None = Field(
        "gpu",
        description="How GPUs are asked for: the name in --gres, with its type where the cluster wants it; "
        "null: none (nodes are whole)",
        examples=["gpu:h100"],
    )
    container: Literal["pyxis", "none"] = Field("none", description="pyxis: in the cluster's image; none: in `venv`")
    venv: MountPath | None = Field(None, description="A Python environment on the shared disk that jobs run in")
    exclusive: bool = Field(True, description="Take whole nodes for training")
    port: PositiveInt | None = Field(None, description="Port of rank 0; left out: one that follows from the job's id")
    options: Words = Field((), description="Further #SBATCH options", examples=[["--mail-type=END"]])


class Toleration(Section):
    """A taint that pods put up with, in Kubernetes' own words."""

    key: Text | None = Field(None, description="The taint's key")
    operator: Literal["Exists", "Equal"] = Field("Exists", description="Exists, or Equal to `value`")
    value: Text | None = Field(None, description="The taint's value")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="The taint's effect"
    )


class Topology(Section):
    """Kueue's topology-aware placement: nodes of one gang lie close together."""

    level: Text = Field(description="Label of the level", examples=["cloud.google.com/gce-topology-block"])
    required: bool = Field(False, description="Wait rather than be placed apart")


class Kubernetes(Section):
    """How jobs are given to Kubernetes."""

    kind: Literal["jobset", "pytorchjob", "trainjob", "rayjob", "job"] = Field(
        "jobset",
        description="The object that training becomes; job: Kubernetes' own, where no other is installed",
    )
    context: Text | None = Field(None, description="Context of kubeconfig; left out: the current one")
    namespace: Text = Field("default", description="Namespace")
    queue: Text | None = Field(None, description="Kueue's LocalQueue")
    cpu_queue: Text | None = Field(None, description="LocalQueue of stages without GPUs; left out: none")
    priority: Text | None = Field(None, description="Kueue's WorkloadPriorityClass")
    topology: Topology | None = Field(None, description="Place a gang's nodes close together (needs `queue`)")
    runtime: Text = Field("torch-distributed", description="The ClusterTrainingRuntime of a TrainJob")
    host_network: bool | None = Field(None, description="Use the node's network; left out: what the fabric needs")
    resources: dict[str, DeviceCount] | None = Field(
        None,
        description="Devices of the network that each pod of several nodes asks for, in place of the fabric's own "
        "(`rdma/ib`, `vpc.amazonaws.com/efa`); {}: none",
        examples=[{"rdma/hca_shared_devices_a": 1}],
    )
    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels nodes must have")
    cpu_node_selector: dict[str, str] = Field(default_factory=dict, description="The same, for stages without GPUs")
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False)] = Field((), description="Taints put up with")
    avoid_nodes: Words = Field((), description="Nodes that no pod may run on, by hostname")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels of every object and pod")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations of every pod")
    image_pull_secrets: Words = Field((), description="Secrets to pull images with")
    pre_pull: bool = Field(False, description="A DaemonSet that pulls the image onto every GPU node beforehand")

    def problems(self) -> Iterator[Problem]:
        """Placement is Kueue's work; devices have the names that plugins offer."""
        if self.topology is not None and self.queue is None:
            yield Problem(("topology",), "is Kueue's work, and there is no queue", "write `queue: NAME`")
        for name, count in (self.resources or {}).items():
            path = ("resources", name)
            if name in _GPUS:
                yield Problem(path, "GPUs are asked for by the `machine`", "delete it")
            elif name in ("cpu", "memory", "ephemeral-storage"):
                yield Problem(path, f"`{name}` is no device of the network", "delete it")
            elif not _DEVICE.fullmatch(name) and not _PAGES.fullmatch(name):
                yield Problem(
                    path,
                    f"`{name}` is no name of a device",
                    "write what `kubectl get nodes -o yaml` lists below `allocatable`, for example rdma/ib",
                )
            elif isinstance(count, str) and _DEVICE.fullmatch(name):
                yield Problem(path, f"devices are counted, and `{count}` is no number", "write for example 1")


class Ray(Section):
    """How jobs are given to a running Ray cluster."""

    address: Annotated[str, Field(pattern=URL_PATTERN)] = Field(
        description="Address of the cluster's dashboard, which takes jobs", examples=["http://head:8265"]
    )
    gpu_resource: Text = Field("GPU", description="Ray's name for one GPU; CPU trains on processors")


class Capacity(Section):
    """Under which terms nodes are taken: at most one of the keys."""

    reservation: Text | None = Field(None, description="A reservation by name (Slurm, GKE, AWS capacity blocks)")
    spot: bool = Field(False, description="Nodes that may be taken back at any time")
    flex_start_hours: Annotated[float, Field(gt=0)] | None = Field(
        None, description="GKE's Dynamic Workload Scheduler: all nodes at once, for at most so long"
    )

    def problems(self) -> Iterator[Problem]:
        """One kind of terms."""
        if sum((self.reservation is not None, self.spot, self.flex_start_hours is not None)) > 1:
            yield Problem((), "these contradict each other", "write one of reservation, spot and flex_start_hours")


class JobLimits(Section):
    """What a job may take."""

    hours: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Longest time of one attempt; it saves and is queued again"
    )
    restarts: Annotated[int, Field(ge=0)] = Field(3, description="How often a failed training is started again")
    grace_seconds: PositiveInt | None = Field(
        None, description="Time to save after a request to stop; left out: twice the planned save and a minute"
    )
    shared_memory: Quantity = Field("64Gi", description="Size of /dev/shm in pods")
    cpu_stage_cpus: PositiveInt = Field(8, description="CPUs of stages without GPUs")
    cpu_stage_memory: Quantity = Field("32Gi", description="Memory of stages without GPUs")
    prepare_parts: PositiveInt = Field(1, description="Tasks among which the data is tokenised")
