"""Moving one object of a copy, or proving that it is there already."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainshed.errors import (
    AccessDenied,
    Conflict,
    CorruptData,
    NoSpace,
    NotFound,
    StorageError,
)
from trainshed.reporting import Reporter, Task
from trainshed.storage.address import join
from trainshed.storage.hashing import Hasher, algorithm_of, checksum_of
from trainshed.storage.journal import Journal, Record
from trainshed.storage.retry import Retry
from trainshed.storage.sources import Item
from trainshed.storage.store import ObjectInfo, Store

# Streams already go on by themselves where they broke; this is for what breaks a whole object.
_ATTEMPTS = 3
_CHUNK_BYTES = 4 * 1024 * 1024


class Absent(Exception):
    """The source does not have the object (any more)."""


class Stopped(Exception):
    """Another object's failure ended the copy."""


class Refused(Exception):
    """The source does not let us read the object."""

    def __init__(self, error: AccessDenied) -> None:
        super().__init__(error.what)
        self.error = error


@dataclass(frozen=True)
class Outcome:
    """A finished object; no record for an empty folder's marker."""

    record: Record | None
    moved: bool


class Transfer:
    """All that the workers of one copy share."""

    def __init__(
        self,
        destination: Store,
        there: dict[str, ObjectInfo],
        records: dict[str, Record],
        journal: Journal,
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
        self._telling = threading.Lock()

    def stop(self) -> None:
        """Make all workers end at their next chunk."""
        self._stop.set()

    def is_proven(self, item: Item) -> bool:
        """Whether listing and journal alone show that an object is in place."""
        record, info = self._records.get(item.path), self._there.get(item.path)
        return bool(
            record
            and info
            and item.info
            and _same_source(item, record)
            and (info.size, info.version) == (record.size, record.version)
        )

    def proven(self, item: Item) -> Outcome:
        """The outcome for such an object."""
        return Outcome(self._records[item.path], moved=False)

    def run(self, item: Item, task: Task) -> Outcome:
        """Copy one object unless it turns out to be there."""
        outcome = self._place(self._asked_about(item), task)
        if outcome.record is not None and outcome.record != self._records.get(item.path):
            self._journal.add(outcome.record)  # here, not where results are gathered: a kill loses less
        return outcome

    def _place(self, item: Item, task: Task) -> Outcome:
        if self.is_proven(item):
            self._advance(task, item.size or 0)
            return self.proven(item)
        found = self._found_in_place(item)
        if found is not None:
            self._advance(task, found.size)
            return Outcome(found, moved=False)
        for attempt in range(_ATTEMPTS):
            hasher = Hasher() if item.sha256 is None else Hasher.like(item.sha256)
            try:
                return Outcome(self._move(item, hasher, task), moved=True)
            except Absent:
                if item.size == 0:  # how some stores show the marker of an empty folder
                    return Outcome(None, moved=False)
                raise
            except (NoSpace, AccessDenied, Conflict):
                raise
            except (StorageError, CorruptData) as error:
                if attempt + 1 == _ATTEMPTS:
                    raise
                self._advance(task, -hasher.size)
                with self._telling:
                    self._reporter.warn(
                        f"{item.path}: {error.what}; trying again (attempt {attempt + 2} of {_ATTEMPTS})"
                    )
                self._retry.pause(attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _move(self, item: Item, hasher: Hasher, task: Task) -> Record:
        with self._destination.writer(item.path, size=item.size) as writer:
            for chunk in self._chunks(item):
                hasher.update(chunk)
                writer.write(chunk)
                self._advance(task, len(chunk))
            # Inside the block: what is wrong never becomes visible.
            self._check(item, hasher)
        assert writer.info is not None
        return self._record(item, hasher.size, hasher.checksum, writer.info)

    def _chunks(self, item: Item) -> Iterator[bytes]:
        try:
            for chunk in item.store.stream(item.source_path, chunk_bytes=_CHUNK_BYTES):
                if self._stop.is_set():
                    raise Stopped
                yield chunk
        except NotFound as error:
            raise Absent from error
        except AccessDenied as error:
            raise Refused(error) from None

    def _check(self, item: Item, hasher: Hasher) -> None:
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

    def _asked_about(self, item: Item) -> Item:
        """Ask what is at a URL: no listing told, and its version is what a rerun compares."""
        if item.info is not None:
            return item
        try:
            info = item.store.head(item.source_path)
        except AccessDenied as error:
            raise Refused(error) from None
        if info is None:
            raise Absent
        return replace(item, info=info)

    def _found_in_place(self, item: Item) -> Record | None:
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

    def _record(self, item: Item, size: int, checksum: str, written: ObjectInfo) -> Record:
        source = item.info.version if item.info is not None else ""
        return Record(item.path, size, checksum, source, written.version)

    def _advance(self, task: Task, amount: int) -> None:
        with self._telling:
            task.advance(amount)


def _same_source(item: Item, record: Record) -> bool:
    if item.sha256 is not None:
        return item.sha256 == record.checksum
    return bool(item.info and item.info.version and item.info.version == record.source)
