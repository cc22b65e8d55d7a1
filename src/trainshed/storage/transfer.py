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
    TrainshedError,
)
from trainshed.reporting import Reporter, Task
from trainshed.storage.address import join
from trainshed.storage.hashing import Hasher, sha256_of
from trainshed.storage.journal import Record
from trainshed.storage.retry import Retry
from trainshed.storage.sources import Item
from trainshed.storage.store import ObjectInfo, Store

# Streams already go on by themselves where they broke; this is for what breaks a whole object.
_ATTEMPTS = 3


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

    PASSING = (StorageError, CorruptData)

    def __init__(
        self,
        destination: Store,
        there: dict[str, ObjectInfo],
        records: dict[str, Record],
        retry: Retry,
        reporter: Reporter,
    ) -> None:
        self._destination = destination
        self._there = there
        self._records = records
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
        item = self._asked_about(item)
        if self.is_proven(item):
            self._advance(task, item.size or 0)
            return self.proven(item)
        found = self._found_in_place(item)
        if found is not None:
            self._advance(task, found.size)
            return Outcome(found, moved=False)
        for attempt in range(_ATTEMPTS):
            moved = 0
            try:
                for moved, record in self._transfer(item, task):
                    if record is not None:
                        return Outcome(record, moved=True)
            except Absent:
                if item.size == 0:  # how some stores show the marker of an empty folder
                    return Outcome(None, moved=False)
                raise
            except (NoSpace, AccessDenied, Conflict):
                raise _Fatal.of_destination()
            except self.PASSING as error:
                if attempt + 1 == _ATTEMPTS:
                    raise
                self._advance(task, -moved)
                self._warn(f"{item.path}: {error.what}; trying again")
                self._retry.pause(attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")
