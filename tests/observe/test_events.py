"""Events: written so that nothing is lost, read back in order, followed while they are written."""

from __future__ import annotations

import json
import math
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainshed.errors import CorruptData, StorageError, TrainshedError
from trainshed.observe import event_log
from trainshed.observe.event_log import (
    BucketEventFollower,
    EventFollower,
    LocalSegmentWriter,
    follow_events,
    is_mounted_bucket,
    parse_events,
    read_events,
    read_steps,
    ring_dump_path,
)
from trainshed.observe.events import EVENT_KINDS, EventWriter, encode_event
from trainshed.storage import LocalStore, ObjectInfo, list_after, list_folders, open_folder, open_store

RUN = "runs/quick/0123abcd"
STEP: dict[str, Any] = {
    "loss": 2.5,
    "grad_norm": 1.0,
    "lr": 1e-3,
    "tokens": 4096,
    "step_seconds": 0.5,
    "tokens_per_second_per_gpu": 8192.0,
    "mfu": None,
    "mfu_full_attention": None,
    "batch_hash": "0f",
    "skipped": False,
}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def writer(store: LocalStore, *, attempt: int = 1, rank: int | None = 0, **options: Any) -> EventWriter:
    return EventWriter(store, RUN, attempt=attempt, rank=rank, **options)


def texts(events: Any) -> list[str]:
    return [event["text"] for event in events]


def files(store: LocalStore) -> list[str]:
    return [info.path.removeprefix(f"{RUN}/events/") for info in store.list(RUN)]


def test_an_event_is_in_its_file_when_emit_returns(store: LocalStore, tmp_path: Path) -> None:
    with writer(store) as events:
        events.emit("step", 7, **STEP, memory_gib=3.5, moe_z=None)
        line = (tmp_path / RUN / "events/attempt-0001/000001.jsonl").read_bytes()
    event = json.loads(line)
    assert line.endswith(b"\n")
    assert list(event)[:6] == ["v", "time", "attempt", "rank", "kind", "step"]
    assert {key: event[key] for key in ("v", "attempt", "rank", "kind", "step")} == {
        "v": 1,
        "attempt": 1,
        "rank": 0,
        "kind": "step",
        "step": 7,
    }
    assert event["mfu"] is None  # said, though it is not known
    assert event["memory_gib"] == 3.5
    assert "moe_z" not in event


def test_what_is_not_in_the_schema_is_refused(store: LocalStore) -> None:
    with writer(store) as events:
        for kind, step, values, message in [
            ("stepp", 1, STEP, "no kind of event named 'stepp'; there are alarm, answers, checkpoint, devices, "),
            ("step", 1, {**STEP, "los": 1.0}, "'step' events have no key 'los'"),
            ("note", None, {}, "a 'note' event needs the key 'text'"),
            ("step", None, STEP, "a 'step' event needs its step"),
            ("phase", None, {"name": "lod", "seconds": 1.0}, "name of a 'phase' event is one of install, image, "),
            ("note", None, {"text": object()}, "a value of a 'note' event cannot be written"),
        ]:
            with pytest.raises(ValueError, match=message):
                events.emit(kind, step, **values)
    assert list(read_events(store, RUN)) == []
    assert " ".join(EVENT_KINDS) == (
        "start stage phase step train_phase ranks devices alarm profile validation answers evaluation early_stop "
        "checkpoint resume probe non_finite spike signal stall failure preflight note warning end"
    )


def test_what_is_no_number_is_null(store: LocalStore) -> None:
    with writer(store) as events:
        events.emit("step", 1, **{**STEP, "loss": math.nan, "grad_norm": math.inf, "lr": np.float32(0.5)})
    (event,) = read_steps(store, RUN)
    assert (event["loss"], event["grad_norm"], event["lr"]) == (None, None, 0.5)


def test_no_writer_writes_into_anothers_segment(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "SEGMENT_BYTES", 150)
    with writer(store) as zombie, writer(store) as events, writer(store, rank=None) as launcher:
        zombie.emit("note", text="a")
        events.emit("note", text="b")
        zombie.emit("note", text="c")  # full: closed behind this
        zombie.emit("note", text="d")
        launcher.emit("note", text="e")
    assert files(store) == [f"attempt-0001/{number:06d}.jsonl" for number in (1, 2, 3, 4)]
    found = list(read_events(store, RUN))
    assert texts(found) == ["a", "c", "b", "d", "e"]
    assert [event["rank"] for event in found] == [0, 0, 0, 0, None]


def test_a_later_attempt_wins_where_a_step_was_done_again(store: LocalStore) -> None:
    for attempt, first in ((1, 1), (2, 3), (10, 4)):
        with writer(store, attempt=attempt) as events:
            for step in range(first, first + 3):
                events.emit("step", step, **STEP)
            events.emit("note", text=f"attempt {attempt}")
    assert [(event["step"], event["attempt"]) for event in read_steps(store, RUN)] == [
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 10),
        (5, 10),
        (6, 10),
    ]
    notes = [event for event in read_events(store, RUN) if event["kind"] == "note"]
    assert texts(notes) == ["attempt 1", "attempt 2", "attempt 10"]
    assert texts(list(read_events(store, RUN, attempt=2))[-1:]) == ["attempt 2"]


def test_other_ranks_keep_their_last_events_and_store_them_when_they_fail(store: LocalStore) -> None:
    with writer(store, rank=3, ring=2) as events:
        for text in "abc":
            events.emit("note", text=text)
        assert files(store) == []
        events.dump()
    assert files(store) == ["attempt-0001/rank-00003.jsonl"]
    assert texts(parse_events(store.read(ring_dump_path(RUN, 1, 3)), "its file")) == ["b", "c"]
    assert list(read_events(store, RUN)) == []


def test_a_follower_sees_each_event_once_across_segments_and_attempts(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "SEGMENT_BYTES", 150)
    follower = EventFollower(tmp_path / RUN)
    assert follower.poll() == []
    with writer(store) as first, writer(store, attempt=2) as second:
        first.emit("note", text="a")
        assert texts(follower.poll()) == ["a"]
        for text in "bcd":
            first.emit("note", text=text)
        second.emit("note", text="e")
        assert texts(follower.poll()) == ["b", "c", "d", "e"]
        with (tmp_path / RUN / "events/attempt-0002/000009.jsonl").open("ab", buffering=0) as file:
            file.write(b'{"v":1,"kind":"note",')
            assert follower.poll() == []
            file.write(b'"text":"f"}\n')
            assert texts(follower.poll()) == ["f"]
    assert follower.poll() == []


def test_a_torn_last_line_is_passed_over_and_any_other_is_an_error(store: LocalStore) -> None:
    with writer(store) as events:
        events.emit("note", text="whole")
    torn = f"{RUN}/events/attempt-0001/000002.jsonl"
    store.put(torn, b'{"v":1,"kind":"note","text":"half')
    assert texts(read_events(store, RUN)) == ["whole"]
    store.put(torn, b'{"v":1,"kind":"note"}\n\x00\x00\n')
    with pytest.raises(CorruptData, match=r"000002\.jsonl:2: this line holds no event"):
        list(read_events(store, RUN))
    store.put(torn, b'{"v":2,"kind":"note"}\n')
    with pytest.raises(TrainshedError, match="version 2 were written by a newer Trainshed"):
        list(read_events(store, RUN))


KILLED = """
import os, signal, sys
from trainshed.observe.events import EventWriter
from trainshed.storage import LocalStore
events = EventWriter(LocalStore(sys.argv[1]), sys.argv[2], attempt=1, rank=0)
for number in range(100):
    events.emit("note", text=str(number))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_nothing_that_was_emitted(store: LocalStore, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), RUN])
    assert done.returncode == -signal.SIGKILL
    assert texts(read_events(store, RUN)) == [str(number) for number in range(100)]


@contextmanager
def no_more_space(file: Path) -> Iterator[None]:
    """No file may grow beyond what this one has, and ten bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_delays_events_and_does_not_stop_the_run(store: LocalStore, tmp_path: Path) -> None:
    with writer(store) as events:
        events.emit("note", text="a")
        with no_more_space(tmp_path / RUN / "events/attempt-0001/000001.jsonl"):
            events.emit("note", text="b")
            events.emit("note", text="c")
            assert texts(read_events(store, RUN)) == ["a"]
            with pytest.raises(StorageError, match="events cannot be written: File too large"):
                events.flush()
        events.emit("note", text="d")
    found = list(read_events(store, RUN))
    assert texts(found) == ["a", "b", "c", "d", "events could not be written for a while: File too large"]
    assert found[-1]["kind"] == "warning"


def test_many_threads_write_whole_lines(store: LocalStore) -> None:
    with writer(store) as events:
        threads = [
            threading.Thread(target=lambda: [events.emit("note", text="x" * 50) for _ in range(100)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = list(read_events(store, RUN))
    assert len(found) == 400
    assert [event["time"] for event in found] == sorted(event["time"] for event in found)


class Bucket(LocalStore):
    """A bucket as the writer sees one: whole objects only, with troubles on request."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.open = threading.Event()
        self.open.set()
        self.troubles: list[str] = []
        self.puts = self.reads = 0
        self.listed: list[str] = []

    @property
    def url(self) -> str:
        return "s3://bucket"

    def list_after(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        self.listed.append(after)
        return (info for info in super().list(prefix) if info.path > after)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        self.reads += 1
        return super().read(path, start, end)

    def put(self, path: str, data: bytes, *, expect: str | None = None) -> ObjectInfo:
        self.open.wait()
        self.puts += 1
        trouble = self.troubles.pop(0) if self.troubles else ""
        if trouble == "refused":
            raise StorageError("the store cannot be reached")
        info = super().put(path, data, expect=expect)
        if trouble == "answer lost":
            raise StorageError("the connection broke")
        return info


def test_a_bucket_that_hangs_does_not_hold_up_the_run(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    bucket.open.clear()
    with writer(bucket, segment_seconds=0.001) as events:
        for number in range(200):
            events.emit("note", text=str(number))
        assert bucket.puts == 0
        with pytest.raises(StorageError, match=r"not stored after 0\.01 seconds"):
            events.flush(timeout_seconds=0.01)
        bucket.open.set()
        events.flush()
        assert texts(read_events(bucket, RUN)) == [str(number) for number in range(200)]
    assert bucket.puts <= 3  # what gathers while one segment is on its way makes one more


def test_a_bucket_gets_one_segment_at_a_time_and_all_at_the_end(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    with writer(bucket) as events:
        events.emit("note", text="a")
        events.emit("note", text="b")
        assert bucket.puts == 0
        events.dump()
        assert bucket.puts == 1
        events.emit("note", text="c")
    assert bucket.puts == 2
    assert texts(read_events(bucket, RUN)) == ["a", "b", "c"]


def test_trouble_in_a_bucket_keeps_the_order_and_doubles_nothing(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    bucket.troubles = ["refused", "answer lost"]
    with writer(bucket) as events:
        events.emit("note", text="a")
        for message, text in (("cannot be reached", "b"), ("the connection broke", "c")):
            with pytest.raises(StorageError, match=message):
                events.flush()
            events.emit("note", text=text)
    assert texts(read_events(bucket, RUN)) == [
        "a",
        "b",
        "c",
        "events could not be stored for a while: the connection broke",
    ]


def test_a_bucket_that_never_answers_is_told_at_the_end(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    bucket.troubles = ["refused"] * 10
    events = writer(bucket)
    events.emit("note", text="a")
    with pytest.raises(StorageError, match="the store cannot be reached"):
        events.close()


@pytest.mark.s3
def test_two_writers_of_one_attempt_share_a_real_bucket(s3_bucket: str) -> None:
    store, _ = open_store(f"s3://{s3_bucket}")
    with EventWriter(store, RUN, attempt=1, rank=0) as first, EventWriter(store, RUN, attempt=1, rank=None) as second:
        first.emit("note", text="a")
        first.flush()
        second.emit("note", text="b")
        second.flush()
        first.emit("note", text="c")
    names = [info.path for info in store.list(f"{RUN}/events")]
    assert names == [f"{RUN}/events/attempt-0001/{number:06d}.jsonl" for number in (1, 2, 3)]
    assert texts(read_events(store, RUN)) == ["a", "b", "c"]


def put_segment(bucket: Bucket, attempt: int, number: int, *texts_of: str) -> None:
    lines = [encode_event("note", None, {"text": text}, attempt=attempt, rank=0) for text in texts_of]
    LocalStore(bucket._root).put(f"{RUN}/events/attempt-{attempt:04d}/{number:06d}.jsonl", b"".join(lines))


def test_a_bucket_is_followed_by_one_listing_from_where_the_last_one_ended(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    follower = BucketEventFollower(bucket, RUN, list_seconds=0.0)
    assert follower.poll() == []
    put_segment(bucket, 1, 1, "a")
    put_segment(bucket, 1, 2, "b")
    assert texts(follower.poll()) == ["a", "b"]
    put_segment(bucket, 1, 3, "c")
    put_segment(bucket, 2, 1, "d")
    put_segment(bucket, 0, 1, "of no attempt")
    found = [text for _ in range(4) for text in texts(follower.poll())]
    assert found == ["of no attempt", "c", "d"] or found == ["c", "d", "of no attempt"]
    assert bucket.reads == 5
    assert bucket.listed
    assert all(after.startswith(f"{RUN}/events/attempt-000") for after in bucket.listed)


def test_a_segment_that_grows_through_a_mount_is_read_on(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    follower = BucketEventFollower(bucket, RUN, list_seconds=0.0)
    put_segment(bucket, 1, 1, "a")
    assert texts(follower.poll()) == ["a"]
    segment = f"{RUN}/events/attempt-0001/000001.jsonl"
    second = encode_event("note", None, {"text": "b"}, attempt=1, rank=0)
    LocalStore(bucket._root).put(segment, LocalStore(bucket._root).read(segment) + second)
    found = [text for _ in range(2) for text in texts(follower.poll())]
    assert found == ["b"]


def test_a_bucket_is_asked_once_in_a_while_whoever_asks(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    put_segment(bucket, 1, 1, "a")
    follower = BucketEventFollower(bucket, RUN, list_seconds=3600.0)
    assert texts(follower.poll()) == ["a"]
    put_segment(bucket, 1, 2, "b")
    assert follower.poll() == []
    assert (bucket.listed, bucket.reads) == ([], 1)


def test_of_a_long_run_in_a_bucket_only_its_end_and_its_starts_are_read(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    for attempt in (1, 2):
        for number in range(1, 21):
            put_segment(bucket, attempt, number, f"{attempt}.{number}")
    put_segment(bucket, 0, 1, "of no attempt")
    follower = follow_events(bucket, RUN, newest_segments=3)
    assert texts(follower.poll()) == ["of no attempt", "1.1", "2.1", "2.18", "2.19", "2.20"]


def test_on_a_mounted_bucket_segments_are_closed_so_that_others_see_them(tmp_path: Path) -> None:
    lines = LocalSegmentWriter(tmp_path, lambda _: None, close_seconds=0.0)
    for number in range(3):
        lines.append(f"{number}\n".encode())
    lines.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001.jsonl", "000002.jsonl", "000003.jsonl"]


@pytest.mark.parametrize(("path", "mounted"), [("/gcs/runs/a", True), ("/gcs2/runs", False), ("/", False)])
def test_a_mounted_bucket_is_told_by_the_table_of_mounts(path: str, mounted: bool) -> None:
    mounts = "overlay / overlay rw 0 0\nmy-bucket /gcs fuse.gcsfuse rw,nosuid 0 0\nserver:/d /gcs2 nfs4 rw 0 0\n"
    assert is_mounted_bucket(Path(path), mounts) is mounted


@pytest.mark.s3
def test_a_real_bucket_is_followed_while_two_writers_write(s3_bucket: str) -> None:
    store, _ = open_store(f"s3://{s3_bucket}")
    follower = BucketEventFollower(store, RUN, list_seconds=0.0)
    assert follower.poll() == []
    found: list[str] = []
    with EventWriter(store, RUN, attempt=1, rank=0) as first, EventWriter(store, RUN, attempt=0, rank=None) as second:
        for number in range(3):
            first.emit("note", text=f"rank 0: {number}")
            first.flush()
            second.emit("note", text=f"stage: {number}")
            second.flush()
            found += [text for _ in range(2) for text in texts(follower.poll())]
            assert len(found) == 2 * (number + 1)
    assert len(set(found)) == 6
    assert [info.path for info in list_after(store, RUN, f"{RUN}/events/attempt-0001/000002.jsonl")] == [
        f"{RUN}/events/attempt-0001/000003.jsonl"
    ]
    assert list_folders(store, f"{RUN}/events") == ["attempt-0000", "attempt-0001"]
    assert list_folders(open_folder(f"s3://{s3_bucket}/{RUN}")) == ["events"]
