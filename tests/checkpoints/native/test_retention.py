"""Which checkpoints stay and which go, on a disk and in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs.checkpoint_parts import FOLDER, RUN, HookedStore, Ranks, by_rows, loaded, same, save_whole, some_state
from trainshed.checkpoints.native.folder import complete_checkpoints, keep_newest, latest_complete, list_checkpoints
from trainshed.errors import Fenced, InputError, StorageError
from trainshed.storage import LocalStore, Store, open_folder
from trainshed.storage.attempts import Attempt, take_attempt


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def steps(store: Store) -> list[int]:
    return [found.step for found in complete_checkpoints(store, FOLDER)]


def test_the_newest_stay_and_the_rest_goes_folder_and_all(store: LocalStore, tmp_path: Path) -> None:
    attempt = take_attempt(store, RUN)
    pruned: list[int] = []

    def listen(kind: str, *, step: int, phase: str = "", **_: object) -> None:
        if phase == "pruned":
            pruned.append(step)

    for step in (100, 200, 300, 400):
        save_whole(attempt, step, some_state(), keep=2, on_event=listen)
    assert steps(store) == [400, 300]
    assert pruned == [100, 200]
    assert {path.name for path in (tmp_path / FOLDER).glob("step-*")} == {"step-00000300", "step-00000400"}
    with pytest.raises(InputError, match="the newest checkpoint is never removed"):
        keep_newest(store, FOLDER, 0, check_fence=lambda: None)


def test_the_checkpoint_a_run_goes_on_from_stays_until_a_newer_one_is_committed(store: LocalStore) -> None:
    save_whole(take_attempt(store, RUN), 100, some_state())

    def refuse(what: str, path: str) -> None:
        assert steps(store) == [100]
        if "step-00000200" in path and path.endswith("manifest.json"):
            raise StorageError("the store went away")

    second = take_attempt(store, RUN)
    with pytest.raises(StorageError, match="the store went away"):
        save_whole(Attempt(HookedStore(store, refuse), RUN, second.number), 200, some_state(), keep=1, resumed_step=100)
    assert steps(store) == [100]
    save_whole(second, 300, some_state(), keep=1, resumed_step=100)
    assert steps(store) == [300]
    assert list_checkpoints(store, FOLDER).incomplete == (), "the save that failed is gone too"


def test_after_a_fall_back_what_is_stored_now_counts_as_newer_than_what_lay_ahead(store: LocalStore) -> None:
    first = take_attempt(store, RUN)
    for step in (100, 200, 300):
        save_whole(first, step, some_state())
    second = take_attempt(store, RUN)  # its operator goes back to step 100
    save_whole(second, 150, some_state(), keep=2, resumed_step=100)
    assert steps(store) == [150, 300]
    found = latest_complete(store, FOLDER)
    assert found is not None
    assert found.step == 150
    save_whole(second, 300, some_state(5), keep=2, resumed_step=100)
    assert steps(store) == [300, 150]
    again = complete_checkpoints(store, FOLDER)[0]
    assert again.attempt == 2
    assert same(loaded(store, again, some_state()), some_state(5)), "the step was saved anew, over the old one"
    assert {info.path.rpartition("/")[2] for info in store.list(again.path)} == {
        ".metadata",
        "manifest.json",
        "pieces-0002.bin",
        "__0_2.distcp",
    }


def test_what_earlier_attempts_left_unfinished_makes_room_before_the_first_save(store: LocalStore) -> None:
    store.put(f"{FOLDER}/step-00000200/__0_1.distcp", b"half")
    store.put(f"{FOLDER}/step-00000300/__1_2.distcp", b"of the attempt that is running")
    store.put(f"{FOLDER}/step-00000300/notes.txt", b"not ours")
    take_attempt(store, RUN)
    seen: list[set[str]] = []

    def look(what: str, path: str) -> None:
        if what == "open":
            seen.append({info.path.removeprefix(f"{FOLDER}/") for info in store.list(FOLDER)})

    second = take_attempt(store, RUN)
    save_whole(Attempt(HookedStore(store, look), RUN, second.number), 100, some_state())
    assert seen == [{"step-00000300/__1_2.distcp", "step-00000300/notes.txt"}]
    assert steps(store) == [100]
    assert [each.step for each in list_checkpoints(store, FOLDER).incomplete] == [300], (
        "a file that is not ours is left"
    )


@pytest.mark.s3
def test_a_bucket_holds_commits_fences_and_prunes_as_a_disk_does(s3_bucket: str) -> None:
    store = open_folder(f"s3://{s3_bucket}/store")
    old = take_attempt(store, RUN)
    zombie = Ranks(old, 2, keep=1)
    for step in (100, 200):
        assert zombie.save(step, by_rows(some_state(step), 2)) == [None, None]
    assert steps(store) == [200]
    new = take_attempt(store, RUN)
    found = latest_complete(store, FOLDER, attempt=new)
    assert found is not None
    assert same(loaded(store, found, some_state()), some_state(200))
    assert all(isinstance(error, Fenced) for error in zombie.save(300, by_rows(some_state(), 2)))
    current = Ranks(new, 3, keep=1, resumed_step=found.step)
    assert current.save(300, by_rows(some_state(3), 3)) == [None] * 3
    assert steps(store) == [300]
    (newest,) = complete_checkpoints(store, FOLDER)
    newest.manifest.verify_files(store, newest.path)
    assert same(loaded(store, newest, some_state()), some_state(3))
    assert {info.path.split("/")[4] for info in store.list(FOLDER)} == {"latest", "step-00000300"}
