"""Where a conversion writes: a folder that appears by one rename, or a bucket; the manifest comes last.

Until it is done, a conversion works in a hidden folder beside its target:

    .NAME.converting/spec.json      what is made from what; another spec starts anew
                     done/3.json    file 3 is complete: its path, size and checksum
                     source-…/      a source that had to be fetched
                     target/        what becomes the target

Killed at any moment, the next conversion with the same spec continues: it keeps what has a marker and the right
checksum.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainshed.checkpoints.prove.verdict import VERDICT, Verdict
from trainshed.checkpoints.weights import OutputFile
from trainshed.errors import CorruptData, InputError, NoSpace, NotFound, TrainshedError
from trainshed.reporting import Reporter
from trainshed.storage import FileEntry, Hasher, LocalStore, Manifest, StoreOptions, join, open_folder, parse
from trainshed.storage.manifest import artefact_folder

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

    def file(self, unit: OutputFile) -> Path:
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

    def whole_units(self, units: list[OutputFile], workers: int, reporter: Reporter) -> dict[str, FileEntry]:
        """Return the units that are there: marked, and with the bytes that were marked."""
        marked = [entry for number, unit in enumerate(units) if (entry := self._marked(number, unit)) is not None]
        if not marked:
            return {}
        with (
            reporter.task("checking", total=sum(entry.size for entry in marked), unit="B") as task,
            ThreadPoolExecutor(workers, thread_name_prefix="trainshed-check") as pool,
        ):

            def check(entry: FileEntry) -> bool:
                same = hash_file(self.target, entry.path) == entry
                task.advance(entry.size)
                return same

            kept = list(pool.map(check, marked))
        return {entry.path: entry for entry, good in zip(marked, kept, strict=True) if good}

    def _marked(self, number: int, unit: OutputFile) -> FileEntry | None:
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


def hash_file(folder: Path, path: str) -> FileEntry:
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


MANIFEST = "manifest.json"


class ConversionTarget:
    """The place at an address; `folder` is where everything is made first."""

    def __init__(self, address: str, scratch: Path | None, options: StoreOptions | None) -> None:
        self.address = address
        self.folder = ConversionFolder(_working_folder(address, scratch))
        self._parsed = parse(address)
        self._store = open_folder(address, options)

    @property
    def is_local(self) -> bool:
        """Whether it is a folder on this machine."""
        return self._parsed.scheme == "file"

    @property
    def path(self) -> Path:
        """The folder, where it is one."""
        assert self.is_local
        return Path(str(self._parsed))

    def finished(self) -> Manifest | None:
        """Return the manifest of what is there, None where nothing is; anything without a manifest is refused."""
        try:
            return Manifest.read(self._store, MANIFEST)
        except NotFound:
            # A bucket shows the files of an upload that was killed; a folder of ours appears whole.
            if self.is_local and any(True for _ in self._store.list()):
                raise self.occupied("something that is no finished conversion") from None
            return None
        except CorruptData:
            raise self.occupied("something whose manifest nobody can read") from None

    def verdict(self) -> Verdict:
        """Return the verdict of what is there."""
        return Verdict.from_bytes(self._store.read(VERDICT), join(self.address, VERDICT))

    def occupied(self, what: str) -> InputError:
        """The error for a target that is not free."""
        hint = "choose another folder, or remove this one first"
        return InputError(f"there is {what} already", where=self.address, hint=hint)

    def upload(self, path: str) -> None:
        """Put one finished file into a bucket; a folder gets all of them at once in the end."""
        if self.is_local:
            return
        local = LocalStore(self.folder.target)
        info = local.head(path)
        with self._store.writer(path, size=info.size if info else None) as writer:
            for chunk in local.stream(path):
                writer.write(chunk)

    def publish(self, manifest: Manifest, uploaded: set[str]) -> None:
        """Let the target exist: what is not uploaded yet, then the manifest; or all of it by one rename."""
        if self.is_local:
            manifest.write(LocalStore(self.folder.target), MANIFEST)
            with explain_disk_errors(self.path):
                self.folder.publish(self.path)
            return
        for entry in manifest.files:
            if entry.path not in uploaded:
                self.upload(entry.path)
        manifest.write(self._store, MANIFEST)
        self.folder.remove()


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Tell the disk's errors in our words, whichever writer meets them."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space or write elsewhere, then run the same command again: it goes on"
            raise NoSpace("the disk is full", where=str(path), hint=hint) from error
        raise TrainshedError((error.strerror or str(error)).lower(), where=str(path)) from error


def _working_folder(address: str, scratch: Path | None) -> Path:
    """Hidden beside a folder, so that a rename is enough; for a bucket below `scratch`, found again by its address."""
    parsed = parse(address)
    if parsed.scheme in ("hf", "http", "https"):
        raise InputError("nothing can be written there", where=address, hint="write to a path, s3://, gs:// or az://")
    if parsed.scheme != "file":
        root = scratch or Path(tempfile.gettempdir())
        return artefact_folder(root, "trainshed-convert", {"target": join(parsed.url, parsed.path)})
    path = Path(os.path.abspath(str(parsed)))
    if not path.name:
        raise InputError("the target is the root of the disk", where=address, hint="name a folder in it")
    return path.with_name(f".{path.name}.converting")
