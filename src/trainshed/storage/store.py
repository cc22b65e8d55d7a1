"""The one protocol every store speaks: local disk, S3 and its kin, Google, Azure, the Hugging Face Hub, HTTP.

Paths are relative to the store's root and use `/`. Everything that can be large is streamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

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
        """Remove an object; removing what is not there is no error."""
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


ABSENT = "absent"
"""`put(expect=ABSENT)`: write only if nothing is there yet."""
