"""A web server as a store that can only be read, one named file at a time.

Not through obstore: its HTTP client refuses answers without a Content-Length and addresses with a query.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from trainshed.errors import AddressError, NotFound, StorageError
from trainshed.redaction import shown_address
from trainshed.storage.address import Address
from trainshed.storage.read_only import ReadOnly
from trainshed.storage.retry import Retry
from trainshed.storage.store import CHUNK_BYTES, ObjectInfo
from trainshed.storage.web import Web

UNKNOWN_SIZE = -1


class HttpStore(ReadOnly):
    """All files of one web server."""

    def __init__(self, address: Address, retry: Retry) -> None:
        self._root = address.url
        self._web = Web(retry)

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"

    @property
    def url(self) -> str:
        """The server's address, without a user or password."""
        return shown_address(self._root)

    def close(self) -> None:
        """Close the connections that are kept for the next request."""
        self._web.close()

    def head(self, path: str) -> ObjectInfo | None:
        """Describe one file; the size is -1 where the server does not tell it."""
        try:
            remote = self._web.inspect(self._url(path), self._shown(path))
        except NotFound:
            return None
        return ObjectInfo(path, UNKNOWN_SIZE if remote.size is None else remote.size, remote.version)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Refuse: HTTP has no listing."""
        raise AddressError(
            "a web server cannot be listed",
            where=self._shown(prefix),
            hint="name one file, or put the URLs one per line into a text file and write @that-file",
        )

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Read the bytes [start, end) of a file."""
        return b"".join(self._web.stream(self._url(path), self._shown(path), start, end))

    def stream(self, path: str, start: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Read a file from `start` to its end in chunks."""
        return self._web.stream(self._url(path), self._shown(path), start, None, chunk_bytes)

    def _url(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _shown(self, path: str) -> str:
        return shown_address(self._url(path))

    def _refuse(self, path: str) -> NoReturn:
        raise StorageError(
            "a web server is read-only here",
            where=self._shown(path),
            hint="write to a path, s3://, gs:// or az://",
        )
