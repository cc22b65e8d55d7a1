"""`trainshed open` and `trainshed exec`: a tunnel to a running job, a shell beside one of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trainshed.launch.submissions import Submission
    from trainshed.launch.target import StageState
    from trainshed.launch.tunnels import Way


def open_service(run: str, service: Literal["serve"], *, port: int | None = None, dry_run: bool = False) -> int:
    """Bring a service of a running job to a port of this machine, by ssh or kubectl; ends with Ctrl-C.

    Parameters
    ----------
    run
        A run that was submitted from here: its name, name/id, folder or recipe file (`trainshed ls`).
    service
        What is to be seen: the server of a recipe with `serve:`.
    port
        The port here (default: the service's own).
    dry_run
        Print the command and do nothing.
    """
    from trainshed.launch.tunnels import tunnel

    found, state = _stage(run, service)
    return _go(tunnel(found.cluster, found.submitted, state, port), dry_run)


def exec_in(
    run: str, *command: str, rank: int = 0, stage: Literal["train", "serve"] = "train", dry_run: bool = False
) -> int:
    """Run a command on the node of a rank, inside its job; without one, a shell.

    Parameters
    ----------
    run
        A run that was submitted from here: its name, name/id, folder or recipe file (`trainshed ls`).
    command
        What to run there (default: bash); after `--` where it has dashes of its own.
    rank
        Beside which rank; of a server, in which replica.
    stage
        The training, or the server.
    dry_run
        Print the command and do nothing.
    """
    from trainshed.launch.tunnels import shell

    found, state = _stage(run, stage)
    return _go(shell(found.cluster, found.submitted, state, rank, command or ("bash",)), dry_run)


def _stage(run: str, stage: str) -> tuple[Submission, StageState]:
    from trainshed.cli.asked_run import find_run
    from trainshed.errors import InputError
    from trainshed.launch.targets import target_of

    found = find_run(run).submitted("a way into it")
    for state in target_of(found.cluster).status(found.submitted):
        if state.stage == stage:
            return found, state
    what = "is not served" if stage == "serve" else "has no training"
    hint = "write `serve: {}` into its recipe and submit it again" if stage == "serve" else None
    raise InputError(f"this run {what}", where=run, hint=hint)


def _go(way: Way, dry_run: bool) -> int:
    import shutil
    import subprocess
    import sys

    from trainshed.cli.console import reporter
    from trainshed.errors import InputError

    if dry_run:
        sys.stdout.write(way.text() + "\n")
        return 0
    if shutil.which(way.command[0]) is None:
        raise InputError(f"there is no `{way.command[0]}` on this machine", hint=f"run it elsewhere: {way.text()}")
    reporter().note(f"{way.words}\n  {way.text()}")
    return subprocess.run(way.command, check=False).returncode
