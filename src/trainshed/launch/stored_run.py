"""A run by its folder alone, on a disk or in a bucket: how it stands, and the runs that a bucket holds.

No scheduler is asked. On a disk of this machine the lock of a run says whether somebody works on it; elsewhere only the
time of its last event does.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trainshed.errors import CorruptData, NotFound
from trainshed.launch.local import holder_attempt, run_holder
from trainshed.observe.event_text import format_duration
from trainshed.observe.run_facts import read_run_recipe
from trainshed.observe.run_status import RunStatus, read_run_status
from trainshed.recipe import Recipe
from trainshed.recipe.phase_spans import written_steps
from trainshed.run_folder import (
    ATTEMPTS,
    CHECKPOINTS,
    EVENTS,
    HEALTH,
    PREPARED_FILE,
    RECIPE_FILE,
    attempt_folder,
    read_prepared,
)
from trainshed.storage import Store, list_folders, parse
from trainshed.storage.attempts import newest_attempt_record
from trainshed.storage.locks import LockHolder

SILENT_SECONDS = 300.0
"""A run on another machine that has written no event for this long is not called running."""
NEWEST_SEGMENTS = 64
"""Segments of events in a bucket that are read to say how a run stands: half an hour of them."""

StoredRunState = Literal["running", "done", "stopped", "failed", "unknown"]


@dataclass(frozen=True)
class StoredRunStatus:
    """The status of a run, from its own folder; `reason` does not repeat what `progress` says."""

    state: StoredRunState
    reason: str
    progress: RunStatus
    holder: LockHolder | None = None


def local_path(store: Store) -> Path | None:
    """Return the folder of a store on a disk; None of any other store."""
    address = parse(store.url)
    return Path(str(address)) if address.scheme == "file" else None


def exists(store: Store) -> bool:
    """Whether the folder of a store is a run's: it was prepared or started, or it has events or checkpoints."""
    if store.head(RECIPE_FILE) is not None:
        return True
    return any(next(iter(store.list(part)), None) is not None for part in (ATTEMPTS, EVENTS, CHECKPOINTS))


def stored_run_status(store: Store, steps: int | None = None) -> StoredRunStatus:
    """Return the status of the run in the folder of a store; `steps` is how many it is to have."""
    newest = newest_attempt_record(store, "")
    segments = None if local_path(store) is not None else NEWEST_SEGMENTS
    return judge_run(store, read_run_status(store, "", steps, newest_segments=segments), newest)


def judge_run(store: Store, progress: RunStatus, newest: dict[str, Any] | None) -> StoredRunStatus:
    """Return the status of a run by its `progress` and by the record of its `newest` attempt."""
    folder = local_path(store)
    holder = run_holder(folder) if folder is not None else None
    if folder is not None and holder is not None:
        attempt = holder_attempt(folder, holder)
        reason = "before its first attempt" if attempt is None else f"attempt {attempt}"
        return StoredRunStatus("running", f"{reason}, {holder.words()}", progress, holder)
    if newest is None:
        return _before_training(store, progress, is_here=folder is not None)
    number, host = newest["attempt"], newest["host"]
    # Whoever took an attempt writes its first event a little later.
    ended = progress.ended if (progress.attempt or 0) >= number else None
    if progress.stage is not None and ended == "finished":
        return _after_training(progress, is_here=folder is not None)
    stopped = replace(progress, eta_seconds=None)
    if ended == "finished":
        return StoredRunStatus("done", "", stopped)
    if ended == "signal":
        return StoredRunStatus("stopped", f"attempt {number} was asked to stop", stopped)
    if ended is not None:
        return StoredRunStatus("failed", f"attempt {number} failed", stopped)
    if folder is None or host != socket.gethostname() or store.head(_hosts_file(number)) is not None:
        where = host or "a machine that its damaged record does not name"
        return _elsewhere(progress, f"attempt {number} was begun on {where}")
    return StoredRunStatus("failed", f"attempt {number} was killed: it ended without a word", stopped)


def _hosts_file(attempt: int) -> str:
    """The file that agents write, in which case nobody here trains the attempt."""
    return f"{attempt_folder(HEALTH, attempt)}/hosts.json"


def _before_training(store: Store, progress: RunStatus, *, is_here: bool) -> StoredRunStatus:
    if progress.stage is not None and progress.last_error is not None:
        return StoredRunStatus("failed", "", progress)
    if progress.stage is not None and not is_here:
        return _elsewhere(progress, "it has not begun to train")
    if progress.step is not None:
        # A foreign engine without anything of ours beside it: only its log tells.
        if progress.step == progress.steps:
            return StoredRunStatus("done", "", progress)
        what = "its log does not say whether it still runs"
        return StoredRunStatus("unknown", what, replace(progress, eta_seconds=None))
    prepared = store.head(PREPARED_FILE) is not None
    reason = "prepared, and not trained yet" if prepared else "its preparation has not finished"
    return StoredRunStatus("stopped", reason, replace(progress, eta_seconds=None))


def _after_training(progress: RunStatus, *, is_here: bool) -> StoredRunStatus:
    """The state of a run that is trained, and whose next stage has not ended well."""
    if progress.last_error is not None:
        return StoredRunStatus("failed", "", progress)
    if is_here:
        return StoredRunStatus("stopped", "it ended without a word; the same command does the rest", progress)
    return _elsewhere(progress, "it is trained")


def _elsewhere(progress: RunStatus, what: str) -> StoredRunStatus:
    """The state of a run of another machine, which only its events tell."""
    if progress.last_event_time is None:
        reason = f"{what}, and whether it still runs cannot be seen from here"
        return StoredRunStatus("unknown", reason, replace(progress, eta_seconds=None))
    silent = max(0.0, time.time() - progress.last_event_time)
    ago = f"its last event was {format_duration(silent)} ago"
    if silent < SILENT_SECONDS:
        return StoredRunStatus("running", f"{what}; {ago}", progress)
    reason = f"{what}, and whether it still runs cannot be seen from here: {ago}"
    return StoredRunStatus("unknown", reason, replace(progress, eta_seconds=None))


def planned_steps(store: Store, recipe: Recipe | None = None) -> int | None:
    """Return how many steps a run is to have, by its own files; None where they do not say."""
    recipe = recipe or read_run_recipe(store, "")
    steps = written_steps(recipe) if recipe is not None else None
    return steps if steps is not None else prepared_length(store)


def prepared_length(store: Store) -> int | None:
    """Return the steps that preparing a run has counted; None where it is not prepared."""
    try:
        return read_prepared(store.read(PREPARED_FILE), store.url).get("steps")
    except (NotFound, CorruptData):
        return None


@dataclass(frozen=True)
class BucketRun:
    """A run that a bucket holds; `folder` is its folder in the store."""

    name: str
    id: str
    folder: str
    changed_seconds: float
    """When its newest attempt was begun, or its recipe written, in seconds since 1970."""


def bucket_runs(store: Store) -> list[BucketRun]:
    """Return the runs below `runs` in a bucket, the newest first: two requests a run, whatever is in it."""
    folders = [(name, id) for name in list_folders(store, "runs") for id in list_folders(store, f"runs/{name}")]

    def run_at(place: tuple[str, str]) -> BucketRun | None:
        name, id = place
        folder = f"runs/{name}/{id}"
        infos = list(store.list(f"{folder}/{ATTEMPTS}")) or [store.head(f"{folder}/{RECIPE_FILE}")]
        times = [info.modified_seconds or 0.0 for info in infos if info is not None]
        return BucketRun(name, id, folder, max(times)) if times else None

    with ThreadPoolExecutor(8) as pool:
        runs = [run for run in pool.map(run_at, folders) if run is not None]
    return sorted(runs, key=lambda run: run.changed_seconds, reverse=True)


def is_running(store: Store, every_seconds: float = 30.0) -> Callable[[], bool]:
    """Return what says whether a run elsewhere goes on; its folder is looked at once in `every_seconds`."""
    state: StoredRunState = "unknown"
    looked_at = -float("inf")

    def look() -> bool:
        nonlocal state, looked_at
        if time.monotonic() - looked_at >= every_seconds:
            state, looked_at = stored_run_status(store).state, time.monotonic()
        return state == "running"

    return look
