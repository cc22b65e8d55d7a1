from __future__ import annotations

import random
import subprocess
import sys

import pytest

from support.servers.hub_server import Fault, HubServer
from trainshed.errors import AccessDenied, AddressError, NotFound, StorageError
from trainshed.storage import Store, StoreOptions, expand, open_store

DATA = random.Random(1).randbytes(2_000_000)


@pytest.fixture
def store(hub: HubServer, impatient: StoreOptions) -> Store:
    hub.pages |= {"/a/x.bin": DATA, "/empty": b""}
    return open_store(hub.url, impatient)[0]


def test_reading(store: Store) -> None:
    assert store.read("a/x.bin") == DATA
    assert store.read("a/x.bin", 3, 9) == DATA[3:9]
    assert store.read("a/x.bin", 1_999_990, 9**9) == DATA[-10:]
    assert store.read("a/x.bin", 9**9) == b""
    assert store.read("empty") == b""
    assert b"".join(store.stream("a/x.bin", 1, chunk_bytes=65_537)) == DATA[1:]
    info = store.head("a/x.bin")
    assert info is not None
    assert info.size == len(DATA)
    assert store.head("nope") is None
    with pytest.raises(NotFound, match="/nope: nothing at this address"):
        store.read("nope")


def test_a_server_without_ranges_still_goes_on_after_a_break(hub: HubServer, store: Store) -> None:
    hub.ranges = False
    hub.faults["/a/x.bin"] = Fault(2, break_after=700_000)
    assert b"".join(store.stream("a/x.bin")) == DATA
    assert store.read("a/x.bin", 100, 200) == DATA[100:200]


def test_a_server_that_tells_no_length_and_no_version(hub: HubServer, store: Store) -> None:
    hub.lengths = hub.etags = hub.ranges = False
    info = store.head("a/x.bin")
    assert info is not None
    assert info.size == -1
    hub.faults["/a/x.bin"] = Fault(2, break_after=700_000)
    assert b"".join(store.stream("a/x.bin")) == DATA
    assert store.read("a/x.bin", 7, 19) == DATA[7:19]


def test_a_server_that_refuses_head_is_asked_for_one_byte(hub: HubServer, store: Store) -> None:
    hub.heads = False
    info = store.head("a/x.bin")
    assert info is not None
    assert info.size == len(DATA)
    assert info.version
    empty = store.head("empty")
    assert empty is not None
    assert empty.size == 0


def test_two_versions_are_never_mixed(hub: HubServer, store: Store) -> None:
    hub.faults["/a/x.bin"] = Fault(1, break_after=1_000_000)
    stream = store.stream("a/x.bin", chunk_bytes=500_000)
    next(stream)
    hub.pages["/a/x.bin"] = bytes(len(DATA))
    with pytest.raises(StorageError, match="replaced while it was being read"):
        list(stream)


def test_passing_trouble_is_retried_and_lasting_trouble_told(hub: HubServer, store: Store) -> None:
    hub.faults["/a/x.bin"] = Fault(3, status=503)
    assert store.read("a/x.bin") == DATA
    hub.faults["/a/x.bin"] = Fault(99, status=500)
    with pytest.raises(StorageError, match="the server answered 500"):
        store.read("a/x.bin")
    hub.faults["/a/x.bin"] = Fault(99, status=403)
    before = hub.count("GET /a/x.bin")
    with pytest.raises(AccessDenied, match="refused"):
        store.read("a/x.bin")
    assert hub.count("GET /a/x.bin") == before + 1


def test_a_signed_url_works_and_is_never_shown(hub: HubServer, impatient: StoreOptions) -> None:
    hub.pages["/a/x.bin"] = DATA
    store, path = open_store(f"{hub.url.replace('//', '//user:password@')}/a/x.bin?sig=abc", impatient)
    assert store.read(path) == DATA
    hub.pages.clear()
    with pytest.raises(NotFound) as caught:
        store.read(path)
    shown = str(caught.value) + repr(store) + store.url
    assert "sig=abc" not in shown
    assert "password" not in shown


def test_what_a_web_server_cannot_do(hub: HubServer, store: Store, impatient: StoreOptions) -> None:
    with pytest.raises(AddressError, match="one per line"):
        list(store.list())
    for call in (lambda: store.put("x", b""), lambda: store.delete("x"), lambda: store.writer("x")):
        with pytest.raises(StorageError, match="read-only"):
            call()
    assert [each.address for each in expand(f"{hub.url}/a/x.bin", impatient)] == [f"{hub.url}/a/x.bin"]
    with pytest.raises(NotFound):
        expand(f"{hub.url}/nope", impatient)


def test_connections_end_with_the_process(hub: HubServer) -> None:
    hub.pages["/a"] = b"here"
    program = f"from trainshed.storage import open_store; assert open_store('{hub.url}/a')[0].read('a') == b'here'"
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
