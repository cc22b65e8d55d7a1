"""Removing runs and artefacts: what refers to what, so that nothing goes that a run still needs.

A run refers to the artefacts that its small files name (`prepared.json`, the job's files, what is left for an engine),
to the index of its tokens, and to whatever those artefacts name in turn. A run is gone once its folder has another
name, an artefact once its manifest is: whoever is killed on the way leaves something that `clean` finds.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainshed.checkpoints.native.folder import BEST, LATEST, checkpoints_folder, list_checkpoints
from trainshed.data.tokens.token_source import RunTokens
from trainshed.errors import InputError, TrainshedError
from trainshed.file_locks import lock_file
from trainshed.launch.local import LocalRun, holder_attempt, holder_text, local_runs, run_holder
from trainshed.plugins import plugins_not_run
from trainshed.recipe import load_recipe
from trainshed.run_folder import PREPARED_FILE, RECIPE_FILE, WITHOUT_REFERENCES, artefacts_of, read_prepared, runs_in
from trainshed.storage import LocalStore, Store, StoreOptions, join
from trainshed.storage.attempts import newest_attempt_record
from trainshed.storage.locks import artefact_lock
from trainshed.storage.manifest import MANIFEST, Manifest
from trainshed.workflow.run_checkpoints import checkpoint_home

REMOVED_PREFIX = ".removed-"
_ARTEFACT = re.compile(r"artefacts/([\w-]+)/([0-9a-f]{16,})")
_MANIFEST = re.compile(r"(.+\.)?manifest\.json")
_INDEX = "index"
_PARTIAL = ".partial"
_LARGEST_READ = 4 << 20


@dataclass(frozen=True)
class Removal:
    """One thing to remove: how much it is, and why it may go."""

    path: str
    kind: Literal["run", "checkpoints", "artefact", "leftover"]
    files: int
    bytes: int
    why: str = ""


@dataclass(frozen=True)
class RunRemoval:
    """What goes with a run: its folder, and its checkpoints where they are kept apart."""

    run: LocalRun
    parts: list[Removal]
    apart: tuple[Store, str] | None = field(default=None, repr=False)

    def remove(self) -> None:
        """Remove it. The folder is renamed first, so that a half-removed run is not taken for one."""
        gone = self.run.folder.with_name(f"{REMOVED_PREFIX}{self.run.id}-{uuid.uuid4().hex[:8]}")
        self.run.folder.replace(gone)
        if self.apart is not None:
            store, folder = self.apart
            # `latest` first, and manifests before what they list: half of it is not a checkpoint.
            paths = sorted((info.path for info in store.list(folder)), key=_removal_order)
            for path in paths:
                store.delete(path)
            store.sweep(folder)
        shutil.rmtree(gone)
        if not any(self.run.folder.parent.iterdir()):
            self.run.folder.parent.rmdir()


def plan_removal(run: LocalRun, store: Path, options: StoreOptions | None = None) -> RunRemoval:
    """Say what goes with a run; refuses one that is running, or that another run refers to."""
    held = run_holder(run.folder)
    if held is not None:
        raise InputError(
            f"{run.run} is running: {holder_text(run.folder, held)}",
            where=str(run.folder),
            hint=f"`trainshed cancel {run.run}` stops it after a checkpoint",
        )
    users = [other.run for other in local_runs(store) if other.run != run.run and _refers_to(other, run.folder)]
    if users:
        raise InputError(
            f"{run.run} is what {', '.join(users)} began from or reads",
            where=str(run.folder),
            hint=f"remove {'that one' if len(users) == 1 else 'those'} first, or copy what it needs elsewhere",
        )
    with plugins_not_run():
        apart = checkpoint_home(load_recipe(str(run.folder / RECIPE_FILE)), run.id, options)
    best = _best_words(*(apart or (LocalStore(run.folder), "")))
    parts = [_measure(run.folder, "run", "" if apart is not None else best)]
    if apart is not None:
        infos = list(apart[0].list(apart[1]))
        if infos:
            size = sum(info.size for info in infos)
            parts.append(Removal(join(apart[0].url, apart[1]), "checkpoints", len(infos), size, best))
    return RunRemoval(run, parts, apart)


def _best_words(store: Store, folder: str) -> str:
    """Say which checkpoint a run keeps as its best, for a person who is about to remove it; empty where none is."""
    try:
        best = list_checkpoints(store, checkpoints_folder(folder)).best
    except TrainshedError:  # a pointer that cannot be read keeps nobody from removing the run
        return ""
    if best is None or best.step is None:
        return ""
    return f"with its best checkpoint: step {best.step:,}, validation loss {best.loss:.4f}"


def find_unneeded(store: Path, options: StoreOptions | None = None) -> list[Removal]:
    """List what nothing in a store refers to: artefacts without a run, and what killed processes left half made."""
    runs = local_runs(store)
    needed = _needed(store, runs, options)
    leftovers = [
        _measure(folder, "leftover", "a run that was being removed")
        for folder in runs_in(store, f"*/{REMOVED_PREFIX}*")
    ]
    for folder in sorted(artefacts_of(store).glob("*/*")):
        if folder.is_symlink() or not folder.is_dir() or _is_being_made(folder):
            continue
        if folder.name.endswith(_PARTIAL):
            leftovers.append(_measure(folder, "leftover", "half made"))
        elif not _manifests(folder):
            leftovers.append(_measure(folder, "leftover", "half made: it has no manifest"))
        elif (folder.parent.name, folder.name) not in needed:
            leftovers.append(_measure(folder, "artefact", "no run refers to it"))
    return leftovers


def remove_unneeded(store: Path, planned: list[Removal], options: StoreOptions | None = None) -> list[Removal]:
    """Remove what `find_unneeded` listed and what is still unneeded; returns what was removed."""
    _refuse_unprepared(store)
    still = {artefact.path for artefact in find_unneeded(store, options)}
    removed = []
    for artefact in planned:
        if artefact.path in still:
            _refuse_unprepared(store)  # a run that has begun meanwhile may have found it
            _remove(Path(artefact.path))
            removed.append(artefact)
    return removed


def _remove(folder: Path) -> None:
    """Remove an artefact's folder, its manifest first: what is left of it when somebody is killed does not exist."""
    artefact = folder.with_name(folder.name.removesuffix(_PARTIAL))
    has_makers = artefact.with_name(f"{artefact.name}.lock").exists()
    with artefact_lock(artefact) if has_makers else nullcontext():
        for manifest in _manifests(folder):
            manifest.unlink()
        shutil.rmtree(folder)


def _refuse_unprepared(store: Path) -> None:
    """Stop where it is not known what a run refers to, or where it is about to change."""
    for folder in runs_in(store):
        run = LocalRun.from_folder(folder)
        held = run_holder(folder)
        if held is not None and holder_attempt(folder, held) is None:
            raise InputError(
                f"{run.run} is being prepared, and what it will refer to is not known yet",
                where=str(folder),
                hint="wait until it trains, then write this again",
            )
        is_known = (folder / PREPARED_FILE).is_file() or newest_attempt_record(LocalStore(folder), "") is not None
        if (folder / RECIPE_FILE).is_file() and not is_known and not run.id.startswith(REMOVED_PREFIX):
            raise InputError(
                f"{run.run} was never prepared to its end, and what it refers to is not known",
                where=str(folder),
                hint=f"let its `run` finish, or `trainshed rm {run.run}`",
            )


def _needed(store: Path, runs: list[LocalRun], options: StoreOptions | None) -> set[tuple[str, str]]:
    """The artefacts that runs refer to, by kind and name."""
    needed = {artefact for run in runs for text in _small_files(run.folder) for artefact in _ARTEFACT.findall(text)}
    waiting = list(needed)
    while waiting:
        kind, name = waiting.pop()
        folder = artefacts_of(store) / kind / name
        for text in _texts(folder.glob("*.json")):
            new = set(_ARTEFACT.findall(text)) - needed
            needed |= new
            waiting += new
    contents = {content for run in runs for content in _index_contents(run, options)}
    for index in (artefacts_of(store) / _INDEX).glob("*/manifest.json"):
        if None in contents or _spec(index).get("content") in contents:
            needed.add((_INDEX, index.parent.name))
    return needed


def _small_files(run: Path) -> Iterator[str]:
    """What the files of a run say that may name an artefact, and where its links lead."""
    for folder, names, files in os.walk(run):
        names[:] = [name for name in names if not (Path(folder) == run and name in WITHOUT_REFERENCES)]
        yield from (os.readlink(path) for name in (*names, *files) if (path := Path(folder) / name).is_symlink())
        yield from _texts(Path(folder) / name for name in files)


def _texts(files: Iterator[Path]) -> Iterator[str]:
    for file in files:
        if file.is_file() and file.stat().st_size <= _LARGEST_READ:
            yield file.read_bytes().decode(errors="replace")


def _index_contents(run: LocalRun, options: StoreOptions | None) -> Iterator[str | None]:
    """What the indexes of a run are made of; None where that is not known, and every index must stay."""
    if (prepared := _prepared(run)) is None:
        return
    data = RunTokens.from_plain(prepared["data"])
    for source in data.all_sources:
        try:
            yield source.content_hash(options)
        except (TrainshedError, OSError):
            yield None


def _prepared(run: LocalRun) -> dict[str, Any] | None:
    file = run.folder / PREPARED_FILE
    return read_prepared(file.read_bytes(), file) if file.is_file() else None


def _refers_to(run: LocalRun, folder: Path) -> bool:
    """Whether a run's recipe or base weights name a place inside another run's folder."""
    inside = re.compile(re.escape("/".join(folder.absolute().parts[-3:])) + r"(?![\w.-])")
    if any(inside.search(text) for text in _small_files(run.folder)):
        return True
    if (prepared := _prepared(run)) is None:
        return False
    base = prepared["base"]
    manifest = Path(base) / MANIFEST if base else None
    return manifest is not None and manifest.is_file() and bool(inside.search(manifest.read_text(encoding="utf-8")))


def _removal_order(path: str) -> tuple[bool, bool, str]:
    name = path.rpartition("/")[2]
    return name not in (LATEST, BEST), _MANIFEST.fullmatch(name) is None, path


def _measure(folder: Path, kind: Literal["run", "artefact", "leftover"], why: str = "") -> Removal:
    sizes = [
        path.lstat().st_size for place, _, files in os.walk(folder) for name in files if (path := Path(place) / name)
    ]
    return Removal(str(folder), kind, len(sizes), sum(sizes), why)


def _manifests(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*.json") if _MANIFEST.fullmatch(file.name)]


def _spec(manifest: Path) -> Mapping[str, Any]:
    return Manifest.from_bytes(manifest.read_bytes(), str(manifest)).spec


def _is_being_made(folder: Path) -> bool:
    """Whether somebody has the lock of an artefact (`artefact_lock`), or of a shard of tokens in it."""
    lock = folder.with_name(f"{folder.name.removesuffix(_PARTIAL)}.lock")
    for file in (lock, *folder.glob(f"*{_PARTIAL}")):
        try:
            with file.open("rb") as opened:
                lock_file(opened, wait=False)
        except (FileNotFoundError, IsADirectoryError):
            continue
        except BlockingIOError:
            return True
    return False
