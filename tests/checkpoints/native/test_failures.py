"""Saves that fail and bytes that rot: the checkpoint before stays, and the error says what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.runs.checkpoint_parts import (
    FOLDER,
    RUN,
    SPEC,
    HookedStore,
    Ranks,
    by_rows,
    loaded,
    same,
    save_whole,
    some_state,
    whole,
)
from trainshed.checkpoints.native.folder import complete_checkpoints, latest_complete
from trainshed.checkpoints.native.reader import load_checkpoint
from trainshed.checkpoints.native.shards import TensorShard
from trainshed.checkpoints.native.writer import CheckpointWriter
from trainshed.errors import CorruptData, NoSpace, StorageError, TrainshedError
from trainshed.reporting import SILENT
from trainshed.storage import LocalStore
from trainshed.storage.attempts import Attempt, take_attempt

STEP_100 = f"{FOLDER}/step-00000100"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


class Listener:
    """A reporter that remembers its warnings and notes."""

    task = SILENT.task

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_full_disk_keeps_the_checkpoint_before_and_training_may_go_on(tiny_disk: Path) -> None:
    store, state = LocalStore(tiny_disk), {"x": torch.randn(300, 500)}
    events: list[dict[str, Any]] = []
    attempt = take_attempt(store, RUN)
    writer = CheckpointWriter(attempt, spec=SPEC, keep=1, on_event=lambda kind, **rest: events.append(rest))
    writer.save(100, whole(state), {}, blocking=True)
    writer.save(200, whole(state), {})
    with pytest.raises(NoSpace, match="the disk is full"):
        writer.wait()
    assert "the disk is full" in events[-1]["what"]
    assert [found.step for found in complete_checkpoints(store, FOLDER)] == [100]
    assert not (tiny_disk / FOLDER / "step-00000200" / "__0_1.distcp").exists()
    smaller = {"x": torch.randn(10, 10)}  # what is left of the disk is usable: the failed save has given it back
    writer.save(300, whole(smaller), {}, blocking=True)
    assert [found.step for found in complete_checkpoints(store, FOLDER)] == [300]
    assert same(loaded(store, complete_checkpoints(store, FOLDER)[0], smaller), smaller)


def test_a_rank_that_fails_fails_the_save_on_every_rank_with_its_words(store: LocalStore) -> None:
    full = True

    def fill(what: str, path: str) -> None:
        if what == "write" and full:
            raise NoSpace("the disk is full", where=path, hint="free some space")

    attempt = take_attempt(store, RUN)
    ranks = Ranks(attempt, 3, {2: HookedStore(store, fill)})
    for number, error in enumerate(ranks.save(100, by_rows(some_state(), 3))):
        assert isinstance(error, NoSpace), number
        assert str(error).startswith(f"{STEP_100}/__2_1.distcp: rank 2: the disk is full\nfree some space")
    assert latest_complete(store, FOLDER) is None
    assert list(store.list(FOLDER)) == [], "what the other ranks wrote is given back"
    full = False
    assert ranks.save(100, by_rows(some_state(), 3)) == [None] * 3
    assert same(loaded(store, complete_checkpoints(store, FOLDER)[0], some_state()), some_state())


def test_a_fault_of_ours_on_one_rank_is_told_as_such(store: LocalStore) -> None:
    def stumble(what: str, path: str) -> None:
        raise ZeroDivisionError("division by zero")

    errors = Ranks(take_attempt(store, RUN), 2, {1: HookedStore(store, stumble)}).save(1, by_rows(some_state(), 2))
    assert [str(error) for error in errors] == ["rank 1: ZeroDivisionError: division by zero"] * 2


def test_a_rank_that_never_comes_is_named_and_nothing_is_committed(store: LocalStore) -> None:
    ranks = Ranks(take_attempt(store, RUN), 3, timeout_seconds=2.0)
    pieces = by_rows(some_state(), 3)
    ranks.writers = ranks.writers[:2]
    leader, follower = ranks.save(100, pieces[:2])
    assert "rank 2 wrote no part within 2 s" in str(leader)
    assert str(follower) == str(leader)
    assert complete_checkpoints(store, FOLDER) == []


def test_an_end_in_the_middle_does_not_wait_for_the_others(store: LocalStore) -> None:
    writer = Ranks(take_attempt(store, RUN), 2).writers[0]

    def train() -> None:
        with writer:
            writer.save(100, by_rows(some_state(), 2)[0], {})
            raise KeyError("training failed")

    with pytest.raises(KeyError):
        train()
    with pytest.raises(StorageError, match="rank 1 wrote no part before the run ended"):
        writer.wait()


def test_elements_without_an_owner_or_with_two_are_refused(store: LocalStore) -> None:
    tensor = torch.ones(4, 4)
    ranks = Ranks(take_attempt(store, RUN), 2)
    for pieces in (
        [{"x": TensorShard((4, 4), (0, 0), tensor)}, {"x": TensorShard((4, 4), (0, 0), tensor)}],
        [
            {"x": TensorShard((4, 4), (0, 0), tensor[:2])},
            {"x": TensorShard((4, 4), (2, 0), tensor[2:], is_owner=False)},
        ],
    ):
        errors = ranks.save(1, pieces)
        assert all("elements of a tensor of 16" in str(error) for error in errors)
    disagreeing = [{"x": TensorShard((4, 4), (0, 0), tensor[:2])}, {"x": TensorShard((4, 5), (2, 0), torch.ones(2, 5))}]
    assert all("ranks disagree" in str(error) for error in ranks.save(1, disagreeing))
    assert complete_checkpoints(store, FOLDER) == []


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_is_found_at_load_with_the_way_to_the_checkpoint_before(
    store: LocalStore, tmp_path: Path
) -> None:
    attempt, state = take_attempt(store, RUN), some_state()
    for step in (100, 200):
        save_whole(attempt, step, state)
    newest = complete_checkpoints(store, FOLDER)[0]
    file = tmp_path / newest.path / "__0_1.distcp"
    flip(file, file.read_bytes().index(state["model.embedding.weight"].numpy().tobytes()) + 5)
    with pytest.raises(CorruptData, match=r"the bytes of model\.embedding\.weight in __0_1\.distcp") as caught:
        loaded(store, newest, state)
    assert caught.value.where == str(file)
    assert caught.value.hint == (
        f"`trainshed checkpoints {tmp_path}/{RUN} --verify --prune` removes it, "
        f"and the run goes on from step 100 ({tmp_path}/{STEP_100})"
    )
    untouched = {"model.norm.weight": state["model.norm.weight"]}
    assert same(loaded(store, newest, untouched), untouched)
    (tmp_path / newest.path / "manifest.json").unlink()
    flip(tmp_path / STEP_100 / "pieces-0001.bin", 9)
    with pytest.raises(CorruptData, match="the table of pieces") as caught:
        loaded(store, complete_checkpoints(store, FOLDER)[0], state)
    assert "there is no earlier checkpoint" in str(caught.value.hint)


def test_latest_that_names_an_incomplete_one_leads_to_the_one_before_and_says_so(
    store: LocalStore, tmp_path: Path
) -> None:
    attempt, state = take_attempt(store, RUN), some_state()
    for step in (100, 200):
        save_whole(attempt, step, state)
    (tmp_path / FOLDER / "step-00000200" / "__0_1.distcp").write_bytes(b"cut")
    listener = Listener()
    found = latest_complete(store, FOLDER, reporter=listener)
    assert found is not None
    assert found.step == 100
    assert len(listener.warnings) == 1
    assert listener.warnings[0].startswith("`latest` names step 200, which is not complete (__0_1.distcp has 3 bytes")
    assert listener.warnings[0].endswith("going on from step 100")
    store.delete(f"{STEP_100}/manifest.json")
    assert latest_complete(store, FOLDER, reporter=listener) is None
    assert listener.warnings[1].endswith("there is no other to go on from")
    store.put(f"{FOLDER}/latest", b"{")
    with pytest.raises(CorruptData, match="`latest` cannot be read"):
        latest_complete(store, FOLDER)


def test_trouble_with_removing_what_is_old_does_not_undo_the_new(store: LocalStore) -> None:
    def refuse(what: str, path: str) -> None:
        if what == "delete":
            raise StorageError("the store is in a bad mood", where=path)

    events: list[tuple[str, dict[str, Any]]] = []
    take_attempt(store, RUN)
    attempt = Attempt(HookedStore(store, refuse), RUN, 1)
    writer = CheckpointWriter(attempt, spec=SPEC, keep=1, on_event=lambda kind, **rest: events.append((kind, rest)))
    for step in (100, 200):
        writer.save(step, whole(some_state()), {}, blocking=True)
    assert events[-1][0] == "warning"
    assert "step 200 is stored, but what it replaces could not be removed" in events[-1][1]["text"]
    assert [found.step for found in complete_checkpoints(store, FOLDER)] == [200, 100]


def test_facts_that_the_writer_states_itself_are_refused(store: LocalStore) -> None:
    with pytest.raises(TrainshedError, match="'tensors' is a fact"):
        CheckpointWriter(take_attempt(store, RUN), spec=SPEC).save(1, {}, {"tensors": 3}, blocking=True)


def test_load_reads_only_what_a_piece_needs(store: LocalStore) -> None:
    read: list[tuple[str, int, int | None]] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
            read.append((path.rpartition("/")[2], start, end))
            return store.read(path, start, end)

        def read_into(self, path: str, start: int, memory: memoryview) -> int:
            read.append((path.rpartition("/")[2], start, start + len(memory)))
            return store.read_into(path, start, memory)

    state = some_state()
    assert not any(Ranks(take_attempt(store, RUN), 3).save(1, by_rows(state, 3)))
    (found,) = complete_checkpoints(store, FOLDER)
    pieces = by_rows(state, 3)[2]
    load_checkpoint(Counting(), found, pieces)
    assert {file for file, _, _ in read} == {"pieces-0001.bin", "__2_1.distcp", "__0_1.distcp"}
    assert sum(file == "__2_1.distcp" for file, _, _ in read) == 1, "neighbours are read at once"
