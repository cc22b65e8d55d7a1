"""A bucket that fails requests, loses answers and goes away: whatever is stored through it is right."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from support.servers.faulty_proxy import FAULTS, FaultyProxy, faulty
from support.servers.s3_server import S3Server
from trainshed.storage import Store, copy_tree, list_folders, open_folder
from trainshed.storage.attempts import take_attempt

pytestmark = pytest.mark.s3
RATE = 0.2


def write_files(folder: Path, count: int) -> dict[str, bytes]:
    """Small files, and some that are sent in several parts."""
    random = Random(1)
    files = {f"part-{number:03d}/file.bin": random.randbytes(random.randrange(1, 50_000)) for number in range(count)}
    files["large.bin"] = random.randbytes(12_000_000)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return files


@pytest.fixture
def proxy(s3_server: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with faulty(s3_server.endpoint, rate=RATE, seed=7) as started:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", started.url)
        yield started


def content_of(store: Store) -> dict[str, bytes]:
    return {info.path: store.read(info.path) for info in store.list() if not info.path.startswith(".trainshed")}


def test_a_copy_through_it_there_and_back_is_the_same(proxy: FaultyProxy, s3_bucket: str, tmp_path: Path) -> None:
    files = write_files(tmp_path / "here", 40)
    address = f"s3://{s3_bucket}/copied"

    def go_away() -> None:
        proxy.is_away.set()
        time.sleep(3)
        proxy.is_away.clear()

    away = threading.Timer(0.5, go_away)
    away.start()
    copy_tree(str(tmp_path / "here"), address)
    away.join()
    copy_tree(address, str(tmp_path / "back"))
    got = {name: (tmp_path / "back" / name).read_bytes() for name in files}
    assert got == files
    proxy.rate = 0.0
    assert content_of(open_folder(address)) == files
    assert set(proxy.faults) >= set(FAULTS), "each fault has happened"


def test_listing_writing_and_removing_are_as_ever(proxy: FaultyProxy, s3_bucket: str) -> None:
    store = open_folder(f"s3://{s3_bucket}/small")
    for number in range(30):
        store.put(f"{number % 3}/{number:02d}.json", b"%d" % number)
        assert len(list(store.list())) == number + 1
    assert list_folders(store) == ["0", "1", "2"]
    for number in range(15):
        store.delete(f"{number % 3}/{number:02d}.json")
    assert sorted(content_of(store).values(), key=int) == [b"%d" % number for number in range(15, 30)]


def test_attempts_are_taken_once_each(proxy: FaultyProxy, s3_bucket: str) -> None:
    store = open_folder(f"s3://{s3_bucket}/run")
    numbers = [take_attempt(store, "").number for _ in range(20)]
    assert numbers == sorted(set(numbers))
