"""Daemons that a whole test session shares: pytest-xdist workers meet in a folder guarded by a file lock, the first one
starts them, the last one stops them by pid. Whoever kills a test run leaves nothing behind: a watcher of its own looks
after them.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support import TESTS


@dataclass(frozen=True)
class Daemons:
    """How some daemons are started in a folder and stopped; `start` returns a dataclass that says where they are."""

    prefix: str
    start: Callable[[Path], Any]
    stop: Callable[[Path], None]
    module: str
    """The module that, run with the meeting point, watches over them (`watch_in_background`)."""


@contextmanager
def shared(daemons: Daemons, meeting_point: Path) -> Iterator[dict[str, Any]]:
    """Start the daemons, or join those another worker started, and stop them with the last user."""
    meeting_point.mkdir(parents=True, exist_ok=True)
    state, me = meeting_point / "state.json", meeting_point / f"user-{os.getpid()}"
    with _locked(meeting_point / "lock"):
        me.touch()
        if not state.exists():
            # Short and outside pytest's folder: a unix socket's path may have 107 characters.
            folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"{daemons.prefix}-{uuid.uuid4().hex[:8]}"
            state.write_text(json.dumps({"place": asdict(daemons.start(folder)), "folder": str(folder)}))
            silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            subprocess.run([sys.executable, "-m", daemons.module, str(meeting_point)], cwd=TESTS, check=True, **silent)
        found = json.loads(state.read_text())
    try:
        yield found["place"]
    finally:
        with _locked(meeting_point / "lock"):
            me.unlink()
            _stop_unused(daemons, meeting_point, Path(found["folder"]))


def watch_in_background(daemons: Daemons, meeting_point: Path) -> None:
    """Leave a process behind that stops the daemons when all who used them are gone without having stopped them."""
    if os.fork():
        os._exit(0)
    os.setsid()
    folder = Path(json.loads((meeting_point / "state.json").read_text())["folder"])
    while folder.exists():
        time.sleep(2)
        with _locked(meeting_point / "lock") if meeting_point.exists() else nullcontext():
            _stop_unused(daemons, meeting_point, folder)


def _stop_unused(daemons: Daemons, meeting_point: Path, folder: Path) -> None:
    users = meeting_point.glob("user-*")
    if not any(running(int(user.name.removeprefix("user-"))) for user in users):
        daemons.stop(folder)
        (meeting_point / "state.json").unlink(missing_ok=True)


def kill_all(pids: Sequence[int]) -> None:
    """Kill processes at once; those that are gone are not error."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids_in(folder: Path) -> list[int]:
    """The daemons that have left their pid in a folder."""
    return [int(text) for file in folder.glob("*.pid") if (text := file.read_text().strip())]


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_ports(count: int, first: int, end: int) -> list[int]:
    """Ports nobody listens on; below 32768 no outgoing connection takes one between here and the daemon's bind."""
    found: list[int] = []
    for port in range(first + os.getpid() % 5000, end):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"no {count} free ports below {end}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
