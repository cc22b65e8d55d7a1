"""What `inspect` shows, recounted by hand."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.recipes.golden_files import check_golden
from support.runs.preparing import MadeTokenizer, TokenizerFolder, WriteTokens, documents, jsonl, prepare_text
from trainshed.cli import run_cli
from trainshed.cli.data_inspect import _histogram
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokens.inspect import inspect_tokens


def encoded(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    eod = tokenizer.end_of_document().id
    rows = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in texts]
    return [[*row, eod] if row else [] for row in rows]


@pytest.mark.parametrize("shards", [1, 3])
def test_the_numbers_are_those_of_a_plain_recount(tmp_path: Path, tokenizer: Tokenizer, shards: int) -> None:
    texts = documents(200)
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", shards=shards)
    rows = encoded(texts, tokenizer)
    found = inspect_tokens(str(tmp_path / "out"), tokenizer=tokenizer, samples=4)
    lengths = [len(row) for row in rows if row]
    tokens = [token for row in rows for token in row]
    assert (found.documents, found.empty_documents, found.sequences) == (len(texts), 1, len(lengths))
    assert (found.tokens, found.largest_id, found.dtype) == (len(tokens), max(tokens), "uint16")
    assert (found.shortest, found.longest) == (min(lengths), max(lengths))
    assert found.mean_length == pytest.approx(len(tokens) / len(lengths))
    assert found.histogram == dict(sorted(Counter(int(math.log2(length)) for length in lengths).items()))
    assert found.bytes_per_token == pytest.approx(sum(len(text.encode()) for text in texts) / len(tokens))
    assert found.eod == {"text": "<|endoftext|>", "id": 0}
    assert found.eod_count == tokens.count(0)
    assert found.eod_inside_documents == tokens.count(0) - len(lengths) == 1
    assert found.shards == shards
    assert found.file_bytes == sum(path.stat().st_size for path in tmp_path.glob("out*.[bi][id][nx]"))
    assert [sample.document for sample in found.samples] == [len(texts) * i // 4 for i in range(4)]
    for sample in found.samples:
        assert sample.ids == rows[sample.document][:60]
        assert sample.text == tokenizer.decode(sample.ids)


def test_beginning_tokens_are_counted(tmp_path: Path, made_tokenizer: MadeTokenizer) -> None:
    tokenizer = made_tokenizer("llama3")
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one", "", "two <|begin_of_text|>"]))
    prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", bos=True)
    found = inspect_tokens(str(tmp_path / "out"))
    assert found.bos == {"text": "<|begin_of_text|>", "id": 0}
    assert (found.bos_count, found.eod_count, found.eod_inside_documents) == (3, 2, 0)


def test_files_of_others_are_shown_without_what_only_a_manifest_knows(
    write_tokens: WriteTokens, tokenizer: Tokenizer
) -> None:
    prefix = write_tokens("theirs", [[5, 6, 0], [7, 0], [], [8]])
    plain = inspect_tokens(prefix)
    assert (plain.documents, plain.empty_documents, plain.tokens) == (4, 1, 6)
    assert (plain.bytes_per_token, plain.eod, plain.eod_count, plain.bos) == (None, None, None, None)
    assert [sample.text for sample in plain.samples] == [None] * 3
    told = inspect_tokens(prefix, tokenizer=tokenizer)
    assert (told.eod_count, told.eod_inside_documents) == (2, None)


def test_the_drawing(write_tokens: WriteTokens, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lengths = [1] * 3 + [2, 3] * 40 + [4, 7] + [70] * 500 + [64] + [1000] * 7 + [0] * 2
    prefix = write_tokens("drawn", [[9, *range(length - 1)] if length else [] for length in lengths])
    assert run_cli(["data", "inspect", prefix, "--samples", "2"]) == 0
    check_golden("data/inspect.txt", capsys.readouterr().out.replace(str(tmp_path), "FOLDER"))


@settings(max_examples=200)
@given(st.dictionaries(st.integers(0, 30), st.integers(1, 10**9), max_size=12))
def test_every_bar_can_be_seen_and_none_is_longer_than_the_longest(histogram: dict[int, int]) -> None:
    lines = _histogram(histogram)
    if not histogram:
        assert lines == ["    (none)"]
        return
    assert len(lines) == max(histogram) - min(histogram) + 1
    for bucket, line in enumerate(lines, start=min(histogram)):
        first, last, count, bar = re.fullmatch(r" +([\d,]+) – ([\d,]+) +([\d,]+)(.*)", line).groups()
        assert [int(number.replace(",", "")) for number in (first, last)] == [2**bucket, 2 ** (bucket + 1) - 1]
        assert int(count.replace(",", "")) == histogram.get(bucket, 0)
        bar = bar.strip()
        assert bool(bar) == (bucket in histogram)
        assert len(bar) <= 40


def test_json_carries_everything(
    tmp_path: Path, tokenizer_folder: TokenizerFolder, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(documents(20)))
    prepare_text(tmp_path / "a.jsonl", tokenizer, tmp_path / "out")
    assert run_cli(["data", "inspect", str(tmp_path / "out"), "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "trainshed.data.tokens.inspect/1"
    assert report["documents"] == 27
    assert sum(report["histogram"].values()) == 26
    assert report["samples"][1]["text"]


def test_a_tokenizer_that_has_moved_is_told_and_the_rest_is_shown(
    tmp_path: Path, tokenizer_folder: TokenizerFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "tokenizer"
    here.mkdir()
    for path in tokenizer_folder("gpt2").iterdir():
        (here / path.name).write_bytes(path.read_bytes())
    (tmp_path / "a.jsonl").write_bytes(jsonl(["some text"]))
    command = ["data", "prepare", "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out")]
    assert run_cli([*command, "--tokenizer", str(here)]) == 0
    here.rename(tmp_path / "elsewhere")
    capsys.readouterr()
    assert run_cli(["data", "inspect", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert f"cannot decode: there is no tokenizer here ({here}); write --tokenizer" in said.err
    assert "documents                 1" in said.out
    assert run_cli(["data", "inspect", str(tmp_path / "out"), "--tokenizer", str(tmp_path / "elsewhere")]) == 0
    assert "some text<|endoftext|>" in capsys.readouterr().out


def test_a_prefix_without_files_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["data", "inspect", str(tmp_path / "nothing")]) in (1, 2)
    assert "no token files with this prefix" in capsys.readouterr().err
