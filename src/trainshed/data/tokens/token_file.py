"""The bytes of a token file, wherever they lie: pread on a disk, ranged gets from a store."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from trainshed.errors import CorruptData, NotFound, StorageError
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
    """A file on a local or mounted disk, read with pread: a page fault on a network mount stalls the process."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
                raise _cut_short(self._path, offset)
            view, offset = view[got:], offset + got

    def close(self) -> None:
        """Close it."""
        self._closer()


class StoredTokenFile:
    """An object in a store."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        self._store, self._path, self.size = store, path, size

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from byte `offset` with one ranged get."""
        if not view:
            return
        data = self._store.read(self._path, offset, offset + len(view))
        if len(data) != len(view):
            raise _cut_short(f"{self._store.url}/{self._path}", offset + len(data))
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
    return LocalTokenFile(local) if local is not None else StoredTokenFile(store, path, info.size)


@contextmanager
def local_copy(address: str, options: StoreOptions | None = None) -> Iterator[BinaryIO]:
    """Open a file for mapping: itself where it is on a disk, an unnamed copy where it is in a store."""
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


def _cut_short(where: str, offset: int) -> CorruptData:
    return CorruptData(f"ends at byte {offset} in the middle of a read", where=where, hint=REPREPARE)
