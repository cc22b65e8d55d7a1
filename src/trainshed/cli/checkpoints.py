"""`trainshed checkpoints`: list, verify and prune the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.checkpoints.foreign import ForeignListing
    from trainshed.checkpoints.native.folder import CheckpointListing
    from trainshed.storage import Store


def checkpoints(
    run: str,
    *overrides: str,
    verify: bool = False,
    prune: bool = False,
    keep: int | None = None,
    on: str = "local",
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
        The cluster file whose store is looked through for the name, or is the recipe's.
    id
        The run's id, where a recipe is given and its run was started with --id.
    output
        Report as text or json.
    """
    from trainshed.checkpoints.native.folder import checkpoints_folder, list_checkpoints
    from trainshed.cli.console import print_report
    from trainshed.errors import InputError, NotFound
    from trainshed.storage import join

    if keep is not None and not prune:
        raise InputError("--keep says what --prune leaves", hint=f"write --prune --keep {keep}")
    store, run_folder = _run_folder(run, overrides, on, id)
    folder = checkpoints_folder(run_folder)
    there = list_checkpoints(store, folder)
    if not there.files and (foreign := _foreign(store, run_folder)) is not None:
        return _report_foreign(foreign, verify=verify, prune=prune, keep=keep, output=output)
    if not there.files:
        raise NotFound("this run has no checkpoints", where=join(store.url, folder), hint="check the run's folder")
    broken = _broken(store, there) if verify else {}
    removed = _prune(store, run_folder, there, broken, keep) if prune else []
    if prune:
        there = list_checkpoints(store, folder)
    rows = _rows(there, broken, verified=verify)
    data = {
        "schema": "trainshed.checkpoints/1",
        "run": join(store.url, run_folder),
        "latest": there.latest and there.latest.step,
        "best": _best(there),
        "checkpoints": rows,
        "removed": removed,
    }
    print_report(data, output, _text(data, rows, removed))
    return 1 if broken.keys() - set(removed) else 0


def _run_folder(run: str, overrides: Sequence[str], on: str, id: str | None) -> tuple[Store, str]:
    """The store and folder that hold a run's checkpoints."""
    from trainshed.cli.lookup import find_run
    from trainshed.launch.stored_run import read_run_recipe
    from trainshed.recipe import load_cluster, split_overrides
    from trainshed.storage import join, open_store, parse
    from trainshed.workflow import store_options

    options = store_options(load_cluster(on, split_overrides(overrides)[1]))
    known = find_run(run, on=on, overrides=overrides, id=id)
    home = known.home
    if home is not None:
        recipe = read_run_recipe(known.store())
        # Where `checkpoint.to` keeps them apart, they lie under the run's name and id all the same.
        if recipe is not None and recipe.checkpoint.to is not None:
            return open_store(parse(join(recipe.checkpoint.to, known.run)), options)
    return open_store(parse(home or known.address), known.options or options)


def _foreign(store: Store, run_folder: str) -> ForeignListing | None:
    """What another engine has saved: it writes to disks alone."""
    from trainshed.checkpoints.foreign import list_foreign
    from trainshed.storage import join, parse

    address = parse(join(store.url, run_folder))
    return list_foreign(Path(str(address))) if address.scheme == "file" else None


def _report_foreign(foreign: ForeignListing, *, verify: bool, prune: bool, keep: int | None, output: Output) -> int:
    from trainshed.checkpoints.foreign import find_damage, list_foreign, prune_foreign
    from trainshed.cli.console import print_report

    removed = prune_foreign(foreign, keep) if prune else []
    if prune:
        foreign = list_foreign(foreign.folder.parent) or foreign
    complete = [checkpoint for checkpoint in foreign.checkpoints if checkpoint.complete]
    broken = {checkpoint.step: damage for checkpoint in complete if verify and (damage := find_damage(checkpoint))}
    rows: list[dict[str, Any]] = [
        {
            "step": checkpoint.step,
            "path": str(checkpoint.path),
            "attempt": None,
            "bytes": checkpoint.bytes,
            "complete": checkpoint.complete,
            "latest": checkpoint.latest,
            "best": False,
            "verified": checkpoint.step not in broken if verify and checkpoint.complete else None,
            "problem": checkpoint.reason or broken.get(checkpoint.step),
        }
        for checkpoint in foreign.checkpoints
    ]
    data = {
        "schema": "trainshed.checkpoints/1",
        "run": str(foreign.folder.parent),
        "engine": foreign.engine,
        "latest": foreign.latest,
        "best": None,
        "checkpoints": rows,
        "removed": removed,
    }
    print_report(data, output, _text(data, rows, removed))
    return 1 if broken else 0


def _broken(store: Store, there: CheckpointListing) -> dict[int, str]:
    """Each committed checkpoint that is not what its manifest says, by step."""
    from trainshed.cli.console import reporter
    from trainshed.errors import CorruptData
    from trainshed.storage.manifest import MANIFEST

    broken = {
        checkpoint.step: checkpoint.reason
        for checkpoint in there.incomplete
        if MANIFEST in there.files[checkpoint.step]
    }
    for checkpoint in there.complete:
        try:
            checkpoint.manifest.verify_files(store, checkpoint.path, reporter=reporter())
        except CorruptData as error:
            broken[checkpoint.step] = error.what
    return broken


def _prune(
    store: Store, run_folder: str, there: CheckpointListing, broken: dict[int, str], keep: int | None
) -> list[int]:
    from trainshed.checkpoints.native.folder import checkpoints_folder, keep_newest, remove_checkpoint, remove_leftovers
    from trainshed.storage.attempts import newest_attempt

    folder = checkpoints_folder(run_folder)
    removed = set(broken) - {there.best_step}
    for step in removed:
        remove_checkpoint(store, folder, step, there)
    # No attempt is taken for this: it would fence the one that may be running. What that one writes is left alone.
    newest = newest_attempt(store, run_folder)
    removed |= set(keep_newest(store, folder, keep, check_fence=lambda: None))
    removed |= set(remove_leftovers(store, folder, newest, committed=None, check_fence=lambda: None))
    store.sweep(folder)
    return sorted(removed)


def _best(there: CheckpointListing) -> dict[str, Any] | None:
    best = there.best
    return None if best is None or best.step is None else {"step": best.step, "loss": best.loss}


def _rows(there: CheckpointListing, broken: dict[int, str], *, verified: bool) -> list[dict[str, Any]]:
    latest = there.latest and there.latest.step
    rows: list[dict[str, Any]] = [
        {
            "step": checkpoint.step,
            "path": checkpoint.path,
            "attempt": checkpoint.attempt,
            "bytes": checkpoint.manifest.total_bytes,
            "complete": True,
            "latest": checkpoint.step == latest,
            "best": checkpoint.step == there.best_step,
            "verified": checkpoint.step not in broken if verified else None,
            "problem": broken.get(checkpoint.step),
        }
        for checkpoint in there.complete
    ]
    rows += [
        {
            "step": checkpoint.step,
            "path": checkpoint.path,
            "attempt": checkpoint.attempt,
            "bytes": checkpoint.size,
            "complete": False,
            "latest": checkpoint.step == latest,
            "best": checkpoint.step == there.best_step,
            "verified": False if verified and checkpoint.step in broken else None,
            "problem": checkpoint.reason,
        }
        for checkpoint in there.incomplete
    ]
    return sorted(rows, key=lambda row: row["step"], reverse=True)


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
