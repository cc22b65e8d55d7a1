"""The runs that exist: `trainshed ls`, `status`, `logs` and `cancel`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RunName
from trainshed.cli.console import Output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainshed.api import Run
    from trainshed.observe.evaluations import EvaluationRecord


def status(
    run: RunName,
    *,
    answers: Annotated[bool, Parameter(negative="")] = False,
    on: ClusterName = "local",
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
        The cluster whose store is searched for the run.
    output
        Report as text or json.
    """
    from trainshed.api import open_run
    from trainshed.cli.console import print_report

    opened = open_run(run, on=on)
    if answers:
        from trainshed.cli.answers import answers_report, answers_text

        data = answers_report(opened.known)
        print_report(data, output, "" if output == "json" else answers_text(data))
        return 0
    data = opened.status()
    print_report(data, output, "\n".join([status_text(data), *evaluation_lines(opened.evaluations)]))
    return 1 if data["state"] == "failed" else 0


def evaluation_lines(records: Sequence[EvaluationRecord]) -> list[str]:
    """Write the newest scores of each measure, one line each."""
    newest = {record.label: record for record in records}
    lines = []
    for label, record in newest.items():
        after = "" if record.step is None else f" after step {record.step:,}"
        lines.append(f"  {label}{after}: {record.scores_text()}")
    return lines


def ls(*, on: ClusterName = "local", output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text") -> int:
    """List the runs in the store here, and those that were submitted from this machine; newest first. Sweeps follow.

    Parameters
    ----------
    on
        The cluster whose store is searched for runs.
    output
        Report as text or json.
    """
    from concurrent.futures import ThreadPoolExecutor
    from contextlib import suppress

    from trainshed import api
    from trainshed.cli.console import print_report, reporter
    from trainshed.errors import TrainshedError
    from trainshed.recipe import load_cluster
    from trainshed.workflow.sweeps.stored import stored_sweeps

    cluster = load_cluster(on)
    known = api.runs(cluster, reporter=reporter())
    with ThreadPoolExecutor(8) as pool:  # each may ask a bucket or a scheduler
        runs = list(pool.map(_listed_run, known))
    lines = [f"{row['run']:<32} {row['cluster']:<20} {row['state']:<10} {row['why']}".rstrip() for row in runs] or [
        f"no run in {cluster.store_root}, and none was submitted from this machine yet"
    ]
    sweeps = []
    with suppress(TrainshedError):  # a store that cannot be listed was named above
        sweeps = [sweep.to_plain() for sweep in stored_sweeps(cluster)]
    lines += [f"{row['sweep']:<32} {'sweep':<20} {row['state']:<10} {row['why']}".rstrip() for row in sweeps]
    print_report({"schema": "trainshed.ls/1", "runs": runs, "sweeps": sweeps}, output, "\n".join(lines))
    return 0


def _listed_run(run: Run) -> dict[str, Any]:
    from trainshed.errors import TrainshedError
    from trainshed.workflow.run_state import run_place

    try:
        return run.status()
    except TrainshedError as error:  # one run out of reach does not hide the others
        return {"run": str(run), "cluster": run_place(run.known), "state": "unknown", "why": error.what}


def status_text(data: dict[str, Any]) -> str:
    """Write a run's standing for people."""
    from trainshed.workflow.run_state import progress_text

    place = "here" if data["cluster"] == "local" else f"{'in' if '://' in data['cluster'] else 'on'} {data['cluster']}"
    lines = [f"{data['run']} {place}: {data['state']}{'' if data['stages'] else _because(data['why'])}"]
    for stage in data["stages"]:
        restarts = f" (started {stage['restarts'] + 1} times)" if stage["restarts"] else ""
        number = f" [{stage['id']}]" if stage["id"] else ""
        lines.append(f"  {stage['stage']:<10} {stage['state']}{number}{restarts}  {stage['reason']}".rstrip())
    progress = data["progress"]
    if progress is not None:
        words = progress_text(progress) if data["stages"] else ""
        lines += [f"  {words}"] if words else []
        if progress["last_error"]:
            lines.append(f"  last error: {progress['last_error']}")
    if data.get("scheduler"):
        lines.append(f"  {data['scheduler']}")
    return "\n".join(lines)


def _because(why: str) -> str:
    return f", {why}" if why else ""


def logs(
    run: RunName,
    *,
    follow: Annotated[bool, Parameter(name=["-f", "--follow"], negative="")] = False,
    stage: str = "train",
    rank: int | None = None,
    attempt: int | None = None,
    grep: str | None = None,
    on: ClusterName = "local",
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
        The cluster whose store is searched for the run.
    """
    import re
    import sys

    from trainshed.api import open_run
    from trainshed.errors import InputError

    try:
        wanted = re.compile(grep) if grep is not None else None
    except re.error as error:
        raise InputError(f"`{grep}` is not a regular expression: {error}", where="--grep") from None
    for line in open_run(run, on=on).logs(stage, rank=rank, attempt=attempt, follow=follow):
        if wanted is None or wanted.search(line):
            sys.stdout.write(line.rstrip("\n") + "\n")
            sys.stdout.flush()
    return 0


def cancel(
    run: RunName, *, on: ClusterName = "local", output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text"
) -> int:
    """End every stage of a run that has not ended; what it has stored stays, and it can be started again.

    A run of this machine writes a checkpoint before it ends.

    Parameters
    ----------
    run
        A run: its name, name/id, folder or recipe file (`trainshed ls`).
    on
        The cluster whose store is searched for the run.
    output
        Report as text or json.
    """
    from trainshed.api import open_run
    from trainshed.cli.console import print_report, reporter

    opened = open_run(run, on=on)
    is_job = opened.known.submission is not None
    ended = opened.cancel(reporter=reporter())
    done = ", ".join(ended) if is_job else "stopped after its checkpoint"
    text = f"cancelled {opened}: {done}" if ended else f"{opened} had already ended"
    print_report({"schema": "trainshed.cancel/1", "run": str(opened), "ended": ended}, output, text)
    return 0
