"""The pointer to the best checkpoint: committed after the checkpoint, fenced, protected, and mended at a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.runs.checkpoint_parts import FOLDER, RUN, SPEC, HookedStore, some_state, whole
from support.runs.preparing import Notes
from trainshed.checkpoints.native.best import ValidationRecord, settle_best
from trainshed.checkpoints.native.folder import (
    BestPointer,
    complete_checkpoints,
    find_checkpoint,
    keep_newest,
    latest_complete,
    list_checkpoints,
    step_folder,
)
from trainshed.checkpoints.native.writer import CheckpointWriter
from trainshed.errors import CorruptData, Fenced
from trainshed.storage import LocalStore, Store, open_folder
from trainshed.storage.attempts import Attempt, take_attempt

LOSSES = {100: 3.0, 200: 2.0, 300: 2.5, 400: 2.6}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def save_measured(attempt: Attempt, steps: list[int], keep: int | None = None, **options: Any) -> None:
    """Save steps of which the loss was measured, each marked where it is the lowest so far."""
    record = ValidationRecord()
    for step, loss in LOSSES.items():
        record = record.after(step, loss)
        if step in steps:
            with CheckpointWriter(attempt, spec=SPEC, keep=keep, **options) as writer:
                best_loss = loss if record.best_step == step else None
                writer.save(step, whole(some_state(step)), record.to_facts(), best_loss=best_loss)


def stored(store: Store) -> tuple[list[int], int | None]:
    """The complete steps, newest first, and the one that `best` names."""
    listing = list_checkpoints(store, FOLDER)
    return [checkpoint.step for checkpoint in listing.complete], listing.best_step


def test_the_best_is_kept_beside_the_newest_and_is_what_a_run_s_weights_are(store: LocalStore) -> None:
    save_measured(take_attempt(store, RUN), [100, 200, 300, 400], keep=1)
    assert stored(store) == ([400, 200], 200)
    reporter = Notes()
    assert find_checkpoint(store, RUN, reporter).step == 200
    assert reporter.notes == ["step 200 has the lowest validation loss, 2.0000: it is the one that is used"]
    assert find_checkpoint(store, step_folder(FOLDER, 400)).step == 400, "a step that is named is that step"
    latest = latest_complete(store, FOLDER)
    assert latest is not None
    assert latest.step == 400, "a run goes on from the newest"
    assert keep_newest(store, FOLDER, 1, check_fence=lambda: None) == []


def test_a_best_that_is_gone_is_an_error_for_its_weights_and_says_what_to_name(store: LocalStore) -> None:
    save_measured(take_attempt(store, RUN), [100, 200, 300])
    store.delete(f"{step_folder(FOLDER, 200)}/manifest.json")
    with pytest.raises(CorruptData, match=r"`best` names step 200, which is not complete \(it has no manifest\)"):
        find_checkpoint(store, RUN)
    store.put(f"{FOLDER}/best", b"{}")
    with pytest.raises(CorruptData, match="`best` cannot be read"):
        list_checkpoints(store, FOLDER)


def test_an_attempt_that_was_overtaken_moves_no_pointer(store: LocalStore) -> None:
    old = take_attempt(store, RUN)
    save_measured(old, [100])
    new = take_attempt(store, RUN)
    with pytest.raises(Fenced):
        save_measured(old, [200])
    assert stored(store) == ([100], 100)
    assert settle_best(new, find_checkpoint(store, RUN), wanted=True) == BestPointer(100, 3.0, new.number)


def test_a_zombie_between_its_check_and_its_write_cannot_undo_what_a_later_start_settled(store: LocalStore) -> None:
    old = take_attempt(store, RUN)
    save_measured(old, [100, 200])
    later: list[Attempt] = []

    def overtake(what: str, path: str) -> None:
        """Between the zombie's look at the fence and its write of `best`."""
        if what == "put" and path.endswith("/best") and not later:
            later.append(take_attempt(store, RUN))
            resumed = latest_complete(store, FOLDER, attempt=later[0])
            settle_best(later[0], resumed, wanted=True)

    zombie = Attempt(HookedStore(store, overtake), RUN, old.number)
    with CheckpointWriter(zombie, spec=SPEC) as writer, pytest.raises(Fenced):
        writer.save(
            300, whole(some_state()), ValidationRecord(300, 1.0, 300, 1.0).to_facts(), best_loss=1.0, blocking=True
        )
    # Step 300 was committed before it was overtaken, so the later start went on from it and its own best.
    assert later
    best = list_checkpoints(store, FOLDER).best
    assert best == BestPointer(300, 1.0, later[0].number)


def test_a_start_settles_the_best_by_what_the_checkpoint_it_resumes_remembers(store: LocalStore) -> None:
    save_measured(take_attempt(store, RUN), [100, 200, 300])
    by_step = {checkpoint.step: checkpoint for checkpoint in complete_checkpoints(store, FOLDER)}
    # An operator goes back to step 100, before the best: what lies ahead is not the run's past.
    second = take_attempt(store, RUN)
    assert settle_best(second, by_step[100], wanted=True) == BestPointer(100, 3.0, second.number)
    # A start from nothing has no best.
    third = take_attempt(store, RUN)
    assert settle_best(third, None, wanted=True) is None
    assert stored(store)[1] is None
    # The pointer was never written: the next start mends it.
    store.delete(f"{FOLDER}/best")
    fourth = take_attempt(store, RUN)
    assert settle_best(fourth, by_step[300], wanted=True) == BestPointer(200, 2.0, fourth.number)
    assert stored(store)[1] == 200


def test_a_best_that_was_not_kept_is_replaced_by_the_best_of_those_that_were(store: LocalStore) -> None:
    save_measured(take_attempt(store, RUN), [300, 400])
    store.delete(f"{FOLDER}/best")
    resumed = latest_complete(store, FOLDER)
    reporter, attempt = Notes(), take_attempt(store, RUN)
    assert settle_best(attempt, resumed, wanted=True, reporter=reporter) == BestPointer(300, 2.5, attempt.number)
    assert reporter.warnings == [
        "the lowest validation loss was 2.0000 after step 200, which was not kept: of what is kept, step 300 is the "
        "best, with 2.5000"
    ]
    assert settle_best(attempt, resumed, wanted=False, reporter=reporter) is None
    assert reporter.notes == ["`checkpoint.best` is no longer asked for: step 300 is not kept any longer"]
    assert stored(store)[1] is None


@pytest.mark.s3
def test_a_bucket_keeps_and_protects_the_best_as_a_disk_does(s3_bucket: str) -> None:
    store = open_folder(f"s3://{s3_bucket}/store")
    old = take_attempt(store, RUN)
    save_measured(old, [100, 200, 300, 400], keep=1)
    assert stored(store) == ([400, 200], 200)
    new = take_attempt(store, RUN)
    resumed = latest_complete(store, FOLDER, attempt=new)
    assert settle_best(new, resumed, wanted=True) == BestPointer(200, 2.0, new.number)
    with pytest.raises(Fenced), CheckpointWriter(old, spec=SPEC) as writer:
        writer.save(500, whole(some_state()), {}, best_loss=0.5, blocking=True)
    assert stored(store) == ([400, 200], 200)
