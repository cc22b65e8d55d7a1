"""What is removed, and when: old checkpoints after a newer one is committed, and what attempts that died have left.

The manifest goes first: a prune that is killed leaves a folder without one, which is no checkpoint. Files are removed
by name and attempt, never a later attempt's; so also a zombie that passes its check and then sleeps removes nothing
but what its own commit had made superfluous. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from trainshed.checkpoints.native.folder import MANIFEST, METADATA, Listing, attempt_of, listing, step_folder
from trainshed.errors import InputError
from trainshed.storage import Store

_PARALLEL_DELETES = 8


def keep_newest(store: Store, folder: str, keep: int | None, *, check: Callable[[], None]) -> list[int]:
    """Remove all complete checkpoints but the newest `keep` (None: remove none); return the steps that went.

    `check` is asked before each and raises where this process may no longer remove anything.
    """
    if keep is None:
        return []
    if keep < 1:
        raise InputError(f"keep {keep}: the newest checkpoint is never removed", hint="keep 1 or more")
    there = listing(store, folder)
    gone = [found.step for found in there.complete[keep:]]
    for step in gone:
        check()
        remove_checkpoint(store, folder, step, there)
    return gone


def remove_checkpoint(store: Store, folder: str, step: int, there: Listing) -> None:
    """Remove one checkpoint, its manifest first."""
    path, names = step_folder(folder, step), there.files[step]
    store.delete(f"{path}/{MANIFEST}")
    _delete_all(store, (f"{path}/{name}" for name in names if name != MANIFEST))


def remove_leftovers(
    store: Store, folder: str, attempt: int, *, committed: int | None, check: Callable[[], None]
) -> list[int]:
    """Remove files that no manifest names and that nobody is writing any more; return the steps they were of.

    Those are files of attempts before `attempt`; and of `attempt` itself where it has just `committed` a step, since
    a rank has only one save under way.
    """
    there = listing(store, folder)
    newest_dead = attempt - 1 if committed is None else attempt
    complete = {found.step: {entry.path for entry in found.manifest.files} for found in there.complete}
    steps = []
    for step, names in there.files.items():
        if MANIFEST in names and step not in complete:
            continue  # it was committed and is broken: for a person to look at
        dead = {
            name
            for name in names
            if (number := attempt_of(name)) is not None and number <= newest_dead and name not in complete.get(step, ())
        }
        # `.metadata` does not tell its attempt. Behind the committed step nobody saves again; before it a later
        # attempt may, even now.
        if committed is not None and step < committed and names.keys() - dead == {METADATA}:
            dead.add(METADATA)
        if dead:
            check()
            _delete_all(store, (f"{step_folder(folder, step)}/{name}" for name in dead))
            steps.append(step)
    return steps


def _delete_all(store: Store, paths: Iterable[str]) -> None:
    with ThreadPoolExecutor(_PARALLEL_DELETES) as pool:
        for _ in pool.map(store.delete, paths):
            pass
