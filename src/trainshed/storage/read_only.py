"""What stores that only read have in common: every way of writing is refused in the store's own words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import NoReturn

from trainshed.storage.store import ABANDONED_SECONDS, ObjectInfo, Writer


class ReadOnly(ABC):
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
