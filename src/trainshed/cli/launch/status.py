"""`trainshed status` and `trainshed ls`: how submitted runs stand, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.launch.submissions import Submission
    from trainshed.launch.target import StageState


def status(run: str, *, output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text") -> int:
    """Say in a sentence how each stage of a run stands, why it waits or failed, and how far training is.

    Exits with 1 where a stage has failed.

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
    states = target_of(found.cluster).status(found.submitted)
    data = report(found, states)
    print_report(data, output, report_text(data))
    return 1 if any(state.state == "failed" for state in states) else 0


def ls(*, output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text") -> int:
    """List the runs that were submitted from this machine, newest first.

    Parameters
    ----------
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.errors import TrainshedError
    from trainshed.launch.submissions import submissions
    from trainshed.launch.targets import target_of

    runs: list[dict[str, Any]] = []
    for found in submissions():
        try:
            runs.append(report(found, target_of(found.cluster).status(found.submitted)))
        except TrainshedError as error:  # one cluster out of reach does not hide the others
            runs.append({"run": found.run, "cluster": found.cluster.name, "state": "unknown", "why": error.what})
    lines = [
        f"{each['run']:<32} {each['cluster']:<20} {each['state']:<10} {each['why']}".rstrip() for each in runs
    ] or ["nothing was submitted from this machine yet"]
    print_report({"schema": "trainshed.ls/1", "runs": runs}, output, "\n".join(lines))
    return 0


def report(found: Submission, states: tuple[StageState, ...]) -> dict[str, Any]:
    """Put together what the scheduler and the run itself say."""
    from dataclasses import asdict

    current = _current(states)
    progress = own_account(found, states)
    why = " ".join(filter(None, [current.reason if current else "", _progress_words(progress)]))
    return {
        "schema": "trainshed.status/1",
        "run": found.run,
        "cluster": found.cluster.name,
        "folder": found.submitted.run,
        "state": _overall(states),
        "stage": current.stage if current else None,
        "why": why,
        "stages": [asdict(state) for state in states],
        "progress": progress,
    }


def report_text(data: dict[str, Any]) -> str:
    """Write a run's standing for people."""
    lines = [f"{data['run']} on {data['cluster']}: {data['state']}"]
    for stage in data["stages"]:
        restarts = f" (started {stage['restarts'] + 1} times)" if stage["restarts"] else ""
        number = f" [{stage['id']}]" if stage["id"] else ""
        lines.append(f"  {stage['stage']:<10} {stage['state']}{number}{restarts}  {stage['reason']}".rstrip())
    progress = data["progress"]
    if progress is not None:
        words = _progress_words(progress)
        lines += [f"  {words}"] if words else []
        if progress["last_error"]:
            lines.append(f"  last error: {progress['last_error']}")
    return "\n".join(lines)


def own_account(found: Submission, states: tuple[StageState, ...]) -> dict[str, Any] | None:
    """Return how the run stands by its events, or by its log where its folder is not mounted here; None: neither."""
    from trainshed.errors import TrainshedError
    from trainshed.launch.targets import target_of
    from trainshed.observe.standing import standing, standing_in_log
    from trainshed.storage import LocalStore

    folder = Path(found.submitted.run)
    if folder.is_dir():
        return standing(LocalStore(folder), "", found.steps).to_plain()
    if not any(state.stage == "train" and state.state == "running" for state in states):
        return None
    try:
        return standing_in_log(target_of(found.cluster).logs(found.submitted, "train"), found.steps).to_plain()
    except TrainshedError:
        return None  # the scheduler's own account was given above; its log may not be there yet


def _progress_words(progress: dict[str, Any] | None) -> str:
    from trainshed.observe.standing import Standing

    return Standing(**progress).words() if progress is not None else ""


def _overall(states: tuple[StageState, ...]) -> str:
    kinds = [state.state for state in states]
    for kind in ("failed", "cancelled", "running", "serving"):
        if kind in kinds:
            return kind
    if kinds and all(kind == "done" for kind in kinds):
        return "done"
    return "waiting" if "waiting" in kinds else "unknown"


def _current(states: tuple[StageState, ...]) -> StageState | None:
    """The stage a person asks about: the one that failed, runs or is next."""
    for kind in ("failed", "cancelled", "running", "serving", "waiting"):
        for state in states:
            if state.state == kind:
                return state
    return states[-1] if states else None
