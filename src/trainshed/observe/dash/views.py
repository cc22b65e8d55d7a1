"""What the page shows of the runs, as JSON: the server answers with these, and the report holds them.

Each view is a function of a reader and the parameters of the request. A parameter that makes no sense is an
`InputError`.
"""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from trainshed.errors import InputError, NoSuchName, TrainshedError
from trainshed.observe.dash.curves import AXES, Curves
from trainshed.observe.dash.event_lines import event_level, event_text
from trainshed.observe.dash.log_files import list_logs, read_log
from trainshed.observe.dash.run_files import RunSource
from trainshed.observe.dash.run_reader import RunReader
from trainshed.observe.evaluations import evaluation_table, list_evaluations
from trainshed.plan.layout import describe_layout
from trainshed.redaction import redacted
from trainshed.run_folder import CHECKPOINTS, EXPORT, RECIPE_FILE, step_number

Parameters = Mapping[str, str]
SPARKLINE_POINTS = 48
MOST_POINTS = 4_000
_WARM_UP_STEPS = 5
_MOST_MARKS = 2_000
_MOST_LINES = 500
_MOST_ANSWERED_STEPS = 60
_SOURCES_SECONDS = 3.0
_FEW_RANKS = 64
"""With at most this many ranks, the history of all of them is shown at once."""


class Dashboard:
    """All runs that are shown, and their views."""

    def __init__(self, list_sources: Callable[[], Iterable[RunSource]]) -> None:
        self._list_sources = list_sources
        self._readers: dict[str, RunReader] = {}
        self._listed_at = float("-inf")
        self._lock = threading.Lock()

    def readers(self) -> dict[str, RunReader]:
        """Return the readers of all runs by their key, newest run first; runs are looked for from time to time."""
        with self._lock:
            if time.monotonic() - self._listed_at > _SOURCES_SECONDS:
                known = self._readers
                sources = {source_key(source): source for source in self._list_sources()}
                self._readers = {key: known.get(key) or RunReader(source) for key, source in sources.items()}
                self._listed_at = time.monotonic()
            return self._readers

    def runs(self, *, portion_seconds: float = 1.0) -> dict[str, Any]:
        """The list of runs."""
        until = time.monotonic() + portion_seconds
        rows = []
        for key, reader in self.readers().items():
            # Runs that are further down are read by the next request, when these are done.
            reader.refresh(portion_seconds=max(0.0, until - time.monotonic()))
            with reader.lock:
                rows.append({"key": key, **summary(reader)})
        return {"schema": "trainshed.dash.runs/1", "runs": rows}

    def view(self, key: str, name: str, parameters: Parameters) -> dict[str, Any]:
        """One view of a run."""
        reader = self.readers().get(key)
        if reader is None:
            raise NoSuchName("there is no such run", where=key, hint="it may have been removed: look at the list")
        if name not in VIEWS:
            raise InputError(f"there is no view `{name[:40]}`", hint=f"there are {', '.join(VIEWS)}")
        reader.refresh()
        with reader.lock:
            return {"key": key, "version": reader.version, **VIEWS[name](reader, parameters)}


def source_key(source: RunSource) -> str:
    """Return the name of a run in an address of the page: it tells nothing and needs no escaping."""
    return hashlib.sha256(source.address.encode()).hexdigest()[:12]


def summary(reader: RunReader) -> dict[str, Any]:
    """How the run stands, in one row."""
    steps, last = reader.steps, reader.last_attempt
    start = (last.start if last else None) or {}
    error = None if last is None or last.ended != "failed" else last.error
    state = reader.state()
    return {
        "run": reader.source.run,
        "name": reader.source.name,
        "id": reader.source.id,
        "cluster": reader.source.cluster,
        "address": redacted(reader.source.address),
        "version": reader.version,
        "state": state,
        "phase": _phase(reader) if state == "running" else None,
        "step": steps.last_step,
        "steps": reader.planned_steps(),
        "loss": steps.last("loss"),
        "validation_loss": reader.validations.last("loss"),
        "mfu": steps.last("mfu"),
        "tokens": steps.last("tokens"),
        "tokens_per_second_per_gpu": steps.last("tokens_per_second_per_gpu"),
        "step_seconds": steps.last("step_seconds"),
        "memory_gib": steps.last("memory_gib"),
        "eta_seconds": reader.eta_seconds(),
        "attempt": last.number if last else None,
        "began": reader.began,
        "updated": reader.last_time,
        "error": error,
        "engine": start.get("engine") or ("torch" if start else None),
        "device": start.get("device"),
        "world_size": start.get("world_size"),
        "parameters": start.get("parameters"),
        "layout": start.get("layout"),
        "alarms": sum(event["kind"] in ("alarm", "stall") for event in reader.events),
        "sparkline": steps.window(["loss"], points=SPARKLINE_POINTS).values.get("loss"),
        "read": None if reader.is_complete else reader.bytes_read / max(1, reader.bytes_known),
        "problem": reader.problem,
    }


def _phase(reader: RunReader) -> str | None:
    """What a run does before its first step."""
    last = reader.last_attempt
    if last is None:
        stages = [event for event in reader.events if event["kind"] == "stage" and event["state"] == "started"]
        return stages[-1]["name"] if stages else "starting"
    if last.last_step is not None:
        return None
    return f"after {last.phases[-1]['name']}" if last.phases else "starting"


def _summary_view(reader: RunReader, parameters: Parameters) -> dict[str, Any]:
    """The head of a run's page, and which figures it has."""
    tables = {name: curves.keys for name, curves in _tables(reader).items() if len(curves)}
    return {**summary(reader), "figures": tables, "marks": _marks(reader)}


def _tables(reader: RunReader) -> dict[str, Curves]:
    return {
        "steps": reader.steps,
        "validations": reader.validations,
        "ranks": reader.ranks,
        "devices": reader.devices,
    }


def _marks(reader: RunReader) -> list[dict[str, Any]]:
    """Where curves have something to explain: restarts, alarms, failures."""
    marks: list[dict[str, Any]] = []
    for event in reader.events:
        kind = event["kind"]
        if kind == "train_phase" and event["step"] == event["first_step"]:
            marks.append({"kind": "plain", "step": event["step"], "time": event["time"], "text": event_text(event)})
        elif kind == "resume":
            marks.append({"kind": "restart", "step": event["step"], "time": event["time"], "text": event_text(event)})
        elif kind in ("alarm", "non_finite", "spike", "stall", "failure") or (
            kind == "checkpoint" and event["phase"] == "best"
        ):
            mark = "best" if kind == "checkpoint" else event_level(event)
            marks.append({"kind": mark, "step": event["step"], "time": event["time"], "text": event_text(event)})
    began = reader.began or 0.0
    return [mark | {"time": mark["time"] - began} for mark in marks[-200:]]


def _series_view(reader: RunReader, parameters: Parameters) -> dict[str, Any]:
    """Figures over steps, tokens or time."""
    axis = parameters.get("axis", "step")
    if axis not in AXES:
        raise InputError(f"there is no axis `{axis[:40]}`", where="axis", hint=f"write one of {', '.join(AXES)}")
    start, end = _number(parameters, "from"), _number(parameters, "to")
    points = min(MOST_POINTS, max(16, int(_number(parameters, "points") or 600)))
    tables = {
        name: curves.window(curves.keys, axis=axis, start=start, end=end, points=points).to_plain()
        for name, curves in _tables(reader).items()
        if len(curves)
    }
    return {"axis": axis, "tables": tables}


def _ranks_view(reader: RunReader, parameters: Parameters) -> dict[str, Any]:
    """Every rank: where it is in the layout and on which host, how fast, warm and full it is, and how it fares."""
    last, layout = reader.last_attempt, reader.layout()
    start = (last.start if last else None) or {}
    window = reader.rank_windows[-1] if reader.rank_windows else {}
    devices = reader.last_devices or {}
    world_size = layout.world_size if layout is not None else start.get("world_size") or 0
    columns = {
        "compute_seconds": window.get("compute_seconds"),
        "wait_seconds": window.get("wait_seconds"),
        "memory_gib": window.get("memory_gib") or devices.get("memory_gib"),
        **{
            key: devices.get(key)
            for key in ("temperature_celsius", "power_watts", "utilization", "clock_mhz", "throttled")
        },
    }
    axes: dict[str, list[int]] = {}
    if layout is not None:
        places = [layout.coordinates(rank) for rank in range(world_size)]
        sizes = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp, "ep": layout.ep}
        axes = {axis: [getattr(place, axis) for place in places] for axis, size in sizes.items() if size > 1}
    return {
        "run": reader.source.run,
        "world_size": world_size,
        "attempt": last.number if last else None,
        "layout": None if layout is None else describe_layout(layout),
        "axes": axes,
        "stages": None
        if layout is None
        else [_stage_text(layout.chunks(pp), layout.stages) for pp in range(layout.pp)],
        "hosts": start.get("hosts") or [],
        "step": window.get("step"),
        "window_steps": window.get("steps"),
        "time": window.get("time") or devices.get("time"),
        "columns": {key: values for key, values in columns.items() if values and len(values) == world_size},
        "health": _health(reader, world_size),
        "history": _rank_history(reader, world_size, parameters),
    }


def _stage_text(chunks: Sequence[int], stages: Sequence[int]) -> str:
    layers = [stages[chunk] for chunk in chunks]
    return f"{sum(layers)} layers" + (f" in {len(layers)} chunks" if len(layers) > 1 else "")


def _health(reader: RunReader, world_size: int) -> dict[str, dict[str, Any]]:
    """What is wrong with which rank, of the newest attempt, the worst last."""
    last = reader.last_attempt
    health: dict[str, dict[str, Any]] = {}
    for kind, state in (("alarm", "alarm"), ("stall", "stalled"), ("failure", "failed")):
        for event in reader.events:
            if event["kind"] == kind and last is not None and event["attempt"] == last.number:
                for rank in event.get("ranks") or ():
                    if 0 <= rank < world_size:
                        health[str(rank)] = {"state": state, "text": event_text(event), "time": event["time"]}
    return health


def _rank_history(reader: RunReader, world_size: int, parameters: Parameters) -> dict[str, Any]:
    """The compute time of ranks over the last windows: of the one that is asked for, of all where they are few."""
    asked = _number(parameters, "rank")
    ranks = [int(asked)] if asked is not None else list(range(world_size)) if world_size <= _FEW_RANKS else []
    windows = [window for window in reader.rank_windows if len(window["compute_seconds"]) == world_size]
    return {
        "steps": [window["step"] + 1 for window in windows],
        "compute_seconds": {
            str(rank): [window["compute_seconds"][rank] for window in windows]
            for rank in ranks
            if 0 <= rank < world_size
        },
    }


def _timeline_view(reader: RunReader, parameters: Parameters) -> dict[str, Any]:
    """Stages, attempts with their phases, checkpoints, validations and trouble, on one axis of time."""
    now = time.time() if reader.state() == "running" else reader.last_time
    return {
        "run": reader.source.run,
        "began": reader.began,
        "ended": now,
        "stages": _stages(reader, now),
        "attempts": [
            {
                "number": attempt.number,
                "first": min([attempt.first, *(phase["time"] - phase["seconds"] for phase in attempt.phases)]),
                "last": now if attempt is reader.last_attempt and attempt.ended is None else attempt.last,
                "first_step": attempt.first_step,
                "last_step": attempt.last_step,
                "resumed_step": attempt.resumed_step,
                "ended": attempt.ended,
                "error": attempt.error,
                "phases": [
                    {"name": phase["name"], "from": phase["time"] - phase["seconds"], "to": phase["time"]}
                    for phase in attempt.phases
                ],
            }
            for attempt in sorted(reader.attempts.values(), key=lambda attempt: attempt.number)
        ],
        "marks": _timeline_marks(reader),
    }


def _stages(reader: RunReader, now: float | None) -> list[dict[str, Any]]:
    """The stages of the workflow, each with where it began and ended; one without an end still runs, or was killed."""
    stages: list[dict[str, Any]] = []
    for event in reader.events:
        if event["kind"] != "stage":
            continue
        name, state = event["name"], event["state"]
        if state == "started":
            stages.append({"name": name, "from": event["time"], "to": None, "state": "started", "what": None})
            continue
        begun = next((stage for stage in reversed(stages) if stage["name"] == name and stage["to"] is None), None)
        if begun is None:
            begun = {"name": name, "from": event["time"] - (event.get("seconds") or 0.0)}
            stages.append(begun)
        begun |= {"to": event["time"], "state": state, "what": event.get("what")}
    return [stage | {"to": stage["to"] or now} for stage in stages]


def _timeline_marks(reader: RunReader) -> list[dict[str, Any]]:
    marks = []
    for event in reader.events:
        kind = event["kind"]
        if kind == "checkpoint" and event["phase"] in ("committed", "failed"):
            row = "checkpoints"
        elif kind == "validation":
            row = "validations"
        elif kind in ("alarm", "stall", "failure", "non_finite", "spike", "signal", "early_stop"):
            row = "events"
        elif kind == "profile":
            row = "profiles"
        else:
            continue
        seconds = event.get("seconds") or 0.0
        marks.append(
            {
                "row": row,
                "from": event["time"] - seconds,
                "to": event["time"],
                "level": event_level(event),
                "text": event_text(event),
            }
        )
    return marks[-_MOST_MARKS:]


def _checkpoints_view(reader: RunReader, parameters: Parameters) -> dict[str, Any]:
    """The checkpoints by their events and by what is stored, and the verdicts beside exported weights."""
    rows: dict[int, dict[str, Any]] = {}
    losses: dict[int, float | None] = {}
    for event in reader.events:
        if event["kind"] == "validation":
            losses[event["step"]] = event.get("loss")
        if event["kind"] != "checkpoint":
            continue
        row = rows.setdefault(event["step"], {"step": event["step"], "state": None, "stored": False})
        if event["phase"] == "best":
            row["validation_loss"] = event.get("loss")
            continue
        row["state"], row["time"] = event["phase"], event["time"]
        row |= {key: event[key] for key in ("seconds", "stall_seconds", "bytes", "what") if event.get(key) is not None}
        row["attempt"] = event["attempt"]
    stored_apart = not _add_stored(reader, rows)
    for step, row in rows.items():
        row.setdefault("validation_loss", losses.get(step))
    return {
        "run": reader.source.run,
        "checkpoints": [rows[step] for step in sorted(rows, reverse=True)],
        "stored_apart": stored_apart and bool(rows),
        "latest": _pointer(reader, "latest"),
        "best": _pointer(reader, "best"),
        "verdicts": _verdicts(reader),
    }


def _add_stored(reader: RunReader, rows: dict[int, dict[str, Any]]) -> bool:
    """Say of each checkpoint whether it is there, and how large; returns whether any is in this folder."""
    sizes: dict[int, int] = {}
    complete: set[int] = set()
    for info in reader.files.list(CHECKPOINTS):
        folder, _, name = info.path[len(CHECKPOINTS) + 1 :].partition("/")
        if (step := step_number(folder)) is not None:
            sizes[step] = sizes.get(step, 0) + info.size
            if name == "manifest.json":
                complete.add(step)
    for step, size in sizes.items():
        row = rows.setdefault(step, {"step": step, "state": None})
        row |= {"stored": step in complete, "bytes": row.get("bytes") or size}
        row["state"] = "committed" if step in complete else row["state"] or "unfinished"
    return bool(sizes)


def _pointer(reader: RunReader, name: str) -> int | None:
    content = reader.files.read_if_there(f"{CHECKPOINTS}/{name}")
    try:
        return None if content is None else orjson.loads(content)["step"]
    except (ValueError, KeyError, TypeError):
        return None


def _verdicts(reader: RunReader) -> list[dict[str, Any]]:
    verdicts = []
    for info in reader.files.list(EXPORT):
        if info.path.rpartition("/")[2] != "verdict.json":
            continue
        try:
            verdicts.append({"path": info.path, **orjson.loads(reader.files.read(info.path))})
        except (ValueError, TypeError, TrainshedError):
            verdicts.append({"path": info.path, "passed": None})
    return verdicts


def _events_view(reader: RunReader, parameters: Parameters) -> dict[str, Any]:
    """The newest events, those of a kind, of a rank, or with a text in them."""
    search = parameters.get("search", "").lower()
    kinds = set(filter(None, parameters.get("kinds", "").split(",")))
    rank = _number(parameters, "rank")
    counts: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    matches = 0
    for event in reversed(reader.events):
        counts[event["kind"]] = counts.get(event["kind"], 0) + 1
        if (kinds and event["kind"] not in kinds) or (rank is not None and not _is_of_rank(event, int(rank))):
            continue
        text = redacted(event_text(event))
        if search and search not in text.lower() and search not in event["kind"]:
            continue
        matches += 1
        if len(rows) < _MOST_LINES:
            rows.append(_event_row(event, text))
    return {"run": reader.source.run, "kinds": dict(sorted(counts.items())), "matches": matches, "events": rows}


def _event_row(event: dict[str, Any], text: str) -> dict[str, Any]:
    keys = ("time", "attempt", "rank", "step", "kind")
    return {key: event[key] for key in keys} | {"level": event_level(event), "text": text}


def _is_of_rank(event: dict[str, Any], rank: int) -> bool:
    return event["rank"] == rank or rank in (event.get("ranks") or ())


def _logs_view(reader: RunReader, parameters: Parameters) -> dict[str, Any]:
    """Which logs there are, and the last lines of one of them."""
    logs = list_logs(reader.files)
    file = parameters.get("file") or _first_log(logs)
    log = None if file is None else read_log(reader.files, file, search=parameters.get("search", ""))
    return {"run": reader.source.run, "logs": logs, "log": log}


def _first_log(logs: Sequence[dict[str, Any]]) -> str | None:
    """The first rank of the newest attempt, or of the last stage that has a log."""
    of_attempts = sorted(log["file"] for log in logs if log["file"].startswith("attempt-"))
    if not of_attempts:
        return logs[-1]["file"] if logs else None
    newest = of_attempts[-1].partition("/")[0]
    return next(file for file in of_attempts if file.startswith(newest))


def _plan_view(reader: RunReader, parameters: Parameters) -> dict[str, Any]:
    """What the planner predicted for the newest attempt beside what was measured."""
    plan = reader.plan() or {}
    layout = reader.layout()
    predicted = plan.get("predicted") or {}
    measured = measured_figures(reader)
    return {
        "run": reader.source.run,
        "attempt": max(reader.attempts, default=None),
        "layout": None if layout is None else describe_layout(layout),
        "reasons": [redacted(reason) for reason in plan.get("reasons") or ()],
        "predicted": predicted or None,
        "measured": measured,
        "world_size": None if layout is None else layout.world_size,
    }


def measured_figures(reader: RunReader) -> dict[str, Any] | None:
    """Medians over the steps of the newest attempt after its warm-up; None before it has any."""
    attempts = reader.steps.column("attempt")
    rows = np.flatnonzero(attempts == max(reader.attempts, default=0))
    if not len(rows):
        return None
    rows = rows[min(_WARM_UP_STEPS, len(rows) // 2) :]
    figures: dict[str, Any] = {"steps": len(rows)}
    for key in ("step_seconds", "mfu", "tokens_per_second_per_gpu"):
        values = [value for value in reader.steps.column(key)[rows].tolist() if value == value]
        figures[key] = statistics.median(values) if values else None
    seconds = reader.steps.column("step_seconds")[rows]
    if np.isfinite(seconds).any():
        figures["step_seconds_range"] = np.nanpercentile(seconds, [5, 95]).tolist()
    memory = reader.steps.column("memory_gib")[rows]
    figures["memory_gib"] = float(np.nanmax(memory)) if np.isfinite(memory).any() else None
    return figures


def _answers_view(reader: RunReader, parameters: Parameters) -> dict[str, Any]:
    """What the model said to the prompts of its recipe: the first steps and the last ones."""
    answered: dict[int, Sequence[Mapping[str, Any]]] = {
        step: event["answers"] for step, event in sorted(reader.answers.items())
    }
    is_decoded = all(answer.get("answer") is not None for answers in answered.values() for answer in answers)
    if answered and not is_decoded and reader.source.answers is not None:
        answered = {row["step"]: row["answers"] for row in reader.source.answers()} or answered
    steps = sorted(answered)
    if len(steps) > _MOST_ANSWERED_STEPS:
        steps = steps[: _MOST_ANSWERED_STEPS // 2] + steps[-_MOST_ANSWERED_STEPS // 2 :]
    prompts = list(dict.fromkeys(answer["prompt"] for step in steps for answer in answered[step]))
    by_prompt = [{answer["prompt"]: answer for answer in answered[step]} for step in steps]
    return {
        "run": reader.source.run,
        "steps": steps,
        "prompts": [
            {"prompt": prompt, "answers": [_answer(answers.get(prompt)) for answers in by_prompt]} for prompt in prompts
        ],
    }


def _answer(answer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if answer is None:
        return None
    text = answer.get("answer")
    return {"text": text if text is not None else f"tokens {answer.get('tokens')}", "ended": answer.get("ended")}


def _evaluations_view(reader: RunReader, parameters: Parameters) -> dict[str, Any]:
    """The scores of checkpoints (`eval`) over the steps, and the answers to questions."""
    records = list_evaluations(reader.source.store)
    asked = [record for record in records if record.kind == "questions"]
    steps = sorted({record.step for record in records if record.step is not None})
    return {
        "run": reader.source.run,
        "steps": steps,
        "scores": [
            {"name": name, "metric": metric, "values": [points.get(step) for step in steps]}
            for name, metrics in evaluation_table(records).items()
            for metric, points in metrics.items()
        ],
        "questions": [dict(question) for question in asked[-1].details.get("questions", ())] if asked else [],
        "asked_after": asked[-1].step if asked else None,
    }


def _recipe_view(reader: RunReader, parameters: Parameters) -> dict[str, Any]:
    """The recipe as it was resolved, and what ran it."""
    content = reader.files.read_if_there(RECIPE_FILE)
    start = next((attempt.start for attempt in reversed(reader.attempts.values()) if attempt.start), None) or {}
    return {
        "run": reader.source.run,
        "recipe": None if content is None else redacted(content.decode(errors="replace")),
        "versions": start.get("versions") or {},
        "plugins": start.get("plugins") or {},
    }


def _number(parameters: Parameters, name: str) -> float | None:
    text = parameters.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e18:
        raise InputError(f"`{text[:40]}` is not a number", where=name)
    return value


VIEWS: dict[str, Callable[[RunReader, Parameters], dict[str, Any]]] = {
    "summary": _summary_view,
    "series": _series_view,
    "ranks": _ranks_view,
    "timeline": _timeline_view,
    "checkpoints": _checkpoints_view,
    "events": _events_view,
    "logs": _logs_view,
    "plan": _plan_view,
    "answers": _answers_view,
    "evaluations": _evaluations_view,
    "recipe": _recipe_view,
}
"""Every view of a run by its name in an address."""


def to_json(data: Mapping[str, Any]) -> bytes:
    """Return a view as JSON; what is not a number is null."""
    return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
