"""A token file recognised without reading it whole: what is noticed, and what is not taken for a change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from trainshed.data.tokens.token_source import (
    WHOLE_BYTES,
    FileFingerprint,
    RunTokens,
    find_file_change,
    fingerprint_file,
)
from trainshed.storage import open_store

LARGE = 3 * WHOLE_BYTES


def written(path: Path, size: int) -> FileFingerprint:
    path.write_bytes(bytes(number % 251 for number in range(size)))
    return fingerprint_file(str(path))


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("size", [0, 1, 5000, WHOLE_BYTES, LARGE])
def test_a_file_that_nobody_touched_is_the_same(tmp_path: Path, size: int) -> None:
    seen = written(tmp_path / "tokens.bin", size)
    assert find_file_change(seen) is None
    assert FileFingerprint(**asdict(seen)) == seen


@pytest.mark.parametrize(
    ("size", "change", "kind"),
    [
        (5000, lambda path: overwrite(path, 2500, b"\xff\xff"), "content"),
        (LARGE, lambda path: overwrite(path, 0, b"\xff\xff"), "content"),
        (LARGE, lambda path: overwrite(path, LARGE - 1, b"\xff"), "content"),
        (LARGE, lambda path: path.write_bytes(bytes(LARGE)), "content"),
        (LARGE, lambda path: os.truncate(path, LARGE - 2), "size"),
        (LARGE, lambda path: path.unlink(), "missing"),
    ],
)
def test_what_is_overwritten_cut_or_gone_is_noticed(
    tmp_path: Path, size: int, change: Callable[[Path], None], kind: str
) -> None:
    seen = written(tmp_path / "tokens.bin", size)
    change(tmp_path / "tokens.bin")
    found = find_file_change(seen)
    assert found is not None
    assert found[0] == kind


def test_a_change_between_the_blocks_is_noticed_by_its_time(tmp_path: Path) -> None:
    seen = written(tmp_path / "tokens.bin", LARGE)
    overwrite(tmp_path / "tokens.bin", 10_000, b"\xff\xff")
    os.utime(tmp_path / "tokens.bin", (1e9, 1e9))
    assert find_file_change(seen) == ("time", "it was written again")


def test_a_small_file_is_hashed_whole_so_that_its_time_means_nothing(tmp_path: Path) -> None:
    seen = written(tmp_path / "tokens.bin", 5000)
    os.utime(tmp_path / "tokens.bin", (1e9, 1e9))
    assert find_file_change(seen) is None


def test_files_are_the_same_by_their_checksum_or_else_by_size_and_blocks(tmp_path: Path) -> None:
    one, other = written(tmp_path / "one", LARGE), written(tmp_path / "other", LARGE)
    assert one.content == other.content
    assert replace(one, checksum="sha256:1").content != replace(other, checksum="sha256:2").content


@pytest.mark.s3
def test_an_object_is_the_same_by_its_etag_and_another_by_its_content(s3_bucket: str) -> None:
    store, _ = open_store(f"s3://{s3_bucket}/tokens.bin")
    store.put("tokens.bin", bytes(LARGE))
    seen = fingerprint_file(f"s3://{s3_bucket}/tokens.bin")
    assert find_file_change(seen) is None
    store.put("tokens.bin", b"\x01" * LARGE)
    assert find_file_change(seen) == ("content", "its bytes have changed")
    store.put("tokens.bin", bytes(10_000) + b"\x01" + bytes(LARGE - 10_001))
    assert find_file_change(seen) == ("time", "it was written again")
    store.delete("tokens.bin")
    assert find_file_change(seen) == ("missing", "it is gone")


STORED = {
    "sources": [
        {
            "name": "books",
            "label": "source-0",
            "weight": 0.7,
            "prefixes": ["/store/artefacts/tokens/0f/tokens", "s3://bucket/more"],
            "content": "b5bb9d8014a0f9b1d61e21e796d78dccdf1352f23cd32812f4850b878ae4944c",
            "documents": 20,
            "tokens": 2000,
            "reused": False,
            "files": [
                {
                    "path": "/store/artefacts/tokens/0f/tokens.bin",
                    "size": 4000,
                    "version": "1700000000",
                    "sample": "sample-1:00112233445566778899aabbccddeeff",
                    "checksum": "sha256:00",
                }
            ],
        }
    ],
    "validation": {
        "name": "validation",
        "label": "validation",
        "weight": None,
        "prefixes": ["theirs"],
        "content": None,
        "documents": 1,
        "tokens": 100,
        "reused": True,
        "files": [],
    },
}
"""The sources in the `prepared.json` of a run: runs that exist have this, so it is read for ever."""


def test_what_a_run_has_stored_is_read_and_written_the_same() -> None:
    tokens = RunTokens.from_plain(STORED)
    assert json.loads(json.dumps(tokens.to_plain())) == STORED
    assert list(tokens.to_plain()["sources"][0]) == list(STORED["sources"][0])


def test_runs_of_early_versions_have_no_fingerprints() -> None:
    source = {key: value for key, value in STORED["sources"][0].items() if key != "files"}
    assert RunTokens.from_plain({"sources": [source], "validation": None}).sources[0].files == ()
