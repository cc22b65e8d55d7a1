"""Reading the events of a run: all of them, its steps, or what is new since the last look."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import CorruptData, TrainshedError
from trainshed.observe.segments import VERSION, events_folder, segment_number
from trainshed.storage import Store, join

_ATTEMPT = re.compile(r"attempt-(\d{4,})")
_RING = re.compile(r"rank-(\d{5,})\.jsonl")
_READ_TOGETHER = 32
"""Segments of a bucket that are read at a time: a month of them is some 90,000."""


def read_events(store: Store, folder: str, *, attempt: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, of all attempts or of one, in the order they were written.

    `folder` is the run's folder inside the store. A last line that a killed writer left unfinished is passed over.
    """
    base = events_folder(folder)
    listed = store.list(base if attempt is None else events_folder(folder, attempt))
    found = sorted(place for info in listed if (place := _place(info.path[len(base) :].strip("/"))) is not None)
    names = [f"{base}/{name}" for _, _, name in found]
    with ThreadPoolExecutor(8) as pool:
        for first in range(0, len(names), _READ_TOGETHER):
            together = names[first : first + _READ_TOGETHER]
            for name, content in zip(together, pool.map(store.read, together), strict=True):
                yield from parse_lines(content, join(store.url, name))


def read_rings(store: Store, folder: str, *, attempt: int) -> dict[int, list[dict[str, Any]]]:
    """The last events of the ranks that dumped them, by rank."""
    rings: dict[int, list[dict[str, Any]]] = {}
    for info in store.list(events_folder(folder, attempt)):
        if found := _RING.fullmatch(info.path.rsplit("/", 1)[-1]):
            rings[int(found[1])] = parse_lines(store.read(info.path), join(store.url, info.path))
    return rings


def steps(store: Store, folder: str) -> list[dict[str, Any]]:
    """The step events of a run by step; where a step was done again, the later attempt's."""
    by_step = {event["step"]: event for event in read_events(store, folder) if event["kind"] == "step"}
    return [by_step[step] for step in sorted(by_step)]


def done_steps(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The step events that count now, of events in the order they were written.

    A run that goes on from a checkpoint undoes the steps that a killed attempt had done after it.
    """
    done: list[dict[str, Any]] = []
    for event in events:
        if event["kind"] in ("step", "resume"):
            while done and done[-1]["step"] >= event["step"]:
                done.pop()
        if event["kind"] == "step":
            done.append(event)
    return done


class EventFollower:
    """Follows the events of a run in a local folder while they are written.

    `path` is the run's folder, which need not be there yet.
    """

    def __init__(self, path: str | Path) -> None:
        self._events = Path(path) / events_folder("")
        self._read: dict[str, int] = {}

    def poll(self) -> list[dict[str, Any]]:
        """The events written since the last call, across segments and attempts."""
        events: list[dict[str, Any]] = []
        for _, _, name in sorted(self._segments()):
            path = self._events / name
            start = self._read.get(name, 0)
            try:
                if path.stat().st_size <= start:
                    continue
                with path.open("rb") as file:
                    file.seek(start)
                    content = file.read()
            except FileNotFoundError:  # somebody removes the run at this moment
                continue
            events += parse_lines(content, str(path))
            self._read[name] = start + content.rfind(b"\n") + 1
        return events

    def _segments(self) -> Iterator[tuple[int, int, str]]:
        try:
            attempts = [entry.name for entry in os.scandir(self._events) if entry.is_dir()]
            names = [f"{attempt}/{name}" for attempt in attempts for name in os.listdir(self._events / attempt)]
        except FileNotFoundError:
            return
        for name in names:
            if (place := _place(name)) is not None:
                yield place


def parse_lines(content: bytes, where: str) -> list[dict[str, Any]]:
    """The events of one file; what stands behind its last line break is still being written, or never will be."""
    events = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            event = orjson.loads(line)
            version = event["v"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise CorruptData("this line holds no event", where=f"{where}:{number}") from None
        if version > VERSION:
            raise TrainshedError(
                f"events of version {version} were written by a newer Trainshed",
                where=where,
                hint="read them with the version that trained this run, or a later one",
            )
        events.append(event)
    return events


def _place(name: str) -> tuple[int, int, str] | None:
    """A segment's attempt, number and name below the events' folder; None for any other file."""
    attempt, _, file = name.partition("/")
    found, number = _ATTEMPT.fullmatch(attempt), segment_number(file)
    return (int(found[1]), number, name) if found and number is not None else None
