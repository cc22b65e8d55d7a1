"""Ways into a running job: a tunnel to a port of one of its nodes, a shell beside one of its ranks.

Both are commands of the user's own ssh, srun or kubectl, shown before they are run.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from trainshed.errors import InputError
from trainshed.launch.job import DEFAULT_PORT, SERVICE_PORT
from trainshed.launch.target import StageState, Submitted
from trainshed.recipe import Cluster


@dataclass(frozen=True)
class Way:
    """A command, and what a person finds at its end."""

    command: tuple[str, ...]
    words: str

    def text(self) -> str:
        """The command as a shell takes it."""
        return shlex.join(self.command)


def tunnel(cluster: Cluster, submitted: Submitted, state: StageState, port: int | None = None) -> Way:
    """Return the command that brings the server of a run to a port of this machine."""
    here = port or DEFAULT_PORT
    there = submitted.serve_port or DEFAULT_PORT
    words = f"serve at http://localhost:{here}"
    if cluster.target == "ray":
        raise InputError("Ray has no server of ours to reach", where=cluster.where("target"))
    node = node_of(state, 0)
    if cluster.target == "kubernetes":
        # To the Service: whichever replica is ready answers.
        name = state.id.partition("/")[2]
        return Way((*_kubectl(cluster), "port-forward", f"service/{name}", f"{here}:{SERVICE_PORT}"), words)
    login = cluster.on_slurm.login
    if login is not None:
        return Way(("ssh", "-N", "-L", f"{here}:{node}:{there}", "--", login), words)
    return Way(("ssh", "-N", "-L", f"{here}:localhost:{there}", "--", node), words)


def shell(
    cluster: Cluster, submitted: Submitted, state: StageState, rank: int, command: tuple[str, ...] = ("bash",)
) -> Way:
    """Return the command that runs something on the node of a rank, inside its job."""
    serves = state.stage == "serve"
    node = node_of(state, rank if serves else rank // submitted.ranks_per_node)
    words = f"on {node}, beside {'its server' if serves else f'rank {rank}'}"
    if cluster.target == "kubernetes":
        return Way((*_kubectl(cluster), "exec", "-it", node, "--", *command), words)
    if cluster.target == "ray":
        raise InputError(
            "Ray has no way into the place of an actor",
            where=cluster.where("target"),
            hint="open a shell on its node by ssh or kubectl",
        )
    inside = ("srun", f"--jobid={state.id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--pty")
    login = cluster.on_slurm.login
    if login is not None:
        return Way(("ssh", "-t", "--", login, shlex.join((*inside, *command))), words)
    return Way((*inside, *command), words)


def node_of(state: StageState, index: int) -> str:
    """Return the node (on Kubernetes the pod) at a place of a running stage."""
    if state.state not in ("running", "serving") or not state.nodes:
        raise InputError(f"{state.stage} is not running: {state.reason or state.state}", hint="`trainshed status RUN`")
    if index >= len(state.nodes):
        raise InputError(
            f"{state.stage} runs on {len(state.nodes)} nodes", where="--rank", hint="write the number of a rank it has"
        )
    return state.nodes[index]


def _kubectl(cluster: Cluster) -> tuple[str, ...]:
    context = cluster.on_kubernetes.context
    return ("kubectl", *(("--context", context) if context else ()), "--namespace", cluster.on_kubernetes.namespace)
