"""Run by the rank pool: imports PyTorch and the engine once, then forks the ranks of every job it is sent.

Forking is sound here because nothing has started a thread yet, which is checked before every job.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

_LAST_WORDS_SECONDS = 5.0
"""Between the moment a rank writes down where it hangs and its end."""
_STORE_SECONDS = 10.0
"""How long rank 0 stays for the others after an error of its own: it hosts the store that they may still read."""


@dataclass(frozen=True)
class Job:
    """What every rank of a world calls, and the environment it gets besides its place."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    ranks: int
    timeout_seconds: float
    environment: Mapping[str, str]


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: with a value, with an error (its traceback), or by a signal. `said` is what it printed."""

    rank: int
    value: Any
    error: str | None
    signal: str | None
    hung: bool
    said: str


def run_job(job: Job) -> list[RankEnd]:
    """Fork the ranks of one job and wait for them all."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: importing the engine must start none, or ranks cannot be forked"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        children = {_fork(job, rank, folder): rank for rank in range(job.ranks)}
        statuses, hung = _wait(children, job.timeout_seconds + _LAST_WORDS_SECONDS)
        return [_end(folder, rank, statuses[rank], rank in hung) for rank in range(job.ranks)]


def _fork(job: Job, rank: int, folder: Path) -> int:
    server = os.getpid()
    child = os.fork()
    if child == 0:
        _rank(job, rank, folder, server)
    return child


def _rank(job: Job, rank: int, folder: Path, server: int) -> NoReturn:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ranks do not outlive the server
    if os.getppid() != server:
        os._exit(1)
    said = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(job.environment)
    if job.ranks > 1:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.ranks)})
    warnings.simplefilter("error")
    faulthandler.dump_traceback_later(job.timeout_seconds, file=sys.stderr)
    try:
        outcome = (job.function(*job.arguments), None)
    except BaseException:
        outcome = (None, traceback.format_exc())
    part = folder / f"part-{rank}"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(folder / f"outcome-{rank}")
    if rank == 0 and outcome[1] is not None:
        _wait_for_outcomes(folder, job.ranks)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _wait_for_outcomes(folder: Path, ranks: int) -> None:
    deadline = time.monotonic() + _STORE_SECONDS
    while len(list(folder.glob("outcome-*"))) < ranks and time.monotonic() < deadline:
        time.sleep(0.01)


def _wait(children: dict[int, int], seconds: float) -> tuple[dict[int, int], set[int]]:
    """Wait for all children, the last of them by force; return wait statuses by rank and who had to be killed."""
    deadline = time.monotonic() + seconds
    statuses: dict[int, int] = {}
    hung: set[int] = set()
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            statuses[children.pop(child)] = status
        elif time.monotonic() > deadline and not hung:
            hung = set(children.values())
            for each in children:
                os.kill(each, signal.SIGKILL)
        else:
            time.sleep(0.002)
    return statuses, hung


def _end(folder: Path, rank: int, status: int, hung: bool) -> RankEnd:
    outcome = folder / f"outcome-{rank}"
    value, error = pickle.loads(outcome.read_bytes()) if outcome.exists() else (None, None)
    killed = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else None
    if not outcome.exists() and killed is None:
        error = f"left with exit code {os.waitstatus_to_exitcode(status)} and no word"
    return RankEnd(rank, value, error, killed, hung, (folder / f"said-{rank}").read_text(errors="replace"))


def main(handle: int) -> None:
    """Serve jobs until nobody is left who could send one."""
    import torch

    import trainshed.engines.torch.rank
    import trainshed.workflow  # noqa: F401

    torch.set_num_threads(1)
    with Connection(handle) as connection:
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            except Exception:  # a function that this process does not find
                connection.send(traceback.format_exc())
                continue
            connection.send(run_job(job))


if __name__ == "__main__":
    # Jobs name `Job` and `RankEnd` by this module, not by `__main__`.
    from support.runs import rank_server

    rank_server.main(int(sys.argv[1]))
