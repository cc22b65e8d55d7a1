"""Preparing from a bucket and into one: the same bytes, and nothing half-made is ever seen."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.runs.preparing import Notes, contents, documents, jsonl, prepare_text
from support.servers.s3_server import S3Server
from trainshed.data.prepare import _Preparation
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokens import shard_writer
from trainshed.data.tokens.manifest import read_token_manifest
from trainshed.errors import BadDocument
from trainshed.storage import object_store, open_store

pytestmark = pytest.mark.s3


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = documents(300)
    (folder / "a.jsonl").write_bytes(jsonl(texts[:100]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(texts[100:200])))
    pq.write_table(pa.table({"text": texts[200:]}), folder / "c.parquet", row_group_size=40)
    return folder


def upload(folder: Path, address: str) -> None:
    for path in folder.iterdir():
        store, key = open_store(f"{address}/{path.name}")
        store.put(key, path.read_bytes())


def stored(address: str) -> tuple[bytes, bytes]:
    store, path = open_store(address)
    return store.read(f"{path}.bin"), store.read(f"{path}.idx")


def names(bucket: str) -> set[str]:
    return {info.path for info in open_store(f"s3://{bucket}/x")[0].list()}


def test_a_bucket_in_and_out_gives_the_bytes_of_the_local_disk(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, s3_bucket: str
) -> None:
    prepare_text(corpus, tokenizer, tmp_path / "local")
    upload(corpus, f"s3://{s3_bucket}/corpus")
    prepare_text(f"s3://{s3_bucket}/corpus/*", tokenizer, tmp_path / "down")
    prepare_text(corpus, tokenizer, f"s3://{s3_bucket}/out/up")
    prepare_text(f"s3://{s3_bucket}/corpus", tokenizer, f"s3://{s3_bucket}/out/both", workers=2)
    assert contents(tmp_path / "down") == contents(tmp_path / "local")
    assert stored(f"s3://{s3_bucket}/out/up") == contents(tmp_path / "local")
    assert stored(f"s3://{s3_bucket}/out/both") == contents(tmp_path / "local")
    local, remote = read_token_manifest(str(tmp_path / "local")), read_token_manifest(f"s3://{s3_bucket}/out/both")
    assert local is not None
    assert remote is not None
    assert remote.counts == local.counts
    assert [file.checksum for file in remote.files] == [file.checksum for file in local.files]


def test_shards_in_a_bucket_are_found_again_and_one_changed_object_redoes_one(
    corpus: Path, tokenizer: Tokenizer, s3_bucket: str
) -> None:
    upload(corpus, f"s3://{s3_bucket}/corpus")
    inputs, output = f"s3://{s3_bucket}/corpus", f"s3://{s3_bucket}/tokens/set"
    assert prepare_text(inputs, tokenizer, output, shards=3).made == 3
    assert prepare_text(inputs, tokenizer, output, shards=3).made == 0
    upload(corpus, f"s3://{s3_bucket}/corpus")
    assert prepare_text(inputs, tokenizer, output, shards=3).made == 0
    (corpus / "a.jsonl").write_bytes(jsonl(["something else"]))
    upload(corpus, f"s3://{s3_bucket}/corpus")
    notes = Notes()
    assert prepare_text(inputs, tokenizer, output, shards=3, reporter=notes).made == 1
    assert any("a.jsonl has changed" in note for note in notes.notes)


def test_an_error_leaves_nothing_of_the_shard_in_the_bucket(
    tmp_path: Path, tokenizer: Tokenizer, s3_bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 * 1024 * 1024)  # the least a part may have
    lines = jsonl(documents(1500)) * 40
    (tmp_path / "a.jsonl").write_bytes(lines + b"not json\n")
    for workers in (1, 2):
        with pytest.raises(BadDocument, match=r"a\.jsonl"):
            prepare_text(tmp_path / "a.jsonl", tokenizer, f"s3://{s3_bucket}/out", workers=workers)
        assert names(s3_bucket) == set()
        assert s3_server.open_uploads(s3_bucket) == 0


class Crash(Exception):
    """The power is gone."""


@pytest.mark.parametrize("step", ["before the index", "before the manifest"])
def test_a_crash_while_shards_are_completed_never_mixes_two_preparations(
    corpus: Path, tokenizer: Tokenizer, s3_bucket: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    output = f"s3://{s3_bucket}/out/tokens"
    prepare_text(corpus, tokenizer, output, eod=False)
    before = names(s3_bucket)

    def crash(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        if step == "before the index":
            patch.setattr("trainshed.data.tokens.indexed_dataset.encode_index", crash)
        else:
            patch.setattr("trainshed.data.tokens.manifest.TokenManifest.write", crash)
        with pytest.raises(Crash):
            prepare_text(corpus, tokenizer, output, overwrite=True)
    assert names(s3_bucket) == before - {"out/tokens.manifest.json"} - (
        {"out/tokens.idx"} if step == "before the index" else set()
    )
    prepare_text(corpus, tokenizer, output)
    assert names(s3_bucket) == before
    prepare_text(corpus, tokenizer, f"s3://{s3_bucket}/fresh")
    assert stored(output) == stored(f"s3://{s3_bucket}/fresh")


def test_a_rerun_with_bucket_input_goes_on_where_the_local_output_stopped(
    tmp_path: Path, corpus: Path, tokenizer: Tokenizer, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(corpus, f"s3://{s3_bucket}/corpus")
    prepare_text(corpus, tokenizer, tmp_path / "expected")
    monkeypatch.setattr(shard_writer, "JOURNAL_SECONDS", 0)
    append, blocks = _Preparation._append, iter(range(2))

    def failing(*arguments):
        if next(blocks, None) is None:
            raise Crash
        return append(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(_Preparation, "_append", failing)
        with pytest.raises(Crash):
            prepare_text(f"s3://{s3_bucket}/corpus", tokenizer, tmp_path / "out")
    notes = Notes()
    prepare_text(f"s3://{s3_bucket}/corpus", tokenizer, tmp_path / "out", reporter=notes)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert any("going on after" in note for note in notes.notes)
