"""`trainshed logs` and `trainshed cancel`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainshed.cli.asked_run import AskedRun

_SECONDS_BETWEEN_LOOKS = 0.2


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
        Which rank's log of training (default: 0).
    attempt
        Which attempt's log (default: the newest).
    grep
        Print only lines that this regular expression is found in.
    on
        The cluster file whose store is looked through for the name.
    """
    import re
    import sys

    from trainshed.cli.asked_run import find_run
    from trainshed.errors import InputError

    try:
        wanted = re.compile(grep) if grep is not None else None
    except re.error as error:
        raise InputError(f"`{grep}` is no regular expression: {error}", where="--grep") from None
    for line in _lines(find_run(run, on=on), stage, rank, attempt, follow):
        if wanted is None or wanted.search(line):
            sys.stdout.write(line.rstrip("\n") + "\n")
            sys.stdout.flush()
    return 0


def _lines(found: AskedRun, stage: str, rank: int | None, attempt: int | None, follow: bool) -> Iterator[str]:
    """The run's own files where its folder is seen here, else what the scheduler has."""
    from trainshed.launch.run_logs import log_file, read_lines
    from trainshed.launch.targets import target_of

    if found.submission is None:
        return _local_lines(found, stage, rank, attempt, follow)
    submitted = found.submission.submitted
    target = target_of(found.submission.cluster)
    if found.folder is not None:
        file = log_file(found.folder, stage, rank=rank, attempt=attempt)
        if file is not None:

            def goes_on() -> bool:
                states = {state.stage: state.state for state in target.status(submitted)}
                return states.get(stage) in ("waiting", "running", "serving")

            return read_lines(file, goes_on if follow else None)
    return target.logs(submitted, stage, rank=rank, attempt=attempt, follow=follow)


def _local_lines(found: AskedRun, stage: str, rank: int | None, attempt: int | None, follow: bool) -> Iterator[str]:
    """The log in the run's folder; with `follow` one that a process here is about to begin is waited for."""
    from trainshed.errors import NotFound
    from trainshed.launch.run_lock import attempt_of, holder
    from trainshed.launch.run_logs import log_file, read_lines

    folder = found.folder_here()

    def goes_on() -> bool:
        return holder(folder) is not None

    while True:
        held = holder(folder) if follow else None
        # The log of the attempt before is not the one that somebody follows.
        waits = held is not None and stage == "train" and attempt is None and attempt_of(folder, held) is None
        file = None if waits else log_file(folder, stage, rank=rank, attempt=attempt)
        if file is not None:
            return read_lines(file, goes_on if follow else None)
        if held is None:
            break
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    raise NotFound(
        f"this run has no log of {stage} yet",
        where=str(folder / "logs"),
        hint=f"`trainshed status {found.run}` says how it stands; -f waits for a run that goes on",
    )


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
    from trainshed.cli.asked_run import find_run
    from trainshed.cli.console import print_report
    from trainshed.launch.run_lock import holder
    from trainshed.launch.targets import target_of

    found = find_run(run, on=on)
    if found.submission is None or (found.folder is not None and holder(found.folder) is not None):
        ended = _cancel_here(found)
        done = "stopped after its checkpoint"
    else:
        ended = list(target_of(found.submission.cluster).cancel(found.submission.submitted))
        done = ", ".join(ended)
    text = f"cancelled {found.run}: {done}" if ended else f"{found.run} had already ended"
    print_report({"schema": "trainshed.cancel/1", "run": found.run, "ended": ended}, output, text)
    return 0


def _cancel_here(found: AskedRun) -> list[str]:
    """Ask the process that works on a run to stop, and wait until it has; returns the stage that was ended."""
    from trainshed.cli.console import reporter
    from trainshed.errors import InputError
    from trainshed.launch.run_lock import ask_to_stop, attempt_of, holder

    folder = found.folder_here()
    held = holder(folder)
    if held is None:
        return []
    if not held.is_here:
        raise InputError(
            f"{found.run} is worked on by {held.words()}, which is another machine",
            where=str(folder),
            hint=f"write `trainshed cancel {found.run}` on {held.host}",
        )
    stage = "prepare" if attempt_of(folder, held) is None else "train"
    ask_to_stop(held)
    reporter().note(f"asked {held.words()} to stop: it writes a checkpoint first")
    while (now := holder(folder)) is not None and now.pid == held.pid:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return [stage]
