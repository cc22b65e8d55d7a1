"""The half of a save that happens in a thread: a rank's own part, and on rank 0 the commit of all parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from trainshed.checkpoints.native.commit import commit, write_tables
from trainshed.checkpoints.native.folder import checkpoints_folder, part_name, pieces_name, step_folder
from trainshed.checkpoints.native.gathering import Gathering, Outcome
from trainshed.checkpoints.native.part import Part, write_part
from trainshed.checkpoints.native.plan import Item, WritePlan
from trainshed.checkpoints.native.retention import keep_newest, remove_leftovers
from trainshed.errors import TrainshedError
from trainshed.storage import Manifest, join
from trainshed.storage.attempts import Attempt


class Saving:
    """Writes staged items and sees the save through to its end, the same end on every rank."""

    def __init__(
        self,
        attempt: Attempt,
        gathering: Gathering,
        *,
        rank: int,
        keep: int | None,
        spec: Mapping[str, Any],
        on_event: Callable[..., None],
    ) -> None:
        self._attempt, self._gathering, self._rank = attempt, gathering, rank
        self._keep, self._spec, self._on_event = keep, dict(spec), on_event
        self._folder = checkpoints_folder(attempt.run_folder)
        self._told_plan: str | None = None
        self._known_items: dict[str, tuple[Item, ...]] = {}
        self._first = True

    def run(
        self, save: str, step: int, plan: WritePlan, staged: Sequence[torch.Tensor], facts: Mapping[str, Any]
    ) -> None:
        """Write and commit one checkpoint, or raise why there is none; `save` names it among the ranks."""
        started = time.monotonic()
        try:
            if self._rank == 0:
                outcome = self._lead(save, step, plan, staged, facts)
            else:
                outcome = self._follow(save, step, plan, staged)
        except Exception as error:  # the ranks have lost each other
            outcome = Outcome(explained(error))
        if outcome.failure is None:
            self._told_plan = plan.digest
            return
        if outcome.discard:
            self._discard(step)
        seconds = time.monotonic() - started
        self._on_event("checkpoint", step=step, phase="failed", seconds=seconds, what=str(outcome.failure))
        raise outcome.failure

    def _follow(self, save: str, step: int, plan: WritePlan, staged: Sequence[torch.Tensor]) -> Outcome:
        try:
            part = self._write_part(step, plan, staged)
        except Exception as error:
            self._gathering.publish_failure(save, explained(error))
        else:
            known = self._told_plan == plan.digest
            self._gathering.publish(save, (part.without_items() if known else part).to_bytes())
        return self._gathering.outcome(save)

    def _lead(
        self, save: str, step: int, plan: WritePlan, staged: Sequence[torch.Tensor], facts: Mapping[str, Any]
    ) -> Outcome:
        started = time.monotonic()
        discard = True
        try:
            self._make_room()
            own = self._write_part(step, plan, staged)
            gathered = self._gathering.gather(save)
            parts = [own, *(self._with_items(Part.from_bytes(gathered[rank])) for rank in sorted(gathered))]
            manifest = write_tables(self._attempt, self._folder, step, parts, self._spec, facts)
            discard = False  # a manifest whose answer is lost may be there all the same
            commit(self._attempt, self._folder, step, manifest)
        except Exception as error:
            outcome = Outcome(explained(error), discard)
        else:
            outcome = Outcome()
            self._known_items = {part.plan: part.items for part in parts if part.items is not None}
            self._tell_committed(step, manifest, time.monotonic() - started)
            self._retain(step)
        # Not before: while others wait for this, nobody writes into the folder that retention looks through.
        self._gathering.announce(save, outcome)
        return outcome

    def _write_part(self, step: int, plan: WritePlan, staged: Sequence[torch.Tensor]) -> Part:
        name = part_name(self._rank, self._attempt.number)
        return write_part(self._attempt.store, step_folder(self._folder, step), name, plan, staged)

    def _with_items(self, part: Part) -> Part:
        return part if part.items is not None else replace(part, items=self._known_items[part.plan])

    def _tell_committed(self, step: int, manifest: Manifest, seconds: float) -> None:
        path = join(self._attempt.store.url, step_folder(self._folder, step))
        size = manifest.total_bytes
        self._on_event("checkpoint", step=step, phase="committed", seconds=seconds, bytes=size, path=path)

    def _make_room(self) -> None:
        """Before the first save: remove what attempts that died have left, which may be a whole checkpoint."""
        if self._first:
            check = self._attempt.check
            check()
            remove_leftovers(self._attempt.store, self._folder, self._attempt.number, committed=None, check=check)
            self._first = False

    def _retain(self, step: int) -> None:
        """Remove what the new checkpoint makes superfluous; trouble with that does not undo the checkpoint."""
        store, number, check = self._attempt.store, self._attempt.number, self._attempt.check
        try:
            for gone in keep_newest(store, self._folder, self._keep, check=check):
                self._on_event("checkpoint", step=gone, phase="pruned")
            remove_leftovers(store, self._folder, number, committed=step, check=check)
            store.sweep(self._folder, older_than_seconds=0.0)
        except Exception as error:
            text = f"step {step} is stored, but what it replaces could not be removed: {explained(error)}"
            self._on_event("warning", step=step, text=text)

    def _discard(self, step: int) -> None:
        """Remove what this rank wrote for a checkpoint that will never be: the disk may be full of it."""
        path, number = step_folder(self._folder, step), self._attempt.number
        names = [part_name(self._rank, number), *([pieces_name(number)] if self._rank == 0 else [])]
        for name in names:
            with suppress(Exception):  # the failure that led here is the one to tell
                self._attempt.store.delete(f"{path}/{name}")


def explained(error: Exception) -> TrainshedError:
    """Any error as one that can be told to another rank."""
    return error if isinstance(error, TrainshedError) else TrainshedError(f"{type(error).__name__}: {error}")
