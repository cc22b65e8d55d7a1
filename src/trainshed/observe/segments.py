"""Where a run's events lie, and how lines get there: an open file on a disk, whole segments in a bucket.

    <run>/events/attempt-0001/000001.jsonl      segments, written by rank 0 and by the launcher
    <run>/events/attempt-0001/rank-00003.jsonl  what another rank had in its ring when it failed

Nobody ever writes into a segment of another writer: a number that is taken is passed over.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from trainshed.errors import Conflict, StorageError
from trainshed.storage import ABSENT, Store, join, parse

VERSION = 1
"""Of an event's format: raised when an old reader would misread a new event; new kinds and keys do not need it."""

SEGMENT_BYTES = 4 * 1024 * 1024
"""A segment on a disk is closed at this size; a bucket's is closed by the clock."""

_SEGMENT = re.compile(r"(\d{6,})\.jsonl")


def events_folder(folder: str, attempt: int | None = None) -> str:
    """The folder of a run's events, or of one attempt's, inside the store."""
    parts = [folder.strip("/"), "events", "" if attempt is None else f"attempt-{attempt:04d}"]
    return "/".join(part for part in parts if part)


def ring_file(folder: str, attempt: int, rank: int) -> str:
    """Where a rank other than 0 leaves its last events when it fails."""
    return f"{events_folder(folder, attempt)}/rank-{rank:05d}.jsonl"


def segment_number(name: str) -> int | None:
    """The number of a segment by its file name; None for any other file."""
    found = _SEGMENT.fullmatch(name)
    return int(found[1]) if found else None


class Segments(Protocol):
    """Takes lines in order and never raises for a store that is in trouble: `flush` does."""

    def append(self, line: bytes) -> None:
        """Take one line; it is stored now or soon."""
        ...

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Store everything taken so far, or raise what stands in the way."""
        ...

    def close(self) -> None:
        """Flush, and close the segment."""
        ...


def open_segments(store: Store, folder: str, segment_seconds: float, on_recovery: Callable[[str], None]) -> Segments:
    """Open the next segment of an attempt's folder; `on_recovery` hears of a time when nothing could be stored."""
    address = parse(join(store.url, folder))
    if address.scheme == "file":
        return LocalSegments(Path(str(address)), on_recovery)
    return BucketSegments(store, folder, segment_seconds, on_recovery)


class LocalSegments:
    """Segments on a disk: every line is in the file before `append` returns, so others can follow it."""

    def __init__(self, folder: Path, on_recovery: Callable[[str], None]) -> None:
        self._folder = folder.absolute()
        self._on_recovery = on_recovery
        self._waiting: list[bytes] = []
        self._writing = False
        self._descriptor: int | None = None
        self._size = 0
        self._number = 0
        self._trouble: OSError | None = None
        self._lock = threading.RLock()

    def append(self, line: bytes) -> None:
        """Write one line; on a full disk it waits for the next one."""
        with self._lock:
            self._waiting.append(line)
            try:
                self._write()
            except OSError as error:
                self._trouble = error
                return
            trouble, self._trouble = self._trouble, None
        if trouble is not None:
            self._on_recovery(f"events could not be written for a while: {trouble.strerror or trouble}")

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Write what waits, and bring the file to the disk."""
        with self._lock:
            try:
                self._write()
                if self._descriptor is not None:
                    os.fsync(self._descriptor)
            except OSError as error:
                where = str(self._folder)
                raise StorageError(f"events cannot be written: {error.strerror or error}", where=where) from error

    def close(self) -> None:
        """Flush and close the file."""
        with self._lock:
            try:
                self.flush()
            finally:
                self._close_file()

    def _write(self) -> None:
        if self._writing:  # a signal handler emits in the middle of an emit, which will write its line too
            return
        self._writing = True
        try:
            while lines := list(self._waiting):
                self._write_lines(b"".join(lines))
                del self._waiting[: len(lines)]
        finally:
            self._writing = False

    def _write_lines(self, lines: bytes) -> None:
        if self._descriptor is None:
            self._descriptor, self._size = self._open_next(), 0
        try:
            view = memoryview(lines)
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)  # half a line would spoil the next one
            raise
        self._size += len(lines)
        if self._size >= SEGMENT_BYTES:
            os.fsync(self._descriptor)
            self._close_file()

    def _open_next(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        taken = [segment_number(name) or 0 for name in os.listdir(self._folder)]
        self._number = max([self._number, *taken])
        while True:
            self._number += 1
            path = self._folder / f"{self._number:06d}.jsonl"
            try:
                return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                continue

    def _close_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class BucketSegments:
    """Segments in a bucket: a thread puts what has gathered every `segment_seconds`, one request each."""

    def __init__(self, store: Store, folder: str, segment_seconds: float, on_recovery: Callable[[str], None]) -> None:
        self._store, self._folder = store, folder
        self._every_seconds = segment_seconds
        self._on_recovery = on_recovery
        self._changed = threading.Condition(threading.RLock())
        self._waiting: list[bytes] = []
        self._stored = self._in_flight = self._wanted = 0
        self._due = float("inf")
        self._number: int | None = None
        self._trouble: StorageError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        """Take one line; the thread puts it within `segment_seconds`."""
        with self._changed:
            self._waiting.append(line)
            if self._due == float("inf"):
                self._due = time.monotonic() + self._every_seconds
                self._changed.notify_all()

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until everything taken so far is in the bucket."""
        with self._changed:
            wanted = self._wanted = self._stored + self._in_flight + len(self._waiting)
            self._trouble = None
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._stored >= wanted or self._trouble is not None, timeout_seconds)
            if self._stored >= wanted:
                return
            if self._trouble is not None:
                raise self._trouble
            if not done:
                where = join(self._store.url, self._folder)
                raise StorageError(f"events are not stored after {timeout_seconds:g} seconds", where=where)

    def close(self) -> None:
        """Flush, and end the thread."""
        try:
            self.flush()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ready():
                    if self._closing:
                        return
                    self._changed.wait(min(self._due - time.monotonic(), threading.TIMEOUT_MAX))
                lines, self._waiting = self._waiting, []
                self._in_flight = len(lines)
                self._due = float("inf")
            if not self._put_until_stored(b"".join(lines)):
                return

    def _ready(self) -> bool:
        due = self._wanted > self._stored or time.monotonic() >= self._due
        return bool(self._waiting) and (due or (self._closing and self._trouble is None))

    def _put_until_stored(self, segment: bytes) -> bool:
        """Put one segment, again and again where the store fails: order is kept by not going on without it."""
        failed: StorageError | None = None
        while True:
            try:
                self._put(segment)
            except StorageError as error:
                failed = error
                with self._changed:
                    self._trouble = error
                    self._wanted = self._stored
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda: self._closing or self._wanted > self._stored, max(1.0, self._every_seconds)
                    )
                    if self._closing:
                        return False
                continue
            with self._changed:
                self._stored += self._in_flight
                self._in_flight = 0
                self._trouble = None
                self._changed.notify_all()
            if failed is not None:
                self._on_recovery(f"events could not be stored for a while: {failed.what}")
            return True

    def _put(self, segment: bytes) -> None:
        if self._number is None:
            paths = [info.path.rsplit("/", 1)[-1] for info in self._store.list(self._folder)]
            self._number = max([0, *(segment_number(name) or 0 for name in paths)]) + 1
        while True:
            path = f"{self._folder}/{self._number:06d}.jsonl"
            try:
                self._store.put(path, segment, expect=ABSENT)
            except Conflict:
                # Ours, where the answer to an earlier try was lost; else a writer that came before us.
                if self._store.read(path) != segment:
                    self._number += 1
                    continue
            self._number += 1
            return
