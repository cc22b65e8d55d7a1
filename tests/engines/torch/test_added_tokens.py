"""Runs with added tokens: their rows begin as the mean, train on every layout as on one process, and are saved.

The base has 61 rows, of which the synthetic data uses all: it may know the added tokens from the start.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.recipes.small_recipes import ALONE
from support.runs.lora_runs import LORA, AdaptedRuns
from support.runs.small_runs import checkpoint, difference, events, state
from trainshed.checkpoints.base import BaseWeights
from trainshed.models.parameters import AddedRows, parameters

STEPS = "train.steps=6"
ALL_WEIGHTS = "null"
GROWN = AddedRows(start=58, count=7, base_rows=61)
"""Three take padding of the base, four are beyond its rows; with tp they are all on the last rank."""
ACROSS = AddedRows(start=29, count=4, base_rows=61)
"""Where tp=2 cuts the vocabulary."""


def case(model: str, layout: str, added: AddedRows, lora: str = LORA, *, sampled: bool = False) -> Any:
    return pytest.param(model, layout, added, lora, marks=() if sampled else (pytest.mark.full,))


CASES = [
    case("dense", "tp=2,micro_batch=4", ACROSS, sampled=True),
    case("tied", "tp=2,pp=2,micro_batch=4", GROWN, sampled=True),
    case("dense", "dp=2,shard=full,micro_batch=2", GROWN, sampled=True),
    case("dense", "cp=2,micro_batch=4", GROWN, sampled=True),
    case("dense", "pp=2,micro_batch=2", ACROSS, sampled=True),
    case("dense", "tp=2,micro_batch=4", GROWN, ALL_WEIGHTS, sampled=True),
    case("tied", "tp=2,micro_batch=4", ACROSS),
    case("tied", "pp=2,dp=2,micro_batch=2", GROWN),
    case("tied", "dp=2,shard=full,micro_batch=2", GROWN),
    case("dense", "dp=4,replicate=2,shard=full,micro_batch=2", GROWN),
    case("dense", "dp=2,shard=none,micro_batch=2", ACROSS),
    case("dense", "pp=2,schedule=zero_bubble,micro_batch=2", GROWN),
    case("dense", "tp=2,recompute=full,micro_batch=4", GROWN, "{rank: 4, alpha: 8, targets: [attn], quantize: int8}"),
    case("moe", "dp=2,ep=2,micro_batch=4", GROWN),
    case("tied", "pp=2,micro_batch=2", GROWN, ALL_WEIGHTS),
    case("dense", "dp=2,shard=full,micro_batch=2", ACROSS, ALL_WEIGHTS),
]


@pytest.mark.parametrize(("model", "layout", "added", "lora"), CASES)
def test_added_tokens_on_a_layout_have_the_curve_of_one_process(
    adapted_runs: AdaptedRuns, model: str, layout: str, added: AddedRows, lora: str
) -> None:
    expected = adapted_runs.alone(model, STEPS, lora=lora, added=added)
    actual = adapted_runs.train(adapted_runs.new_folder(), model, layout, STEPS, lora=lora, added=added)
    assert len({event["loss"] for event in expected}) == len(expected), "a run that learns nothing proves nothing"
    for figure in ("loss", "grad_norm"):
        assert difference(expected, actual, figure) <= 1e-9, figure


@pytest.mark.parametrize("model", ["dense", "tied"])
def test_the_rows_of_added_tokens_and_no_others_are_trained_beside_adapters(
    adapted_runs: AdaptedRuns, model: str
) -> None:
    folder = adapted_runs.new_folder()
    adapted_runs.train(folder, model, ALONE, "train.steps=2", added=GROWN)
    tensors = state(folder, 2)
    tables = ["embedding"] if model == "tied" else ["embedding", "head"]
    rows = {name for name in tensors if name.startswith("model.") and ".lora." not in name}
    assert rows == {f"model.{table}.added.weight" for table in tables}
    assert checkpoint(folder, 2).manifest.spec["added"] == {"start": 58, "count": 7, "base_rows": 61}
    base = BaseWeights.from_folder(adapted_runs.base(model))
    with base.open() as weights:
        table = {parameter.name: parameter for parameter in parameters(weights.config)}
        for name in tables:
            whole = table[f"{name}.weight"]
            mean = weights.read(whole, (0, 0), whole.shape, torch.float64)[:58].mean(0)
            trained = tensors[f"model.{name}.added.weight"]
            # Two steps of Adam move a weight by at most twice the learning rate, and each row was moved.
            moved = (trained - mean).abs()
            assert trained.shape == (7, 16)
            assert float(moved.max(1).values.min()) > 0, name
            assert float(moved.max()) <= 1e-2, name
    notes = [event["text"] for event in events(folder, "note")]
    assert "7 added tokens begin as the mean of the 58 before them" in notes


JOURNEY = [ALONE, "tp=2,micro_batch=4", "pp=2,micro_batch=2", "dp=2,shard=full,micro_batch=2"]


@pytest.mark.parametrize(("model", "lora"), [("tied", LORA), ("dense", ALL_WEIGHTS)])
def test_a_run_with_added_tokens_that_moves_to_another_layout_keeps_its_curve(
    adapted_runs: AdaptedRuns, model: str, lora: str
) -> None:
    expected = adapted_runs.alone(model, "train.steps=8", lora=lora, added=GROWN)
    folder = adapted_runs.new_folder()
    for number, layout in enumerate(JOURNEY, start=1):
        actual = adapted_runs.train(folder, model, layout, f"train.steps={2 * number}", lora=lora, added=GROWN)
    assert difference(expected, actual, "loss") <= 1e-9
    assert difference(expected, actual, "grad_norm") <= 1e-9
