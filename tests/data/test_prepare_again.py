"""Running a preparation again: what is proven is kept, what changed is made anew, what contradicts is refused."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.runs.preparing import MadeTokenizer, Notes, contents, documents, jsonl, left_behind, prepare_text
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokenize.workers import TokenBlock
from trainshed.data.tokens.shard_writer import LocalShardWriter, TokenCounts
from trainshed.errors import Conflict, InputError, StorageError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(3):
        (folder / f"part-{number}.jsonl").write_bytes(jsonl(documents(30)[number * 10 : number * 10 + 10]))
    return folder


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_rerun_makes_nothing(tmp_path: Path, corpus: Path, tokenizer: Tokenizer) -> None:
    out = tmp_path / "out"
    first = prepare_text(corpus, tokenizer, out / "tokens", shards=3)
    before = stamps(out)
    again = prepare_text(corpus, tokenizer, out / "tokens", shards=3)
    assert (first.made, first.reused, again.made, again.reused) == (3, 0, 0, 3)
    assert again.manifests == first.manifests
    assert stamps(out) == before


def test_touched_or_copied_files_with_the_same_bytes_are_not_done_again(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer
) -> None:
    pq.write_table(pa.table({"text": ["one", "two"]}), corpus / "table.parquet")
    prepare_text(corpus, tokenizer, tmp_path / "out", shards=4)
    for path in corpus.iterdir():
        shutil.copyfile(path, path.with_suffix(".copy"))
        os.replace(path.with_suffix(".copy"), path)
    assert prepare_text(corpus, tokenizer, tmp_path / "out", shards=4).made == 0


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_changed_input_redoes_its_shard_and_no_other(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, changed: int
) -> None:
    out = tmp_path / "out"
    prepare_text(corpus, tokenizer, out / "tokens", shards=3)
    before = stamps(out)
    part = corpus / f"part-{changed}.jsonl"
    part.write_bytes(part.read_bytes() + jsonl(["one more document"]))
    notes = Notes()
    again = prepare_text(corpus, tokenizer, out / "tokens", shards=3, reporter=notes)
    assert (again.made, again.reused) == (1, 2)
    touched = {name for name, stamp in stamps(out).items() if before.get(name) != stamp}
    assert touched == {f"tokens-0000{changed}-of-00003.{ending}" for ending in ("bin", "idx", "manifest.json")}
    assert any(f"part-{changed}.jsonl has changed, made anew" in note for note in notes.notes)
    prepare_text(corpus, tokenizer, tmp_path / "fresh", shards=3)
    for shard in range(3):
        name = f"-0000{shard}-of-00003"
        assert contents(f"{out}/tokens{name}") == contents(f"{tmp_path}/fresh{name}")


def test_a_new_file_changes_what_a_shard_is_made_of(tmp_path: Path, corpus: Path, tokenizer: Tokenizer) -> None:
    prepare_text(corpus, tokenizer, tmp_path / "out")
    (corpus / "part-3.jsonl").write_bytes(jsonl(["another file"]))
    notes = Notes()
    assert prepare_text(corpus, tokenizer, tmp_path / "out", reporter=notes).made == 1
    assert any("made of other files than before" in note for note in notes.notes)


def test_another_key_or_cut_of_the_same_files_is_other_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree")
    for split, expected in (("file", 1), ("line", 3), ("blank_line", 2)):
        prepared = prepare_text(tmp_path / "a.txt", tokenizer, tmp_path / "out", split=split)
        assert (prepared.made, prepared.manifests[0].counts.documents) == (1, expected)


@pytest.mark.parametrize("lost", ["bin", "idx", "manifest.json"])
def test_a_lost_or_cut_file_is_made_again(tmp_path: Path, corpus: Path, tokenizer: Tokenizer, lost: str) -> None:
    prepare_text(corpus, tokenizer, tmp_path / "out")
    expected = contents(tmp_path / "out")
    (tmp_path / f"out.{lost}").unlink()
    assert prepare_text(corpus, tokenizer, tmp_path / "out").made == 1
    assert contents(tmp_path / "out") == expected
    os.truncate(tmp_path / "out.bin", 10)
    assert prepare_text(corpus, tokenizer, tmp_path / "out").made == 1
    assert contents(tmp_path / "out") == expected


def test_another_tokenizer_or_option_is_refused_until_overwriting_is_asked_for(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, made_tokenizer: MadeTokenizer
) -> None:
    prepare_text(corpus, tokenizer, tmp_path / "out")
    other = made_tokenizer("qwen")
    before = contents(tmp_path / "out")
    with pytest.raises(InputError, match=r"made differently \(.*tokenizer") as error:
        prepare_text(corpus, other, tmp_path / "out")
    assert "--overwrite" in (error.value.hint or "")
    with pytest.raises(InputError, match=r"made differently \(eod\)"):
        prepare_text(corpus, tokenizer, tmp_path / "out", eod=False)
    assert contents(tmp_path / "out") == before
    assert prepare_text(corpus, other, tmp_path / "out", overwrite=True).made == 1
    assert contents(tmp_path / "out") != before
    assert prepare_text(corpus, other, tmp_path / "out", overwrite=True).made == 0


def test_two_processes_cannot_write_the_same_shard(tmp_path: Path, corpus: Path, tokenizer: Tokenizer) -> None:
    with ExitStack() as stack:
        LocalShardWriter(str(tmp_path / "out"), "key", ["piece"], stack)
        for workers in (1, 2):
            with pytest.raises(Conflict, match="another process is preparing this shard"):
                prepare_text(corpus, tokenizer, tmp_path / "out", workers=workers)
    assert prepare_text(corpus, tokenizer, tmp_path / "out").made == 1
    assert left_behind(tmp_path) == []


def test_a_shard_stays_locked_until_its_files_have_their_names(tmp_path: Path) -> None:
    with ExitStack() as stack:
        writer = LocalShardWriter(str(tmp_path / "out"), "key", ["piece"], stack)
        writer.append(TokenBlock(b"\x01\x00", b"\x01\x00\x00\x00", 1, 1), TokenCounts(1, 0, 1, 1), 1)
        with ExitStack() as other, pytest.raises(Conflict):
            LocalShardWriter(str(tmp_path / "out"), "key", ["piece"], other)
        writer.finish(np.dtype("<u2"))
        assert left_behind(tmp_path) == []


def test_a_lock_on_a_journal_that_was_removed_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process finished between our opening the journal and our locking it."""
    lock = LocalShardWriter._lock

    def removed_before(self: LocalShardWriter, prefix: str) -> None:
        self._journal_path.unlink()
        lock(self, prefix)

    monkeypatch.setattr(LocalShardWriter, "_lock", removed_before)
    with ExitStack() as stack, pytest.raises(Conflict):
        LocalShardWriter(str(tmp_path / "out"), "key", ["piece"], stack)


def test_an_output_that_cannot_be_written_is_explained(tmp_path: Path, corpus: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match=r"cannot be written: (not a directory|file exists)"):
        prepare_text(corpus, tokenizer, tmp_path / "file" / "out")


def test_one_file_named_twice_is_refused(tmp_path: Path, corpus: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="named by two inputs"):
        prepare_text([corpus, corpus / "part-1.jsonl"], tokenizer, tmp_path / "out")
