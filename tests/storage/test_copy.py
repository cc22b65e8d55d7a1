"""Copying trees: what moves, what does not, and what a copy leaves behind when something goes wrong."""

from __future__ import annotations

import json
import os
import random
import subprocess
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from support.servers.hub_server import COMMIT, Fault, HubServer
from trainshed.errors import AddressError, CorruptData, InputError, NoSpace, NotFound, StorageError
from trainshed.reporting import SILENT, ProgressTask
from trainshed.storage import CopyResult, LocalStore, Manifest, StoreOptions, copy_tree, expand, open_folder, sha256_of

MANIFEST = ".trainshed/manifest.json"


class Ears:
    """A reporter that keeps what it hears."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.total: float | None = None
        self.done = 0.0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def task(self, label: str, *, total: float | None, unit: str) -> AbstractContextManager[ProgressTask]:
        self.total = total
        return nullcontext(self)

    def advance(self, amount: float) -> None:
        self.done += amount

    def describe(self, text: str) -> None:
        pass


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Twelve files in three folders."""
    source = tmp_path / "source"
    for number in range(12):
        file = source / f"part-{number % 3}" / f"{number:02d}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(random.Random(number).randbytes(1000 * number))
    return source


def content(folder: str | Path) -> dict[str, bytes]:
    store = open_folder(str(folder))
    return {info.path: store.read(info.path) for info in store.list() if not info.path.startswith(".trainshed")}


def moved(result: CopyResult) -> tuple[int, int]:
    return result.copied_files, result.files


def test_a_copy_is_complete_proven_and_not_done_twice(tree: Path, tmp_path: Path) -> None:
    ears = Ears()
    result = copy_tree(str(tree), f"{tmp_path}/copy", reporter=ears)
    assert moved(result) == (12, 12)
    assert ears.total == ears.done == result.bytes == 66_000
    assert content(tree) == content(tmp_path / "copy")
    store = LocalStore(tmp_path / "copy")
    manifest = Manifest.read(store, MANIFEST)
    manifest.verify_files(store)
    assert manifest.spec["source"] == str(tree)
    before = [(info.path, info.version) for info in store.list()]
    again = copy_tree(str(tree), f"{tmp_path}/copy")
    assert moved(again) == (0, 12)
    assert [(info.path, info.version) for info in store.list()] == before, "a rerun writes nothing at all"


def test_two_copies_have_the_same_manifest(tree: Path, tmp_path: Path) -> None:
    copy_tree(str(tree), f"{tmp_path}/one", workers=1)
    copy_tree(str(tree), f"{tmp_path}/two", workers=8)
    assert (tmp_path / "one" / MANIFEST).read_bytes() == (tmp_path / "two" / MANIFEST).read_bytes()


def test_only_what_differs_moves(tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy_tree(str(tree), str(copy))
    (tree / "part-0" / "00.jsonl").write_bytes(b"changed at the source")
    (tree / "part-9").mkdir()
    (tree / "part-9" / "new.jsonl").write_bytes(b"new")
    (copy / "part-1" / "01.jsonl").unlink()
    (copy / "part-2" / "02.jsonl").write_bytes(b"X" * 2000)  # same size, other bytes
    ears = Ears()
    result = copy_tree(str(tree), str(copy), reporter=ears)
    assert moved(result) == (4, 13)
    assert content(tree) == content(copy)
    assert ears.notes == ["9 of 13 files are there already"]


def test_a_copy_that_was_moved_by_hand_is_proven_again_and_not_fetched_again(tree: Path, tmp_path: Path) -> None:
    copy_tree(str(tree), f"{tmp_path}/copy")
    for file in (tmp_path / "copy").rglob("*.jsonl"):
        os.utime(file, ns=(1, 1))
    assert moved(copy_tree(str(tree), f"{tmp_path}/copy")) == (0, 12)


def test_patterns_limits_and_single_files(tree: Path, tmp_path: Path) -> None:
    def names(src: str, name: str, **choice: object) -> list[str]:
        copy_tree(src, f"{tmp_path}/{name}", **choice)  # type: ignore[arg-type]
        return list(content(tmp_path / name))

    assert names(f"{tree}/part-1/*.jsonl", "a") == ["01.jsonl", "04.jsonl", "07.jsonl", "10.jsonl"]
    assert names(str(tree), "b", include=["0[12].*"], exclude=["02*"]) == ["part-1/01.jsonl"]
    assert names(str(tree), "c", limit=3) == ["part-0/00.jsonl", "part-0/03.jsonl", "part-0/06.jsonl"]
    assert names(f"{tree}/part-1/01.jsonl", "d") == ["01.jsonl"]
    with pytest.raises(NotFound, match="none of the 12 files"):
        copy_tree(str(tree), f"{tmp_path}/e", include=["*.parquet"])
    with pytest.raises(NotFound, match="nothing to copy"):
        copy_tree(f"{tmp_path}/nope", f"{tmp_path}/e")
    with pytest.raises(InputError, match="a limit of 0"):
        copy_tree(str(tree), f"{tmp_path}/e", limit=0)
    assert not (tmp_path / "e").exists()


def test_tasks_share_the_work_and_the_last_one_writes_the_manifest(tree: Path, tmp_path: Path) -> None:
    whole = copy_tree(str(tree), f"{tmp_path}/whole")
    parts = [copy_tree(str(tree), f"{tmp_path}/parts", task=(number, 5)) for number in (3, 0, 4, 1, 2)]
    assert [part.complete for part in parts] == [False] * 4 + [True]
    assert sum(part.copied_files for part in parts) == whole.files
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    assert (tmp_path / "parts" / MANIFEST).read_bytes() == (tmp_path / "whole" / MANIFEST).read_bytes()
    assert moved(copy_tree(str(tree), f"{tmp_path}/parts")) == (0, 12), "another split knows what the tasks have done"
    with pytest.raises(InputError, match="counted from 0"):
        copy_tree(str(tree), f"{tmp_path}/parts", task=(5, 5))


def test_more_tasks_than_files(tree: Path, tmp_path: Path) -> None:
    results = [copy_tree(str(tree), f"{tmp_path}/copy", limit=2, task=(number, 3)) for number in range(3)]
    assert [result.files for result in results] == [1, 1, 0]
    assert results[-1].complete


def test_tasks_with_other_arguments_are_found_out(tree: Path, tmp_path: Path) -> None:
    copy_tree(str(tree), f"{tmp_path}/copy", task=(0, 2))
    with pytest.raises(InputError, match="did not copy the same thing"):
        copy_tree(str(tree), f"{tmp_path}/copy", task=(1, 2), limit=4)


def test_one_folder_holds_one_copy(tree: Path, tmp_path: Path) -> None:
    copy_tree(str(tree / "part-0"), f"{tmp_path}/copy")
    with pytest.raises(InputError, match=r"already holds a copy of .*part-0"):
        copy_tree(str(tree / "part-1"), f"{tmp_path}/copy")


def test_a_folder_is_not_copied_into_itself(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    for src, dst in ((".", "copy"), (str(tree), f"{tree}/copy"), ("**/*.jsonl", "copy"), (str(tree), ".")):
        with pytest.raises(InputError, match="inside the source"):
            copy_tree(src, dst)
    assert moved(copy_tree("part-0/*.jsonl", "copy")) == (4, 4)


def test_a_source_that_lies_about_its_size_is_not_copied(
    hub: HubServer, impatient: StoreOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/model"] = {"a.bin": b"12345", "b.bin": b"67890"}
    listing = open_folder("hf://org/model", impatient)
    infos = [type(info)(info.path, 6, info.version) if info.path == "a.bin" else info for info in listing.list()]
    monkeypatch.setattr(type(listing), "list", lambda self, prefix="": iter(infos))
    ears = Ears()
    with pytest.raises(
        StorageError, match=r"1 of 2 files could not be copied:\n  a\.bin: 5 bytes arrived, 6 were listed"
    ):
        copy_tree("hf://org/model", f"{tmp_path}/copy", options=impatient, reporter=ears)
    assert content(tmp_path / "copy") == {"b.bin": b"67890"}
    assert not (tmp_path / "copy" / MANIFEST).exists()
    assert sum("trying again" in warning for warning in ears.warnings) == 2


def test_a_list_of_urls(hub: HubServer, impatient: StoreOptions, tmp_path: Path) -> None:
    host = hub.url.removeprefix("http://").replace(":", "_")
    hub.pages |= {"/v1/a.jsonl": b"a", "/v1/b c.jsonl": b"bb", "/list.txt": b""}
    good = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # sha256 of 'a'
    hub.pages["/list.txt"] = f"# ours\n{hub.url}/v1/a.jsonl {good}\n\n{hub.url}/v1/b%20c.jsonl\n".encode()
    ears = Ears()
    result = copy_tree(f"{hub.url}/list.txt", f"{tmp_path}/copy", options=impatient, reporter=ears)
    assert content(tmp_path / "copy") == {f"{host}/v1/a.jsonl": b"a", f"{host}/v1/b c.jsonl": b"bb"}
    assert "is a list of URLs" in ears.notes[0]
    gets = hub.count("GET /v1")
    local = tmp_path / "urls"
    local.write_bytes(hub.pages["/list.txt"])
    assert moved(copy_tree(f"{hub.url}/list.txt", f"{tmp_path}/copy", options=impatient)) == (0, 2)
    assert hub.count("GET /v1") == gets, "asked about, but not read again"
    hub.pages["/v1/b c.jsonl"] = b"other"
    assert moved(copy_tree(f"@{hub.url}/list.txt", f"{tmp_path}/copy", options=impatient)) == (1, 2)
    assert moved(copy_tree(f"@{local}", f"{tmp_path}/from-local", options=impatient)) == (2, 2)
    assert moved(copy_tree(f"{hub.url}/v1/a.jsonl", f"{tmp_path}/single", options=impatient)) == (1, 1)
    assert content(tmp_path / "single") == {"a.jsonl": b"a"}
    assert result.complete


def test_missing_urls_are_told_once_and_the_rest_is_copied(
    hub: HubServer, impatient: StoreOptions, tmp_path: Path
) -> None:
    hub.pages |= {"/a": b"a", "/b": b"b", "/secret": b"s"}
    hub.faults["/secret"] = Fault(99, status=403)
    (tmp_path / "urls").write_text("".join(f"{hub.url}/{name}\n" for name in ("a", "gone", "b", "secret")))
    ears = Ears()
    with pytest.raises(StorageError) as caught:
        copy_tree(f"@{tmp_path}/urls", f"{tmp_path}/copy", options=impatient, reporter=ears)
    assert caught.value.exit_code == 1
    assert "2 of 4 files could not be copied" in str(caught.value)
    assert "/gone: the source does not have it" in str(caught.value)
    assert "/secret: the server refused (403)" in str(caught.value)
    assert sorted(content(tmp_path / "copy").values()) == [b"a", b"b"]
    assert not (tmp_path / "copy" / MANIFEST).exists()
    assert hub.count("/gone") == 1
    assert len(ears.warnings) == 2
    del hub.faults["/secret"]
    hub.pages["/gone"] = b"back"
    assert moved(copy_tree(f"@{tmp_path}/urls", f"{tmp_path}/copy", options=impatient)) == (2, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("relative/path\n", "urls:1: not a URL"),
        ("http://h/a\nhttp://h/a?x=1\n", "urls:2: a second URL for h/a"),
        ("http://h/\n", "names no file"),
        ("http://h/../x\n", "names no file"),
        ("http://h/a 123\n", "no SHA-256"),
    ],
)
def test_a_bad_list_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "urls").write_text(text)
    with pytest.raises(AddressError, match=message):
        copy_tree(f"@{tmp_path}/urls", f"{tmp_path}/copy")


def test_an_empty_list_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "urls").write_text("# nothing\n")
    with pytest.raises(NotFound, match="names no URL"):
        copy_tree(f"@{tmp_path}/urls", f"{tmp_path}/copy")


def test_a_text_file_that_is_no_list_is_copied_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("http://h/a\nis a good address\n")
    copy_tree(f"{tmp_path}/words.txt", f"{tmp_path}/copy")
    assert list(content(tmp_path / "copy")) == ["words.txt"]


def test_a_new_commit_moves_only_what_it_changed(hub: HubServer, impatient: StoreOptions, tmp_path: Path) -> None:
    hub.repos["org/model"] = {"config.json": b"{}", "weights.bin": b"w" * 1000}
    hub.lfs.add("weights.bin")
    address = "hf://org/model"
    assert copy_tree(address, f"{tmp_path}/copy", options=impatient).source == f"{address}@{COMMIT}"
    hub.repos["org/model"]["config.json"] = b'{"new": 1}'
    requests = sum(hub.requests.values())
    assert moved(copy_tree(address, f"{tmp_path}/copy", options=impatient)) == (1, 2)
    assert sum(hub.requests.values()) - requests <= 3, "revision, listing, the one file"


def test_a_journal_of_before_is_read_and_its_checksums_are_kept(tree: Path, tmp_path: Path) -> None:
    copy_tree(str(tree), f"{tmp_path}/copy")
    (journal,) = (tmp_path / "copy" / ".trainshed" / "journal").rglob("*.jsonl")
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    for record in records:
        del record["checksum"]
        record["sha256"] = sha256_of((tmp_path / "copy" / record["path"]).read_bytes())
    journal.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert moved(copy_tree(str(tree), f"{tmp_path}/copy")) == (0, 12)
    manifest = Manifest.read(LocalStore(tmp_path / "copy"), MANIFEST)
    assert {entry.checksum.partition(":")[0] for entry in manifest.files} == {"sha256"}
    manifest.verify_files(LocalStore(tmp_path / "copy"))


def test_a_broken_journal_costs_work_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    copy_tree(str(tree), f"{tmp_path}/copy")
    (journal,) = (tmp_path / "copy" / ".trainshed" / "journal").rglob("*.jsonl")
    assert len(journal.read_text().splitlines()) == 12
    assert set(json.loads(journal.read_text().splitlines()[0])) == {"path", "size", "checksum", "source", "version"}
    journal.write_bytes(b"torn")
    ears = Ears()
    assert moved(copy_tree(str(tree), f"{tmp_path}/copy", reporter=ears)) == (12, 12)
    assert "cannot be read; what it lists is copied again" in ears.warnings[0]


def test_many_small_segments_become_one(tree: Path, tmp_path: Path) -> None:
    copy_tree(str(tree), f"{tmp_path}/copy", workers=1, journal_seconds=0)
    assert len(list((tmp_path / "copy" / ".trainshed" / "journal").rglob("*.jsonl"))) == 1
    assert moved(copy_tree(str(tree), f"{tmp_path}/copy")) == (0, 12)


def test_a_copy_onto_a_disk_that_fills_up_goes_on_once_there_is_space(tmp_path: Path, tiny_disk: Path) -> None:
    source = tmp_path / "large"
    source.mkdir()
    for number in range(20):
        (source / f"{number:02d}").write_bytes(bytes([number]) * 100_000)
    with pytest.raises(NoSpace, match="the disk is full"):
        copy_tree(str(source), f"{tiny_disk}/copy", workers=2)
    there = content(tiny_disk / "copy")
    assert 0 < len(there) < 20
    assert {len(data) for data in there.values()} == {100_000}
    assert not (tiny_disk / "copy" / MANIFEST).exists()
    subprocess.run(["mount", "-o", "remount,size=8m", str(tiny_disk)], check=True)
    assert copy_tree(str(source), f"{tiny_disk}/copy").files == 20
    assert content(tiny_disk / "copy") == content(source)


def test_a_full_disk_stops_the_copy_at_once_and_loses_no_record(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, original = 0, LocalStore.writer

    def full(self: LocalStore, path: str, *, size: int | None = None) -> AbstractContextManager[object]:
        nonlocal written
        written += 1
        if written > 5:
            raise NoSpace("the disk is full", where=path)
        return original(self, path, size=size)

    monkeypatch.setattr(LocalStore, "writer", full)
    with pytest.raises(NoSpace):
        copy_tree(str(tree), f"{tmp_path}/copy", workers=1)
    monkeypatch.undo()
    assert not (tmp_path / "copy" / MANIFEST).exists()
    assert moved(copy_tree(str(tree), f"{tmp_path}/copy", reporter=SILENT)) == (7, 12)


@pytest.mark.s3
def test_from_disk_to_a_bucket_and_back(tree: Path, tmp_path: Path, s3_bucket: str) -> None:
    there = copy_tree(str(tree), f"s3://{s3_bucket}/corpus")
    assert moved(there) == (12, 12)
    assert moved(copy_tree(str(tree), f"s3://{s3_bucket}/corpus")) == (0, 12)
    back = copy_tree(f"s3://{s3_bucket}/corpus", f"{tmp_path}/back")
    assert moved(back) == (12, 12)
    assert content(tmp_path / "back") == content(tree)
    assert moved(copy_tree(f"s3://{s3_bucket}/corpus", f"{tmp_path}/back")) == (0, 12)
    assert len(expand(f"s3://{s3_bucket}/corpus")) == 12, "journal and manifest are not part of the corpus"
    (tree / "part-0" / "00.jsonl").write_bytes(b"changed")
    assert moved(copy_tree(str(tree), f"s3://{s3_bucket}/corpus")) == (1, 12)
    folder = open_folder(f"s3://{s3_bucket}/corpus")
    Manifest.read(folder, MANIFEST).verify_files(folder)
    folder.put("part-1/01.jsonl", b"X" * 1000)
    with pytest.raises(CorruptData, match=r"part-1/01\.jsonl"):
        Manifest.read(folder, MANIFEST).verify_files(folder)
    assert moved(copy_tree(str(tree), f"s3://{s3_bucket}/corpus")) == (1, 12)
