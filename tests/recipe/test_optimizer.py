"""What `train.optimizer`, `train.spikes` and `train.ema` refuse, each with a way on."""

from __future__ import annotations

import pytest

from trainshed.errors import InputError
from trainshed.recipe import parse_recipe, run_id

RECIPE = """
name: small
model: {preset: llama3-8b, from: hf://org/base}
tokenizer: hf://org/base
data: {sequence_length: 2048, train: [{path: x.jsonl}]}
train: {steps: 10, global_batch: 8, optimizer: {lr: 1.0e-4}}
export: {}
"""
LORA = "train.lora={rank: 4, alpha: 8}"


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (("train.optimizer.name=muon", LORA), "muon makes the update of a whole matrix orthogonal, and adapters are"),
        (("train.ema={decay: 0.9}", LORA), "whole weights are averaged, and `lora` trains adapters"),
        (("export.weights=ema",), "the run averages no weights"),
        (("train.optimizer.muon={}",), "is read with `name: muon` only"),
        (("train.optimizer={name: muon, lr: 1.0, options: {a: 1}}",), "muon has none: its keys stand beside it"),
        (("train.optimizer.groups=[{match: head.*}]",), "says nothing about its tensors"),
        (("train.optimizer.groups=[{match: head.*, freeze: true, lr_scale: 2}]",), "a frozen tensor is never updated"),
        (("train.optimizer.groups=[]",), "must have at least 1 element"),
        (("train.spikes={window: 1}",), "must be at least 2"),
        (("train.ema={}",), "is missing"),
    ],
)
def test_what_does_not_go_together_is_refused_by_its_key(keys: tuple[str, ...], what: str) -> None:
    with pytest.raises(InputError, match=what):
        parse_recipe(RECIPE, keys)


def test_new_keys_left_out_do_not_rename_a_run_and_written_they_do() -> None:
    usual = run_id(parse_recipe(RECIPE))
    assert run_id(parse_recipe(RECIPE, ("train.optimizer.decoupled=false", "export.weights=trained"))) == usual
    written = [
        ("train.optimizer.name=muon",),
        ("train.optimizer.decoupled=true",),
        ("train.optimizer.groups=[{match: head.*, lr_scale: 0.5}]",),
        ("train.spikes={}",),
        ("train.ema={decay: 0.9}",),
    ]
    assert len({usual, *(run_id(parse_recipe(RECIPE, keys)) for keys in written)}) == 1 + len(written)
