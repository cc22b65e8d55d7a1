"""Actors that run one process each on their node, and a group of them from start to end.

The process is a child and not the actor itself: when it crashes, the actor can still report how; when it hangs, the
actor can end it. When the actor dies (killed, its node low on memory, its driver gone), the kernel kills the child, and
a watcher kills what the child has started.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainshed.errors import InputError
from trainshed.launch.attempt import machine_environment
from trainshed.launch.ranks import RankFailure, RankProcesses, RanksResult, read_log_tail
from trainshed.launch.ray.script_driver import ending_with_this_process
from trainshed.recipe import SecretReference

_PROCESS_POLL_SECONDS = 0.1
_GROUP_POLL_SECONDS = 0.5
_KILL_MARGIN_SECONDS = 15.0  # an actor kills its process itself when the grace is over, and needs time to report it


@dataclass(frozen=True)
class ActorLocation:
    """Where an actor runs."""

    address: str
    hostname: str
    node: str
    """Ray's id of the node: several nodes may share an address."""
    process: int


@dataclass(frozen=True)
class ActorTask:
    """One process to run."""

    arguments: tuple[str, ...]
    """Of this node's Python, or of `program`."""
    number: int
    """Its node or part."""
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    program: str | None = None
    prologue: tuple[str, ...] = ()
    """Lines of bash that run before it."""
    precision: str | None = None
    """What it computes in, where the machine's own variables (`machine_environment`) are to be set."""
    unset: tuple[str, ...] = ()
    """Variables of the actor that it must not see."""
    secrets: Mapping[str, SecretReference] = field(default_factory=dict)
    grace_seconds: float = 60.0


class ProcessActor:
    """The actor. Its methods run concurrently: a stop must reach a process that `run` waits for."""

    def __init__(self) -> None:
        self._processes: RankProcesses | None = None
        self._stop_signal: int | None = None

    def location(self) -> ActorLocation:
        """Return where this actor runs."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return ActorLocation(ray.util.get_node_ip_address(), socket.gethostname(), node, os.getpid())

    def run(self, task: ActorTask) -> RanksResult:
        """Run a process and wait for its end; what it prints goes to its log."""
        command = [task.program or sys.executable, *task.arguments]
        if task.prologue:
            command = ["bash", "-c", "\n".join((*task.prologue, 'exec "$@"')), "trainshed", *command]
        environment = {name: value for name, value in os.environ.items() if name not in task.unset}
        environment |= machine_environment(task.precision, task.environment) if task.precision is not None else {}
        environment |= {"PYTHONUNBUFFERED": "1", **task.environment, **read_secrets(task.secrets)}
        processes = self._processes = RankProcesses(grace_seconds=task.grace_seconds, failure_grace_seconds=0.0)
        with ending_with_this_process() as mark:
            try:
                processes.start(command, task.number, task.log.parent, environment | mark, log=task.log.name)
                if self._stop_signal is not None:
                    processes.ask_to_stop(self._stop_signal)
                while processes.wait(_PROCESS_POLL_SECONDS):
                    pass
                return processes.result()
            finally:
                processes.close()

    def ask_to_stop(self, signum: int) -> None:
        """Pass a signal on to the process, or to the one that is started next."""
        self._stop_signal = signum
        if self._processes is not None:
            self._processes.ask_to_stop(signum)


def read_secrets(secrets: Mapping[str, SecretReference]) -> dict[str, str]:
    """Look secrets up on this node; a Kubernetes secret is already a variable of the pod."""
    values = {}
    for name, reference in secrets.items():
        if reference.env is not None:
            if reference.env not in os.environ:
                raise _missing_secret(name, f"the variable {reference.env}", "start Ray with it on every node")
            values[name] = os.environ[reference.env]
        elif reference.file is not None:
            try:
                values[name] = Path(reference.file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError):
                raise _missing_secret(name, f"the file {reference.file}", "put it on every node") from None
    return values


def _missing_secret(name: str, source: str, hint: str) -> InputError:
    return InputError(
        f"the secret {name} is not on the node {socket.gethostname()}: {source} cannot be read there", hint=hint
    )


@dataclass(frozen=True)
class LostActor(RankFailure):
    """An actor that has died, and why."""

    cause: str = ""

    @property
    def end_text(self) -> str:
        """How it ended, for a sentence that begins with its rank, node or part."""
        return self.cause


@dataclass(frozen=True)
class ActorGroupMember:
    """One actor, where it runs (None: Ray starts it when there is room) and its task."""

    actor: Any
    location: ActorLocation | None
    task: ActorTask


class ActorGroup:
    """Runs the task of each member; call `run` once.

    When a task fails or an actor dies, the other tasks have `failure_grace_seconds` to end and are then killed.
    `survives` can decide that they go on instead: it gets the number of the member and the failure.
    """

    def __init__(
        self,
        members: Mapping[int, ActorGroupMember],
        *,
        failure_grace_seconds: float,
        survives: Callable[[int, RankFailure], bool] = lambda _number, _failure: False,
    ) -> None:
        self._members = dict(members)
        self._failure_grace_seconds, self._survives = failure_grace_seconds, survives
        self._results: list[tuple[int, RanksResult]] = []  # in the order of time
        self._deadline = float("inf")
        self._stop_sent = False

    def run(self, stop_signal: Callable[[], int | None], on_poll: Callable[[], None] = lambda: None) -> RanksResult:
        """Start every task and wait for all; `stop_signal` returns the signal that has asked for a stop, if any."""
        import ray

        pending = {member.actor.run.remote(member.task): number for number, member in self._members.items()}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=_GROUP_POLL_SECONDS)
            for reference in done:
                number = pending.pop(reference)
                self._record_end(number, self._result(number, reference))
                ray.kill(self._members[number].actor)  # another part may wait for its resources
            if (signum := stop_signal()) is not None and not self._stop_sent:
                self._send_stop(signum, list(pending.values()))
            if pending and time.monotonic() >= self._deadline:
                for number in pending.values():
                    ray.kill(self._members[number].actor)
                    killed = RankFailure(number, None, "SIGKILL", self._log_tail(number), killed=True)
                    self._results.append((number, RanksResult(137, [killed])))
                pending.clear()
            on_poll()
        return self._merged()

    def end_within(self, seconds: float) -> None:
        """Kill whoever has not ended by then."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _send_stop(self, signum: int, numbers: list[int]) -> None:
        self._stop_sent = True
        grace = max((self._members[number].task.grace_seconds for number in numbers), default=0.0)
        self.end_within(grace + _KILL_MARGIN_SECONDS)
        for number in numbers:
            self._members[number].actor.ask_to_stop.remote(signum)

    def _result(self, number: int, reference: Any) -> RanksResult:
        """What an actor returns, or why it died."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return ray.get(reference)
        except RayActorError as error:
            cause = actor_death_reason(str(error), self._members[number].location)
            return RanksResult(1, [LostActor(number, None, None, self._log_tail(number), cause=cause)])
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None

    def _record_end(self, number: int, result: RanksResult) -> None:
        self._results.append((number, result))
        if result.failed:
            if not self._survives(number, result.failed[0]):
                self.end_within(self._failure_grace_seconds)
        elif result.exit_code:  # it stopped on request; the others stop at the same step
            self.end_within(self._members[number].task.grace_seconds + _KILL_MARGIN_SECONDS)

    def _merged(self) -> RanksResult:
        failed = [failure for _, result in self._results for failure in result.failed]
        # Within one poll the order of time is not known; an actor that died did not fail because of another.
        failed.sort(key=lambda failure: (failure.killed, not isinstance(failure, LostActor), failure.signal is None))
        if failed:
            first = next(result for number, result in self._results if number == failed[0].rank)
            return replace(first, failed=failed)
        return RanksResult(max((result.exit_code for _, result in self._results), default=0), [])

    def _log_tail(self, number: int) -> str:
        return read_log_tail(self._members[number].task.log)


def actor_death_reason(message: str, location: ActorLocation | None) -> str:
    """Return why an actor died, from Ray's own message about it."""
    lowered = message.lower()
    node = f"node {location.address}" if location is not None else "node"
    if "low on memory" in lowered or "out of memory" in lowered:
        return f"was killed by Ray: its {node} ran low on memory"
    if "node has died" in lowered or "node died" in lowered or "node was terminated" in lowered:
        return f"was lost with its {node}, which has left the Ray cluster"
    process = f" (process {location.process} on {location.address})" if location is not None else ""
    return f"was lost: its Ray actor{process} has died"
