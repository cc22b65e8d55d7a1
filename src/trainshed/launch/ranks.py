"""The ranks of one node as child processes, seen through to their end.

Whoever starts them is told to stop (TERM, INT, USR1): the ranks are told once and have a grace to agree on a step,
write their checkpoint and exit with 128 + the signal; a second INT kills them. A rank fails: the others may be waiting
for it in a collective, so they are not told anything but have a short grace to notice and to write down where they
stood. Whoever is left then is killed. Whoever started them is killed itself: the kernel kills them too.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trainshed.errors import InputError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""A run that gets one of these writes a checkpoint and exits with 128 + its number."""

STOPPED_SECONDS = 10.0
"""A rank that has been stopped (SIGSTOP, a debugger) for so long is named."""

FAILURE_GRACE_SECONDS = 20.0
"""How long ranks have to write their flight records after another has failed."""

_LOG_TAIL_BYTES = 4096
_KILL_SECONDS = 30.0  # a process that waits for a dead mount does not even die
# 1 is PR_SET_PDEATHSIG in linux/prctl.h. The parent may have died before it was asked for.
_PARENT_DEATH_WRAPPER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class RankFailure:
    """A rank that did not end as it should; `killed` where we had to end it."""

    rank: int
    exit_code: int | None
    signal: str | None
    log_tail: str
    killed: bool = False
    stopped: bool = False
    """Somebody had stopped it, and nobody let it go on: it is the one the others waited for."""

    @property
    def how(self) -> str:
        """How it ended, for a sentence that begins with the rank."""
        if self.stopped:
            return "was stopped (SIGSTOP) and never went on"
        if self.killed:
            return "did not end and was killed"
        return f"was killed by {self.signal}" if self.signal else f"exited with {self.exit_code}"


@dataclass(frozen=True)
class RanksResult:
    """How the ranks of a node ended; failures in the order of time."""

    exit_code: int
    failed: list[RankFailure]
    given_up: bool = False
    """Somebody interrupted twice: the ranks were killed and have saved nothing."""

    @property
    def ends(self) -> dict[int, str]:
        """How ranks ended, for `flight.diagnose`, without those we killed that may only have been waiting."""
        return {failure.rank: failure.how for failure in self.failed if failure.stopped or not failure.killed}


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
    others_failed: Callable[[], bool] | None = None,
    on_asked: Callable[[int, bool], None] | None = None,
    on_stopped: Callable[[int, int], None] | None = None,
    poll_seconds: float = 0.1,
    stopped_seconds: float = STOPPED_SECONDS,
) -> RanksResult:
    """Start `ranks` processes of one command and wait for them all.

    `environment` is added to our own. `master` is where rank 0 of the whole world listens; it is found here when the
    world is this node. `on_poll` is called every `poll_seconds`; if it raises, the ranks are killed. `on_failure`
    is called once when a rank has failed. `others_failed` is asked with every poll whether a rank of another node has:
    those here then have the same short grace. `on_asked` hears the signal that asks all to stop, and whether it is the
    second one, after which nobody waits for them. `on_stopped` hears once of a rank, and its process, that has been
    stopped for `stopped_seconds`; it is not killed for that.
    """
    if shutil.which(command[0]) is None:
        raise InputError(f"there is no program '{command[0]}' to start the ranks with")
    if master is None:
        if world_size not in (None, ranks):
            raise ValueError("ranks on several nodes need to be told their master")
        master = ("127.0.0.1", free_port())
    group = RankProcesses(grace_seconds=grace_seconds, failure_grace_seconds=failure_grace_seconds, on_asked=on_asked)
    stops = StoppedRankWatcher(group, stopped_seconds, on_stopped)
    with ExitStack() as stack:
        stack.enter_context(forward_stop_signals(group))
        stack.callback(group.close)
        for local in range(ranks):
            place = rank_environment(
                first_rank + local, local, ranks=ranks, world_size=world_size or ranks, master=master
            )
            group.start(command, first_rank + local, logs, _shared_environment(environment, ranks) | place)
        while group.wait(poll_seconds):
            stops.look()
            if on_poll is not None:
                on_poll()
            if on_failure is not None and group.failing:
                on_failure()
                on_failure = None
            if others_failed is not None and others_failed():
                group.end_soon()
    return group.result()


class RankProcesses:
    """The processes of one node's ranks: start them, `wait` until it says no, then ask for the `result`."""

    def __init__(
        self,
        *,
        grace_seconds: float,
        failure_grace_seconds: float,
        on_asked: Callable[[int, bool], None] | None = None,
    ) -> None:
        self._on_asked = on_asked
        self._given_up = False
        self._stopped: set[int] = set()
        self._grace_seconds, self._failure_grace_seconds = grace_seconds, failure_grace_seconds
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._logs: dict[int, Path] = {}
        self._ended: list[tuple[int, int]] = []  # rank and return code, in the order of time
        self._killed: set[int] = set()
        self._asked: list[int] = []  # signals to pass on, filled by a signal handler
        self._told: int | None = None
        self._deadline = float("inf")
        self._watched = selectors.DefaultSelector()
        self._pidfds: dict[int, int] = {}

    def start(
        self, command: Sequence[str], rank: int, logs: Path, environment: Mapping[str, str], *, log: str | None = None
    ) -> None:
        """Start one rank; what it prints goes to `rank-00000.log` in `logs`, or to the file named `log` there."""
        logs.mkdir(parents=True, exist_ok=True)
        self._logs[rank] = logs / (log or f"rank-{rank:05d}.log")
        with self._logs[rank].open("ab") as printed:
            process = subprocess.Popen(
                _with_parent_death_signal(command),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                process_group=0,
            )
        self._running[rank] = process
        with suppress(OSError, AttributeError):  # where there are none, deaths are seen at the next poll
            self._pidfds[rank] = os.pidfd_open(process.pid)
            self._watched.register(self._pidfds[rank], selectors.EVENT_READ)

    def ask_to_stop(self, signum: int) -> None:
        """Pass a signal on to the ranks at the next poll; may be called from a signal handler."""
        self._asked.append(signum)

    @property
    def failing(self) -> bool:
        """Whether a rank has ended that nobody had asked to."""
        return any(code != 0 and _shell_exit_code(code) not in _STOP_EXIT_CODES for _, code in self._ended)

    def stopped(self) -> dict[int, int]:
        """The ranks that somebody has stopped, with their processes; none where the machine has no /proc."""
        return {rank: process.pid for rank, process in self._running.items() if _is_stopped(process.pid)}

    def end_soon(self) -> None:
        """A rank on another node has failed: these may be waiting for it, and have the grace of a failure."""
        self._end_within(self._failure_grace_seconds)

    def wait(self, seconds: float) -> bool:
        """Wait until a rank ends, at most so long; then do what is due. Whether any rank is still running."""
        if self._pidfds:
            self._watched.select(seconds)
        elif self._running:
            time.sleep(seconds)
        self._collect()
        self._pass_on()
        if self._running and time.monotonic() >= self._deadline:
            self.kill()
        return bool(self._running)

    def kill(self) -> None:
        """Kill whoever is left, with all their children."""
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
        """Leave nobody behind."""
        self.kill()
        self._watched.close()

    def result(self) -> RanksResult:
        """How it ended, once nobody is left."""
        if self._given_up:
            return RanksResult(128 + signal.SIGINT, [], given_up=True)
        codes = [_shell_exit_code(code) for _, code in self._ended if code != 0]
        if not self._killed and set(codes) <= _STOP_EXIT_CODES:
            told = 128 + (self._told or 0)
            return RanksResult(0 if not codes else told if told in codes else codes[0], [])
        failed = [self._failure(rank, code) for rank, code in self._ended if code != 0]
        # Ranks that reported a stop as they should are no failures beside one that did not.
        failed = [each for each in failed if each.exit_code not in _STOP_EXIT_CODES] or failed
        return RanksResult(_shell_exit_code(next(code for rank, code in self._ended if rank == failed[0].rank)), failed)

    def _failure(self, rank: int, code: int) -> RankFailure:
        name = signal.Signals(-code).name if code < 0 else None
        tail, killed = read_log_tail(self._logs[rank]), rank in self._killed
        return RankFailure(rank, code if code >= 0 else None, name, tail, killed, killed and rank in self._stopped)

    def _collect(self) -> None:
        """Take leave of the ranks that have ended."""
        ended = []
        for rank, process in list(self._running.items()):
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill_group(process.pid)  # its children, while its number still belongs to it
            ended.append((rank, process.wait()))
            del self._running[rank]
            if (pidfd := self._pidfds.pop(rank, None)) is not None:
                self._watched.unregister(pidfd)
                os.close(pidfd)
        # Within one look the order of time is not known; one that was killed did not fall over another.
        ended.sort(key=lambda each: (each[1] >= 0, each[0]))
        self._ended += ended
        for _, code in ended:
            if code in _STOP_EXIT_CODES or (code < 0 and -code == self._told):
                self._end_within(self._grace_seconds)
            elif code != 0:
                self._end_within(self._failure_grace_seconds)

    def _pass_on(self) -> None:
        while self._asked:
            signum = self._asked.pop(0)
            again = self._told == signum == signal.SIGINT
            if again:  # somebody at a terminal who will not wait
                self._given_up = True
                self._deadline = time.monotonic()
            if self._on_asked is not None and (again or self._told is None):
                self._on_asked(signum, again)
            if self._told is not None:
                continue
            self._told = signum
            self._end_within(self._grace_seconds)
            for process in self._running.values():
                # To the rank alone: workers that read its data are needed until its last step.
                process.send_signal(signum)

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)


class StoppedRankWatcher:
    """Looks now and then for ranks that somebody has stopped, and says so of each once."""

    def __init__(self, group: RankProcesses, seconds: float, on_stopped: Callable[[int, int], None] | None) -> None:
        self._group, self._seconds, self._on_stopped = group, seconds, on_stopped
        self._since: dict[int, float] = {}
        self._named: set[int] = set()
        self._due = 0.0

    def look(self) -> None:
        """Look, if it is time to."""
        now = time.monotonic()
        if self._on_stopped is None or now < self._due:
            return
        self._due = now + self._seconds / 4
        stopped = self._group.stopped()
        self._since = {rank: self._since.get(rank, now) for rank in stopped}
        self._named &= stopped.keys()  # one that went on and is stopped again is news
        for rank, process in stopped.items():
            if rank not in self._named and now - self._since[rank] >= self._seconds:
                self._named.add(rank)
                self._on_stopped(rank, process)


def stopped_rank_text(rank: int, process: int) -> str:
    """What is said of a rank that somebody has stopped."""
    return f"rank {rank} is stopped (SIGSTOP), and training waits for it: `kill -CONT {process}` lets it go on"


def rank_environment(
    rank: int, local_rank: int, *, ranks: int, world_size: int, master: tuple[str, int]
) -> dict[str, str]:
    """What every engine reads to find its place in the world."""
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
    # Left to itself every rank would start a thread for each core of the node.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    environment.setdefault("PYTHONUNBUFFERED", "1")  # a rank that is killed takes no line with it
    return environment


def free_port() -> int:
    """A port of this machine that nobody listens on just now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


_STOP_EXIT_CODES = frozenset(128 + number for number in STOP_SIGNALS)


@contextmanager
def forward_stop_signals(group: RankProcesses) -> Generator[None]:
    """Have the signals that ask us to stop passed on; only a main thread may, others have no say in signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, lambda number, _: group.ask_to_stop(number)) for each in STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _with_parent_death_signal(command: Sequence[str]) -> list[str]:
    """The command behind a few lines that ask the kernel to kill it when we die, and then become it.

    Not done between fork and exec: Python code there may hang in a parent that has threads.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _PARENT_DEATH_WRAPPER, str(os.getpid()), *command]


def _is_stopped(process: int) -> bool:
    try:
        facts = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return facts.rpartition(")")[2].split()[:1] in (["T"], ["t"])  # the name before it may hold anything


def _kill_group(process: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _shell_exit_code(code: int) -> int:
    """A return code as a shell would tell it."""
    return 128 - code if code < 0 else code


def read_log_tail(log: Path) -> str:
    """Return the end of a log; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


class StopSignalListener:
    """Remembers the first signal that asked this process to stop; while ranks run, they are told instead."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignalListener:
        self._before = {each: signal.signal(each, self._ask) for each in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)  # type: ignore[arg-type]

    @property
    def exit_code(self) -> int | None:
        """128 + the signal; None while nobody has asked."""
        return None if self.signal is None else 128 + self.signal

    def _ask(self, number: int, _: object) -> None:
        self.signal = self.signal or number
