"""Moving one object of a copy, or proving that it is there already; and the journal of what a copy has proven.

The journal saves a rerun from reading terabytes again. Records are collected and stored every few seconds as one
small object below `.trainshed/journal/`, so a bucket sees a request now and then and not one per file. A journal
only saves work: a lost record means that one file is copied again, and a record counts only while source and
destination still have the versions it names.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainshed.errors import AccessDenied, Conflict, CorruptData, NoSpace, NotFound, StorageError
from trainshed.reporting import ProgressTask, Reporter
from trainshed.storage.address import join
from trainshed.storage.checksum import Hasher, algorithm_of, checksum_of
from trainshed.storage.listing import STATE_FOLDER, CopyItem
from trainshed.storage.store import ABSENT, ObjectInfo, Retry, Store

JOURNAL_FOLDER = f"{STATE_FOLDER}/journal"
_MAX_RECORDS = 1000
_MAX_SEGMENTS = 64
_SEGMENT = re.compile(re.escape(JOURNAL_FOLDER) + r"/([^/]+)/(\d{6})-[0-9a-f]{8}\.jsonl")


@dataclass(frozen=True)
class CopyRecord:
    """One file that arrived: its checksum, and the versions of both ends at that time."""

    path: str
    size: int
    checksum: str
    source: str
    version: str


class CopyJournal:
    """The records of one task of a copy; those of other tasks are read and left alone."""

    def __init__(self, store: Store, name: str, *, every_seconds: float, reporter: Reporter) -> None:
        self._store = store
        self._name = name
        self._every = every_seconds
        self._reporter = reporter
        self._lock = threading.Lock()
        self._fresh: list[CopyRecord] = []
        self._own: dict[str, CopyRecord] = {}
        self._segments: list[str] = []
        self._number = 0
        self._written = time.monotonic()

    def load(self, listing: Iterable[ObjectInfo]) -> dict[str, CopyRecord]:
        """All records below the destination, from a listing of it; later ones win."""
        names = sorted(info.path for info in listing if _SEGMENT.fullmatch(info.path))
        with ThreadPoolExecutor(8) as pool:
            loaded = list(pool.map(self._read, names))
        records: dict[str, CopyRecord] = {}
        for name, loaded_value in zip(names, loaded, strict=True):
            records |= loaded_value
            match = _SEGMENT.fullmatch(name)
            if match and match[1] == self._name:
                self._own |= loaded_value
                self._segments.append(name)
                self._number = max(self._number, int(match[2]))
        return records

    def add(self, record: CopyRecord) -> None:
        """Note one file; stored by now or within a few seconds of further work."""
        with self._lock:
            self._fresh.append(record)
            self._own[record.path] = record
            self._flush_if_due()

    def tick(self) -> None:
        """Store what has waited long enough."""
        with self._lock:
            self._flush_if_due()

    def close(self) -> None:
        """Store what is left, as one segment in place of many."""
        with self._lock:
            if len(self._segments) + bool(self._fresh) > 1:
                self._compact()
            else:
                self._flush()

    def _flush_if_due(self) -> None:
        if len(self._fresh) >= _MAX_RECORDS or time.monotonic() - self._written >= self._every:
            self._flush()

    def _flush(self) -> None:
        if not self._fresh:
            return
        if len(self._segments) >= _MAX_SEGMENTS:
            self._compact()
            return
        self._segments.append(self._write(self._fresh))
        self._fresh = []
        self._written = time.monotonic()

    def _compact(self) -> None:
        old, self._segments = self._segments, [self._write(self._own.values())]
        self._fresh = []
        self._written = time.monotonic()
        for name in old:
            self._store.delete(name)

    def _write(self, records: Iterable[CopyRecord]) -> str:
        self._number += 1
        # A part by chance: a copy that was thought dead must not write into the segments of its successor.
        path = f"{JOURNAL_FOLDER}/{self._name}/{self._number:06d}-{os.urandom(4).hex()}.jsonl"
        lines = [json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records]
        with suppress(Conflict):  # nobody else has this name: our own write had arrived, and its answer was lost
            self._store.put(path, "".join(lines).encode(), expect=ABSENT)
        return path

    def _read(self, path: str) -> dict[str, CopyRecord]:
        try:
            lines = self._store.read(path).splitlines()
            return {record.path: record for record in (_record_from_json(json.loads(line)) for line in lines)}
        except NotFound:  # another task has just put many segments into one
            return {}
        except (ValueError, TypeError):
            self._reporter.warn(f"{path} cannot be read; what it lists is copied again")
            return {}


def _record_from_json(document: dict[str, Any]) -> CopyRecord:
    """One record; journals of before BLAKE3 call the checksum by its algorithm."""
    if "sha256" in document:
        document["checksum"] = document.pop("sha256")
    return CopyRecord(**document)


# Streams already go on by themselves where they broke; this is for what breaks a whole object.
_OBJECT_ATTEMPTS = 3
_CHUNK_BYTES = 4 * 1024 * 1024


class SourceMissing(Exception):
    """The source does not have the object (any more)."""


class CopyStopped(Exception):
    """Another object's failure ended the copy."""


class SourceDenied(Exception):
    """The source does not let us read the object."""

    def __init__(self, error: AccessDenied) -> None:
        super().__init__(error.what)
        self.error = error


@dataclass(frozen=True)
class CopyOutcome:
    """A finished object; no record for an empty folder's marker."""

    record: CopyRecord | None
    moved: bool


class Transfer:
    """All that the workers of one copy share."""

    def __init__(
        self,
        destination: Store,
        there: dict[str, ObjectInfo],
        records: dict[str, CopyRecord],
        journal: CopyJournal,
        retry: Retry,
        reporter: Reporter,
    ) -> None:
        self._destination = destination
        self._there = there
        self._records = records
        self._journal = journal
        self._retry = retry
        self._reporter = reporter
        self._stop = threading.Event()
        self._report_lock = threading.Lock()

    def stop(self) -> None:
        """Make all workers end at their next chunk."""
        self._stop.set()

    def already_copied(self, item: CopyItem) -> bool:
        """Whether listing and journal alone show that an object is in place."""
        record, info = self._records.get(item.path), self._there.get(item.path)
        return bool(
            record
            and info
            and item.info
            and _same_source(item, record)
            and (info.size, info.version) == (record.size, record.version)
        )

    def proven(self, item: CopyItem) -> CopyOutcome:
        """The outcome for such an object."""
        return CopyOutcome(self._records[item.path], moved=False)

    def run(self, item: CopyItem, task: ProgressTask) -> CopyOutcome:
        """Copy one object unless it turns out to be there."""
        outcome = self._place(self._asked_about(item), task)
        if outcome.record is not None and outcome.record != self._records.get(item.path):
            self._journal.add(outcome.record)  # here, not where results are gathered: a kill loses less
        return outcome

    def _place(self, item: CopyItem, task: ProgressTask) -> CopyOutcome:
        if self.already_copied(item):
            self._advance(task, item.size or 0)
            return self.proven(item)
        in_place = self._found_in_place(item)
        if in_place is not None:
            self._advance(task, in_place.size)
            return CopyOutcome(in_place, moved=False)
        for attempt in range(_OBJECT_ATTEMPTS):
            hasher = Hasher() if item.sha256 is None else Hasher.like(item.sha256)
            try:
                return CopyOutcome(self._move(item, hasher, task), moved=True)
            except SourceMissing:
                if item.size == 0:  # how some stores show the marker of an empty folder
                    return CopyOutcome(None, moved=False)
                raise
            except (NoSpace, AccessDenied, Conflict):
                raise
            except (StorageError, CorruptData) as error:
                if attempt + 1 == _OBJECT_ATTEMPTS:
                    raise
                self._advance(task, -hasher.size)
                with self._report_lock:
                    self._reporter.warn(
                        f"{item.path}: {error.what}; trying again (attempt {attempt + 2} of {_OBJECT_ATTEMPTS})"
                    )
                self._retry.pause(attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _move(self, item: CopyItem, hasher: Hasher, task: ProgressTask) -> CopyRecord:
        with self._destination.writer(item.path, size=item.size) as writer:
            for chunk in self._chunks(item):
                hasher.update(chunk)
                writer.write(chunk)
                self._advance(task, len(chunk))
            # Inside the block: what is wrong never becomes visible.
            self._check(item, hasher)
        assert writer.info is not None
        return self._record(item, hasher.size, hasher.checksum, writer.info)

    def _chunks(self, item: CopyItem) -> Iterator[bytes]:
        try:
            for chunk in item.store.stream(item.source_path, chunk_bytes=_CHUNK_BYTES):
                if self._stop.is_set():
                    raise CopyStopped
                yield chunk
        except NotFound as error:
            raise SourceMissing from error
        except AccessDenied as error:
            raise SourceDenied(error) from None

    def _check(self, item: CopyItem, hasher: Hasher) -> None:
        where = join(item.store.url, item.source_path)
        if item.size is not None and hasher.size != item.size:
            raise CorruptData(
                f"{hasher.size} bytes arrived, {item.size} were listed", where=where, hint="run the copy again"
            )
        if item.sha256 is not None and hasher.checksum != item.sha256:
            raise CorruptData(
                f"what arrived has {hasher.checksum}, the source states {item.sha256}",
                where=where,
                hint="run the copy again; if it stays so, the source is broken",
            )

    def _asked_about(self, item: CopyItem) -> CopyItem:
        """Ask what is at a URL: there is no listing of it, and a rerun compares its version."""
        if item.info is not None:
            return item
        try:
            info = item.store.head(item.source_path)
        except AccessDenied as error:
            raise SourceDenied(error) from None
        if info is None:
            raise SourceMissing
        return replace(item, info=info)

    def _found_in_place(self, item: CopyItem) -> CopyRecord | None:
        """Hash what is at the destination where that can show that it need not be fetched again.

        This is how files count that arrived just before a kill, or whose folder was moved by hand.
        """
        record, there = self._records.get(item.path), self._there.get(item.path)
        expected = record.checksum if record and _same_source(item, record) else item.sha256
        if there is None or expected is None or item.size not in (None, there.size):
            return None
        if checksum_of(self._destination.stream(item.path), algorithm_of(expected)) != expected:
            return None
        return self._record(item, there.size, expected, there)

    def _record(self, item: CopyItem, size: int, checksum: str, written: ObjectInfo) -> CopyRecord:
        source = item.info.version if item.info is not None else ""
        return CopyRecord(item.path, size, checksum, source, written.version)

    def _advance(self, task: ProgressTask, amount: int) -> None:
        with self._report_lock:
            task.advance(amount)


def _same_source(item: CopyItem, record: CopyRecord) -> bool:
    if item.sha256 is not None:
        return item.sha256 == record.checksum
    return bool(item.info and item.info.version and item.info.version == record.source)
