"""The events of a foreign engine, written by whatever of ours runs beside it while it trains."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from trainshed.errors import TrainshedError
from trainshed.launch.attempt import logs_folder
from trainshed.observe.engine_logs.run_logs import EngineLogFollower, start_event
from trainshed.observe.events import EventWriter
from trainshed.observe.run_facts import EngineRun, run_facts
from trainshed.run_folder import node_name
from trainshed.storage import LocalStore


class EngineEvents:
    """Follows the logs of an attempt's nodes and writes its events: the start, steps, checkpoints, the end.

    It never raises for a log that it cannot read or a disk that is full: the engine trains on without it. Without
    `engine/run.json`, which the stage before training writes, there is nothing to follow by.
    """

    def __init__(self, run_folder: Path, attempt: int) -> None:
        self._run, self._attempt = run_folder, attempt
        self._writer: EventWriter | None = None
        self._follower: EngineLogFollower | None = None

    def __enter__(self) -> Self:
        store = LocalStore(self._run)
        placed = EngineRun.read(store, "")
        if placed is None:
            return self
        self._writer = EventWriter(store, "", attempt=self._attempt, rank=None)
        values = start_event("/".join(self._run.absolute().parts[-2:]), placed)
        kind, step = values.pop("kind"), values.pop("step")
        self._writer.emit(kind, step, **values)
        nodes = dict.fromkeys((0, placed.losses_rank // placed.ranks_per_node))
        logs = logs_folder(self._run, self._attempt)
        files = [logs / f"{node_name(node)}.log" for node in nodes]
        self._follower = EngineLogFollower(files, run_facts(store, ""), self._writer.emit)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._writer is not None:
            with _forgiving():
                self._writer.close()

    def poll(self, *, at_once: bool = False) -> None:
        """Write the events of what the engine has printed since the last call."""
        if self._follower is not None:
            self._follower.poll(at_once=at_once)

    def end(self, exit_code: int) -> None:
        """Write that the attempt is over: finished, or stopped by a signal."""
        self.poll(at_once=True)
        if self._writer is not None:
            self._writer.emit("end", reason="signal" if exit_code else "finished", exit_code=exit_code)

    def fail(self, what: str) -> None:
        """Write that the attempt has failed, and why."""
        self.poll(at_once=True)
        if self._writer is not None:
            self._writer.emit("failure", ranks=[], collective=None, what=what)
            self._writer.emit("end", reason="failed", exit_code=1)


@contextmanager
def _forgiving() -> Generator[None]:
    try:
        yield
    except TrainshedError:
        return
