"""From an address to a store. Clients are imported only when an address needs them."""

from __future__ import annotations

import atexit
import builtins
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from trainshed.storage import address as addresses
from trainshed.storage.address import Address, join
from trainshed.storage.local import LocalStore
from trainshed.storage.store import (
    ABANDONED_SECONDS,
    CHUNK_BYTES,
    ObjectInfo,
    Store,
    StoreOptions,
    Writer,
    list_after,
    list_folders,
    read_into,
)

_CREDENTIAL_PREFIXES = ("AWS_", "BUCKET_STORAGE_", "GOOGLE_", "STORAGE_EMULATOR", "AZURE_", "HF_", "HUGGING_FACE")
_opened: dict[str, Store] = {}
_lock = threading.Lock()


def open_store(address: str | Address, options: StoreOptions | None = None) -> tuple[Store, str]:
    """Return the store of an address, and the path inside it.

    A remote store is opened once per process and set of credentials, so its connections are shared.
    """
    parsed = address if isinstance(address, Address) else addresses.parse(address)
    if parsed.scheme == "file":
        return LocalStore(parsed.root), parsed.path
    options = options or StoreOptions()
    key = _cache_key(parsed, options)
    with _lock:
        if key not in _opened:
            _opened[key] = _open_remote(parsed, options)
            # Connections are kept open for the next request; they end with the process that made them.
            close = getattr(_opened[key], "close", None)
            if close is not None:
                atexit.register(_close_in, os.getpid(), close)
        return _opened[key], parsed.path


def open_folder(address: str | Address, options: StoreOptions | None = None) -> Store:
    """Return a store whose root is the folder at an address."""
    store, path = open_store(address, options)
    return Folder(store, path) if path else store


class Folder:
    """One folder of a store, as a store."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder.strip("/")

    def __repr__(self) -> str:
        return f"Folder({self._store!r}, {self._folder!r})"

    @property
    def url(self) -> str:
        """The folder's address."""
        return join(self._store.url, self._folder)

    def head(self, path: str) -> ObjectInfo | None:
        """As the store's."""
        info = self._store.head(self._inside(path))
        return None if info is None else self._outside(info)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """As the store's."""
        return (self._outside(info) for info in self._store.list(self._inside(prefix)))

    def list_after(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """As the store's."""
        return (self._outside(info) for info in list_after(self._store, self._inside(prefix), self._inside(after)))

    def list_folders(self, prefix: str = "") -> builtins.list[str]:
        """As the store's."""
        return list_folders(self._store, self._inside(prefix))

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """As the store's."""
        return self._store.read(self._inside(path), start, end)

    def read_into(self, path: str, start: int, memory: memoryview) -> int:
        """As the store's."""
        return read_into(self._store, self._inside(path), start, memory)

    def stream(self, path: str, start: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """As the store's."""
        return self._store.stream(self._inside(path), start, chunk_bytes)

    def put(self, path: str, data: bytes, *, expect: str | None = None) -> ObjectInfo:
        """As the store's."""
        return self._outside(self._store.put(self._inside(path), data, expect=expect))

    @contextmanager
    def writer(self, path: str, *, size: int | None = None) -> Iterator[Writer]:
        """As the store's."""
        with self._store.writer(self._inside(path), size=size) as writer:
            yield writer
        writer.info = None if writer.info is None else self._outside(writer.info)

    def delete(self, path: str) -> None:
        """As the store's."""
        self._store.delete(self._inside(path))

    def sweep(self, prefix: str = "", *, older_than_seconds: float = ABANDONED_SECONDS) -> None:
        """As the store's."""
        self._store.sweep(self._inside(prefix), older_than_seconds=older_than_seconds)

    def _inside(self, path: str) -> str:
        return f"{self._folder}/{path}" if path else self._folder

    def _outside(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, path=info.path[len(self._folder) + 1 :])


def _open_remote(address: Address, options: StoreOptions) -> Store:
    endpoint = options.endpoint_for(address)
    if address.scheme in ("http", "https"):
        from trainshed.storage.http import HttpStore

        return HttpStore(address, options.retry)
    if address.scheme == "hf":
        from trainshed.storage.hub import HubStore

        return HubStore(address, endpoint, options.retry)
    from trainshed.storage.client_config import connect_bucket
    from trainshed.storage.object_store import ObjectStore

    return ObjectStore(connect_bucket(address, endpoint, options.retry), address.url, address.scheme, options.retry)


def _close_in(process: int, close: Callable[[], None]) -> None:
    if os.getpid() == process:
        close()


def _cache_key(address: Address, options: StoreOptions) -> str:
    # The process is part of it: connections do not survive a fork. Hashed: the environment holds secrets.
    relevant = sorted((name, value) for name, value in os.environ.items() if name.startswith(_CREDENTIAL_PREFIXES))
    parts = (os.getpid(), address.url, options.endpoint_for(address), options.retry, relevant)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
