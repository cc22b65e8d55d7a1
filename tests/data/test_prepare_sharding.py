"""Shards: many pairs of files that, put together, are the one pair of an unsharded preparation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.runs.preparing import TokenizerFolder, contents, documents, jsonl, prepare_text
from trainshed.cli import run_cli
from trainshed.data.text import reader
from trainshed.data.text.corpus import assign_shards, find_inputs
from trainshed.data.text.formats import TextFileFormat
from trainshed.data.text.reader import InputReader, InputSlice, count_lines_before, split_input
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokens.manifest import read_token_manifest
from trainshed.data.tokens.merge import merge_tokens
from trainshed.data.tokens.token_files import shard_prefixes
from trainshed.data.tokens.verify import verify_tokens
from trainshed.errors import InputError
from trainshed.storage import LocalStore


def merged(folder: Path, shards: str | Path, name: str = "merged") -> tuple[bytes, bytes]:
    merge_tokens([str(shards)], str(folder / name))
    return contents(folder / name)


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_shards_of_one_file_merge_into_what_one_preparation_writes(
    tmp_path: Path, tokenizer: Tokenizer, shards: int
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(documents(120)))
    prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "whole")
    prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "cut", shards=shards)
    assert len(shard_prefixes(tmp_path / "cut")) == shards
    assert merged(tmp_path, tmp_path / "cut") == contents(tmp_path / "whole")
    assert all(Path(f"{prefix}.bin").stat().st_size for prefix in shard_prefixes(tmp_path / "cut"))


def test_files_of_all_formats_are_dealt_out_in_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = documents(160)
    for number in range(4):
        (tmp_path / f"part-{number}.jsonl").write_bytes(jsonl(texts[number * 20 : number * 20 + 20]))
    pq.write_table(pa.table({"text": texts[80:]}), tmp_path / "rest.parquet", row_group_size=11)
    inputs = [tmp_path / "part-*.jsonl", tmp_path / "rest.parquet"]
    prepare_text(inputs, tokenizer, tmp_path / "whole")
    for shards in (3, 5, 9):
        prepare_text(inputs, tokenizer, tmp_path / f"cut{shards}", shards=shards, workers=2)
        assert merged(tmp_path, tmp_path / f"cut{shards}", f"merged{shards}") == contents(tmp_path / "whole")


def test_parquet_is_cut_between_row_groups(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": list("abcdefghij")}), tmp_path / "a.parquet", row_group_size=3)
    (piece,) = find_inputs([str(tmp_path / "a.parquet")])
    store = LocalStore(tmp_path)
    pieces = split_input(piece, 3, store, "a.parquet")
    texts = [
        "".join("".join(block.payload) for block in InputReader(part, store, "a.parquet").blocks()) for part in pieces
    ]
    assert texts == ["abc", "def", "ghij"]
    assert [count_lines_before(part, store, "a.parquet") for part in pieces] == [0, 3, 6]
    assert len(split_input(piece, 100, store, "a.parquet")) == 4


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.integers(0, 9), max_size=12),
    final_newline=st.booleans(),
    shards=st.integers(2, 9),
    read_bytes=st.integers(1, 12),
)
def test_a_file_cut_anywhere_gives_every_line_to_exactly_one_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[int], final_newline: bool, shards: int, read_bytes: int
) -> None:
    monkeypatch.setattr(reader, "READ_BYTES", read_bytes)
    data = b"\n".join(bytes([65 + number]) * length for number, length in enumerate(lines))
    data += b"\n" * final_newline
    (tmp_path / "a.txt").write_bytes(data)
    store = LocalStore(tmp_path)
    piece = InputSlice("a.txt", len(data), "", TextFileFormat("text"), documents="line")
    parts = split_input(piece, shards, store, "a.txt")
    found = [b"".join(block.payload for block in InputReader(part, store, "a.txt").blocks()) for part in parts]
    assert b"".join(found) == data
    for number, (part, text) in enumerate(zip(parts, found, strict=True)):
        if text:
            before = b"".join(found[:number])
            assert before.endswith(b"\n") or not before
            assert count_lines_before(part, store, "a.txt") == before.count(b"\n")


def test_more_shards_than_can_be_cut_is_refused_with_the_number_that_can(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    (tmp_path / "b.txt").write_text("one document")
    with pytest.raises(InputError, match="3 shards are asked for, but the input can be cut into 2") as error:
        prepare_text([tmp_path / "a.jsonl.gz", tmp_path / "b.txt"], tokenizer, tmp_path / "out", shards=3)
    assert "--shards 2" in (error.value.hint or "")


def test_small_files_with_many_row_groups_are_cut_where_large_ones_cannot_be(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x" * 10_000] * 10}), tmp_path / "a.parquet", row_group_size=10)
    pq.write_table(pa.table({"text": ["y"] * 10}), tmp_path / "b.parquet", row_group_size=1)
    pieces = find_inputs([str(tmp_path / "*.parquet")])
    assert len(assign_shards(pieces, 11)) == 11
    with pytest.raises(InputError, match="into 11 at most"):
        assign_shards(pieces, 12)


def test_another_number_of_shards_beside_the_old_ones_is_refused(
    tmp_path: Path, tokenizer_folder: TokenizerFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(documents(20)))
    command = ["data", "prepare", "--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(tokenizer_folder("gpt2"))]
    command += ["--output", str(tmp_path / "out")]
    assert run_cli([*command, "--shards", "2"]) == 0
    assert run_cli([*command, "--shards", "3"]) == 2
    assert "token files in 2 shards" in capsys.readouterr().err
    assert run_cli(command) == 2


@pytest.mark.parametrize(
    "wrong", [["--shards", "0"], ["--shards", "-1"], ["--workers", "0"], ["--task", "1/3", "--shards", "2"]]
)
def test_numbers_that_make_no_sense_are_refused(
    tmp_path: Path, tokenizer_folder: TokenizerFolder, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(documents(20)))
    command = ["data", "prepare", "--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(tokenizer_folder("gpt2"))]
    assert run_cli([*command, "--output", str(tmp_path / "out"), *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_tasks_in_separate_processes_make_a_set_that_the_last_one_completes(
    tmp_path: Path, tokenizer_folder: TokenizerFolder
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(documents(90)))
    output = tmp_path / "out" / "corpus"

    def command(*more: str) -> list[str]:
        base = [sys.executable, "-m", "trainshed", "data", "prepare", "--input", str(tmp_path / "a.jsonl")]
        return [*base, "--tokenizer", str(tokenizer_folder("gpt2")), "--shards", "5", "-o", "json", *more]

    def start(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(command(*more), stdout=subprocess.PIPE, text=True)

    def report(process: subprocess.Popen[str]) -> dict[str, object]:
        return json.loads(process.communicate()[0])

    first = report(start("--output", str(output), "--task", "2/3"))
    assert (first["made"], first["complete"]) == (1, False)
    assert read_token_manifest(str(output)) is None
    together = [report(task) for task in [start("--output", str(output), "--task", f"{i}/3") for i in (0, 1)]]
    assert [task["made"] for task in together] == [2, 2]
    assert any(task["complete"] for task in together)
    assert report(start("--output", str(tmp_path / "whole")))["complete"]
    assert merged(tmp_path, output) == merged(tmp_path, tmp_path / "whole", "merged-whole")
    tasks, alone = read_token_manifest(str(output)), read_token_manifest(str(tmp_path / "whole"))
    assert tasks is not None
    assert alone is not None
    assert (tasks.shards, tasks.counts, tasks.inputs) == (5, alone.counts, alone.inputs)
    assert all(verdict.passed for verdict in verify_tokens(str(output)))


def test_a_set_whose_shards_are_being_made_anew_has_no_manifest(
    tmp_path: Path, tokenizer_folder: TokenizerFolder
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(documents(30)))
    out = tmp_path / "out"
    command = ["data", "prepare", "--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(tokenizer_folder("gpt2"))]
    command += ["--shards", "2", "--output", str(out)]
    assert run_cli(command) == 0
    assert read_token_manifest(str(out)) is not None
    assert run_cli([*command, "--task", "1/2", "--no-eod", "--overwrite"]) == 0
    assert read_token_manifest(str(out)) is None
    assert run_cli([*command, "--task", "0/2", "--no-eod", "--overwrite"]) == 0
    whole = read_token_manifest(str(out))
    assert whole is not None
    assert whole.spec["eod"] is None
