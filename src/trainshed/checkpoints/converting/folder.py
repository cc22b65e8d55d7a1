"""Where a conversion works until it is done: hidden beside its target, so that the target appears by one rename.

    .NAME.converting/spec.json      what is made from what; another spec starts anew
                     done/3.json    unit 3 is whole: its path, size and checksum
                     source-…/      a source that had to be fetched
                     target/        what becomes the target

Killed at any moment, the next conversion with the same spec goes on: it keeps what has a marker and the right checksum.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainshed.checkpoints.weights import Unit
from trainshed.errors import InputError, NotFound
from trainshed.reporting import Reporter
from trainshed.storage import FileEntry, Hasher, LocalStore

SPEC = "spec.json"


class ConversionFolder:
    """One conversion's working place."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.target = place / "target"
        self._store = LocalStore(place)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the only one who works here."""
        self.place.mkdir(parents=True, exist_ok=True)
        with (self.place / "lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    "another conversion into the same target is under way",
                    where=str(self.place),
                    hint="wait for it, or choose another target",
                ) from None
            try:
                yield
            finally:
                if not (self.place / SPEC).exists() and not any(self.place.glob("source-*")):
                    self.remove()  # nothing was begun: leave nothing

    def begin(self, spec: Mapping[str, Any]) -> bool:
        """Make ready for a spec; whether there is something of it already. What another spec left is removed."""
        wanted = json.dumps(spec, sort_keys=True, indent=1).encode() + b"\n"
        try:
            same = self._store.read(SPEC) == wanted
        except NotFound:
            same = False
        if not same:
            (self.place / SPEC).unlink(missing_ok=True)
            shutil.rmtree(self.place / "done", ignore_errors=True)
            shutil.rmtree(self.target, ignore_errors=True)
        # Nobody else writes here, so whatever is unfinished was killed; left there, it would become part of the target.
        self._store.sweep(older_than_seconds=0.0)
        self.target.mkdir(exist_ok=True)
        self._store.put(SPEC, wanted)
        return same

    def file(self, unit: Unit) -> Path:
        """Where a unit is written."""
        path = self.target / unit.path
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def mark(self, number: int, entry: FileEntry) -> None:
        """Note that a unit is whole.

        The note need not outlive the machine: it counts only as far as the unit has its checksum. Forcing it to the
        disk would make the disk write everything before it, in the middle of the work.
        """
        body = {"path": entry.path, "size": entry.size, "checksum": entry.checksum}
        note = self.place / "done" / f"{number}.json"
        note.parent.mkdir(exist_ok=True)
        fresh = note.with_suffix(".part")
        fresh.write_text(json.dumps(body))
        os.replace(fresh, note)

    def whole_units(self, units: list[Unit], workers: int, reporter: Reporter) -> dict[str, FileEntry]:
        """Return the units that are there: marked, and with the bytes that were marked."""
        marked = [entry for number, unit in enumerate(units) if (entry := self._marked(number, unit)) is not None]
        if not marked:
            return {}
        with (
            reporter.task("checking", total=sum(entry.size for entry in marked), unit="B") as task,
            ThreadPoolExecutor(workers, thread_name_prefix="trainshed-check") as pool,
        ):

            def check(entry: FileEntry) -> bool:
                same = hashed(self.target, entry.path) == entry
                task.advance(entry.size)
                return same

            kept = list(pool.map(check, marked))
        return {entry.path: entry for entry, good in zip(marked, kept, strict=True) if good}

    def _marked(self, number: int, unit: Unit) -> FileEntry | None:
        try:
            body = json.loads(self._store.read(f"done/{number}.json"))
            entry = FileEntry(body["path"], body["size"], body["checksum"])
        except (NotFound, ValueError, KeyError, TypeError):
            return None
        info = LocalStore(self.target).head(unit.path)
        return entry if entry.path == unit.path and info is not None and info.size == entry.size else None

    @contextmanager
    def reaching_the_disk(self, paths: Iterable[str]) -> Iterator[None]:
        """Let files of the target reach the disk while the block runs, which is when nobody waits for it."""
        with ThreadPoolExecutor(1, thread_name_prefix="trainshed-sync") as pool:
            syncing = [pool.submit(_sync, self.target / path) for path in paths]
            try:
                yield
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            for each in syncing:
                each.result()

    def publish(self, target: Path) -> None:
        """Let the target appear, whole and on the disk, and remove the working place."""
        for folder, _, files in os.walk(self.target):
            for path in (*(Path(folder) / name for name in files), Path(folder)):
                _sync(path)
        os.replace(self.target, target)
        _sync(target.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the working place, and with it the mark that something was begun."""
        shutil.rmtree(self.place, ignore_errors=True)


def hashed(folder: Path, path: str) -> FileEntry:
    """Describe one file by its bytes."""
    hasher = Hasher()
    for chunk in LocalStore(folder).stream(path):
        hasher.update(chunk)
    return FileEntry(path, hasher.size, hasher.checksum)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
