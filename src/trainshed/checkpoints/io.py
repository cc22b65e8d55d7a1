"""Bytes between tensors and files: reused buffers, scattered reads, and a file that is hashed while threads write it.

`BufferPool` lends memory that is used again. A fresh tensor costs more than the copy into it: the kernel finds and
clears every page, and takes them back afterwards. `read_rows` reads bytes of a file straight to their rows.

`HashedFile` is written by several threads in any order. A checksum wants a file first to last, and files of weights
are made in another order: rows of one tensor belong to two, a record's header holds the checksum of the record. So
a writer says where its bytes go. Whoever writes the bytes that the checksum waits for adds them from memory, and
then everything that is already written after them, from the page cache.
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
from trainshed.storage import Hasher

# Rows at least this long are put apart by the kernel while it copies; shorter ones cost less by a copy of our own.
_SCATTERED_BYTES = 2048
_MAX_IOVECS = 1024  # IOV_MAX of Linux and macOS
_BUFFER_BYTES = 2 * 1024 * 1024
_LEAST_BYTES = 64 * 1024


class BufferPool:
    """Buffers on loan, as many as are borrowed at the same time; safe to use from several threads."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, shape: Sequence[int], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Lend a tensor with anything in it, for as long as the block runs."""
        size = math.prod(shape) * dtype.itemsize
        buffer = self._taken(size)
        try:
            yield buffer[:size].view(dtype).view(tuple(shape))
        finally:
            with self._lock:
                self._free.append(buffer)

    def clear(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._free.clear()

    def _taken(self, size: int) -> torch.Tensor:
        with self._lock:
            for index, buffer in enumerate(self._free):
                if len(buffer) >= size:
                    return self._free.pop(index)
            if self._free:
                self._free.pop()  # too small: the larger one takes its place
        return torch.empty(max(size, _LEAST_BYTES), dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, as a file stores them; its own memory, where it lies in one piece."""
    raw: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()  # numpy's stubs do not know it for a buffer
    return memoryview(raw)


def read_rows(descriptor: int, start: int, rows: torch.Tensor, scratch: BufferPool) -> None:
    """Fill the rows of a vector or matrix, at whatever distance they lie, with the bytes of a file from `start` on.

    Raises `EOFError` where the file ends before.
    """
    if not rows.numel():
        return
    if rows.is_contiguous():
        _read_fully(descriptor, [bytes_of(rows)], start)
        return
    row_bytes = math.prod(rows.shape[1:]) * rows.itemsize
    if rows[0].is_contiguous() and row_bytes >= _SCATTERED_BYTES:
        apart: Any = rows.view(torch.uint8).numpy() if rows.dim() > 1 else rows[:, None].view(torch.uint8).numpy()
        for first in range(0, len(rows), _MAX_IOVECS):
            _read_fully(descriptor, list(apart[first : first + _MAX_IOVECS]), start + first * row_bytes)
        return
    count = max(1, _BUFFER_BYTES // row_bytes)
    for first in range(0, len(rows), count):
        part = rows[first : first + count]
        with scratch.lent(part.shape, part.dtype) as buffer:
            _read_fully(descriptor, [bytes_of(buffer)], start + first * row_bytes)
            part.copy_(buffer)


def _read_fully(descriptor: int, pieces: list[Any], start: int) -> None:
    wanted = sum(len(piece) for piece in pieces)
    read = os.preadv(descriptor, pieces, start)
    if read == wanted:
        return
    # The kernel gives less than 2 GiB at once, and less where a signal or a network mount comes between.
    for piece in pieces:
        done = min(read, len(piece))
        view, start, read = memoryview(piece)[done:], start + done, read - done
        while view:
            count = os.preadv(descriptor, [view], start)
            if not count:
                raise EOFError
            view, start = view[count:], start + count


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


def run_in_threads(jobs: Iterable[Callable[[], None]], threads: int) -> None:
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
