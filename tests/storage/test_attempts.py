"""Attempts of a run: taking a number, and what an attempt that was overtaken can no longer do."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trainshed.errors import Conflict, Fenced
from trainshed.storage import LocalStore, ObjectInfo, Store, open_folder
from trainshed.storage.attempts import newest_attempt, newest_attempt_record, take_attempt

RUN = "runs/demo/0123abcd"


class Meddled:
    """A store in which something happens around a put."""

    def __init__(
        self, store: Store, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
    ):
        self._store, self._before, self._after = store, before, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, path: str, data: bytes, *, expect: str | None = None) -> ObjectInfo:
        self._before()
        info = self._store.put(path, data, expect=expect)
        self._after()
        return info


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_each_attempt_takes_the_next_number_and_writes_down_who_it_is(store: LocalStore) -> None:
    assert newest_attempt(store, RUN) == 0
    assert [take_attempt(store, RUN).number for _ in range(3)] == [1, 2, 3]
    assert newest_attempt(store, RUN) == 3
    records = [json.loads(store.read(f"{RUN}/attempts/000{number}.json")) for number in (1, 2, 3)]
    assert [record["attempt"] for record in records] == [1, 2, 3]
    assert len({record["writer"] for record in records}) == 3
    assert take_attempt(store, "").number == 1, "a store whose root is the run's folder"


@pytest.mark.parametrize("damage", [b"", b'{"attempt": 1, "ho', b"\xff\x00", b"[]", b"{}", b'{"host": 7}'])
def test_a_damaged_record_still_counts_and_names_nobody(damage: bytes, store: LocalStore) -> None:
    take_attempt(store, RUN)
    store.put(f"{RUN}/attempts/0001.json", damage)
    record = newest_attempt_record(store, RUN)
    assert record == {"attempt": 1, "host": None, "pid": None}
    assert take_attempt(store, RUN).number == 2


def test_attempts_that_start_together_get_different_numbers(store: LocalStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: take_attempt(store, RUN).number, range(8)))
    assert sorted(taken) == list(range(1, 9))


def test_an_attempt_is_fenced_once_a_later_one_has_begun(store: LocalStore) -> None:
    first = take_attempt(store, RUN)
    first.put(f"{RUN}/thing", b"first")
    first.put(f"{RUN}/thing", b"first again")
    second = take_attempt(store, RUN)
    with pytest.raises(Fenced, match="attempt 1 of this run was overtaken") as caught:
        first.check()
    assert caught.value.where == f"{store.url}/{RUN}/attempts/0002.json"
    with pytest.raises(Fenced):
        first.put(f"{RUN}/thing", b"zombie")
    second.check()
    second.put(f"{RUN}/thing", b"second")
    assert store.read(f"{RUN}/thing") == b"second"


@pytest.mark.parametrize("there_before", [True, False])
def test_a_zombie_that_passed_its_check_and_then_slept_overwrites_nothing(
    store: LocalStore, there_before: bool
) -> None:
    if there_before:
        store.put(f"{RUN}/thing", b"before")

    def meanwhile() -> None:
        take_attempt(store, RUN).put(f"{RUN}/thing", b"later")

    first = take_attempt(store, RUN)
    sleepy = type(first)(Meddled(store, before=meanwhile), RUN, first.number)
    with pytest.raises(Fenced):
        sleepy.put(f"{RUN}/thing", b"zombie")
    assert store.read(f"{RUN}/thing") == b"later"


def test_a_write_that_arrived_and_whose_answer_was_lost_counts(store: LocalStore) -> None:
    def lost() -> None:
        raise Conflict("it is there already")

    attempt = take_attempt(Meddled(store, after=lost), RUN)
    assert attempt.number == 1
    assert attempt.put(f"{RUN}/thing", b"mine") == store.head(f"{RUN}/thing")
    assert store.read(f"{RUN}/thing") == b"mine"


def test_a_conflict_with_nobody_later_is_told_as_it_is(store: LocalStore) -> None:
    attempt = take_attempt(store, RUN)
    before = store.head(f"{RUN}/thing")
    store.put(f"{RUN}/thing", b"somebody")
    with pytest.raises(Conflict):
        attempt.put_over(before, f"{RUN}/thing", b"mine")


@pytest.mark.s3
def test_attempts_in_a_bucket(s3_bucket: str) -> None:
    store = open_folder(f"s3://{s3_bucket}/store")
    first = take_attempt(store, RUN)
    first.put(f"{RUN}/thing", b"first")
    first.put(f"{RUN}/thing", b"first again")
    second = take_attempt(store, RUN)
    with pytest.raises(Fenced):
        first.put(f"{RUN}/thing", b"zombie")
    second.put(f"{RUN}/thing", b"second")
    assert store.read(f"{RUN}/thing") == b"second"
