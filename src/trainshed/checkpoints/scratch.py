"""Memory that is used again and again, and bytes of a file read straight to where they belong in it.

A fresh tensor costs more than the copy into it: the kernel finds and clears every page of it, and takes them back when
it goes. Whoever streams gigabytes borrows a box, and gives it back.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Rows at least this long are put apart by the kernel while it copies; shorter ones cost less by a copy of our own.
_SCATTERED_BYTES = 2048
_PIECES = 1024  # IOV_MAX of Linux and macOS
_BUFFER_BYTES = 2 * 1024 * 1024
_LEAST_BYTES = 64 * 1024


class Scratch:
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


def read_rows(descriptor: int, start: int, rows: torch.Tensor, scratch: Scratch) -> None:
    """Fill the rows of a vector or matrix, at whatever distance they lie, with the bytes of a file from `start` on.

    Raises `EOFError` where the file ends before.
    """
    if not rows.numel():
        return
    if rows.is_contiguous():
        _read(descriptor, [bytes_of(rows)], start)
        return
    row_bytes = math.prod(rows.shape[1:]) * rows.itemsize
    if rows[0].is_contiguous() and row_bytes >= _SCATTERED_BYTES:
        apart: Any = rows.view(torch.uint8).numpy() if rows.dim() > 1 else rows[:, None].view(torch.uint8).numpy()
        for first in range(0, len(rows), _PIECES):
            _read(descriptor, list(apart[first : first + _PIECES]), start + first * row_bytes)
        return
    count = max(1, _BUFFER_BYTES // row_bytes)
    for first in range(0, len(rows), count):
        part = rows[first : first + count]
        with scratch.lent(part.shape, part.dtype) as buffer:
            _read(descriptor, [bytes_of(buffer)], start + first * row_bytes)
            part.copy_(buffer)


def _read(descriptor: int, pieces: list[Any], start: int) -> None:
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
