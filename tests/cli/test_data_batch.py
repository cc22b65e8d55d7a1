"""`trainshed data blend` and `trainshed data batch` on prepared tokens, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainshed.cli import run_cli
from trainshed.data.tokens.indexed_dataset import IndexedDataset, write_index

RECIPE = """
trainshed: 1
name: demo
model: {preset: tiny, init: random}
data:
  sequence_length: 16
  train:
    - {tokens: A, weight: 3, name: prose}
    - {tokens: B, weight: 1, name: code}
train:
  steps: 12
  global_batch: 8
  precision: fp32
  optimizer: {lr: 1.0e-3}
  schedule: {name: cosine, warmup: 1, min_lr: 1.0e-4}
layout: {dp: 1, micro_batch: 8}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for name, count in (("A", 60), ("B", 40)):
        lengths = (5 + np.arange(count) * 7 % 31).astype("<i4")
        Path(f"{name}.bin").write_bytes(np.arange(lengths.sum(), dtype="<u2").tobytes())
        write_index(f"{name}.idx", np.dtype("<u2"), lambda lengths=lengths: [lengths])
    Path("demo.yaml").write_text(RECIPE)
    return "demo.yaml"


def report_of(capsys, *arguments: str) -> dict:
    assert run_cli(["data", *arguments, "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_blend_shows_the_budget_of_each_source(recipe, capsys):
    assert run_cli(["run", recipe]) == 0
    capsys.readouterr()
    report = report_of(capsys, "blend", recipe)
    assert (report["steps"], report["samples"]) == (12, 96)
    prose, code = report["sources"]
    assert (prose["name"], prose["weight"], prose["samples"]) == ("prose", 0.75, 72)
    assert (code["samples"], code["tokens"]) == (24, 24 * 16)
    assert prose["epochs"] == pytest.approx(72 / ((prose["source_tokens"] - 1) // 16))
    assert run_cli(["data", "blend", recipe]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["source", "tokens", "weight", "samples", "tokens", "drawn", "epochs"]
    assert lines[1].split()[:4:2] == ["prose", "75.00%"]
    assert lines[-1].split() == ["12", "steps", "96", "1,536"]


def test_batch_shows_where_each_row_comes_from(recipe, capsys):
    assert run_cli(["run", recipe]) == 0
    capsys.readouterr()
    report = report_of(capsys, "batch", recipe, "--step", "6", "--rows", "8")
    assert (report["consumed"], report["batch"], len(report["rows"])) == (40, 8, 8)
    for row in report["rows"]:
        tokens: list[int] = []
        for piece in row["documents"]:
            with IndexedDataset(piece["file"]) as reader:
                tokens += reader.document(piece["document"])[piece["offset"] :][: piece["tokens"]].tolist()
        assert tokens == row["tokens"]
    assert {row["source"] for row in report["rows"]} == {"prose", "code"}
    assert run_cli(["data", "batch", recipe, "--step", "6", "--rows", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 6: 8 samples (40 to 47) of 17 tokens, hash " + report["hash"])
    assert "row 0: sample 40 = " in text
    assert "row 1" not in text


def test_skips_move_later_samples_forward(recipe, capsys):
    assert run_cli(["run", recipe, "data.skip=[[40,44]]"]) == 0
    capsys.readouterr()
    assert report_of(capsys, "batch", recipe, "data.skip=[[40,44]]", "--step", "6")["first_sample"] == 44


def test_what_is_missing_is_named(recipe, capsys):
    assert run_cli(["data", "blend", recipe]) == 1
    assert "source 'prose' has no index" in capsys.readouterr().err
    assert run_cli(["run", recipe]) == 0
    capsys.readouterr()
    assert run_cli(["data", "batch", recipe, "--step", "13"]) == 2
    assert "the run has 12 steps; step 13 is not one of them" in capsys.readouterr().err
    assert run_cli(["data", "batch", recipe, "--step", "0"]) == 2
    assert "there is no step 0: steps count from 1" in capsys.readouterr().err
    assert report_of(capsys, "batch", recipe, "--step", "12")["consumed"] == 88
