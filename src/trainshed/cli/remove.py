"""`trainshed rm` and `trainshed clean`: a run, and what no run refers to, removed from the store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RunName
from trainshed.cli.console import Output
from trainshed.run_folder import store_of

if TYPE_CHECKING:
    from trainshed.workflow.known_runs import KnownRun
    from trainshed.workflow.remove import Removal
    from trainshed.workflow.sweeps.stored import StoredSweep


def rm(
    run: RunName,
    *,
    yes: Annotated[bool, Parameter(name=["-y", "--yes"], negative="")] = False,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Remove a run: its folder, its checkpoints wherever they are kept, and the record of its submission.

    Artefacts (tokens, tokenizers, base weights) stay, since other runs may share them: `trainshed clean` finds those
    that none does. A run that is running, or that another run began from, is refused. Of a sweep only its table and
    its page are removed: its runs stay.

    Parameters
    ----------
    run
        A run: its name, name/id, folder or recipe file (`trainshed ls`); or a sweep: its name/id or folder.
    yes
        Do not ask before removing.
    on
        The cluster whose store is searched for the run.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.launch.local import LocalRun
    from trainshed.launch.submissions import forget_submission
    from trainshed.recipe import load_cluster
    from trainshed.workflow import store_options
    from trainshed.workflow.known_runs import find_run
    from trainshed.workflow.remove import plan_removal
    from trainshed.workflow.sweeps.stored import find_sweep

    if "://" not in run and (kept := find_sweep(run, load_cluster(on))) is not None:
        return _remove_sweep(kept, yes, output)
    known = find_run(run, on=on)
    _refuse_running(known)
    folder = known.folder
    planned = None
    if folder is not None:
        here = LocalRun.from_folder(folder)
        options = store_options(known.submission.cluster if known.submission else load_cluster(on))
        planned = plan_removal(here, store_of(folder), options)
    elif known.submission is None:
        known.local_folder()  # raises
    parts = planned.parts if planned is not None else []
    lines = _removal_lines(parts)
    if known.submission is not None:
        lines.append(f"  record     that it was submitted to {known.submission.cluster.name}")
        lines += [] if folder is not None else [f"  (its folder {known.address} is not seen here, and stays)"]
    _confirm(f"to be removed with {known.run}", lines, yes, output)
    if planned is not None:
        planned.remove()
    if known.submission is not None:
        forget_submission(known.submission)
    data = {
        "schema": "trainshed.rm/1",
        "run": known.run,
        "removed": [asdict(part) for part in parts],
        "bytes": sum(part.bytes for part in parts),
        "record": known.submission is not None,
    }
    print_report(data, output, "\n".join([f"removed {known.run}", *lines]))
    return 0


def _remove_sweep(kept: StoredSweep, yes: bool, output: Output) -> int:
    from trainshed.cli.console import print_report

    stays = f"  its {len(kept.runs)} runs stay: {', '.join(kept.runs[:_SHOWN_RUNS])}" + (
        " …" if len(kept.runs) > _SHOWN_RUNS else ""
    )
    _confirm(f"to be removed: the sweep {kept.sweep}", [f"  {kept.address}", stays], yes, output)
    files = kept.remove()
    data = {"schema": "trainshed.rm.sweep/1", "sweep": kept.sweep, "folder": kept.address, "files": files}
    print_report(data, output, f"removed the sweep {kept.sweep}\n{stays}")
    return 0


_SHOWN_RUNS = 4


def clean(
    *,
    yes: Annotated[bool, Parameter(name=["-y", "--yes"], negative="")] = False,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """List the artefacts in a store that no run refers to, and what killed processes left; with --yes remove them.

    Parameters
    ----------
    yes
        Remove them.
    on
        The cluster file whose store is cleaned.
    output
        Report as text or json.
    """
    from trainshed.cli.console import format_amount, print_report
    from trainshed.errors import InputError
    from trainshed.recipe import load_cluster
    from trainshed.storage import parse
    from trainshed.workflow import store_options
    from trainshed.workflow.remove import find_unneeded, remove_unneeded

    cluster = load_cluster(on)
    options = store_options(cluster)
    root = parse(cluster.store_root)
    store = Path(str(root)).expanduser()
    if root.scheme != "file" or (on != "local" and not store.is_dir()):
        raise InputError(
            "only a store on a local or mounted disk is cleaned, and this one is not seen here",
            where=str(root),
            hint="write this command where it is mounted",
        )
    unneeded = find_unneeded(store, options)
    if yes:
        unneeded = remove_unneeded(store, unneeded, options)
    total = sum(artefact.bytes for artefact in unneeded)
    data: dict[str, Any] = {
        "schema": "trainshed.clean/1",
        "store": str(store),
        "removed": yes,
        "unneeded": [asdict(artefact) for artefact in unneeded],
        "bytes": total,
    }
    if not unneeded:
        text = f"{store}: everything there belongs to a run"
    else:
        what = f"removed {format_amount(total, 'B')}" if yes else f"{format_amount(total, 'B')} that no run refers to"
        lines = [f"{store}: {what}", *_removal_lines(unneeded)]
        text = "\n".join(lines if yes else [*lines, "nothing was removed: `trainshed clean --yes` does it"])
    print_report(data, output, text)
    return 0


def _removal_lines(parts: list[Removal]) -> list[str]:
    from trainshed.cli.console import format_amount

    return [
        f"  {part.kind:<10} {format_amount(part.bytes, 'B'):>9}  {format_amount(part.files, 'files'):>12}  {part.path}"
        f"{f'  ({part.why})' if part.why else ''}"
        for part in parts
    ]


def _refuse_running(known: KnownRun) -> None:
    """A job that a scheduler still has would write the folder again."""
    from trainshed.errors import InputError
    from trainshed.workflow.run_state import run_status

    if known.submission is None:
        return
    state = run_status(known)["state"]
    if state in ("running", "serving", "waiting"):
        raise InputError(
            f"{known.run} is {state} on {known.submission.cluster.name}",
            where=known.address,
            hint=f"`trainshed cancel {known.run}` ends it",
        )


def _confirm(what: str, lines: list[str], yes: bool, output: Output) -> None:
    """Ask a person at a terminal; anybody else must have written --yes."""
    import sys

    from trainshed.cli.console import ask
    from trainshed.errors import InputError

    if yes:
        return
    shown = "\n".join([f"{what}:", *lines])
    if sys.stdin.isatty() and sys.stderr.isatty() and output == "text":
        if (ask(f"{shown}\nremove it? [y/N]") or "").lower() in ("y", "yes"):
            return
        raise InputError("nothing was removed")
    raise InputError(f"{shown}\nnothing was removed", hint="write --yes to remove it")
