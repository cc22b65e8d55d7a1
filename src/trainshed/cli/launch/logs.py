"""`trainshed logs` and `trainshed cancel`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainshed.launch.submissions import Submission


def logs(
    run: str,
    *,
    follow: Annotated[bool, Parameter(name=["-f", "--follow"], negative="")] = False,
    stage: str = "train",
    rank: int | None = None,
    attempt: int | None = None,
    grep: str | None = None,
) -> int:
    """Print the log of a run; logs of earlier attempts are kept.

    Parameters
    ----------
    run
        A run that was submitted from here: its name, or name/id (`trainshed ls`).
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
    """
    import re
    import sys

    from trainshed.errors import InputError
    from trainshed.launch.submissions import find_submission

    try:
        wanted = re.compile(grep) if grep is not None else None
    except re.error as error:
        raise InputError(f"`{grep}` is no regular expression: {error}", where="--grep") from None
    found = find_submission(run)
    for line in _lines(found, stage, rank, attempt, follow):
        if wanted is None or wanted.search(line):
            sys.stdout.write(line.rstrip("\n") + "\n")
            sys.stdout.flush()
    return 0


def _lines(found: Submission, stage: str, rank: int | None, attempt: int | None, follow: bool) -> Iterator[str]:
    """The run's own files where its folder is mounted here, else what the scheduler has."""
    from trainshed.launch.run_logs import log_file, read_lines
    from trainshed.launch.targets import target_of

    target = target_of(found.cluster)
    if Path(found.submitted.run).is_dir():
        file = log_file(Path(found.submitted.run), stage, rank=rank, attempt=attempt)
        if file is not None:

            def goes_on() -> bool:
                states = {state.stage: state.state for state in target.status(found.submitted)}
                return states.get(stage) in ("waiting", "running", "serving")

            return read_lines(file, goes_on if follow else None)
    return target.logs(found.submitted, stage, rank=rank, attempt=attempt, follow=follow)


def cancel(run: str, *, output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text") -> int:
    """End every stage of a run that has not ended; what it has stored stays, and it can be submitted again.

    Parameters
    ----------
    run
        A run that was submitted from here: its name, or name/id (`trainshed ls`).
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.launch.submissions import find_submission
    from trainshed.launch.targets import target_of

    found = find_submission(run)
    ended = target_of(found.cluster).cancel(found.submitted)
    text = f"cancelled {found.run}: {', '.join(ended)}" if ended else f"{found.run} had already ended"
    print_report({"schema": "trainshed.cancel/1", "run": found.run, "ended": list(ended)}, output, text)
    return 0
