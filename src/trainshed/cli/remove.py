"""`trainshed rm` and `trainshed clean`: a run, and what no run refers to, removed from the store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.cli.lookup import KnownRun
    from trainshed.workflow.remove import Removal


def rm(
    run: str,
    *,
    yes: Annotated[bool, Parameter(name=["-y", "--yes"], negative="")] = False,
    on: str = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Remove a run: its folder, its checkpoints wherever they are kept, and the record of its submission.

    Artefacts (tokens, tokenizers, base weights) stay, since other runs may share them: `trainshed clean` finds those
    that none does. A run that is running, or that another run began from, is refused.

    Parameters
    ----------
    run
        A run: its name, name/id, folder or recipe file (`trainshed ls`).
    yes
        Do not ask before removing.
    on
        The cluster file whose store is looked through for the name.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report
    from trainshed.cli.lookup import find_run
    from trainshed.launch.local import LocalRun
    from trainshed.launch.submissions import forget_submission
    from trainshed.recipe import load_cluster
    from trainshed.workflow import store_options
    from trainshed.workflow.remove import plan_removal

    found = find_run(run, on=on)
    _refuse_running(found)
    folder = found.folder
    planned = None
    if folder is not None:
        here = LocalRun.from_folder(folder)
        options = store_options(found.submission.cluster if found.submission else load_cluster(on))
        planned = plan_removal(here, folder.absolute().parents[2], options)
    elif found.submission is None:
        found.folder_here()  # raises
    parts = planned.parts if planned is not None else []
    lines = _removal_lines(parts)
    if found.submission is not None:
        lines.append(f"  record     that it was submitted to {found.submission.cluster.name}")
        lines += [] if folder is not None else [f"  (its folder {found.address} is not seen here, and stays)"]
    _confirm(f"to be removed with {found.run}", lines, yes, output)
    if planned is not None:
        planned.remove()
    if found.submission is not None:
        forget_submission(found.submission)
    data = {
        "schema": "trainshed.rm/1",
        "run": found.run,
        "removed": [asdict(part) for part in parts],
        "bytes": sum(part.bytes for part in parts),
        "record": found.submission is not None,
    }
    print_report(data, output, "\n".join([f"removed {found.run}", *lines]))
    return 0


def clean(
    *,
    yes: Annotated[bool, Parameter(name=["-y", "--yes"], negative="")] = False,
    on: str = "local",
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
    from trainshed.cli.console import human, print_report
    from trainshed.errors import InputError
    from trainshed.recipe import load_cluster
    from trainshed.storage import parse
    from trainshed.workflow.remove import find_unneeded, remove_unneeded

    cluster = load_cluster(on)
    root = parse(cluster.store_root)
    store = Path(str(root)).expanduser()
    if root.scheme != "file" or (on != "local" and not store.is_dir()):
        raise InputError(
            "only a store on a local or mounted disk is cleaned, and this one is not seen here",
            where=str(root),
            hint="write this command where it is mounted",
        )
    found = find_unneeded(store)
    if yes:
        found = remove_unneeded(store, found)
    total = sum(each.bytes for each in found)
    data: dict[str, Any] = {
        "schema": "trainshed.clean/1",
        "store": str(store),
        "removed": yes,
        "unneeded": [asdict(each) for each in found],
        "bytes": total,
    }
    if not found:
        text = f"{store}: everything there belongs to a run"
    else:
        what = f"removed {human(total, 'B')}" if yes else f"{human(total, 'B')} that no run refers to"
        lines = [f"{store}: {what}", *_removal_lines(found)]
        text = "\n".join(lines if yes else [*lines, "nothing was removed: `trainshed clean --yes` does it"])
    print_report(data, output, text)
    return 0


def _removal_lines(parts: list[Removal]) -> list[str]:
    from trainshed.cli.console import human

    return [
        f"  {part.kind:<10} {human(part.bytes, 'B'):>9}  {human(part.files, 'files'):>12}  {part.path}"
        f"{f'  ({part.why})' if part.why else ''}"
        for part in parts
    ]


def _refuse_running(found: KnownRun) -> None:
    """A job that a scheduler still has would write the folder anew."""
    from trainshed.cli.runs import run_status
    from trainshed.errors import InputError

    if found.submission is None:
        return
    state = run_status(found)["state"]
    if state in ("running", "serving", "waiting"):
        raise InputError(
            f"{found.run} is {state} on {found.submission.cluster.name}",
            where=found.address,
            hint=f"`trainshed cancel {found.run}` ends it",
        )


def _confirm(what: str, lines: list[str], yes: bool, output: Output) -> None:
    """Ask a person at a terminal; anybody else must have said --yes."""
    import sys

    from trainshed.errors import InputError

    if yes:
        return
    shown = "\n".join([f"{what}:", *lines])
    if sys.stdin.isatty() and sys.stderr.isatty() and output == "text":
        sys.stderr.write(f"{shown}\nremove it? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
        raise InputError("nothing was removed")
    raise InputError(f"{shown}\nnothing was removed", hint="write --yes to remove it")
