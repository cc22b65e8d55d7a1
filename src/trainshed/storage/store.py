"""The one protocol every store speaks (local disk, S3 and its kin, Google, Azure, the Hugging Face Hub, HTTP), and
what a person may say about a store beyond its address: endpoints, and how long to retry.

Paths are relative to the store's root and use `/`. Everything that can be large is streamed. A cluster file's
`stores:` section is read into `StoreOptions`.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import NoReturn, Protocol

from trainshed.errors import InputError
from trainshed.storage.address import Address

CHUNK_BYTES = 8 * 1024 * 1024
# A living writer holds a lock on its temporary file; an hour covers mounts where others do not see that lock.
ABANDONED_SECONDS = 3600.0


@dataclass(frozen=True)
class ObjectInfo:
    """One stored object.

    `version` changes whenever the content does (an ETag; on disk size, time and inode), so that an unchanged object
    need not be read again. `sha256` is there only where the store states it (Hub LFS files).
    """

    path: str
    size: int
    version: str
    sha256: str | None = None
    modified_seconds: float | None = field(default=None, compare=False, repr=False)
    """When it was last written, in seconds since 1970, where a bucket says so."""


class Writer(Protocol):
    """Bytes on their way into one object; nothing is visible until the `with` block ends without an error.

    `info` describes the object once the block has ended, so that nobody needs to ask the store again.
    """

    info: ObjectInfo | None

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        ...


class Store(Protocol):
    """Nine methods over one root."""

    @property
    def url(self) -> str:
        """The root as an address, without credentials."""
        ...

    def head(self, path: str) -> ObjectInfo | None:
        """Describe one object, or None if there is none."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below a folder (`prefix` ends at a `/` boundary), sorted by path."""
        ...

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Read the bytes [start, end) of an object; as with a slice, less where the object ends earlier."""
        ...

    def stream(self, path: str, start: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Read an object from `start` to its end in chunks; retries go on where the connection broke."""
        ...

    def put(self, path: str, data: bytes, *, expect: str | None = None) -> ObjectInfo:
        """Write a small object in one atomic step.

        `expect` makes it conditional: `ABSENT` writes only where nothing is yet, a version only over that version.
        Raises `Conflict` when the condition does not hold. Where the answer to a write was lost on the way, the
        writer cannot tell its own success from another's: content that names its writer settles it.
        """
        ...

    def writer(self, path: str, *, size: int | None = None) -> AbstractContextManager[Writer]:
        """Open a large object for writing (multipart where the store has it).

        `size` is how much will come, where it is known: buckets limit the number of parts, not the size of an object.
        """
        ...

    def delete(self, path: str) -> None:
        """Remove an object; removing what is not there is not an error."""
        ...

    def sweep(self, prefix: str = "", *, older_than_seconds: float = ABANDONED_SECONDS) -> None:
        """Remove what killed writers have left below a folder and no listing shows (buckets: nothing)."""
        ...


def read_into(store: Store, path: str, start: int, memory: memoryview) -> int:
    """Read as many bytes as fit into memory that is there already; return how many there were.

    A store that can do so without a buffer between has a method of this name.
    """
    straight = getattr(store, "read_into", None)
    if straight is not None:
        return straight(path, start, memory)
    data = store.read(path, start, start + len(memory))
    memory[: len(data)] = data
    return len(data)


def list_after(store: Store, prefix: str, after: str) -> Iterator[ObjectInfo]:
    """List the objects below a folder whose paths sort after `after`.

    A store that can do so without listing the earlier ones has a method of this name.
    """
    straight = getattr(store, "list_after", None)
    if straight is not None:
        return straight(prefix, after)
    return (info for info in store.list(prefix) if info.path > after)


def list_folders(store: Store, prefix: str = "") -> list[str]:
    """Return the names of the folders directly below a folder, sorted.

    A store that can do so without listing all that is in them has a method of this name.
    """
    straight = getattr(store, "list_folders", None)
    if straight is not None:
        return straight(prefix)
    skip = len(prefix.strip("/")) + 1 if prefix.strip("/") else 0
    inside = (info.path[skip:].split("/") for info in store.list(prefix))
    return sorted({parts[0] for parts in inside if len(parts) > 1})


ABSENT = "absent"
"""`put(expect=ABSENT)`: write only if nothing is there yet."""


class ReadOnlyStore(ABC):
    """The writing half of a store that has none."""

    @abstractmethod
    def _refuse(self, path: str) -> NoReturn:
        """Say that this store is read-only, and where to write instead."""

    def put(self, path: str, data: bytes, *, expect: str | None = None) -> ObjectInfo:
        """Refuse: read-only."""
        self._refuse(path)

    def writer(self, path: str, *, size: int | None = None) -> AbstractContextManager[Writer]:
        """Refuse: read-only."""
        self._refuse(path)

    def delete(self, path: str) -> None:
        """Refuse: read-only."""
        self._refuse(path)

    def sweep(self, prefix: str = "", *, older_than_seconds: float = ABANDONED_SECONDS) -> None:
        """Refuse: read-only."""
        self._refuse(prefix)


@dataclass(frozen=True)
class Retry:
    """How long to wait for a store, and how often to try again.

    With the defaults a server that cannot be reached or says nothing is given up after about two minutes. One that is
    slow may take as long as it takes: each byte that arrives starts the time again. A server's own Retry-After is
    followed up to `longest_wait_seconds`.
    """

    attempts: int = 8
    first_seconds: float = 0.25
    max_seconds: float = 20.0
    longest_wait_seconds: float = 600.0
    connect_seconds: float = 10.0
    """For one connection to be accepted."""
    answer_seconds: float = 60.0
    """For the first byte of an answer, and from each byte to the next."""
    silent_seconds: float = 120.0
    """Without a byte, all attempts together: after this no other is begun, however many are left."""

    def pause(self, attempt: int, asked_seconds: float | None = None) -> None:
        """Wait before the try after `attempt` (counted from 0), or as long as the server asked for."""
        time.sleep(self.delay(attempt, asked_seconds))

    def delay(self, attempt: int, asked_seconds: float | None = None) -> float:
        """How long `pause` waits."""
        if asked_seconds is not None:
            # A little later than asked, and not all at once: many workers were told the same number.
            return min(asked_seconds, self.longest_wait_seconds) * (1 + 0.1 * random.random())
        # Full jitter (aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter), never less than half.
        ceiling = min(self.max_seconds, self.first_seconds * 2**attempt)
        return ceiling * (0.5 + 0.5 * random.random())


@dataclass(frozen=True)
class Endpoint:
    """How to reach one kind of store or one bucket. Never holds a credential: those come from the environment."""

    endpoint: str | None = None
    region: str | None = None
    anonymous: bool = False
    addressing: str | None = None  # path | virtual; path where an endpoint is named, else the store's own habit

    def __post_init__(self) -> None:
        if self.addressing not in (None, "path", "virtual"):
            raise InputError(f"addressing '{self.addressing}'", hint="write addressing: path or addressing: virtual")
        if self.endpoint is not None and "@" in self.endpoint:
            raise InputError(
                "an endpoint with a user or password in it",
                hint="leave them out: credentials come from the environment",
            )
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise InputError(
                f"endpoint '{self.endpoint}' has no scheme",
                hint=f"write https://{self.endpoint} or http://{self.endpoint}",
            )


@dataclass(frozen=True)
class StoreOptions:
    """Endpoints by scheme (`s3`) or by root (`s3://bucket`), and how patient to be."""

    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    retry: Retry = field(default_factory=Retry)

    @classmethod
    def from_mapping(cls, stores: Mapping[str, Mapping[str, object]], *, where: str | None = None) -> StoreOptions:
        """Read `{s3: {endpoint: …}, "s3://bucket": {anonymous: true}}`."""
        known = {field.name for field in fields(Endpoint)}
        endpoints = {}
        for key, values in stores.items():
            unknown = sorted(set(values) - known)
            if unknown:
                raise InputError(
                    f"stores.{key} has an unknown key '{unknown[0]}'",
                    where=where,
                    hint="write one of " + ", ".join(sorted(known)),
                )
            endpoints[key.rstrip("/")] = Endpoint(**values)  # type: ignore[arg-type]
        return cls(endpoints)

    def endpoint_for(self, address: Address) -> Endpoint:
        """The entry for a bucket, else the one for its scheme, else an empty one."""
        return self.endpoints.get(address.url) or self.endpoints.get(address.scheme) or Endpoint()
