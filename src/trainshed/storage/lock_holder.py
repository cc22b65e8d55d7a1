"""Who holds a lock of the kernel's (flock), for whoever finds it taken: written into the lock's file, or beside it.

The kernel drops a lock with its holder, however that ends. What the file says counts only while the lock is held.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import orjson


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
        return cls(os.getpid(), socket.gethostname(), time.time(), _started(os.getpid()))

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
        """Read who holds a lock from its file; None where that is not told there."""
        try:
            return cls.from_bytes(path.read_bytes())
        except OSError:
            return None

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.host == socket.gethostname() and self.started == _started(self.pid)

    def words(self) -> str:
        """Who it is, for a sentence."""
        return f"process {self.pid} on {self.host} since {datetime.fromtimestamp(self.since):%Y-%m-%d %H:%M:%S}"


def _started(pid: int) -> int | None:
    """When a process was started: field 22 of /proc/PID/stat (man 5 proc); None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
