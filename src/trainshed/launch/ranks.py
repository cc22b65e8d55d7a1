"""The ranks of one node as child processes, watched until the last one ends.

- This process gets TERM, INT or USR1: the ranks get the signal once. They have `grace_seconds` to agree on a step,
  write their checkpoint and exit with 128 + the signal. A second INT kills them.
- A rank fails: the others may be waiting for it in a collective. They get no signal, but have
  `failure_grace_seconds` to notice and to write down where they are. Then those that are left are killed.
- This process is killed: the kernel kills the ranks too.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from trainshed.errors import InputError
from trainshed.run_folder import rank_name
from trainshed.signals import STOP_SIGNALS, StopSignals
from trainshed.this_machine import usable_cpus

STOPPED_SECONDS = 10.0
"""A rank that has been stopped (SIGSTOP, a debugger) for this long is reported."""

FAILURE_GRACE_SECONDS = 20.0
"""How long ranks have to write their flight records after another has failed."""

_LOG_TAIL_BYTES = 4096
_KILL_SECONDS = 30.0  # a process that waits for a dead mount does not die even then
# 1 is PR_SET_PDEATHSIG in linux/prctl.h. The parent may have died before this call, hence the check after it.
_PARENT_DEATH_WRAPPER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


@dataclass(frozen=True)
class RankFailure:
    """A rank that did not end as it should; `killed` if we had to end it."""

    rank: int
    exit_code: int | None
    signal: str | None
    log_tail: str
    killed: bool = False
    stopped: bool = False
    """It was stopped (SIGSTOP) and never continued: it is the one the others waited for."""

    @property
    def end_text(self) -> str:
        """How it ended, as the rest of a sentence that begins with the rank."""
        if self.stopped:
            return "was stopped (SIGSTOP) and never went on"
        if self.killed:
            return "did not end and was killed"
        return f"was killed by {self.signal}" if self.signal else f"exited with {self.exit_code}"


@dataclass(frozen=True)
class RanksResult:
    """How the ranks of a node ended; the first failure comes first."""

    exit_code: int
    failed: list[RankFailure]
    killed_on_request: bool = False
    """A person interrupted twice: the ranks were killed and have saved nothing."""

    @property
    def ends(self) -> dict[int, str]:
        """How each rank ended, for `diagnose`; without the ranks that we killed and that may only have waited."""
        return {failure.rank: failure.end_text for failure in self.failed if failure.stopped or not failure.killed}


def run_ranks(
    command: Sequence[str],
    *,
    ranks: int,
    logs: Path,
    world_size: int | None = None,
    first_rank: int = 0,
    master: tuple[str, int] | None = None,
    environment: Mapping[str, str] | None = None,
    grace_seconds: float = 60.0,
    failure_grace_seconds: float = FAILURE_GRACE_SECONDS,
    on_poll: Callable[[], None] | None = None,
    on_failure: Callable[[], None] | None = None,
    peer_failed: Callable[[], bool] | None = None,
    on_stop_request: Callable[[int, bool], None] | None = None,
    on_stopped: Callable[[int, int], None] | None = None,
    poll_seconds: float = 0.1,
    stopped_seconds: float = STOPPED_SECONDS,
) -> RanksResult:
    """Start `ranks` processes of one command and wait for them all.

    `environment` is added to our own. `master` is where rank 0 of the whole job listens; without it, this node is the
    whole job and a free port is chosen. The callbacks:

    - `on_poll` is called every `poll_seconds`; if it raises, the ranks are killed.
    - `on_failure` is called once, when a rank has failed.
    - `peer_failed` is called with every poll and says whether a rank of another node has failed: the ranks here then
      have the same short grace.
    - `on_stop_request` gets the signal that asks the ranks to stop, and whether it is the second one, which kills them.
    - `on_stopped` gets, once, a rank that has been stopped (SIGSTOP) for `stopped_seconds`, and its process id. The
      rank is not killed for that.
    """
    if shutil.which(command[0]) is None:
        raise InputError(f"there is no program '{command[0]}' to start the ranks with")
    if master is None:
        if world_size not in (None, ranks):
            raise ValueError("ranks on several nodes need to be told their master")
        master = ("127.0.0.1", free_port())
    group = RankProcesses(
        grace_seconds=grace_seconds, failure_grace_seconds=failure_grace_seconds, on_stop_request=on_stop_request
    )
    watcher = StoppedRankWatcher(group, stopped_seconds, on_stopped)
    with ExitStack() as stack:
        stack.enter_context(StopSignals(on_signal=group.ask_to_stop))
        stack.callback(group.close)
        for local_rank in range(ranks):
            rank_variables = rank_environment(
                first_rank + local_rank, local_rank, ranks=ranks, world_size=world_size or ranks, master=master
            )
            group.start(
                command, first_rank + local_rank, logs, _shared_environment(environment, ranks) | rank_variables
            )
        while group.wait(poll_seconds):
            watcher.poll()
            if on_poll is not None:
                on_poll()
            if on_failure is not None and group.failing:
                on_failure()
                on_failure = None
            if peer_failed is not None and peer_failed():
                group.end_after_failure_grace()
    return group.result()


class RankProcesses:
    """The processes of one node's ranks: `start` each, `wait` until none is running, then read the `result`."""

    def __init__(
        self,
        *,
        grace_seconds: float,
        failure_grace_seconds: float,
        on_stop_request: Callable[[int, bool], None] | None = None,
    ) -> None:
        self._on_stop_request = on_stop_request
        self._killed_on_request = False
        self._stopped: set[int] = set()
        self._grace_seconds, self._failure_grace_seconds = grace_seconds, failure_grace_seconds
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: dict[int, Path] = {}
        self._ended: list[tuple[int, int]] = []  # rank and return code, in the order in which they ended
        self._killed: set[int] = set()
        self._pending_signals: list[int] = []  # to be forwarded; filled by a signal handler
        self._forwarded_signal: int | None = None
        self._deadline = float("inf")
        self._selector = selectors.DefaultSelector()
        self._pidfds: dict[int, int] = {}

    def start(
        self, command: Sequence[str], rank: int, logs: Path, environment: Mapping[str, str], *, log: str | None = None
    ) -> None:
        """Start one rank; its output goes to `rank-00000.log` in `logs`, or to the file named `log` there."""
        logs.mkdir(parents=True, exist_ok=True)
        self._logs[rank] = logs / (log or f"{rank_name(rank)}.log")
        with self._logs[rank].open("ab") as output:
            process = subprocess.Popen(
                with_parent_death_signal(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                process_group=0,
            )
        self._running[rank] = process
        with suppress(OSError, AttributeError):  # a system without pidfds: deaths are seen at the next poll
            self._pidfds[rank] = os.pidfd_open(process.pid)
            self._selector.register(self._pidfds[rank], selectors.EVENT_READ)

    def ask_to_stop(self, signum: int) -> None:
        """Forward a signal to the ranks at the next poll; may be called from a signal handler."""
        self._pending_signals.append(signum)

    @property
    def failing(self) -> bool:
        """Whether a rank has ended with an error."""
        return any(code != 0 and _shell_exit_code(code) not in _STOP_EXIT_CODES for _, code in self._ended)

    def stopped(self) -> dict[int, int]:
        """The ranks that are stopped (SIGSTOP), with their process ids; none on a machine without /proc."""
        return {rank: process.pid for rank, process in self._running.items() if _is_stopped(process.pid)}

    def end_after_failure_grace(self) -> None:
        """Kill the ranks after the failure grace: a rank of another node has failed, and these may wait for it."""
        self._end_within(self._failure_grace_seconds)

    def wait(self, seconds: float) -> bool:
        """Wait until a rank ends, at most `seconds`; forward signals, kill after the deadline. Whether any is left."""
        if self._pidfds:
            self._selector.select(seconds)
        elif self._running:
            time.sleep(seconds)
        self._collect()
        self._forward_signals()
        if self._running and time.monotonic() >= self._deadline:
            self.kill()
        return bool(self._running)

    def kill(self) -> None:
        """Kill the ranks that are left, with all their children."""
        self._stopped |= self.stopped().keys()
        for rank, process in self._running.items():
            self._killed.add(rank)
            _kill_group(process.pid)
        deadline = time.monotonic() + _KILL_SECONDS
        while self._running and time.monotonic() < deadline:
            self._collect()
            time.sleep(0.001)
        self._ended += [(rank, -signal.SIGKILL) for rank in self._running]
        self._running.clear()

    def close(self) -> None:
        """Kill the ranks that are left and close the selector."""
        self.kill()
        self._selector.close()

    def result(self) -> RanksResult:
        """Return how the ranks ended, once none is running."""
        if self._killed_on_request:
            return RanksResult(128 + signal.SIGINT, [], killed_on_request=True)
        codes = [_shell_exit_code(code) for _, code in self._ended if code != 0]
        if not self._killed and set(codes) <= _STOP_EXIT_CODES:
            requested_code = 128 + (self._forwarded_signal or 0)
            return RanksResult(0 if not codes else requested_code if requested_code in codes else codes[0], [])
        failed = [self._failure(rank, code) for rank, code in self._ended if code != 0]
        # Ranks that exited as a stop asks for are not failures if another rank really failed.
        failed = [failure for failure in failed if failure.exit_code not in _STOP_EXIT_CODES] or failed
        return RanksResult(_shell_exit_code(next(code for rank, code in self._ended if rank == failed[0].rank)), failed)

    def _failure(self, rank: int, code: int) -> RankFailure:
        name = signal.Signals(-code).name if code < 0 else None
        tail, killed = read_log_tail(self._logs[rank]), rank in self._killed
        return RankFailure(rank, code if code >= 0 else None, name, tail, killed, killed and rank in self._stopped)

    def _collect(self) -> None:
        """Collect the exit codes of ranks that have ended, and kill their children."""
        ended = []
        for rank, process in list(self._running.items()):
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill_group(process.pid)  # its children, while the process id still belongs to it
            ended.append((rank, process.wait()))
            del self._running[rank]
            if (pidfd := self._pidfds.pop(rank, None)) is not None:
                self._selector.unregister(pidfd)
                os.close(pidfd)
        # The order within one poll is not known. A rank killed by a signal comes first: it is the likelier cause.
        ended.sort(key=lambda rank_and_code: (rank_and_code[1] >= 0, rank_and_code[0]))
        self._ended += ended
        for _, code in ended:
            if code in _STOP_EXIT_CODES or (code < 0 and -code == self._forwarded_signal):
                self._end_within(self._grace_seconds)
            elif code != 0:
                self._end_within(self._failure_grace_seconds)

    def _forward_signals(self) -> None:
        while self._pending_signals:
            signum = self._pending_signals.pop(0)
            again = self._forwarded_signal == signum == signal.SIGINT
            if again:  # a person at a terminal who will not wait
                self._killed_on_request = True
                self._deadline = time.monotonic()
            if self._on_stop_request is not None and (again or self._forwarded_signal is None):
                self._on_stop_request(signum, again)
            if self._forwarded_signal is not None:
                continue
            self._forwarded_signal = signum
            self._end_within(self._grace_seconds)
            for process in self._running.values():
                # Only to the rank: the workers that read its data are needed until its last step.
                process.send_signal(signum)

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)


class StoppedRankWatcher:
    """Checks now and then for stopped (SIGSTOP) ranks, and reports each once."""

    def __init__(self, group: RankProcesses, seconds: float, on_stopped: Callable[[int, int], None] | None) -> None:
        self._group, self._seconds, self._on_stopped = group, seconds, on_stopped
        self._since: dict[int, float] = {}
        self._named: set[int] = set()
        self._due = 0.0

    def poll(self) -> None:
        """Check, if it is time to."""
        now = time.monotonic()
        if self._on_stopped is None or now < self._due:
            return
        self._due = now + self._seconds / 4
        stopped = self._group.stopped()
        self._since = {rank: self._since.get(rank, now) for rank in stopped}
        self._named &= stopped.keys()  # a rank that continued and is stopped again is reported again
        for rank, pid in stopped.items():
            if rank not in self._named and now - self._since[rank] >= self._seconds:
                self._named.add(rank)
                self._on_stopped(rank, pid)


def stopped_rank_text(rank: int, pid: int) -> str:
    """Return the sentence about a rank that is stopped (SIGSTOP)."""
    return f"rank {rank} is stopped (SIGSTOP), and training waits for it: `kill -CONT {pid}` lets it go on"


def rank_environment(
    rank: int, local_rank: int, *, ranks: int, world_size: int, master: tuple[str, int]
) -> dict[str, str]:
    """Return the variables by which every engine finds its rank and its peers."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }


def _shared_environment(added: Mapping[str, str] | None, ranks: int) -> dict[str, str]:
    environment = {**os.environ, **(added or {})}
    # By default every rank would start a thread for each core of the node.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // ranks)))
    environment.setdefault("PYTHONUNBUFFERED", "1")  # so that a killed rank loses no line of its log
    return environment


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


_STOP_EXIT_CODES = frozenset(128 + number for number in STOP_SIGNALS)


_KILL_SIGNAL: int = getattr(signal, "SIGKILL", 9)  # its number on Linux, where ranks run; Windows has none


def with_parent_death_signal(command: Sequence[str], number: int = _KILL_SIGNAL) -> list[str]:
    """Return the command in a wrapper: it asks the kernel to signal it when this process dies, then execs the command.

    This is not done between fork and exec: Python code there may hang in a parent that has threads.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _PARENT_DEATH_WRAPPER, str(os.getpid()), str(int(number)), *command]


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])  # the process name before it may hold anything


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _shell_exit_code(code: int) -> int:
    """Return a return code as a shell reports it."""
    return 128 - code if code < 0 else code


def read_log_tail(log: Path, max_bytes: int = _LOG_TAIL_BYTES) -> str:
    """Return the end of a log; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - max_bytes))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
