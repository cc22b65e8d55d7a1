"""Locks on files, and names that survive a power cut: the same calls on Linux, macOS and Windows.

A lock is the kernel's: it goes when its file is closed, however its holder ends. Linux and macOS have `flock`; Windows
locks a byte that no file has, as a locked byte cannot be read there.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol


def _system_module(name: str) -> Any:
    """Return a module that only some systems have; None on the others."""
    try:
        return import_module(name)
    except ImportError:
        return None


fcntl, msvcrt = _system_module("fcntl"), _system_module("msvcrt")
OPEN_BYTES: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Opens a file as bytes, and keeps its descriptor out of started processes. Windows would change line ends."""
_LOCKED_BYTE = 1 << 30
_POLL_SECONDS = 0.05


class _OpenFile(Protocol):
    def fileno(self) -> int: ...


def lock_file(file: int | _OpenFile, *, shared: bool = False, wait: bool = True) -> None:
    """Take the lock of an open file; several may share it.

    Raises `BlockingIOError` where somebody holds it and `wait` is false, and another `OSError` where files have no
    locks, as on some network mounts.
    """
    descriptor = file if isinstance(file, int) else file.fileno()
    if fcntl is not None:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    elif msvcrt is not None:
        _lock_byte(descriptor, getattr(msvcrt, "locking"), getattr(msvcrt, "LK_NBLCK"), wait=wait)  # noqa: B009
    else:
        raise OSError(errno.ENOTSUP, "files have no locks here")


def _lock_byte(descriptor: int, locking: Callable[[int, int, int], None], mode: int, *, wait: bool) -> None:
    """Lock the byte with which Windows marks a file as taken; its locks are never shared."""
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        while True:
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            try:
                return locking(descriptor, mode, 1)
            except OSError as error:
                if not wait:
                    raise BlockingIOError(errno.EWOULDBLOCK, "somebody else has locked it") from error
            time.sleep(_POLL_SECONDS)
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Write the names in a folder to disk; Windows does so with the files themselves."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(Path(folder), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
