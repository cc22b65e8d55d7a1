"""What a copy has already proven, so that a rerun need not read terabytes again.

Records are collected and stored every few seconds as one small object below `.trainshed/journal/`, so a bucket sees a
request now and then and not one per file. A journal only saves work: a lost record means that one file is copied again,
and a record counts only while source and destination still have the versions it names.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from trainshed.errors import NotFound
from trainshed.reporting import Reporter
from trainshed.storage.globs import MARKS
from trainshed.storage.store import ABSENT, ObjectInfo, Store

FOLDER = f"{MARKS}/journal"
_MAX_RECORDS = 1000
_MAX_SEGMENTS = 64
_SEGMENT = re.compile(re.escape(FOLDER) + r"/([^/]+)/(\d{6})-[0-9a-f]{8}\.jsonl")


@dataclass(frozen=True)
class Record:
    """One file that arrived: its checksum, and the versions of both ends at that time."""

    path: str
    size: int
    checksum: str
    source: str
    version: str


class Journal:
    """The records of one task of a copy; those of other tasks are read and left alone."""

    def __init__(self, store: Store, name: str, *, every_seconds: float, reporter: Reporter) -> None:
        self._store = store
        self._name = name
        self._every = every_seconds
        self._reporter = reporter
        self._lock = threading.Lock()
        self._fresh: list[Record] = []
        self._own: dict[str, Record] = {}
        self._segments: list[str] = []
        self._number = 0
        self._written = time.monotonic()

    def load(self, listing: Iterable[ObjectInfo]) -> dict[str, Record]:
        """All records below the destination, from a listing of it; later ones win."""
        names = sorted(info.path for info in listing if _SEGMENT.fullmatch(info.path))
        with ThreadPoolExecutor(8) as pool:
            loaded = list(pool.map(self._read, names))
        records: dict[str, Record] = {}
        for name, found in zip(names, loaded, strict=True):
            records |= found
            match = _SEGMENT.fullmatch(name)
            if match and match[1] == self._name:
                self._own |= found
                self._segments.append(name)
                self._number = max(self._number, int(match[2]))
        return records

    def add(self, record: Record) -> None:
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

    def _write(self, records: Iterable[Record]) -> str:
        self._number += 1
        # A part by chance: a copy that was thought dead must not write into the segments of its successor.
        path = f"{FOLDER}/{self._name}/{self._number:06d}-{os.urandom(4).hex()}.jsonl"
        lines = [json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records]
        self._store.put(path, "".join(lines).encode(), expect=ABSENT)
        return path

    def _read(self, path: str) -> dict[str, Record]:
        try:
            lines = self._store.read(path).splitlines()
            return {record.path: record for record in (_record(json.loads(line)) for line in lines)}
        except NotFound:  # another task has just put many segments into one
            return {}
        except (ValueError, TypeError):
            self._reporter.warn(f"{path} cannot be read; what it lists is copied again")
            return {}


def _record(document: dict[str, Any]) -> Record:
    """One record; journals of before BLAKE3 call the checksum by its algorithm."""
    if "sha256" in document:
        document["checksum"] = document.pop("sha256")
    return Record(**document)
