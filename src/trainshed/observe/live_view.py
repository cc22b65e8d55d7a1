"""What a live view of a run shows, gathered from its events; nothing here knows a terminal or a page.

`LiveView.add` takes events as they come, `LiveView.snapshot` returns the figures at one moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal, TypeVar

from trainshed.observe.event_text import RECENT_STEPS, EventFormatter, format_duration
from trainshed.observe.run_status import RunStatus, StatusTracker
from trainshed.observe.stages import StageRecord

LOSS_BINS = 240
"""How many points a snapshot has of the losses, however many steps there are."""
KEPT_LINES = 100
_STEP_KEYS = (
    "kind",
    "attempt",
    "step",
    "time",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "step_seconds",
    "tokens_per_second_per_gpu",
    "mfu",
    "memory_gib",
)

Item = TypeVar("Item")
Level = Literal["note", "good", "warning", "error"]


@dataclass(frozen=True)
class EventLine:
    """An event as a line for people; `time` is in seconds since 1970."""

    time: float
    text: str
    level: Level


@dataclass(frozen=True)
class LossBin:
    """Some steps in a row: the mean of their losses, null if one was not finite; `alarm` if one of them is unusual."""

    step: int
    loss: float | None
    alarm: bool = False


@dataclass(frozen=True)
class RankSpread:
    """How long ranks compute in a step: the slowest, the fastest and the median."""

    step: int
    ranks: int
    slowest_rank: int
    slowest_seconds: float
    fastest_rank: int
    fastest_seconds: float
    median_seconds: float
    slowest_host: str | None = None

    @property
    def excess(self) -> float:
        """How much longer the slowest computes than the median, as a fraction."""
        return self.slowest_seconds / self.median_seconds - 1 if self.median_seconds else 0.0


@dataclass(frozen=True)
class DeviceSummary:
    """The devices of all ranks in a few figures; None for what cannot be read."""

    hottest_celsius: float | None = None
    hottest_rank: int | None = None
    power_watts: float | None = None
    """Of all devices together."""
    utilization: float | None = None
    """The mean."""
    memory_gib: float | None = None
    """The fullest."""
    throttled: Mapping[int, str] | None = None
    """Rank → why its clock is held down."""


@dataclass(frozen=True)
class CheckpointSummary:
    """The last checkpoint that counts, and the best one."""

    step: int | None = None
    time: float | None = None
    seconds: float | None = None
    stall_seconds: float | None = None
    bytes: int | None = None
    best_step: int | None = None
    best_loss: float | None = None
    failed: str | None = None
    """Why a later one could not be written."""


@dataclass(frozen=True)
class LiveSnapshot:
    """A run at one moment."""

    status: RunStatus
    start: Mapping[str, Any] | None
    """The last `start` event: layout, device, world_size, parameters."""
    last_step: Mapping[str, Any] | None
    step_seconds: float | None
    """The mean of the last steps."""
    losses: Sequence[LossBin]
    validations: Sequence[tuple[int, float | None]]
    """Steps and losses, the newest last."""
    ranks: RankSpread | None
    devices: DeviceSummary | None
    checkpoint: CheckpointSummary
    stages: Sequence[StageRecord]
    stall: str | None
    """The stall that was reported last; None again with the next step."""
    lines: Sequence[EventLine]
    """The last events, the newest last."""

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        plain = asdict(self)
        plain["validations"] = [{"step": step, "loss": loss} for step, loss in self.validations]
        if self.devices is not None and self.devices.throttled is not None:
            plain["devices"]["throttled"] = {str(rank): why for rank, why in self.devices.throttled.items()}
        return plain


class LiveView:
    """Gathers the events of a run of `steps` steps, as far as they are known."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps = steps
        self._tracker = StatusTracker()
        self._formatter = EventFormatter(steps or 0)
        self._lines: deque[EventLine] = deque(maxlen=KEPT_LINES)
        self._alarm_steps: set[int] = set()
        self._validations: list[tuple[int, float | None]] = []
        self._checkpoint: dict[str, Any] = {}
        self._start: dict[str, Any] | None = None
        self._ranks: dict[str, Any] | None = None
        self._devices: dict[str, Any] | None = None
        self._stall: str | None = None
        self._status: RunStatus | None = None

    def take_status(self, status: Mapping[str, Any]) -> None:
        """Take a status that was not made from events, of a run whose events are not seen here."""
        self._status = RunStatus(**status)

    def add(self, events: Iterable[dict[str, Any]]) -> list[EventLine]:
        """Take the next events, in the order they were written; returns those that are lines for people."""
        new: list[EventLine] = []
        for event in events:
            line = self._add(event)
            if line is not None:
                new.append(line)
        # Stages are written beside the attempts, and may be read before them.
        for line in sorted(new, key=lambda line: line.time):
            self._lines.append(line)
        return new

    def _add(self, event: dict[str, Any]) -> EventLine | None:
        kind = event["kind"]
        if kind == "step":
            event = {key: event.get(key) for key in _STEP_KEYS}
            self._stall = None
        self._tracker.add(event)
        if kind == "start":
            self._start = event
            self._ranks = self._devices = self._stall = None
        elif kind in ("stall", "failure"):
            self._stall = event["what"] if kind == "stall" else None
        elif kind == "ranks":
            self._ranks = event
        elif kind == "devices":
            self._devices = event
        elif kind == "validation":
            while self._validations and self._validations[-1][0] >= event["step"]:
                self._validations.pop()
            self._validations.append((event["step"], event["loss"]))
        elif kind == "checkpoint":
            self._add_checkpoint(event)
        if kind in ("alarm", "non_finite", "spike") and event.get("step") is not None:
            self._alarm_steps.add(event["step"])
        return describe(event, self._formatter)

    def _add_checkpoint(self, event: dict[str, Any]) -> None:
        phase, summary = event["phase"], self._checkpoint
        if phase == "staged":
            summary["staged_stall"] = event.get("stall_seconds")
        elif phase == "committed":
            stall = event.get("stall_seconds")
            summary |= {
                "step": event["step"],
                "time": event.get("time"),
                "seconds": event.get("seconds"),
                "bytes": event.get("bytes"),
                "stall_seconds": stall if stall is not None else summary.get("staged_stall"),
                "failed": None,
            }
        elif phase == "best":
            summary |= {"best_step": event["step"], "best_loss": event.get("loss")}
        elif phase == "failed":
            summary["failed"] = event.get("what") or "it could not be written"

    def status(self) -> RunStatus:
        """Return how far the run is after the events so far."""
        return self._status or self._tracker.status(self.steps)

    def snapshot(self) -> LiveSnapshot:
        """Return the figures after the events so far."""
        done = self._tracker.done
        recent = [step["step_seconds"] for step in done[-RECENT_STEPS:]]
        checkpoint = {key: value for key, value in self._checkpoint.items() if key != "staged_stall"}
        return LiveSnapshot(
            status=self.status(),
            start=self._start,
            last_step=done[-1] if done else None,
            step_seconds=sum(recent) / len(recent) if recent else None,
            losses=loss_bins(done, self._alarm_steps),
            validations=tuple(self._validations[-LOSS_BINS:]),
            ranks=rank_spread(self._ranks, self._start),
            devices=device_summary(self._devices),
            checkpoint=CheckpointSummary(**checkpoint),
            stages=tuple(self._tracker.stages.records),
            stall=self._stall,
            lines=tuple(self._lines),
        )


def loss_bins(steps: Sequence[Mapping[str, Any]], alarms: Iterable[int] = ()) -> tuple[LossBin, ...]:
    """Gather the losses of steps into at most `LOSS_BINS` points."""
    unusual = frozenset(alarms)
    return tuple(
        LossBin(part[0]["step"], _mean([step["loss"] for step in part]), any(step["step"] in unusual for step in part))
        for part in _parts(steps, LOSS_BINS)
    )


def fewer_bins(bins: Sequence[LossBin], count: int) -> list[LossBin]:
    """Put neighbours together until there are at most `count`."""
    return [
        LossBin(part[0].step, _mean([point.loss for point in part]), any(point.alarm for point in part))
        for part in _parts(bins, count)
    ]


def _parts(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Cut items into at most `count` parts of about the same length."""
    count = min(count, len(items))
    edges = [len(items) * number // count for number in range(count + 1)] if count else []
    return [items[first:last] for first, last in pairwise(edges)]


def _mean(losses: list[float | None]) -> float | None:
    """The mean; None where one of them is not finite."""
    finite = [loss for loss in losses if loss is not None]
    return sum(finite) / len(finite) if len(finite) == len(losses) else None


def rank_spread(event: Mapping[str, Any] | None, start: Mapping[str, Any] | None) -> RankSpread | None:
    """Return how far ranks are apart by a `ranks` event; None where there are not two that are known."""
    if event is None:
        return None
    known = [(seconds, rank) for rank, seconds in enumerate(event["compute_seconds"]) if seconds is not None]
    if len(known) < 2:
        return None
    slowest, fastest = max(known), min(known)
    return RankSpread(
        step=event["step"],
        ranks=len(event["compute_seconds"]),
        slowest_rank=slowest[1],
        slowest_seconds=slowest[0],
        fastest_rank=fastest[1],
        fastest_seconds=fastest[0],
        median_seconds=median(seconds for seconds, _ in known),
        slowest_host=host_of_rank(slowest[1], len(event["compute_seconds"]), start),
    )


def host_of_rank(rank: int, ranks: int, start: Mapping[str, Any] | None) -> str | None:
    """Return the host of a rank, where the start says which hosts there are."""
    hosts = (start or {}).get("hosts")
    return hosts[rank * len(hosts) // ranks] if hosts and rank < ranks else None


def device_summary(event: Mapping[str, Any] | None) -> DeviceSummary | None:
    """Return a `devices` event in a few figures."""
    if event is None:
        return None
    hot = [(value, rank) for rank, value in enumerate(event["temperature_celsius"]) if value is not None]
    power = [value for value in event["power_watts"] if value is not None]
    busy = [value for value in event["utilization"] if value is not None]
    memory = [value for value in event["memory_gib"] if value is not None]
    throttled = {rank: why for rank, why in enumerate(event.get("throttled") or ()) if why}
    return DeviceSummary(
        hottest_celsius=max(hot)[0] if hot else None,
        hottest_rank=max(hot)[1] if hot else None,
        power_watts=sum(power) if power else None,
        utilization=sum(busy) / len(busy) if busy else None,
        memory_gib=max(memory, default=None),
        throttled=throttled or None,
    )


_ENDS: dict[str, tuple[str, Level]] = {
    "finished": ("finished", "good"),
    "signal": ("stopped, as it was asked to", "warning"),
    "failed": ("failed", "error"),
}
_ERRORS = ("non_finite", "stall", "failure")


def describe(event: Mapping[str, Any], formatter: EventFormatter) -> EventLine | None:
    """Return an event as a line for people; None for those that are shown as figures."""
    at, kind = event.get("time") or 0.0, event["kind"]
    if kind in ("step", "ranks", "devices"):
        return None
    if kind == "stage":
        record = StageRecord(event["name"], event["state"], at, None, event.get("seconds"), event.get("what"))
        level: Level = "error" if event["state"] == "failed" else "note"
        return EventLine(at, record.text(), level)
    if kind == "alarm":
        return EventLine(at, f"ALARM {event['name'].replace('_', ' ')}: {event['what']}", "error")
    if kind == "failure":
        return EventLine(at, f"attempt {event['attempt']} failed: {event['what']}", "error")
    if kind == "end":
        if event.get("rank") not in (0, None):
            return None
        text, level = _ENDS[event["reason"]]
        return EventLine(at, f"attempt {event['attempt']} {text}", level)
    if kind == "phase":
        return EventLine(at, f"{event['name'].replace('_', ' ')} took {format_duration(event['seconds'])}", "note")
    if kind == "preflight":
        return EventLine(at, f"preflight: {event['what']}", "note" if event["verdict"] == "pass" else "warning")
    if kind == "profile":
        return EventLine(at, f"profile of {event['steps']} steps: {event['path']}", "note")
    if kind == "answers":
        return EventLine(at, f"{len(event['answers'])} prompts answered after step {event['step']:,}", "note")
    text = formatter.format(dict(event))
    if text is None:
        return None
    is_bad = kind in _ERRORS or (kind == "checkpoint" and event["phase"] == "failed")
    level = "error" if is_bad else "warning" if kind in ("warning", "signal", "early_stop") else "note"
    if kind == "checkpoint" and event["phase"] in ("committed", "best"):
        level = "good"
    return EventLine(at, text, level)
