"""The runs that exist: `trainshed ls`, `status`, `logs` and `cancel`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.console import Output
from trainshed.run_folder import LOGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainshed.cli.lookup import KnownRun
    from trainshed.errors import NotFound
    from trainshed.launch.submissions import Submission
    from trainshed.launch.target import StageState


def status(
    run: str,
    *,
    answers: Annotated[bool, Parameter(negative="")] = False,
    on: str = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Say in a sentence how a run stands, why it waits or failed, and how far training is.

    Of a run on a cluster each stage is told. Exits with 1 where it has failed.

    Parameters
    ----------
    run
        A run: its name, name/id, folder or recipe file (`trainshed ls`).
    answers
        Show what the model answered to `data.validation.prompts` instead, step by step.
    on
        The cluster file whose store is looked through for the name.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.cli.lookup import find_run

    if answers:
        from trainshed.cli.answers import answers_report, answers_text

        data = answers_report(find_run(run, on=on))
        print_report(data, output, "" if output == "json" else answers_text(data))
        return 0
    data = run_status(find_run(run, on=on))
    print_report(data, output, status_text(data))
    return 1 if data["state"] == "failed" else 0


def ls(*, on: str = "local", output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text") -> int:
    """List the runs in the store here, and those that were submitted from this machine; newest first.

    Parameters
    ----------
    on
        The cluster file whose store is looked through.
    output
        Report as text or json.
    """
    from concurrent.futures import ThreadPoolExecutor

    from trainshed.cli.console import print_report, reporter
    from trainshed.cli.lookup import known_runs
    from trainshed.recipe import load_cluster

    cluster = load_cluster(on)
    known, problem = known_runs(cluster)
    if problem is not None and not known:
        raise problem
    if problem is not None:
        reporter().warn(f"{cluster.store_root} cannot be listed: {problem.what}")
    with ThreadPoolExecutor(8) as pool:  # each may ask a bucket or a scheduler
        runs = list(pool.map(_listed_run, known))
    lines = [f"{row['run']:<32} {row['cluster']:<20} {row['state']:<10} {row['why']}".rstrip() for row in runs] or [
        f"no run in {cluster.store_root}, and none was submitted from this machine yet"
    ]
    print_report({"schema": "trainshed.ls/1", "runs": runs}, output, "\n".join(lines))
    return 0


def _listed_run(known: KnownRun) -> dict[str, Any]:
    from trainshed.errors import TrainshedError

    try:
        return run_status(known)
    except TrainshedError as error:  # one run out of reach does not hide the others
        return {"run": known.run, "cluster": run_place(known), "state": "unknown", "why": error.what}


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
    why = " ".join(filter(None, [current.reason if current else "", _progress_text(progress)]))
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


def status_text(data: dict[str, Any]) -> str:
    """Write a run's standing for people."""
    place = "here" if data["cluster"] == "local" else f"{'in' if '://' in data['cluster'] else 'on'} {data['cluster']}"
    lines = [f"{data['run']} {place}: {data['state']}{'' if data['stages'] else _because(data['why'])}"]
    for stage in data["stages"]:
        restarts = f" (started {stage['restarts'] + 1} times)" if stage["restarts"] else ""
        number = f" [{stage['id']}]" if stage["id"] else ""
        lines.append(f"  {stage['stage']:<10} {stage['state']}{number}{restarts}  {stage['reason']}".rstrip())
    progress = data["progress"]
    if progress is not None:
        words = _progress_text(progress) if data["stages"] else ""
        lines += [f"  {words}"] if words else []
        if progress["last_error"]:
            lines.append(f"  last error: {progress['last_error']}")
    if data.get("scheduler"):
        lines.append(f"  {data['scheduler']}")
    return "\n".join(lines)


def _because(why: str) -> str:
    return f", {why}" if why else ""


def submission_progress(submission: Submission, states: tuple[StageState, ...]) -> dict[str, Any] | None:
    """Return the run's progress from its events, or from its log where its folder is not seen here."""
    from trainshed.cli.lookup import submitted_run
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


def _progress_text(progress: dict[str, Any] | None) -> str:
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


_POLL_SECONDS = 0.2


def logs(
    run: str,
    *,
    follow: Annotated[bool, Parameter(name=["-f", "--follow"], negative="")] = False,
    stage: str = "train",
    rank: int | None = None,
    attempt: int | None = None,
    grep: str | None = None,
    on: str = "local",
) -> int:
    """Print the log of a run; logs of earlier attempts are kept.

    Parameters
    ----------
    run
        A run: its name, name/id, folder or recipe file (`trainshed ls`).
    follow
        Go on printing what is added until the stage has ended.
    stage
        Which stage's log.
    rank
        Which rank's log of training (default: the one that prints the losses; of Megatron the last, otherwise 0).
    attempt
        Which attempt's log (default: the newest).
    grep
        Print only lines that this regular expression is found in.
    on
        The cluster file whose store is looked through for the name.
    """
    import re
    import sys

    from trainshed.cli.lookup import find_run
    from trainshed.errors import InputError

    try:
        wanted = re.compile(grep) if grep is not None else None
    except re.error as error:
        raise InputError(f"`{grep}` is no regular expression: {error}", where="--grep") from None
    for line in _log_lines(find_run(run, on=on), stage, rank, attempt, follow):
        if wanted is None or wanted.search(line):
            sys.stdout.write(line.rstrip("\n") + "\n")
            sys.stdout.flush()
    return 0


def _log_lines(known: KnownRun, stage: str, rank: int | None, attempt: int | None, follow: bool) -> Iterator[str]:
    """The run's own files where its folder is seen here, else what the scheduler has."""
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


def cancel(
    run: str, *, on: str = "local", output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text"
) -> int:
    """End every stage of a run that has not ended; what it has stored stays, and it can be started again.

    A run of this machine writes a checkpoint before it ends.

    Parameters
    ----------
    run
        A run: its name, name/id, folder or recipe file (`trainshed ls`).
    on
        The cluster file whose store is looked through for the name.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.cli.lookup import find_run
    from trainshed.launch.local import run_holder
    from trainshed.launch.target import target_of

    known = find_run(run, on=on)
    if known.submission is None or (known.folder is not None and run_holder(known.folder) is not None):
        ended = _cancel_local(known)
        done = "stopped after its checkpoint"
    else:
        ended = list(target_of(known.submission.cluster).cancel(known.submission.submitted))
        done = ", ".join(ended)
    text = f"cancelled {known.run}: {done}" if ended else f"{known.run} had already ended"
    print_report({"schema": "trainshed.cancel/1", "run": known.run, "ended": ended}, output, text)
    return 0


def _cancel_local(known: KnownRun) -> list[str]:
    """Ask the process that works on a run to stop, and wait until it has; returns the stage that was ended."""
    from trainshed.cli.console import reporter
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
    reporter().note(f"asked {held.words()} to stop: it writes a checkpoint first")
    while (now := run_holder(folder)) is not None and now.pid == held.pid:
        time.sleep(_POLL_SECONDS)
    return [stage]
