"""The bucket store against a real S3 server."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import traceback

import pytest

from support.servers.cutting_proxy import cutting
from support.servers.s3_server import S3Server
from trainshed.errors import AccessDenied, AddressError, Conflict, NotFound, StorageError, TrainshedError
from trainshed.storage import ABSENT, Endpoint, Retry, Store, StoreOptions, expand, open_store
from trainshed.storage.object_store import MAX_PARTS, PART_BYTES

pytestmark = pytest.mark.s3


@pytest.fixture
def store(s3_bucket: str) -> Store:
    return open_store(f"s3://{s3_bucket}")[0]


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def write(store: Store, path: str, data: bytes, then: Exception | None = None) -> None:
    with store.writer(path) as writer:
        for start in range(0, len(data), 3_000_001):
            writer.write(memoryview(data)[start : start + 3_000_001])
        if then is not None:
            raise then


def test_small_objects(store: Store) -> None:
    info = store.put("a/b.txt", b"0123456789")
    assert store.head("a/b.txt") == info
    assert store.read("a/b.txt") == b"0123456789"
    assert store.read("a/b.txt", 2, 5) == b"234"
    assert store.read("a/b.txt", 8, 99) == b"89"
    assert store.read("a/b.txt", 5, 5) == b""
    assert store.read("a/b.txt", 99) == b""
    assert list(store.stream("a/b.txt", 1, chunk_bytes=4)) == [b"1234", b"5678", b"9"]
    store.put("empty", b"")
    assert store.read("empty") == b""
    assert list(store.stream("empty")) == []
    store.delete("empty")
    store.delete("empty")
    assert store.head("empty") is None


def test_a_large_object_goes_up_in_parts_and_comes_down_in_ranges(
    store: Store, s3_bucket: str, s3_server: S3Server
) -> None:
    data = noise(5 * PART_BYTES + 12345)  # in parts of 8 MiB: three
    with store.writer("big.bin", size=len(data)) as writer:
        writer.write(data[:1000])
        assert store.head("big.bin") is None
        writer.write(data[1000:])
        assert store.head("big.bin") is None
    assert writer.info == store.head("big.bin")
    assert '-3"' in writer.info.version, "the ETag of a multipart upload ends with the number of its parts"
    assert s3_server.open_uploads(s3_bucket) == 0
    assert b"".join(store.stream("big.bin")) == data
    assert b"".join(store.stream("big.bin", 7, chunk_bytes=1_000_003)) == data[7:]
    assert (
        store.read("big.bin", 3 * PART_BYTES - 5, 5 * PART_BYTES + 7) == data[3 * PART_BYTES - 5 : 5 * PART_BYTES + 7]
    )


def test_parts_grow_so_that_any_size_fits_into_their_number() -> None:
    from trainshed.storage.object_store import ObjectStore

    five_terabytes = 5 * 10**12
    with ObjectStore(None, "s3://b", "s3", Retry()).writer("x", size=five_terabytes) as writer:
        assert writer._part_bytes * MAX_PARTS >= five_terabytes
        writer.finish = lambda: None  # type: ignore[method-assign]


def test_an_object_that_outgrows_its_parts_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainshed.storage import object_store

    monkeypatch.setattr(object_store, "UNKNOWN_SIZE_PART_BYTES", 10)
    with (
        pytest.raises(StorageError, match="pass size= to writer"),
        object_store.ObjectStore(None, "s3://b", "s3", Retry()).writer("x") as writer,
    ):
        writer.write(bytes(100_001))


def test_a_reader_that_leaves_early_leaves_no_thread(store: Store) -> None:
    write(store, "big.bin", noise(4 * PART_BYTES))
    stream = store.stream("big.bin")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trainshed-get")]


def test_a_failed_upload_leaves_nothing_visible_and_no_parts(store: Store, s3_bucket: str, s3_server: S3Server) -> None:
    with pytest.raises(RuntimeError):
        write(store, "big.bin", noise(9 * PART_BYTES), then=RuntimeError())
    assert store.head("big.bin") is None
    assert s3_server.open_uploads(s3_bucket) == 0


def test_memory_that_was_written_may_be_used_again_at_once(store: Store) -> None:
    memory = bytearray(12 * 1024 * 1024)
    with store.writer("reused", size=3 * len(memory)) as writer:
        for number in range(3):
            memory[:] = bytes([number]) * len(memory)
            writer.write(memoryview(memory))
    assert set(store.read("reused", 0, len(memory))) == {0}
    assert set(store.read("reused", 2 * len(memory))) == {2}


def test_conditional_puts(store: Store) -> None:
    first = store.put("latest", b"1", expect=ABSENT)
    with pytest.raises(Conflict, match="latest: it is there already"):
        store.put("latest", b"2", expect=ABSENT)
    second = store.put("latest", b"2", expect=first.version)
    with pytest.raises(Conflict, match="another writer changed it first"):
        store.put("latest", b"3", expect=first.version)
    assert store.read("latest") == b"2"
    assert store.head("latest") == second
    store.delete("latest")
    with pytest.raises((Conflict, NotFound)):
        store.put("latest", b"3", expect=second.version)


def test_only_one_of_many_writers_takes_an_attempt_number(store: Store) -> None:
    won: list[int] = []

    def claim(number: int) -> None:
        try:
            store.put("attempt", str(number).encode(), expect=ABSENT)
            won.append(number)
        except Conflict:
            pass

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read("attempt") == str(won[0]).encode()
    assert len(won) == 1


def test_odd_names_and_long_listings(store: Store, s3_bucket: str, s3_server: S3Server) -> None:
    odd = ["odd/a b", "odd/%20", "odd/[x]", "odd/é", "odd/q?x=1", "odd/#+&"]
    for name in odd:
        store.put(name, name.encode())
    assert [info.path for info in store.list("odd")] == sorted(odd)
    assert [store.read(name) for name in odd] == [name.encode() for name in odd]
    assert list(store.list("od")) == [], "a prefix ends at a folder"
    s3_server.request("PUT", f"/{s3_bucket}/marked/")  # how consoles show a folder
    store.put("marked/x", b"1")
    assert [info.path for info in store.list("marked")] == ["marked/x"]
    assert [each.address for each in expand(f"s3://{s3_bucket}/odd/[[]x]")] == [f"s3://{s3_bucket}/odd/[x]"]
    with pytest.raises(NotFound, match="nothing found"):
        expand(f"s3://{s3_bucket}/nope/*")


def test_a_listing_has_more_than_one_page(store: Store) -> None:
    from concurrent.futures import ThreadPoolExecutor

    names = [f"many/{number:05d}" for number in range(1100)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: store.put(name, b""), names))
    assert [info.path for info in store.list("many")] == names


def test_what_is_missing_is_named(store: Store, s3_bucket: str) -> None:
    assert store.head("nope") is None
    with pytest.raises(NotFound, match=f"s3://{s3_bucket}/nope: nothing at this address"):
        store.read("nope")
    with pytest.raises(NotFound, match="there is no such bucket"):
        list(open_store("s3://bucket-that-is-not")[0].list())
    with pytest.raises(AddressError):
        store.put("a\tb", b"")


def test_a_broken_connection_goes_on_at_the_byte_where_it_broke(s3_bucket: str, s3_server: S3Server) -> None:
    data = noise(4 * PART_BYTES + 99)
    write(open_store(f"s3://{s3_bucket}")[0], "big.bin", data)
    with cutting(s3_server.endpoint) as proxy:
        options = StoreOptions({"s3": Endpoint(endpoint=proxy.url)}, Retry(4, 0.01, 0.02))
        store = open_store(f"s3://{s3_bucket}", options)[0]
        proxy.cut(3, after=1_500_000)
        assert b"".join(store.stream("big.bin")) == data
        assert proxy.done == 3


def test_a_connection_that_never_holds_is_given_up(s3_bucket: str, s3_server: S3Server) -> None:
    write(open_store(f"s3://{s3_bucket}")[0], "big.bin", noise(PART_BYTES))
    with cutting(s3_server.endpoint) as proxy:
        options = StoreOptions({"s3": Endpoint(endpoint=proxy.url)}, Retry(3, 0.001, 0.002))
        store = open_store(f"s3://{s3_bucket}", options)[0]
        proxy.cut(10**6, after=1)
        with pytest.raises(StorageError):
            store.read("big.bin")


def test_two_versions_are_never_mixed(store: Store) -> None:
    write(store, "big.bin", noise(16 * PART_BYTES, seed=1))
    stream = store.stream("big.bin")
    next(stream)
    write(store, "big.bin", noise(16 * PART_BYTES, seed=2))
    with pytest.raises(StorageError, match="it was replaced while it was being read"):
        list(stream)


@pytest.mark.parametrize(
    ("access", "secret", "hint"),
    [(None, "wrong-secret", "the secret is not the right one"), ("WRONGKEY", None, "does not know the access key")],
)
def test_wrong_keys_are_refused_in_words_that_hold_no_secret(
    s3_bucket: str,
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    access: str | None,
    secret: str | None,
    hint: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access or s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret or s3_server.secret_key)
    store = open_store(f"s3://{s3_bucket}")[0]
    shown = [repr(store), store.url]
    for call in (
        lambda: store.read("x"),
        lambda: store.put("x", b""),
        lambda: list(store.list()),
        lambda: write(store, "big", noise(5 * PART_BYTES)),
    ):
        with pytest.raises(AccessDenied) as caught:
            call()
        assert hint in str(caught.value)
        shown += [str(caught.value), "".join(traceback.format_exception(caught.value))]
    with pytest.raises(AccessDenied):
        store.head("x")
    for text in (*shown, caplog.text):
        assert (secret or s3_server.secret_key) not in text


def test_the_minio_variables_of_the_seeds_are_understood(
    s3_bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in s3_server.environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv("BUCKET_STORAGE_HOST", s3_server.endpoint)
    monkeypatch.setenv("BUCKET_STORAGE_ACCESS_KEY", s3_server.access_key)
    monkeypatch.setenv("BUCKET_STORAGE_SECRET_KEY", s3_server.secret_key)
    store = open_store(f"s3://{s3_bucket}")[0]
    store.put("x", b"1")
    assert store.read("x") == b"1"
    monkeypatch.setenv("BUCKET_STORAGE_SECRET_KEY", "another")
    with pytest.raises(AccessDenied):
        open_store(f"s3://{s3_bucket}")[0].read("x")


def test_a_profile_of_the_aws_configuration_is_used(
    s3_bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    for name in s3_server.environment():
        monkeypatch.delenv(name)
    home = os.path.join(os.environ["HOME"], ".aws")
    os.makedirs(home)
    with open(os.path.join(home, "credentials"), "w") as file:
        file.write(f"[lab]\naws_access_key_id={s3_server.access_key}\naws_secret_access_key={s3_server.secret_key}\n")
    with open(os.path.join(home, "config"), "w") as file:
        file.write(f"[profile lab]\nregion=us-east-1\nendpoint_url={s3_server.endpoint}\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert open_store(f"s3://{s3_bucket}")[0].put("x", b"1").size == 1


UPLOADER = """
import random, sys, time
from trainshed.storage import open_store
store, path = open_store(sys.argv[1])
data = random.Random(0).randbytes(60_000_000)
with store.writer(path) as writer:
    for start in range(0, len(data), 10_000_000):
        writer.write(data[start:start + 10_000_000])
        if start == 40_000_000:
            print("half", flush=True)
            if len(sys.argv) > 2:
                time.sleep(60)
"""


def test_an_uploader_killed_in_the_middle_leaves_nothing_and_a_rerun_completes(s3_bucket: str, store: Store) -> None:
    command = [sys.executable, "-c", UPLOADER, f"s3://{s3_bucket}/big.bin"]
    with subprocess.Popen([*command, "wait"], stdout=subprocess.PIPE) as uploader:
        assert uploader.stdout is not None
        assert uploader.stdout.readline() == b"half\n"
        uploader.send_signal(signal.SIGKILL)
    assert uploader.returncode == -signal.SIGKILL
    assert store.head("big.bin") is None
    assert list(store.list()) == []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert store.read("big.bin") == random.Random(0).randbytes(60_000_000)


FORKED = """
import os, sys
from trainshed.errors import StorageError
from trainshed.storage import open_store
store, path = open_store(sys.argv[1])
store.put(path, b"")
if os.fork() == 0:
    try:
        open_store(sys.argv[1])[0].read(path)
    except StorageError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_forked_process_is_told_so_instead_of_hanging(s3_bucket: str) -> None:
    command = [sys.executable, "-c", FORKED, f"s3://{s3_bucket}/x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "'forkserver' or 'spawn'" in done.stdout


def test_an_unreachable_store_says_so(no_cloud: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-nobody")
    options = StoreOptions({"s3": Endpoint(endpoint="http://127.0.0.1:9")}, Retry(2, 0.001, 0.002))
    with pytest.raises(TrainshedError, match="cannot be reached"):
        open_store("s3://bucket/x", options)[0].read("x")
