"""The files of one run, and no others: a symbolic link that leads out of the run's folder is as good as absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainshed.errors import NotFound
from trainshed.storage import LocalStore, ObjectInfo, Store


@dataclass(frozen=True)
class RunSource:
    """A run that can be looked at: where it is, and what only the rooms above know about it."""

    name: str
    id: str
    address: str
    store: Store
    """Its root is the run's folder."""
    cluster: str = "local"
    is_running: Callable[[], bool | None] = field(default=lambda: None)
    """Whether something works on it now; None where that cannot be seen."""
    steps: Callable[[], int | None] = field(default=lambda: None)
    """How many steps it is to have; None where its files do not say."""
    answers: Callable[[], Sequence[dict[str, Any]]] | None = None
    """Reads `{step, answers}` of answers that are stored as tokens alone."""

    @property
    def run(self) -> str:
        """Name and id, as people write them."""
        return f"{self.name}/{self.id}"


class RunFiles:
    """Reads and lists the files of a run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = Path(store.url).resolve() if isinstance(store, LocalStore) else None

    @property
    def is_local(self) -> bool:
        """Whether they are on a disk, where looking costs nothing."""
        return self._root is not None

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Read the bytes [start, end) of a file; `NotFound` also for what is outside of the run."""
        if not self._is_inside(path):
            raise NotFound("there is no such file in this run", where=path)
        return self._store.read(path, start, end)

    def read_if_there(self, path: str) -> bytes | None:
        """Read a file; None where there is none."""
        try:
            return self.read(path)
        except NotFound:
            return None

    def head(self, path: str) -> ObjectInfo | None:
        """Describe a file; None where there is none."""
        return self._store.head(path) if self._is_inside(path) else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All files below a folder."""
        if self._is_inside(prefix):
            for info in self._store.list(prefix):
                if self._is_inside(info.path):
                    yield info

    def _is_inside(self, path: str) -> bool:
        if self._root is None:
            return ".." not in path.split("/")
        return (self._root / path).resolve().is_relative_to(self._root)
