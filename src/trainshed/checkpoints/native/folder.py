"""The checkpoints folder of a run: how files are named, what is complete, where to resume.

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
from typing import Any

from trainshed.errors import Conflict, CorruptData, NotFound
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import Manifest, ObjectInfo, Store, join
from trainshed.storage.attempts import Attempt

FORMAT = 1
KIND = "checkpoint"
METADATA, MANIFEST, LATEST = ".metadata", "manifest.json", "latest"
_STEP = re.compile(r"step-(\d{8,})")
_OF_ATTEMPT = re.compile(r"__\d+_(\d+)\.distcp|pieces-(\d+)\.json")


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
    for info in store.list(folder):
        top, _, name = info.path[len(folder) + 1 :].partition("/")
        step = _STEP.fullmatch(top)
        if step and name:
            files.setdefault(int(step[1]), {})[name] = info
        elif top == LATEST:
            latest = _read_latest(store, folder)
    complete, incomplete = [], []
    for step, there in files.items():
        found = _judged(store, step_folder(folder, step), step, there)
        (complete if isinstance(found, Found) else incomplete).append(found)
    complete.sort(key=lambda found: (found.attempt, found.step), reverse=True)
    incomplete.sort(key=lambda found: found.step, reverse=True)
    return Listing(tuple(complete), tuple(incomplete), latest, files)


def find(store: Store, folder: str) -> list[Found]:
    """Return the complete checkpoints, newest first."""
    return list(listing(store, folder).complete)


def open_checkpoint(store: Store, path: str) -> Found:
    """Open one checkpoint by its folder."""
    manifest = Manifest.read(store, f"{path}/{MANIFEST}")
    return _found(path, manifest, join(store.url, path))


def latest_complete(
    store: Store, folder: str, *, attempt: Attempt | None = None, reporter: Reporter = SILENT
) -> Found | None:
    """Return the checkpoint to go on from: what `latest` names, or the newest complete one.

    With `attempt` the answer is also settled: `latest` is written anew in its name, so that an earlier attempt which
    is in the middle of its own commit can no longer move it. Ask so before training, and without `attempt` to look.
    """
    while True:
        before = store.head(f"{folder}/{LATEST}")
        found = _resume_point(listing(store, folder), store, reporter if attempt is None else SILENT)
        if attempt is None:
            return found
        claim = Latest(found and found.step, found and found.attempt, attempt.number)
        try:
            attempt.put(f"{folder}/{LATEST}", claim.to_bytes(), before=before)
        except Conflict:  # an earlier attempt's commit came first: look again
            continue
        _resume_point(listing(store, folder), store, reporter)
        return found


def _resume_point(there: Listing, store: Store, reporter: Reporter) -> Found | None:
    pointer = there.latest
    if pointer is None or pointer.step is None:
        return there.complete[0] if there.complete else None
    named = next((found for found in there.complete if found.step == pointer.step), None)
    # Committed by whoever owned the run, and stopped before `latest`; what an earlier attempt commits later is not.
    beyond = [found for found in there.complete if found.attempt >= pointer.written_by and found != named]
    newest = max([*beyond, *([named] if named else [])], key=lambda each: (each.attempt, each.step), default=None)
    if named is None:
        newest = newest or next(iter(there.complete), None)
        why = next((each.why for each in there.incomplete if each.step == pointer.step), "it is not there")
        instead = f"going on from step {newest.step}" if newest else "there is no other to go on from"
        reporter.warn(f"`latest` names step {pointer.step}, which is not complete ({why}); {instead}")
    elif newest is not None and newest != named:
        reporter.note(
            f"step {newest.step} is complete and `latest` still names step {named.step}: going on from {newest.step}"
        )
    return newest
