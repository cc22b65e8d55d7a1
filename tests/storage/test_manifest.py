from __future__ import annotations

import json
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


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]"])
def test_a_torn_manifest_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptData, match="somewhere"):
        Manifest.from_bytes(data, "somewhere")
