"""The token files of a PREFIX: names of shards, reading from a disk or a store, and writing atomically.

One PREFIX may stand for many shards: `PREFIX-00003-of-00072.bin` and `.idx`, with `.learned` where they hold
conversations. Local files are read with pread, stored ones with ranged gets. A file that is written locally appears
whole or not at all, however the process ends.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from trainshed import file_locks
from trainshed.errors import AddressError, Conflict, CorruptData, InputError, NoSpace, NotFound, StorageError
from trainshed.file_locks import OPEN_BYTES, lock_file
from trainshed.storage import open_store, parse

if TYPE_CHECKING:
    from trainshed.storage import Store, StoreOptions


REPREPARE = "copy the file again from where it was made, or run `trainshed data prepare` again"


def local_path(address: str) -> str | None:
    """Return an address on this machine's disks as a path, or None for a store's."""
    parsed = parse(address)
    if parsed.scheme != "file":
        return None
    return f"/{parsed.path}" if parsed.root == "/" else parsed.path


class TokenFile(Protocol):
    """Random access to one file."""

    size: int

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from byte `offset`; a file that ends too early is an error."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class LocalTokenFile:
    """A file on a local or mounted disk. It is read with pread: a page fault on a network mount stalls the process."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | OPEN_BYTES)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise StorageError(
                "too many open files", where=path, hint="raise the limit (`ulimit -n 65536`) or merge the shards"
            ) from error
        self.size = os.fstat(self._descriptor).st_size
        self._closer = weakref.finalize(self, os.close, self._descriptor)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from byte `offset`."""
        while view:
            got = os.preadv(self._descriptor, [view], offset)
            if got == 0:
                raise _truncated_file(self._path, offset)
            view, offset = view[got:], offset + got

    def close(self) -> None:
        """Close it."""
        self._closer()


class RemoteTokenFile:
    """An object in a store."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        self._store, self._path, self.size = store, path, size

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from byte `offset` with one ranged get."""
        if not view:
            return
        data = self._store.read(self._path, offset, offset + len(view))
        if len(data) != len(view):
            raise _truncated_file(f"{self._store.url}/{self._path}", offset + len(data))
        view[:] = data

    def close(self) -> None:
        """Nothing is held open."""


def open_token_file(address: str, options: StoreOptions | None = None) -> TokenFile:
    """Open a file of a prefix."""
    store, path = open_store(address, options)
    info = store.head(path)
    if info is None:
        raise NotFound("no such token file", where=address, hint="give a prefix that has both .bin and .idx")
    local = local_path(address)
    return LocalTokenFile(local) if local is not None else RemoteTokenFile(store, path, info.size)


@contextmanager
def local_copy(address: str, options: StoreOptions | None = None) -> Iterator[BinaryIO]:
    """Open a file for a memory map: a file on a disk itself, an object of a store as an unnamed local copy."""
    local = local_path(address)
    if local is not None:
        if not Path(local).is_file():
            raise NotFound("no such token file", where=address, hint="give a prefix that has both .bin and .idx")
        with open(local, "rb") as file:
            yield file
        return
    store, path = open_store(address, options)
    if store.head(path) is None:
        raise NotFound("no such token file", where=address, hint="give a prefix that has both .bin and .idx")
    with tempfile.TemporaryFile(prefix="trainshed-index-") as copy:
        for chunk in store.stream(path):
            copy.write(chunk)
        copy.flush()
        copy.seek(0)
        yield copy


def _truncated_file(where: str, offset: int) -> CorruptData:
    return CorruptData(f"ends at byte {offset} in the middle of a read", where=where, hint=REPREPARE)


def learned_path(prefix: str) -> str:
    """Return the address of the file that says which tokens are learned.

    It has one byte per token, 0 or 1, at the offsets that tokens have in `.bin`. Only conversations have it.
    """
    return f"{prefix}.learned"


def shard_name(prefix: str, shard: int, shards: int) -> str:
    """Return the prefix of one shard: `PREFIX-00003-of-00072`; of one alone, `PREFIX`."""
    return prefix if shards == 1 else f"{prefix}-{shard:05d}-of-{shards:05d}"


def set_prefix(shard: str) -> str | None:
    """Return the PREFIX of the set that a shard belongs to; None for a shard without a set."""
    match = re.fullmatch(r"(.*)-\d{5}-of-\d{5}", shard, re.DOTALL)
    return match[1] if match else None


def shard_prefixes(prefix: str | os.PathLike[str], options: StoreOptions | None = None) -> list[str]:
    """Return the prefixes a PREFIX stands for: itself, or all its `-00000-of-000NN` shards in order."""
    prefix = os.fspath(prefix)
    name = prefix.rpartition("/")[2]
    indexes = _index_files(prefix, options)
    is_whole = (1, None) in indexes
    totals = sorted({total for total, shard in indexes if shard is not None})
    if is_whole and totals:
        raise InputError(
            "there is both a whole file and a sharded one",
            where=prefix,
            hint=f"remove {name}.bin/.idx or the {name}-*-of-{totals[0]:05d} files, whichever is stale",
        )
    if is_whole:
        return [prefix]
    if len(totals) > 1:
        raise InputError(
            f"there are shards of several preparations: of {' and of '.join(map(str, totals))}",
            where=prefix,
            hint="remove the stale ones",
        )
    if not totals:
        raise AddressError(
            "no token files with this prefix",
            where=prefix,
            hint=f"expected {name}.idx or {name}-00000-of-….idx",
        )
    (total,) = totals
    missing = [shard_name(name, shard, total) + ".idx" for shard in range(total) if (total, shard) not in indexes]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise NotFound(
            f"{len(missing)} of {total} shards are missing: {shown}",
            where=prefix,
            hint="run their tasks again (`trainshed data prepare … --task i/N`), or copy them here",
        )
    return [f"{prefix}-{shard:05d}-of-{total:05d}" for shard in range(total)]


def refuse_other_shards(prefix: str, shards: int, options: StoreOptions | None = None) -> None:
    """Stop before writing beside token files of the same PREFIX with another number of shards."""
    others = sorted({total for total, _ in _index_files(prefix, options)} - {shards})
    if others:
        raise InputError(
            f"there are token files in {others[0]} shards with this prefix already; {shards} are asked for",
            where=prefix,
            hint=f"write --shards {others[0]}, another --output, or remove the old files",
        )


def _index_files(prefix: str, options: StoreOptions | None) -> set[tuple[int, int | None]]:
    """Return the `.idx` files of a prefix as (number of shards, shard); a whole file is (1, None)."""
    folder, slash, name = prefix.rpartition("/")
    pattern = re.compile(re.escape(name) + r"(?:-(\d{5})-of-(\d{5}))?\.idx")
    local = local_path(folder + slash or ".")
    if local is not None:
        names = os.listdir(local or ".") if os.path.isdir(local or ".") else []
    else:
        store, path = open_store(folder, options)
        names = [info.path.removeprefix(f"{path}/") for info in store.list(path)]
    matches = (pattern.fullmatch(name) for name in names)
    return {(int(m[2]), int(m[1])) if m[1] else (1, None) for m in matches if m}


def commit_file(file: BinaryIO, path: Path, *, sync_folder: bool = True) -> None:
    """Flush a file of `partial_file` to disk and give it its name.

    With `sync_folder=False` a power cut may lose the name; a later commit in the same folder makes it safe.
    """
    file.flush()
    os.fsync(file.fileno())
    _partial_path(path).replace(path)
    if sync_folder:
        file_locks.sync_folder(path.parent)


@contextmanager
def partial_file(path: Path) -> Iterator[BinaryIO]:
    """Yield `path.partial`, empty, for writing; `commit_file` inside the block makes it `path`.

    The name is fixed, so the next writer overwrites what a killed one left. The lock excludes a second writer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_path(path)
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | OPEN_BYTES, 0o666)
    try:
        with open(descriptor, "r+b") as file:
            _lock_partial(file, path)
            try:
                file.truncate(0)
                yield file
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace("the disk is full", where=str(path), hint="free some space, then run it again") from error
        raise


@contextmanager
def replace_file(path: Path, *, sync_folder: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that takes the name `path` when the block ends without an error."""
    with partial_file(path) as file:
        yield file
        commit_file(file, path, sync_folder=sync_folder)


def _partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _lock_partial(file: BinaryIO, path: Path) -> None:
    try:
        lock_file(file, wait=False)
        # Its writer may have committed between our open and our lock: we would then truncate the result.
        ours = os.path.samestat(os.fstat(file.fileno()), os.stat(_partial_path(path)))
    except (BlockingIOError, FileNotFoundError):
        ours = False
    if not ours:
        raise Conflict(
            "another process is writing this file",
            where=str(path),
            hint="wait for it, or write to another path",
        )
