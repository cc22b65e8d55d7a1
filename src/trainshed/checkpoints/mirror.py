"""Checkpoints of a foreign engine in a bucket: what is committed is uploaded, and fetched before a run goes on.

A foreign engine writes its checkpoints into the run's folder, where every node sees them. `checkpoint.to` names a
bucket that they are copied to, by our own code: beside training where pods have a container for it
(`follow_checkpoints`), and by a stage on CPUs after it:

    <to>/<name>/<id>/checkpoints-megatron/iter_0000100/…               the files, as the engine wrote them
    <to>/<name>/<id>/checkpoints-megatron/iter_0000100.manifest.json   written last: without it there is no checkpoint
    <to>/<name>/<id>/checkpoints-megatron/latest_checkpointed_iteration.txt
    <to>/<name>/<id>/checkpoints/…                                     of Megatron-Bridge, NeMo 24.07 and torchtune
    <to>/<name>/<id>/checkpoints/recipe_state/epoch_0/…                torchtune's state after these weights

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
from trainshed.checkpoints.torchtune_state import FINISHED, read_torchtune_state
from trainshed.checkpoints.torchtune_state import STATE_FOLDER as TORCHTUNE_STATE
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
_NUMBERED = re.compile(r"(?:iter|epoch)_(\d+)")


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
    resumable: bool = True
    """Whether a run can go on from it; of torchtune some are weights alone."""
    state: dict[str, str] = field(default_factory=dict, compare=False)
    """Checksums of torchtune's state of the run, which lies apart."""
    ended: str | None = None
    """What says that the run has ended with it."""


@dataclass(frozen=True)
class _Committed:
    """A checkpoint that the engine has written to its end."""

    checkpoint: ForeignCheckpoint
    state: Path | None = None
    """The folder of torchtune's state of the run, where that is the state after this checkpoint."""
    state_version: tuple[int, int] | None = None
    ended: str | None = None
    resumable: bool = True

    @property
    def key(self) -> tuple[int, int, bool]:
        return self.checkpoint.step, self.checkpoint.bytes, self.resumable


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
    committed = _committed(run)
    if not committed:
        return []
    bucket, folder = open_folder(address, options), committed[0].checkpoint.path.parent.name
    there = {mirrored.name: mirrored.step for mirrored in mirrored_checkpoints(bucket) if mirrored.folder == folder}
    sent = {}
    for row in committed[:keep]:  # the newest first: a run goes on from it
        name = row.checkpoint.path.name
        if name not in there and _upload(run, row, bucket, address, options, reporter):
            sent[name] = row.checkpoint.step
    if sent:
        steps = there | sent
        _name_latest(bucket, folder, max(steps, key=steps.__getitem__))
    _remove_old(bucket, folder, keep)
    return sorted(sent.values())


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
    proven: list[tuple[int, int, bool]] = []
    while not is_stopping():
        # With their bytes: one that has grown while it was copied is copied again.
        there = [row.key for row in _committed(run)]
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
    if any(row.resumable for row in _committed(run)):
        return None
    copies = (copy for copy in mirrored_checkpoints(open_folder(address, options)) if copy.resumable)
    newest = max(copies, key=lambda mirrored: mirrored.step, default=None)
    if newest is None:
        return None
    hint = f"delete {join(address, f'{newest.folder}/{newest.name}{_MANIFEST}')}, and the checkpoint before it is taken"
    source = join(address, f"{newest.folder}/{newest.name}")
    partial = run / newest.folder / f".{newest.name}.partial"
    _fetch(source, partial, newest.checksums, newest.bytes, hint, options, reporter)
    target = run / newest.folder / newest.name
    if newest.is_file:
        (partial / newest.name).replace(target)
        shutil.rmtree(partial)
    else:
        _replace_folder(partial, target)
    if newest.state:
        state = run / newest.folder / TORCHTUNE_STATE
        partial = state.with_name(f".{TORCHTUNE_STATE}.{newest.name}.partial")
        source = join(address, f"{newest.folder}/{TORCHTUNE_STATE}/{newest.name}")
        _fetch(source, partial, newest.state, None, hint, options, reporter)
        _replace_folder(partial, state)
    if newest.ended is not None:
        LocalStore(run / newest.folder).put(FINISHED, newest.ended.encode())
    _name_latest(LocalStore(run), newest.folder, newest.name)
    return newest.step


def _fetch(
    source: str,
    partial: Path,
    checksums: dict[str, str],
    size: int | None,
    hint: str,
    options: StoreOptions | None,
    reporter: Reporter,
) -> None:
    """Copy a folder of the bucket and compare it with what was committed."""
    copy_tree(source, str(partial), options=options, reporter=reporter)
    arrived = Manifest.read(LocalStore(partial), COPY_MANIFEST).files
    if (damage := _difference(checksums, size, arrived)) is not None:
        shutil.rmtree(partial)  # the bucket may be mended
        raise CorruptData(f"{source.rsplit('/', 1)[-1]}: {damage}", where=source, hint=hint)
    shutil.rmtree(partial / STATE_FOLDER)  # the copy's own records


def _replace_folder(new: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    new.replace(folder)


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
                    resumable=body.get("resumable", True),
                    state=body.get("state", {}),
                    ended=body.get("ended"),
                )


def _committed(run: Path) -> list[_Committed]:
    """Return what the engine has committed in a run's folder, newest first."""
    listing = list_foreign(run)
    whole = [] if listing is None else [checkpoint for checkpoint in listing.checkpoints if checkpoint.complete]
    if listing is None or listing.engine != "torchtune":
        return [_Committed(checkpoint) for checkpoint in whole]
    beside = read_torchtune_state(listing.folder)
    rows = []
    for checkpoint in whole:
        name = checkpoint.path.name
        if name.startswith("epoch_") and beside.has_committed(name):
            resumes = beside.resumes_from(name)
            ended = beside.ended if name == beside.last else None
            rows.append(
                _Committed(
                    checkpoint,
                    listing.folder / TORCHTUNE_STATE if resumes else None,
                    beside.version if resumes else None,
                    ended,
                    resumes or ended is not None,
                )
            )
    return rows


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
    row: _Committed,
    bucket: Store,
    address: str,
    options: StoreOptions | None,
    reporter: Reporter,
) -> bool:
    """Copy a checkpoint and commit it; False where it was removed or written anew meanwhile."""
    checkpoint = row.checkpoint
    folder, name = checkpoint.path.parent.name, checkpoint.path.name
    is_file = checkpoint.path.is_file()
    state: tuple[FileEntry, ...] = ()
    try:
        if row.state is not None:  # first: the next save writes it anew
            state = _copy(row.state, join(address, f"{folder}/{TORCHTUNE_STATE}/{name}"), options, reporter)
            if read_torchtune_state(checkpoint.path.parent).version != row.state_version:
                return False
        files = _copy(checkpoint.path, join(address, f"{folder}/{name}"), options, reporter)
    except NotFound:
        if _is_still(run, checkpoint):
            raise
        return False
    if sum(entry.size for entry in files) != checkpoint.bytes or not _is_still(run, checkpoint):
        return False
    manifest = {
        "schema": MIRROR_SCHEMA,
        "step": checkpoint.step,
        "bytes": checkpoint.bytes,
        "is_file": is_file,
        "files": {entry.path: entry.checksum for entry in files},
        "resumable": row.resumable,
        "state": {entry.path: entry.checksum for entry in state},
        "ended": row.ended,
    }
    bucket.put(f"{folder}/{name}{_MANIFEST}", json.dumps(manifest, indent=1).encode() + b"\n")
    return True


def _copy(source: Path, target: str, options: StoreOptions | None, reporter: Reporter) -> tuple[FileEntry, ...]:
    copy_tree(str(source), target, options=options, reporter=reporter)
    return Manifest.read(open_folder(target, options), COPY_MANIFEST).files


def _is_still(run: Path, checkpoint: ForeignCheckpoint) -> bool:
    """Whether a checkpoint is there as it was; a removal takes first what makes it complete."""
    listing = list_foreign(run)
    rows = () if listing is None else listing.checkpoints
    return any((row.path, row.bytes, row.complete) == (checkpoint.path, checkpoint.bytes, True) for row in rows)


def _difference(checksums: dict[str, str], size: int | None, arrived: tuple[FileEntry, ...]) -> str | None:
    """Return how files that were fetched differ from those that were committed, None if they do not."""
    if size is not None and (there := sum(entry.size for entry in arrived)) != size:
        return f"it has {there} bytes, and its manifest says {size}"
    got = {entry.path: entry.checksum for entry in arrived}
    for path, checksum in sorted(checksums.items()):
        if got.get(path) != checksum:
            return f"{path} does not have the checksum of its manifest" if path in got else f"{path} is missing"
    return None


def _remove_old(bucket: Store, folder: str, keep: int | None) -> None:
    """Remove all but the newest `keep`, the manifest first: what an interruption leaves is not a checkpoint.

    The newest that a run can go on from stays in any case.
    """
    here = (checkpoint for checkpoint in mirrored_checkpoints(bucket) if checkpoint.folder == folder)
    mirrored = sorted(here, key=lambda checkpoint: checkpoint.step)
    if keep is None or len(mirrored) < keep:
        return
    resumable = [checkpoint for checkpoint in mirrored if checkpoint.resumable]
    kept = {checkpoint.name for checkpoint in (*mirrored[-keep:], *resumable[-1:])}
    oldest = mirrored[-keep].step
    old_names = [checkpoint.name for checkpoint in mirrored if checkpoint.name not in kept]
    for name in old_names:
        bucket.delete(f"{folder}/{name}{_MANIFEST}")
    for name in list_folders(bucket, folder):
        # A newer one may be on its way there.
        number = _NUMBERED.fullmatch(name)
        is_old = name in old_names or (number is not None and int(number[1]) < oldest)
        if name not in kept and is_old:
            for place in (f"{folder}/{name}", f"{folder}/{TORCHTUNE_STATE}/{name}"):
                for info in list(bucket.list(place)):
                    bucket.delete(info.path)
