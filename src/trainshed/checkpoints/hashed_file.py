"""A file that several threads write in any order, while its checksum follows from the beginning.

A checksum wants a file first to last, and files of weights are made in another order: rows of one tensor belong to two,
a record's header holds the checksum of the record. So whoever writes says where; whoever happens to write what the
checksum waits for adds it, from memory, and then whatever lies behind it already, from the page cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

import torch

from trainshed.errors import CorruptData
from trainshed.storage import Hasher

BLOCK_BYTES = 4 * 1024 * 1024
"""How much a writer handles at once: read, woven, hashed and written while it is in the processor's caches."""
_CHUNK_BYTES = 1024 * 1024


class HashedFile:
    """A new file at a path."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._hasher = Hasher()
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._ends: dict[int, int] = {}
        self._following = False
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, start: int, *parts: bytes | memoryview) -> int:
        """Write parts side by side from `start` on, each byte of the file once; return where they end."""
        end = start + sum(map(len, parts))
        if end == start:
            return end
        with self._writing:  # the kernel lets one thread at a time write to a file, and the others burn their time
            _write_all(self._descriptor, parts, start)
        with self._lock:
            self._ends[start] = end
            if self._following or self._hasher.size not in self._ends:
                return end
            self._following = True
        self._follow(start, parts)
        return end

    def checksum(self, size: int) -> str:
        """The checksum of the whole file of `size` bytes, once every write has returned."""
        assert self._hasher.size == size, f"{self._file}: written to {self._hasher.size} of {size}"
        return self._hasher.checksum

    def _follow(self, start: int, parts: Iterable[bytes | memoryview]) -> None:
        """Hash on as far as the file is written; `parts` lie at `start` and are still in memory."""
        while True:
            with self._lock:
                end = self._ends.pop(self._hasher.size, None)
                if end is None:
                    self._following = False
                    return
            if self._hasher.size == start:
                for part in parts:
                    self._hasher.update(part)
            else:
                self._read_back(end)

    def _read_back(self, end: int) -> None:
        self._buffer = self._buffer or bytearray(_CHUNK_BYTES)
        view = memoryview(self._buffer)
        while self._hasher.size < end:
            wanted = view[: min(len(view), end - self._hasher.size)]
            read = os.preadv(self._descriptor, [wanted], self._hasher.size)
            if not read:
                raise CorruptData("is shorter than what was written", where=str(self._file), hint="run it again")
            self._hasher.update(wanted[:read])


def in_threads(jobs: Iterable[Callable[[], None]], threads: int) -> None:
    """Do jobs in so many threads, in about their order; the first that fails ends it."""
    if threads == 1:
        for job in jobs:
            job()
        return
    rest, lock, failed = iter(jobs), threading.Lock(), threading.Event()

    def taken() -> Iterator[Callable[[], None]]:
        while not failed.is_set():
            with lock:
                job = next(rest, None)
            if job is None:
                return
            yield job

    def work() -> None:
        try:
            for job in taken():
                job()
        except BaseException:
            failed.set()
            raise

    # PyTorch's own threads below each of these would stand in their way.
    with ThreadPoolExecutor(threads, "trainshed-lay", initializer=partial(torch.set_num_threads, 1)) as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()


def _write_all(descriptor: int, parts: Iterable[bytes | memoryview], start: int) -> None:
    rest = [memoryview(part) for part in parts if len(part)]
    while rest:
        written = os.pwritev(descriptor, rest, start)
        start += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]
