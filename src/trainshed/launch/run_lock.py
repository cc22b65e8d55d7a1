"""Who works on a run on this machine now: one start at a time, and a dead one never stands in the way.

    <run>/running.json      who holds the run; locked for as long as its process lives

The kernel drops the lock with its holder, however that ends. What the file says counts only while it is locked.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trainshed.errors import InputError
from trainshed.observe.standing import standing
from trainshed.storage import LocalStore
from trainshed.storage.attempts import newest_record
from trainshed.storage.lock_holder import LockHolder

FILE = "running.json"
_TRIES = 20
_TRY_SECONDS = 0.05


@contextmanager
def only_start(run_folder: Path, run: str) -> Iterator[None]:
    """Hold a run; where somebody else does, raises `InputError` that says who, and leaves that one alone."""
    made = [folder for folder in (run_folder, *run_folder.parents) if not folder.exists()]
    with ExitStack() as stack:
        for _ in range(_TRIES):  # somebody who only looks has the lock for a moment, too
            run_folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((run_folder / FILE).open("a+b"))
            if _take(file, fcntl.LOCK_EX) is not False and _is_there(file, run_folder / FILE):
                break
            time.sleep(_TRY_SECONDS)
        else:
            held = holder(run_folder)
            raise InputError(
                f"{run} is being worked on already: {held_words(run_folder, held) if held else 'somebody holds it'}",
                where=str(run_folder / FILE),
                hint=_way_to_take_over(run, held),
            )
        file.truncate(0)
        file.write(LockHolder.here().to_bytes())
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
            _remove_empty(run_folder, made)


def holder(run_folder: Path) -> LockHolder | None:
    """Return who works on a run now, None where nobody does."""
    is_free: bool | None = False
    for _ in range(_TRIES):
        try:
            with (run_folder / FILE).open("rb") as file:
                is_free = _take(file, fcntl.LOCK_SH)
                if is_free:
                    return None
                held = LockHolder.from_bytes(file.read())
        except (FileNotFoundError, NotADirectoryError):
            return None
        if held is not None:
            return held if is_free is False or held.is_here else None
        if is_free is None:
            return None
        time.sleep(_TRY_SECONDS)  # it has just taken the lock, and writes who it is
    return None


def ask_to_stop(held: LockHolder) -> None:
    """Have a holder write a checkpoint and end, as Ctrl-C in its terminal does."""
    with suppress(ProcessLookupError):
        os.kill(held.pid, signal.SIGTERM)


def attempt_of(run_folder: Path, held: LockHolder) -> int | None:
    """Return the attempt that a holder trains, None while it still prepares."""
    newest = newest_record(LocalStore(run_folder), "")
    if newest is None or (newest.get("pid"), newest.get("host")) != (held.pid, held.host):
        return None
    return newest["attempt"]


def held_words(run_folder: Path, held: LockHolder) -> str:
    """Say which attempt a holder trains, who it is, and how far it has come."""
    attempt = attempt_of(run_folder, held)
    if attempt is None:
        return f"{held.words()}, before its first step"
    progress = standing(LocalStore(run_folder), "").words()
    return f"attempt {attempt}, {held.words()}" + (f", {progress}" if progress else "")


def _way_to_take_over(run: str, held: LockHolder | None) -> str:
    there = "" if held is None or held.is_here else f" on {held.host}"
    return (
        f"`trainshed status {run}` shows how it goes; to take over, `trainshed cancel {run}`{there} stops it after a "
        "checkpoint, then write this again"
    )


def _take(file: BinaryIO, how: int) -> bool | None:
    """Whether the lock was free and is ours now; None on a mount that knows no locks, where only fencing protects."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_there(file: BinaryIO, path: Path) -> bool:
    """Whether a file that was opened is still the one of its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_empty(run_folder: Path, made: Sequence[Path]) -> None:
    """Leave nothing of a start that was refused before it had written anything."""
    with suppress(OSError):
        if os.listdir(run_folder) == [FILE]:
            (run_folder / FILE).unlink()
            for folder in made:
                folder.rmdir()
