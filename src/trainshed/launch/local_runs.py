"""Runs that lie in a store this machine can see, by their folders alone: which there are, and how each stands.

<store>/runs/<name>/<id>/       a run, once its recipe.yaml is there
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainshed.launch.run_lock import attempt_of, holder
from trainshed.observe.rank_error import health_folder
from trainshed.observe.standing import Standing, standing
from trainshed.storage import LocalStore
from trainshed.storage.attempts import newest_record
from trainshed.storage.lock_holder import LockHolder

RECIPE = "recipe.yaml"
LocalState = Literal["running", "done", "stopped", "failed", "unknown"]


@dataclass(frozen=True)
class LocalRun:
    """A run by its folder."""

    name: str
    id: str
    folder: Path

    @classmethod
    def at(cls, folder: Path) -> LocalRun:
        """The run of a folder, which says its name and id."""
        there = folder.absolute()
        return cls(there.parent.name, there.name, folder)

    @property
    def run(self) -> str:
        """Name and id, as people write them."""
        return f"{self.name}/{self.id}"

    @property
    def changed(self) -> float:
        """When it was last begun or trained on, in seconds since 1970."""
        parts = (self.folder / part for part in ("", RECIPE, "attempts", "checkpoints", "events"))
        return max((part.stat().st_mtime for part in parts if part.exists()), default=0.0)


@dataclass(frozen=True)
class LocalAccount:
    """How a run stands by its own folder: `reason` is why, in a sentence without what `progress` says."""

    state: LocalState
    reason: str
    progress: Standing
    holder: LockHolder | None = None


def local_runs(store: Path) -> list[LocalRun]:
    """Return the runs of a store, the newest first."""
    found = [LocalRun.at(recipe.parent) for recipe in (store / "runs").glob(f"*/*/{RECIPE}")]
    return sorted((run for run in found if not run.id.startswith(".")), key=lambda run: run.changed, reverse=True)


def account_of(run: Path, steps: int | None = None) -> LocalAccount:
    """Say how a run stands; `steps` is how many it is to have."""
    held = holder(run)
    progress = standing(LocalStore(run), "", steps)
    newest = newest_record(LocalStore(run), "")
    if held is not None:
        attempt = attempt_of(run, held)
        what = "before its first attempt" if attempt is None else f"attempt {attempt}"
        return LocalAccount("running", f"{what}, {held.words()}", progress, held)
    progress = replace(progress, eta_seconds=None)
    if newest is None:
        prepared = (run / "prepared.json").is_file()
        what = "prepared, and not trained yet" if prepared else "its preparation has not finished"
        return LocalAccount("stopped", what, progress)
    number, host = newest["attempt"], newest["host"]
    ended = progress.ended if progress.attempt == number else None
    if ended == "finished":
        return LocalAccount("done", "", progress)
    if ended == "signal":
        return LocalAccount("stopped", f"attempt {number} was asked to stop", progress)
    if ended is not None:
        return LocalAccount("failed", f"attempt {number} failed", progress)
    if host != socket.gethostname() or (health_folder(run, number) / "hosts.json").is_file():
        what = f"attempt {number} was begun on {host}, and whether it still runs cannot be seen from here"
        return LocalAccount("unknown", what, progress)
    return LocalAccount("failed", f"attempt {number} was killed: it ended without a word", progress)
