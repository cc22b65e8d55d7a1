"""`trainshed data blend` and `trainshed data batch` on prepared tokens, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support.models import made_tokenizers
from support.models.tiny_models import save_tiny_hf
from support.runs.conversations import write_conversations
from trainshed.cli import run_cli
from trainshed.data.tokens.indexed_dataset import IndexedDataset, write_index
from trainshed.recipe import load_recipe
from trainshed.workflow import prepare_run, prepared_steps

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


def test_masked_documents_are_shown_where_they_begin(recipe, capsys):
    assert run_cli(["run", recipe, "data.document_mask=true"]) == 0
    capsys.readouterr()
    (row,) = report_of(capsys, "batch", recipe, "data.document_mask=true", "--step", "2", "--rows", "1")["rows"]
    expected = [piece["column"] for piece in row["documents"] for _ in range(piece["tokens"])]
    assert row["document_starts"] == expected
    assert "learned" not in row


CHAT_RECIPE = """
trainshed: 1
name: chat
model: {from: base}
tokenizer: base
data:
  sequence_length: 16
  train: {tokens: C}
train: {mode: finetune, epochs: 2, global_batch: 4, precision: fp32, optimizer: {lr: 1.0e-3}}
layout: {dp: 1}
"""


def test_rows_of_conversations_show_what_is_learned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_tiny_hf("llama", tmp_path / "base", vocab_size=2000)
    made_tokenizers.save(made_tokenizers.KINDS["gpt2"](), made_tokenizers.CONFIGS["gpt2"], tmp_path / "base")
    lengths = [int(n) for n in 2 + np.arange(40) * 5 % 13]
    write_conversations(tmp_path / "C", [np.arange(n) + 40 for n in lengths])
    Path("chat.yaml").write_text(CHAT_RECIPE)
    prepared = prepare_run(load_recipe("chat.yaml"))
    rows = prepared.order.sources[0].epoch_samples
    assert prepared.steps == prepared_steps(prepared.folder) == -(-2 * rows // 4)
    report = report_of(capsys, "batch", "chat.yaml", "--step", "3", "--rows", "4")
    for row in report["rows"]:
        sizes = [piece["tokens"] for piece in row["documents"]]
        assert row["padding"] == 17 - sum(sizes) == 17 - len(row["tokens"])
        assert row["tokens"] == [40 + column for size in sizes for column in range(size)]
        assert row["learned"] == [int(column >= size // 2) for size in sizes for column in range(size)]
        assert len(set(row["document_starts"])) == len(sizes)
    assert run_cli(["data", "batch", "chat.yaml", "--step", "3", "--rows", "1"]) == 0
    text = capsys.readouterr().out
    first = report["rows"][0]["documents"][0]
    learned = first["tokens"] - first["tokens"] // 2
    assert f"document {first['document']} from token 0, {learned} of {first['tokens']} learned" in text
    assert f"  {report['rows'][0]['padding']} columns of padding" in text
    (source,) = report_of(capsys, "blend", "chat.yaml")["sources"]
    assert source["source_tokens"] == rows * 16
