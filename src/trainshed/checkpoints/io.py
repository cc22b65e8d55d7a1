"""Bytes between tensors and files: reused buffers, scattered reads, and a file that is hashed while threads write it.

`BufferPool` lends memory that is reused. A new tensor costs more than the copy into it: the kernel finds and clears
every page, and takes it back afterwards. `read_rows` reads bytes of a file directly to their rows.

`HashedFile` is written by several threads in any order. A checksum needs the bytes of a file in order, and files of
weights are written in another order: rows of one tensor belong to two tensors of the file, and the header of a record
holds its checksum. So each write says where its bytes go. The thread that writes the bytes which the checksum needs
next adds them from memory. It then adds everything that is already written after them, from the page cache.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from trainshed.errors import CorruptData
from trainshed.file_locks import OPEN_BYTES
from trainshed.storage import Hasher

# The kernel scatters rows of at least this length while it copies; shorter rows are cheaper with a copy of our own.
_SCATTERED_BYTES = 2048
_MAX_IOVECS = 1024  # IOV_MAX of Linux and macOS
_BUFFER_BYTES = 2 * 1024 * 1024
_LEAST_BYTES = 64 * 1024


class BufferPool:
    """Lends buffers and reuses them; safe to use from several threads."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, shape: Sequence[int], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Lend an uninitialized tensor for as long as the `with` block runs."""
        size = math.prod(shape) * dtype.itemsize
        buffer = self._take(size)
        try:
            yield buffer[:size].view(dtype).view(tuple(shape))
        finally:
            with self._lock:
                self._free.append(buffer)

    def clear(self) -> None:
        """Free the memory."""
        with self._lock:
            self._free.clear()

    def _take(self, size: int) -> torch.Tensor:
        with self._lock:
            for index, buffer in enumerate(self._free):
                if len(buffer) >= size:
                    return self._free.pop(index)
            if self._free:
                self._free.pop()  # too small: the larger one replaces it
        return torch.empty(max(size, _LEAST_BYTES), dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes as a file stores them: a view of its memory where it is contiguous, otherwise a copy."""
    raw: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()  # numpy's stubs do not say that it is a buffer
    return memoryview(raw)


def read_rows(descriptor: int, start: int, rows: torch.Tensor, buffers: BufferPool) -> None:
    """Fill the rows of a vector or matrix of any stride with the bytes of a file, from `start` on.

    Raises `EOFError` where the file is too short.
    """
    if not rows.numel():
        return
    if rows.is_contiguous():
        _read_fully(descriptor, [bytes_of(rows)], start)
        return
    row_bytes = math.prod(rows.shape[1:]) * rows.itemsize
    if rows[0].is_contiguous() and row_bytes >= _SCATTERED_BYTES:
        buffers_of_rows: Any = (rows if rows.dim() > 1 else rows[:, None]).view(torch.uint8).numpy()
        for first in range(0, len(rows), _MAX_IOVECS):
            _read_fully(descriptor, list(buffers_of_rows[first : first + _MAX_IOVECS]), start + first * row_bytes)
        return
    count = max(1, _BUFFER_BYTES // row_bytes)
    for first in range(0, len(rows), count):
        part = rows[first : first + count]
        with buffers.borrow(part.shape, part.dtype) as buffer:
            _read_fully(descriptor, [bytes_of(buffer)], start + first * row_bytes)
            part.copy_(buffer)


def _read_fully(descriptor: int, parts: list[Any], start: int) -> None:
    wanted = sum(len(part) for part in parts)
    read = os.preadv(descriptor, parts, start)
    if read == wanted:
        return
    # The kernel reads less than 2 GiB at once, and less after a signal or from a network mount.
    for part in parts:
        done = min(read, len(part))
        view, start, read = memoryview(part)[done:], start + done, read - done
        while view:
            count = os.preadv(descriptor, [view], start)
            if not count:
                raise EOFError
            view, start = view[count:], start + count


BLOCK_BYTES = 4 * 1024 * 1024
"""How much a writer handles at once: read, interleaved, hashed and written while it is in the processor's caches."""
_CHUNK_BYTES = 1024 * 1024


class HashedFile:
    """A new file that is hashed while it is written."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | OPEN_BYTES, 0o666)
        self._hasher = Hasher()
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._written_ends: dict[int, int] = {}
        self._is_hashing = False
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, start: int, *parts: bytes | memoryview) -> int:
        """Write adjacent parts from `start` on, each byte of the file once; return where they end."""
        end = start + sum(map(len, parts))
        if end == start:
            return end
        with self._writing:  # the kernel lets one thread at a time write to a file, and the others would spin
            _write_all(self._descriptor, parts, start)
        with self._lock:
            self._written_ends[start] = end
            if self._is_hashing or self._hasher.size not in self._written_ends:
                return end
            self._is_hashing = True
        self._hash_on(start, parts)
        return end

    def checksum(self, size: int) -> str:
        """Return the checksum of the file of `size` bytes; every write must have returned."""
        assert self._hasher.size == size, f"{self._file}: written to {self._hasher.size} of {size}"
        return self._hasher.checksum

    def _hash_on(self, start: int, parts: Iterable[bytes | memoryview]) -> None:
        """Hash as far as the file is written; `parts` were written at `start` and are still in memory."""
        while True:
            with self._lock:
                end = self._written_ends.pop(self._hasher.size, None)
                if end is None:
                    self._is_hashing = False
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


def run_in_threads(jobs: Iterable[Callable[[], None]], threads: int) -> None:
    """Run jobs in `threads` threads, in about their order; the first failure ends all."""
    if threads == 1:
        for job in jobs:
            job()
        return
    remaining, lock, failed = iter(jobs), threading.Lock(), threading.Event()

    def next_jobs() -> Iterator[Callable[[], None]]:
        while not failed.is_set():
            with lock:
                job = next(remaining, None)
            if job is None:
                return
            yield job

    def work() -> None:
        try:
            for job in next_jobs():
                job()
        except BaseException:
            failed.set()
            raise

    # PyTorch's own threads would compete with these.
    with ThreadPoolExecutor(threads, "trainshed-write", initializer=partial(torch.set_num_threads, 1)) as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()


def _write_all(descriptor: int, parts: Iterable[bytes | memoryview], start: int) -> None:
    remaining = [memoryview(part) for part in parts if len(part)]
    while remaining:
        written = os.pwritev(descriptor, remaining, start)
        start += written
        while remaining and written >= len(remaining[0]):
            written -= len(remaining.pop(0))
        if written:
            remaining[0] = remaining[0][written:]
