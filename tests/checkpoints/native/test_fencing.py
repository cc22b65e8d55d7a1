"""Attempts that were given up and will not die: nothing they write counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs.checkpoint_parts import FOLDER, RUN, HookedStore, Ranks, by_rows, loaded, same, save_whole, some_state
from trainshed.checkpoints.native.folder import complete_checkpoints, latest_complete, list_checkpoints
from trainshed.errors import Fenced
from trainshed.storage import LocalStore, Manifest, Store
from trainshed.storage.attempts import Attempt, take_attempt


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def state_of(store: Store) -> dict[str, str]:
    return {info.path: info.version for info in store.list(RUN)}


def test_a_zombie_attempt_changes_nothing_that_counts(store: LocalStore) -> None:
    old = take_attempt(store, RUN)
    zombie = Ranks(old, 2, keep=1)
    assert zombie.save(100, by_rows(some_state(1), 2)) == [None, None]
    new = take_attempt(store, RUN)
    assert latest_complete(store, FOLDER, attempt=new) is not None
    current = Ranks(new, 2, keep=3)
    assert current.save(200, by_rows(some_state(2), 2)) == [None, None]
    before = state_of(store)
    for step in (200, 300):
        assert all(isinstance(error, Fenced) for error in zombie.save(step, by_rows(some_state(9), 2)))
    assert state_of(store) == before
    assert [found.step for found in complete_checkpoints(store, FOLDER)] == [200, 100]
    assert same(loaded(store, complete_checkpoints(store, FOLDER)[0], some_state()), some_state(2))


def test_a_zombie_that_sleeps_in_the_middle_of_its_commit_does_not_move_latest(store: LocalStore) -> None:
    old = take_attempt(store, RUN)
    save_whole(old, 100, some_state(1))
    resumed = []

    def sleep(what: str, path: str) -> None:
        if what == "put" and path.endswith("/latest"):  # checked, about to write: and now a later attempt begins
            resumed.append(latest_complete(store, FOLDER, attempt=take_attempt(store, RUN)))

    with pytest.raises(Fenced):
        save_whole(Attempt(HookedStore(store, sleep), RUN, old.number), 200, some_state(2))
    # Its manifest was there before the later attempt looked: that one goes on from it, and both agree.
    assert [found and found.step for found in resumed] == [200]
    found = latest_complete(store, FOLDER)
    assert found is not None
    assert found.step == 200


def test_a_manifest_that_a_zombie_writes_too_late_is_not_where_the_run_goes_on(store: LocalStore) -> None:
    old = take_attempt(store, RUN)
    save_whole(old, 100, some_state(1))

    def sleep(what: str, path: str) -> None:
        if what == "put" and path.endswith("manifest.json"):
            found = latest_complete(store, FOLDER, attempt=take_attempt(store, RUN))
            assert found is not None
            assert found.step == 100

    with pytest.raises(Fenced):
        save_whole(Attempt(HookedStore(store, sleep), RUN, old.number), 200, some_state(9))
    found = latest_complete(store, FOLDER, attempt=take_attempt(store, RUN))
    assert found is not None
    assert found.step == 100, "the later attempt trains from step 100: 200 is still to come"
    save_whole(take_attempt(store, RUN), 200, some_state(2))
    newest = complete_checkpoints(store, FOLDER)[0]
    Manifest.read(store, f"{newest.path}/manifest.json").verify_files(store, newest.path)
    assert same(loaded(store, newest, some_state()), some_state(2)), "its own files, not the zombie's"
    assert not list_checkpoints(store, FOLDER).incomplete
