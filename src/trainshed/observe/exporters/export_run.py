"""A run that has ended, or was trained elsewhere, exported to any tool from its events.

For a step that was done twice the later attempt counts. A tracker that has steps of the run already is sent the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trainshed.errors import InputError, NotFound, TrainshedError
from trainshed.observe.event_log import read_events
from trainshed.observe.exporters import FILE_EXPORTERS, ExportedRun, check_installed
from trainshed.observe.exporters.tracker import open_tracker
from trainshed.recipe import Observe
from trainshed.run_folder import DLLOGGER
from trainshed.storage import Store, join

ExportTool = Literal["tensorboard", "dllogger", "wandb", "mlflow", "trackio"]
CLOSE_SECONDS = 600.0
"""How long a tool may take for a whole run: nobody trains meanwhile."""


@dataclass(frozen=True)
class ExportReport:
    """What an export has written, and where."""

    tool: ExportTool
    to: str
    steps: int
    """Steps of the run."""
    written: int
    """Points that the tool was sent: steps and validations. Fewer where it had some already."""


def export_run(
    store: Store, folder: str, tool: ExportTool, observe: Observe, run: ExportedRun, *, out: Path | None = None
) -> ExportReport:
    """Export the run in `folder` of a store; raises what keeps a tool from taking it.

    `observe` has the tool's options. `out` is where files go; left out: the run's own folder (`run.folder`).
    """
    events = list(counted_events(read_events(store, folder)))
    steps = sum(event["kind"] == "step" for event in events)
    if not steps:
        raise NotFound(
            "this run has no steps to export",
            where=join(store.url, folder),
            hint="`trainshed status RUN` says how far it has come",
        )
    if tool in FILE_EXPORTERS:
        return _write_files(events, steps, tool, run, out)
    if getattr(observe, tool) is None:
        key = "uri: ADDRESS" if tool == "mlflow" else "project: NAME"
        raise InputError(
            f"where does {tool} keep the run?",
            where=f"observe.{tool}",
            hint=f"write 'observe.{tool}={{{key}}}' after the run",
        )
    check_installed(Observe(**{tool: getattr(observe, tool)}))
    problems: list[str] = []
    target = run if out is None else replace(run, folder=out)
    exporter = open_tracker(tool, observe, target, warn=problems.append, close_seconds=CLOSE_SECONDS)
    with exporter:
        for event in events:
            exporter.put(event)
    if problems:
        raise TrainshedError(problems[0], where=f"observe.{tool}")
    return ExportReport(tool, exporter.destination, steps, exporter.sent)


def counted_events(events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the start of a run, then its steps, validations and evaluations that still count, in the order of steps.

    What an attempt did after the checkpoint from which the next one resumed is left out.
    """
    counted: list[dict[str, Any]] = []
    evaluations: dict[tuple[int, str], dict[str, Any]] = {}
    start: dict[str, Any] | None = None
    for event in events:
        kind = event["kind"]
        if kind == "evaluation":
            evaluations[event["step"], event["name"]] = event
        if kind == "start":  # as the last attempt was, at the time of the first
            start = event | {"time": start["time"] if start is not None else event["time"]}
        if kind in ("step", "validation", "resume"):
            first = _done_steps(event) if kind != "resume" else event["step"] + 1
            while counted and _done_steps(counted[-1]) >= first and not _belong_together(counted[-1], event):
                counted.pop()
        if kind in ("step", "validation"):
            counted.append(event)
    yield from ([start] if start is not None else [])
    # Evaluations belong to no attempt, and may be later than the training.
    yield from sorted([*counted, *evaluations.values()], key=_done_steps)


def _done_steps(event: Mapping[str, Any]) -> int:
    """How many steps were done when an event was written."""
    return event["step"] + 1 if event["kind"] == "step" else event["step"]


def _belong_together(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> bool:
    """Whether a validation follows the step that it was made after."""
    return later["kind"] == "validation" and earlier["kind"] == "step" and _done_steps(earlier) == later["step"]


def _write_files(
    events: list[dict[str, Any]], steps: int, tool: ExportTool, run: ExportedRun, out: Path | None
) -> ExportReport:
    root = out or run.folder
    target = root / tool
    if target.exists():
        raise InputError(
            f"there are files of {tool} already, and nothing is written over them or beside them",
            where=str(target),
            hint="write --out DIR, a folder without them",
        )
    problems: list[str] = []
    with FILE_EXPORTERS[tool](root, sequence_length=run.sequence_length, warn=problems.append) as exporter:
        for event in events:
            exporter(event)
    if problems:
        raise TrainshedError(problems[0], where=str(target))
    shown = target / "rank-0" / "dllogger.json" if tool == DLLOGGER else target
    return ExportReport(tool, str(shown), steps, len(events) - (events[0]["kind"] == "start"))
