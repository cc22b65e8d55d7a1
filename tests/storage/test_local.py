from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainshed.errors import AccessDenied, Conflict, NoSpace, NotFound
from trainshed.storage import ABSENT, Folder, LocalStore, expand
from trainshed.storage import local as local_module


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".trainshed-*")]


def write(store: LocalStore, path: str, chunks: list[bytes], then: Exception | None = None) -> None:
    with store.writer(path) as writer:
        for chunk in chunks:
            writer.write(chunk)
        if then is not None:
            raise then


def test_what_is_written_is_read_back(store: LocalStore, tmp_path: Path) -> None:
    info = store.put("a/b.txt", b"0123456789")
    assert store.head("a/b.txt") == info
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"0123456789"
    assert store.read("a/b.txt") == b"0123456789"
    assert store.read("a/b.txt", 2, 5) == b"234"
    assert store.read("a/b.txt", 8, 99) == b"89"
    assert store.read("a/b.txt", 99) == b""
    assert list(store.stream("a/b.txt", 1, chunk_bytes=4)) == [b"1234", b"5678", b"9"]


def test_a_writer_shows_nothing_until_it_ends(store: LocalStore, tmp_path: Path) -> None:
    with store.writer("big") as writer:
        writer.write(b"one")
        writer.write(memoryview(b"two"))
        assert store.head("big") is None
        assert list(store.list()) == []
    assert store.read("big") == b"onetwo"
    assert writer.info == store.head("big")
    assert hidden(tmp_path) == []


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(store: LocalStore, tmp_path: Path) -> None:
    store.put("big", b"old")
    with pytest.raises(RuntimeError):
        write(store, "big", [b"new"], then=RuntimeError())
    assert store.read("big") == b"old"
    assert hidden(tmp_path) == []


def test_an_error_of_the_source_is_not_blamed_on_the_destination(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), store.writer("copy"):
        (tmp_path / "source").read_bytes()


def test_absent_means_that_only_one_of_many_writers_wins(store: LocalStore) -> None:
    won: list[int] = []

    def claim(number: int) -> None:
        try:
            store.put("attempt", str(number).encode(), expect=ABSENT)
            won.append(number)
        except Conflict:
            pass

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("attempt") == str(won[0]).encode()


def test_absent_holds_on_a_filesystem_without_hard_links(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    store.put("x", b"1", expect=ABSENT)
    with pytest.raises(Conflict):
        store.put("x", b"2", expect=ABSENT)
    assert store.read("x") == b"1"
    assert [info.path for info in store.list()] == ["x"]


def test_a_version_makes_a_counter_exact_under_many_writers(store: LocalStore) -> None:
    store.put("count", b"00")

    def add() -> None:
        for _ in range(10):
            while True:
                info = store.head("count")
                assert info is not None
                value = int(store.read("count"))
                try:
                    store.put("count", b"%02d" % (value + 1), expect=info.version)
                    break
                except Conflict:
                    continue

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read("count") == b"40"


def test_a_version_of_a_file_that_is_gone_is_a_conflict(store: LocalStore) -> None:
    info = store.put("x", b"1")
    store.delete("x")
    store.delete("x")
    with pytest.raises(Conflict, match="another writer"):
        store.put("x", b"2", expect=info.version)


names = st.lists(st.sampled_from(["a", "a.b", "a-b", "a/b", "b", "a/b.c", "b0", "é", "Z/z"]), unique=True)


@given(names)
def test_a_listing_is_sorted_by_the_whole_path(tmp_path_factory: pytest.TempPathFactory, paths: list[str]) -> None:
    if "a" in paths:
        paths = [path for path in paths if not path.startswith("a/")]
    store = LocalStore(tmp_path_factory.mktemp("list"))
    for path in paths:
        store.put(path, path.encode())
    assert [info.path for info in store.list()] == sorted(paths)


def test_a_listing_follows_links_but_not_in_circles(store: LocalStore, tmp_path: Path) -> None:
    store.put("real/x", b"1")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "up").symlink_to("..")
    (tmp_path / "nowhere").symlink_to("missing")
    paths = [info.path for info in store.list()]
    assert {"real/x", "link/x"} <= set(paths)
    assert len(paths) < 10


def test_missing_things_are_named(store: LocalStore, tmp_path: Path) -> None:
    assert store.head("nope") is None
    assert store.head("nope/deeper") is None
    assert list(store.list("nope")) == []
    with pytest.raises(NotFound, match="nope: no such file"):
        store.read("nope")
    with pytest.raises(NotFound, match="no such file"):
        list(store.stream("nope"))
    (tmp_path / "folder").mkdir()
    assert store.head("folder") is None
    with pytest.raises(NotFound, match="not a folder"):
        store.read("folder")


def test_a_file_where_a_folder_is_needed_is_named(store: LocalStore) -> None:
    store.put("x", b"")
    with pytest.raises(NotFound):
        store.put("x/y", b"")


def test_a_full_disk_is_an_error_that_leaves_no_debris(tiny_disk: Path) -> None:
    store = LocalStore(tiny_disk)
    store.put("small", b"x" * 1000)
    with pytest.raises(NoSpace, match="the disk is full") as caught:
        write(store, "big", [b"x" * 100_000] * 100)
    assert "free some space" in str(caught.value)
    assert [info.path for info in store.list()] == ["small"]
    assert hidden(tiny_disk) == []
    with store.writer("fits") as writer:
        writer.write(b"x" * 500_000)
    with pytest.raises(NoSpace):
        store.put("big", b"x" * 1_000_000)


def test_a_file_size_limit_counts_as_no_space(store: LocalStore, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(NoSpace):
            write(store, "big", [b"x" * 50_000] * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(store.list()) == []
    assert hidden(tmp_path) == []


def test_a_folder_that_may_not_be_written_is_named() -> None:
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        (Path(folder) / "locked").mkdir(mode=0o555)
        who = os.geteuid()
        if who == 0:
            os.seteuid(65534)  # root may write everywhere, nobody may not
        try:
            with pytest.raises(AccessDenied, match="locked/x"):
                LocalStore(folder).put("locked/x", b"")
        finally:
            os.seteuid(who)


KILLED = """
import os, signal, sys
from trainshed.storage import LocalStore
with LocalStore(sys.argv[1]).writer("folder/big") as writer:
    writer.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_nothing_that_is_listed(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    assert len(hidden(tmp_path)) == 1
    assert list(store.list()) == []
    with pytest.raises(NotFound):
        expand(f"{tmp_path}/**")
    store.put("folder/x", b"")
    assert len(hidden(tmp_path)) == 1, "young enough to belong to a writer on another node"
    monkeypatch.setattr(local_module, "ABANDONED_SECONDS", -1.0)
    LocalStore(tmp_path).put("folder/x", b"")
    assert hidden(tmp_path) == []


def test_the_temporary_file_of_a_living_writer_is_not_swept(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_module, "ABANDONED_SECONDS", -1.0)
    with store.writer("big") as writer:
        writer.write(b"x")
        LocalStore(tmp_path).put("other", b"")
    assert store.read("big") == b"x"


def test_sweeping_removes_what_the_killed_left_and_empty_folders_and_nothing_else(
    store: LocalStore, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    folder = Folder(store, "run")
    folder.put("kept/file", b"x")
    folder.put("emptied/deep/file", b"x")
    folder.put("emptied/deep/file", b"y", expect=folder.head("emptied/deep/file").version)  # type: ignore[union-attr]
    folder.delete("emptied/deep/file")
    folder.sweep()
    assert len(hidden(tmp_path)) == 1, "it is not below the folder that was swept"
    store.sweep()
    assert len(hidden(tmp_path)) == 1, "young enough to belong to a writer on another node"
    with folder.writer("busy/big") as writer:
        store.sweep(older_than_seconds=-1)
        assert hidden(tmp_path / "folder") == []
        writer.write(b"x")
    assert [info.path for info in folder.list()] == ["busy/big", "kept/file"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["busy", "kept"]


def test_a_users_own_part_file_is_not_hidden(store: LocalStore) -> None:
    store.put("download.part", b"mine")
    assert [info.path for info in store.list()] == ["download.part"]


def test_a_folder_of_a_store_is_a_store(store: LocalStore) -> None:
    folder = Folder(store, "runs/a")
    with folder.writer("big") as writer:
        writer.write(b"x")
    assert writer.info == folder.head("big")
    assert folder.put("y", b"") == folder.head("y")
    assert [info.path for info in folder.list()] == ["big", "y"]
    assert [info.path for info in store.list()] == ["runs/a/big", "runs/a/y"]
    assert folder.read("big") == b"".join(folder.stream("big"))
    folder.delete("y")
    assert folder.head("y") is None


def test_a_relative_root_keeps_its_meaning_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore(".")
    store.put("x", b"1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.read("x") == b"1"
