"""A line that holds no document stops the work with its place and its cure, or is left out and counted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.runs.preparing import TokenizerFolder, contents, documents, jsonl, megatron_bytes, prepare_text
from trainshed.cli import run_cli
from trainshed.data.text import reader
from trainshed.data.text.formats import DocumentBoundary
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokens.shard_writer import BAD_LINES_KEPT
from trainshed.errors import BadDocument, InputError

BAD = {
    b'{"text": "broken': ("broken JSON: unexpected end of data", "one JSON object"),
    b"{'text': 'python'}": ("broken JSON", "one JSON object"),
    b'{"text": "a"} {"text": "b"}': ("broken JSON", "one JSON object"),
    b'{"text": NaN}': ("broken JSON", "one JSON object"),
    b'{"content": "a", "id": 1}': ("no key 'text'", "its keys are 'content', 'id': write --key"),
    b"{}": ("no key 'text'", "its keys are none"),
    b'{"text": 5}': ("'text' holds a JSON number, not a string", "write the text as a string"),
    b'{"text": null}': ("'text' holds a JSON null, not a string", "write the text as a string"),
    b'{"text": true}': ("'text' holds a JSON boolean, not a string", "write the text as a string"),
    b'{"text": ["a"]}': ("'text' holds a JSON array, not a string", "write the text as a string"),
    b'{"text": {"a": 1}}': ("'text' holds a JSON object, not a string", "write the text as a string"),
    b'["text"]': ("a JSON array, not an object", 'write {"text": "…"}'),
    b'"text"': ("a JSON string, not an object", 'write {"text": "…"}'),
    b"17": ("a JSON number, not an object", 'write {"text": "…"}'),
    b'{"text": "caf\xe9"}': ("invalid UTF-8 at byte 13", "write the file as UTF-8"),
    b'{"text": "\xed\xa0\x80"}': ("invalid UTF-8 at byte 10", "write the file as UTF-8"),
    b'{"text": "\\ud800"}': ("broken JSON", "one JSON object"),
    b'{"text": "\\udc00\\ud800"}': ("broken JSON", "one JSON object"),
}


@pytest.mark.parametrize("line", list(BAD), ids=lambda line: line.decode(errors="replace"))
def test_each_kind_of_bad_line_stops_with_its_place_and_what_to_write(
    tmp_path: Path, tokenizer: Tokenizer, line: bytes
) -> None:
    good = jsonl(documents(5, odd=False)).splitlines()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*good[:3], b"", line, *good[3:]]))
    with pytest.raises(BadDocument) as error:
        prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "out")
    what, hint = BAD[line]
    assert what in error.value.what
    assert error.value.where == f"{tmp_path}/a.jsonl:5"
    assert hint in (error.value.hint or "")
    assert "--on-bad-line skip" in (error.value.hint or "")
    assert not (tmp_path / "out.idx").exists()


def test_the_command_exits_with_2_and_says_file_and_line(
    tmp_path: Path, tokenizer_folder: TokenizerFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n{"txt": "bad"}\n')
    command = ["data", "prepare", "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out")]
    command += ["--tokenizer", str(tokenizer_folder("gpt2"))]
    assert run_cli(command) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"error: {tmp_path}/a.jsonl:2: no key 'text'\n" in said.err
    assert "its keys are 'txt': write --key with the right one, or write --on-bad-line skip" in said.err
    assert run_cli([*command, "--on-bad-line", "skip", "-o", "json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["bad_lines"] == 1
    assert f"warning: skipped {tmp_path}/a.jsonl:2: no key 'text'" in said.err


@pytest.mark.parametrize("workers", [1, 2])
def test_skipped_lines_are_counted_quoted_and_leave_the_rest_as_it_is(
    megatron: SimpleNamespace, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(reader, "READ_BYTES", 500)
    monkeypatch.setattr(reader, "BLOCK_BYTES", 500)
    texts = documents(40)
    lines = jsonl(texts).splitlines()
    bad = [line for line in [*BAD, *BAD] if b"\n" not in line]
    for number, line in enumerate(bad):
        lines.insert(3 * number, line)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    prepared = prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", on_bad_line="skip", workers=workers)
    counts = prepared.manifests[0].counts
    assert counts.bad_lines == len(bad)
    assert counts.documents == len(texts)
    assert len(counts.bad_line_examples) == BAD_LINES_KEPT
    for number, example in enumerate(counts.bad_line_examples):
        assert example.startswith(f"{tmp_path}/a.jsonl:{3 * number + 1}: {BAD[bad[number]][0]}")
    assert contents(tmp_path / "out") == megatron_bytes(megatron, tmp_path, tokenizer, texts)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_first_bad_line_of_the_corpus_is_the_one_told(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(reader, "READ_BYTES", 300)
    monkeypatch.setattr(reader, "BLOCK_BYTES", 300)
    lines = jsonl(documents(200, odd=False)).splitlines()
    lines[150] = lines[151] = lines[190] = b"bad"
    # A long line before it keeps one worker busy while others have long found the later ones.
    lines[149] = jsonl(["slow " * 100_000]).strip()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.jsonl").write_bytes(b"bad\n")
    with pytest.raises(BadDocument) as error:
        prepare_text(tmp_path / "*.jsonl", tokenizer, tmp_path / "out", workers=workers)
    assert error.value.where == f"{tmp_path}/a.jsonl:151"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bad=st.integers(1, 60), shards=st.integers(2, 7), block=st.integers(50, 2000), longest=st.integers(0, 300))
def test_the_line_is_that_of_the_file_also_in_later_blocks_and_shards(
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    bad: int,
    shards: int,
    block: int,
    longest: int,
) -> None:
    monkeypatch.setattr(reader, "READ_BYTES", block)
    monkeypatch.setattr(reader, "BLOCK_BYTES", block)
    lines = [json.dumps({"text": "x" * (number * 37 % (longest + 1))}).encode() for number in range(1, 61)]
    lines[bad - 1] = b"{}"
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    for path in tmp_path.glob("out*"):
        path.unlink()
    with pytest.raises(BadDocument) as error:
        prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", shards=shards)
    assert error.value.where == f"{tmp_path}/a.jsonl:{bad}"


def test_skipped_lines_of_a_cut_file_are_quoted_with_their_true_lines(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = jsonl(documents(60, odd=False)).splitlines()
    for number in (10, 35, 59):
        lines[number] = b"{}"
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    prepared = prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", shards=4, on_bad_line="skip")
    quoted = [example for manifest in prepared.manifests for example in manifest.counts.bad_line_examples]
    assert [example.split(": ")[0] for example in quoted] == [f"{tmp_path}/a.jsonl:{n}" for n in (11, 36, 60)]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_null_cell_is_a_bad_row(
    megatron: SimpleNamespace, tmp_path: Path, tokenizer: Tokenizer, kind: pa.DataType, shards: int
) -> None:
    column = pa.array(["one", "two", "", None, "five", None], pa.string()).cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=3)
    with pytest.raises(BadDocument, match="no text: 'text' is null") as error:
        prepare_text(tmp_path / "a.parquet", tokenizer, tmp_path / "out", shards=shards)
    assert error.value.where == f"{tmp_path}/a.parquet, row 4"
    prepared = prepare_text(tmp_path / "a.parquet", tokenizer, tmp_path / "skip", on_bad_line="skip")
    assert prepared.manifests[0].counts.bad_lines == 2
    expected = megatron_bytes(megatron, tmp_path, tokenizer, ["one", "two", "", "five"])
    assert contents(tmp_path / "skip") == expected


def test_bytes_that_are_no_text_in_a_text_column_are_a_bad_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    raw = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(BadDocument, match="invalid UTF-8 in 'text'") as error:
        prepare_text(tmp_path / "a.parquet", tokenizer, tmp_path / "out")
    assert error.value.where == f"{tmp_path}/a.parquet, row 2"
    skipped = prepare_text(tmp_path / "a.parquet", tokenizer, tmp_path / "skip", on_bad_line="skip")
    assert (skipped.manifests[0].counts.documents, skipped.manifests[0].counts.bad_lines) == (2, 1)


@pytest.mark.parametrize("split", ["file", "line", "blank_line"])
def test_plain_text_that_is_not_utf8_is_told_with_its_line(
    tmp_path: Path, tokenizer: Tokenizer, split: DocumentBoundary
) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\nthree\n\nca\xe9fe\n\nfour\n")
    with pytest.raises(BadDocument, match="invalid UTF-8 at byte 2") as error:
        prepare_text(tmp_path / "a.txt", tokenizer, tmp_path / "out", split=split)
    assert error.value.where == f"{tmp_path}/a.txt:6"
    skipped = prepare_text(tmp_path / "a.txt", tokenizer, tmp_path / "skip", split=split, on_bad_line="skip")
    counts = skipped.manifests[0].counts
    assert (counts.documents, counts.bad_lines) == ({"file": 0, "line": 4, "blank_line": 3}[split], 1)


@pytest.mark.parametrize(
    ("column", "what"), [("txt", "there is no column 'txt'"), ("id", "the column 'id' holds int64")]
)
def test_a_wrong_column_is_told_with_those_there_are(
    tmp_path: Path, tokenizer: Tokenizer, column: str, what: str
) -> None:
    pq.write_table(pa.table({"id": [1], "body": ["text"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=what) as error:
        prepare_text(tmp_path / "a.parquet", tokenizer, tmp_path / "out", key=column)
    assert "--key" in (error.value.hint or "")
