"""The cluster file: where a recipe runs. It holds places and names, never secrets.

First the stores, secrets and volumes that a job reaches; then the sections `slurm`, `kubernetes` and `ray`, and
what every job may take; at the end `Cluster`, the whole file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from trainshed.errors import RecipeError
from trainshed.plugins import PluginSource
from trainshed.recipe.notify import Notifications
from trainshed.recipe.overrides import Override
from trainshed.recipe.registered import (
    EngineArgument,
    ModuleNames,
    choice_or_registered,
    name_problems,
    option_problems,
)
from trainshed.recipe.schema import FORMAT_VERSION, MAX_NAME_LENGTH, NAME_PATTERN
from trainshed.recipe.section import (
    LINE_PATTERN,
    PATH_PATTERN,
    TEXT_PATTERN,
    URL_PATTERN,
    VARIABLE_PATTERN,
    Port,
    PositiveFloat,
    PositiveInt,
    Problem,
    Quantity,
    Section,
    StoreAddress,
    Text,
    by_shape,
    invalid_value,
    quantity_bytes,
)
from trainshed.recipe.written_file import WrittenFile

MountPath = Annotated[str, Field(pattern=PATH_PATTERN)]
"""An absolute path inside a job."""


class StoreEndpoint(Section):
    """How to reach a store that is not where its scheme says."""

    endpoint: Text | None = Field(None, description="URL of the server", examples=["http://minio.default.svc:9000"])
    region: Text | None = Field(None, description="Region the server expects")
    anonymous: bool = Field(False, description="Read without credentials")
    addressing: Literal["path", "virtual"] | None = Field(
        None,
        description="Where the bucket's name stands in the URL; left out: path where an endpoint is given",
    )

    def problems(self) -> Iterator[Problem]:
        """An endpoint is a URL."""
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            yield Problem(("endpoint",), f"`{self.endpoint}` has no scheme", f"write https://{self.endpoint}")


class SecretReference(Section):
    """Where a secret is found when it is needed: exactly one of the keys."""

    env: Text | None = Field(None, description="Name of an environment variable")
    file: Text | None = Field(None, description="Path of a file that holds it")
    k8s: Text | None = Field(None, description="A Kubernetes secret, as name/key")

    def problems(self) -> Iterator[Problem]:
        """One reference."""
        if sum(value is not None for value in (self.env, self.file, self.k8s)) != 1:
            yield Problem((), "needs exactly one of env, file and k8s", "write for example {env: HF_TOKEN}")
        if self.k8s is not None and not re.match(r"^[^/]+/[^/]+$", self.k8s):
            yield Problem(("k8s",), "names no key of a secret", "write name/key")


def refuse_literal_secret(value: Any) -> Any:
    """Refuse a secret that is written out; the value itself is not repeated."""
    if not isinstance(value, dict | SecretReference):
        raise invalid_value(
            "a secret is never written into a file: cluster files are shared and kept with every run",
            "write where to find it: {env: NAME}, {file: PATH} or {k8s: name/key}",
        )
    return value


class ClusterStorage(Section):
    """The storage that checkpoints and tokens lie on, as the planner must know it."""

    tier: Text = Field(description="Kind of storage, by its name in the catalog", examples=["amlfs-250"])
    size_tib: PositiveFloat | None = Field(None, description="How much of it there is, where its speed depends on that")
    servers: PositiveInt | None = Field(None, description="How many servers it stands on, where that decides its speed")


class NewVolume(Section):
    """A volume that `trainshed storage up` makes; it is kept (Retain) whatever becomes of the jobs."""

    kind: Literal["amlfs", "blob", "fsx", "gcs-fuse", "parallelstore", "lustre", "claim"] = Field(
        description="Azure Managed Lustre, Azure Blob by BlobFuse, FSx for Lustre, GCS FUSE, Parallelstore, GKE "
        "Lustre; claim: whatever a StorageClass of the cluster makes"
    )
    size: Quantity = Field(description="Its size", examples=["16Ti"])
    storage_class: Text | None = Field(
        None, description="Of `kind: claim`: a StorageClass that the cluster has; left out: its default one"
    )
    sku: Text | None = Field(
        None, description="Product or tier", examples=["AMLFS-Durable-Premium-125", "Standard_LRS"]
    )
    zone: Text | None = Field(None, description="Zone it lies in", examples=["1"])
    parameters: dict[str, Text] = Field(
        default_factory=dict,
        description="Further parameters of its StorageClass",
        examples=[{"subnetId": "subnet-0123", "securityGroupIds": "sg-0123"}],
    )

    def problems(self) -> Iterator[Problem]:
        """A claim names a StorageClass; the other kinds make one."""
        if self.kind != "claim" and self.storage_class is not None:
            yield Problem(("storage_class",), f"{self.kind} makes its own", "delete it, or write `kind: claim`")
        for key in ("sku", "zone", "parameters"):
            if self.kind == "claim" and getattr(self, key):
                yield Problem((key,), "is for a StorageClass that is made, and a claim uses one", "delete it")


class Volume(Section):
    """Storage mounted into every job: exactly one of `pvc`, `bucket`, `host`, `path` says what it is."""

    mount: MountPath = Field(description="Where jobs see it", examples=["/data"])
    pvc: Text | None = Field(None, description="A PersistentVolumeClaim", examples=["shared-storage"])
    create: NewVolume | None = Field(None, description="How `trainshed storage up` makes that claim")
    bucket: Text | None = Field(None, description="A bucket mounted by GCS FUSE", examples=["my-bucket"])
    host: MountPath | None = Field(None, description="A folder of the node (local SSD)")
    path: MountPath | None = Field(None, description="A folder of the shared disk (Slurm)")
    read_only: bool = Field(False, description="Jobs may not write there")
    options: Annotated[tuple[Text, ...], Field(strict=False)] = Field(
        (), description="Options of the mount", examples=[["implicit-dirs"]]
    )

    def problems(self) -> Iterator[Problem]:
        """One kind of volume; only claims are made."""
        kinds = [key for key in ("pvc", "bucket", "host", "path") if getattr(self, key) is not None]
        if len(kinds) != 1:
            yield Problem((), "needs exactly one of pvc, bucket, host and path", "write {mount: /data, pvc: NAME}")
        if self.create is not None and self.pvc is None:
            yield Problem(("create",), "makes a claim, and `pvc` names none", "write `pvc: NAME` beside it")


TextList = Annotated[tuple[Text, ...], Field(strict=False)]
# A name in a domain, as device plugins offer it, or pages of a size, which Kubernetes itself offers.
_DEVICE_NAME = re.compile(r"(?=.{1,253}/)[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_HUGE_PAGES = re.compile(r"hugepages-[0-9]+[KMG]i")
DeviceCount = Annotated[
    Annotated[PositiveInt, Tag("(a number)")] | Annotated[Quantity, Tag("(text)")],
    by_shape,
]
_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


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
    port: Port | None = Field(None, description="Port of rank 0; left out: one that follows from the job's id")
    options: TextList = Field((), description="Further #SBATCH options", examples=[["--mail-type=END"]])

    def problems(self) -> Iterator[Problem]:
        """The machine says how many GPUs a node has, and `--gres` gets that number after the name."""
        name, _, count = (self.gpus or "").rpartition(":")
        if name and count.isdecimal():
            yield Problem(("gpus",), f"{count} is a number of GPUs, which the machine says", f"write `gpus: {name}`")


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
    requests: Literal["devices"] | None = Field(
        None,
        description="devices: pods with GPUs ask for GPUs and network devices alone, for a `queue` that covers nothing "
        "else (those of Google's Cluster Toolkit); left out: for CPUs and memory too",
    )
    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels nodes must have")
    cpu_node_selector: dict[str, str] = Field(default_factory=dict, description="The same, for stages without GPUs")
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False)] = Field((), description="Taints put up with")
    avoid_nodes: TextList = Field((), description="Nodes that no pod may run on, by hostname")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels of every object and pod")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations of every pod")
    image_pull_secrets: TextList = Field((), description="Secrets to pull images with")
    code: Literal["store", "configmaps", "image"] | None = Field(
        None,
        description="How our code reaches pods: by the bucket that is their store, by ConfigMaps, or installed in the "
        "image; left out: the bucket where there is one, or else ConfigMaps",
    )
    driver_account: Text | None = Field(
        None,
        description="Service account of the driver, which creates one stage after the other; left out: every job makes "
        "its own with a Role, which takes the right to create roles",
    )
    pre_pull: bool = Field(False, description="A DaemonSet that pulls the image onto every GPU node beforehand")

    def problems(self) -> Iterator[Problem]:
        """Placement is Kueue's work; devices have the names that plugins offer."""
        if self.topology is not None and self.queue is None:
            yield Problem(("topology",), "is Kueue's work, and there is no queue", "write `queue: NAME`")
        for name, count in (self.resources or {}).items():
            path = ("resources", name)
            if name in _GPU_RESOURCES:
                yield Problem(path, "GPUs are asked for by the `machine`", "delete it")
            elif name in ("cpu", "memory", "ephemeral-storage"):
                yield Problem(path, f"`{name}` is not a device of the network", "delete it")
            elif not _DEVICE_NAME.fullmatch(name) and not _HUGE_PAGES.fullmatch(name):
                yield Problem(
                    path,
                    f"`{name}` is not a name of a device",
                    "write what `kubectl get nodes -o yaml` lists below `allocatable`, for example rdma/ib",
                )
            elif isinstance(count, str) and _DEVICE_NAME.fullmatch(name):
                yield Problem(path, f"devices are counted, and `{count}` is not a number", "write for example 1")


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


StageName = Literal[
    "image", "fetch", "convert", "tokenise", "prepare", "index", "train", "upload", "export", "eval", "serve"
]


class StageLimits(Section):
    """What one stage asks for on each of its nodes."""

    cpus: PositiveInt | None = Field(None, description="CPUs; left out: as for other stages of its kind")
    memory: Quantity | None = Field(None, description="Memory; left out: as for other stages of its kind")


MOST_HOURS = 365 * 24.0
"""What schedulers can count; whoever wants no limit leaves `hours` out."""


class JobLimits(Section):
    """What a job may take."""

    hours: Annotated[float, Field(gt=0, le=MOST_HOURS)] | None = Field(
        None, description="Longest time of one attempt; it saves and is queued again"
    )
    restarts: Annotated[int, Field(ge=0)] = Field(3, description="How often a failed training is started again")
    grace_seconds: PositiveInt | None = Field(
        None, description="Time to save after a request to stop; left out: twice the planned save and a minute"
    )
    shared_memory: Quantity = Field("64Gi", description="Size of /dev/shm in pods")
    cpu_stage_cpus: PositiveInt = Field(8, description="CPUs of stages without GPUs")
    cpu_stage_memory: Quantity = Field("32Gi", description="Memory of stages without GPUs")
    stages: dict[StageName, StageLimits] = Field(
        default_factory=dict,
        description="CPUs and memory of single stages; left out: `cpu_stage_cpus` and `cpu_stage_memory` without GPUs, "
        "three quarters of the node's share with them (Kubernetes)",
        examples=[{"prepare": {"cpus": 80, "memory": "1024Gi"}, "train": {"cpus": 64, "memory": "800Gi"}}],
    )
    prepare_parts: PositiveInt = Field(1, description="Tasks among which the data is tokenised")

    def problems(self) -> Iterator[Problem]:
        """A limit that no scheduler takes for none, and memory that is not none."""
        if self.hours is not None and self.hours * 60 < 1:
            yield Problem(("hours",), f"{self.hours:g} hours are less than a minute", "write a longer time")
        for key in ("shared_memory", "cpu_stage_memory"):
            if quantity_bytes(getattr(self, key)) == 0:
                yield Problem((key,), "is 0, which Kubernetes takes for no limit", "write a size, for example 64Gi")


LOCAL_STORE = "./store"
CPU_MACHINE = "cpu"
"""The `machine` of nodes without GPUs."""
TargetName = Literal["local", "slurm", "kubernetes", "ray"]
EnvironmentName = Annotated[str, Field(pattern=VARIABLE_PATTERN)]
ShellLine = Annotated[str, Field(pattern=LINE_PATTERN)]


def is_shared_path(address: str, target: str) -> bool:
    """Whether a store is a path that all nodes of a target can have: not a bucket, and absolute except on `local`."""
    return "://" not in address and (target == "local" or address.startswith("/"))


def number_as_text(value: Any) -> Any:
    """Let a number stand for its digits: variables are text, and `X: 1` is how people write one."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


EnvironmentValue = Annotated[
    str, BeforeValidator(number_as_text, json_schema_input_type=str | int | float), Field(pattern=TEXT_PATTERN)
]
LockableKey = Literal[
    "image",
    "plugins",
    "store",
    "service_account",
    "slurm.account",
    "slurm.partition",
    "slurm.qos",
    "kubernetes.queue",
    "kubernetes.namespace",
    "kubernetes.priority",
    "kubernetes.context",
]
_STORE_KEY = re.compile(r"^(s3|gs|az|hf|https?)(://[^/]+(/[^/]+)*)?$")


class Nodes(Section):
    """How many nodes a run gets."""

    default: PositiveInt = Field(1, description="Where neither `--nodes` nor the recipe says a number")
    max: PositiveInt | None = Field(None, description="More are refused before anything is submitted")

    def problems(self) -> Iterator[Problem]:
        """The default is allowed."""
        if self.max is not None and self.default > self.max:
            yield Problem(("default",), f"{self.default} is more than max: {self.max}", "write a smaller one")


class Cluster(WrittenFile):
    """Where to run."""

    trainshed: Annotated[int, Field(ge=1, le=FORMAT_VERSION)] = Field(
        FORMAT_VERSION, description="Version of the format"
    )
    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=MAX_NAME_LENGTH)] = Field(
        description="Name of the cluster", examples=["local"]
    )
    target: Annotated[str, choice_or_registered("target", TargetName)] = Field(
        description="What schedules the work: this machine, Slurm, Kubernetes, a running Ray cluster, or a target that "
        "a plugin registers",
        examples=["local"],
    )
    store: StoreAddress | None = Field(None, description="Root of artefacts and runs; left out on `local`: ./store")
    stores: dict[str, StoreEndpoint] = Field(
        default_factory=dict, description="Endpoints, by scheme (`s3`) or by bucket (`s3://bucket`)"
    )
    secrets: dict[EnvironmentName, Annotated[SecretReference, BeforeValidator(refuse_literal_secret)]] = Field(
        default_factory=dict, description="Secrets by reference: {HF_TOKEN: {env: HF_TOKEN}}"
    )
    nodes: Nodes = Field(default_factory=Nodes, description="How many nodes a run gets")
    machine: Text | None = Field(
        None,
        description="Kind of machine: a name in the catalog, an instance type, or a file that describes it; "
        "`cpu`: nodes without GPUs. Only `local` may leave it out",
    )
    storage: ClusterStorage | None = Field(None, description="Where checkpoints and tokens lie, for the plan")
    calibration: Text | None = Field(None, description="A file that `trainshed plan calibrate` wrote here")
    price_per_gpu_hour: PositiveFloat | None = Field(None, description="US dollars; left out: the list price")
    mtbf_hours: PositiveFloat | None = Field(
        None, description="Mean time between failures of one node; left out: Llama 3's, by its GPUs"
    )

    image: Text | None = Field(
        None, description="Container image jobs run in, best by digest", examples=["registry/trainshed@sha256:…"]
    )
    python: Text = Field("python3", description="Python inside the image, or on the nodes where there is no `venv`")
    fabric: Text | None = Field(None, description="Network between nodes; left out: the machine's")
    sharp: bool = Field(False, description="InfiniBand: let the switches sum (SHARP); proven before the first step")
    preflight: bool = Field(True, description="Prove GPUs, fabric and storage before training starts")
    environment: dict[EnvironmentName, EnvironmentValue] = Field(
        default_factory=dict, description="Variables of every job; those that do not belong to the fabric are refused"
    )
    setup: Annotated[tuple[ShellLine, ...], Field(strict=False)] = Field(
        (),
        description="Lines of bash that every node runs first, before `environment` is set; one that fails ends a job",
        examples=[["module load cuda/12.8", "source /shared/site.sh"]],
    )
    volumes: Annotated[tuple[Volume, ...], Field(strict=False)] = Field((), description="Storage mounted into jobs")
    local_disk: MountPath | None = Field(
        None,
        description="A folder on each node's own disk, as jobs see it, for `data.stage: nvme`; left out on Kubernetes: "
        "the mount of the volume with `host`",
        examples=["/ssd"],
    )
    limits: JobLimits = Field(default_factory=JobLimits, description="What jobs may take")
    capacity: Capacity = Field(default_factory=Capacity, description="Under which terms nodes are taken")
    notify: Notifications | None = Field(
        None,
        description="Who is told what happens to every run here; a recipe's own `notify` is added",
        examples=[[{"webhook": {"secret": "SLACK_WEBHOOK"}}]],
    )
    service_account: Text | None = Field(
        None, description="Identity of jobs (Workload Identity, IRSA); left out: the namespace's own"
    )
    locked: Annotated[tuple[LockableKey, ...], Field(strict=False)] = Field(
        (), description="Keys that neither a recipe nor the command line may change"
    )
    slurm: Slurm | None = Field(None, description="How jobs are given to Slurm")
    kubernetes: Kubernetes | None = Field(None, description="How jobs are given to Kubernetes")
    ray: Ray | None = Field(None, description="How jobs are given to a running Ray cluster")
    plugins: ModuleNames | None = Field(
        None,
        description="Modules of your own that register the target: beside the cluster file, or installed "
        "(docs/plugins.md)",
    )
    target_options: dict[str, EngineArgument] | None = Field(None, description="Options of a target of a plugin")

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str], *overrides: str) -> Cluster:
        """Load a cluster file by path or name; overrides are `nodes.default=4`."""
        from trainshed.recipe.cluster.load import load_cluster

        return load_cluster(name_or_path, overrides)

    def _parse_again(self, text: str, overrides: Iterable[str | Override]) -> Cluster:
        from trainshed.recipe.cluster.load import parse_cluster

        return parse_cluster(text, overrides, source=self._places.source, folder=self.folder)

    @property
    def store_root(self) -> str:
        """Return the root of artefacts and runs."""
        return self.store or LOCAL_STORE

    @property
    def node_disk(self) -> str | None:
        """Return the folder on each node's own disk: `local_disk`, or the only writable volume that is a `host`'s."""
        if self.local_disk is not None:
            return self.local_disk
        mounts = [volume.mount for volume in self.volumes if volume.host is not None and not volume.read_only]
        return mounts[0] if len(mounts) == 1 else None

    @property
    def plugin_sources(self) -> tuple[PluginSource, ...]:
        """Return the files of the plugins, with their hashes."""
        return self._places.plugins

    def check_runs_here(self) -> None:
        """Refuse to work on this machine for a cluster that is elsewhere."""
        if self.target != "local":
            raise RecipeError(
                f"{self.name} is a {self.target} cluster: its jobs do not run on this machine",
                where=self.where("target"),
                hint=f"`trainshed submit RECIPE --on {self.name}` sends them there; leave --on out to run here",
            )

    @property
    def gpu_machine(self) -> str | None:
        """Return the machine whose GPUs jobs use, None where the nodes have none or the file names none."""
        return None if self.machine == CPU_MACHINE else self.machine

    def bucket_address(self, path: str) -> str | None:
        """Return where a path of its jobs is in a bucket, None if they have no bucket mounted there."""
        for volume in self.volumes:
            mount = volume.mount.rstrip("/")
            if volume.bucket is not None and f"{path}/".startswith(f"{mount}/"):
                # gcsfuse can mount one folder of a bucket alone.
                only = [option.removeprefix("only-dir=") for option in volume.options if option.startswith("only-dir=")]
                inside = [part.strip("/") for part in (*only, path[len(mount) :])]
                return "/".join(["gs:/", volume.bucket, *(part for part in inside if part)])
        return None

    def inside(self) -> Cluster:
        """Return the cluster as its own jobs see it: whatever runs on a node is local there."""
        elsewhere = dict.fromkeys(("slurm", "kubernetes", "ray", "plugins", "target_options"))
        seen = self.model_copy(update={"target": "local", **elsewhere})
        seen._places = self._places
        return seen

    def without_secrets(self) -> Cluster:
        """Return the cluster for a process that only reads a disk."""
        seen = self.model_copy(update={"secrets": {}})
        seen._places = self._places
        return seen

    @property
    def on_slurm(self) -> Slurm:
        """Return the Slurm section, with its defaults where nothing is written."""
        return self.slurm or Slurm()

    @property
    def on_kubernetes(self) -> Kubernetes:
        """Return the Kubernetes section, with its defaults where nothing is written."""
        return self.kubernetes or Kubernetes()

    def problems(self) -> Iterator[Problem]:
        """Endpoints are for stores that exist; a running Ray cluster has an address."""
        for key in self.stores:
            if not _STORE_KEY.match(key):
                yield Problem(("stores", key), f"`{key}` is neither a scheme nor a bucket", "write s3, or s3://bucket")
        yield from name_problems([(("target",), "target", self.target)], self.plugins or ())
        yield from option_problems("target", self.target, self.target_options or {}, ("target_options",), positional=1)
        if self.target == "ray" and self.ray is None:
            yield Problem(("ray",), "is missing: which cluster takes the jobs?", "ray: {address: http://head:8265}")
        if self.sharp and self.fabric is not None and not self.fabric.startswith("infiniband"):
            yield Problem(("sharp",), f"{self.fabric} has no switches that sum", "delete it")
