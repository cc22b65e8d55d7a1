"""Exporters to experiment trackers: their libraries may block and fail, so a thread talks to them.

Training puts a point into a queue and goes on. A tracker keeps what it was sent once: a step that an earlier attempt
has sent is not sent again, which a small file in the run's folder remembers (`exported/wandb.json`).
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from trainshed.observe.exporters.figures import FigurePoint, figure_point
from trainshed.observe.exporters.listener import ExportedRun
from trainshed.recipe import Observe
from trainshed.redaction import redacted
from trainshed.run_folder import EXPORTED

QUEUE_SIZE = 20_000
"""Points that wait for a tool which does not answer; after that they are left out and counted."""
CLOSE_SECONDS = 30.0
"""How long the end of a run waits for a tool to take what is left."""
_BATCH = 500


class Tracker(ABC):
    """One run of a tool. All methods are called by one thread."""

    destination: str
    """Where the figures go, for messages and to tell one place from another."""

    @abstractmethod
    def open(self) -> None:
        """Begin the run there, or go on with it."""

    @abstractmethod
    def log(self, points: Sequence[FigurePoint]) -> None:
        """Send figures; their steps never go back."""

    @abstractmethod
    def close(self, exit_code: int) -> None:
        """End the run there."""

    def abandon(self) -> None:
        """Leave nothing that would hold up the end of this process; called while another thread still waits."""
        return


class ExportedMark:
    """The last step that a tool was sent, kept in the run's folder."""

    def __init__(self, run_folder: Path, tool: str, destination: str) -> None:
        self._file = run_folder / EXPORTED / f"{tool}.json"
        self._destination = destination

    def read(self) -> int:
        """Return the last step, 0 for none; what went to another place does not count."""
        try:
            body = orjson.loads(self._file.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return 0
        return body["step"] if body.get("to") == self._destination else 0

    def write(self, step: int) -> None:
        """Remember a step."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_bytes(orjson.dumps({"to": self._destination, "step": step}))
        new.replace(self._file)


class TrackerExporter:
    """Hands the figures of a run to a tool, from a thread of its own."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        mark: ExportedMark,
        *,
        warn: Callable[[str], None],
        close_seconds: float = CLOSE_SECONDS,
        queue_size: int = QUEUE_SIZE,
    ) -> None:
        self.name, self._tracker, self._mark, self._warn = name, tracker, mark, warn
        self._close_seconds = close_seconds
        self._queue: queue.Queue[FigurePoint | None] = queue.Queue(queue_size)
        self._left_out = 0
        self._exit_code = 1
        self._problem: str | None = None
        self._warned = False
        self.sent = 0
        """Points that the tool has taken."""
        self._thread = threading.Thread(target=self._run, name=f"export to {name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Queue the figures of an event; never waits."""
        if event["kind"] == "end":
            self._exit_code = event["exit_code"]
        if self._problem is not None:
            self._warn_once()
        elif (point := figure_point(event)) is not None:
            try:
                self._queue.put_nowait(point)
            except queue.Full:
                self._left_out += 1

    def put(self, event: Mapping[str, Any]) -> None:
        """Queue the figures of an event, and wait where the queue is full: nobody trains meanwhile."""
        point = figure_point(event)
        while point is not None and self._problem is None:
            try:
                self._queue.put(point, timeout=1.0)
                return
            except queue.Full:
                continue

    @property
    def destination(self) -> str:
        """Where the figures go, in words."""
        return self._tracker.destination

    def close(self) -> None:
        """Wait until the tool has taken everything, or for `close_seconds`."""
        deadline_passed = False
        try:
            self._queue.put(None, timeout=self._close_seconds)
        except queue.Full:
            deadline_passed = True
        self._thread.join(0 if deadline_passed else self._close_seconds)
        if self._thread.is_alive() and self._problem is None:
            self._problem = f"it has not taken everything within {self._close_seconds:.0f} s"
            self._tracker.abandon()
        if self._left_out and self._problem is None:
            self._problem = f"{self._left_out} points were left out, because it was too slow"
        if self._problem is not None:
            self._warn_once()

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            text = f"observe.{self.name}: {self._problem}; the events have everything"
            self._warn(f"{text} (`trainshed export-figures RUN --to {self.name}`)")

    def _run(self) -> None:
        try:
            self._send_all()
        except (Exception, SystemExit) as error:
            lines = redacted(str(error)).strip().splitlines() or [""]
            self._problem = f"nothing more is sent: {type(error).__name__}: {lines[0][:300]}"

    def _send_all(self) -> None:
        last = sent_before = self._mark.read()
        opened = False
        while True:
            points, ended = self._take_batch()
            fresh = [point for point in points if point.step > sent_before]
            if fresh and not opened:
                self._tracker.open()
                opened = True
            if fresh:
                self._tracker.log(fresh)
                self.sent += len(fresh)
                if fresh[-1].step > last:
                    last = fresh[-1].step
                    self._mark.write(last)
            if ended:
                if opened:
                    self._tracker.close(self._exit_code)
                return

    def _take_batch(self) -> tuple[list[FigurePoint], bool]:
        """Wait for a point, then take all others in the queue; the second value says that the queue was closed."""
        points: list[FigurePoint] = []
        item = self._queue.get()
        while item is not None:
            points.append(item)
            if len(points) == _BATCH:
                return points, False
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return points, False
        return points, True


def open_tracker(
    name: str,
    observe: Observe,
    run: ExportedRun,
    *,
    warn: Callable[[str], None],
    close_seconds: float = CLOSE_SECONDS,
) -> TrackerExporter:
    """Return the exporter to a tool, by the options of its key below `observe`."""
    tracker: Tracker
    match name:
        case "wandb":
            from trainshed.observe.exporters.wandb import WandbTracker

            assert observe.wandb is not None
            tracker = WandbTracker(run, observe.wandb)
        case "mlflow":
            from trainshed.observe.exporters.mlflow import MlflowTracker

            assert observe.mlflow is not None
            tracker = MlflowTracker(run, observe.mlflow)
        case _:
            from trainshed.observe.exporters.trackio import TrackioTracker

            assert observe.trackio is not None
            tracker = TrackioTracker(run, observe.trackio)
    mark = ExportedMark(run.folder, name, tracker.destination)
    return TrackerExporter(name, tracker, mark, warn=warn, close_seconds=close_seconds)
