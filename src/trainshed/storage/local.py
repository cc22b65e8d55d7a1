"""The local disk, or anything mounted on it, as a store.

A file appears by rename after its bytes and then its folder are on the disk, so a killed writer leaves at most a
hidden temporary file that no listing shows.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from trainshed.errors import AccessDenied, AddressError, Conflict, NoSpace, NotFound, StorageError, TrainshedError
from trainshed.file_locks import lock_file, sync_folder
from trainshed.storage.address import join
from trainshed.storage.store import ABANDONED_SECONDS, ABSENT, CHUNK_BYTES, ObjectInfo

_TEMPORARY = re.compile(r"\.trainshed-[0-9a-f]{16}\.part")
_LOCK_NAME = ".trainshed.lock"

_ErrorContext = Callable[[str], AbstractContextManager[None]]


class LocalStore:
    """All files below one folder."""

    def __init__(self, root: str | Path = ".") -> None:
        self._url = str(root)
        self._root = Path(root).absolute()  # what '.' means is settled now, not at each call
        self._swept: set[Path] = set()

    def __repr__(self) -> str:
        return f"LocalStore({self._url!r})"

    @property
    def url(self) -> str:
        """The root as it was written."""
        return self._url

    def head(self, path: str) -> ObjectInfo | None:
        """Describe one file, or None if there is none (a folder is none)."""
        with self._translated_errors(path):
            try:
                status = os.stat(self._file(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _info(path, status) if stat.S_ISREG(status.st_mode) else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All files below a folder, sorted by path; symbolic links are followed."""
        with self._translated_errors(prefix):
            yield from _walk(self._file(prefix), prefix.strip("/"), frozenset())

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Read the bytes [start, end) of a file."""
        with self._translated_errors(path), self._file(path).open("rb", buffering=0) as handle:
            handle.seek(start)
            if end is None:
                return handle.readall() or b""
            parts, missing = [], max(0, end - start)
            while missing and (part := handle.read(missing)):
                parts.append(part)
                missing -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, path: str, start: int, memory: memoryview) -> int:
        """Read as many bytes of a file as fit into memory that is there already; return how many there were."""
        done = 0
        with self._translated_errors(path), self._file(path).open("rb", buffering=0) as handle:
            handle.seek(start)
            while done < len(memory) and (read := handle.readinto(memory[done:])):
                done += read
        return done

    def stream(self, path: str, start: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Read a file from `start` to its end in chunks."""
        with self._translated_errors(path):
            handle = self._file(path).open("rb", buffering=0)
        with handle:
            handle.seek(start)
            while True:
                with self._translated_errors(path):
                    chunk = handle.read(chunk_bytes)
                if not chunk:
                    return
                yield chunk

    def put(self, path: str, data: bytes, *, expect: str | None = None) -> ObjectInfo:
        """Write a small file in one atomic step; with `expect`, only over what is expected."""
        target = self._file(path)
        with self._temporary(target, path) as handle, self._translated_errors(path):
            _write_all(handle, data)
            if expect is None:
                return self._publish(handle, target, path)
            if expect == ABSENT:
                return self._publish_new(handle, target, path)
            with _folder_lock(target.parent):
                status = _stat_or_none(target)
                if status is None or _version(status) != expect:
                    raise Conflict("another writer changed it first", where=join(self.url, path))
                # Strictly later than what it replaces: two versions within one clock tick must not look the same.
                now = max(time.time_ns(), status.st_mtime_ns + 1)
                os.utime(handle.fileno(), ns=(now, now))
                return self._publish(handle, target, path)

    @contextmanager
    def writer(self, path: str, *, size: int | None = None) -> Iterator[_LocalWriter]:
        """Open a large file for writing; it appears when the block ends without an error."""
        target = self._file(path)
        with self._temporary(target, path) as handle:
            writer = _LocalWriter(handle, self._translated_errors, path)
            yield writer
            with self._translated_errors(path):
                writer.info = self._publish(handle, target, path)

    def delete(self, path: str) -> None:
        """Remove a file; removing what is not there is not an error."""
        with self._translated_errors(path), suppress(FileNotFoundError, NotADirectoryError):
            self._file(path).unlink()

    def sweep(self, prefix: str = "", *, older_than_seconds: float = ABANDONED_SECONDS) -> None:
        """Remove what killed writers have left below a folder, and folders that hold nothing any more."""
        top = self._file(prefix)
        with self._translated_errors(prefix):
            for folder, _, _ in os.walk(top, topdown=False):
                with suppress(FileNotFoundError):
                    _remove_abandoned(Path(folder), older_than_seconds)
                    if Path(folder) != top and os.listdir(folder) == [_LOCK_NAME]:
                        os.unlink(Path(folder) / _LOCK_NAME)
                if Path(folder) != top:
                    with suppress(OSError):  # not empty
                        os.rmdir(folder)

    def _file(self, path: str) -> Path:
        return self._root / path.lstrip("/") if path else self._root

    @contextmanager
    def _temporary(self, target: Path, path: str) -> Iterator[BinaryIO]:
        temporary = target.parent / f".trainshed-{os.urandom(8).hex()}.part"
        # Explained here and not around the caller's block: an error of whatever it reads meanwhile is not ours.
        with self._translated_errors(path):
            opened = self._opened(temporary)
        with opened as handle:
            with suppress(OSError):  # some network mounts know no locks; see ABANDONED_SECONDS
                lock_file(handle, wait=False)
            try:
                yield handle  # type: ignore[misc]
            finally:
                temporary.unlink(missing_ok=True)

    def _publish(self, handle: BinaryIO, target: Path, path: str) -> ObjectInfo:
        os.fsync(handle.fileno())
        os.rename(handle.name, target)
        _sync_folder(target.parent)
        return _info(path, os.fstat(handle.fileno()))

    def _publish_new(self, handle: BinaryIO, target: Path, path: str) -> ObjectInfo:
        os.fsync(handle.fileno())
        try:
            os.link(handle.name, target)  # the one call that refuses, by itself, to replace a file
        except FileExistsError:
            raise Conflict("it is there already", where=join(self.url, path)) from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            with _folder_lock(target.parent):  # a filesystem without hard links
                if target.exists():
                    raise Conflict("it is there already", where=join(self.url, path)) from None
                os.rename(handle.name, target)
        _sync_folder(target.parent)
        return _info(path, os.fstat(handle.fileno()))

    def _opened(self, temporary: Path) -> FileIO:
        folder = temporary.parent
        for last in (False, False, True):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                if folder not in self._swept:  # once is enough
                    self._swept.add(folder)
                    _remove_abandoned(folder, ABANDONED_SECONDS)
                return temporary.open("xb", buffering=0)
            except FileNotFoundError:  # a `sweep` has just removed the folder because it was empty
                if last:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    @contextmanager
    def _translated_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except TrainshedError:
            raise
        except OSError as error:
            raise _translate_os_error(error, join(self.url, path)) from error


class _LocalWriter:
    def __init__(self, handle: BinaryIO, explained: _ErrorContext, path: str) -> None:
        self._handle = handle
        self._translated_errors = explained
        self._path = path
        self.info: ObjectInfo | None = None

    def write(self, data: bytes | memoryview) -> None:
        with self._translated_errors(self._path):
            _write_all(self._handle, data)


def _remove_abandoned(folder: Path, older_than_seconds: float) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not _TEMPORARY.fullmatch(entry.name):
                continue
            with suppress(OSError), open(entry.path, "rb") as handle:
                if time.time() - os.fstat(handle.fileno()).st_mtime > older_than_seconds:
                    lock_file(handle, wait=False)
                    os.unlink(entry.path)


def _write_all(handle: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[handle.write(view) :]


def _walk(folder: Path, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[ObjectInfo]:
    try:
        status = os.stat(folder)
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    here = (status.st_dev, status.st_ino)
    if here in above:  # a link to a folder above itself
        return
    # A folder sorts as 'name/', so that the whole walk comes out in the order of the full paths.
    named = [(entry.name + "/" if entry.is_dir() else entry.name, entry) for entry in entries]
    for name, entry in sorted(named, key=lambda pair: pair[0]):
        path = f"{prefix}/{entry.name}" if prefix else entry.name
        if name.endswith("/"):
            yield from _walk(Path(entry.path), path, above | {here})
        elif not _TEMPORARY.fullmatch(entry.name) and entry.name != _LOCK_NAME:
            with suppress(FileNotFoundError):  # removed since the scan, or a link to nowhere
                info = entry.stat()
                if stat.S_ISREG(info.st_mode):
                    yield _info(path, info)


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    with (folder / _LOCK_NAME).open("ab") as handle:
        lock_file(handle)
        yield


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # FUSE mounts refuse fsync on folders; their rename is as durable as it gets
        sync_folder(folder)


def _stat_or_none(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _version(status: os.stat_result) -> str:
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"


def _info(path: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(path.strip("/"), status.st_size, _version(status))


def _translate_os_error(error: OSError, where: str) -> StorageError | AddressError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason = {
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "the file is larger than is allowed here",
        }
        what = reason.get(error.errno or 0, "the disk is full")
        return NoSpace(what, where=where, hint="free some space or write elsewhere, then run the same command again")
    if isinstance(error, FileNotFoundError):
        return NotFound("no such file", where=where, hint="check the path")
    if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
        return NotFound(
            f"{(error.strerror or 'not a file').lower()}", where=where, hint="name a file here, not a folder"
        )
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return AccessDenied((error.strerror or "permission denied").lower(), where=where, hint="check who owns it")
    if error.errno == errno.ENAMETOOLONG:
        return AddressError("the name is too long for this filesystem", where=where, hint="write a shorter path")
    return StorageError((error.strerror or str(error)).lower(), where=where)
