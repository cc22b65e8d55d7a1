"""Locks on a local disk, and who holds them: of two processes that make one artefact, one waits and says for whom.

Locks are the kernel's (`file_locks.py`): the kernel drops a lock with its holder, however that ends. Who holds it is
written into the lock's file or beside it, and counts only while the lock is held.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import orjson

from trainshed.file_locks import lock_file
from trainshed.reporting import SILENT, Reporter


@dataclass(frozen=True)
class LockHolder:
    """A process that holds a lock; `since` is in seconds since 1970."""

    pid: int
    host: str
    since: float
    started: int | None = None
    """When the process was started, as the kernel counts: another process of the same number has another one."""

    @classmethod
    def here(cls) -> LockHolder:
        """This process, now."""
        return cls(os.getpid(), socket.gethostname(), time.time(), _process_start(os.getpid()))

    def to_bytes(self) -> bytes:
        """As it is written."""
        return orjson.dumps(asdict(self)) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> LockHolder | None:
        """Read what `to_bytes` gave; None where nothing tells (one who has just taken the lock)."""
        try:
            return cls(**orjson.loads(data))
        except (orjson.JSONDecodeError, TypeError):
            return None

    @classmethod
    def read(cls, path: Path) -> LockHolder | None:
        """Read who holds a lock from its file; None where the file does not say."""
        try:
            return cls.from_bytes(path.read_bytes())
        except OSError:
            return None

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.host == socket.gethostname() and self.started == _process_start(self.pid)

    def words(self) -> str:
        """Who it is, for a sentence."""
        return f"process {self.pid} on {self.host} since {datetime.fromtimestamp(self.since):%Y-%m-%d %H:%M:%S}"


def _process_start(pid: int) -> int | None:
    """When a process was started: field 22 of /proc/PID/stat (man 5 proc); None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


POLL_SECONDS = 0.2
REPORT_SECONDS = 30.0
SILENT_SECONDS = 300.0
"""A holder without a sign of life for this long may be on a machine that was lost with its lock."""


def describe_holder(holder: LockHolder | None) -> str:
    """Name a holder for people."""
    if holder is None:
        return "another process"
    return f"process {holder.pid} on {holder.host}, at work for {max(0, round(time.time() - holder.since))} s"


@contextmanager
def artefact_lock(folder: Path, reporter: Reporter = SILENT) -> Iterator[None]:
    """Be the only one who makes an artefact; of two that want it, one waits, says for whom, and then finds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f"{folder.name}.lock")
    with open(path, "ab") as lock:
        if not _try_lock(lock.fileno()):
            wait_for_lock(str(folder), path, lambda: not _try_lock(lock.fileno()), reporter)
        lock.truncate(0)
        lock.write(LockHolder.here().to_bytes())
        lock.flush()
        yield


def wait_for_lock(
    what: str, holder: Path, held: Callable[[], bool], reporter: Reporter, *, sign_of_life: Path | None = None
) -> None:
    """Wait until a lock is free, and tell for whom: at once, and again every half minute."""
    began, reported = time.monotonic(), -REPORT_SECONDS
    while held():
        waited = time.monotonic() - began
        if waited - reported >= REPORT_SECONDS:
            reported = waited
            silent = _silent_seconds(sign_of_life)
            reporter.note(
                f"waiting: {what} is being made by {describe_holder(LockHolder.read(holder))}"
                + (f"; waited {waited:.0f} s" if waited >= REPORT_SECONDS else "")
                + (
                    f"; nothing was written for {silent:.0f} s: if that machine is gone, remove {sign_of_life}"
                    if silent >= SILENT_SECONDS
                    else ""
                )
            )
        time.sleep(POLL_SECONDS)
    reporter.note(f"going on: waited {time.monotonic() - began:.0f} s for {what}")


def _silent_seconds(sign_of_life: Path | None) -> float:
    try:
        return time.time() - sign_of_life.stat().st_mtime if sign_of_life is not None else 0.0
    except FileNotFoundError:
        return 0.0


def _try_lock(descriptor: int) -> bool:
    try:
        lock_file(descriptor, wait=False)
    except BlockingIOError:
        return False
    except OSError:
        pass  # some network mounts know no locks
    return True
