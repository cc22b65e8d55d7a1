"""One run as its page needs it: the events are read once, those that are added later as they come.

Reading is cut into small portions, so that a page shows a run of a million steps while it is still being read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from trainshed.errors import TrainshedError
from trainshed.observe.dash.curves import Curves
from trainshed.observe.dash.run_files import RunFiles, RunSource
from trainshed.observe.event_log import parse_events, segment_number
from trainshed.observe.event_text import RECENT_STEPS
from trainshed.plan.layout import RankLayout
from trainshed.run_folder import EVENTS, attempt_number, plan_file

LOCAL_SECONDS = 0.5
"""How long what was read from a disk counts as new."""
BUCKET_SECONDS = 5.0
"""The same for a bucket, where each look is a request."""
_STATE_SECONDS = 3.0
_PORTION_SECONDS = 0.7
_MOST_EVENTS = 20_000
"""Events besides steps that are kept, the newest."""
_RANK_WINDOWS = 240
"""`ranks` events that are kept, for the history of one rank."""
_NOT_FIGURES = frozenset({"v", "time", "attempt", "rank", "step", "tokens", "skipped", "samples"})
_SECONDS_UNTIL_SILENT = 180.0


@dataclass
class AttemptView:
    """One attempt by its events; times are in seconds since 1970."""

    number: int
    first: float
    last: float
    start: dict[str, Any] | None = None
    phases: list[dict[str, Any]] = field(default_factory=list)
    first_step: float | None = None
    last_step: float | None = None
    resumed_step: int | None = None
    ended: str | None = None
    error: str | None = None


class RunReader:
    """Follows one run. Views take the lock while they read it."""

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self.files = RunFiles(source.store)
        self.lock = threading.RLock()
        self.version = 0
        """Rises with everything that is read."""
        self.problem: str | None = None
        """Why not everything could be read."""
        self.bytes_read = self.bytes_known = 0
        self.steps = Curves()
        self.validations = Curves()
        self.ranks = Curves()
        """Extremes and medians over all ranks."""
        self.devices = Curves()
        self.attempts: dict[int, AttemptView] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self.rank_windows: deque[dict[str, Any]] = deque(maxlen=_RANK_WINDOWS)
        self.last_devices: dict[str, Any] | None = None
        self.answers: dict[int, dict[str, Any]] = {}
        self.began: float | None = None
        """When the first event was written."""
        self._read: dict[str, int] = {}
        self._unread: deque[tuple[str, int]] = deque()
        self._looked_at = float("-inf")
        self._running: tuple[float, bool | None] = (float("-inf"), None)
        self._planned_steps: tuple[int, int | None] | None = None
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._plans: dict[int, dict[str, Any] | None] = {}

    def refresh(self, *, portion_seconds: float = _PORTION_SECONDS) -> None:
        """Read what was written since the last call, for some time at most; `is_complete` says whether it is all."""
        with self.lock:
            fresh_seconds = LOCAL_SECONDS if self.files.is_local else BUCKET_SECONDS
            if not self._unread and time.monotonic() - self._looked_at < fresh_seconds:
                return
            until = time.monotonic() + portion_seconds
            try:
                if not self._unread:
                    self._looked_at = time.monotonic()
                    self._unread.extend(self._new_segments())
                while self._unread:
                    self._read_segment(*self._unread.popleft())
                    if time.monotonic() >= until:
                        return
                self.problem = None
            except TrainshedError as error:
                self.problem = str(error)

    def read_all(self) -> None:
        """Read everything that is there."""
        self._looked_at = float("-inf")
        self.refresh(portion_seconds=float("inf"))

    @property
    def is_complete(self) -> bool:
        """Whether everything that was there at the last look is read."""
        return not self._unread

    @property
    def last_attempt(self) -> AttemptView | None:
        """The newest attempt."""
        return self.attempts[max(self.attempts)] if self.attempts else None

    @property
    def last_time(self) -> float | None:
        """When the newest event was written."""
        times = [attempt.last for attempt in self.attempts.values()]
        times += [self.events[-1]["time"]] if self.events else []
        return max(times, default=None)

    def is_running(self) -> bool | None:
        """Whether something works on the run, asked from time to time; None where it cannot be seen."""
        asked_at, running = self._running
        if time.monotonic() - asked_at > _STATE_SECONDS:
            try:
                running = self.source.is_running()
            except (TrainshedError, OSError):
                running = None
            self._running = (time.monotonic(), running)
        return running

    def state(self) -> str:
        """`running`, `done`, `stopped`, `failed`, `silent` (nobody can say) or `new`."""
        running, last = self.is_running(), self.last_attempt
        if running:
            return "running"
        if last is None:
            return "new" if running is None else "stopped"
        if last.ended is not None:
            return {"finished": "done", "signal": "stopped"}.get(last.ended, "failed")
        if running is None:
            return "running" if time.time() - last.last < _SECONDS_UNTIL_SILENT else "silent"
        return "failed"

    def planned_steps(self) -> int | None:
        """How many steps the run is to have; asked again with each attempt, since a run may be made longer."""
        attempt = max(self.attempts, default=0)
        if self._planned_steps is None or self._planned_steps[0] != attempt:
            try:
                self._planned_steps = (attempt, self.source.steps())
            except (TrainshedError, OSError):
                self._planned_steps = (attempt, None)
        return self._planned_steps[1]

    def eta_seconds(self) -> float | None:
        """The time left by the last steps; None where nothing runs or the end is not known."""
        steps, done = self.planned_steps(), self.steps.last_step
        if steps is None or done is None or not self._recent or self.state() != "running":
            return None
        return max(0.0, steps - done) * sum(self._recent) / len(self._recent)

    def plan(self) -> dict[str, Any] | None:
        """The plan of the newest attempt; None where it has none."""
        number = max(self.attempts, default=None)
        if number is None:
            return None
        if self._plans.get(number) is None:
            content = self.files.read_if_there(plan_file(number))
            try:
                self._plans[number] = None if content is None else orjson.loads(content)
            except ValueError:  # it is being written, on a mount without renames
                return None
        return self._plans[number]

    def layout(self) -> RankLayout | None:
        """The layout of the newest attempt; None where it is not known."""
        plan = self.plan()
        if plan is None or not isinstance(plan.get("layout"), dict):
            return None
        try:
            return RankLayout(**plan["layout"] | {"stages": tuple(plan["layout"]["stages"])})
        except (TypeError, KeyError):  # of a version that knew other keys
            return None

    def _new_segments(self) -> Iterator[tuple[str, int]]:
        """Segments with bytes that were not read, in the order of attempts and numbers, with where to go on."""
        segments = []
        known = 0
        for info in self.files.list(EVENTS):
            folder, _, name = info.path[len(EVENTS) + 1 :].partition("/")
            attempt, number = attempt_number(folder), segment_number(name)
            if attempt is None or number is None:
                continue
            known += info.size
            if info.size > self._read.get(info.path, 0):
                segments.append((attempt, number, info.path))
        self.bytes_known = known
        for _, _, path in sorted(segments):
            yield path, self._read.get(path, 0)

    def _read_segment(self, path: str, start: int) -> None:
        content = self.files.read(path, start)
        complete = content.rfind(b"\n") + 1
        self._read[path] = start + complete
        self.bytes_read += complete
        for event in parse_events(content[:complete], path):
            self._take(event)
        self.version += complete > 0

    def _take(self, event: dict[str, Any]) -> None:
        kind, when = event["kind"], event["time"]
        self.began = when if self.began is None else min(self.began, when)
        number = event["attempt"]
        if number == 0:  # stages before and after the attempts
            self.events.append(event)
            return
        attempt = self.attempts.get(number)
        if attempt is None:
            attempt = self.attempts[number] = AttemptView(number, when, when)
        attempt.last = max(attempt.last, when)
        attempt.first = min(attempt.first, when)
        if kind == "step":
            self._take_step(event, attempt)
            return
        if kind == "ranks":
            self._take_ranks(event)
            return
        if kind == "devices":
            self._take_devices(event)
            return
        self.events.append(event)
        if kind == "start":
            attempt.start = event
        elif kind == "phase":
            attempt.phases.append(event)
        elif kind == "resume":
            attempt.resumed_step = event["step"]
            for curves in (self.steps, self.validations, self.ranks, self.devices):
                curves.drop_from(event["step"] + 0.5)
        elif kind == "validation":
            figures = _figures(event) | {"time": when - self.began}
            self.validations.append(event["step"], figures | {"tokens": self.steps.last("tokens") or 0.0})
        elif kind == "answers":
            self.answers[event["step"]] = event
        elif kind == "failure":
            attempt.error, attempt.ended = event["what"], "failed"
        elif kind == "end" and event.get("rank") in (0, None):
            attempt.ended = event["reason"]

    def _take_step(self, event: dict[str, Any], attempt: AttemptView) -> None:
        when = event["time"]
        attempt.first_step = attempt.first_step or when
        attempt.last_step = when
        if attempt.number < max(self.attempts):  # an attempt that should have ended
            return
        figures = _figures(event)
        figures["time"] = when - (self.began or when)
        figures["attempt"] = attempt.number
        if (tokens := event.get("tokens")) is not None:
            figures["tokens"] = tokens
        self.steps.append(event["step"] + 1, figures)
        if (seconds := event.get("step_seconds")) is not None:
            self._recent.append(seconds)

    def _take_ranks(self, event: dict[str, Any]) -> None:
        self.rank_windows.append(event)
        figures: dict[str, float] = {}
        for key in ("compute_seconds", "wait_seconds", "memory_gib"):
            if known := _known(event.get(key)):
                figures[f"{key}_max"], figures[f"{key}_median"] = max(known), sorted(known)[len(known) // 2]
        self._append_at(self.ranks, event["step"] + 1, event["time"], figures)

    def _take_devices(self, event: dict[str, Any]) -> None:
        self.last_devices = event
        figures: dict[str, float] = {}
        if known := _known(event.get("temperature_celsius")):
            figures["temperature_max"], figures["temperature_mean"] = max(known), sum(known) / len(known)
        if known := _known(event.get("power_watts")):
            figures["power_total"] = sum(known)
        if known := _known(event.get("utilization")):
            figures["utilization_mean"] = sum(known) / len(known)
        if known := _known(event.get("memory_gib")):
            figures["device_memory_max"] = max(known)
        step = self.steps.last_step or 0.0
        last = self.devices.last_step
        # Several are read within a step: they lie between it and the next.
        self._append_at(self.devices, step if last is None or last < step else last + 1e-3, event["time"], figures)

    def _append_at(self, curves: Curves, step: float, when: float, figures: dict[str, float]) -> None:
        if figures:
            places = {"time": when - (self.began or when), "tokens": self.steps.last("tokens") or 0.0}
            curves.append(step, figures | places)


def _figures(event: dict[str, Any]) -> dict[str, float]:
    """All numbers of an event; those of an inner mapping are `losses.articles`."""
    figures: dict[str, float] = {}
    for key, value in event.items():
        if type(value) in (float, int) and key not in _NOT_FIGURES:
            figures[key] = value
        elif type(value) is dict:
            figures |= {f"{key}.{name}": part for name, part in value.items() if type(part) in (float, int)}
    return figures


def _known(values: list[float | None] | None) -> list[float]:
    return [value for value in values or () if value is not None]
