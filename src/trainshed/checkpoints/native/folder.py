"""The checkpoints folder of a run: its file names, which checkpoints are complete, which one to resume, what to remove.

    checkpoints/latest                          the newest checkpoint, written after its manifest
    checkpoints/best                            the one with the lowest validation loss, written after `latest`
    checkpoints/step-00000100/manifest.json     its commit: a folder without one is not a checkpoint
                              .metadata         PyTorch's table of contents, for `torch.distributed.checkpoint`
                              pieces-0002.bin   our index: the same with a checksum for every item (`index.py`)
                              __3_2.distcp      what rank 3 of attempt 2 wrote, in PyTorch's naming

Names carry the attempt. A step that is saved again (after a crash before its commit, or while a zombie still
writes) therefore never mixes files: each attempt writes its own, and only those count that the manifest names. No
rename is needed, which buckets do not have. `.metadata`, the manifest, `latest` and `best` have one name for all
attempts and are written by `Attempt.put`.

`best` exists only where `checkpoint.best` asks for it (`best.py`).

Retention removes the manifest first: a prune that is killed leaves a folder without one, which is not a checkpoint.
Files are removed by name and attempt, never those of a later attempt. So a zombie that passes its check and then
sleeps removes only what its own commit made superfluous.

No torch here: listing, verifying and pruning work without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshed.errors import Conflict, CorruptData, InputError, NotFound
from trainshed.recipe import ModelConfig
from trainshed.recipe.validation import validate
from trainshed.recipe.yaml_io import SourceMap, YamlDocument
from trainshed.reporting import SILENT, Reporter
from trainshed.run_folder import CHECKPOINTS, step_name, step_number
from trainshed.storage import Manifest, ObjectInfo, Store, join, parse
from trainshed.storage.attempts import Attempt
from trainshed.storage.manifest import MANIFEST

FORMAT = 2
"""In format 2 the index is binary arrays (`index.py`); in format 1 it is JSON."""
POINTER_FORMAT = 1
KIND = "checkpoint"
METADATA, LATEST, BEST = ".metadata", "latest", "best"
_POINTERS = {LATEST: "newest", BEST: "best"}
_OF_ATTEMPT = re.compile(r"__\d+_(\d+)\.distcp|pieces-(\d+)\.(?:bin|json)")


def checkpoints_folder(run_folder: str) -> str:
    """The checkpoints folder of a run."""
    return f"{run_folder.strip('/')}/{CHECKPOINTS}" if run_folder.strip("/") else CHECKPOINTS


def step_folder(folder: str, step: int) -> str:
    """The folder of one step's checkpoint."""
    return f"{folder}/{step_name(step)}"


def rank_file_name(rank: int, attempt: int) -> str:
    """The file that one rank writes."""
    return f"__{rank}_{attempt}.distcp"


def index_name(attempt: int) -> str:
    """The file of our index."""
    return f"pieces-{attempt:04d}.bin"


def attempt_of(name: str) -> int | None:
    """Return which attempt wrote a file, None where its name does not contain it."""
    match = _OF_ATTEMPT.fullmatch(name)
    return int(match[1] or match[2]) if match else None


@dataclass(frozen=True)
class CompleteCheckpoint:
    """One complete checkpoint; `path` is its folder in the store."""

    step: int
    path: str
    attempt: int
    manifest: Manifest

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is stored beside the tensors: the step, consumed samples and what the engine added."""
        return self.manifest.facts


@dataclass(frozen=True)
class IncompleteCheckpoint:
    """A folder that is not a checkpoint (yet), and the reason."""

    step: int
    path: str
    attempt: int | None
    size: int
    reason: str


@dataclass(frozen=True)
class LatestPointer:
    """The contents of `latest`: the newest checkpoint, and the attempt that wrote the pointer and so owns the run."""

    step: int | None
    attempt: int | None
    written_by: int

    @classmethod
    def pointing_to(cls, checkpoint: CompleteCheckpoint | None, attempt: Attempt) -> LatestPointer:
        """Return the pointer that an attempt writes for a checkpoint, or for none."""
        if checkpoint is None:
            return cls(None, None, attempt.number)
        return cls(checkpoint.step, checkpoint.attempt, attempt.number)

    def to_bytes(self) -> bytes:
        """The pointer as it is stored."""
        document = {"format": POINTER_FORMAT, "step": self.step, "attempt": self.attempt, "written_by": self.written_by}
        return json.dumps(document, sort_keys=True).encode() + b"\n"


@dataclass(frozen=True)
class BestPointer:
    """The contents of `best`: the checkpoint with the lowest validation loss, and that loss; None: there is none."""

    step: int | None
    loss: float | None
    written_by: int

    def to_bytes(self) -> bytes:
        """The pointer as it is stored."""
        document = {"format": POINTER_FORMAT, "step": self.step, "loss": self.loss, "written_by": self.written_by}
        return json.dumps(document, sort_keys=True).encode() + b"\n"


@dataclass(frozen=True)
class CheckpointListing:
    """Everything in a checkpoints folder; `complete` is newest first, `files` are those in each step's folder.

    Newest means committed last: by attempt, then by step. After a fall-back to an older checkpoint the run repeats
    steps, and a higher step that the earlier attempt stored is older than what is stored now.
    """

    complete: tuple[CompleteCheckpoint, ...]
    incomplete: tuple[IncompleteCheckpoint, ...]
    latest: LatestPointer | None
    files: Mapping[int, Mapping[str, ObjectInfo]]
    best: BestPointer | None = None

    @property
    def best_step(self) -> int | None:
        """The step that `best` names: retention keeps it, and whoever wants the run's weights gets it."""
        return None if self.best is None else self.best.step


def list_checkpoints(store: Store, folder: str) -> CheckpointListing:
    """List a checkpoints folder: one listing, and one small read per checkpoint."""
    files: dict[int, dict[str, ObjectInfo]] = {}
    latest = best = None
    for pointer in _POINTERS:
        _refuse_folder(store, f"{folder}/{pointer}")
    for info in store.list(folder):
        top, _, name = info.path[len(folder) + 1 :].partition("/")
        step = step_number(top)
        if step is not None and name:
            files.setdefault(step, {})[name] = info
        elif top == LATEST:
            latest = _read_latest(store, folder)
        elif top == BEST:
            best = _read_best(store, folder)
    complete: list[CompleteCheckpoint] = []
    incomplete: list[IncompleteCheckpoint] = []
    for step, step_files in files.items():
        checkpoint = _check_folder(store, step_folder(folder, step), step, step_files)
        if isinstance(checkpoint, CompleteCheckpoint):
            complete.append(checkpoint)
        else:
            incomplete.append(checkpoint)
    complete.sort(key=commit_order, reverse=True)
    incomplete.sort(key=lambda checkpoint: checkpoint.step, reverse=True)
    return CheckpointListing(tuple(complete), tuple(incomplete), latest, files, best)


def complete_checkpoints(store: Store, folder: str) -> list[CompleteCheckpoint]:
    """Return the complete checkpoints, newest first."""
    return list(list_checkpoints(store, folder).complete)


def open_checkpoint(store: Store, path: str) -> CompleteCheckpoint:
    """Open one checkpoint by its folder."""
    manifest = Manifest.read(store, f"{path}/{MANIFEST}")
    return _from_manifest(path, manifest, join(store.url, path))


def read_checkpoint_config(store: Store, checkpoint: CompleteCheckpoint) -> ModelConfig:
    """Return the architecture in a checkpoint's manifest."""
    where = join(store.url, f"{checkpoint.path}/{MANIFEST}")
    model = checkpoint.manifest.spec.get("model")
    if not isinstance(model, dict):
        raise InputError("the checkpoint does not say what model it is of", where=where, hint="convert it by its run")
    return validate(ModelConfig, YamlDocument(model, SourceMap(where)))


def commit_order(checkpoint: CompleteCheckpoint) -> tuple[int, int]:
    """Return the key that sorts checkpoints by when they were committed: see `CheckpointListing`."""
    return checkpoint.attempt, checkpoint.step


def _read_latest(store: Store, folder: str) -> LatestPointer | None:
    hint = "remove it: the newest complete one is used"
    document = _read_pointer(store, folder, LATEST, ("step", "attempt", "written_by"), hint)
    return None if document is None else LatestPointer(document["step"], document["attempt"], document["written_by"])


def _read_best(store: Store, folder: str) -> BestPointer | None:
    hint = "remove it: the next start of the run writes it again, and until then the newest checkpoint counts"
    document = _read_pointer(store, folder, BEST, ("step", "loss", "written_by"), hint)
    return None if document is None else BestPointer(document["step"], document["loss"], document["written_by"])


def _read_pointer(store: Store, folder: str, name: str, keys: Sequence[str], hint: str) -> dict[str, Any] | None:
    """Read a pointer; None where it was removed since the folder was listed."""
    path = f"{folder}/{name}"
    try:
        document = json.loads(store.read(path))
        if document["format"] > POINTER_FORMAT:
            raise CorruptData(
                f"`{name}` has format {document['format']}, this Trainshed reads up to {POINTER_FORMAT}",
                where=join(store.url, path),
                hint="upgrade Trainshed",
            )
        return {key: document[key] for key in keys}
    except NotFound:
        return None
    except (ValueError, KeyError, TypeError):
        raise CorruptData(f"`{name}` cannot be read", where=join(store.url, path), hint=hint) from None


def _refuse_folder(store: Store, pointer: str) -> None:
    """Refuse a folder with the pointer's name: it can neither be read nor overwritten."""
    address = parse(join(store.url, pointer))
    if address.scheme == "file" and Path(str(address)).is_dir():
        name = pointer.rpartition("/")[2]
        raise CorruptData(
            f"`{name}` is a folder, and must be the file that names the {_POINTERS[name]} checkpoint",
            where=str(address),
            hint="remove or rename it: the newest complete checkpoint is used",
        )


def _check_folder(
    store: Store, path: str, step: int, files: Mapping[str, ObjectInfo]
) -> CompleteCheckpoint | IncompleteCheckpoint:
    """Check the listed files of a folder: it is complete if its manifest and every file in the manifest exist."""
    try:
        if MANIFEST not in files:
            raise NotFound("it has no manifest")
        checkpoint = _from_manifest(path, Manifest.read(store, f"{path}/{MANIFEST}"), path)
        for entry in checkpoint.manifest.files:
            if entry.path not in files:
                raise CorruptData(f"{entry.path} is missing")
            if files[entry.path].size != entry.size:
                raise CorruptData(f"{entry.path} has {files[entry.path].size} bytes instead of {entry.size}")
        return checkpoint
    except (NotFound, CorruptData) as error:
        attempts = [number for number in map(attempt_of, files) if number is not None]
        size = sum(info.size for info in files.values())
        return IncompleteCheckpoint(step, path, max(attempts, default=None), size, error.what)


def _from_manifest(path: str, manifest: Manifest, where: str) -> CompleteCheckpoint:
    facts = manifest.facts
    if manifest.kind != KIND or not isinstance(facts.get("step"), int) or not isinstance(facts.get("attempt"), int):
        raise CorruptData(f"a manifest of kind '{manifest.kind}' that is not that of a checkpoint", where=where)
    if facts.get("format", 0) > FORMAT:
        raise CorruptData(
            f"the checkpoint has format {facts['format']}, this Trainshed reads up to {FORMAT}",
            where=where,
            hint="upgrade Trainshed",
        )
    return CompleteCheckpoint(facts["step"], path, facts["attempt"], manifest)


def latest_complete(
    store: Store, folder: str, *, attempt: Attempt | None = None, reporter: Reporter = SILENT
) -> CompleteCheckpoint | None:
    """Return the checkpoint to resume: the one in `latest`, or the newest complete one.

    With `attempt` the answer is also fixed: `latest` is written again by this attempt, so that an earlier attempt in
    the middle of its own commit can no longer change it. Training passes `attempt`; whoever only looks does not.
    """
    pointer = f"{folder}/{LATEST}"
    while True:
        before = store.head(pointer)
        choice = _resume_point(list_checkpoints(store, folder))
        if attempt is None:
            break
        claim = LatestPointer.pointing_to(choice.checkpoint, attempt)
        try:
            attempt.put_over(before, pointer, claim.to_bytes())
            break
        except Conflict:  # an earlier attempt committed in between: list again
            continue
    if choice.warning:
        reporter.warn(choice.warning)
    if choice.note:
        reporter.note(choice.note)
    return choice.checkpoint


def find_checkpoint(store: Store, path: str, reporter: Reporter = SILENT) -> CompleteCheckpoint:
    """Find the checkpoint of a path: a step's folder, or the best or latest of a run or of a checkpoints folder.

    The best one where the run keeps one (`checkpoint.best`), otherwise the latest.
    """
    path = path.strip("/")
    if step_number(path.rpartition("/")[2]) is not None and store.head(f"{path}/{MANIFEST}") is not None:
        return open_checkpoint(store, path)
    for folder in (checkpoints_folder(path), path):
        checkpoint = _best_complete(store, folder, reporter) if folder else None
        checkpoint = checkpoint or (latest_complete(store, folder, reporter=reporter) if folder else None)
        if checkpoint is not None:
            return checkpoint
    raise NotFound(
        "there is no complete checkpoint",
        where=join(store.url, path),
        hint="name a run's folder or one of its checkpoints/step-… folders; `trainshed checkpoints RUN` lists them",
    )


def _best_complete(store: Store, folder: str, reporter: Reporter) -> CompleteCheckpoint | None:
    """Return the checkpoint that `best` names; None where no best one is kept."""
    if store.head(f"{folder}/{BEST}") is None:
        return None
    listing = list_checkpoints(store, folder)
    best = listing.best
    if best is None or best.step is None:
        return None
    for checkpoint in listing.complete:
        if checkpoint.step == best.step:
            reporter.note(
                f"step {best.step} has the lowest validation loss, {best.loss:.4f}: it is the one that is used"
            )
            return checkpoint
    reasons = {incomplete.step: incomplete.reason for incomplete in listing.incomplete}
    raise CorruptData(
        f"`{BEST}` names step {best.step}, which is not complete ({reasons.get(best.step, 'it is not there')})",
        where=join(store.url, f"{folder}/{BEST}"),
        hint="name another of its checkpoints/step-… folders; `trainshed checkpoints RUN` lists them",
    )


@dataclass(frozen=True)
class _ResumeChoice:
    checkpoint: CompleteCheckpoint | None
    warning: str | None = None
    note: str | None = None


def _resume_point(listing: CheckpointListing) -> _ResumeChoice:
    pointer = listing.latest
    if pointer is None or pointer.step is None:
        return _ResumeChoice(listing.complete[0] if listing.complete else None)
    named = next((checkpoint for checkpoint in listing.complete if checkpoint.step == pointer.step), None)
    if named is None:
        newest = listing.complete[0] if listing.complete else None
        reasons = {incomplete.step: incomplete.reason for incomplete in listing.incomplete}
        reason = reasons.get(pointer.step, "it is not there")
        instead = f"going on from step {newest.step}" if newest else "there is no other to go on from"
        return _ResumeChoice(
            newest, warning=f"`latest` names step {pointer.step}, which is not complete ({reason}); {instead}"
        )
    # The owner of the run may have been stopped between its manifest and `latest`; an earlier attempt does not count.
    candidates = [checkpoint for checkpoint in listing.complete if checkpoint.attempt >= pointer.written_by]
    newest = max([*candidates, named], key=commit_order)
    if newest == named:
        return _ResumeChoice(named)
    note = f"step {newest.step} is complete, though `latest` still names step {named.step}: going on from the newer"
    return _ResumeChoice(newest, note=note)


_PARALLEL_DELETES = 8


def keep_newest(store: Store, folder: str, keep: int | None, *, check_fence: Callable[[], None]) -> list[int]:
    """Remove all complete checkpoints but the newest `keep` (None: remove none) and the best; return the removed steps.

    `check_fence` is called before each removal. It raises where this process may no longer remove anything.
    """
    if keep is None:
        return []
    if keep < 1:
        raise InputError(f"keep {keep}: the newest checkpoint is never removed", hint="keep 1 or more")
    listing = list_checkpoints(store, folder)
    removed = [checkpoint.step for checkpoint in listing.complete[keep:] if checkpoint.step != listing.best_step]
    for step in removed:
        check_fence()
        remove_checkpoint(store, folder, step, listing)
    return removed


def remove_checkpoint(store: Store, folder: str, step: int, listing: CheckpointListing) -> None:
    """Remove one checkpoint, its manifest first."""
    path, names = step_folder(folder, step), listing.files[step]
    store.delete(f"{path}/{MANIFEST}")
    _delete_all(store, (f"{path}/{name}" for name in names if name != MANIFEST))


def remove_leftovers(
    store: Store, folder: str, attempt: int, *, committed: int | None, check_fence: Callable[[], None]
) -> list[int]:
    """Remove files that no manifest names and that no process writes any more; return their steps.

    These are files of attempts before `attempt`. Where `attempt` itself has just `committed` a step, its own files
    count too, since a rank has only one save at a time.
    """
    listing = list_checkpoints(store, folder)
    newest_dead = attempt - 1 if committed is None else attempt
    complete = {checkpoint.step: {entry.path for entry in checkpoint.manifest.files} for checkpoint in listing.complete}
    steps = []
    for step, names in listing.files.items():
        if MANIFEST in names and step not in complete:
            continue  # it was committed and is broken: a person should look at it
        dead = {
            name
            for name in names
            if (number := attempt_of(name)) is not None and number <= newest_dead and name not in complete.get(step, ())
        }
        # The name of `.metadata` has no attempt in it. Steps below the committed one are not saved again; a step above
        # it may be, by a later attempt, even now.
        if committed is not None and step < committed and names.keys() - dead == {METADATA}:
            dead.add(METADATA)
        if dead:
            check_fence()
            _delete_all(store, (f"{step_folder(folder, step)}/{name}" for name in dead))
            steps.append(step)
    return steps


def _delete_all(store: Store, paths: Iterable[str]) -> None:
    with ThreadPoolExecutor(_PARALLEL_DELETES) as pool:
        for _ in pool.map(store.delete, paths):
            pass
