"""Makes this process look like one on macOS or Windows, as far as the client can tell, and runs commands in it.

    python other_systems.py darwin|win32 COMMAND…      each COMMAND is a line of words for `trainshed`

What those systems lack is removed before Trainshed is imported: a call to it fails here as it does there. A file that
Trainshed opens as text without an encoding is an error: Windows would read it in the encoding of its country. A command
after `2:` has to end with exit code 2.
"""

from __future__ import annotations

import importlib.abc
import os
import select
import shlex
import shutil
import signal
import sys
import warnings
from types import ModuleType
from typing import Any, NoReturn

MISSING_MODULES = {
    "darwin": (),
    "win32": ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix_ipc", "syslog"),
}
MISSING_CALLS = {
    "darwin": ("sched_getaffinity", "sched_setaffinity", "memfd_create", "eventfd", "splice", "posix_fadvise"),
    "win32": (
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "eventfd", "splice", "posix_fadvise"),
        *("fork", "forkpty", "preadv", "pread", "pwritev", "pwrite", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK"),
        *("uname", "getuid", "geteuid", "getgid", "killpg", "setsid", "getpgid", "sysconf", "statvfs", "mkfifo"),
        *("WNOHANG", "waitid", "posix_fallocate", "fchmod", "chown", "getloadavg", "nice"),
    ),
}
MISSING_SIGNALS = {
    "darwin": ("SIGPWR", "SIGRTMIN", "SIGRTMAX", "SIGPOLL", "SIGSTKFLT"),
    "win32": ("SIGUSR1", "SIGUSR2", "SIGKILL", "SIGHUP", "SIGALRM", "SIGSTOP", "SIGCONT", "SIGCHLD", "SIGPIPE"),
}


class _Blocked(importlib.abc.MetaPathFinder):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: Any) -> None:
        if name in self.names:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def become(system: str) -> None:
    """Take away what a system has not."""
    # Libraries that choose their own parts by the system are imported first: those for Windows exist only there.
    import asyncio
    import concurrent.futures.thread
    import ctypes
    import logging.handlers
    import multiprocessing.connection
    import subprocess
    import tempfile
    import uuid
    import zoneinfo

    import cyclopts
    import httpx2
    import huggingface_hub.hf_api
    import numpy
    import obstore.store
    import pydantic.type_adapter
    import rich.console
    import rich.progress
    import starlette.applications
    import uvicorn
    import yaml

    del asyncio, concurrent, ctypes, logging, multiprocessing, subprocess, tempfile, uuid, zoneinfo, cyclopts
    del httpx2, huggingface_hub, numpy, obstore, pydantic, rich, starlette, uvicorn, yaml
    warnings.filterwarnings("error", category=EncodingWarning, module=r"trainshed\b")
    if system == "win32":
        sys.modules["msvcrt"] = _windows_locks()
        free, total = shutil.disk_usage("/").free, shutil.disk_usage("/").total
        # The standard library asks Windows itself, not statvfs.
        shutil.disk_usage = lambda _: shutil._ntuple_diskusage(total, total - free, free)  # type: ignore[attr-defined]
    for name in MISSING_MODULES[system]:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Blocked(MISSING_MODULES[system]))
    for name in MISSING_CALLS[system]:
        if hasattr(os, name):
            delattr(os, name)
    for name in MISSING_SIGNALS[system]:
        if hasattr(signal, name):
            delattr(signal, name)
    for name in ("epoll", "poll") if system == "win32" else ("epoll",):
        delattr(select, name)
    sys.platform = system
    before = os.stat

    def refuse(path: object) -> NoReturn:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    def stat(path: Any, *rest: Any, **options: Any) -> os.stat_result:
        return refuse(path) if _is_linux_only(path) else before(path, *rest, **options)

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _is_linux_only(arguments[0]):
            refuse(arguments[0])

    os.stat = stat
    sys.addaudithook(look)


def _windows_locks() -> ModuleType:
    """Return `msvcrt` with its lock of bytes, made of the lock of this system."""
    import fcntl

    module = ModuleType("msvcrt")

    def locking(descriptor: int, _mode: int, count: int) -> None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, count, 0, os.SEEK_CUR)

    module.LK_NBLCK, module.locking = 2, locking  # type: ignore[attr-defined]
    return module


def _is_linux_only(path: object) -> bool:
    return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc/", "/sys/", "/dev/shm"))  # type: ignore[arg-type]


def main() -> None:
    """Run each command; the first that fails ends it."""
    system, *commands = sys.argv[1:]
    become(system)
    from trainshed.cli import run_cli

    for command in commands:
        sys.stdout.write(f"$ trainshed {command}\n")
        sys.stdout.flush()
        wanted, _, words = command.rpartition(": ")
        code = run_cli([*shlex.split(words), "--debug"])
        if code != int(wanted or 0):
            raise SystemExit(f"{command}: exit code {code}")


if __name__ == "__main__":
    main()
