"""The checkpoints of a run, of any engine: listed, proven, pruned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainshed.errors import InputError, NotFound
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import CHECKPOINTS, step_number
from trainshed.storage import LocalStore, Store, StoreOptions, join, open_folder, open_store, parse

if TYPE_CHECKING:
    from trainshed.checkpoints.foreign import ForeignListing
    from trainshed.checkpoints.native.folder import CheckpointListing
    from trainshed.recipe import Recipe
    from trainshed.workflow.known_runs import KnownRun


def checkpoint_home(recipe: Recipe, id: str, options: StoreOptions | None = None) -> tuple[Store, str] | None:
    """Return where a run's checkpoints are kept apart from it, as store and folder; None: in its own folder."""
    if recipe.checkpoint.to is None:
        return None
    store, path = open_store(parse(recipe.checkpoint.to), options)
    return store, f"{path}/{recipe.name}/{id}".lstrip("/")


def refuse_other_checkpoints(recipe: Recipe, run: Path, options: StoreOptions | None = None) -> None:
    """Refuse a run whose checkpoints this start would not find: another engine's, or those of another `checkpoint.to`.

    Neither is part of a run's id, so the run would begin again at step 0 and nothing would say so.
    """
    if recipe.checkpoint.resume == "fresh":
        return
    _refuse_other_engine(recipe, run)
    if recipe.engine.name == "torch":
        _refuse_other_home(recipe, run, options)


def _refuse_other_engine(recipe: Recipe, run: Path) -> None:
    from trainshed.checkpoints.foreign import list_foreign

    listing, wrote = list_foreign(run), None
    if listing is not None:
        wrote = "nemo" if listing.engine == "megatron-bridge" else listing.engine
    elif any(step_number(folder.name) is not None for folder in (run / CHECKPOINTS).glob("*")):
        wrote = "torch"
    if wrote is not None and wrote != recipe.engine.name:
        raise InputError(
            f"the checkpoints of this run are of the engine {wrote}, and {recipe.engine.name} would begin at step 0",
            where=recipe.where("engine"),
            hint=f"`--id NAME` starts another run; `engine: {wrote}` goes on with this one",
        )


def _refuse_other_home(recipe: Recipe, run: Path, options: StoreOptions | None) -> None:
    """Hold `checkpoint.to` against that of the run's last start; whoever has moved the checkpoints may go on."""
    from trainshed.checkpoints.native.folder import checkpoints_folder, latest_complete
    from trainshed.observe.run_facts import read_run_recipe

    before = read_run_recipe(LocalStore(run), "")
    if before is None or before.checkpoint.to == recipe.checkpoint.to:
        return
    own_folder = (LocalStore(run), "")
    old_store, old_folder = checkpoint_home(before, run.name, options) or own_folder
    last = latest_complete(old_store, checkpoints_folder(old_folder))
    if last is None:
        return
    store, folder = checkpoint_home(recipe, run.name, options) or own_folder
    here = latest_complete(store, checkpoints_folder(folder))
    if here is not None and here.step >= last.step:
        return
    there = join(old_store.url, old_folder)
    begins = "there is none" if here is None else f"the last is of step {here.step:,}"
    keeps = f"`checkpoint.to: {before.checkpoint.to}`" if before.checkpoint.to else "no `checkpoint.to`"
    raise InputError(
        f"the checkpoints of {recipe.name}/{run.name} are in {there}, up to step {last.step:,}, and in "
        f"{join(store.url, folder)} {begins}: it would begin again there",
        where=recipe.where("checkpoint.to"),
        hint=f"write {keeps} to go on; or copy them there first; `--id NAME` starts another run",
    )


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint of a run."""

    step: int
    path: str
    """Of our own engine: in the store of the run's checkpoints; of another engine: its folder."""
    attempt: int | None
    """The attempt that wrote it; None where nothing says."""
    bytes: int
    complete: bool
    latest: bool
    """Whether the run would go on from it."""
    best: bool
    """Whether it has the lowest validation loss, where `checkpoint.best` keeps that one."""
    verified: bool | None
    """Whether its bytes are those of its manifest; None where nobody has looked."""
    problem: str | None
    """Why it is not complete, or what is broken."""


@dataclass(frozen=True)
class RunCheckpoints:
    """The checkpoints of a run, newest first, and what was removed."""

    address: str
    """The run's folder, or where `checkpoint.to` keeps them."""
    latest: int | None
    best_step: int | None
    best_loss: float | None
    checkpoints: tuple[StoredCheckpoint, ...]
    removed: tuple[int, ...] = ()
    engine: str | None = None
    """The engine that wrote them; None: ours."""

    @property
    def broken(self) -> tuple[int, ...]:
        """The steps that are not what they should be and were not removed."""
        return tuple(
            entry.step for entry in self.checkpoints if entry.verified is False and entry.step not in self.removed
        )


def run_checkpoints(
    known: KnownRun,
    options: StoreOptions | None = None,
    *,
    verify: bool = False,
    prune: bool = False,
    keep: int | None = None,
    reporter: Reporter = SILENT,
) -> RunCheckpoints:
    """List a run's checkpoints; with `verify` read every byte, with `prune` remove old, broken and unfinished ones.

    Raises `NotFound` where there are none.
    """
    from trainshed.checkpoints.native.folder import checkpoints_folder, list_checkpoints

    store, run_folder = _checkpoint_folder(known, options)
    folder = checkpoints_folder(run_folder)
    there = list_checkpoints(store, folder)
    if not there.files and (foreign := _foreign(store, run_folder)) is not None:
        return _foreign_checkpoints(foreign, verify=verify, prune=prune, keep=keep)
    if not there.files and (mirrored := _mirrored_checkpoints(known, options)) is not None:
        return mirrored
    if not there.files:
        raise NotFound("this run has no checkpoints", where=join(store.url, folder), hint="check the run's folder")
    broken = _broken(store, there, reporter) if verify else {}
    removed = _prune(store, run_folder, there, broken, keep) if prune else []
    if prune:
        there = list_checkpoints(store, folder)
    best = there.best
    return RunCheckpoints(
        address=join(store.url, run_folder),
        latest=None if there.latest is None else there.latest.step,
        best_step=None if best is None else best.step,
        best_loss=None if best is None else best.loss,
        checkpoints=_stored(there, broken, verified=verify),
        removed=tuple(removed),
    )


def _checkpoint_folder(known: KnownRun, options: StoreOptions | None) -> tuple[Store, str]:
    """The store and folder that hold a run's checkpoints."""
    recipe = _recipe(known)
    # Where `checkpoint.to` keeps them apart, they lie under the run's name and id all the same. Another engine writes
    # into the run's folder, and the bucket has copies.
    if recipe is not None and recipe.checkpoint.to is not None and recipe.engine.name == "torch":
        return open_store(parse(join(recipe.checkpoint.to, known.run)), options)
    return open_store(parse(known.home or known.address), known.options or options)


def _recipe(known: KnownRun) -> Recipe | None:
    from trainshed.observe.run_facts import read_run_recipe

    return None if known.home is None else read_run_recipe(known.store(), "")


def _mirrored_checkpoints(known: KnownRun, options: StoreOptions | None) -> RunCheckpoints | None:
    """The copies of another engine's checkpoints in a bucket, for a run whose folder has none."""
    from trainshed.checkpoints.mirror import mirrored_checkpoints

    recipe = _recipe(known)
    if recipe is None or recipe.checkpoint.to is None or recipe.engine.name == "torch":
        return None
    address = join(recipe.checkpoint.to, known.run)
    copies = sorted(mirrored_checkpoints(open_folder(address, options)), key=lambda copy: copy.step, reverse=True)
    if not copies:
        return None
    latest = next((copy.step for copy in copies if copy.resumable), None)
    return RunCheckpoints(
        address=address,
        engine=recipe.engine.name,
        latest=latest,
        best_step=None,
        best_loss=None,
        checkpoints=tuple(
            StoredCheckpoint(
                step=copy.step,
                path=join(address, f"{copy.folder}/{copy.name}"),
                attempt=None,
                bytes=copy.bytes,
                complete=True,
                latest=copy.step == latest,
                best=False,
                verified=None,
                problem=None,
            )
            for copy in copies
        ),
    )


def _foreign(store: Store, run_folder: str) -> ForeignListing | None:
    """What another engine has saved: it writes to disks alone."""
    from trainshed.checkpoints.foreign import list_foreign

    address = parse(join(store.url, run_folder))
    return list_foreign(Path(str(address))) if address.scheme == "file" else None


def _foreign_checkpoints(foreign: ForeignListing, *, verify: bool, prune: bool, keep: int | None) -> RunCheckpoints:
    from trainshed.checkpoints.foreign import find_damage, list_foreign, prune_foreign

    removed = prune_foreign(foreign, keep) if prune else []
    if prune:
        foreign = list_foreign(foreign.folder.parent) or foreign
    complete = [checkpoint for checkpoint in foreign.checkpoints if checkpoint.complete]
    broken = {checkpoint.step: damage for checkpoint in complete if verify and (damage := find_damage(checkpoint))}
    return RunCheckpoints(
        address=str(foreign.folder.parent),
        engine=foreign.engine,
        latest=foreign.latest,
        best_step=None,
        best_loss=None,
        checkpoints=tuple(
            StoredCheckpoint(
                step=checkpoint.step,
                path=str(checkpoint.path),
                attempt=None,
                bytes=checkpoint.bytes,
                complete=checkpoint.complete,
                latest=checkpoint.latest,
                best=False,
                verified=checkpoint.step not in broken if verify and checkpoint.complete else None,
                problem=checkpoint.reason or broken.get(checkpoint.step),
            )
            for checkpoint in foreign.checkpoints
        ),
        removed=tuple(removed),
    )


def _broken(store: Store, there: CheckpointListing, reporter: Reporter) -> dict[int, str]:
    """Each committed checkpoint that is not what its manifest says, by step."""
    from trainshed.errors import CorruptData
    from trainshed.storage.manifest import MANIFEST

    broken = {
        checkpoint.step: checkpoint.reason
        for checkpoint in there.incomplete
        if MANIFEST in there.files[checkpoint.step]
    }
    for checkpoint in there.complete:
        try:
            checkpoint.manifest.verify_files(store, checkpoint.path, reporter=reporter)
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


def _stored(there: CheckpointListing, broken: dict[int, str], *, verified: bool) -> tuple[StoredCheckpoint, ...]:
    latest = there.latest and there.latest.step
    complete = [
        StoredCheckpoint(
            step=checkpoint.step,
            path=checkpoint.path,
            attempt=checkpoint.attempt,
            bytes=checkpoint.manifest.total_bytes,
            complete=True,
            latest=checkpoint.step == latest,
            best=checkpoint.step == there.best_step,
            verified=checkpoint.step not in broken if verified else None,
            problem=broken.get(checkpoint.step),
        )
        for checkpoint in there.complete
    ]
    incomplete = [
        StoredCheckpoint(
            step=checkpoint.step,
            path=checkpoint.path,
            attempt=checkpoint.attempt,
            bytes=checkpoint.size,
            complete=False,
            latest=checkpoint.step == latest,
            best=checkpoint.step == there.best_step,
            verified=False if verified and checkpoint.step in broken else None,
            problem=checkpoint.reason,
        )
        for checkpoint in there.incomplete
    ]
    return tuple(sorted([*complete, *incomplete], key=lambda entry: entry.step, reverse=True))
