"""What an exporter is, and the guard around one that a plugin brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self


@dataclass(frozen=True)
class ExportedRun:
    """What exporters know of a run besides its events."""

    name: str
    """The recipe's."""
    id: str
    folder: Path
    """Where tools keep their files."""
    sequence_length: int
    attempt: int = 1
    steps: int | None = None
    config: Mapping[str, Any] | None = None
    """The recipe, for tools that show it beside the figures."""

    @property
    def run(self) -> str:
        """Name and id, as people write them."""
        return f"{self.name}/{self.id}"


class RunListener(Protocol):
    """What an exporter is: entered when rank 0 starts, called with each of its events, left when it ends.

    One that a plugin registers is made with the run's folder, and with its options as keyword arguments.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event: `{"kind": "step", "step": 4, "loss": 2.5, …}`."""
        ...


class GuardedListener:
    """An exporter of a plugin. One that fails warns once and gets no more events; the run goes on."""

    def __init__(self, name: str, make: Callable[[], RunListener], warn: Callable[[str], None]) -> None:
        self.name, self._warn = name, warn
        self._listener: RunListener | None = None
        self._guarded(lambda: self._open(make))

    def _open(self, make: Callable[[], RunListener]) -> None:
        made = make()
        made.__enter__()
        self._listener = made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        listener = self._listener
        if listener is not None:
            self._guarded(lambda: listener.__exit__(kind, error, at))

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Hand an event on."""
        listener = self._listener
        if listener is not None:
            self._guarded(lambda: listener(event))

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._listener = None
            self._warn(f"observe.exporters.{self.name}: nothing more is exported: {type(error).__name__}: {error}")
