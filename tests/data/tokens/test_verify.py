"""Proving token files: whatever happens to them afterwards is found, and what could not be checked is said."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.runs.preparing import MadeTokenizer, WriteTokens, documents, jsonl, prepare_text
from trainshed.cli import run_cli
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokens.indexed_dataset import write_index
from trainshed.data.tokens.verify import verify_tokens
from trainshed.errors import NotFound


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, made_tokenizer: MadeTokenizer) -> Path:
    """Three prepared shards, never changed: tests work on copies."""
    folder = tmp_path_factory.mktemp("good")
    (folder / "a.jsonl").write_bytes(jsonl(documents(60)))
    prepare_text(folder / "a.jsonl", made_tokenizer("gpt2"), folder / "tokens" / "set", shards=3)
    prepare_text(folder / "a.jsonl", made_tokenizer("gpt2"), folder / "tokens" / "one")
    return folder / "tokens"


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "tokens")
    return tmp_path / "tokens"


def problems(prefix: Path, **options: Any) -> str:
    return "\n".join(problem for verdict in verify_tokens(str(prefix), **options) for problem in verdict.problems)


def test_good_files_are_proven_in_every_respect(good: Path, tokenizer: Tokenizer) -> None:
    (one,) = verify_tokens(str(good / "one"), tokenizer=tokenizer)
    assert one.passed
    assert one.checked == ["structure", "token range below 2,000", "end-of-document tokens", "manifest"]
    shards = verify_tokens(str(good / "set"))
    assert [verdict.passed for verdict in shards] == [True] * 3
    assert sum(verdict.documents for verdict in shards) == one.documents == 67
    assert sum(verdict.tokens for verdict in shards) == one.tokens


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ending=st.sampled_from(["bin", "idx"]), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_single_flipped_bit_is_always_found(copy: Path, good: Path, ending: str, place: float, bit: int) -> None:
    data = bytearray((good / f"one.{ending}").read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    (copy / f"one.{ending}").write_bytes(data)
    try:
        assert f"one.{ending}: its bytes have changed since it was made" in problems(copy / "one")
    finally:
        shutil.copyfile(good / f"one.{ending}", copy / f"one.{ending}")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_bit_flipped_in_the_header_never_breaks_the_check_itself(copy: Path, good: Path, data: st.DataObject) -> None:
    """Without a manifest only the structure can tell: it may pass, it must not crash."""
    (copy / "one.manifest.json").unlink(missing_ok=True)
    index = bytearray((good / "one.idx").read_bytes())
    index[data.draw(st.integers(0, 120))] ^= 1 << data.draw(st.integers(0, 7))
    (copy / "one.idx").write_bytes(index)
    (verdict,) = verify_tokens(str(copy / "one"))
    assert "manifest" not in verdict.checked


@pytest.mark.parametrize("ending", ["bin", "idx"])
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_a_cut_file_is_found(copy: Path, ending: str, keep: float) -> None:
    path = copy / f"one.{ending}"
    size = path.stat().st_size
    os.truncate(path, min(int(size * keep), size - 1))
    assert f"one.{ending}: {path.stat().st_size} bytes, its manifest says {size}" in problems(copy / "one")
    (copy / "one.manifest.json").unlink()
    assert f"one.{ending}" in problems(copy / "one"), "the structure tells it, too"


def test_a_missing_file_is_found(copy: Path) -> None:
    (copy / "one.bin").unlink()
    assert "one.bin: missing" in problems(copy / "one")
    (copy / "set-00001-of-00003.idx").unlink()
    with pytest.raises(NotFound, match=r"1 of 3 shards are missing: set-00001-of-00003\.idx"):
        verify_tokens(str(copy / "set"))


def test_a_token_that_no_vocabulary_has_is_found(copy: Path, made_tokenizer: MadeTokenizer) -> None:
    tokens = np.fromfile(copy / "one.bin", "<u2")
    tokens[[5, 100]] = 2000, 65535
    tokens.tofile(copy / "one.bin")
    said = problems(copy / "one")
    assert "token 5 is 2000, outside the vocabulary of 2,000" in said
    assert "token 100 is 65535, outside" in said
    (copy / "one.manifest.json").unlink()
    assert problems(copy / "one") == ""
    assert "token 5 is 2000" in problems(copy / "one", tokenizer=made_tokenizer("qwen"))


def test_negative_tokens_are_found(write_tokens: WriteTokens, made_tokenizer: MadeTokenizer) -> None:
    prefix = write_tokens("negative", [[1, 2, 3], [4, -5]], "<i4")
    assert "token 4 is -5, outside the vocabulary" in problems(Path(prefix), tokenizer=made_tokenizer("large"))


def test_documents_that_do_not_end_with_their_token_are_found(copy: Path) -> None:
    tokens = np.fromfile(copy / "one.bin", "<u2")
    ends = np.flatnonzero(tokens == 0)
    tokens[ends[-1]] = 7
    tokens.tofile(copy / "one.bin")
    assert "does not end with the token 0" in problems(copy / "one")


def test_documents_cut_elsewhere_are_found_though_every_token_is_right(copy: Path) -> None:
    """The same tokens in documents of other lengths: structure and range are fine."""
    total = len(np.fromfile(copy / "one.bin", "<u2"))
    lengths = np.array([total - 5, 5], "<i4")
    write_index(copy / "one.idx", np.dtype("<u2"), lambda: [lengths])
    said = problems(copy / "one")
    assert "sequence 0 does not end with the token 0" in said
    assert "2 documents, its manifest says 67" in said


def test_another_tokenizer_is_told(copy: Path, made_tokenizer: MadeTokenizer) -> None:
    assert "made with another tokenizer than" in problems(copy / "one", tokenizer=made_tokenizer("llama3"))


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b'{"format": 99}'])
def test_a_damaged_manifest_is_a_problem_and_not_a_missing_one(copy: Path, damage: bytes) -> None:
    (copy / "one.manifest.json").write_bytes(damage)
    (verdict,) = verify_tokens(str(copy / "one"))
    assert not verdict.passed
    assert "manifest" in verdict.problems[0]


def test_the_command_tells_people_and_programs(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["data", "verify", str(copy / "one")]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"proven  {copy}/one: 67 documents, ")
    (copy / "one.manifest.json").unlink()
    assert run_cli(["data", "verify", str(copy / "one")]) == 0
    assert "no manifest: the bytes were not compared" in capsys.readouterr().out
    os.truncate(copy / "set-00001-of-00003.bin", 11)
    assert run_cli(["data", "verify", str(copy / "set")]) == 1
    assert f"WRONG  {copy}/set-00001-of-00003" in capsys.readouterr().out
    assert run_cli(["data", "verify", str(copy / "set"), "-o", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "trainshed.data.tokens.verify/1"
    assert not report["passed"]
    assert [shard["passed"] for shard in report["shards"]] == [True, False, True]
    assert run_cli(["data", "verify", str(copy / "nothing")]) in (1, 2)
    assert "no token files with this prefix" in capsys.readouterr().err
