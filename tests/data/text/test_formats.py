"""CSV, TSV and JSON arrays are read; what is not text is refused by name."""

from __future__ import annotations

import csv
import gzip
import json
import random
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from support.runs.preparing import MadeTokenizer, contents, documents, jsonl, prepare_text
from trainshed.cli import run_cli
from trainshed.cli.data import prepare as prepare_command
from trainshed.data.text import reader
from trainshed.data.text.corpus import find_inputs
from trainshed.data.text.formats import (
    INFLATE_BYTES,
    REFUSED_SUFFIXES,
    TextFormatName,
    decompress,
    detect_format,
    read_json_array,
)
from trainshed.data.text.reader import BadLine, InputReader, extract_documents, extract_rows
from trainshed.errors import BadDocument, InputError
from trainshed.recipe.data import TextFormat
from trainshed.storage import open_store

AWKWARD = [
    "plain",
    'said "so", he',
    "two\nlines",
    "tabs\tand, commas",
    "  spaces  ",
    "",
    "ümlaut \u2028 日本",
    "end\r\nof",
]


def texts(path: Path, *, after: int = 0, key: str = "text", kind: TextFormatName | None = None) -> list[str]:
    (piece,) = find_inputs([str(path)], key=key, format=kind)
    blocks = InputReader(piece, *open_store(piece.address)).blocks(after)
    found = [extract_documents(block, key) for block in blocks]
    assert not [bad for _, bad in found if bad]
    return [document for documents, _ in found for document in documents]


def write_table(path: Path, rows: list[str], delimiter: str) -> Path:
    with gzip.open(path, "wt", newline="") if path.suffix == ".gz" else path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["id", "text"])
        writer.writerows([number, row] for number, row in enumerate(rows))
    return path


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")])
def test_a_table_gives_what_was_written_whatever_is_in_its_fields(tmp_path: Path, name: str, delimiter: str) -> None:
    assert texts(write_table(tmp_path / name, AWKWARD, delimiter)) == AWKWARD


def test_a_table_is_the_same_in_any_blocks_and_from_any_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random.Random(1).choices(AWKWARD, k=500)
    path = write_table(tmp_path / "a.csv", rows, ",")
    monkeypatch.setattr(reader, "BLOCK_BYTES", 100)
    monkeypatch.setattr(reader, "READ_BYTES", 7)
    assert texts(path) == rows
    for after in (1, 250, 499):
        assert texts(path, after=after) == rows[after:]


def test_an_array_is_read_like_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_tokenizer: MadeTokenizer
) -> None:
    written, tokenizer = documents(50), made_tokenizer("llama3")
    (tmp_path / "lines.jsonl").write_bytes(jsonl(written))
    (tmp_path / "array.json").write_text(json.dumps([{"text": text} for text in written], indent=1))
    write_table(tmp_path / "table.csv", written, ",")
    monkeypatch.setattr(reader, "BLOCK_BYTES", 5000)
    prepare_text(tmp_path / "lines.jsonl", tokenizer, tmp_path / "a")
    prepare_text(tmp_path / "array.json", tokenizer, tmp_path / "b", kind="json")
    prepare_text(tmp_path / "table.csv", tokenizer, tmp_path / "c")
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_where_lines_are_expected_is_named_with_what_to_write(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=indent))
    with pytest.raises(BadDocument, match="this is a JSON array, not one JSON object a line") as error:
        texts(tmp_path / "a.json")
    assert "write --format json to read it as one, or convert it: jq -c" in (error.value.hint or "")
    assert texts(tmp_path / "a.json", kind="json") == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "kind", "what", "hint"),
    [
        ("a.csv", "id,body\n1,x\n", None, "there is no column 'text'", "which its first line names: id, body"),
        ("a.csv", "text,text\n1,x\n", None, "there is more than one column 'text'", "write --key"),
        ("a.csv", 'id,text\n1,"open\n2,b\n', None, "broken CSV: unexpected end of data", 'as "…""…"'),
        ("a.csv", 'id,text\n1,"a"b\n', None, "broken CSV: ", 'as "…""…"'),
        ("a.json", '{"text": "x"}', "json", "this JSON file holds no array", "write --format jsonl"),
        ("a.json", '[{"text": ', "json", "broken JSON: ", "write --format jsonl"),
    ],
)
def test_a_broken_file_is_an_error_that_says_what_to_write(
    tmp_path: Path, name: str, content: str, kind: TextFormatName | None, what: str, hint: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as error:
        texts(tmp_path / name, kind=kind)
    assert error.value.what.startswith(what)
    assert hint in (error.value.hint or "")
    assert (error.value.where or "").startswith(str(tmp_path / name))


def test_bad_rows_of_tables_and_arrays_are_counted_by_row(tmp_path: Path, made_tokenizer: MadeTokenizer) -> None:
    (tmp_path / "a.csv").write_bytes(b"id,text\n1,good,\n2\n3,\xff\xfe\n4,Well, yes\n")
    (tmp_path / "b.json").write_text('[{"text": "good"}, 7, {"other": ""}]')
    tokenizer = made_tokenizer("llama3")
    csv_places = [
        "a.csv, row 2: no text: 'text' is null",
        "a.csv, row 3: invalid UTF-8 in 'text'",
        "a.csv, row 4: 3 fields, and the first line names 2 columns",
    ]
    for name, kind, places in (
        ("a.csv", None, csv_places),
        ("b.json", "json", ["b.json, row 2: a JSON number, not an object", "b.json, row 3: no key 'text'"]),
    ):
        prepared = prepare_text(tmp_path / name, tokenizer, tmp_path / f"{name}-out", kind=kind, on_bad_line="skip")
        counts = prepared.manifests[0].counts
        assert (counts.documents, counts.bad_lines) == (1, len(places))
        assert [each.removeprefix(f"{tmp_path}/") for each in counts.bad_line_examples] == places
        with pytest.raises(BadDocument, match=r"null|not an object"):
            prepare_text(tmp_path / name, tokenizer, tmp_path / f"{name}-other", kind=kind)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_column_that_a_table_has_twice_is_an_error(tmp_path: Path, name: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / name
    if path.suffix == ".csv":
        path.write_text("text,text\none,two\n")
    else:
        pq.write_table(pa.table([pa.array(["one"]), pa.array(["two"])], names=["text", "text"]), path)
    for columns in (None, ("text", "other")):
        (piece,) = find_inputs([str(path)], columns=columns)
        with pytest.raises(InputError, match="there is more than one column 'text'"):
            list(InputReader(piece, *open_store(piece.address)).blocks())


def test_a_row_with_a_bare_delimiter_is_no_conversation(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\nhi,hello\nhi,hello, you\n")
    (piece,) = find_inputs([str(tmp_path / "a.csv")], columns=("prompt", "answer"))
    (block,) = InputReader(piece, *open_store(piece.address)).blocks()
    (_, good), (number, bad) = extract_rows(block)
    assert good == {"prompt": "hi", "answer": "hello"}
    assert isinstance(bad, BadLine)
    assert (number, bad.what) == (2, "3 fields, and the first line names 2 columns")


def test_zeros_after_a_gzip_archive_are_padding_however_many_there_are() -> None:
    archive = gzip.compress(b"one\n") + bytes(3 * INFLATE_BYTES) + gzip.compress(b"two\n") + bytes(INFLATE_BYTES)
    assert b"".join(decompress([archive], "gz", "a.gz")) == b"one\ntwo\n"


def test_an_array_too_large_to_be_read_whole_says_how_to_convert_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainshed.data.text.formats.ARRAY_BYTES", 100)
    with pytest.raises(InputError, match="this JSON array is larger than") as error:
        read_json_array([b"[", b" " * 100], "a.json")
    assert "jq -c" in (error.value.hint or "")


@pytest.mark.parametrize("ending", [*REFUSED_SUFFIXES, ".html.gz", ".tar.gz"])
def test_what_is_not_text_is_refused_by_name(ending: str) -> None:
    with pytest.raises(InputError) as error:
        detect_format(f"corpus/page{ending}")
    assert error.value.what.startswith("a .")
    assert error.value.hint
    assert detect_format(f"corpus/page{ending}", "text").kind == "text"


def test_markdown_is_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Title\n\nText.\n")
    assert texts(tmp_path / "a.md") == ["# Title\n\nText.\n"]


def test_formats_are_the_same_in_recipes_in_the_command_and_in_the_reader() -> None:
    flag = get_type_hints(prepare_command)["format"]
    assert set(get_args(TextFormatName)) == set(get_args(TextFormat)) == set(get_args(get_args(flag)[0]))


def test_the_command_reads_a_table(
    tmp_path: Path, made_tokenizer: MadeTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(made_tokenizer("llama3").json)
    write_table(tmp_path / "table.dat", AWKWARD, ",")
    asked = ["data", "prepare", "--input", str(tmp_path / "table.dat"), "--tokenizer", str(folder)]
    asked += ["--output", str(tmp_path / "out")]
    assert run_cli(asked) == 2
    assert "or write --format with one of jsonl, json, csv, tsv, parquet, text" in capsys.readouterr().err
    assert run_cli([*asked, "--format", "csv"]) == 0
    assert f"{len(AWKWARD)} documents" in capsys.readouterr().out
