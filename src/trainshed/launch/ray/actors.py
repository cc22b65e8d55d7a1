"""Actors that run one process each on their node, and a group of them seen through to its end.

The process is a child, not the actor itself: a rank that crashes does not take the actor with it, and one that hangs
can be ended. When the actor dies (killed, its node low on memory, its driver gone), the kernel kills the child.

A process fails or an actor dies: the others may be waiting for it in a collective, so that they have a short grace to
notice and to write down where they stood; then they are killed. Somebody asks for a stop: every process is told, and
has the job's grace to write its checkpoint.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainshed.errors import InputError
from trainshed.launch.attempt import machine_environment
from trainshed.launch.ranks import RankFailure, RankProcesses, RanksResult, free_port
from trainshed.recipe import SecretReference

if TYPE_CHECKING:
    from trainshed.launch.preflight import PreflightVerdict


DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_PROCESS_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class ActorLocation:
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
class ActorTask:
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


class ProcessActor:
    """The actor. Its methods run beside each other: a stop must reach a process that `run` waits for."""

    def __init__(self) -> None:
        self._ranks: RankProcesses | None = None
        self._asked: int | None = None

    def place(self) -> ActorLocation:
        """Say where this actor is."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        return ActorLocation(
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

    def prove(self, task: PreflightTask) -> PreflightVerdict:
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
        return run_preflight(checks, node_rank=task.node, key_value_address=task.board, host=task.host)

    def run(self, task: ActorTask) -> RanksResult:
        """Run a process and wait for its end; what it prints goes to its log."""
        command = [task.program or sys.executable, *task.arguments]
        if task.prologue:
            command = ["bash", "-c", "\n".join((*task.prologue, 'exec "$@"')), "trainshed", *command]
        environment = {name: value for name, value in os.environ.items() if name not in task.hidden}
        environment |= machine_environment(task.precision) if task.precision is not None else {}
        environment |= {"PYTHONUNBUFFERED": "1", **task.environment, **read_secrets(task.secrets)}
        ranks = self._ranks = RankProcesses(grace_seconds=task.grace_seconds, failure_grace_seconds=0.0)
        try:
            ranks.start(command, task.rank, Path(task.logs), environment, log=task.log)
            if self._asked is not None:
                ranks.ask_to_stop(self._asked)
            while ranks.wait(_PROCESS_POLL_SECONDS):
                pass
            return ranks.result()
        finally:
            ranks.close()

    def ask_to_stop(self, signum: int) -> None:
        """Pass a signal on to the process, or to the one that is started next."""
        self._asked = signum
        if self._ranks is not None:
            self._ranks.ask_to_stop(signum)


def read_secrets(secrets: Mapping[str, SecretReference]) -> dict[str, str]:
    """Look secrets up on this node; a Kubernetes secret is a variable of the pod already."""
    found = {}
    for name, reference in secrets.items():
        if reference.env is not None:
            if reference.env not in os.environ:
                raise _missing_secret(name, f"the variable {reference.env}", "start Ray with it on every node")
            found[name] = os.environ[reference.env]
        elif reference.file is not None:
            try:
                found[name] = Path(reference.file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError):
                raise _missing_secret(name, f"the file {reference.file}", "put it on every node") from None
    return found


def _missing_secret(name: str, what: str, hint: str) -> InputError:
    return InputError(
        f"the secret {name} is not on the node {socket.gethostname()}: {what} cannot be read there", hint=hint
    )


def visible_devices_environment(places: Sequence[ActorLocation]) -> dict[str, str]:
    """What makes all GPUs of a node's actors visible to each of its ranks, in order.

    Ray shows each actor its own GPU only; engines count on LOCAL_RANK to choose among those of the node, and NCCL on
    seeing its peers. HIP reads both variables and takes its own; ROCR_VISIBLE_DEVICES lies beneath and would number
    the GPUs anew, so that it is left as the node has it.
    """
    gpus = ",".join(gpu for place in places for gpu in place.gpus)
    if not gpus:
        return {}
    return dict.fromkeys(DEVICE_VARIABLES if places[0].amd else DEVICE_VARIABLES[:1], gpus)


@dataclass(frozen=True)
class PreflightTask:
    """What an actor must know to prove its node."""

    cluster_file: str
    run: str
    attempt: int
    nodes: int
    gpus: int
    node: int
    board: tuple[str, int]
    """Where node 0 serves what all nodes tell each other."""
    host: str
    environment: Mapping[str, str]


FAILURE_GRACE_SECONDS = 20.0
"""How long ranks may take to write down where they stood when another has failed."""
_GROUP_POLL_SECONDS = 0.5
_KILL_MARGIN_SECONDS = 30.0  # an actor kills its process itself when the grace is over, and must be able to tell
_LOG_TAIL_BYTES = 4096


@dataclass(frozen=True)
class LostRank(RankFailure):
    """A rank whose actor has died, and what is known about that."""

    cause: str = ""

    @property
    def end_text(self) -> str:
        """How it ended, for a sentence that begins with the rank."""
        return self.cause


@dataclass(frozen=True)
class ActorGroupMember:
    """One actor, where it is (None: Ray starts it when there is room) and what it runs."""

    actor: Any
    place: ActorLocation | None
    task: ActorTask


class ActorGroup:
    """Runs the task of each member; `see_through` once."""

    def __init__(
        self, members: Mapping[int, ActorGroupMember], *, failure_grace_seconds: float = FAILURE_GRACE_SECONDS
    ) -> None:
        self._members = dict(members)
        self._failure_grace_seconds = failure_grace_seconds
        self._results: list[tuple[int, RanksResult]] = []  # in the order of time
        self._deadline = float("inf")
        self._told = False

    def see_through(self, asked: Callable[[], int | None], on_poll: Callable[[], None] = lambda: None) -> RanksResult:
        """Start every task and wait for all; `asked` says which signal has asked for a stop, if any."""
        import ray

        pending = {member.actor.run.remote(member.task): rank for rank, member in self._members.items()}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=_GROUP_POLL_SECONDS)
            for reference in done:
                rank = pending.pop(reference)
                self._ended(rank, self._result(rank, reference))
                ray.kill(self._members[rank].actor)  # its place may be waited for
            if (signum := asked()) is not None and not self._told:
                self._tell(signum, list(pending.values()))
            if pending and time.monotonic() >= self._deadline:
                for rank in pending.values():
                    ray.kill(self._members[rank].actor)
                    killed = RankFailure(rank, None, "SIGKILL", self._log_tail(rank), killed=True)
                    self._results.append((rank, RanksResult(137, [killed])))
                pending.clear()
            on_poll()
        return self._merged()

    def _tell(self, signum: int, ranks: list[int]) -> None:
        self._told = True
        grace = max((self._members[rank].task.grace_seconds for rank in ranks), default=0.0)
        self._deadline = min(self._deadline, time.monotonic() + grace + _KILL_MARGIN_SECONDS)
        for rank in ranks:
            self._members[rank].actor.ask_to_stop.remote(signum)

    def _result(self, rank: int, reference: Any) -> RanksResult:
        """What an actor returns, or what became of it."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return ray.get(reference)
        except RayActorError as error:
            cause = actor_death_reason(str(error), self._members[rank].place)
            return RanksResult(1, [LostRank(rank, None, None, self._log_tail(rank), cause=cause)])
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None

    def _ended(self, rank: int, result: RanksResult) -> None:
        self._results.append((rank, result))
        if result.failed:
            self._deadline = min(self._deadline, time.monotonic() + self._failure_grace_seconds)
        elif result.exit_code:  # it stopped as it was asked to; the others agree with it at the same step
            self._deadline = min(
                self._deadline, time.monotonic() + self._members[rank].task.grace_seconds + _KILL_MARGIN_SECONDS
            )

    def _merged(self) -> RanksResult:
        failed = [failure for _, result in self._results for failure in result.failed]
        # Within one look the order of time is not known; one whose actor died did not fall over another.
        failed.sort(key=lambda each: (each.killed, not isinstance(each, LostRank), each.signal is None))
        if failed:
            first = next(result for rank, result in self._results if rank == failed[0].rank)
            return replace(first, failed=failed)
        return RanksResult(max((result.exit_code for _, result in self._results), default=0), [])

    def _log_tail(self, rank: int) -> str:
        task = self._members[rank].task
        return log_tail(Path(task.logs) / (task.log or f"rank-{task.rank:05d}.log"))


def log_tail(log: Path) -> str:
    """Return the end of a log on the shared disk; empty where there is none yet."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def actor_death_reason(said: str, place: ActorLocation | None) -> str:
    """Say why an actor died, from Ray's own words about it."""
    lowered = said.lower()
    node = f"node {place.address}" if place is not None else "node"
    if "low on memory" in lowered or "out of memory" in lowered:
        return f"was killed by Ray: its {node} ran low on memory"
    if "node has died" in lowered or "node died" in lowered or "node was terminated" in lowered:
        return f"was lost with its {node}, which has left the Ray cluster"
    actor = f"its Ray actor (process {place.process} on {place.address})" if place is not None else "its Ray actor"
    return f"was lost: {actor} has died"
