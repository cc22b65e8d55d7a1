"""Phases on a GPU: run by hand with `pytest -m gpu tests/engines/torch/test_phases_gpu.py`; CI has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.recipes.small_recipes import ALONE, small_job, small_recipe
from support.runs.small_ranks import blended_order
from trainshed.engines.torch.rank import train_rank
from trainshed.observe.event_log import read_steps
from trainshed.storage import LocalStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SIZES = "layers: 2, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, ffn: 128, vocab_size: 64, max_positions: 512"
MODEL = f"model.config={{family: llama, {SIZES}, rope: {{base: 10000.0}}}}"
PHASED = (
    MODEL,
    "train.precision=bf16",
    "train.steps=null",
    "train.schedule={}",
    "train.phases=[{steps: 3, sequence_length: 128, shape: linear}, {steps: 3, sequence_length: 256, rope_base: 4e4}]",
)


def test_longer_sequences_are_compiled_again_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    for folder in (whole, parted):
        folder.mkdir()
    assert train_rank(small_job(whole, small_recipe("dense", PHASED), ALONE), run_folder=whole) == 0
    shorter = (*PHASED[:-1], PHASED[-1].replace("{steps: 3, sequence_length: 256", "{steps: 1, sequence_length: 256"))
    for overrides in (shorter, PHASED):
        assert train_rank(small_job(parted, small_recipe("dense", overrides), ALONE), run_folder=parted) == 0
    expected, got = (read_steps(LocalStore(folder), "") for folder in (whole, parted))
    assert [event["batch_hash"] for event in got] == [event["batch_hash"] for event in expected]
    assert [event["loss"] for event in got] == pytest.approx([event["loss"] for event in expected], rel=2e-3)


def test_the_losses_of_sources_average_to_the_loss(tmp_path: Path) -> None:
    job = small_job(tmp_path, small_recipe("dense", (MODEL, "train.precision=bf16", "train.steps=3")), ALONE)
    order = blended_order(job, apart=False)
    assert train_rank(replace(job, order=order), run_folder=tmp_path) == 0
    for event in read_steps(LocalStore(tmp_path), ""):
        numbers = order.source_numbers(event["step"], 0, 8)
        shares = {name: float((numbers == number).mean()) for number, name in enumerate(("articles", "code"))}
        mean = sum(shares[name] * loss for name, loss in event["source_losses"].items())
        assert mean == pytest.approx(event["loss"], rel=1e-5)
