"""The best checkpoint of a run, by validation loss: what checkpoints remember, and what `best` says after a start.

The truth is in the facts of every checkpoint: the losses that the run has measured up to it (`ValidationRecord`). The
file `best` repeats it, so that readers and retention need no other. It is written after `latest`, and again by every
attempt that resumes, from the facts of the checkpoint that it resumes. So a start after a crash between the two mends
it.

No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainshed.checkpoints.native.folder import (
    BEST,
    BestPointer,
    CheckpointListing,
    CompleteCheckpoint,
    checkpoints_folder,
    commit_order,
    list_checkpoints,
)
from trainshed.errors import Conflict
from trainshed.reporting import SILENT, Reporter
from trainshed.storage.attempts import Attempt

VALIDATION_FACT = "validation"
"""The fact of a checkpoint that holds its `ValidationRecord`."""


@dataclass(frozen=True)
class ValidationRecord:
    """What a run remembers of its validation losses; its checkpoints hold it, so that a resumed run goes on with it.

    `step` and `loss` are the last measurement, `best_step` and `best_loss` the lowest one. `reference_loss` is the last
    loss that was better than the one before by more than `train.early_stop.min_delta`, and `without_better` how many
    measurements there were since.
    """

    step: int = 0
    loss: float | None = None
    best_step: int | None = None
    best_loss: float | None = None
    reference_loss: float | None = None
    without_better: int = 0

    def after(self, step: int, loss: float | None, *, min_delta: float = 0.0) -> ValidationRecord:
        """Return the record after one more measurement; a loss that is not finite (None) is never better."""
        lowest = loss is not None and (self.best_loss is None or loss < self.best_loss)
        better = loss is not None and (self.reference_loss is None or loss < self.reference_loss - min_delta)
        return ValidationRecord(
            step=step,
            loss=loss,
            best_step=step if lowest else self.best_step,
            best_loss=loss if lowest else self.best_loss,
            reference_loss=loss if better else self.reference_loss,
            without_better=0 if better else self.without_better + 1,
        )

    def to_facts(self) -> dict[str, Any]:
        """The record as a checkpoint's facts hold it."""
        return {VALIDATION_FACT: asdict(self)}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> ValidationRecord | None:
        """Read the record of a checkpoint; None where nothing was measured, or where an older version wrote it."""
        record = facts.get(VALIDATION_FACT)
        return None if record is None else cls(**record)


def settle_best(
    attempt: Attempt, resumed: CompleteCheckpoint | None, *, wanted: bool, reporter: Reporter = SILENT
) -> BestPointer | None:
    """Return the best checkpoint that an attempt begins with, and write it into `best`; None where there is none.

    It is the best one that the resumed checkpoint remembers. If that one was not kept (`checkpoint.best` is new in the
    recipe, or somebody removed it), it is the one with the lowest loss among those that are. Without `wanted` nothing
    is the best any more. Like `latest`, the pointer is written again even if it says the same, so that an earlier
    attempt in the middle of its own commit can no longer change it.
    """
    store, folder = attempt.store, checkpoints_folder(attempt.run_folder)
    pointer = f"{folder}/{BEST}"
    while True:
        before = store.head(pointer)
        if before is None and not wanted:
            return None
        listing = list_checkpoints(store, folder)
        best = _best_at_start(listing, resumed, attempt, reporter) if wanted and resumed is not None else None
        if best is None and before is None:
            return None
        if not wanted and listing.best_step is not None:
            reporter.note(f"`checkpoint.best` is no longer asked for: step {listing.best_step} is not kept any longer")
        try:
            attempt.put_over(before, pointer, (best or BestPointer(None, None, attempt.number)).to_bytes())
            return best
        except Conflict:  # an earlier attempt committed in between: list again
            continue


def _best_at_start(
    listing: CheckpointListing, resumed: CompleteCheckpoint, attempt: Attempt, reporter: Reporter
) -> BestPointer | None:
    record = ValidationRecord.from_facts(resumed.facts)
    if record is None or record.best_step is None:
        return None
    past = [
        checkpoint
        for checkpoint in listing.complete
        if checkpoint.step <= resumed.step and commit_order(checkpoint) <= commit_order(resumed)
    ]
    if any(checkpoint.step == record.best_step for checkpoint in past):
        return BestPointer(record.best_step, record.best_loss, attempt.number)
    measured = [(own.loss, own.step) for checkpoint in past if (own := _own_measurement(checkpoint)) is not None]
    lost = f"the lowest validation loss was {record.best_loss:.4f} after step {record.best_step}, which was not kept"
    if not measured:
        reporter.warn(f"{lost}: the next loss that is measured counts as the best")
        return None
    loss, step = min(measured)
    reporter.warn(f"{lost}: of what is kept, step {step} is the best, with {loss:.4f}")
    return BestPointer(step, loss, attempt.number)


def _own_measurement(checkpoint: CompleteCheckpoint) -> ValidationRecord | None:
    """The record of a checkpoint whose own weights were measured."""
    record = ValidationRecord.from_facts(checkpoint.facts)
    return record if record is not None and record.step == checkpoint.step and record.loss is not None else None
