"""`trainshed status` and `trainshed ls`: how runs stand, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.cli.asked_run import AskedRun
    from trainshed.launch.submissions import Submission
    from trainshed.launch.target import StageState


def status(
    run: str, *, on: str = "local", output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text"
) -> int:
    """Say in a sentence how a run stands, why it waits or failed, and how far training is.

    Of a run on a cluster each stage is told. Exits with 1 where it has failed.

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

    data = report_of(find_run(run, on=on))
    print_report(data, output, report_text(data))
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
    from trainshed.cli.asked_run import known_runs
    from trainshed.cli.console import print_report
    from trainshed.errors import TrainshedError
    from trainshed.recipe import load_cluster

    cluster = load_cluster(on)
    runs: list[dict[str, Any]] = []
    for found in known_runs(cluster):
        try:
            runs.append(report_of(found))
        except TrainshedError as error:  # one run out of reach does not hide the others
            place = found.submission.cluster.name if found.submission else "local"
            runs.append({"run": found.run, "cluster": place, "state": "unknown", "why": error.what})
    lines = [
        f"{each['run']:<32} {each['cluster']:<20} {each['state']:<10} {each['why']}".rstrip() for each in runs
    ] or [f"no run in {cluster.store_root}, and none was submitted from this machine yet"]
    print_report({"schema": "trainshed.ls/1", "runs": runs}, output, "\n".join(lines))
    return 0


def report_of(found: AskedRun) -> dict[str, Any]:
    """Put together how a run stands: by its scheduler, or by its folder alone where it was not submitted from here."""
    from trainshed.launch.run_lock import holder
    from trainshed.launch.targets import target_of

    folder = found.folder
    if found.submission is None or (folder is not None and holder(folder) is not None):
        return _report_here(found, found.folder_here())
    return report(found.submission, target_of(found.submission.cluster).status(found.submission.submitted))


def _report_here(found: AskedRun, folder: Path) -> dict[str, Any]:
    from trainshed.launch.local_runs import account_of

    account = account_of(folder, steps_of(folder))
    held = account.holder
    return {
        "schema": "trainshed.status/1",
        "run": found.run,
        "cluster": "local",
        "folder": str(folder),
        "state": account.state,
        "stage": "train" if account.progress.attempt is not None else "prepare",
        "why": "; ".join(filter(None, [account.progress.words(), account.reason])),
        "stages": [],
        "progress": account.progress.to_plain(),
        "process": None if held is None else {"pid": held.pid, "host": held.host, "since": held.since},
    }


def steps_of(run: Path) -> int | None:
    """Return how many steps a run is to have, by its own files; None where they do not say."""
    from trainshed.errors import TrainshedError
    from trainshed.recipe import load_recipe
    from trainshed.workflow import open_run_folder

    try:
        steps = load_recipe(str(run / "recipe.yaml")).train.steps
        return steps if steps is not None else open_run_folder(run).steps
    except TrainshedError:  # tokens or epochs, and it is not prepared
        return None


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
    place = "here" if data["cluster"] == "local" else f"on {data['cluster']}"
    lines = [f"{data['run']} {place}: {data['state']}{'' if data['stages'] else _because(data['why'])}"]
    for stage in data["stages"]:
        restarts = f" (started {stage['restarts'] + 1} times)" if stage["restarts"] else ""
        number = f" [{stage['id']}]" if stage["id"] else ""
        lines.append(f"  {stage['stage']:<10} {stage['state']}{number}{restarts}  {stage['reason']}".rstrip())
    progress = data["progress"]
    if progress is not None:
        words = _progress_words(progress) if data["stages"] else ""
        lines += [f"  {words}"] if words else []
        if progress["last_error"]:
            lines.append(f"  last error: {progress['last_error']}")
    return "\n".join(lines)


def _because(why: str) -> str:
    return f", {why}" if why else ""


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
