"""The events of a run of any engine: those that are stored, and those that its engine's log tells.

Where a foreign engine runs in its own image, nothing of ours is beside it to write events. Its log is in the run's
folder, one file per node, and is read when somebody asks. The first node's has the arguments and the checkpoints, the
last one's the losses of Megatron.
"""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainshed.errors import InputError, NotFound, TrainshedError
from trainshed.models.parameters import parameter_count
from trainshed.observe.engine_logs.program_reader import LogEvent
from trainshed.observe.engine_logs.reader import READABLE, LogReader
from trainshed.observe.engine_logs.torchtune import TorchtuneReader
from trainshed.observe.event_log import EVENT_VERSION, read_events
from trainshed.observe.metrics import TrainingFacts
from trainshed.observe.mfu import measure_mfu
from trainshed.observe.run_facts import EngineRun, engine_facts, read_run_recipe, recipe_facts, with_log_facts
from trainshed.run_folder import DLLOGGER, LOGS, attempt_number
from trainshed.storage import ObjectInfo, Store, StoreOptions, join, open_store, parse

_NODE_LOG = re.compile(r"(attempt-\d{4,})/node-(\d{5,})\.log")
_WHOLE_BYTES = 64 << 20
"""A longer log is read at its beginning and its end only."""
_HEAD_BYTES, _TAIL_BYTES = 1 << 20, 32 << 20


class StepCompleter:
    """Adds to the steps of a log what it does not say: tokens, tokens/s/GPU and MFU, by what is known of the run."""

    def __init__(self, facts: TrainingFacts) -> None:
        self.facts = facts
        self._per_rate: tuple[float | None, float | None] | None = None

    def complete(self, event: LogEvent) -> LogEvent:
        """Return an event with what can be computed; other kinds as they are."""
        if event["kind"] != "step":
            return event
        facts, event = self.facts, dict(event)
        samples = event.pop("samples", None)
        if event["tokens"] is None and samples is not None and facts.sequence_length is not None:
            event["tokens"] = samples * facts.sequence_length
        tokens, seconds = facts.tokens_per_step, event["step_seconds"]
        if event["tokens_per_second_per_gpu"] is None and tokens and seconds and facts.gpus:
            event["tokens_per_second_per_gpu"] = tokens / seconds / facts.gpus
        rate = event["tokens_per_second_per_gpu"]
        if event["mfu"] is None and rate is not None:
            mfu, mfu_full = self._mfu_per_rate(rate)
            if mfu is not None and mfu * rate <= 1:
                event["mfu"], event["mfu_full_attention"] = mfu * rate, (mfu_full or 0.0) * rate
        return event

    def _mfu_per_rate(self, rate: float) -> tuple[float | None, float | None]:
        """MFU of one token a second: it grows with the rate, and counting FLOPs takes a while."""
        facts = self.facts
        if self._per_rate is None:
            self._per_rate = (None, None)
            known = facts.config is not None and facts.sequence_length is not None and facts.precision is not None
            if known and facts.gpu is not None and not facts.documents_apart:
                assert facts.config is not None
                assert facts.sequence_length is not None
                assert facts.precision is not None
                unit = measure_mfu(
                    1.0,
                    facts.config,
                    facts.sequence_length,
                    precision=facts.precision,
                    gpu=facts.gpu,
                    lora=facts.lora,
                    groups=facts.groups,
                    reference=facts.reference,
                    engine=facts.engine,
                )
                self._per_rate = (unit.mfu, unit.mfu_full_attention)
        return self._per_rate


def read_run_events(store: Store, folder: str) -> list[dict[str, Any]]:
    """Return the events of a run, of all its attempts and whichever engine it has."""
    stored = list(read_events(store, folder))
    if any(event["kind"] == "start" and event.get("engine") is None for event in stored):
        return stored
    placed = EngineRun.read(store, folder)
    logs = _node_logs(store, folder)
    if not logs and placed is None:
        return stored
    with_steps = {event["attempt"] for event in stored if event["kind"] == "step"}
    recipe = read_run_recipe(store, folder)
    facts = TrainingFacts() if recipe is None else recipe_facts(recipe)
    if placed is not None:
        facts = engine_facts(facts, placed)
    events = stored
    for attempt in sorted(logs):
        if attempt not in with_steps:
            read = _attempt_events(store, folder, logs[attempt], attempt, facts)
            has_start = any(event["kind"] == "start" and event["attempt"] == attempt for event in stored)
            if read and placed is not None and not has_start:
                run = "/".join(Path(store.url, folder).parts[-2:])
                read.insert(0, start_event(run, placed) | _stamp(attempt, read[0]["time"]))
            events = events + read
    return sorted(events, key=lambda event: event["attempt"])  # stable: within an attempt as they were written


def start_event(run: str, placed: EngineRun) -> dict[str, Any]:
    """Return the `start` event of a foreign engine."""
    return {
        "kind": "start",
        "step": None,
        "run": run,
        "layout": placed.layout,
        "world_size": placed.world_size,
        "versions": {},
        "device": placed.gpu or "unknown",
        "parameters": parameter_count(config) if (config := placed.architecture) is not None else 0,
        "engine": placed.engine,
    }


def _node_logs(store: Store, folder: str) -> dict[int, list[ObjectInfo]]:
    """Return the logs of nodes, in order, by attempt."""
    logs: dict[int, list[ObjectInfo]] = {}
    base = "/".join(part for part in (folder.strip("/"), LOGS) if part)
    for info in sorted(store.list(base), key=lambda info: info.path):
        match = _NODE_LOG.search(info.path)
        if match and (attempt := attempt_number(match[1])) is not None:
            logs.setdefault(attempt, []).append(info)
    return logs


def _attempt_events(
    store: Store, folder: str, logs: Sequence[ObjectInfo], attempt: int, facts: TrainingFacts
) -> list[dict[str, Any]]:
    reader = LogReader()
    read: list[LogEvent] = []
    for info in dict.fromkeys((logs[0].path, logs[-1].path)):
        size = next(log.size for log in logs if log.path == info)
        read += reader.feed(_read_text(store, info, size)) + reader.finish()
    if not any(event["kind"] == "step" for event in read):
        read += _file_events(store, folder, DLLOGGER, "dllogger.json")
    if isinstance(reader.reader, TorchtuneReader):
        # Its bar has the loss and the time, its own file the rest.
        own = {event["step"]: event for event in _file_events(store, folder, "torchtune", ".txt")}
        read = [_filled(event, own.get(event["step"])) if event["kind"] == "step" else event for event in read]
    completer = StepCompleter(with_log_facts(facts, reader.facts))
    ordered = [completer.complete(event) for event in sorted(read, key=_position)]
    timed = with_times(ordered, _modified(store, logs[-1].path))
    return [event | _stamp(attempt, event["time"]) for event in timed]


def _modified(store: Store, path: str) -> float:
    """Return when a log was last written; of one in a bucket that is taken to be now."""
    address = parse(join(store.url, path))
    return Path(str(address)).stat().st_mtime if address.scheme == "file" else time.time()


def _file_events(store: Store, folder: str, part: str, ending: str) -> list[LogEvent]:
    """Return the events of the newest file with figures that the engine itself writes into a part of the run's folder.

    NeMo writes DLLogger's lines into `dllogger/`, torchtune's metric logger a file per attempt into `torchtune/`.
    """
    base = "/".join(part for part in (folder.strip("/"), part) if part)
    for info in sorted(store.list(base), key=lambda info: info.path, reverse=True):
        if info.path.endswith(ending):
            reader = LogReader()
            if events := reader.feed(_read_text(store, info.path, info.size)) + reader.finish():
                return events
    return []


def _filled(event: LogEvent, other: LogEvent | None) -> LogEvent:
    """Return a step with the figures of another account of it, where it has none itself."""
    if other is None:
        return event
    return event | {key: value for key, value in other.items() if event.get(key) is None}


def _read_text(store: Store, path: str, size: int) -> str:
    try:
        if size <= _WHOLE_BYTES:
            return store.read(path).decode(errors="replace")
        head, tail = store.read(path, 0, _HEAD_BYTES), store.read(path, size - _TAIL_BYTES)
    except NotFound:  # the run is being removed
        return ""
    return head.decode(errors="replace") + "\n" + tail.decode(errors="replace")


def _position(event: LogEvent) -> tuple[float, int]:
    """Where an event of an attempt belongs: a step is done before what is said after it."""
    if event["kind"] == "resume" or event["step"] is None:
        return (-1, 0)
    return (event["step"] + 1, 0) if event["kind"] == "step" else (event["step"], 1)


def with_times(events: Sequence[LogEvent], ended: float) -> list[LogEvent]:
    """Return the events, all with a time: an unknown one is that of the next event, less the step between them.

    `ended` is when the log was last written. An event whose time is such an estimate says so: `time_estimated`.
    """
    later, after, timed = ended, 0.0, []
    for event in reversed(events):
        known = event.get("time")
        later = known if known is not None else later - after
        after = (event.get("step_seconds") or 0.0) * (event.get("steps") or 1) if event["kind"] == "step" else 0.0
        timed.append(event | {"time": later} | ({} if known is not None else {"time_estimated": True}))
    return timed[::-1]


def _stamp(attempt: int, moment: float) -> dict[str, Any]:
    return {"v": EVENT_VERSION, "time": moment, "attempt": attempt, "rank": None}


class ReadLog:
    """A log that was read as a whole: its events, and what else it says."""

    def __init__(self, address: str, options: StoreOptions | None = None) -> None:
        store, path = open_store(address, options)
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        reader = LogReader()
        read = [event for chunk in store.stream(path) for event in reader.feed(decode(chunk))] + reader.finish()
        modified = _modified(store, path)
        if not any(event["kind"] == "step" for event in read) or reader.reader is None:
            raise InputError("this log has no steps of a training", where=address, hint=f"read are {READABLE}")
        self.facts = reader.facts
        self.program, self.first_step = reader.reader.name, reader.reader.first_step
        self._read, self._modified = read, modified

    def events(self, facts: TrainingFacts) -> list[dict[str, Any]]:
        """Return its events, completed by what is known of the training."""
        completer = StepCompleter(facts)
        completed = [completer.complete(event) for event in self._read]
        return [event | _stamp(1, event["time"]) for event in with_times(completed, self._modified)]

    def training_facts(self, facts: TrainingFacts) -> TrainingFacts:
        """Return the facts, with what the log says where nothing else does."""
        return replace(with_log_facts(facts, self.facts), engine=self.program, first_step=self.first_step)


class EngineLogFollower:
    """Follows the logs of a foreign engine while it runs, and emits their events.

    `files` are the logs of the first node and of the one whose rank prints the losses; they need not exist yet.
    """

    def __init__(self, files: Iterable[Path], facts: TrainingFacts, emit: Callable[..., None]) -> None:
        self._offsets = {file: file.stat().st_size if file.is_file() else 0 for file in files}
        self._readers = {file: LogReader() for file in self._offsets}
        self._facts, self._emit = facts, emit
        self._checked_at = 0.0

    def poll(self, *, at_once: bool = False, every_seconds: float = 1.0) -> None:
        """Emit what was added; the files are read once in `every_seconds` at most, unless `at_once`."""
        if not at_once and time.monotonic() - self._checked_at < every_seconds:
            return
        self._checked_at = time.monotonic()
        for file, reader in self._readers.items():
            try:
                with file.open("rb") as opened:
                    opened.seek(self._offsets[file])
                    data = opened.read()
            except OSError:  # not there yet, or the disk is away for a moment
                continue
            self._offsets[file] += len(data)
            for event in reader.feed(data.decode(errors="replace")):
                self._emit_event(event)

    def _emit_event(self, event: LogEvent) -> None:
        facts = self._facts
        for reader in self._readers.values():
            facts = with_log_facts(facts, reader.facts)
        values = StepCompleter(facts).complete(event)
        kind, step = values.pop("kind"), values.pop("step")
        values.pop("time", None)  # it is now, as far as it matters
        try:
            self._emit(kind, step, **values)
        except (ValueError, TrainshedError):
            return  # the log of another program must not end the run that wrote it
