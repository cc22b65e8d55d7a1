"""`trainshed checkpoints`: list, verify and prune the checkpoints of a run."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RunName
from trainshed.cli.console import Flag, Output


def checkpoints(
    run: RunName,
    *overrides: str,
    verify: Flag = False,
    prune: Flag = False,
    keep: int | None = None,
    on: ClusterName = "local",
    id: str | None = None,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """List the checkpoints of a run; prove them; remove old and broken ones.

    The best one, where `checkpoint.best` keeps it, is never removed. Exit code 1 if `--verify` finds a broken one and
    `--prune` does not remove it. Megatron's checkpoints are listed, proven and removed like our own (those that are
    found broken are left to you), torchtune's and NeMo's are listed and proven: these engines remove old ones
    themselves.

    Parameters
    ----------
    run
        A run: its name, name/id, folder (a path or a URL) or the recipe it was started from (`trainshed ls`).
    overrides
        Keys of the recipe that the run was started with (key.sub=value), where a recipe is given.
    verify
        Read every byte and compare it with the manifests.
    prune
        Remove what earlier attempts left unfinished; with --keep old checkpoints, with --verify broken ones.
    keep
        With --prune: how many complete checkpoints to keep, the newest ones (and the best).
    on
        The cluster whose store is searched for the run.
    id
        The run's id, where a recipe is given and its run was started with --id.
    output
        Report as text or json.
    """
    from dataclasses import asdict

    from trainshed.api import open_run
    from trainshed.cli.console import print_report, reporter
    from trainshed.errors import InputError
    from trainshed.recipe import load_cluster, split_overrides
    from trainshed.workflow.prepare import store_options
    from trainshed.workflow.run_checkpoints import run_checkpoints

    if keep is not None and not prune:
        raise InputError("--keep says what --prune leaves", hint=f"write --prune --keep {keep}")
    opened = open_run(run, *overrides, on=on, id=id)
    options = store_options(load_cluster(on, split_overrides(overrides)[1]))
    listed = run_checkpoints(opened.known, options, verify=verify, prune=prune, keep=keep, reporter=reporter())
    rows, removed = [asdict(entry) for entry in listed.checkpoints], list(listed.removed)
    data = {
        "schema": "trainshed.checkpoints/1",
        "run": listed.address,
        **({} if listed.engine is None else {"engine": listed.engine}),
        "latest": listed.latest,
        "best": None if listed.best_step is None else {"step": listed.best_step, "loss": listed.best_loss},
        "checkpoints": rows,
        "removed": removed,
    }
    print_report(data, output, _text(data, rows, removed))
    return 1 if listed.broken else 0


def _text(data: dict[str, Any], rows: list[dict[str, Any]], removed: list[int]) -> str:
    from trainshed.cli.console import format_amount

    complete = [row for row in rows if row["complete"]]
    count = f"{len(complete)} checkpoint{'' if len(complete) == 1 else 's'}"
    engine = f" of {data['engine']}" if "engine" in data else ""
    lines = [f"{data['run']}: {count}{engine}, {format_amount(sum(row['bytes'] for row in complete), 'B')}"]
    for row in rows:
        state = "complete" if row["complete"] else "incomplete"
        if row["verified"] is not None:
            state = "proven" if row["verified"] else "BROKEN"
        state += f": {row['problem']}" if row["problem"] else ""
        attempt = "?" if row["attempt"] is None else row["attempt"]
        attempt_text = "" if "engine" in data else f"  attempt {attempt:>3}"
        marks = ["latest"] if row["latest"] else []
        marks += [f"best, validation loss {data['best']['loss']:.4f}"] if row["best"] else []
        mark = f"  <- {'; '.join(marks)}" if marks else ""
        lines.append(f"  step {row['step']:>9,}{attempt_text}  {format_amount(row['bytes'], 'B'):>9}  {state}{mark}")
    best = data["best"]["step"] if data["best"] else None
    if best is not None and all(row["step"] != best for row in rows):
        lines.append(f"  step {best:,} was the best, and is not there any more")
    if removed:
        lines.append(f"  removed: step {', '.join(f'{step:,}' for step in removed)}")
    return "\n".join(lines)
