"""Stages of the workflow as events of their run: recorded as they end, read as the last of each name."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshed.errors import InputError
from trainshed.observe.event_log import read_events
from trainshed.observe.run_status import run_status_from_events
from trainshed.observe.stages import UNRECORDED, StageRecorder, recorded_stage, stage_records
from trainshed.storage import LocalStore


def test_a_stage_is_recorded_as_it_ends_and_belongs_to_no_attempt(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    recorder = StageRecorder(store)
    with recorder.stage("fetch") as outcome:
        outcome.skipped, outcome.what = True, "it was already there"
    with recorder.stage("prepare") as outcome:
        outcome.what = "12 tokens"
    with pytest.raises(InputError), recorder.stage("export"):
        raise InputError("no such format")
    events = list(read_events(store, ""))
    assert {event["attempt"] for event in events} == {0}
    assert [(record.name, record.state, record.what) for record in stage_records(events)] == [
        ("fetch", "skipped", "it was already there"),
        ("prepare", "done", "12 tokens"),
        ("export", "failed", "no such format"),
    ]
    status = run_status_from_events(events)
    assert status.attempt is None
    assert status.last_error == "export failed: no such format"


def test_a_stage_that_is_done_again_counts_by_its_last_time(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(ZeroDivisionError), StageRecorder(store).stage("prepare"):
        raise ZeroDivisionError("by zero")
    StageRecorder(store).emit("prepare", "started")
    (record,) = stage_records(read_events(store, ""))
    assert (record.state, record.what, record.ended) == ("started", None, None)
    status = run_status_from_events(read_events(store, ""))
    assert (status.summary(), status.last_error) == ("prepare started", None)


def test_training_that_came_after_a_failed_stage_is_what_is_told(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(OSError, match="gone"), StageRecorder(store).stage("prepare"):
        raise OSError("gone")
    events = list(read_events(store, ""))
    start = {"kind": "start", "attempt": 1, "rank": 0, "time": events[-1]["time"] + 1}
    status = run_status_from_events([*events, start])
    assert (status.attempt, status.stage, status.last_error) == (1, None, None)


def test_a_store_that_is_full_does_not_fail_the_stage(tiny_disk: Path) -> None:
    (tiny_disk / "filler").write_bytes(b"x" * (1 << 20))
    with StageRecorder(LocalStore(tiny_disk)).stage("prepare") as outcome:
        outcome.what = "done all the same"


def test_without_a_store_nothing_is_written_and_parts_have_names_of_their_own() -> None:
    with UNRECORDED.stage("prepare"):
        pass
    assert (recorded_stage("prepare", 0, 1), recorded_stage("tokenise", 2, 8)) == ("prepare", "tokenise 3/8")
