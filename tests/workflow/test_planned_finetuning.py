"""How a recipe of fine-tuning becomes a plan: its adapters, its documents, its reference, its optimizer states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainshed.data.tokens.indexed_dataset import write_index
from trainshed.errors import InputError
from trainshed.plan.planner import PlannedModel, build_request, make_plan
from trainshed.plan.training_shape import hardware_of_gpu
from trainshed.recipe import load_cluster, load_recipe
from trainshed.workflow.layout import ASSUMED_DOCUMENT, planned_layout, planned_model

RECIPE = """
name: chats
model: {preset: llama3-8b, from: hf://org/base}
tokenizer: hf://org/base
data: {sequence_length: 4096, train: [{path: chats/*.jsonl}]}
train: {mode: finetune, steps: 10, global_batch: 8, optimizer: {lr: 1.0e-4}}
"""
LORA = "train.lora={rank: 16, alpha: 32, targets: [all-linear]}"


def planned(folder: Path, *keys: str) -> PlannedModel:
    (folder / "recipe.yaml").write_text(RECIPE)
    return planned_model(load_recipe(str(folder / "recipe.yaml"), keys), load_cluster())


def tokens(prefix: Path, lengths: list[int]) -> Path:
    Path(f"{prefix}.bin").write_bytes(np.zeros(sum(lengths), np.uint16).tobytes())
    write_index(f"{prefix}.idx", np.dtype(np.uint16), lambda: iter([np.array(lengths, np.int32)]))
    return prefix


def test_adapters_are_those_of_the_recipe(tmp_path: Path) -> None:
    model = planned(tmp_path, LORA, "train.lora.quantize=nf4", "train.lora.dropout=0.1")
    assert model.lora is not None
    assert model.lora.rank == 16
    assert "down_proj" in model.lora.projections
    assert (model.lora.dropout, model.lora.joint, model.quantized) == (True, False, True)
    assert any(note.startswith("planned for adapters: 0.52% of the weights are trained") for note in model.notes)
    assert planned(tmp_path).lora is None


def test_conversations_that_are_not_prepared_have_an_assumed_length_and_the_plan_says_so(tmp_path: Path) -> None:
    model = planned(tmp_path)
    assert model.document_length == ASSUMED_DOCUMENT
    assert any("1,024 tokens, kept apart: an assumption" in note for note in model.notes)
    short = planned(tmp_path, "data.sequence_length=512")
    assert short.document_length == 512


def test_the_length_of_documents_is_taken_from_prepared_tokens(tmp_path: Path) -> None:
    lengths = [100, 300, 9000]
    prefix = tokens(tmp_path / "pack", lengths)
    text = ("train.mode=pretrain", "data.format=text", f"data.train=[{{tokens: {prefix}}}]")
    model = planned(tmp_path, *text, "data.document_mask=true")
    cut = [min(length, 4096) for length in lengths]
    assert model.document_length == pytest.approx(sum(length**2 for length in cut) / sum(cut))
    assert any(note.endswith("as the data has them, kept apart") for note in model.notes)
    assert planned(tmp_path, *text).document_length is None


def test_tokens_that_are_elsewhere_are_assumed(tmp_path: Path) -> None:
    keys = ("train.mode=pretrain", "data.format=text", "data.document_mask=true")
    for prefix in ("s3://bucket/pack", tmp_path / "missing"):
        assert planned(tmp_path, *keys, f"data.train=[{{tokens: {prefix}}}]").document_length == ASSUMED_DOCUMENT


def test_dpo_has_a_reference_and_optimizer_states_may_be_narrow(tmp_path: Path) -> None:
    model = planned(tmp_path, "train.mode=dpo", "train.optimizer.states=bf16")
    assert model.preference
    assert model.options.bf16_states
    assert any(note.startswith("planned for DPO: ") for note in model.notes)
    assert not planned(tmp_path).preference


def test_a_plan_of_adapters_says_what_is_trained_and_what_is_frozen(tmp_path: Path) -> None:
    model = planned(tmp_path, LORA)
    request = build_request(model, hardware_of_gpu("h100"), (8,), load_cluster())
    report = make_plan(request, explained=True).to_plain()
    assert report["job"]["trained_parameters"] == 41_943_040
    assert report["job"]["document_length"] == ASSUMED_DOCUMENT
    assert report["chosen"]["states_gib"]["frozen"] > 10 * report["chosen"]["states_gib"]["trained"] > 0
    assert report["checkpoint"]["bytes"] == 12 * 41_943_040
    assert any(
        words.startswith("LoRA trains 41.9M weights beside 8.03B frozen ones") for words in report["explanation"]
    )


def test_a_written_layout_that_cannot_hold_narrow_weights_is_refused(tmp_path: Path) -> None:
    planned(tmp_path)
    keys = (LORA, "train.lora.quantize=int8", "layout={dp: 2, shard: full}")
    with pytest.raises(InputError, match=r"`lora\.quantize` holds in 8 or 4 bits"):
        planned_layout(load_recipe(str(tmp_path / "recipe.yaml"), keys))
