"""A local file that appears whole or not at all, however the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trainshed.errors import Conflict, NoSpace


def commit(file: BinaryIO, path: Path, *, last: bool = True) -> None:
    """Flush a file of `partial_file` to disk and give it its name.

    With `last=False` the name itself may be lost in a power cut; a later commit in the same folder makes it
    safe.
    """
    file.flush()
    os.fsync(file.fileno())
    _partial(path).replace(path)
    if not last:
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def partial_file(path: Path) -> Iterator[BinaryIO]:
    """Yield `path.partial`, empty, for writing; `commit` inside the block makes it `path`.

    The name is fixed, so a killed writer leaves nothing that the next one does not overwrite; the lock keeps
    two living writers apart.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "r+b") as file:
            _lock(file, path)
            try:
                file.truncate(0)
                yield file
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace("the disk is full", where=str(path), hint="free some space, then run it again") from error
        raise


@contextmanager
def replace_file(path: Path, *, last: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that takes the name `path` when the block ends without an error."""
    with partial_file(path) as file:
        yield file
        commit(file, path, last=last)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between our open and our lock its writer may have committed: we would then truncate the result.
        ours = os.path.samestat(os.fstat(file.fileno()), os.stat(_partial(path)))
    except (BlockingIOError, FileNotFoundError):
        ours = False
    if not ours:
        raise Conflict(
            "another process is writing this file",
            where=str(path),
            hint="wait for it, or write to another path",
        )
