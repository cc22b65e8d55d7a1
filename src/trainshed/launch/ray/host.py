"""What an actor does: it runs one process of a stage on its node and dies with it.

The process is a child, not the actor itself: a rank that crashes takes no account of itself along, and one that hangs
can be ended. When the actor dies (killed, its node low on memory, its driver gone), the kernel kills the child.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainshed.errors import InputError
from trainshed.launch.here import machine_environment
from trainshed.launch.ranks import Ranks, RanksResult, free_port
from trainshed.recipe import SecretReference

if TYPE_CHECKING:
    from trainshed.launch.preflight import PreflightVerdict
    from trainshed.launch.ray.proof import ProofTask

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class HostPlace:
    """Where an actor landed, and which GPUs Ray gave it."""

    address: str
    hostname: str
    node: str
    """Ray's id of the node: several may share an address."""
    process: int
    gpus: tuple[str, ...]
    amd: bool
    """Ray hands out AMD's GPUs by HIP_VISIBLE_DEVICES."""


@dataclass(frozen=True)
class HostTask:
    """One process to run."""

    arguments: tuple[str, ...]
    """Of this node's Python, or of `program`."""
    rank: int
    logs: str
    """Folder of its log."""
    environment: Mapping[str, str] = field(default_factory=dict)
    program: str | None = None
    prologue: tuple[str, ...] = ()
    """Lines of bash before it."""
    log: str | None = None
    """Name of its log; None: `rank-00000.log`."""
    precision: str | None = None
    """What it computes in, for what a machine needs to be told; None: nothing."""
    hidden: tuple[str, ...] = ()
    """Variables of the node that it must not see."""
    secrets: Mapping[str, SecretReference] = field(default_factory=dict)
    grace_seconds: float = 60.0


class Host:
    """The actor. Its methods run beside each other: a stop must reach a process that `run` waits for."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._asked: int | None = None

    def place(self) -> HostPlace:
        """Say where this actor is."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        return HostPlace(
            ray.util.get_node_ip_address(),
            socket.gethostname(),
            context.get_node_id(),
            os.getpid(),
            gpus,
            amd=bool(gpus) and "HIP_VISIBLE_DEVICES" in os.environ,
        )

    def free_port(self) -> int:
        """Find a port of this node that nobody listens on."""
        return free_port()

    def prove(self, task: ProofTask) -> PreflightVerdict:
        """Take part in the checks that all nodes make together."""
        from trainshed.launch.preflight import preflight_job, run_preflight
        from trainshed.recipe import load_cluster
        from trainshed.storage import LocalStore

        os.environ.update(task.environment)  # of all the node's GPUs, which the probes are to see
        checks = preflight_job(
            load_cluster(task.cluster_file),
            store=LocalStore(task.run),
            run_folder="",
            attempt=task.attempt,
            nodes=task.nodes,
            gpus=task.gpus,
        )
        return run_preflight(checks, node_rank=task.node, board=task.board, host=task.host)

    def run(self, task: HostTask) -> RanksResult:
        """Run a process and wait for its end; what it prints goes to its log."""
        command = [task.program or sys.executable, *task.arguments]
        if task.prologue:
            command = ["bash", "-c", "\n".join((*task.prologue, 'exec "$@"')), "trainshed", *command]
        environment = {name: value for name, value in os.environ.items() if name not in task.hidden}
        environment |= machine_environment(task.precision) if task.precision is not None else {}
        environment |= {"PYTHONUNBUFFERED": "1", **task.environment, **found_secrets(task.secrets)}
        ranks = self._ranks = Ranks(grace_seconds=task.grace_seconds, failure_grace_seconds=0.0)
        try:
            ranks.start(command, task.rank, Path(task.logs), environment, log=task.log)
            if self._asked is not None:
                ranks.ask_to_stop(self._asked)
            while ranks.wait(_POLL_SECONDS):
                pass
            return ranks.result()
        finally:
            ranks.close()

    def ask_to_stop(self, signum: int) -> None:
        """Pass a signal on to the process, or to the one that is started next."""
        self._asked = signum
        if self._ranks is not None:
            self._ranks.ask_to_stop(signum)


def found_secrets(secrets: Mapping[str, SecretReference]) -> dict[str, str]:
    """Look secrets up on this node; a Kubernetes secret is a variable of the pod already."""
    found = {}
    for name, reference in secrets.items():
        if reference.env is not None:
            if reference.env not in os.environ:
                raise _missing(name, f"the variable {reference.env}", "start Ray with it on every node")
            found[name] = os.environ[reference.env]
        elif reference.file is not None:
            try:
                found[name] = Path(reference.file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError):
                raise _missing(name, f"the file {reference.file}", "put it on every node") from None
    return found


def _missing(name: str, what: str, hint: str) -> InputError:
    return InputError(
        f"the secret {name} is not on the node {socket.gethostname()}: {what} cannot be read there", hint=hint
    )


def device_environment(places: Sequence[HostPlace]) -> dict[str, str]:
    """What makes all GPUs of a node's actors visible to each of its ranks, in order.

    Ray shows each actor its own GPU only; engines count on LOCAL_RANK to choose among those of the node, and NCCL on
    seeing its peers. HIP reads both variables and takes its own; ROCR_VISIBLE_DEVICES lies beneath and would number
    the GPUs anew, so that it is left as the node has it.
    """
    gpus = ",".join(gpu for place in places for gpu in place.gpus)
    if not gpus:
        return {}
    return dict.fromkeys(DEVICE_VARIABLES if places[0].amd else DEVICE_VARIABLES[:1], gpus)
