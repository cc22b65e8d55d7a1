"""A job: one recipe on one cluster as stages, decided in full before anything is rendered.

A target renders a job into a `SubmitRequest` (`target.py`) and decides nothing itself. The files of a job are sent
with the request (a script that writes them, a ConfigMap) and are in one folder on every node. `job.json` is the job as
the node agent reads it. `setup.sh` is the cluster file's `setup`: a site's lines that every node runs first.
`programs/` are programs of ours that run in images without our package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import orjson

import trainshed
from trainshed.errors import TrainshedError
from trainshed.recipe import Cluster

if TYPE_CHECKING:
    from trainshed.plan.budget.budget import RunCost

JOB_SCHEMA = "trainshed.job/1"
JOB_FILE = "job.json"
MOUNTED_JOB = "/etc/trainshed/job"
"""Where pods find the files of their job."""


DEFAULT_PORT = 8000
"""Of a server that has its own address: a pod."""
SERVICE_PORT = 80
"""Of the one address that all replicas of a server share (Kubernetes)."""
CPU_STAGE_RETRIES = 3
"""Of each stage without GPUs: downloads and nodes fail now and then, and finished work is not repeated."""
MASTER_PORT = 29500
"""Where rank 0 listens if nothing else on its node can use that port; PyTorch's own default."""


@dataclass(frozen=True)
class ServingSpec:
    """What a serving stage runs, and how it is probed. Such a stage never ends by itself."""

    words: tuple[str, ...] = ()
    """Arguments of `trainshed` that start the server, without the port; empty: the stage's script starts it."""
    port: int | None = None
    """None: `DEFAULT_PORT`, or on Slurm a port computed from the job's id."""
    replicas: int = 1
    live: str = "/health"
    """Path that answers as long as the server works."""
    ready: str = "/ready"
    """Path that answers once the weights are loaded, and not while the server drains."""
    startup_seconds: int = 120
    """How long it may take until `live` answers for the first time."""
    drain_seconds: int = 120
    """How long running requests may take to finish after TERM."""


@dataclass(frozen=True)
class Stage:
    """One stage of a job as the scheduler sees it. Stages run in order, each when the one before has succeeded."""

    name: str
    nodes: int = 1
    gpus_per_node: int = 0
    """0: a stage on CPUs; no GPU is asked for."""
    ranks_per_node: int = 1
    parts: int = 1
    """Independent tasks the stage is cut into (an array, an indexed job); only stages of one node have parts."""
    script: str | None = None
    """A file of the job that each node runs with bash instead of the node agent: a foreign engine's launcher."""
    image: str | None = None
    """None: the cluster's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    spares: int = 0
    """Further nodes in the allocation, to replace bad ones."""
    preflight: bool = False
    """Prove nodes, fabric and storage before ranks start."""
    full_preflight: bool = False
    """Measure for a minute."""
    only_preflight: bool = False
    """Start no ranks: `trainshed doctor`."""
    cpus: int | None = None
    memory: str | None = None
    serving: ServingSpec | None = None
    """None: a stage that ends."""
    uploads: bool = False
    """Copy the checkpoints that its engine commits to `checkpoint.to` while it runs."""
    metrics_port: int | None = None
    """Where its rank 0 serves figures that a Prometheus of the cluster is to read; None: nowhere."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class CodeArchive:
    """Our own code as it is sent: a `.tar.xz` of the package, named by its content.

    A node unpacks it with `python3 -m tarfile -e FILE DIR` (its Python needs no package for that) and puts DIR on
    PYTHONPATH; what the package depends on is in the image or environment.
    """

    name: str
    """File name: `trainshed-0.1.0-0123456789ab.tar.xz`."""
    sha256: str
    data: bytes = field(repr=False)
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe's stages on a cluster."""

    name: str
    """Also of its objects: run and id, `quickstart-1a2b3c4d`; at most 49 characters, so that suffixes fit into 63."""
    run: str
    """The run's folder, as a path on its nodes."""
    cluster: Cluster
    stages: tuple[Stage, ...]
    files: Mapping[str, str]
    """Text files by their name in the job's folder: recipe.yaml, cluster.yaml, plan.json, job.json, scripts."""
    code: CodeArchive | None
    """None: the image or environment already has this version."""
    steps: int | None = None
    """None: only known once the data is prepared."""
    grace_seconds: int = 600
    losses_rank: int = 0
    """The rank of training that prints the losses."""
    notes: tuple[str, ...] = ()
    """What a person should know before this is submitted."""
    cost: RunCost | None = None
    """Hours and dollars, as planned; None where nothing is predicted."""

    def stage(self, name: str) -> Stage:
        """Return a stage by its name."""
        return next(stage for stage in self.stages if stage.name == name)


@dataclass(frozen=True)
class JobFile:
    """`job.json`: what the node agent must know; everything else is in the recipe, the plan and the environment."""

    name: str
    run: str
    stages: tuple[Stage, ...]
    grace_seconds: int
    precision: str
    version: str
    """Of Trainshed; another one on a node is an error before any work starts."""
    wanted: tuple[str, ...] = ()
    """What the stages before training leave for a foreign engine (`engines/launch.py`)."""
    min_nodes: int | None = None
    """With fewer nodes the run waits; None: all or nothing."""
    plugins: Mapping[str, str] = field(default_factory=dict)
    """The recipe's plugins, with the hash of their source."""
    schema: str = JOB_SCHEMA

    def stage(self, name: str) -> Stage:
        """Return a stage by its name."""
        return next(stage for stage in self.stages if stage.name == name)

    def to_text(self) -> str:
        """Return its JSON; the same job gives the same bytes."""
        body = asdict(self)
        for stage in body["stages"]:
            for key in ("serving", "metrics_port"):
                if stage[key] is None:
                    del stage[key]
            if not stage["uploads"]:
                del stage["uploads"]
        if not body["plugins"]:
            del body["plugins"]
        return orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode() + "\n"

    @classmethod
    def read(cls, folder: Path) -> JobFile:
        """Read it from the job's folder on a node."""
        body: dict[str, Any] = orjson.loads((folder / JOB_FILE).read_bytes())
        if body.get("schema") != JOB_SCHEMA:
            raise TrainshedError(
                f"this job was written as {body.get('schema')}, and this Trainshed reads {JOB_SCHEMA}",
                where=str(folder / JOB_FILE),
                hint="submit it again with the version that its nodes have",
            )
        known = {field.name for field in fields(cls)}
        stages = tuple(_read_stage(stage) for stage in body["stages"])
        values = {key: value for key, value in body.items() if key in known}
        return cls(**values | {"stages": stages, "wanted": tuple(values.get("wanted", ()))})


def _read_stage(body: dict[str, Any]) -> Stage:
    serving = body.get("serving")
    if serving is not None:
        serving = ServingSpec(**serving | {"words": tuple(serving["words"])})
    return Stage(**body | {"serving": serving})


def job_folder(run: str) -> str:
    """Return the folder of a run's job files, on targets that keep them in the store."""
    return f"{run}/job"


def version_problem(job: JobFile) -> str | None:
    """Say why this node's Trainshed must not run the job, None if it may."""
    if job.version == trainshed.__version__:
        return None
    return f"this node has Trainshed {trainshed.__version__}, and the job was written by {job.version}"


SETUP_FILE = "setup.sh"
"""The name of the cluster file's `setup` among the files of a job."""
_MODULE_COMMANDS = ("module", "ml")


def setup_script(cluster: Cluster) -> str | None:
    """Return the script that a node sources first, None if the cluster file has no `setup`."""
    if not cluster.setup:
        return None
    lines = [
        f"# `setup` of {cluster.name}: what its nodes run before a stage; to be sourced.",
        "trainshed_flags=$-",
        "set +eu",
        # Also if a line says `exit`: a stage that has not started must not look done.
        "trap 'echo \"trainshed: setup ended the shell at line $trainshed_line\" >&2; trap - EXIT; exit 1' EXIT",
    ]
    if any(line.split()[0] in _MODULE_COMMANDS for line in cluster.setup):
        # `module` is a function of login shells, and a job does not get the functions of the shell that submits it.
        lines.append("type module >/dev/null 2>&1 || . /etc/profile")
    for number, line in enumerate(cluster.setup, start=1):
        lines += [
            f"trainshed_line={quote(f'{number}: {line}')}",
            f"eval {quote(line)} || {{",
            '  echo "trainshed: setup failed with exit code $? at line $trainshed_line" >&2',
            "  trap - EXIT",
            "  exit 1",
            "}",
        ]
    lines += ["trap - EXIT", *_restore_strict_mode(), "unset trainshed_flags trainshed_line"]
    # Pods and Ray set variables before a process starts; the cluster file's win over whatever `setup` has set.
    lines += [f"export {name}={quote(value)}" for name, value in cluster.environment.items()]
    return "\n".join(lines) + "\n"


def _restore_strict_mode() -> list[str]:
    return [f"case $trainshed_flags in *{flag}*) set -{flag} ;; *) set +{flag} ;; esac" for flag in "eu"]
