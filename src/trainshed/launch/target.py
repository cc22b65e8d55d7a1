"""What every target can do: render a job into a request, submit exactly that request, and report on it afterwards.

Nothing is decided in `submit`: `submit --dry-run` prints `SubmitRequest.text()`, and that is what is sent. Only the
ids that a scheduler gives to earlier stages are filled in, where the text shows `<id of prepare>`. `target_of` returns
the target of a cluster. `tunnel_command` and `shell_command` return commands of the user's own ssh, srun or kubectl.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trainshed.errors import InputError
from trainshed.launch.job import DEFAULT_PORT, SERVICE_PORT, Job
from trainshed.launch.stage_state import StageState
from trainshed.plugins import Registry
from trainshed.recipe import Cluster


@dataclass(frozen=True)
class RequestPart:
    """One thing that is sent to the scheduler: a script, a manifest."""

    name: str
    """File name for people: `train.sbatch`, `train.yaml`."""
    stage: str | None
    text: str
    summary: str | None = None
    """Of a program that nobody reads: what `render` prints in its place."""

    def printed(self) -> str:
        """Return what `render` prints: the text, or a comment that says what it is."""
        return self.text if self.summary is None else f"# {self.name}: {self.summary}\n"


@dataclass(frozen=True)
class SubmitRequest:
    """Everything that is sent for a job, byte for byte, in order."""

    target: str
    job: str
    parts: tuple[RequestPart, ...]
    uploads: Mapping[str, bytes] = field(default_factory=dict)
    """Files that must be in the store first, by their path there (our packed code)."""
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Return what `render` prints."""
        return "".join(part.printed() for part in self.parts)


@dataclass(frozen=True)
class SubmittedJob:
    """What a scheduler accepted; recorded on the submitting machine so that a run is found again."""

    job: str
    run: str
    target: str
    ids: Mapping[str, str]
    """Stage → the scheduler's id for it."""
    ranks_per_node: int = 1
    """Of training."""
    losses_rank: int = 0
    """The rank of training that prints the losses: whose log is shown where nobody names another."""
    serve_port: int | None = None
    """Of the serving stage, on its node; None if it is reached by name (a Service), or if no stage serves."""
    serve_ready: str = "/ready"
    """The path that the serving stage answers once it serves."""


class Target(Protocol):
    """A scheduler."""

    def render(self, job: Job) -> SubmitRequest:
        """Turn a job into what is sent; pure: no clock, no randomness, no network."""
        ...

    def check(self, job: Job) -> Sequence[str]:
        """Ask the scheduler whether it could run the job; returns why not, in sentences (too many nodes, no queue)."""
        ...

    def submit(self, request: SubmitRequest, job: Job) -> SubmittedJob:
        """Send exactly the request."""
        ...

    def status(self, submitted: SubmittedJob) -> tuple[StageState, ...]:
        """Return the state of each stage, in order, and why."""
        ...

    def logs(
        self,
        submitted: SubmittedJob,
        stage: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yield the lines of a stage's log as the scheduler has them."""
        ...

    def cancel(self, submitted: SubmittedJob) -> tuple[str, ...]:
        """End every stage that has not ended and return their names; storage is never touched."""
        ...


TARGETS: Registry[Callable[..., Target]] = Registry(
    "target",
    {
        "local": "trainshed.launch.target:refuse_local_target",
        "slurm": "trainshed.launch.slurm.target:SlurmTarget",
        "kubernetes": "trainshed.launch.kubernetes.target:KubernetesTarget",
        "ray": "trainshed.launch.ray.target:RayTarget",
    },
)
"""By the name that a cluster file has in `target`; one of a plugin is best a `ScriptTarget` (`script_target.py`)."""


def target_of(cluster: Cluster) -> Target:
    """Return what schedules the work of a cluster."""
    return TARGETS.find(cluster.target)(cluster, **(cluster.target_options or {}))


def refuse_local_target(cluster: Cluster) -> Target:
    """Raise the error for `local`, which has no scheduler; it stands in the table of targets."""
    raise InputError(
        "there is no scheduler on this machine to submit to",
        where=cluster.where("target"),
        hint="`trainshed run RECIPE` runs here; --on CLUSTER names another place",
    )


@dataclass(frozen=True)
class RemoteCommand:
    """A command, and what a person reaches with it."""

    command: tuple[str, ...]
    description: str

    def text(self) -> str:
        """The command as a shell takes it."""
        return shlex.join(self.command)


def tunnel_command(
    cluster: Cluster, submitted: SubmittedJob, stage_state: StageState, port: int | None = None
) -> RemoteCommand:
    """Return the command that forwards a port of this machine to the server of a run."""
    local_port = port or DEFAULT_PORT
    remote_port = submitted.serve_port or DEFAULT_PORT
    description = f"serve at http://localhost:{local_port}"
    refuse_registered(cluster)
    if cluster.target == "ray":
        raise InputError("Ray has no server of ours to reach", where=cluster.where("target"))
    node = node_of(stage_state, 0)
    if cluster.target == "kubernetes":
        # To the Service: whichever replica is ready answers.
        name = stage_state.id.partition("/")[2]
        return RemoteCommand(
            (*kubectl_command(cluster), "port-forward", f"service/{name}", f"{local_port}:{SERVICE_PORT}"), description
        )
    login = cluster.on_slurm.login
    if login is not None:
        return RemoteCommand(("ssh", "-N", "-L", f"{local_port}:{node}:{remote_port}", "--", login), description)
    return RemoteCommand(("ssh", "-N", "-L", f"{local_port}:localhost:{remote_port}", "--", node), description)


def refuse_registered(cluster: Cluster) -> None:
    """Refuse a target of a plugin: how its nodes are reached is not known."""
    if TARGETS.owner(cluster.target) is not None:
        raise InputError(
            f"no way to the nodes of the target {cluster.target} is known here", where=cluster.where("target")
        )


def shell_command(
    cluster: Cluster, submitted: SubmittedJob, stage_state: StageState, rank: int, command: tuple[str, ...] = ("bash",)
) -> RemoteCommand:
    """Return the command that runs something on the node of a rank, inside its job."""
    refuse_registered(cluster)
    serves = stage_state.stage == "serve"
    node = node_of(stage_state, rank if serves else rank // submitted.ranks_per_node)
    description = f"on {node}, beside {'its server' if serves else f'rank {rank}'}"
    if cluster.target == "kubernetes":
        return RemoteCommand((*kubectl_command(cluster), "exec", "-it", node, "--", *command), description)
    if cluster.target == "ray":
        raise InputError(
            "Ray has no way into the place of an actor",
            where=cluster.where("target"),
            hint="open a shell on its node by ssh or kubectl",
        )
    srun = ("srun", f"--jobid={stage_state.id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--pty")
    login = cluster.on_slurm.login
    if login is not None:
        return RemoteCommand(("ssh", "-t", "--", login, shlex.join((*srun, *command))), description)
    return RemoteCommand((*srun, *command), description)


def node_of(stage_state: StageState, index: int) -> str:
    """Return a node of a running stage by its index; on Kubernetes, a pod."""
    if stage_state.state not in ("running", "serving") or not stage_state.nodes:
        raise InputError(
            f"{stage_state.stage} is not running: {stage_state.reason or stage_state.state}",
            hint="`trainshed status RUN`",
        )
    if index >= len(stage_state.nodes):
        raise InputError(
            f"{stage_state.stage} runs on {len(stage_state.nodes)} nodes",
            where="--rank",
            hint="write the number of a rank it has",
        )
    return stage_state.nodes[index]


def kubectl_command(cluster: Cluster) -> tuple[str, ...]:
    """Return kubectl with the context and namespace of a cluster."""
    context = cluster.on_kubernetes.context
    return ("kubectl", *(("--context", context) if context else ()), "--namespace", cluster.on_kubernetes.namespace)
