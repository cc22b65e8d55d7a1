"""Runs on this machine: train one, lock it against a second start, list those of a store with their status.

<store>/runs/<name>/<id>/                 a run, once its recipe.yaml is there
<store>/runs/<name>/<id>/running.json     who holds the run; locked for as long as its process lives

The kernel releases the lock when its holder ends, however that happens. The file counts only while it is locked.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from trainshed.errors import InputError
from trainshed.file_locks import lock_file
from trainshed.launch.attempt import (
    RunFolderWatcher,
    emit_stall,
    explain_failure,
    logs_folder,
    machine_environment,
    rank_command,
    write_plan,
)
from trainshed.launch.device_sampling import watch_devices_here
from trainshed.launch.ranks import FAILURE_GRACE_SECONDS, RanksResult, run_ranks
from trainshed.observe.event_log import EventFollower
from trainshed.observe.event_text import CTRL_C, format_stop_request
from trainshed.observe.events import EventWriter
from trainshed.observe.process_stacks import RUN_FOLDER_VARIABLE
from trainshed.observe.run_status import read_run_status
from trainshed.plan import RankLayout
from trainshed.run_folder import ATTEMPTS, CHECKPOINTS, EVENTS, LOCK_FILE, RECIPE_FILE
from trainshed.storage import LocalStore
from trainshed.storage.attempts import newest_attempt_record, take_attempt
from trainshed.storage.locks import LockHolder


@dataclass(frozen=True)
class LocalTrainingResult:
    """How an attempt ended; 0 is finished, 128 + signal a requested stop."""

    attempt: int
    exit_code: int


def train_locally(
    run_folder: Path,
    layout: RankLayout,
    *,
    precision: str,
    reasons: Sequence[str] = (),
    calibration: Mapping[str, Any] | None = None,
    predicted: Mapping[str, Any] | None = None,
    worker_arguments: Sequence[str] = (),
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    environment: dict[str, str] | None = None,
    grace_seconds: float = 600.0,
    failure_grace_seconds: float = FAILURE_GRACE_SECONDS,
) -> LocalTrainingResult:
    """Train a prepared run with all its ranks on this machine; raises the error that ended it, if one did.

    `reasons` say why the planner chose the layout, `calibration` what it was calibrated with, and `predicted` what it
    expects of a step; they are stored with the plan. `worker_arguments` tell each rank which cluster it is on.
    `grace_seconds` is the time for a last checkpoint after a stop request, `failure_grace_seconds` the time for the
    other ranks to write down where they are when one fails.
    """
    store = LocalStore(run_folder)
    attempt = take_attempt(store, "").number
    write_plan(store, attempt, layout, reasons, calibration, predicted)
    follower = _AttemptFollower(run_folder, attempt, on_event)
    with watch_devices_here(store, attempt, layout.world_size, socket.gethostname()):
        result = run_ranks(
            rank_command(run_folder, attempt, worker_arguments),
            ranks=layout.world_size,
            logs=logs_folder(run_folder, attempt),
            environment={
                **machine_environment(precision, environment),
                **(environment or {}),
                RUN_FOLDER_VARIABLE: str(run_folder.absolute()),
            },
            grace_seconds=grace_seconds,
            failure_grace_seconds=failure_grace_seconds,
            on_poll=follower.poll,
            on_stop_request=follower.report_stop_request,
            on_stopped=partial(emit_stall, store, attempt),
        )
    follower.poll(at_once=True)
    if result.killed_on_request:
        # The ranks had no time to write it.
        with EventWriter(store, "", attempt=attempt, rank=None) as events:
            events.emit("end", reason="signal", exit_code=result.exit_code)
    if result.exit_code and not _was_asked_to_stop(result):
        failed = [failure.rank for failure in result.failed]
        raise explain_failure(run_folder, attempt, layout.world_size, rank_ends=result.ends, failed_ranks=failed)
    return LocalTrainingResult(attempt, result.exit_code)


class _AttemptFollower:
    """Passes the events of an attempt on, and knows how far it has come when somebody asks it to stop."""

    def __init__(self, run_folder: Path, attempt: int, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._events, self._folder = EventFollower(run_folder), RunFolderWatcher(run_folder)
        self._attempt, self._on_event = attempt, on_event
        self._done_steps: int | None = None
        self._saved_step: int | None = None
        self._events.poll()  # skips what earlier attempts wrote

    def poll(self, *, at_once: bool = False) -> None:
        """Pass on the events since the last call; raises if the run's folder is gone."""
        self._folder.check(at_once=at_once)
        for event in self._events.poll():
            if event["attempt"] != self._attempt:  # of a start on another machine
                continue
            kind = event["kind"]
            if kind == "step":
                self._done_steps = event["step"] + 1
            elif kind == "resume":
                self._done_steps = self._saved_step = event["step"]
            elif kind == "checkpoint" and event["phase"] == "committed":
                self._saved_step = event["step"]
            self._on_event(event)

    def report_stop_request(self, signum: int, again: bool) -> None:
        """Say what a request to stop saves, or that a second one kills."""
        self.poll()
        request_text = CTRL_C if signum == signal.SIGINT else signal.Signals(signum).name
        text = format_stop_request(request_text, self._attempt, self._done_steps, self._saved_step, repeated=again)
        self._on_event({"kind": "note", "text": text})


def _was_asked_to_stop(result: RanksResult) -> bool:
    return result.exit_code > 128 and not result.failed


_LOCK_TRIES = 20
_LOCK_TRY_SECONDS = 0.05


@contextmanager
def lock_run(run_folder: Path, run: str) -> Iterator[None]:
    """Lock a run; if another process holds it, raises an `InputError` that says which, and leaves that one alone."""
    new_folders = [folder for folder in (run_folder, *run_folder.parents) if not folder.exists()]
    with ExitStack() as stack:
        for _ in range(_LOCK_TRIES):  # `run_holder` has the lock for a moment, too
            run_folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((run_folder / LOCK_FILE).open("a+b"))
            if _try_lock(file) is not False and _is_same_file(file, run_folder / LOCK_FILE):
                break
            time.sleep(_LOCK_TRY_SECONDS)
        else:
            holder = run_holder(run_folder)
            who = holder_text(run_folder, holder) if holder else "somebody holds it"
            raise InputError(
                f"{run} is being worked on already: {who}",
                where=str(run_folder / LOCK_FILE),
                hint=_take_over_hint(run, holder),
            )
        file.truncate(0)
        file.write(LockHolder.here().to_bytes())
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
            _remove_empty(run_folder, new_folders)


def run_holder(run_folder: Path) -> LockHolder | None:
    """Return the process that works on a run now, None if there is none."""
    is_free: bool | None = False
    for _ in range(_LOCK_TRIES):
        try:
            with (run_folder / LOCK_FILE).open("rb") as file:
                is_free = _try_lock(file, shared=True)
                if is_free:
                    return None
                holder = LockHolder.from_bytes(file.read())
        except (FileNotFoundError, NotADirectoryError):
            return None
        if holder is not None:
            return holder if is_free is False or holder.is_here else None
        if is_free is None:
            return None
        time.sleep(_LOCK_TRY_SECONDS)  # it has just taken the lock, and still writes who it is
    return None


def ask_holder_to_stop(holder: LockHolder) -> None:
    """Make a holder write a checkpoint and end, as Ctrl-C in its terminal does."""
    with suppress(ProcessLookupError):
        os.kill(holder.pid, signal.SIGTERM)


def holder_attempt(run_folder: Path, holder: LockHolder) -> int | None:
    """Return the attempt that a holder trains, None if it does not train yet."""
    newest = newest_attempt_record(LocalStore(run_folder), "")
    if newest is None or (newest.get("pid"), newest.get("host")) != (holder.pid, holder.host):
        return None
    return newest["attempt"]


def holder_text(run_folder: Path, holder: LockHolder) -> str:
    """Say which attempt a holder trains, who it is, and how far it has come."""
    attempt = holder_attempt(run_folder, holder)
    if attempt is None:
        return f"{holder.words()}, before its first step"
    progress = read_run_status(LocalStore(run_folder), "").summary()
    return f"attempt {attempt}, {holder.words()}" + (f", {progress}" if progress else "")


def _take_over_hint(run: str, holder: LockHolder | None) -> str:
    place = "" if holder is None or holder.is_here else f" on {holder.host}"
    return (
        f"`trainshed status {run}` shows how it goes; to take over, `trainshed cancel {run}`{place} stops it after a "
        "checkpoint, then write this again"
    )


def _try_lock(file: BinaryIO, *, shared: bool = False) -> bool | None:
    """Whether the lock was free and is ours now; None on a mount without locks, where only fencing protects a run."""
    try:
        lock_file(file, shared=shared, wait=False)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_empty(run_folder: Path, new_folders: Sequence[Path]) -> None:
    """Remove the folders that a start has made, if it has written nothing into them."""
    with suppress(OSError):
        if os.listdir(run_folder) == [LOCK_FILE]:
            (run_folder / LOCK_FILE).unlink()
            for folder in new_folders:
                folder.rmdir()


@dataclass(frozen=True)
class LocalRun:
    """A run by its folder."""

    name: str
    id: str
    folder: Path

    @classmethod
    def from_folder(cls, folder: Path) -> LocalRun:
        """Return the run in a folder, whose path ends in its name and id."""
        absolute = folder.absolute()
        return cls(absolute.parent.name, absolute.name, folder)

    @property
    def run(self) -> str:
        """Name and id, as people write them."""
        return f"{self.name}/{self.id}"

    @property
    def changed_seconds(self) -> float:
        """When it was last started or written to, in seconds since 1970."""
        parts = (self.folder / part for part in ("", RECIPE_FILE, ATTEMPTS, CHECKPOINTS, EVENTS))
        return max((part.stat().st_mtime for part in parts if part.exists()), default=0.0)


def local_runs(store: Path) -> list[LocalRun]:
    """Return the runs of a store, the newest first."""
    runs = [LocalRun.from_folder(recipe.parent) for recipe in (store / "runs").glob(f"*/*/{RECIPE_FILE}")]
    return sorted(
        (run for run in runs if not run.id.startswith(".")), key=lambda run: run.changed_seconds, reverse=True
    )
