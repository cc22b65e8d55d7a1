"""An exporter that writes one file: flushed every half minute, and before a checkpoint counts.

A run that is killed and resumes from that checkpoint leaves no gap in it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Self

FLUSH_SECONDS = 30.0


class Exporter(ABC):
    """Writes one file during a training; a subclass says what an event becomes."""

    name: ClassVar[str]

    def __init__(self, run_folder: Path, *, sequence_length: int, warn: Callable[[str], None]) -> None:
        self.folder = run_folder / self.name
        self.sequence_length = sequence_length
        self._warn = warn
        self._file: BinaryIO | None = None
        self._flushed = time.monotonic()
        self._guarded(self._start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._guarded(self._close)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Write what an event becomes here, if anything."""
        if self._file is not None:
            self._guarded(lambda: self._take(event))

    @abstractmethod
    def open(self) -> BinaryIO:
        """Open the file that this attempt writes to, and write how it begins."""

    @abstractmethod
    def records(self, event: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield what an event becomes in the file."""

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.open()
        self._file.flush()

    def _take(self, event: Mapping[str, Any]) -> None:
        assert self._file is not None
        for record in self.records(event):
            self._file.write(record)
        due = time.monotonic() - self._flushed > FLUSH_SECONDS
        if due or event["kind"] in ("checkpoint", "validation", "end"):
            self._file.flush()
            self._flushed = time.monotonic()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError):  # its buffer cannot be written either
                    file.close()
            self._warn(f"observe.{self.name}: nothing more is written there: {error.strerror}, {self.folder}")
