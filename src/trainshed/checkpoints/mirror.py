"""Checkpoints of a foreign engine in a bucket: what is committed is uploaded, and fetched before a run goes on.

A foreign engine writes its checkpoints into the run's folder, where every node sees them. `checkpoint.to` names a
bucket that they are copied to, by our own code: beside training where pods have a container for it
(`follow_checkpoints`), and by a stage on CPUs after it:

    <to>/<name>/<id>/checkpoints-megatron/iter_0000100/…               the files, as the engine wrote them
    <to>/<name>/<id>/checkpoints-megatron/iter_0000100.manifest.json   written last: without it there is no checkpoint
    <to>/<name>/<id>/checkpoints-megatron/latest_checkpointed_iteration.txt
    <to>/<name>/<id>/checkpoints/…                                     of Megatron-Bridge and NeMo 24.07

A copy that is interrupted goes on where it was (`storage/copy.py`), and a checkpoint that is there is not sent again.
The manifest has the checksum of every file, made on the way to the bucket; what is fetched must have the same ones. A
checkpoint that is removed while it is copied gets no manifest.

No torch here.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainshed.checkpoints.foreign import BRIDGE_LATEST, BRIDGE_STATE, ForeignCheckpoint, list_foreign
from trainshed.checkpoints.megatron.retention import LATEST_ITERATION
from trainshed.errors import AccessDenied, CorruptData, NotFound, StorageError
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import CHECKPOINTS, MEGATRON_CHECKPOINTS
from trainshed.storage import LocalStore, Store, StoreOptions, copy_tree, join, list_folders, open_folder
from trainshed.storage.copy import COPY_MANIFEST
from trainshed.storage.listing import STATE_FOLDER
from trainshed.storage.manifest import FileEntry, Manifest

MIRROR_SCHEMA = "trainshed.mirrored-checkpoint/2"
FOLLOW_SECONDS = 30.0
"""How often a training's folder is looked at for new checkpoints."""
_MANIFEST = ".manifest.json"
_FOLDERS = (MEGATRON_CHECKPOINTS, CHECKPOINTS)
_ITERATION = re.compile(r"iter_(\d+)")


@dataclass(frozen=True)
class MirroredCheckpoint:
    """A checkpoint that is whole in the bucket."""

    folder: str
    """Of the engine's checkpoints, below the run's own folder."""
    name: str
    step: int
    bytes: int
    is_file: bool = False
    checksums: dict[str, str] = field(default_factory=dict, compare=False)
    """By the path of each file below the checkpoint."""


def upload_checkpoints(
    run: Path,
    address: str,
    *,
    keep: int | None = None,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> list[int]:
    """Copy every complete checkpoint of a run that the bucket lacks; returns their steps, oldest first.

    The newest `keep` stay in the bucket (None: all).
    """
    listing = list_foreign(run)
    if listing is None:
        return []
    bucket, folder = open_folder(address, options), listing.folder.name
    there = {mirrored.name: mirrored.step for mirrored in mirrored_checkpoints(bucket) if mirrored.folder == folder}
    kept = [checkpoint for checkpoint in listing.checkpoints if checkpoint.complete][:keep]
    sent = [
        checkpoint.step
        for checkpoint in kept  # the newest first: a run goes on from it
        if checkpoint.path.name not in there and _upload(run, checkpoint, bucket, address, folder, options, reporter)
    ]
    if sent:
        names = there | {checkpoint.path.name: checkpoint.step for checkpoint in kept if checkpoint.step in sent}
        _name_latest(bucket, folder, max(names, key=lambda name: names[name]))
    _remove_old(bucket, folder, keep)
    return sorted(sent)


def follow_checkpoints(
    run: Path,
    address: str,
    is_stopping: Callable[[], bool],
    *,
    keep: int | None = None,
    every_seconds: float = FOLLOW_SECONDS,
    options: StoreOptions | None = None,
    reporter: Reporter = SILENT,
) -> None:
    """Copy checkpoints to the bucket as a training commits them, until somebody asks for a stop.

    A bucket that does not answer is tried again: training does not end because of it. The bucket is asked only when
    the run's folder has something new.
    """
    proven: list[tuple[int, int]] = []
    while not is_stopping():
        listing = list_foreign(run)
        # With their bytes: one that has grown while it was copied is copied again.
        there = [] if listing is None else [(row.step, row.bytes) for row in listing.checkpoints if row.complete]
        if there != proven:
            try:
                for step in upload_checkpoints(run, address, keep=keep, options=options, reporter=reporter):
                    reporter.note(f"the checkpoint of step {step} is in {address}")
                proven = there
            except AccessDenied:
                raise  # no wait changes it
            except StorageError as error:
                reporter.warn(f"{error.what}; tried again in {every_seconds:g} s")
        end = time.monotonic() + every_seconds
        while time.monotonic() < end and not is_stopping():
            time.sleep(min(0.5, every_seconds))


def fetch_checkpoints(
    run: Path, address: str, *, options: StoreOptions | None = None, reporter: Reporter = SILENT
) -> int | None:
    """Copy the newest checkpoint of the bucket into a run's folder that has none; returns its step, None if none is.

    What makes the engine find it (`latest_checkpointed_iteration.txt`, `latest_train_state.pt`) is written last.
    """
    listing = list_foreign(run)
    if listing is not None and any(checkpoint.complete for checkpoint in listing.checkpoints):
        return None
    newest = max(mirrored_checkpoints(open_folder(address, options)), key=lambda mirrored: mirrored.step, default=None)
    if newest is None:
        return None
    target = run / newest.folder / newest.name
    partial = target.with_name(f".{newest.name}.partial")
    source = join(address, f"{newest.folder}/{newest.name}")
    copy_tree(source, str(partial), options=options, reporter=reporter)
    arrived = Manifest.read(LocalStore(partial), COPY_MANIFEST).files
    if (damage := _difference(newest, arrived)) is not None:
        shutil.rmtree(partial)  # the bucket may be mended
        raise CorruptData(
            f"{newest.name}: {damage}",
            where=source,
            hint=f"delete {source}{_MANIFEST}, and the checkpoint before it is taken",
        )
    shutil.rmtree(partial / STATE_FOLDER)  # the copy's own records
    if newest.is_file:
        (partial / newest.name).replace(target)
        shutil.rmtree(partial)
    else:
        shutil.rmtree(target, ignore_errors=True)
        partial.replace(target)
    _name_latest(LocalStore(run), newest.folder, newest.name)
    return newest.step


def mirrored_checkpoints(bucket: Store) -> Iterator[MirroredCheckpoint]:
    """Yield the checkpoints that are whole in a bucket."""
    for folder in _FOLDERS:
        for info in bucket.list(folder):
            name = info.path.rsplit("/", 1)[-1]
            if info.path == f"{folder}/{name}" and name.endswith(_MANIFEST):
                body = json.loads(bucket.read(info.path))
                yield MirroredCheckpoint(
                    folder,
                    name.removesuffix(_MANIFEST),
                    body["step"],
                    body["bytes"],
                    is_file=bool(body.get("is_file")),
                    checksums=body.get("files", {}),
                )


def _name_latest(store: Store, folder: str, name: str) -> None:
    """Write the files that make the engine go on from a checkpoint; NeMo 24.07 goes by the names alone."""
    iteration = _ITERATION.fullmatch(name)
    if iteration is None:
        return
    if store.head(f"{folder}/{name}/{BRIDGE_STATE}") is not None:
        store.put(f"{folder}/{BRIDGE_LATEST}", store.read(f"{folder}/{name}/{BRIDGE_STATE}"))
    store.put(f"{folder}/{LATEST_ITERATION}", str(int(iteration[1])).encode())


def _upload(
    run: Path,
    checkpoint: ForeignCheckpoint,
    bucket: Store,
    address: str,
    folder: str,
    options: StoreOptions | None,
    reporter: Reporter,
) -> bool:
    """Copy a checkpoint and commit it; False where it was removed or written anew meanwhile."""
    name = checkpoint.path.name
    target = join(address, f"{folder}/{name}")
    is_file = checkpoint.path.is_file()
    try:
        copy_tree(str(checkpoint.path), target, options=options, reporter=reporter)
    except NotFound:
        if _is_still(run, checkpoint):
            raise
        return False
    files = Manifest.read(open_folder(target, options), COPY_MANIFEST).files
    if sum(entry.size for entry in files) != checkpoint.bytes or not _is_still(run, checkpoint):
        return False
    manifest = {
        "schema": MIRROR_SCHEMA,
        "step": checkpoint.step,
        "bytes": checkpoint.bytes,
        "is_file": is_file,
        "files": {entry.path: entry.checksum for entry in files},
    }
    bucket.put(f"{folder}/{name}{_MANIFEST}", json.dumps(manifest, indent=1).encode() + b"\n")
    return True


def _is_still(run: Path, checkpoint: ForeignCheckpoint) -> bool:
    """Whether a checkpoint is there as it was; a removal takes first what makes it complete."""
    listing = list_foreign(run)
    rows = () if listing is None else listing.checkpoints
    return any((row.path, row.bytes, row.complete) == (checkpoint.path, checkpoint.bytes, True) for row in rows)


def _difference(mirrored: MirroredCheckpoint, arrived: tuple[FileEntry, ...]) -> str | None:
    """Return how files that were fetched differ from those that were committed, None if they do not."""
    size = sum(entry.size for entry in arrived)
    if size != mirrored.bytes:
        return f"it has {size} bytes, and its manifest says {mirrored.bytes}"
    got = {entry.path: entry.checksum for entry in arrived}
    for path, checksum in sorted(mirrored.checksums.items()):
        if got.get(path) != checksum:
            return f"{path} does not have the checksum of its manifest" if path in got else f"{path} is missing"
    return None


def _remove_old(bucket: Store, folder: str, keep: int | None) -> None:
    """Remove all but the newest `keep`, the manifest first: what an interruption leaves is not a checkpoint."""
    here = (checkpoint for checkpoint in mirrored_checkpoints(bucket) if checkpoint.folder == folder)
    mirrored = sorted(here, key=lambda checkpoint: checkpoint.step)
    for old in mirrored[: -keep if keep is not None else 0]:
        bucket.delete(f"{folder}/{old.name}{_MANIFEST}")
    if keep is None or len(mirrored) < keep:
        return
    kept, oldest = {checkpoint.name for checkpoint in mirrored[-keep:]}, mirrored[-keep].step
    for name in list_folders(bucket, folder):
        # A newer one may be on its way there.
        iteration = _ITERATION.fullmatch(name)
        is_old = name in {old.name for old in mirrored} or (iteration is not None and int(iteration[1]) < oldest)
        if name not in kept and is_old:
            for info in list(bucket.list(f"{folder}/{name}")):
                bucket.delete(info.path)
