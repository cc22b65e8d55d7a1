"""Servers that do not answer are told of after a few seconds and given up with their address; slow ones are not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.servers.silent_server import dropping, serving
from trainshed import reporting
from trainshed.errors import StorageError
from trainshed.reporting import on_long_wait
from trainshed.storage import Endpoint, Retry, StoreOptions, open_store

COMMIT = "0" * 40
IMPATIENT = Retry(
    attempts=2, first_seconds=0.01, max_seconds=0.02, connect_seconds=0.3, answer_seconds=0.3, silent_seconds=60
)
ADDRESSES = {
    "http": "{url}/a.jsonl",
    "hub": "hf://datasets/org/name/a.jsonl",
    "hub commit": f"hf://datasets/org/name@{COMMIT}/a.jsonl",
    "s3": "s3://bucket/a.jsonl",
    "gs": "gs://bucket/a.jsonl",
    "az": "az://account/container/a.jsonl",
}


def options_for(url: str, retry: Retry = IMPATIENT) -> StoreOptions:
    return StoreOptions({scheme: Endpoint(url, anonymous=True) for scheme in ("s3", "gs", "az", "hf")}, retry)


@pytest.fixture(autouse=True)
def no_clouds(no_cloud: None) -> None:
    """None of this talks to anybody but the servers of this file."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is told of waits, at once."""
    monkeypatch.setattr(reporting, "FIRST_NOTE_SECONDS", 0.05)
    monkeypatch.setattr(reporting, "_LOOK_SECONDS", 0.02)
    notes: list[str] = []
    on_long_wait(notes.append)
    yield notes
    on_long_wait(None)


@pytest.mark.parametrize("kind", ADDRESSES)
def test_a_server_that_accepts_and_never_answers_is_told_of_and_given_up(kind: str, told: list[str]) -> None:
    with serving() as url:
        address = ADDRESSES[kind].format(url=url)
        store, path = open_store(address, options_for(url, replace(IMPATIENT, connect_seconds=5)))
        for ask in (store.read, store.head):
            with pytest.raises(StorageError, match="cannot be reached") as caught:
                ask(path)
            assert address.startswith(caught.value.where or "nowhere")
            assert url in caught.value.what
            assert re.search(r"did not answer (within 0\.3 s|in time) \(2 attempts in", caught.value.what)
        assert any(note.startswith(f"waiting for {caught.value.where}") for note in told)
        assert kind in ("s3", "gs", "az") or any(url in note for note in told)


@pytest.mark.parametrize("kind", ["http", "hub", "s3"])
def test_a_server_that_drops_packets_is_told_of_and_given_up(kind: str, told: list[str]) -> None:
    with dropping() as url:
        address = ADDRESSES[kind].format(url=url)
        store, path = open_store(address, options_for(url, replace(IMPATIENT, answer_seconds=5)))
        with pytest.raises(StorageError, match=r"no connection (within 0\.3 s|in time) \(2 attempts") as caught:
            store.read(path)
        assert url in caught.value.what
        assert any(note.startswith(f"waiting for {caught.value.where}") for note in told)
        assert kind in ("s3", "gs", "az") or any(url in note for note in told)


@pytest.mark.parametrize("kind", ["http", "hub commit", "s3"])
def test_a_body_that_stops_in_the_middle_is_told_of_and_given_up(kind: str, told: list[str]) -> None:
    with serving(b"x" * 1000, sent=100) as url:
        address = ADDRESSES[kind].format(url=url)
        store, path = open_store(address, options_for(url))
        with pytest.raises(StorageError, match=r"broke \d times") as caught:
            store.read(path)
        assert caught.value.where == address
        assert any(note.startswith(f"waiting for {address}") for note in told)


def test_a_listing_of_the_hub_that_stops_in_the_middle_is_given_up() -> None:
    with serving(b"[" + b" " * 100, sent=10) as url:
        store, _ = open_store(f"hf://datasets/org/name@{COMMIT}", options_for(url))
        with pytest.raises(StorageError, match=r"did not answer within 0\.3 s \(2 attempts") as caught:
            list(store.list())
        assert url in caught.value.what


@pytest.mark.parametrize("kind", ["http", "hub commit", "s3"])
def test_a_slow_server_that_lives_is_not_given_up(kind: str) -> None:
    body = b"slow but alive"
    # Longer in all than any patience here; from byte to byte well within it.
    retry = Retry(attempts=1, connect_seconds=2.0, answer_seconds=2.0, silent_seconds=2.0)
    with serving(body, pause_seconds=0.2) as url:
        store, path = open_store(ADDRESSES[kind].format(url=url), options_for(url, retry))
        assert store.read(path) == body


def test_silence_ends_all_attempts_however_many_are_left() -> None:
    retry = Retry(attempts=1000, first_seconds=0.001, max_seconds=0.001, answer_seconds=0.2, silent_seconds=0.5)
    with serving() as url, pytest.raises(StorageError, match=r"\([12345] attempts? in \d s\)"):
        open_store(f"{url}/a", options_for(url, retry))[0].read("a")
    with (
        serving(b"x" * 9, sent=0) as url,
        pytest.raises(StorageError, match=r"broke [123456] times in a row at byte 0"),
    ):
        open_store(f"{url}/a", options_for(url, retry))[0].read("a")


def test_many_waits_are_told_in_one_line(told: list[str]) -> None:
    with reporting.waiting("https://host/a"), reporting.waiting("https://host/b") as second:
        second.detail = "attempt 2 of 8"
        while not any("and for 1 more" in note for note in told):
            pass
    assert any(note.startswith("waiting for https://host/a for ") for note in told)


@pytest.mark.parametrize("kind", ["http", "hub"])
def test_the_command_line_says_what_it_waits_for(kind: str, tmp_path: Path) -> None:
    with serving() as url:
        address = ADDRESSES[kind].format(url=url)
        secret = "?X-Amz-Signature=planted" if kind == "http" else ""
        process = subprocess.Popen(
            [sys.executable, "-m", "trainshed", "data", "fetch", address + secret, str(tmp_path / "to")],
            env=os.environ | {"HF_ENDPOINT": url},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        with process, process.stderr as lines:
            line = next(line for line in lines if line.startswith("waiting for "))
            process.send_signal(signal.SIGINT)
            rest = lines.read()
    assert line.startswith(f"waiting for {address.removesuffix('/a.jsonl')}")
    assert "planted" not in line + rest
