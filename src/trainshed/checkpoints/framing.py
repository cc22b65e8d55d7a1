"""A file of torch.save on its way into a file: tensors' bytes come in any order, in parts, from several threads.

A tensor that comes in one part is written together with what stands before it. Of any other each part goes to its
place, and what stands before it, which holds its CRC-32, follows the last of them.
"""

from __future__ import annotations

import threading
import zlib

from trainshed.checkpoints.crc import crc32_together
from trainshed.checkpoints.hashed_file import HashedFile
from trainshed.checkpoints.pt_frame import PtFrame


class Framing:
    """A frame that begins at byte `base` of a file."""

    def __init__(self, frame: PtFrame, file: HashedFile, base: int = 0) -> None:
        self._frame, self._file, self._base = frame, file, base
        self._starts = frame.starts
        self._parts: list[dict[int, tuple[int, int]]] = [{} for _ in frame.stubs]
        self._sums: dict[int, int] = {}
        self._lock = threading.Lock()

    def write(self, number: int, start: int, data: memoryview) -> None:
        """Write bytes of a stub's tensor, from its byte `start` on; an empty tensor is written as such, too."""
        checksum, size = zlib.crc32(data), self._frame.stubs[number].bytes
        if len(data) == size:
            self._finish(number, checksum, data)
            return
        self._file.write(self._base + self._starts[number] + start, data)
        with self._lock:
            parts = self._parts[number]
            parts[start] = checksum, len(data)
            if sum(length for _, length in parts.values()) < size:
                return
        self._finish(number, crc32_together(part for _, part in sorted(parts.items())), memoryview(b""))

    def _finish(self, number: int, checksum: int, data: memoryview) -> None:
        """Write what stands before a tensor, with its bytes where these are to be written; behind the last, the end."""
        start, head = self._frame.head(number, checksum)
        with self._lock:
            self._sums[number] = checksum
            last = len(self._sums) == len(self._frame.stubs)
        end, tail = self._frame.tail([self._sums[each] for each in range(len(self._sums))]) if last else (0, b"")
        if tail and end == start + len(head) + len(data):
            self._file.write(self._base + start, head, data, tail)
            return
        self._file.write(self._base + start, head, data)
        self._file.write(self._base + end, tail)
