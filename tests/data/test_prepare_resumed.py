"""What a crashed preparation leaves is used where it is proven, and never believed where it is not."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.runs.preparing import Notes, contents, documents, jsonl, left_behind, prepare_text
from trainshed.data.text import reader
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokens import shard_writer
from trainshed.data.tokens.manifest import write_set_manifest
from trainshed.data.tokens.verify import verify_tokens
from trainshed.errors import BadDocument, NoSpace, StorageError
from trainshed.storage import LocalStore


class Crash(Exception):
    """The power is gone."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "JOURNAL_SECONDS", 0)
    monkeypatch.setattr(reader, "READ_BYTES", 2_000)
    monkeypatch.setattr(reader, "BLOCK_BYTES", 2_000)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = documents(180)
    for number in range(3):
        (folder / f"part-{number}.jsonl").write_bytes(jsonl(texts[number::3]))
    return folder


@pytest.fixture
def expected(tmp_path: Path, corpus: Path, tokenizer: Tokenizer) -> tuple[bytes, bytes]:
    prepare_text(corpus, tokenizer, tmp_path / "expected" / "tokens")
    return contents(tmp_path / "expected" / "tokens")


def resumed(notes: Notes) -> bool:
    return any("going on after" in note for note in notes.notes)


def crash_after(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Let the writer fail when it has taken some blocks."""
    append, taken = shard_writer.LocalShardWriter.append, iter(range(blocks))

    def failing(*arguments) -> None:
        if next(taken, None) is None:
            raise Crash
        append(*arguments)

    monkeypatch.setattr(shard_writer.LocalShardWriter, "append", failing)


def half_done(tmp_path: Path, corpus: Path, tokenizer: Tokenizer, *, blocks: int = 5, **options: Any) -> Path:
    """Leave a preparation that crashed in the middle of its first file, and return its prefix."""
    with pytest.MonkeyPatch.context() as patch:
        crash_after(patch, blocks)
        with pytest.raises(Crash):
            prepare_text(corpus, tokenizer, tmp_path / "tokens", **options)
    return tmp_path / "tokens"


@pytest.mark.parametrize("blocks", [1, 5, 9, 12])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_crash_between_blocks_costs_nothing_that_was_marked(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, expected: tuple[bytes, bytes], blocks: int, workers: int
) -> None:
    prefix = half_done(tmp_path, corpus, tokenizer, blocks=blocks, workers=workers)
    assert not Path(f"{prefix}.bin").exists()
    notes = Notes()
    prepare_text(corpus, tokenizer, prefix, reporter=notes, workers=workers)
    assert contents(prefix) == expected
    assert resumed(notes)
    assert notes.advanced == sum(path.stat().st_size for path in corpus.iterdir())
    assert left_behind(tmp_path) == []


def test_parquet_is_resumed_in_the_middle_of_a_row_group(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainshed.data.text import formats

    monkeypatch.setattr(formats, "PARQUET_BATCH_BYTES", 1)
    pq.write_table(pa.table({"text": documents(500)}), tmp_path / "a.parquet", row_group_size=200)
    prepare_text(tmp_path / "a.parquet", tokenizer, tmp_path / "expected")
    prefix = half_done(tmp_path, tmp_path / "a.parquet", tokenizer, blocks=5)
    monkeypatch.setattr(
        formats, "PARQUET_BATCH_BYTES", 40_000
    )  # other batches than before, as another version may have
    notes = Notes()
    prepare_text(tmp_path / "a.parquet", tokenizer, prefix, reporter=notes)
    assert contents(prefix) == contents(tmp_path / "expected")
    assert resumed(notes)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("older", [False, True])
def test_a_crash_while_files_get_their_names_never_mixes_two_preparations(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, expected: tuple[bytes, bytes], step: int, older: bool
) -> None:
    """Step 1: before `.bin` is named; 2: between `.bin` and `.idx`; 3: before the manifest."""
    prefix = tmp_path / "tokens"
    if older:
        prepare_text(corpus, tokenizer, prefix, eod=False)
    replace, left = Path.replace, iter(range(step - 1))

    def failing_replace(self: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise Crash
        return replace(self, target)

    def failing_put(*_: object, **__: object) -> None:
        raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", failing_replace)
        patch.setattr(LocalStore, "put", failing_put)
        with pytest.raises(Crash):
            prepare_text(corpus, tokenizer, prefix, overwrite=True)
    assert not Path(f"{prefix}.manifest.json").exists()
    if Path(f"{prefix}.idx").exists():
        assert contents(prefix) == expected
    prepare_text(corpus, tokenizer, prefix)
    assert contents(prefix) == expected
    assert left_behind(tmp_path) == []
    assert verify_tokens(str(prefix))[0].passed


def journal_lines(prefix: Path) -> list[bytes]:
    return Path(f"{prefix}.journal.partial").read_bytes().splitlines(keepends=True)


def damages(prefix: Path) -> Iterator[tuple[str, str, bytes]]:
    """Every file a resume reads, damaged in ways that still look like such a file."""
    lines = journal_lines(prefix)
    position = lines[-1].replace(b'"position":', b'"position":1')
    assert position != lines[-1]
    yield "the last mark lies about its position", "journal", b"".join([*lines[:-1], position])
    yield "a mark in the middle is gone", "journal", b"".join(lines[:3] + lines[4:])
    yield "it starts with another key", "journal", b"".join([lines[0].replace(b'"key":"', b'"key":"0'), *lines[1:]])
    yield "it is empty", "journal", b""
    yield "it is not a journal", "journal", os.urandom(500)
    yield "it is cut in a mark", "journal", b"".join(lines)[:-9]
    for file in ("bin", "lengths"):
        data = Path(f"{prefix}.{file}.partial").read_bytes()
        yield "a bit is flipped", file, data[:40] + bytes([data[40] ^ 4]) + data[41:]
        yield "it is cut", file, data[:-1]
        yield "it is empty", file, b""
        yield "something was appended", file, data + b"\1\0\0\0"


def test_damaged_remains_are_found_out(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, expected: tuple[bytes, bytes]
) -> None:
    prefix = half_done(tmp_path, corpus, tokenizer)
    remains = {path: path.read_bytes() for path in tmp_path.glob("tokens.*")}
    for what, file, data in list(damages(prefix)):
        for path in tmp_path.glob("tokens.*"):
            path.unlink()
        for path, good in remains.items():
            path.write_bytes(good)
        Path(f"{prefix}.{file}.partial").write_bytes(data)
        prepare_text(corpus, tokenizer, prefix)
        assert contents(prefix) == expected, f"{file}: {what}"


def test_remains_of_another_way_of_reading_the_same_file_are_not_used(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("\n".join(documents(200)))
    prepare_text(tmp_path / "a.txt", tokenizer, tmp_path / "expected", split="blank_line")
    prefix = half_done(tmp_path, tmp_path / "a.txt", tokenizer, split="line")
    prepare_text(tmp_path / "a.txt", tokenizer, prefix, split="blank_line")
    assert contents(prefix) == contents(tmp_path / "expected")


def test_a_store_that_cuts_its_chunks_differently_the_next_time_changes_nothing(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, expected: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = half_done(tmp_path, corpus, tokenizer)
    monkeypatch.setattr(reader, "READ_BYTES", 777)
    monkeypatch.setattr(reader, "BLOCK_BYTES", 5_000)
    notes = Notes()
    prepare_text(corpus, tokenizer, prefix, reporter=notes)
    assert contents(prefix) == expected
    assert resumed(notes)


def test_skipping_the_bad_line_that_stopped_the_work_keeps_what_was_done(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer
) -> None:
    part = corpus / "part-2.jsonl"
    part.write_bytes(part.read_bytes() + b"not json\n" + jsonl(documents(40)))
    prepare_text(corpus, tokenizer, tmp_path / "fresh", on_bad_line="skip", shards=2)
    with pytest.raises(BadDocument):
        prepare_text(corpus, tokenizer, tmp_path / "tokens", shards=2)
    notes = Notes()
    again = prepare_text(corpus, tokenizer, tmp_path / "tokens", shards=2, on_bad_line="skip", reporter=notes)
    assert (again.made, again.reused) == (1, 1)
    assert resumed(notes)
    for shard in ("00000-of-00002", "00001-of-00002"):
        assert contents(tmp_path / f"tokens-{shard}") == contents(tmp_path / f"fresh-{shard}")
    assert write_set_manifest(str(tmp_path / "tokens"), 2) is not None


def test_lines_that_were_skipped_are_found_again_when_they_are_to_stop_the_work(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer
) -> None:
    part = corpus / "part-1.jsonl"
    part.write_bytes(b"not json\n" + part.read_bytes())
    prepare_text(corpus, tokenizer, tmp_path / "whole", on_bad_line="skip")
    half = half_done(tmp_path, corpus, tokenizer, blocks=9, on_bad_line="skip")
    for prefix in (tmp_path / "whole", half):
        notes = Notes()
        with pytest.raises(BadDocument, match=r"part-1\.jsonl:1: broken JSON"):
            prepare_text(corpus, tokenizer, prefix, reporter=notes)
        assert resumed(notes) == (prefix == half)


def test_mending_a_bad_line_in_a_later_file_keeps_the_work_on_earlier_ones(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, expected: tuple[bytes, bytes]
) -> None:
    good = (corpus / "part-2.jsonl").read_bytes()
    (corpus / "part-2.jsonl").write_bytes(good[:2500] + b"\nnot json\n" + good[2500:])
    with pytest.raises(BadDocument, match=r"part-2\.jsonl:"):
        prepare_text(corpus, tokenizer, tmp_path / "tokens")
    (corpus / "part-2.jsonl").write_bytes(good)
    notes = Notes()
    prepare_text(corpus, tokenizer, tmp_path / "tokens", reporter=notes)
    assert contents(tmp_path / "tokens") == expected
    done = next(note for note in notes.notes if "going on after" in note)
    files = [(corpus / f"part-{number}.jsonl").read_bytes().count(b"\n") for number in range(2)]
    assert int(done.split("going on after ")[1].split()[0]) in range(files[0], sum(files) + 1)


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, StorageError)]
)
def test_a_write_that_fails_is_told_and_the_rerun_goes_on(
    tmp_path: Path,
    corpus: Path,
    tokenizer: Tokenizer,
    expected: tuple[bytes, bytes],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[StorageError],
) -> None:
    write_all, left = shard_writer._write_all, iter(range(20))

    def failing(file, data: bytes) -> None:
        if next(left, None) is None:
            file.write(data[: len(data) // 2])
            raise OSError(code, os.strerror(code))
        write_all(file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_writer, "_write_all", failing)
        with pytest.raises(kind) as error:
            prepare_text(corpus, tokenizer, tmp_path / "tokens")
    assert error.value.where == f"{tmp_path}/tokens.bin"
    notes = Notes()
    prepare_text(corpus, tokenizer, tmp_path / "tokens", reporter=notes)
    assert contents(tmp_path / "tokens") == expected
    assert resumed(notes)
