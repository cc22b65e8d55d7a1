"""The stored events of a run: where they are, how lines are written, and how they are read or followed.

    <run>/events/attempt-0001/000001.jsonl      segments, written by rank 0 and by the launcher
    <run>/events/attempt-0001/rank-00003.jsonl  what another rank had in its ring buffer when it failed

A segment on a disk is an open file; one in a bucket is put whole. A bucket that is mounted as a disk shows a file to
others once it is closed, so there a segment is closed after some time too. A writer never writes into the segment of
another one: it takes the next free number. `attempt-0000` has the events that belong to no attempt (`stages.py`).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import orjson

from trainshed.errors import Conflict, CorruptData, StorageError, TrainshedError
from trainshed.file_locks import OPEN_BYTES
from trainshed.run_folder import EVENTS, attempt_name, attempt_number, rank_name
from trainshed.storage import ABSENT, ObjectInfo, Store, join, list_after, parse

EVENT_VERSION = 1
"""The version of the format. It rises when an old reader would misread a new event, not for new kinds and keys."""

SEGMENT_BYTES = 4 * 1024 * 1024
"""A segment on a disk is closed at this size; one in a bucket after some time."""

_SEGMENT = re.compile(r"(\d{6,})\.jsonl")


def events_folder(folder: str, attempt: int | None = None) -> str:
    """Return the folder of a run's events, or of one attempt's, inside the store."""
    parts = [folder.strip("/"), EVENTS, "" if attempt is None else attempt_name(attempt)]
    return "/".join(part for part in parts if part)


def ring_dump_path(folder: str, attempt: int, rank: int) -> str:
    """Return where a rank other than 0 stores its last events when it fails."""
    return f"{events_folder(folder, attempt)}/{rank_name(rank)}.jsonl"


def segment_number(name: str) -> int | None:
    """Return the number of a segment by its file name; None for any other file."""
    match = _SEGMENT.fullmatch(name)
    return int(match[1]) if match else None


class SegmentWriter(Protocol):
    """Takes lines in order. `append` never raises for a store that fails; `flush` does."""

    def append(self, line: bytes) -> None:
        """Take one line; it is stored now or soon."""
        ...

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Store everything taken so far, or raise the error that prevents it."""
        ...

    def close(self) -> None:
        """Flush, and close the segment."""
        ...


def open_segment_writer(
    store: Store, folder: str, segment_seconds: float, on_recovery: Callable[[str], None]
) -> SegmentWriter:
    """Open the next segment of an attempt's folder; `on_recovery` is called when storing works again."""
    address = parse(join(store.url, folder))
    if address.scheme == "file":
        path = Path(str(address))
        return LocalSegmentWriter(path, on_recovery, segment_seconds if is_mounted_bucket(path) else None)
    return BucketSegmentWriter(store, folder, segment_seconds, on_recovery)


def is_mounted_bucket(path: Path, mounts: str | None = None) -> bool:
    """Whether a path is on a FUSE mount, which is how GCS FUSE, BlobFuse and Mountpoint for S3 show a bucket.

    `mounts` is the text of /proc/self/mounts (man 5 proc).
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
    kinds = {fields[1]: fields[2] for line in mounts.splitlines() if len(fields := line.split()) > 2}
    absolute = path.absolute()
    kind = next((kinds[str(folder)] for folder in (absolute, *absolute.parents) if str(folder) in kinds), "")
    return kind == "fuse" or kind.startswith("fuse.")


class LocalSegmentWriter:
    """Segments on a disk: every line is in the file before `append` returns, so others can follow it.

    With `close_seconds` a segment is also closed by the first line that comes that long after it was begun.
    """

    def __init__(self, folder: Path, on_recovery: Callable[[str], None], close_seconds: float | None = None) -> None:
        self._folder = folder.absolute()
        self._close_seconds, self._opened_at = close_seconds, 0.0
        self._on_recovery = on_recovery
        self._pending: list[bytes] = []
        self._writing = False
        self._descriptor: int | None = None
        self._size = 0
        self._number = 0
        self._error: OSError | None = None
        self._lock = threading.RLock()

    def append(self, line: bytes) -> None:
        """Write one line; if the disk is full, it is written with the next one."""
        with self._lock:
            self._pending.append(line)
            try:
                self._write()
            except OSError as error:
                self._error = error
                return
            earlier_error, self._error = self._error, None
        if earlier_error is not None:
            reason = earlier_error.strerror or earlier_error
            self._on_recovery(f"events could not be written for a while: {reason}")

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Write the pending lines, and sync the file to the disk."""
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
        if self._writing:  # called by a signal handler in the middle of a write, which will write this line too
            return
        self._writing = True
        try:
            while lines := list(self._pending):
                self._write_lines(b"".join(lines))
                del self._pending[: len(lines)]
        finally:
            self._writing = False

    def _write_lines(self, lines: bytes) -> None:
        if self._descriptor is None:
            self._descriptor, self._size = self._open_next(), 0
            self._opened_at = time.monotonic()
        try:
            view = memoryview(lines)
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)  # half a line would corrupt the next one
            raise
        self._size += len(lines)
        is_old = self._close_seconds is not None and time.monotonic() - self._opened_at >= self._close_seconds
        if self._size >= SEGMENT_BYTES or is_old:
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
                return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | OPEN_BYTES, 0o666)
            except FileExistsError:
                continue

    def _close_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class BucketSegmentWriter:
    """Segments in a bucket: every `segment_seconds` a thread puts the pending lines with one request."""

    def __init__(self, store: Store, folder: str, segment_seconds: float, on_recovery: Callable[[str], None]) -> None:
        self._store, self._folder = store, folder
        self._every_seconds = segment_seconds
        self._on_recovery = on_recovery
        self._changed = threading.Condition(threading.RLock())
        self._pending: list[bytes] = []
        self._stored = self._in_flight = self._wanted = 0
        self._flush_at = float("inf")
        self._number: int | None = None
        self._error: StorageError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        """Take one line; the thread puts it within `segment_seconds`."""
        with self._changed:
            self._pending.append(line)
            if self._flush_at == float("inf"):
                self._flush_at = time.monotonic() + self._every_seconds
                self._changed.notify_all()

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Wait until everything taken so far is in the bucket."""
        with self._changed:
            wanted = self._wanted = self._stored + self._in_flight + len(self._pending)
            self._error = None
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._stored >= wanted or self._error is not None, timeout_seconds)
            if self._stored >= wanted:
                return
            if self._error is not None:
                raise self._error
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
                    self._changed.wait(min(self._flush_at - time.monotonic(), threading.TIMEOUT_MAX))
                lines, self._pending = self._pending, []
                self._in_flight = len(lines)
                self._flush_at = float("inf")
            if not self._put_until_stored(b"".join(lines)):
                return

    def _ready(self) -> bool:
        due = self._wanted > self._stored or time.monotonic() >= self._flush_at
        return bool(self._pending) and (due or (self._closing and self._error is None))

    def _put_until_stored(self, segment: bytes) -> bool:
        """Put one segment, and retry while the store fails. To keep the order, nothing else is put before it."""
        failed: StorageError | None = None
        while True:
            try:
                self._put(segment)
            except StorageError as error:
                failed = error
                with self._changed:
                    self._error = error
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
                self._error = None
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
                # It is ours if the answer to an earlier try was lost, otherwise another writer's.
                if self._store.read(path) != segment:
                    self._number += 1
                    continue
            self._number += 1
            return


_SEGMENTS_PER_READ = 32
"""Segments of a bucket that are read at a time: a month of them is some 90,000."""


def read_events(store: Store, folder: str, *, attempt: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, of all attempts or of one, in the order they were written.

    `folder` is the run's folder inside the store. A last line that a killed writer left unfinished is skipped.
    """
    base = events_folder(folder)
    listed = store.list(base if attempt is None else events_folder(folder, attempt))
    segments = sorted(key for info in listed if (key := _segment_key(info.path[len(base) :].strip("/"))) is not None)
    names = [f"{base}/{name}" for _, _, name in segments]
    with ThreadPoolExecutor(8) as pool:
        for first in range(0, len(names), _SEGMENTS_PER_READ):
            batch = names[first : first + _SEGMENTS_PER_READ]
            for name, content in zip(batch, pool.map(store.read, batch), strict=True):
                yield from parse_events(content, join(store.url, name))


def read_steps(store: Store, folder: str) -> list[dict[str, Any]]:
    """Return the step events of a run by step; if a step was done again, that of the later attempt."""
    by_step = {event["step"]: event for event in read_events(store, folder) if event["kind"] == "step"}
    return [by_step[step] for step in sorted(by_step)]


def completed_steps(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the step events that still count, of events in the order they were written.

    A run that resumes from a checkpoint does again the steps that a killed attempt had done after it.
    """
    done: list[dict[str, Any]] = []
    for event in events:
        add_completed_step(done, event)
    return done


def add_completed_step(done: list[dict[str, Any]], event: dict[str, Any]) -> None:
    """Change the list of steps that count (see `completed_steps`) by the next event."""
    if event["kind"] in ("step", "resume"):
        while done and done[-1]["step"] >= event["step"]:
            done.pop()
    if event["kind"] == "step":
        done.append(event)


class EventSource(Protocol):
    """What follows the events of a run while they are written."""

    def poll(self) -> list[dict[str, Any]]:
        """Return the events written since the last call, across segments and attempts."""
        ...


def follow_events(store: Store, folder: str, *, newest_segments: int | None = None) -> EventSource:
    """Return what follows the events of the run in `folder` of a store, which need not exist yet.

    `newest_segments` is for a run in a bucket: see `BucketEventFollower`.
    """
    address = parse(join(store.url, folder))
    if address.scheme == "file":
        return EventFollower(str(address))
    return BucketEventFollower(store, folder, newest_segments=newest_segments)


class EventFollower:
    """Follows the events of a run in a local folder while they are written.

    `path` is the run's folder, which need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self._events = Path(path) / events_folder("")
        self._read: dict[str, int] = {}

    def poll(self) -> list[dict[str, Any]]:
        """Return the events written since the last call, across segments and attempts."""
        events: list[dict[str, Any]] = []
        for _, _, name in sorted(self._segments()):
            path = self._events / name
            start = self._read.get(name, 0)
            try:
                if path.stat().st_size <= start:
                    continue
                with path.open("rb") as file:
                    file.seek(start)
                    content = file.read()
            except FileNotFoundError:  # the run is being removed
                continue
            events += parse_events(content, str(path))
            self._read[name] = start + content.rfind(b"\n") + 1
        return events

    def _segments(self) -> Iterator[tuple[int, int, str]]:
        try:
            attempts = [entry.name for entry in os.scandir(self._events) if entry.is_dir()]
            names = [f"{attempt}/{name}" for attempt in attempts for name in os.listdir(self._events / attempt)]
        except FileNotFoundError:
            return
        for name in names:
            if (key := _segment_key(name)) is not None:
                yield key


class BucketEventFollower:
    """Follows the events of a run in a bucket: one listing in `list_seconds` at most, and one get per new segment.

    A listing begins at the newest segment that is known, so it is one request however long the run is. An attempt that
    was overtaken is not listed again. With `newest_segments` the first poll reads only that many, the first segment
    of each attempt, and what belongs to no attempt: a month of segments is too much for a look.
    """

    def __init__(
        self, store: Store, folder: str, *, list_seconds: float = 1.0, newest_segments: int | None = None
    ) -> None:
        self._store, self._base = store, events_folder(folder)
        self._list_seconds, self._newest_segments = list_seconds, newest_segments
        self._list_at = -float("inf")
        self._read: dict[str, int] = {}
        self._newest: dict[int, tuple[int, str]] = {}
        self._attempt_turn = True

    def poll(self) -> list[dict[str, Any]]:
        """Return the events that were put since the last call; none where that was a moment ago."""
        if time.monotonic() < self._list_at:
            return []
        self._list_at = time.monotonic() + self._list_seconds
        keys: list[tuple[int, int, str]] = []
        for info in self._listed():
            name = info.path[len(self._base) :].strip("/")
            if (key := _segment_key(name)) is not None and info.size > self._read.get(name, 0):
                keys.append(key)
        keys.sort()
        if self._newest_segments is not None and not self._read:
            keys = self._recent(keys)
        events: list[dict[str, Any]] = []
        names = [name for _, _, name in keys]
        with ThreadPoolExecutor(8) as pool:
            for name, content in zip(names, pool.map(self._read_new, names), strict=True):
                events += parse_events(content, join(self._store.url, f"{self._base}/{name}"))
                self._read[name] = self._read.get(name, 0) + content.rfind(b"\n") + 1
        for attempt, number, name in keys:
            self._newest[attempt] = max(self._newest.get(attempt, (0, "")), (number, name))
        return events

    def _listed(self) -> Iterator[ObjectInfo]:
        """List what may be new: after the newest segment, and in turn after the newest of no attempt."""
        if not self._newest:
            return self._store.list(self._base)
        attempt = max(self._newest)
        self._attempt_turn = attempt == 0 or not self._attempt_turn
        folder = self._base if self._attempt_turn else f"{self._base}/{attempt_name(0)}"
        _, name = self._newest.get(attempt if self._attempt_turn else 0, (0, ""))
        if not name:
            return self._store.list(folder)
        # Without its last letter, so that the newest is listed again: through a mount a segment can still grow.
        return list_after(self._store, folder, f"{self._base}/{name[:-1]}")

    def _recent(self, keys: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
        first = {attempt: (attempt, number, name) for attempt, number, name in reversed(keys)}
        of_none = {key for key in keys if key[0] == 0}
        return sorted({*first.values(), *of_none, *keys[-(self._newest_segments or 0) :]})

    def _read_new(self, name: str) -> bytes:
        return self._store.read(f"{self._base}/{name}", self._read.get(name, 0))


def parse_events(content: bytes, where: str) -> list[dict[str, Any]]:
    """Return the events of one file; what is after the last line break is unfinished, and left out."""
    events = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            event = orjson.loads(line)
            version = event["v"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise CorruptData(
                "this line holds no event",
                where=f"{where}:{number}",
                hint="put back a copy of the file; without one delete it: its figures are lost, checkpoints are not",
            ) from None
        if version > EVENT_VERSION:
            raise TrainshedError(
                f"events of version {version} were written by a newer Trainshed",
                where=where,
                hint="read them with the version that trained this run, or a later one",
            )
        events.append(event)
    return events


def _segment_key(name: str) -> tuple[int, int, str] | None:
    """Return a segment's attempt, number and name below the events' folder; None for any other file."""
    folder, _, file = name.partition("/")
    attempt, number = attempt_number(folder), segment_number(file)
    return (attempt, number, name) if attempt is not None and number is not None else None
