"""The checksum of a file that is being written, made in a thread that follows the writer.

Whoever writes a file out of order cannot hash on the way, and hashing afterwards would take as long again. Here the
writer says how far the file is final, and bytes are hashed while they are still in the page cache.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from trainshed.errors import CorruptData
from trainshed.storage import Hasher

_CHUNK_BYTES = 1024 * 1024


class FollowingHash:
    """Hashes a file from its beginning, as far as it is final."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._handle = file.open("rb", buffering=0)
        self._hasher = Hasher()
        self._buffer = bytearray(_CHUNK_BYTES)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainshed-hash")
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._handle.close()

    def final_until(self, end: int) -> None:
        """Tell that the bytes [0, end) will not change any more."""
        self._last = self._pool.submit(self._follow, end)

    def sha256(self) -> str:
        """Wait for the checksum of all that is final."""
        if self._last is not None:
            self._last.result()
        return self._hasher.sha256

    def _follow(self, end: int) -> None:
        view = memoryview(self._buffer)
        while self._hasher.size < end:
            read = self._handle.readinto(view[: min(len(view), end - self._hasher.size)])
            if not read:
                raise CorruptData("is shorter than what was written", where=str(self._file), hint="run it again")
            self._hasher.update(view[:read])
