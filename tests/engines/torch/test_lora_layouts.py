"""Adapters train on every layout as on one process: real gloo ranks, real runs, losses and gradient norms compared."""

from __future__ import annotations

from typing import Any

import pytest

from support.runs.lora_runs import LORA, AdaptedRuns
from support.runs.small_runs import difference

STEPS = "train.steps=6"
DORA = "{rank: 4, alpha: 8, targets: [attn, mlp], dora: true, rslora: true}"
DROPPING = "{rank: 3, alpha: 8, targets: [q_proj, o_proj, mlp], dropout: 0.2}"
DORA_DROPPING = "{rank: 3, alpha: 8, targets: [v_proj, o_proj, up_proj, down_proj], dora: true, dropout: 0.2}"
EXPERTS = "{rank: 3, alpha: 8, targets: [experts]}"
LATENT_DROPPING = "{rank: 3, alpha: 8, targets: [attn, mlp], dora: true, dropout: 0.2}"
INT8 = "{rank: 4, alpha: 8, targets: [attn, mlp], quantize: int8}"


def case(model: str, layout: str, lora: str = LORA, *, sampled: bool = False) -> Any:
    return pytest.param(model, layout, lora, marks=() if sampled else (pytest.mark.full,))


CASES = [
    case("dense", "tp=2,micro_batch=4", sampled=True),
    case("dense", "dp=2,shard=full,micro_batch=2", sampled=True),
    case("dense", "dp=2,micro_batch=2", sampled=True),
    case("dense", "pp=2,micro_batch=2", sampled=True),
    case("dense", "cp=2,micro_batch=4", sampled=True),
    case("moe", "dp=2,ep=2,micro_batch=4", sampled=True),
    case("dense", "tp=2,micro_batch=4", DORA, sampled=True),
    case("dense", "cp=2,tp=2,micro_batch=4", DROPPING, sampled=True),
    case("moe", "tp=2,etp=2,micro_batch=4", EXPERTS, sampled=True),
    case("dense", "pp=2,schedule=zero_bubble,micro_batch=2", sampled=True),
    case("dense", "tp=2,micro_batch=4", INT8, sampled=True),
    case("dense", "dp=2,shard=zero2,micro_batch=2"),
    case("dense", "dp=2,shard=none,micro_batch=2"),
    case("dense", "dp=4,replicate=2,shard=full,micro_batch=2", DORA),
    case("dense", "tp=2,micro_batch=4", DORA_DROPPING),
    case("dense", "dp=2,shard=full,micro_batch=2", DORA_DROPPING),
    case("dense", "pp=2,micro_batch=2", DROPPING),
    case("dense", "pp=2,dp=2,micro_batch=2"),
    case("dense", "pp=2,dp=2,schedule=zero_bubble,micro_batch=2"),
    case("dense-4", "pp=2,vp=2,micro_batch=2"),
    case("dense-4", "pp=2,vp=2,schedule=zero_bubble,dp=2,micro_batch=2"),
    case("dense", "tp=2,recompute=full,micro_batch=4", DORA_DROPPING),
    case("dense", "tp=2,recompute=selective,micro_batch=4", DROPPING),
    case("dense", "dp=2,shard=full,recompute=selective,micro_batch=2"),
    case("dense", "tp=2,pp=2,dp=2,micro_batch=2", DORA),
    case("dense", "dp=2,pp=2,micro_batch=2", INT8),
    case("tied", "tp=2,pp=2,micro_batch=4"),
    case("tied", "tp=2,micro_batch=4", DORA),
    case("tied", "dp=2,shard=full,micro_batch=2"),
    case("moe", "tp=2,ep=2,micro_batch=4"),
    case("moe", "cp=2,ep=2,micro_batch=4"),
    case("moe", "dp=4,ep=2,shard=full,micro_batch=2", EXPERTS),
    case("moe", "tp=2,dp=2,ep=2,etp=2,micro_batch=4"),
    case("moe", "tp=2,ep=2,recompute=selective,micro_batch=4"),
    case("moe", "pp=2,dp=2,ep=2,schedule=zero_bubble,micro_batch=2"),
    case("moe", "dp=2,shard=full,recompute=full,micro_batch=2"),
    case("gpt_oss", "tp=2,etp=2,micro_batch=4", sampled=True),
    case("gpt_oss", "dp=2,ep=2,shard=full,micro_batch=2", EXPERTS),
    case("llama4", "tp=2,ep=2,micro_batch=4"),
    case("latent", "tp=2,ep=2,micro_batch=4", sampled=True),
    case("latent", "tp=2,cp=2,micro_batch=4", LATENT_DROPPING),
    case("latent", "pp=2,dp=2,micro_batch=2"),
    case("latent", "dp=2,shard=full,recompute=selective,micro_batch=2", DORA),
]


def assert_same_curve(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> None:
    """Every loss and gradient norm within 1e-9, and the same batches."""
    assert len({event["loss"] for event in expected}) == len(expected), "a run that learns nothing proves nothing"
    assert [event["batch_hash"] for event in actual] == [event["batch_hash"] for event in expected]
    for figure in ("loss", "grad_norm", "moe_balance", "moe_z"):
        if figure in expected[0]:
            assert difference(expected, actual, figure) <= 1e-9, figure


@pytest.mark.parametrize(("model", "layout", "lora"), CASES)
def test_adapters_on_a_layout_have_the_curve_of_one_process(
    adapted_runs: AdaptedRuns, model: str, layout: str, lora: str
) -> None:
    expected = adapted_runs.alone(model, STEPS, lora=lora)
    actual = adapted_runs.train(adapted_runs.new_folder(), model, layout, STEPS, lora=lora)
    assert_same_curve(expected, actual)


@pytest.mark.parametrize(
    ("model", "layout", "lora"),
    [
        case("dense", "tp=2,recompute=selective,micro_batch=4", DORA_DROPPING, sampled=True),
        case("dense", "dp=2,shard=full,micro_batch=2"),
        case("dense", "dp=2,recompute=full,micro_batch=2", INT8),
        case("moe", "tp=2,etp=2,micro_batch=4", EXPERTS),
    ],
)
def test_blocks_captured_as_for_a_gpu_have_the_same_curve(
    adapted_runs: AdaptedRuns, model: str, layout: str, lora: str
) -> None:
    expected = adapted_runs.alone(model, STEPS, lora=lora)
    actual = adapted_runs.train(adapted_runs.new_folder(), model, layout, STEPS, lora=lora, compiled=True)
    assert_same_curve(expected, actual)
