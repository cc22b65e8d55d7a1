"""The Hub store against a loopback server that behaves like the Hub."""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from pathlib import Path

import pytest

from support.servers.hub_server import COMMIT, SIGNATURE, TOKEN, Fault, HubServer
from trainshed.errors import AccessDenied, CorruptData, MissingExtra, NotFound, StorageError
from trainshed.storage import Endpoint, Retry, StoreOptions, copy_tree, expand, open_store
from trainshed.storage.hub import HubStore

NAME = "datasets/org/corpus"
SMALL, LARGE = b'{"text": "small"}\n', random.Random(0).randbytes(3_000_000)


@pytest.fixture(autouse=True)
def corpus(hub: HubServer) -> None:
    hub.repos[NAME] = {"README.md": SMALL, "train/chunk 1/b.jsonl": SMALL, "train/chunk 1/a.bin": LARGE}
    hub.lfs.add("train/chunk 1/a.bin")


def open_hub(address: str, options: StoreOptions) -> HubStore:
    store, _ = open_store(address, options)
    assert isinstance(store, HubStore)
    return store


def test_a_branch_is_resolved_once_to_a_commit(hub: HubServer, impatient: StoreOptions) -> None:
    store = open_hub(f"hf://{NAME}@main", impatient)
    assert hub.requests == {}, "opening asks nobody"
    assert store.revision == COMMIT
    assert store.url == f"hf://{NAME}@{COMMIT}"
    store.read("README.md")
    list(store.list())
    assert hub.count("/revision/") == 1
    pinned = open_hub(f"hf://{NAME}@{COMMIT}", impatient)
    assert pinned.url == store.url
    assert hub.count("/revision/") == 1, "a commit needs no look-up"


def test_reading_listing_and_describing(hub: HubServer, impatient: StoreOptions) -> None:
    store = open_hub(f"hf://{NAME}", impatient)
    infos = {info.path: info for info in store.list()}
    assert list(infos) == ["README.md", "train/chunk 1/a.bin", "train/chunk 1/b.jsonl"]
    assert infos["train/chunk 1/a.bin"].sha256 == "sha256:" + hashlib.sha256(LARGE).hexdigest()
    assert infos["README.md"].sha256 is None
    assert [info.path for info in store.list("train")] == list(infos)[1:]
    assert list(store.list("nope")) == []
    assert store.head("README.md") == infos["README.md"]
    assert store.head("nope") is None
    assert store.read("README.md") == SMALL
    assert store.read("train/chunk 1/a.bin", 10, 20) == LARGE[10:20]
    assert b"".join(store.stream("train/chunk 1/a.bin", 5, chunk_bytes=100_000)) == LARGE[5:]


def test_patterns_give_pinned_addresses(impatient: StoreOptions) -> None:
    found = expand(f"hf://{NAME}/**/*.jsonl", impatient)
    assert [each.address for each in found] == [f"hf://{NAME}@{COMMIT}/train/chunk 1/b.jsonl"]


def test_a_listing_of_many_pages(hub: HubServer, impatient: StoreOptions) -> None:
    # SlimPajama has 59,166 files; one page of the Hub holds 1,000.
    hub.repos[NAME] = {f"train/{number:06d}.jsonl": b"" for number in range(59_166)}
    store = open_hub(f"hf://{NAME}", impatient)
    assert sum(1 for _ in store.list()) == 59_166
    assert hub.count("/tree/") == 60


def test_the_token_is_sent_to_the_hub_and_not_to_its_cdn(
    hub: HubServer, impatient: StoreOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    store = open_hub(f"hf://{NAME}", impatient)
    assert store.read("train/chunk 1/a.bin") == LARGE
    assert hub.tokens_at_cdn == [None]
    assert TOKEN not in caplog.text + repr(store) + store.url
    assert SIGNATURE not in "".join(r.getMessage() for r in caplog.records if r.levelno >= logging.INFO)


def test_a_gated_repository(hub: HubServer, impatient: StoreOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(NAME)
    with pytest.raises(
        AccessDenied, match=r"is gated\naccept its licence or ask for access at .*org/corpus, then set HF_TOKEN"
    ):
        list(open_hub(f"hf://{NAME}", impatient).list())
    with pytest.raises(AccessDenied, match="is gated"):
        open_hub(f"hf://{NAME}@{COMMIT}", impatient).read("README.md")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(AccessDenied, match="is gated") as caught:
        list(open_hub(f"hf://{NAME}", impatient).list())
    assert "set HF_TOKEN" not in str(caught.value)


def test_a_token_nobody_knows(impatient: StoreOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_an-old-token")
    for address in (f"hf://{NAME}", f"hf://{NAME}@{COMMIT}"):
        with pytest.raises(AccessDenied, match="does not accept the token") as caught:
            open_hub(address, impatient).read("README.md")
        assert "hf_an-old-token" not in str(caught.value)
    anonymous = StoreOptions({"hf": Endpoint(anonymous=True)}, impatient.retry)
    assert open_hub(f"hf://{NAME}", anonymous).read("README.md") == SMALL


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://org/corpus", "or write hf://datasets/"),
        ("hf://datasets/org/nope", "no such repository, or does not show it to you"),
        (f"hf://{NAME}@v9", "no revision 'v9'"),
    ],
)
def test_what_the_hub_does_not_have(impatient: StoreOptions, address: str, message: str) -> None:
    with pytest.raises(NotFound, match=message):
        list(open_hub(address, impatient).list())


def test_a_missing_file_is_asked_for_once(hub: HubServer, impatient: StoreOptions) -> None:
    with pytest.raises(NotFound, match="no such file"):
        open_hub(f"hf://{NAME}", impatient).read("nope.jsonl")
    assert hub.count("nope.jsonl") == 1


@pytest.mark.parametrize("path", ["/cdn/datasets/org/corpus/train/chunk 1/a.bin"])
def test_a_connection_that_breaks_goes_on_where_it_broke(hub: HubServer, impatient: StoreOptions, path: str) -> None:
    hub.faults[path] = Fault(5, break_after=400_000)
    store = open_hub(f"hf://{NAME}", impatient)
    assert b"".join(store.stream("train/chunk 1/a.bin")) == LARGE
    assert hub.count(f"CDN GET {path}") == 6


def test_a_connection_that_never_gets_on_is_given_up(hub: HubServer, impatient: StoreOptions) -> None:
    hub.faults["/cdn/datasets/org/corpus/train/chunk 1/a.bin"] = Fault(99, break_after=0)
    with pytest.raises(StorageError, match="broke 4 times in a row"):
        open_hub(f"hf://{NAME}", impatient).read("train/chunk 1/a.bin")


def test_rate_limiting_is_waited_out_as_long_as_the_hub_asks(
    hub: HubServer, impatient: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    monkeypatch.setattr(Retry, "pause", lambda self, attempt, asked=None: waits.append(asked))
    path = f"/{NAME}/resolve/{COMMIT}/README.md"
    store = open_hub(f"hf://{NAME}@{COMMIT}", impatient)
    hub.faults[path] = Fault(1, status=429, headers={"Retry-After": "7"})
    assert store.read("README.md") == SMALL
    hub.faults[path] = Fault(1, status=429, headers={"ratelimit": '"resolvers";r=0;t=55'})
    assert store.read("README.md") == SMALL
    hub.faults[path] = Fault(1, status=503, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})
    assert store.read("README.md") == SMALL
    assert waits == [7, 55, 0]
    hub.faults[path] = Fault(99, status=429)
    with pytest.raises(StorageError, match="429"):
        store.read("README.md")


def test_rate_limiting_of_the_listing_is_waited_out(hub: HubServer, impatient: StoreOptions) -> None:
    hub.faults[f"/api/{NAME}/tree/{COMMIT}"] = Fault(1, status=429, headers={"Retry-After": "0"})
    assert len(list(open_hub(f"hf://{NAME}", impatient).list())) == 3


def test_a_copy_is_compared_with_the_sha256_the_hub_states(
    hub: HubServer, impatient: StoreOptions, tmp_path: Path
) -> None:
    result = copy_tree(f"hf://{NAME}", f"{tmp_path}/good", options=impatient)
    assert (result.files, result.copied_files, result.source) == (3, 3, f"hf://{NAME}@{COMMIT}")
    broken = bytes([LARGE[0] ^ 1]) + LARGE[1:]

    class Broken(dict[str, bytes]):
        def __setitem__(self, key: str, value: bytes) -> None:
            super().__setitem__(key, broken)

    hub.pages = Broken()
    with pytest.raises((CorruptData, StorageError), match="the source states sha256:"):
        copy_tree(f"hf://{NAME}", f"{tmp_path}/bad", options=impatient)
    assert [found.info.path.rpartition("/")[2] for found in expand(f"{tmp_path}/bad")] == ["README.md", "b.jsonl"]


def test_the_hub_is_read_only(impatient: StoreOptions) -> None:
    store = open_hub(f"hf://{NAME}", impatient)
    for call in (lambda: store.put("x", b""), lambda: store.delete("x"), lambda: store.writer("x")):
        with pytest.raises(StorageError, match="read-only"):
            call()


def test_without_the_extra_the_pip_line_is_shown(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r"pip install 'trainshed\[data\]'"):
        open_store("hf://org/name", StoreOptions(retry=Retry(attempts=2)))


def test_a_hub_that_cannot_be_reached(no_cloud: None, impatient: StoreOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="cannot be reached"):
        open_hub(f"hf://{NAME}@{COMMIT}", impatient).read("x")
