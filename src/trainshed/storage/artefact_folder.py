"""Where artefacts lie and who may make one: `<root>/<kind>/<hash of the spec>/`, one maker at a time.

Locks are the kernel's (flock): they end with the process that holds them, however it ends. Beside a lock stands who
holds it, for whoever waits.
"""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from trainshed.reporting import SILENT, Reporter
from trainshed.storage.lock_holder import LockHolder

LOOK_SECONDS = 0.2
TELL_SECONDS = 30.0
SILENT_SECONDS = 300.0
"""A holder that has shown no sign of life for so long may be on a machine that is gone without letting go."""


def artefact_folder(root: Path, kind: str, spec: Mapping[str, Any]) -> Path:
    """Return the folder of the artefact that a spec describes: the same spec finds it again, another makes another."""
    canonical = orjson.dumps(spec, option=orjson.OPT_SORT_KEYS)
    return root / kind / hashlib.sha256(canonical).hexdigest()[:16]


def describe_holder(holder: LockHolder | None) -> str:
    """Name a holder for people."""
    if holder is None:
        return "another process"
    return f"process {holder.pid} on {holder.host}, at work for {max(0, round(time.time() - holder.since))} s"


@contextmanager
def only_maker(folder: Path, reporter: Reporter = SILENT) -> Iterator[None]:
    """Be the only one who makes an artefact; of two that want it, one waits, says for whom, and then finds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f"{folder.name}.lock")
    with open(path, "ab") as lock:
        if not _taken_at_once(lock.fileno()):
            wait_for_holder(str(folder), path, lambda: not _taken_at_once(lock.fileno()), reporter)
        lock.truncate(0)
        lock.write(LockHolder.here().to_bytes())
        lock.flush()
        yield


def wait_for_holder(
    what: str, holder: Path, held: Callable[[], bool], reporter: Reporter, *, sign_of_life: Path | None = None
) -> None:
    """Wait until a lock is free, and tell for whom: at once, and again every half minute."""
    began, told = time.monotonic(), -TELL_SECONDS
    while held():
        waited = time.monotonic() - began
        if waited - told >= TELL_SECONDS:
            told = waited
            silent = _silent_seconds(sign_of_life)
            reporter.note(
                f"waiting: {what} is being made by {describe_holder(LockHolder.read(holder))}"
                + (f"; waited {waited:.0f} s" if waited >= TELL_SECONDS else "")
                + (
                    f"; nothing was written for {silent:.0f} s: if that machine is gone, remove {sign_of_life}"
                    if silent >= SILENT_SECONDS
                    else ""
                )
            )
        time.sleep(LOOK_SECONDS)
    reporter.note(f"going on: waited {time.monotonic() - began:.0f} s for {what}")


def _silent_seconds(sign_of_life: Path | None) -> float:
    try:
        return time.time() - sign_of_life.stat().st_mtime if sign_of_life is not None else 0.0
    except FileNotFoundError:
        return 0.0


def _taken_at_once(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # some network mounts know no locks
    return True
