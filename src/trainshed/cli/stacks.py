"""`trainshed stacks`: where every rank of a run is, now or when it died."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RunName
from trainshed.cli.console import Output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainshed.launch.target import RemoteCommand
    from trainshed.observe.health import FlightRecord
    from trainshed.observe.process_stacks import RankStack
    from trainshed.workflow.known_runs import KnownRun


def stacks(
    run: RunName,
    *,
    rank: int | None = None,
    full: Annotated[bool, Parameter(negative="")] = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Show the Python stack of every rank; ranks that are at the same place are shown together.

    A run that trains is asked now, and goes on undisturbed: here, by srun on Slurm, by kubectl on Kubernetes. Of a run
    that has ended, what its ranks wrote down when they failed is shown, and what it says about the cause.

    Parameters
    ----------
    run
        A run: its name, name/id, folder or recipe file (`trainshed ls`).
    rank
        This rank alone.
    full
        Show all frames, with whole paths.
    dry_run
        Print the commands that would read the stacks of a job on a cluster, and do nothing.
    on
        The cluster whose store is searched for the run.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.launch.local import run_holder
    from trainshed.observe.stacks import format_groups, group_stacks
    from trainshed.workflow.known_runs import find_run

    known = find_run(run, on=on)
    holder = run_holder(known.folder) if known.folder is not None else None
    commands = None if holder is not None else _remote_commands(known, rank)
    if dry_run:
        _print_commands(known, commands)
        return 0
    attempt = diagnosis = None
    if holder is not None:
        read = _stacks_here(known, rank)
    elif commands:
        from trainshed.launch.stacks import read_remote_stacks

        read, problems = read_remote_stacks(commands)
        for problem in problems:
            reporter().warn(problem)
        _refuse_none(read, known, rank, "; ".join(problems) or "no process of its ranks was found on its nodes")
    else:
        attempt, read, diagnosis = _recorded(known, rank)
    groups = group_stacks(read)
    data = {
        "schema": "trainshed.stacks/1",
        "run": known.run,
        "live": attempt is None,
        "attempt": attempt,
        "diagnosis": diagnosis,
        "groups": [group.to_plain() for group in groups],
    }
    when = "now" if attempt is None else f"when attempt {attempt} ended"
    head = f"{known.run}: {len(read)} {'rank' if len(read) == 1 else 'ranks'} {when}"
    text = f"{head}{'' if diagnosis is None else f': {diagnosis}'}\n\n{format_groups(groups, full=full)}"
    print_report(data, output, text)
    return 0


def _remote_commands(known: KnownRun, rank: int | None) -> list[RemoteCommand] | None:
    """The commands that reach the ranks of a job that trains; None for a run that is not one."""
    from trainshed.launch.stacks import stack_commands
    from trainshed.launch.target import target_of

    if known.submission is None:
        return None
    cluster, submitted = known.submission.cluster, known.submission.submitted
    for state in target_of(cluster).status(submitted):
        if state.stage == "train" and state.state == "running":
            return stack_commands(cluster, submitted, state, rank)
    return None


def _print_commands(known: KnownRun, commands: list[RemoteCommand] | None) -> None:
    from trainshed.errors import InputError
    from trainshed.launch.stacks import stack_script

    if not commands:
        raise InputError(
            f"{known.run} does not train on a cluster now, so that no command is needed to read its stacks",
            where="--dry-run",
            hint="leave it out",
        )
    for command in commands:
        sys.stdout.write(f"{command.text()} < {stack_script()}\n")


def _stacks_here(known: KnownRun, rank: int | None) -> list[RankStack]:
    from trainshed.observe.process_stacks import read_stacks

    read = read_stacks(str(known.local_folder()), rank)
    _refuse_none(read, known, rank, "none of its ranks has started yet, or they belong to another user")
    return read


def _refuse_none(read: list[RankStack], known: KnownRun, rank: int | None, why: str) -> None:
    from trainshed.errors import InputError, TrainshedError

    if read:
        return
    if rank is not None:
        raise InputError(f"there is no rank {rank} of {known.run} to look at: {why}", where="--rank")
    raise TrainshedError(why, where=known.run, hint=f"`trainshed status {known.run}` says how it stands")


def _recorded(known: KnownRun, rank: int | None) -> tuple[int, list[RankStack], str]:
    """The attempt that ended last, what its ranks have left, and who is to blame."""
    from trainshed.errors import NotFound
    from trainshed.observe.health import health_folder, read_flight_records
    from trainshed.observe.stacks import recorded_stacks

    folder = known.local_folder()
    attempts = _attempts_with_health(folder)
    for attempt in attempts:
        records = read_flight_records(health_folder(folder, attempt))
        if records:
            stacks = [
                stack for stack in recorded_stacks(records, _hosts(folder, attempt)) if rank in (None, stack.rank)
            ]
            _refuse_none(stacks, known, rank, f"in attempt {attempt} it has left no flight record")
            return attempt, stacks, _diagnosis(folder, attempt, records)
    raise NotFound(
        f"{known.run} does not train now, and no rank has left a flight record: they do when they fail or hang",
        where=str(folder),
        hint=f"`trainshed status {known.run}` says how it stands",
    )


def _attempts_with_health(folder: Path) -> list[int]:
    from trainshed.run_folder import HEALTH, attempt_number

    numbers = (attempt_number(path.name) for path in (folder / HEALTH).glob("attempt-*"))
    return sorted((number for number in numbers if number is not None), reverse=True)


def _hosts(folder: Path, attempt: int) -> dict[int, str]:
    import orjson

    from trainshed.observe.health import health_folder

    try:
        body: dict[str, Any] = orjson.loads((health_folder(folder, attempt) / "hosts.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):  # a run of this machine has none
        return {}
    return {rank: node["host"] for node in body["nodes"] for rank in node["ranks"]}


def _diagnosis(folder: Path, attempt: int, records: Mapping[int, FlightRecord]) -> str:
    """Say what ended the attempt: as it was explained then, or from the records where nobody was left to."""
    from trainshed.errors import NotFound
    from trainshed.launch.attempt import read_plan
    from trainshed.observe.event_log import read_events
    from trainshed.observe.health import diagnose
    from trainshed.storage import LocalStore

    events = read_events(LocalStore(folder), "", attempt=attempt)
    explained = [event["what"] for event in events if event["kind"] in ("failure", "stall")]
    if explained:
        return explained[-1]
    try:
        world_size = read_plan(folder, attempt).world_size
    except NotFound:
        world_size = max(records) + 1
    return diagnose(records, world_size).sentence
