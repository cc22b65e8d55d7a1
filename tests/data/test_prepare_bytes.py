"""What is written is what megatron-core would write, whatever the input looks like and however many workers read it."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from support.runs.preparing import MadeTokenizer, contents, documents, jsonl, left_behind, megatron_bytes, prepare_text
from trainshed.data.text import reader
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokenize.workers import MAX_THREAD_WORKERS
from trainshed.data.tokens.manifest import read_token_manifest


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "qwen", "large"])
def test_the_bytes_are_those_of_megatron_core(
    megatron: SimpleNamespace, tmp_path: Path, made_tokenizer: MadeTokenizer, kind: str
) -> None:
    tokenizer = made_tokenizer(kind)
    texts = documents()
    (tmp_path / "corpus.jsonl").write_bytes(jsonl(texts))
    prepared = prepare_text(tmp_path / "corpus.jsonl", tokenizer, tmp_path / "ours")
    assert contents(tmp_path / "ours") == megatron_bytes(megatron, tmp_path, tokenizer, texts)
    (manifest,) = prepared.manifests
    assert manifest.spec["dtype"] == ("int32" if kind == "large" else "uint16")
    assert manifest.encoder.startswith("gigatoken")
    assert manifest.counts.documents == len(texts)
    assert manifest.counts.empty_documents == 1
    assert manifest.counts.text_bytes == sum(len(text.encode()) for text in texts)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(("eod", "bos"), [(False, False), (True, True), (False, True)])
def test_with_and_without_special_tokens_it_is_still_megatrons(
    megatron: SimpleNamespace, tmp_path: Path, made_tokenizer: MadeTokenizer, eod: bool, bos: bool
) -> None:
    tokenizer = made_tokenizer("llama3")
    texts = documents(50)
    (tmp_path / "corpus.jsonl").write_bytes(jsonl(texts))
    prepare_text(tmp_path / "corpus.jsonl", tokenizer, tmp_path / "ours", eod=eod, bos=bos)
    assert contents(tmp_path / "ours") == megatron_bytes(megatron, tmp_path, tokenizer, texts, eod=eod, bos=bos)


def test_a_tokenizer_the_fast_encoder_does_not_know_gives_the_references_ids(
    megatron: SimpleNamespace, tmp_path: Path, made_tokenizer: MadeTokenizer
) -> None:
    tokenizer = made_tokenizer("bert")
    texts = documents(40)
    (tmp_path / "corpus.jsonl").write_bytes(jsonl(texts))
    prepared = prepare_text(tmp_path / "corpus.jsonl", tokenizer, tmp_path / "ours", eod=False)
    assert contents(tmp_path / "ours") == megatron_bytes(megatron, tmp_path, tokenizer, texts, eod=False)
    assert prepared.manifests[0].encoder.startswith("tokenizers ")


def _gzip(data: bytes) -> bytes:
    """Three members, one of them empty, the second starting in the middle of a line, and padding."""
    third = len(data) // 3
    return gzip.compress(data[:third]) + gzip.compress(b"") + gzip.compress(data[third:]) + bytes(512)


def _zstd(data: bytes) -> bytes:
    """Two frames cut in the middle of a line, a frame to be skipped between them."""
    half = len(data) // 2
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    return compressor.compress(data[:half]) + skippable + compressor.compress(data[half:])


def _parquet(path: Path, texts: list[str], kind: pa.DataType) -> None:
    column = pa.array(texts, pa.string()).cast(kind)
    pq.write_table(pa.table({"id": range(len(texts)), "text": column}), path, row_group_size=70)


def test_every_format_of_the_same_documents_gives_the_same_bytes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = [text.replace("\n", " ").replace("\r", " ") for text in documents() if text]
    plain = jsonl(texts)
    files = {
        "a.jsonl": plain,
        "b.jsonl.gz": _gzip(plain),
        "c.jsonl.zst": _zstd(plain),
        "d.ndjson.zstd": _zstd(plain),
        "e.txt": "\n".join(texts).encode(),
        "f.txt.zst": _zstd("\n".join(texts).encode()),
        "g.md": "\n\n".join(texts).encode(),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    kinds = {
        "h.parquet": pa.string(),
        "i.parquet": pa.large_string(),
        "j.parquet": pa.dictionary(pa.int32(), pa.string()),
    }
    for name, kind in kinds.items():
        _parquet(tmp_path / name, texts, kind)
    found = {}
    for name in [*files, *kinds]:
        split = {"e.txt": "line", "f.txt.zst": "line", "g.md": "blank_line"}.get(name, "file")
        prepare_text(tmp_path / name, tokenizer, tmp_path / "out" / name, split=split)
        found[name] = contents(tmp_path / "out" / name)
    assert [name for name, data in found.items() if data != found["a.jsonl"]] == []


def test_line_endings_blank_lines_and_a_byte_order_mark_change_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = documents(40)
    lines = jsonl(texts).splitlines()
    variants = {
        "plain": b"\n".join(lines) + b"\n",
        "no-final-newline": b"\n".join(lines),
        "crlf": b"\r\n".join(lines) + b"\r\n",
        "bom": b"\xef\xbb\xbf" + b"\n".join(lines),
        "blank-lines": b"\n\n  \n" + b"\n\n".join(lines) + b"\n \r\n\n",
    }
    for name, data in variants.items():
        (tmp_path / f"{name}.jsonl").write_bytes(data)
        prepare_text(tmp_path / f"{name}.jsonl", tokenizer, tmp_path / name)
    assert {name for name in variants if contents(tmp_path / name) != contents(tmp_path / "plain")} == set()


def test_a_line_of_text_keeps_its_spaces_and_loses_its_line_ending(
    megatron: SimpleNamespace, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf  first \r\n\r\nsecond\x0bline\n\nlast")
    prepare_text(tmp_path / "a.txt", tokenizer, tmp_path / "ours", split="line")
    expected = megatron_bytes(megatron, tmp_path, tokenizer, ["  first ", "second\x0bline", "last"])
    assert contents(tmp_path / "ours") == expected


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 4096])
def test_paragraphs_do_not_depend_on_where_blocks_end(
    megatron: SimpleNamespace, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(reader, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(reader, "READ_BYTES", block_bytes)
    text = "\n\n  \n  indented\n  twice\n\n\n\nsecond\r\n\r\n \t\nthird\n \n\t\n fourth \n"
    (tmp_path / "a.txt").write_text(text, newline="")
    prepare_text(tmp_path / "a.txt", tokenizer, tmp_path / "ours", split="blank_line")
    expected = megatron_bytes(megatron, tmp_path, tokenizer, ["  indented\n  twice", "second", "third", " fourth "])
    assert contents(tmp_path / "ours") == expected


@pytest.mark.parametrize("workers", [2, 3, MAX_THREAD_WORKERS + 1])
def test_the_number_of_workers_cannot_be_seen_in_the_output(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(reader, "READ_BYTES", 1500)
    monkeypatch.setattr(reader, "BLOCK_BYTES", 3000)
    texts = documents(500)
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts[:200]))
    (tmp_path / "b.jsonl.zst").write_bytes(_zstd(jsonl(texts[200:])))
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst"]
    prepare_text(inputs, tokenizer, tmp_path / "one")
    prepare_text(inputs, tokenizer, tmp_path / "many", workers=workers)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    one, many = read_token_manifest(str(tmp_path / "one")), read_token_manifest(str(tmp_path / "many"))
    assert one is not None
    assert many is not None
    assert (many.counts, many.inputs, many.encoder) == (one.counts, one.inputs, one.encoder)
