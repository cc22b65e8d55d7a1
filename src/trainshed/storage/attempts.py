"""Attempts of a run: each start takes the next number, and with it the right to commit.

A job that was given up may still be running somewhere (a zombie): a node that came back, a write that hung for an
hour. The next start of the run takes the next number by a conditional put, and from then on every commit of an
earlier attempt is refused.

    attempts/0001.json      who took it; never changed, never removed
"""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from dataclasses import dataclass
from typing import Any

from trainshed.errors import Conflict, Fenced, NotFound
from trainshed.run_folder import ATTEMPTS
from trainshed.storage.address import join
from trainshed.storage.store import ABSENT, ObjectInfo, Store

_RECORD_NAME = re.compile(r"(\d+)\.json")


@dataclass(frozen=True)
class Attempt:
    """One start of a run. Only one rank takes it; the others are told its number."""

    store: Store
    run_folder: str
    number: int

    def check(self) -> None:
        """Raise `Fenced` if a later attempt has begun."""
        # Numbers are taken one after the other, so that the next one tells about all later ones.
        later = _record_path(self.run_folder, self.number + 1)
        if self.store.head(later) is not None:
            raise Fenced(
                f"attempt {self.number} of this run was overtaken by a later one",
                where=join(self.store.url, later),
                hint="let the later one go on; this one can no longer change the run",
            )

    def put(self, path: str, data: bytes) -> ObjectInfo:
        """Write a small object unless a later attempt has begun."""
        return self.put_over(self.store.head(path), path, data)

    def put_over(self, before: ObjectInfo | None, path: str, data: bytes) -> ObjectInfo:
        """Write a small object over what was seen there `before`, unless a later attempt has begun.

        A writer that reads first and is checked after cannot undo a later attempt's work. If none had begun at the
        check, none had written before the read; if one writes after it, the version is no longer the one read.
        """
        self.check()
        try:
            return self.store.put(path, data, expect=ABSENT if before is None else before.version)
        except Conflict:
            ours = self._is_ours(path, data)
            if ours is not None:
                return ours
            self.check()
            raise

    def _is_ours(self, path: str, data: bytes) -> ObjectInfo | None:
        """Whether a write that seems to have lost had arrived, and only its answer was lost."""
        info = self.store.head(path)
        if info is None or info.size != len(data):
            return None
        try:
            return info if self.store.read(path) == data else None
        except NotFound:
            return None


def take_attempt(store: Store, run_folder: str) -> Attempt:
    """Take the next number of a run: from now on no earlier attempt can commit."""
    number = newest_attempt(store, run_folder) + 1
    writer = uuid.uuid4().hex
    while True:
        attempt = Attempt(store, run_folder, number)
        record = {"attempt": number, "writer": writer, "host": socket.gethostname(), "pid": os.getpid()}
        data = json.dumps(record, sort_keys=True).encode() + b"\n"
        path = _record_path(run_folder, number)
        try:
            store.put(path, data, expect=ABSENT)
        except Conflict:
            if attempt._is_ours(path, data) is None:
                number += 1
                continue
        return attempt


def newest_attempt(store: Store, run_folder: str) -> int:
    """The number of the newest attempt of a run, 0 if it was never started."""
    folder = _attempts_folder(run_folder)
    names = (_RECORD_NAME.fullmatch(info.path[len(folder) + 1 :]) for info in store.list(folder))
    return max((int(name[1]) for name in names if name), default=0)


def newest_attempt_record(store: Store, run_folder: str) -> dict[str, Any] | None:
    """Who took the newest attempt of a run (`attempt`, `host`, `pid`), None if it was never started.

    A damaged record does not say who: host and pid are None. Its number is in its name.
    """
    number = newest_attempt(store, run_folder)
    if not number:
        return None
    try:
        record = json.loads(store.read(_record_path(run_folder, number)))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("host"), str):
        record = {"host": None, "pid": None}
    return record | {"attempt": number}


def _attempts_folder(run_folder: str) -> str:
    return f"{run_folder.strip('/')}/{ATTEMPTS}" if run_folder.strip("/") else ATTEMPTS


def _record_path(run_folder: str, number: int) -> str:
    return f"{_attempts_folder(run_folder)}/{number:04d}.json"
