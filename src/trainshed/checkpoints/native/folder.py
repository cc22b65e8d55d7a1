"""The checkpoints folder of a run: how files are named and what is complete.

    checkpoints/latest                          the newest checkpoint, written last of all
    checkpoints/step-00000100/manifest.json     its commit: a folder without one is no checkpoint
                              .metadata         PyTorch's table of contents, for stock `torch.distributed.checkpoint`
                              pieces-0002.json  ours: the same with a checksum for every item
                              __3_2.distcp      what rank 3 of attempt 2 wrote, in PyTorch's naming

Names carry the attempt, so that a step which is saved again (a crash before its commit, a zombie still writing) never
mixes files: each attempt writes its own, and those count that the manifest names. No rename is needed, which buckets
do not have. `.metadata`, the manifest and `latest` have one name for all attempts and are written by `Attempt.put`.

No torch here: listing, verifying and pruning work on a laptop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainshed.errors import CorruptData, NotFound
from trainshed.storage import Manifest, ObjectInfo, Store, join, parse
from trainshed.storage.attempts import Attempt

FORMAT = 1
KIND = "checkpoint"
METADATA, MANIFEST, LATEST = ".metadata", "manifest.json", "latest"
_STEP = re.compile(r"step-(\d{8,})")
_OF_ATTEMPT = re.compile(r"__\d+_(\d+)\.distcp|pieces-(\d+)\.json")


def checkpoints_folder(run_folder: str) -> str:
    """The checkpoints folder of a run."""
    return f"{run_folder.strip('/')}/checkpoints" if run_folder.strip("/") else "checkpoints"


def step_folder(folder: str, step: int) -> str:
    """The folder of one step's checkpoint."""
    return f"{folder}/step-{step:08d}"


def part_name(rank: int, attempt: int) -> str:
    """The file that one rank writes."""
    return f"__{rank}_{attempt}.distcp"


def pieces_name(attempt: int) -> str:
    """Our table of contents."""
    return f"pieces-{attempt:04d}.json"


def attempt_of(name: str) -> int | None:
    """Which attempt wrote a file, where its name tells."""
    match = _OF_ATTEMPT.fullmatch(name)
    return int(match[1] or match[2]) if match else None


@dataclass(frozen=True)
class Found:
    """One complete checkpoint; `path` is its folder in the store."""

    step: int
    path: str
    attempt: int
    manifest: Manifest

    @property
    def facts(self) -> Mapping[str, Any]:
        """What was stored beside the tensors: the step, consumed samples and whatever the engine added."""
        return self.manifest.facts


@dataclass(frozen=True)
class Incomplete:
    """A folder that is no checkpoint (yet), and why."""

    step: int
    path: str
    attempt: int | None
    size: int
    why: str


@dataclass(frozen=True)
class Latest:
    """What `latest` says: the newest checkpoint, and which attempt wrote the pointer (and so owns the run)."""

    step: int | None
    attempt: int | None
    written_by: int

    @classmethod
    def to(cls, found: Found | None, attempt: Attempt) -> Latest:
        """A pointer that an attempt writes to a checkpoint, or to none."""
        return cls(None, None, attempt.number) if found is None else cls(found.step, found.attempt, attempt.number)

    def to_bytes(self) -> bytes:
        """The pointer as it is stored."""
        document = {"format": FORMAT, "step": self.step, "attempt": self.attempt, "written_by": self.written_by}
        return json.dumps(document, sort_keys=True).encode() + b"\n"


@dataclass(frozen=True)
class Listing:
    """Everything in a checkpoints folder; `complete` is newest first, `files` is what each step's folder holds.

    Newest means committed last: by attempt, then by step. After a fall-back to an older checkpoint the run comes by
    the same steps again, and what the earlier attempt had stored beyond them is older than what is stored now.
    """

    complete: tuple[Found, ...]
    incomplete: tuple[Incomplete, ...]
    latest: Latest | None
    files: Mapping[int, Mapping[str, ObjectInfo]]


def listing(store: Store, folder: str) -> Listing:
    """List a checkpoints folder: one listing, and one small read per checkpoint."""
    files: dict[int, dict[str, ObjectInfo]] = {}
    latest = None
    _refuse_folder(store, f"{folder}/{LATEST}")
    for info in store.list(folder):
        top, _, name = info.path[len(folder) + 1 :].partition("/")
        step = _STEP.fullmatch(top)
        if step and name:
            files.setdefault(int(step[1]), {})[name] = info
        elif top == LATEST:
            latest = _read_latest(store, folder)
    complete: list[Found] = []
    incomplete: list[Incomplete] = []
    for step, there in files.items():
        found = _judged(store, step_folder(folder, step), step, there)
        if isinstance(found, Found):
            complete.append(found)
        else:
            incomplete.append(found)
    complete.sort(key=recency, reverse=True)
    incomplete.sort(key=lambda found: found.step, reverse=True)
    return Listing(tuple(complete), tuple(incomplete), latest, files)


def find(store: Store, folder: str) -> list[Found]:
    """Return the complete checkpoints, newest first."""
    return list(listing(store, folder).complete)


def open_checkpoint(store: Store, path: str) -> Found:
    """Open one checkpoint by its folder."""
    manifest = Manifest.read(store, f"{path}/{MANIFEST}")
    return _found(path, manifest, join(store.url, path))


def recency(found: Found) -> tuple[int, int]:
    """Orders checkpoints by when they were committed: see `Listing`."""
    return found.attempt, found.step


def _read_latest(store: Store, folder: str) -> Latest | None:
    path = f"{folder}/{LATEST}"
    try:
        document = json.loads(store.read(path))
        if document["format"] > FORMAT:
            raise CorruptData(
                f"`latest` has format {document['format']}, this Trainshed reads up to {FORMAT}",
                where=join(store.url, path),
                hint="upgrade Trainshed",
            )
        return Latest(document["step"], document["attempt"], document["written_by"])
    except NotFound:
        return None
    except (ValueError, KeyError, TypeError):
        raise CorruptData(
            "`latest` cannot be read", where=join(store.url, path), hint="remove it: the newest complete one is used"
        ) from None


def _refuse_folder(store: Store, pointer: str) -> None:
    """Refuse a folder of the pointer's name: it can neither be read nor written over."""
    address = parse(join(store.url, pointer))
    if address.scheme == "file" and Path(str(address)).is_dir():
        raise CorruptData(
            f"`{LATEST}` is a folder, and must be the file that names the newest checkpoint",
            where=str(address),
            hint="remove or rename it: the newest complete checkpoint is used",
        )


def _judged(store: Store, path: str, step: int, there: Mapping[str, ObjectInfo]) -> Found | Incomplete:
    """A folder with what was listed in it: complete if its manifest and every file the manifest names are there."""
    try:
        if MANIFEST not in there:
            raise NotFound("it has no manifest")
        found = _found(path, Manifest.read(store, f"{path}/{MANIFEST}"), path)
        for entry in found.manifest.files:
            if entry.path not in there:
                raise CorruptData(f"{entry.path} is missing")
            if there[entry.path].size != entry.size:
                raise CorruptData(f"{entry.path} has {there[entry.path].size} bytes instead of {entry.size}")
        return found
    except (NotFound, CorruptData) as error:
        attempts = [number for number in map(attempt_of, there) if number is not None]
        size = sum(info.size for info in there.values())
        return Incomplete(step, path, max(attempts, default=None), size, error.what)


def _found(path: str, manifest: Manifest, where: str) -> Found:
    facts = manifest.facts
    if manifest.kind != KIND or not isinstance(facts.get("step"), int) or not isinstance(facts.get("attempt"), int):
        raise CorruptData(f"a manifest of kind '{manifest.kind}' that is no checkpoint's", where=where)
    if facts.get("format", 0) > FORMAT:
        raise CorruptData(
            f"the checkpoint has format {facts['format']}, this Trainshed reads up to {FORMAT}",
            where=where,
            hint="upgrade Trainshed",
        )
    return Found(facts["step"], path, facts["attempt"], manifest)
