"""How a run stands, what it logs, and how it is ended, wherever it is: its scheduler is asked, or its folder read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import LOGS
from trainshed.workflow.known_runs import KnownRun, submitted_run

if TYPE_CHECKING:
    from trainshed.errors import NotFound
    from trainshed.launch.submissions import Submission
    from trainshed.launch.target import StageState

_POLL_SECONDS = 0.2
CLUSTER_POLL_SECONDS = 5.0
"""Between two questions to a scheduler."""


def run_place(known: KnownRun) -> str:
    """Return where a run is, for people: the cluster that it was submitted to, `local`, or the bucket's store."""
    if known.submission is not None:
        return known.submission.cluster.name
    return known.address.partition("/runs/")[0] if "://" in known.address else "local"


def run_status(known: KnownRun) -> dict[str, Any]:
    """Return the status of a run: from its scheduler, or from its folder where that cannot say."""
    from trainshed.errors import TrainshedError
    from trainshed.launch.local import run_holder
    from trainshed.launch.target import target_of

    submission, folder = known.submission, known.folder
    if submission is None or (folder is not None and run_holder(folder) is not None):
        return stored_status(known)
    try:
        states = target_of(submission.cluster).status(submission.submitted)
    except TrainshedError as error:
        problem = f"{submission.cluster.target} cannot be asked: {error.what}"
        if known.home is None:
            hint = "and its folder is not seen here: mount it, or write this command where it is"
            raise TrainshedError(problem, where=error.where, hint=hint) from None
        return stored_status(known) | {"scheduler": f"{problem}; this is what the run's folder says"}
    if overall_state(states) == "unknown" and known.home is not None:
        # Schedulers forget jobs that ended long ago.
        problem = f"{submission.cluster.target} does not know this job any more"
        return stored_status(known) | {"scheduler": f"{problem}; this is what the run's folder says"}
    return submission_status(submission, states)


def stored_status(known: KnownRun) -> dict[str, Any]:
    """Return the status of a run from its folder alone, on a disk or in a bucket."""
    from trainshed.errors import NoSuchName
    from trainshed.launch.stored_run import exists, planned_steps, stored_run_status

    store = known.store()
    if not exists(store):
        raise NoSuchName(
            "there is no run here: no recipe.yaml, no attempts, no events",
            where=known.home,
            hint="a run is STORE/runs/NAME/ID; `trainshed ls --on CLUSTER` lists those of a store",
        )
    account = stored_run_status(store, planned_steps(store))
    held = account.holder
    return {
        "schema": "trainshed.status/1",
        "run": known.run,
        "cluster": run_place(known),
        "folder": known.home,
        "state": account.state,
        "stage": "train" if account.progress.attempt is not None else "prepare",
        "why": "; ".join(filter(None, [account.progress.summary(), account.reason])),
        "stages": [],
        "progress": account.progress.to_plain(),
        "process": None if held is None else {"pid": held.pid, "host": held.host, "since": held.since},
        "scheduler": None,
    }


def submission_status(submission: Submission, states: tuple[StageState, ...]) -> dict[str, Any]:
    """Put together what the scheduler and the run itself say."""
    from dataclasses import asdict

    current = _current_stage(states)
    progress = submission_progress(submission, states)
    why = " ".join(filter(None, [current.reason if current else "", progress_text(progress)]))
    return {
        "schema": "trainshed.status/1",
        "run": submission.run,
        "cluster": submission.cluster.name,
        "folder": submission.submitted.run,
        "state": overall_state(states),
        "stage": current.stage if current else None,
        "why": why,
        "stages": [asdict(state) for state in states],
        "progress": progress,
        "scheduler": None,
    }


def submission_progress(submission: Submission, states: tuple[StageState, ...]) -> dict[str, Any] | None:
    """Return the run's progress from its events, or from its log where its folder is not seen here."""
    from trainshed.errors import TrainshedError
    from trainshed.launch.stored_run import NEWEST_SEGMENTS
    from trainshed.launch.target import target_of
    from trainshed.observe.run_status import read_run_status, run_status_from_log

    known = submitted_run(submission)
    if known.home is not None:
        segments = NEWEST_SEGMENTS if "://" in known.home else None
        try:
            return read_run_status(known.store(), "", submission.steps, newest_segments=segments).to_plain()
        except TrainshedError:
            if known.folder is not None:
                raise
            # A bucket that this machine may not read: its scheduler has the log.
    if not any(state.stage == "train" and state.state == "running" for state in states):
        return None
    try:
        return run_status_from_log(
            target_of(submission.cluster).logs(submission.submitted, "train"), submission.steps
        ).to_plain()
    except TrainshedError:
        return None  # the scheduler's own account was given above; its log may not be there yet


def follow_run(known: KnownRun, reporter: Reporter = SILENT, *, timeout_seconds: float | None = None) -> dict[str, Any]:
    """Wait until a run has ended or serves, reporting each change; return its last status.

    Raises `TimeoutError` after the timeout; the run goes on without whoever waits.
    """
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    # A scheduler may not know yet what it was just sent.
    working = ("running", "waiting") if known.submission is None else ("running", "waiting", "unknown")
    last_lines: dict[str, str] = {}
    while True:
        data = run_status(known)
        for stage in data["stages"] or [{"stage": known.run, "state": data["state"], "reason": ""}]:
            line = f"{stage['stage']}: {stage['state']}  {stage['reason']}".rstrip()
            if last_lines.get(stage["stage"]) != line:
                last_lines[stage["stage"]] = line
                reporter.note(line)
        if data["state"] not in working:
            return data
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"{known.run} is {data['state']} after {timeout_seconds:g} s")
        time.sleep(_POLL_SECONDS if known.submission is None else CLUSTER_POLL_SECONDS)


def progress_text(progress: dict[str, Any] | None) -> str:
    """Write the progress of a run in a sentence."""
    from trainshed.observe.run_status import RunStatus

    return RunStatus(**progress).summary() if progress is not None else ""


def overall_state(states: tuple[StageState, ...]) -> str:
    """Return the state of a job by those of its stages."""
    kinds = [state.state for state in states]
    for kind in ("failed", "cancelled", "running", "serving"):
        if kind in kinds:
            return kind
    if kinds and all(kind == "done" for kind in kinds):
        return "done"
    return "waiting" if "waiting" in kinds else "unknown"


def _current_stage(states: tuple[StageState, ...]) -> StageState | None:
    """The stage a person asks about: the one that failed, runs or is next."""
    for kind in ("failed", "cancelled", "running", "serving", "waiting"):
        for state in states:
            if state.state == kind:
                return state
    return states[-1] if states else None


def log_lines(
    known: KnownRun,
    stage: str = "train",
    *,
    rank: int | None = None,
    attempt: int | None = None,
    follow: bool = False,
) -> Iterator[str]:
    """Yield the lines of a log: the run's own where its folder is seen here, otherwise those of the scheduler."""
    from trainshed.errors import TrainshedError
    from trainshed.launch.attempt import find_log, follow_lines, stored_log_lines
    from trainshed.launch.stored_run import is_running
    from trainshed.launch.target import target_of

    if known.submission is None and "://" not in known.address:
        yield from _local_log_lines(known, stage, rank, attempt, follow)
        return
    if known.home is not None:
        store = known.store()
        path = find_log(store, stage, rank=rank, attempt=attempt)
        if path is not None:
            runs = (_stage_is_active(known, stage) if known.submission else is_running(store)) if follow else None
            yield from follow_lines(known.folder / path, runs) if known.folder else stored_log_lines(store, path, runs)
            return
        if known.submission is None:
            raise _no_log(known, stage)
    assert known.submission is not None
    submitted = known.submission.submitted
    try:
        yield from target_of(known.submission.cluster).logs(submitted, stage, rank=rank, attempt=attempt, follow=follow)
    except TrainshedError:
        if known.home is None:
            raise
        raise _no_log(known, stage) from None


def _stage_is_active(known: KnownRun, stage: str) -> Callable[[], bool]:
    """What says whether a stage goes on: its scheduler, or the run's folder where that cannot be asked."""
    from trainshed.errors import TrainshedError
    from trainshed.launch.stored_run import is_running
    from trainshed.launch.target import target_of

    assert known.submission is not None
    submission, by_folder = known.submission, is_running(known.store())

    def goes_on() -> bool:
        try:
            states = target_of(submission.cluster).status(submission.submitted)
        except TrainshedError:
            return by_folder()
        return {state.stage: state.state for state in states}.get(stage) in ("waiting", "running", "serving")

    return goes_on


def _no_log(known: KnownRun, stage: str) -> NotFound:
    from trainshed.errors import NotFound
    from trainshed.storage import join

    return NotFound(
        f"this run has no log of {stage} yet",
        where=join(known.home or known.address, LOGS),
        hint=f"`trainshed status {known.run}` says how it stands; -f waits for a run that goes on",
    )


def _local_log_lines(known: KnownRun, stage: str, rank: int | None, attempt: int | None, follow: bool) -> Iterator[str]:
    """The log in the run's folder; with `follow` one that a process here is about to begin is waited for."""
    from trainshed.launch.attempt import follow_lines, log_file
    from trainshed.launch.local import holder_attempt, run_holder

    folder = known.local_folder()

    def goes_on() -> bool:
        return run_holder(folder) is not None

    while True:
        held = run_holder(folder) if follow else None
        # The log of the attempt before is not the one that somebody follows.
        waits = held is not None and stage == "train" and attempt is None and holder_attempt(folder, held) is None
        file = None if waits else log_file(folder, stage, rank=rank, attempt=attempt)
        if file is not None:
            return follow_lines(file, goes_on if follow else None)
        if held is None:
            break
        time.sleep(_POLL_SECONDS)
    raise _no_log(known, stage)


def cancel_run(known: KnownRun, reporter: Reporter = SILENT) -> list[str]:
    """End every stage of a run that has not ended, and return their names; what it has stored stays."""
    from trainshed.launch.local import run_holder
    from trainshed.launch.target import target_of

    if known.submission is None or (known.folder is not None and run_holder(known.folder) is not None):
        return _cancel_local(known, reporter)
    return list(target_of(known.submission.cluster).cancel(known.submission.submitted))


def _cancel_local(known: KnownRun, reporter: Reporter) -> list[str]:
    """Ask the process that works on a run to stop, and wait until it has; returns the stage that was ended."""
    from trainshed.errors import InputError
    from trainshed.launch.local import ask_holder_to_stop, holder_attempt, run_holder

    folder = known.local_folder()
    held = run_holder(folder)
    if held is None:
        return []
    if not held.is_here:
        raise InputError(
            f"{known.run} is worked on by {held.words()}, which is another machine",
            where=str(folder),
            hint=f"write `trainshed cancel {known.run}` on {held.host}",
        )
    stage = "prepare" if holder_attempt(folder, held) is None else "train"
    ask_holder_to_stop(held)
    reporter.note(f"asked {held.words()} to stop: it writes a checkpoint first")
    while (now := run_holder(folder)) is not None and now.pid == held.pid:
        time.sleep(_POLL_SECONDS)
    return [stage]
