from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainshed.errors import CorruptData, NotFound
from trainshed.storage import ABSENT, FileEntry, LocalStore, Manifest, checksum_of, sha256_of


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path)
    store.put("art/b.bin", b"two")
    store.put("art/a.bin", b"one")
    return store


@pytest.fixture
def manifest() -> Manifest:
    files = [FileEntry(name, 3, sha256_of(data)) for name, data in (("b.bin", b"two"), ("a.bin", b"one"))]
    return Manifest.of("tokens", {"seed": 1, "input": "é"}, files, {"documents": 7})


def test_a_manifest_is_read_back_as_it_was_written(store: LocalStore, manifest: Manifest) -> None:
    manifest.write(store, "art/manifest.json", expect=ABSENT)
    again = Manifest.read(store, "art/manifest.json")
    assert again == manifest
    assert again.sha256 == manifest.sha256
    assert again.total_bytes == 6
    assert [entry.path for entry in again.files] == ["a.bin", "b.bin"]


def test_the_same_artefact_gives_the_same_bytes(manifest: Manifest) -> None:
    other = Manifest.of("tokens", {"input": "é", "seed": 1}, reversed(manifest.files), {"documents": 7})
    assert other.to_bytes() == manifest.to_bytes()
    document = json.loads(manifest.to_bytes())
    assert document["format"] == 1
    assert document["totals"] == {"bytes": 6, "files": 2}


def test_files_are_proven_against_their_manifest(store: LocalStore, manifest: Manifest) -> None:
    manifest.verify_files(store, "art")
    store.put("art/a.bin", b"ONE")
    manifest.verify_files(store, "art", deep=False)
    with pytest.raises(CorruptData, match=r"1 file is not what their manifest says: a\.bin"):
        manifest.verify_files(store, "art")
    store.put("art/a.bin", b"longer")
    with pytest.raises(CorruptData, match="of another size"):
        manifest.verify_files(store, "art", deep=False)
    store.delete("art/a.bin")
    with pytest.raises(CorruptData, match=r"1 file is missing: a\.bin"):
        manifest.verify_files(store, "art")


def test_files_of_both_algorithms_are_proven_and_format_2_names_them(store: LocalStore) -> None:
    files = [FileEntry("a.bin", 3, checksum_of(b"one")), FileEntry("b.bin", 3, sha256_of(b"two"))]
    manifest = Manifest.of("tokens", {}, files)
    document = json.loads(manifest.to_bytes())
    assert document["format"] == 2
    assert [entry["checksum"].partition(":")[0] for entry in document["files"]] == ["blake3", "sha256"]
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest
    again.verify_files(store, "art")
    for name in ("a.bin", "b.bin"):
        before = store.read(f"art/{name}")
        store.put(f"art/{name}", b"bad")
        with pytest.raises(CorruptData, match=f"not what their manifest says: {name}"):
            again.verify_files(store, "art")
        store.put(f"art/{name}", before)


def test_a_manifest_of_before_keeps_its_bytes_and_its_own_hash(manifest: Manifest) -> None:
    # As Trainshed wrote it before it knew BLAKE3, and as it names such manifests for ever.
    assert json.loads(manifest.to_bytes())["files"][0] == {
        "path": "a.bin",
        "sha256": "sha256:7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",
        "size": 3,
    }
    assert Manifest.from_bytes(manifest.to_bytes()).sha256 == sha256_of(manifest.to_bytes())


def test_a_checksum_names_its_algorithm() -> None:
    # The first vector of BLAKE3's own test vectors: no bytes.
    assert checksum_of(b"") == "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert checksum_of([b"o", b"ne"]) == checksum_of(b"one") != sha256_of(b"one")


def test_an_artefact_without_a_manifest_does_not_exist(store: LocalStore) -> None:
    with pytest.raises(NotFound, match="has not finished"):
        Manifest.read(store, "art/manifest.json")


def change(manifest: Manifest, **keys: object) -> bytes:
    return json.dumps({**json.loads(manifest.to_bytes()), **keys}).encode()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"format": 3}, "reads up to 2"),
        ({"format": 0}, "no format 0"),
        ({"format": 2}, "no checksum"),
        ({"format": None}, "no format number"),
        ({"kind": 3}, "'kind' is missing"),
        ({"files": {}}, "'files' is missing"),
        ({"files": ["x"]}, "path None"),
        ({"files": [{"path": "../x", "size": 1, "sha256": "sha256:" + "0" * 64}]}, "path '../x'"),
        ({"files": [{"path": "x", "size": -1, "sha256": "sha256:" + "0" * 64}]}, "'x' has no size"),
        ({"files": [{"path": "x", "size": 1, "sha256": "md5:0"}]}, "no sha256"),
        ({"totals": {"files": 2, "bytes": 7}}, "totals do not fit"),
    ],
)
def test_a_broken_manifest_says_what_is_wrong(manifest: Manifest, keys: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptData, match=message):
        Manifest.from_bytes(change(manifest, **keys), "somewhere")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b"[" * 100_000])
def test_a_torn_manifest_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptData, match="somewhere"):
        Manifest.from_bytes(data, "somewhere")


@pytest.mark.parametrize(
    ("where", "command"),
    [
        ("a folder/manifest.json", "`rm 'a folder/manifest.json'`"),
        ("s3://bucket/manifest.json", "`aws s3 rm s3://bucket/manifest.json`"),
        ("gs://bucket/manifest.json", "`gcloud storage rm gs://bucket/manifest.json`"),
        ("az://account/container/manifest.json", "remove this object"),
    ],
)
def test_a_broken_manifest_says_how_to_be_rid_of_it(where: str, command: str) -> None:
    with pytest.raises(CorruptData, match=r"not JSON") as caught:
        Manifest.from_bytes(b"{", where)
    assert caught.value.where == where
    assert command in str(caught.value.hint)


@pytest.mark.parametrize("damage", [b"{", b'{"format": 2}', b"\x00" * 100])
def test_what_a_broken_manifest_hints_at_mends_it(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one")
    fetch = [sys.executable, "-m", "trainshed", "data", "fetch", "texts", "copy of it"]
    assert subprocess.run(fetch, cwd=tmp_path, capture_output=True).returncode == 0
    manifest = tmp_path / "copy of it" / ".trainshed" / "manifest.json"
    before = manifest.read_bytes()
    manifest.write_bytes(damage)
    failed = subprocess.run(fetch, cwd=tmp_path, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "copy of it/.trainshed/manifest.json: a manifest that cannot be read: " in failed.stderr
    command = failed.stderr.split("`")[1]
    assert subprocess.run(command, shell=True, cwd=tmp_path).returncode == 0
    assert subprocess.run(fetch, cwd=tmp_path, capture_output=True).returncode == 0
    assert manifest.read_bytes() == before
