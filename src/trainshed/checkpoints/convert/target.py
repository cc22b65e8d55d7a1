"""The target of a conversion: a folder that appears by one rename, or a bucket; the manifest is written last.

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
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainshed.checkpoints.prove.verdict import VERDICT, Verdict
from trainshed.checkpoints.weights import OutputFile
from trainshed.errors import CorruptData, InputError, NoSpace, NotFound, TrainshedError
from trainshed.file_locks import lock_file
from trainshed.reporting import Reporter
from trainshed.storage import FileEntry, Hasher, LocalStore, Manifest, StoreOptions, join, open_folder, parse
from trainshed.storage.manifest import MANIFEST, artefact_folder

SPEC = "spec.json"


class ConversionFolder:
    """The folder in which one conversion works."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.target = path / "target"
        self._store = LocalStore(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this folder, or raise where another process holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("wb") as lock:
            try:
                lock_file(lock, wait=False)
            except BlockingIOError:
                raise InputError(
                    "another conversion into the same target is under way",
                    where=str(self.path),
                    hint="wait for it, or choose another target",
                ) from None
            try:
                yield
            finally:
                if not (self.path / SPEC).exists() and not any(self.path.glob("source-*")):
                    self.remove()  # nothing was started: leave nothing

    def start(self, spec: Mapping[str, Any]) -> bool:
        """Prepare the folder for a spec; return whether it was started before. What another spec left is removed."""
        wanted = json.dumps(spec, sort_keys=True, indent=1).encode() + b"\n"
        try:
            same = self._store.read(SPEC) == wanted
        except NotFound:
            same = False
        if not same:
            (self.path / SPEC).unlink(missing_ok=True)
            shutil.rmtree(self.path / "done", ignore_errors=True)
            shutil.rmtree(self.target, ignore_errors=True)
        # We hold the lock, so an unfinished file is from a killed process. It must not become part of the target.
        self._store.sweep(older_than_seconds=0.0)
        self.target.mkdir(exist_ok=True)
        self._store.put(SPEC, wanted)
        return same

    def file(self, output: OutputFile) -> Path:
        """Return the path that an output file is written to."""
        path = self.target / output.path
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def mark(self, number: int, entry: FileEntry) -> None:
        """Write the marker that a file is complete.

        The marker need not survive a crash of the machine: it only counts if the file has its checksum. A sync would
        force the disk to write everything before it, in the middle of the work.
        """
        body = {"path": entry.path, "size": entry.size, "checksum": entry.checksum}
        marker = self.path / "done" / f"{number}.json"
        marker.parent.mkdir(exist_ok=True)
        temporary = marker.with_suffix(".part")
        temporary.write_text(json.dumps(body))
        os.replace(temporary, marker)

    def finished_files(self, outputs: list[OutputFile], workers: int, reporter: Reporter) -> dict[str, FileEntry]:
        """Return the complete files: those with a marker whose bytes have the checksum in it."""
        marked = [entry for number, output in enumerate(outputs) if (entry := self._marked(number, output)) is not None]
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

    def _marked(self, number: int, output: OutputFile) -> FileEntry | None:
        try:
            body = json.loads(self._store.read(f"done/{number}.json"))
            entry = FileEntry(body["path"], body["size"], body["checksum"])
        except (NotFound, ValueError, KeyError, TypeError):
            return None
        info = LocalStore(self.target).head(output.path)
        return entry if entry.path == output.path and info is not None and info.size == entry.size else None

    @contextmanager
    def syncing(self, paths: Iterable[str]) -> Iterator[None]:
        """Sync files of the target to the disk while the `with` block runs."""
        with ThreadPoolExecutor(1, thread_name_prefix="trainshed-sync") as pool:
            futures = [pool.submit(_sync, self.target / path) for path in paths]
            try:
                yield
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            for future in futures:
                future.result()

    def publish(self, target: Path) -> None:
        """Sync the target, rename it to its place, and remove this folder."""
        for folder, _, files in os.walk(self.target):
            for path in (*(Path(folder) / name for name in files), Path(folder)):
                _sync(path)
        os.replace(self.target, target)
        _sync(target.parent)
        self.remove()

    def remove(self) -> None:
        """Remove this folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def check_space(self, needed_bytes: int, message: Callable[[int], str], *, hint: str) -> None:
        """Raise `NoSpace` where the disk has too little; `message` is called with the free bytes."""
        free_bytes = shutil.disk_usage(self.path).free
        if needed_bytes > free_bytes:
            raise NoSpace(message(free_bytes), where=str(self.path.parent), hint=hint)


def hash_file(folder: Path, path: str) -> FileEntry:
    """Hash one file."""
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


class ConversionTarget:
    """The target at an address; everything is first written in `folder`."""

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
        """The folder of a local target."""
        assert self.is_local
        return Path(str(self._parsed))

    def manifest(self) -> Manifest | None:
        """Return the manifest of an earlier conversion, None where the target is free; anything else is refused."""
        try:
            return Manifest.read(self._store, MANIFEST)
        except NotFound:
            # A bucket may hold files of a killed upload; a local target appears complete.
            if self.is_local and any(True for _ in self._store.list()):
                raise self.occupied_error("something that is not a finished conversion") from None
            return None
        except CorruptData:
            raise self.occupied_error("something whose manifest nobody can read") from None

    def clear(self) -> None:
        """Remove an earlier conversion; its manifest first, so that a part of it never counts."""
        self._store.delete(MANIFEST)
        if self.is_local:
            shutil.rmtree(self.path)
            return
        for info in list(self._store.list()):
            self._store.delete(info.path)

    def verdict(self) -> Verdict:
        """Return the verdict of an earlier conversion."""
        return Verdict.from_bytes(self._store.read(VERDICT), join(self.address, VERDICT))

    def occupied_error(self, what: str) -> InputError:
        """Return the error for a target that is not free."""
        hint = "choose another folder, or remove this one first"
        return InputError(f"there is {what} already", where=self.address, hint=hint)

    def upload(self, path: str) -> None:
        """Upload one complete file to a bucket; a local target gets all of them at the end, by one rename."""
        if self.is_local:
            return
        local = LocalStore(self.folder.target)
        info = local.head(path)
        with self._store.writer(path, size=info.size if info else None) as writer:
            for chunk in local.stream(path):
                writer.write(chunk)

    def publish(self, manifest: Manifest, uploaded: set[str]) -> None:
        """Publish the target: upload the other files, then the manifest; a local one by one rename."""
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
    """Translate errors of the disk to `TrainshedError`s."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space or write elsewhere, then run the same command again: it goes on"
            raise NoSpace("the disk is full", where=str(path), hint=hint) from error
        raise TrainshedError((error.strerror or str(error)).lower(), where=str(path)) from error


def _working_folder(address: str, scratch: Path | None) -> Path:
    """Return the working folder: hidden beside a local target; for a bucket below `scratch`, named by the address."""
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
