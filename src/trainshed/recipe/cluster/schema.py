"""The cluster file: where a recipe runs. It holds places and names, never secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from trainshed.errors import RecipeError
from trainshed.recipe.address import Address
from trainshed.recipe.cluster.places import (
    ClusterStorage,
    SecretReference,
    StoreEndpoint,
    Volume,
    refuse_literal,
)
from trainshed.recipe.cluster.targets import Capacity, JobLimits, Kubernetes, Ray, Slurm
from trainshed.recipe.places import Places
from trainshed.recipe.schema import FORMAT, LONGEST_NAME, NAME_PATTERN
from trainshed.recipe.section import (
    LINE_PATTERN,
    TEXT_PATTERN,
    VARIABLE_PATTERN,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
    Text,
)

LOCAL_STORE = "./store"
CPU_MACHINE = "cpu"
"""The `machine` of nodes without GPUs."""
Target = Literal["local", "slurm", "kubernetes", "ray"]
EnvironmentName = Annotated[str, Field(pattern=VARIABLE_PATTERN)]
ShellLine = Annotated[str, Field(pattern=LINE_PATTERN)]
EnvironmentValue = Annotated[str, Field(pattern=TEXT_PATTERN)]
Lockable = Literal[
    "image",
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


class Cluster(Section):
    """Where to run."""

    trainshed: Annotated[int, Field(ge=1, le=FORMAT)] = Field(FORMAT, description="Version of the format")
    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=LONGEST_NAME)] = Field(
        description="Name of the cluster", examples=["local"]
    )
    target: Target = Field(
        description="What schedules the work: this machine, Slurm, Kubernetes, or a running Ray cluster",
        examples=["local"],
    )
    store: Address | None = Field(None, description="Root of artefacts and runs; left out on `local`: ./store")
    stores: dict[str, StoreEndpoint] = Field(
        default_factory=dict, description="Endpoints, by scheme (`s3`) or by bucket (`s3://bucket`)"
    )
    secrets: dict[str, Annotated[SecretReference, BeforeValidator(refuse_literal)]] = Field(
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
    limits: JobLimits = Field(default_factory=JobLimits, description="What jobs may take")
    capacity: Capacity = Field(default_factory=Capacity, description="Under which terms nodes are taken")
    service_account: Text | None = Field(
        None, description="Identity of jobs (Workload Identity, IRSA); left out: the namespace's own"
    )
    locked: Annotated[tuple[Lockable, ...], Field(strict=False)] = Field(
        (), description="Keys that neither a recipe nor the command line may change"
    )
    slurm: Slurm | None = Field(None, description="How jobs are given to Slurm")
    kubernetes: Kubernetes | None = Field(None, description="How jobs are given to Kubernetes")
    ray: Ray | None = Field(None, description="How jobs are given to a running Ray cluster")

    _places: Places = PrivateAttr(default_factory=Places)

    @property
    def store_root(self) -> str:
        """Return the root of artefacts and runs."""
        return self.store or LOCAL_STORE

    @property
    def places(self) -> Places:
        """Return where each key was written."""
        return self._places

    def where(self, key: str) -> str:
        """Return the place of a key for an error: `cluster.yaml:12 (nodes.max)`."""
        return self._places.where(tuple(key.split(".")))

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

    def inside(self) -> Cluster:
        """Return the cluster as its own jobs see it: whatever runs on a node is local there."""
        seen = self.model_copy(update={"target": "local", "slurm": None, "kubernetes": None, "ray": None})
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
        if self.target == "ray" and self.ray is None:
            yield Problem(("ray",), "is missing: which cluster takes the jobs?", "ray: {address: http://head:8265}")
        if self.sharp and self.fabric is not None and not self.fabric.startswith("infiniband"):
            yield Problem(("sharp",), f"{self.fabric} has no switches that sum", "delete it")
