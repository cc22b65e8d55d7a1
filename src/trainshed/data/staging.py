"""Tokens and indexes copied to a disk or the memory of each node, once per node (`data.stage: nvme | shm`).

    <folder>/trainshed-<user>/                       in it:
    lock                                             whoever holds it copies; the other ranks of the node wait
    tokens/<hash>/NAME.bin …                         one shard, by the hash of its content; `staged.json` comes last
    indexes/<hash>/<key>/…                           the indexes of a run, by the hash of their manifests
    runs/<hash>-<attempt>.json                       what an attempt uses; its ranks hold a lock on it while they live

A copy is checked against the checksum in the manifest of its tokens while it is written. One that was interrupted goes
on where it stopped. What is there already is used again, by its hash. What no living process uses is removed where
room is needed; in memory it is removed when the last rank of the node ends.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from trainshed.data.tokens.token_files import learned_path
from trainshed.data.tokens.token_source import (
    SHARD_SUFFIXES,
    FileFingerprint,
    RunTokens,
    TokenSource,
    fingerprint_file,
    fingerprint_shard,
)
from trainshed.errors import CorruptData, NoSpace
from trainshed.file_locks import OPEN_BYTES, lock_file
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import Hasher, LocalStore, Manifest, Store, join, open_store, read_into
from trainshed.storage.manifest import MANIFEST
from trainshed.this_machine import user_name

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions

_STAGED, _PARTIAL = "staged.json", ".partial"
_READ_BYTES = 64 * 1024 * 1024
_PARALLEL_FILES = 4
_SPARE_BYTES = 1 << 30
"""What stays free: NCCL and others write to /dev/shm and to local disks too."""


@dataclass(frozen=True)
class StagedRun:
    """The tokens and indexes of a run as they are on this node."""

    data: RunTokens
    indexes: Path


@dataclass(frozen=True)
class _StagedFile:
    """A file to copy: its address, its name in the folder, its bytes, and what proves the copy."""

    address: str
    name: str
    size: int
    checksum: str | None
    sample: str | None = None


def stage_run(
    data: RunTokens,
    index_folders: Callable[[], Sequence[Path]],
    folder: Path,
    run: str,
    *,
    in_memory: bool,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> StagedRun:
    """Return a run's tokens and indexes in a folder of this node, copied by the first process that asks.

    `index_folders` names the indexes that the run needs; only the process that copies calls it. `run` names the
    attempt: its other processes on this node take what the first has staged.
    """
    root = folder / f"trainshed-{user_name()}"  # nodes are shared, and one user cannot write another's files
    record = root / "runs" / f"{run}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    with _locked(root / "lock", reporter):
        # Held until this process ends: whoever makes room removes only what nobody uses.
        _hold_shared(record.with_suffix(".lock"))
        if not record.is_file():
            stager = _Stager(root, options, reporter, in_memory)
            _put(record, stager.stage(data, list(index_folders())))
    if in_memory:
        atexit.register(_remove_when_last, root, record)
    staged = orjson.loads(record.read_bytes())
    return StagedRun(RunTokens.from_plain(staged["data"]), root / staged["indexes"])


class _Stager:
    """Copies what is missing of one run into a staging folder; its lock is held."""

    def __init__(self, root: Path, options: StoreOptions | None, reporter: Reporter, in_memory: bool) -> None:
        self._root, self._options, self._reporter, self._in_memory = root, options, reporter, in_memory

    def stage(self, data: RunTokens, index_folders: Sequence[Path]) -> dict[str, Any]:
        """Copy tokens and indexes; return the record of where they are."""
        shards: dict[Path, list[_StagedFile]] = {}
        sources = [self._plan_source(source, shards) for source in data.all_sources]
        index_home, index_files = _plan_indexes(index_folders)
        wanted = shards | {Path("indexes", index_home): index_files}
        missing = {home: files for home, files in wanted.items() if not self._is_staged(home, files)}
        self._make_room(missing, keep=set(wanted))
        total = sum(file.size for files in missing.values() for file in files)
        if total:
            self._copy_all(missing, total)
        train = sources[: len(data.sources)]
        validation = sources[-1] if data.validation is not None else None
        staged = RunTokens(tuple(train), validation)
        folders = [str(home) for home in wanted]
        return {"data": staged.to_plain(), "indexes": f"indexes/{index_home}", "folders": folders}

    def _plan_source(self, source: TokenSource, shards: dict[Path, list[_StagedFile]]) -> TokenSource:
        """Add a source's shards to what is wanted; return the source as it is when they are there."""
        known = {file.path: file for file in source.files}
        prefixes = []
        for prefix in source.shards(self._options):
            files = [known.get(f"{prefix}.{suffix}") for suffix in SHARD_SUFFIXES]
            fingerprints = [file for file in files if file is not None]
            if len(fingerprints) < len(SHARD_SUFFIXES):  # a run of an early version: its files say what they are
                fingerprints = list(fingerprint_shard(prefix, None, self._options))
            elif (learned := known.get(learned_path(prefix))) is not None:
                fingerprints.append(learned)
            name = prefix.rpartition("/")[2]
            home = Path("tokens", _content_hash(name, fingerprints))
            shards[home] = [
                _StagedFile(file.path, f"{name}.{file.path.rpartition('.')[2]}", file.size, file.checksum, file.sample)
                for file in fingerprints
            ]
            prefixes.append(str(self._root / home / name))
        return replace(source, prefixes=tuple(prefixes))

    def _is_staged(self, home: Path, files: Sequence[_StagedFile]) -> bool:
        """Whether a folder was staged, and its files are still what they were: by size and sampled blocks."""
        folder = self._root / home
        if not (folder / _STAGED).is_file():
            return False
        samples = orjson.loads((folder / _STAGED).read_bytes())
        for file in files:
            path = folder / file.name
            if not path.is_file() or fingerprint_file(str(path)).sample != samples.get(file.name):
                self._reporter.note(f"{path} is not as it was staged: it is copied again")
                shutil.rmtree(folder)
                return False
        return True

    def _make_room(self, missing: dict[Path, list[_StagedFile]], keep: set[Path]) -> None:
        """Remove what no process uses until there is room for what is missing, or raise."""
        needed = _SPARE_BYTES
        for home, files in missing.items():
            needed += sum(file.size - _copied_bytes(self._root / home, file) for file in files)
        if len(missing) and shutil.disk_usage(self._root).free < needed:
            for unused in _unused_folders(self._root, keep):
                self._reporter.note(f"removed {self._root / unused}, which no run on this node uses")
                shutil.rmtree(self._root / unused, ignore_errors=True)
                if shutil.disk_usage(self._root).free >= needed:
                    break
        free = shutil.disk_usage(self._root).free
        if len(missing) and free < needed:
            hint = (
                "write `data.stage: direct`, or give pods more with `limits.shared_memory` in the cluster file"
                if self._in_memory
                else "write `data.stage: direct`, or name a larger disk as `local_disk` in the cluster file"
            )
            raise NoSpace(
                f"the tokens of this run need {needed / 2**30:,.1f} GiB on each node, and {free / 2**30:,.1f} are free",
                where=str(self._root),
                hint=hint,
            )

    def _copy_all(self, missing: dict[Path, list[_StagedFile]], total: int) -> None:
        with (
            self._reporter.task(f"stage tokens in {self._root}", total=total, unit="B") as task,
            ThreadPoolExecutor(_PARALLEL_FILES, thread_name_prefix="trainshed-stage") as pool,
        ):
            copies = {
                home: [pool.submit(self._copy, file, self._root / home, task.advance) for file in files]
                for home, files in missing.items()
            }
            for home, futures in copies.items():
                samples = {file.name: future.result() for file, future in zip(missing[home], futures, strict=True)}
                _put(self._root / home / _STAGED, samples)

    def _copy(self, file: _StagedFile, folder: Path, advance: Callable[[int], None]) -> str:
        """Copy one file and prove the copy; return the hash of its sampled blocks."""
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + _PARTIAL)
        store, source = open_store(file.address, self._options)
        resumed = partial.is_file() and partial.stat().st_size > 0
        for again in (True, False) if resumed else (False,):
            hasher = Hasher.like(file.checksum) if file.checksum else Hasher()
            _continue_copy(store, source, partial, file.size, hasher, advance)
            sample = fingerprint_file(str(partial)).sample
            if file.checksum in (None, hasher.checksum) and file.sample in (None, sample):
                partial.replace(path)
                return sample
            partial.unlink()  # what an interrupted copy has left may be torn: once more from its beginning
            if not again:
                break
        raise CorruptData(
            "the copy of this token file on the node is not what its manifest says",
            where=file.address,
            hint=f"`trainshed data verify {file.address.rpartition('.')[0]}` tells whether the file itself is broken",
        )


def _continue_copy(
    store: Store, source: str, partial: Path, size: int, hasher: Hasher, advance: Callable[[int], None]
) -> None:
    """Copy from where the partial file ends; what it has already goes through the hash too."""
    with partial.open("a+b") as target:
        if target.seek(0, os.SEEK_END) > size:
            target.truncate(size)
        target.seek(0)
        while block := target.read(_READ_BYTES):
            hasher.update(block)
            advance(len(block))
        memory = memoryview(bytearray(min(_READ_BYTES, max(1, size - hasher.size))))
        while hasher.size < size:
            view = memory[: size - hasher.size]
            count = read_into(store, source, hasher.size, view)
            if count == 0:
                raise CorruptData("ends before its size", where=join(store.url, source))
            target.write(view[:count])
            hasher.update(view[:count])
            advance(count)
        target.flush()
        os.fsync(target.fileno())


def _plan_indexes(folders: Sequence[Path]) -> tuple[str, list[_StagedFile]]:
    """Return the name of the folder for these indexes, and their files."""
    digest = hashlib.sha256()
    files: list[_StagedFile] = []
    for folder in sorted(set(folders)):
        data = (folder / MANIFEST).read_bytes()
        digest.update(folder.name.encode() + data)
        manifest = Manifest.from_bytes(data, str(folder / MANIFEST))
        files += [
            _StagedFile(str(folder / entry.path), f"{folder.name}/{entry.path}", entry.size, entry.checksum)
            for entry in manifest.files
        ]
        files.append(_StagedFile(str(folder / MANIFEST), f"{folder.name}/{MANIFEST}", len(data), None))
    return digest.hexdigest()[:16], files


def _content_hash(name: str, files: Sequence[FileFingerprint]) -> str:
    return hashlib.sha256(repr([name, *(file.content for file in files)]).encode()).hexdigest()[:16]


def _copied_bytes(folder: Path, file: _StagedFile) -> int:
    for path in (folder / file.name, folder / f"{file.name}{_PARTIAL}"):
        with suppress(OSError):
            return min(file.size, path.stat().st_size)
    return 0


def _unused_folders(root: Path, keep: set[Path]) -> Iterator[Path]:
    """Yield staged folders that no living attempt uses; records of dead attempts are removed on the way."""
    used = {str(home) for home in keep}
    for record in sorted((root / "runs").glob("*.json")):
        if _is_held(record.with_suffix(".lock")):
            used |= set(orjson.loads(record.read_bytes())["folders"])
        else:
            record.unlink(missing_ok=True)
            record.with_suffix(".lock").unlink(missing_ok=True)
    folders = [folder for kind in ("tokens", "indexes") for folder in (root / kind).glob("*")]
    for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime):
        home = folder.relative_to(root)
        if str(home) not in used:
            yield home


def _remove_when_last(root: Path, record: Path) -> None:
    """Free the memory of staged tokens when the last process of this node that used them ends."""
    with _locked(root / "lock"):
        for descriptor in _held_locks.pop(str(record.with_suffix(".lock")), ()):
            os.close(descriptor)
        if not _is_held(record.with_suffix(".lock")):
            for home in list(_unused_folders(root, set())):
                shutil.rmtree(root / home, ignore_errors=True)


_held_locks: dict[str, list[int]] = {}
"""Descriptors of the locks that this process holds while it lives."""


def _hold_shared(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | OPEN_BYTES, 0o644)
    lock_file(descriptor, shared=True)
    _held_locks.setdefault(str(path), []).append(descriptor)


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | OPEN_BYTES)
    except FileNotFoundError:
        return False
    try:
        lock_file(descriptor, wait=False)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def _locked(path: Path, reporter: Reporter = SILENT) -> Iterator[None]:
    """Hold the lock of a staging folder; the kernel drops it with its holder, however that ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | OPEN_BYTES, 0o644)
    try:
        try:
            lock_file(descriptor, wait=False)
        except BlockingIOError:
            reporter.note(f"another process of this node copies tokens to {path.parent}: waiting for it")
            lock_file(descriptor)
        yield
    finally:
        os.close(descriptor)


def _put(path: Path, document: dict[str, Any]) -> None:
    LocalStore(path.parent).put(path.name, orjson.dumps(document))
