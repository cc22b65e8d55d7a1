"""`trainshed data merge` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from trainshed.cli import run_cli
from trainshed.data.tokens.indexed_dataset import IndexedDataset, write_index
from trainshed.data.tokens.token_files import shard_name


def write(prefix: Path, lengths: list[int], dtype: str = "<u2") -> None:
    tokens = np.arange(sum(lengths), dtype=dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens.tobytes())
    write_index(f"{prefix}.idx", np.dtype(dtype), lambda: [np.array(lengths, "<i4")])


def test_shards_become_one_file(tmp_path, capsys):
    for shard in range(2):
        write(tmp_path / shard_name("c", shard, 2), [2, 0, 3])
    assert run_cli(["data", "merge", str(tmp_path / "c"), "--output", str(tmp_path / "all"), "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["documents"], report["sequences"]) == ("trainshed.data.tokens.merge/1", 6, 4)
    with IndexedDataset(tmp_path / "all") as reader:
        assert reader.document(5).tolist() == [2, 3, 4]


def test_what_is_wrong_is_said_in_one_line_and_a_hint(tmp_path, capsys):
    write(tmp_path / "a", [1])
    write(tmp_path / "b", [1], "<i4")
    assert run_cli(["data", "merge", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "o")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "holds int32 tokens" in shown.err
    assert "same tokenizer" in shown.err
    assert run_cli(["data", "merge", str(tmp_path / "gone"), "--output", str(tmp_path / "o")]) == 2
    assert "no token files with this prefix" in capsys.readouterr().err
