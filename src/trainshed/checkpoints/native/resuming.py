"""Where a run goes on: the checkpoint that `latest` names, settled against attempts that are still dying.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainshed.checkpoints.native.folder import (
    LATEST,
    MANIFEST,
    Found,
    Latest,
    Listing,
    checkpoints_folder,
    listing,
    open_checkpoint,
    recency,
)
from trainshed.errors import Conflict, NotFound
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import Store, join
from trainshed.storage.attempts import Attempt


def latest_complete(
    store: Store, folder: str, *, attempt: Attempt | None = None, reporter: Reporter = SILENT
) -> Found | None:
    """Return the checkpoint to go on from: what `latest` names, or the newest complete one.

    With `attempt` the answer is also settled: `latest` is written anew in its name, so that an earlier attempt which
    is in the middle of its own commit can no longer move it. Ask so before training, and without `attempt` to look.
    """
    pointer = f"{folder}/{LATEST}"
    while True:
        before = store.head(pointer)
        choice = _resume_point(listing(store, folder))
        if attempt is None:
            break
        claim = Latest.to(choice.found, attempt)
        try:
            attempt.put_over(before, pointer, claim.to_bytes())
            break
        except Conflict:  # an earlier attempt's commit came first: look again
            continue
    if choice.warning:
        reporter.warn(choice.warning)
    if choice.note:
        reporter.note(choice.note)
    return choice.found


def locate(store: Store, path: str, reporter: Reporter = SILENT) -> Found:
    """Find the checkpoint an address means: a step's folder, or of a run (or its checkpoints folder) the latest."""
    path = path.strip("/")
    if path.rpartition("/")[2].startswith("step-") and store.head(f"{path}/{MANIFEST}") is not None:
        return open_checkpoint(store, path)
    for folder in (checkpoints_folder(path), path):
        found = latest_complete(store, folder, reporter=reporter) if folder else None
        if found is not None:
            return found
    raise NotFound(
        "there is no complete checkpoint",
        where=join(store.url, path),
        hint="name a run's folder or one of its checkpoints/step-… folders; `trainshed checkpoints RUN` lists them",
    )


@dataclass(frozen=True)
class _Choice:
    found: Found | None
    warning: str | None = None
    note: str | None = None


def _resume_point(there: Listing) -> _Choice:
    pointer = there.latest
    if pointer is None or pointer.step is None:
        return _Choice(there.complete[0] if there.complete else None)
    named = next((found for found in there.complete if found.step == pointer.step), None)
    if named is None:
        newest = there.complete[0] if there.complete else None
        why = next((each.why for each in there.incomplete if each.step == pointer.step), "it is not there")
        instead = f"going on from step {newest.step}" if newest else "there is no other to go on from"
        return _Choice(newest, warning=f"`latest` names step {pointer.step}, which is not complete ({why}); {instead}")
    # The owner of the run was stopped between its manifest and `latest`. An earlier attempt's manifest does not count.
    beyond = [found for found in there.complete if found.attempt >= pointer.written_by]
    newest = max([*beyond, named], key=recency)
    if newest == named:
        return _Choice(named)
    note = f"step {newest.step} is complete, though `latest` still names step {named.step}: going on from the newer"
    return _Choice(newest, note=note)
