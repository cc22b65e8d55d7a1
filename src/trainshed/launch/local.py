"""Runs on this machine: train one, hold it against a second start, list those of a store and say how each stands.

<store>/runs/<name>/<id>/                 a run, once its recipe.yaml is there
<store>/runs/<name>/<id>/running.json     who holds the run; locked for as long as its process lives

The kernel drops the lock with its holder, however that ends. What the file says counts only while it is locked.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

from trainshed.errors import InputError
from trainshed.launch.attempt import (
    RunFolderWatcher,
    emit_stall,
    explain_failure,
    logs_folder,
    machine_environment,
    rank_command,
    write_plan,
)
from trainshed.launch.ranks import FAILURE_GRACE_SECONDS, RanksResult, run_ranks
from trainshed.observe.event_log import EventFollower
from trainshed.observe.event_text import CTRL_C, format_stop_request
from trainshed.observe.events import EventWriter
from trainshed.observe.health import health_folder
from trainshed.observe.run_status import RunStatus, read_run_status
from trainshed.plan import RankLayout
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
    worker_arguments: Sequence[str] = (),
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
    environment: dict[str, str] | None = None,
    grace_seconds: float = 600.0,
    failure_grace_seconds: float = FAILURE_GRACE_SECONDS,
) -> LocalTrainingResult:
    """Train a prepared run with all its ranks on this machine; raises what ended it, unless somebody asked it to stop.

    `reasons` say why the planner chose the layout, and `calibration` by what it was calibrated, for the plan that is
    kept. `worker_arguments` tell each rank which cluster it is on. `grace_seconds` is how long ranks may take for their
    last checkpoint after a request to stop, `failure_grace_seconds` how long to write down where they stood when one
    fails.
    """
    store = LocalStore(run_folder)
    attempt = take_attempt(store, "").number
    write_plan(store, attempt, layout, reasons, calibration)
    follower = EventFollower(run_folder)
    # What earlier attempts wrote is no news.
    follower.poll()
    watched = RunFolderWatcher(run_folder)
    done = saved = None

    def follow() -> None:
        nonlocal done, saved
        watched.check()
        for event in follower.poll():
            if event["attempt"] != attempt:  # a start on another machine writes beside it
                continue
            kind = event["kind"]
            if kind == "step":
                done = event["step"] + 1
            elif kind == "resume":
                done = saved = event["step"]
            elif kind == "checkpoint" and event["phase"] == "committed":
                saved = event["step"]
            on_event(event)

    def say_stopping(signum: int, again: bool) -> None:
        follow()
        asked = CTRL_C if signum == signal.SIGINT else signal.Signals(signum).name
        on_event({"kind": "note", "text": format_stop_request(asked, attempt, done, saved, again=again)})

    result = run_ranks(
        rank_command(run_folder, attempt, worker_arguments),
        ranks=layout.world_size,
        logs=logs_folder(run_folder, attempt),
        environment=(environment or {}) | machine_environment(precision),
        grace_seconds=grace_seconds,
        failure_grace_seconds=failure_grace_seconds,
        on_poll=follow,
        on_asked=say_stopping,
        on_stopped=partial(emit_stall, store, attempt),
    )
    watched.check(at_once=True)
    follow()
    if result.given_up:
        # No rank was left the time to say it.
        with EventWriter(store, "", attempt=attempt, rank=None) as events:
            events.emit("end", reason="signal", exit_code=result.exit_code)
    if result.exit_code and not _was_asked_to_stop(result):
        failed = [failure.rank for failure in result.failed]
        raise explain_failure(run_folder, attempt, layout.world_size, ends=result.ends, failed=failed)
    return LocalTrainingResult(attempt, result.exit_code)


def _was_asked_to_stop(result: RanksResult) -> bool:
    return result.exit_code > 128 and not result.failed


LOCK_FILE = "running.json"
_LOCK_TRIES = 20
_LOCK_TRY_SECONDS = 0.05


@contextmanager
def lock_run(run_folder: Path, run: str) -> Iterator[None]:
    """Hold a run; where somebody else does, raises `InputError` that says who, and leaves that one alone."""
    made = [folder for folder in (run_folder, *run_folder.parents) if not folder.exists()]
    with ExitStack() as stack:
        for _ in range(_LOCK_TRIES):  # somebody who only looks has the lock for a moment, too
            run_folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((run_folder / LOCK_FILE).open("a+b"))
            if _try_lock(file, fcntl.LOCK_EX) is not False and _is_same_file(file, run_folder / LOCK_FILE):
                break
            time.sleep(_LOCK_TRY_SECONDS)
        else:
            held = run_holder(run_folder)
            raise InputError(
                f"{run} is being worked on already: {holder_text(run_folder, held) if held else 'somebody holds it'}",
                where=str(run_folder / LOCK_FILE),
                hint=_take_over_hint(run, held),
            )
        file.truncate(0)
        file.write(LockHolder.here().to_bytes())
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
            _remove_empty(run_folder, made)


def run_holder(run_folder: Path) -> LockHolder | None:
    """Return who works on a run now, None where nobody does."""
    is_free: bool | None = False
    for _ in range(_LOCK_TRIES):
        try:
            with (run_folder / LOCK_FILE).open("rb") as file:
                is_free = _try_lock(file, fcntl.LOCK_SH)
                if is_free:
                    return None
                held = LockHolder.from_bytes(file.read())
        except (FileNotFoundError, NotADirectoryError):
            return None
        if held is not None:
            return held if is_free is False or held.is_here else None
        if is_free is None:
            return None
        time.sleep(_LOCK_TRY_SECONDS)  # it has just taken the lock, and writes who it is
    return None


def ask_holder_to_stop(held: LockHolder) -> None:
    """Have a holder write a checkpoint and end, as Ctrl-C in its terminal does."""
    with suppress(ProcessLookupError):
        os.kill(held.pid, signal.SIGTERM)


def holder_attempt(run_folder: Path, held: LockHolder) -> int | None:
    """Return the attempt that a holder trains, None while it still prepares."""
    newest = newest_attempt_record(LocalStore(run_folder), "")
    if newest is None or (newest.get("pid"), newest.get("host")) != (held.pid, held.host):
        return None
    return newest["attempt"]


def holder_text(run_folder: Path, held: LockHolder) -> str:
    """Say which attempt a holder trains, who it is, and how far it has come."""
    attempt = holder_attempt(run_folder, held)
    if attempt is None:
        return f"{held.words()}, before its first step"
    progress = read_run_status(LocalStore(run_folder), "").words()
    return f"attempt {attempt}, {held.words()}" + (f", {progress}" if progress else "")


def _take_over_hint(run: str, held: LockHolder | None) -> str:
    there = "" if held is None or held.is_here else f" on {held.host}"
    return (
        f"`trainshed status {run}` shows how it goes; to take over, `trainshed cancel {run}`{there} stops it after a "
        "checkpoint, then write this again"
    )


def _try_lock(file: BinaryIO, how: int) -> bool | None:
    """Whether the lock was free and is ours now; None on a mount that knows no locks, where only fencing protects."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    """Whether a file that was opened is still the one of its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_empty(run_folder: Path, made: Sequence[Path]) -> None:
    """Leave nothing of a start that was refused before it had written anything."""
    with suppress(OSError):
        if os.listdir(run_folder) == [LOCK_FILE]:
            (run_folder / LOCK_FILE).unlink()
            for folder in made:
                folder.rmdir()


RECIPE_FILE = "recipe.yaml"
LocalRunState = Literal["running", "done", "stopped", "failed", "unknown"]


@dataclass(frozen=True)
class LocalRun:
    """A run by its folder."""

    name: str
    id: str
    folder: Path

    @classmethod
    def at(cls, folder: Path) -> LocalRun:
        """The run of a folder, which says its name and id."""
        there = folder.absolute()
        return cls(there.parent.name, there.name, folder)

    @property
    def run(self) -> str:
        """Name and id, as people write them."""
        return f"{self.name}/{self.id}"

    @property
    def changed(self) -> float:
        """When it was last begun or trained on, in seconds since 1970."""
        parts = (self.folder / part for part in ("", RECIPE_FILE, "attempts", "checkpoints", "events"))
        return max((part.stat().st_mtime for part in parts if part.exists()), default=0.0)


@dataclass(frozen=True)
class LocalRunStatus:
    """How a run stands by its own folder: `reason` is why, in a sentence without what `progress` says."""

    state: LocalRunState
    reason: str
    progress: RunStatus
    holder: LockHolder | None = None


def local_runs(store: Path) -> list[LocalRun]:
    """Return the runs of a store, the newest first."""
    found = [LocalRun.at(recipe.parent) for recipe in (store / "runs").glob(f"*/*/{RECIPE_FILE}")]
    return sorted((run for run in found if not run.id.startswith(".")), key=lambda run: run.changed, reverse=True)


def local_run_status(run: Path, steps: int | None = None) -> LocalRunStatus:
    """Say how a run stands; `steps` is how many it is to have."""
    held = run_holder(run)
    progress = read_run_status(LocalStore(run), "", steps)
    newest = newest_attempt_record(LocalStore(run), "")
    if held is not None:
        attempt = holder_attempt(run, held)
        what = "before its first attempt" if attempt is None else f"attempt {attempt}"
        return LocalRunStatus("running", f"{what}, {held.words()}", progress, held)
    progress = replace(progress, eta_seconds=None)
    if newest is None:
        prepared = (run / "prepared.json").is_file()
        what = "prepared, and not trained yet" if prepared else "its preparation has not finished"
        return LocalRunStatus("stopped", what, progress)
    number, host = newest["attempt"], newest["host"]
    ended = progress.ended if progress.attempt == number else None
    if ended == "finished":
        return LocalRunStatus("done", "", progress)
    if ended == "signal":
        return LocalRunStatus("stopped", f"attempt {number} was asked to stop", progress)
    if ended is not None:
        return LocalRunStatus("failed", f"attempt {number} failed", progress)
    if host != socket.gethostname() or (health_folder(run, number) / "hosts.json").is_file():
        what = f"attempt {number} was begun on {host}, and whether it still runs cannot be seen from here"
        return LocalRunStatus("unknown", what, progress)
    return LocalRunStatus("failed", f"attempt {number} was killed: it ended without a word", progress)
