"""Corpora at the edge: nothing in them, one huge document, damaged files, no room on the disk, no end-of-document."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from support.missing_parts import missing_part
from support.runs.preparing import (
    Notes,
    TokenizerFolder,
    contents,
    documents,
    jsonl,
    left_behind,
    megatron_bytes,
    prepare_text,
)
from trainshed.cli import run_cli
from trainshed.data.text import reader
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokens import shard_writer
from trainshed.data.tokens.indexed_dataset import IndexedDataset
from trainshed.data.tokens.verify import verify_tokens
from trainshed.errors import AddressError, BadDocument, InputError, MissingExtra, NoSpace


@pytest.mark.parametrize("workers", [1, 2])
def test_a_document_of_100_megabytes(tmp_path: Path, tokenizer: Tokenizer, workers: int) -> None:
    """Many times a block, a pipe's buffer and the sample that both encoders encode."""
    unit = "The quick brown fox — jumps over 12 lazy dogs.\n"
    text = unit * (100_000_000 // len(unit.encode()) + 1)
    (tmp_path / "a.jsonl").write_bytes(jsonl(["before", text, "after"]))
    prepared = prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", workers=workers)
    assert prepared.manifests[0].counts.text_bytes > 100_000_000
    line = tokenizer.backend.encode(unit, add_special_tokens=False).ids
    eod = tokenizer.end_of_document().id
    with IndexedDataset(tmp_path / "out") as reader:
        assert reader.documents == 3
        tokens = reader.document(1)
        assert tokens[-1] == eod
        assert np.array_equal(tokens[:-1], np.tile(np.array(line, tokens.dtype), text.count("\n")))
        assert tokenizer.decode(reader.document(2)[:-1].tolist()) == "after"


def test_no_documents_at_all_is_a_valid_result_that_is_said_aloud(
    megatron: SimpleNamespace,
    tmp_path: Path,
    tokenizer: Tokenizer,
    tokenizer_folder: TokenizerFolder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {
        "a.jsonl": b"",
        "b.jsonl": b"\n\r\n  \n",
        "c.txt": b"",
        "d.jsonl.gz": gzip.compress(b""),
        "e.jsonl.zst": b"",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "f.parquet")
    command = ["data", "prepare", "--tokenizer", str(tokenizer_folder("gpt2")), "--output", str(tmp_path / "out")]
    command += [part for name in [*files, "f.parquet"] for part in ("--input", str(tmp_path / name))]
    assert run_cli(command) == 0
    assert "no documents: 6 files hold none" in capsys.readouterr().err
    assert contents(tmp_path / "out") == megatron_bytes(megatron, tmp_path, tokenizer, [])
    assert verify_tokens(str(tmp_path / "out"))[0].passed
    assert run_cli(["data", "inspect", str(tmp_path / "out")]) == 0
    assert "documents                 0" in capsys.readouterr().out


def test_only_empty_documents(megatron: SimpleNamespace, tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["", "", ""]))
    prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", bos=True)
    assert contents(tmp_path / "out") == megatron_bytes(megatron, tmp_path, tokenizer, ["", "", ""])


def test_an_input_that_is_not_there(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(AddressError, match="nothing found"):
        prepare_text(tmp_path / "*.jsonl", tokenizer, tmp_path / "out")


def test_a_file_whose_name_tells_nothing_needs_a_format(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "corpus.data").write_bytes(jsonl(["a document"]))
    with pytest.raises(InputError, match="cannot tell from its name") as error:
        prepare_text(tmp_path / "corpus.data", tokenizer, tmp_path / "out")
    assert "--format with one of jsonl" in (error.value.hint or "")
    prepared = prepare_text(tmp_path / "corpus.data", tokenizer, tmp_path / "out", kind="jsonl")
    assert prepared.manifests[0].counts.documents == 1


PLAIN = jsonl(documents(200))
PACKED = {"gz": gzip.compress(PLAIN), "zst": zstandard.ZstdCompressor(write_checksum=True).compress(PLAIN)}


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "cut in its last bytes", "flipped", "not packed at all", "junk behind it"])
def test_a_damaged_archive_stops_the_work(tmp_path: Path, tokenizer: Tokenizer, ending: str, damage: str) -> None:
    data = PACKED[ending]
    flipped = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    broken = {
        "cut": data[: len(data) // 2],
        "cut in its last bytes": data[:-2],
        "flipped": flipped,
        "not packed at all": PLAIN,
        "junk behind it": data + b"junk",
    }
    (tmp_path / f"a.jsonl.{ending}").write_bytes(broken[damage])
    with pytest.raises(BadDocument) as error:
        prepare_text(tmp_path / f"a.jsonl.{ending}", tokenizer, tmp_path / "out", workers=2)
    if damage in ("cut", "not packed at all", "junk behind it"):
        assert "file is damaged" in error.value.what
        assert error.value.where == f"{tmp_path}/a.jsonl.{ending}"
    assert not (tmp_path / "out.idx").exists()


def test_a_file_that_is_no_parquet(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.parquet").write_bytes(PLAIN)
    with pytest.raises(InputError, match="not a readable parquet file") as error:
        prepare_text(tmp_path / "a.parquet", tokenizer, tmp_path / "out")
    assert error.value.where == f"{tmp_path}/a.parquet"


def test_parquet_with_damaged_pages_stops_the_work(tmp_path: Path, tokenizer: Tokenizer) -> None:
    table = pa.table({"text": documents(400)})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", write_page_checksum=True)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[200:240] = bytes(40)
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(BadDocument, match="this parquet file is damaged"):
        prepare_text(tmp_path / "a.parquet", tokenizer, tmp_path / "out")


def test_compressed_parquet_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.parquet.gz").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be read in pieces"):
        prepare_text(tmp_path / "a.parquet.gz", tokenizer, tmp_path / "out")


def test_a_tokenizer_without_an_end_of_document_token_is_refused_until_told(
    tmp_path: Path, tokenizer_folder: TokenizerFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["some text", "more"]))
    command = ["data", "prepare", "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out")]
    command += ["--tokenizer", str(tokenizer_folder("bert"))]
    assert run_cli(command) == 2
    said = capsys.readouterr().err
    assert "this tokenizer names no eos_token, and of the usual tokens none is there" in said
    assert "write --eod TOKEN with one of its special tokens ([UNK], [CLS], [SEP], [PAD]), or --no-eod" in said
    assert run_cli([*command, "--eod", "[NOPE]"]) == 2
    assert "--eod asks for the token '[NOPE]', which this tokenizer does not have" in capsys.readouterr().err
    assert run_cli([*command, "--bos"]) == 2
    assert run_cli([*command, "--eod", "[SEP]", "--no-eod"]) == 2
    assert "contradict" in capsys.readouterr().err.splitlines()[-2]
    assert run_cli([*command, "--eod", "[SEP]"]) == 0
    assert "documents end with [SEP] (2)" in capsys.readouterr().err
    with IndexedDataset(tmp_path / "out") as reader:
        assert [int(reader.document(i)[-1]) for i in range(2)] == [2, 2]
    assert run_cli([*command, "--no-eod", "--overwrite"]) == 0
    with IndexedDataset(tmp_path / "out") as reader:
        assert 2 not in reader.read(0, reader.tokens)


@pytest.mark.parametrize(
    ("module", "name", "needed_for"),
    [("zstandard", "a.jsonl.zst", "reading .zst files"), ("pyarrow", "a.parquet", "reading parquet files")],
)
def test_what_is_not_installed_is_named_with_the_pip_line(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, module: str, name: str, needed_for: str
) -> None:
    (tmp_path / name).write_bytes(PACKED["zst"])
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=f"{needed_for} needs the extra 'data'") as error:
        prepare_text(tmp_path / name, tokenizer, tmp_path / "out")
    assert error.value.hint == "pip install 'trainshed[data]'"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        problem = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        missing_part(f"no small disk can be mounted here: {problem}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fill", [1_000_000, 900_000, 700_000])
def test_a_full_disk_is_told_and_once_there_is_room_the_rerun_completes(
    tmp_path: Path, tokenizer: Tokenizer, small_disk: Path, monkeypatch: pytest.MonkeyPatch, workers: int, fill: int
) -> None:
    monkeypatch.setattr(shard_writer, "JOURNAL_SECONDS", 0)
    monkeypatch.setattr(reader, "READ_BYTES", 20_000)
    monkeypatch.setattr(reader, "BLOCK_BYTES", 20_000)
    (tmp_path / "a.jsonl").write_bytes(jsonl(documents(1500) * 2))
    prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "expected")
    needed = sum(map(len, contents(tmp_path / "expected")))
    assert needed > 1_048_576 - 700_000, "the corpus must not fit beside the ballast"
    (small_disk / "ballast").write_bytes(bytes(fill))
    with pytest.raises(NoSpace, match="the disk is full") as error:
        prepare_text(tmp_path / "a.jsonl", tokenizer, small_disk / "out", shards=2, workers=workers)
    assert "free some space" in (error.value.hint or "")
    (small_disk / "ballast").unlink()
    notes = Notes()
    prepare_text(tmp_path / "a.jsonl", tokenizer, small_disk / "out", shards=2, workers=workers, reporter=notes)
    assert left_behind(small_disk) == []
    prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "cut", shards=2)
    for shard in ("00000-of-00002", "00001-of-00002"):
        assert contents(small_disk / f"out-{shard}") == contents(tmp_path / f"cut-{shard}")
    if fill == 700_000:
        assert any("going on after" in note for note in notes.notes)
