"""DeepSeek-V3's routing against transformers' router and megatron-core's update of its bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.models.one_process import one_process_model, token_rows
from support.models.tiny_models import tiny_config
from trainshed.models.collectives import ParallelAxes
from trainshed.models.decoder import Regularization
from trainshed.models.moe import ROUTER_LOSS_TERMS, MoE, update_score_bias
from trainshed.recipe import ModelConfig

TOKENS = 200


def router_block(**changes: Any) -> MoE:
    """One block with experts, in float32; its bias is as large as the differences between scores."""
    config = tiny_config("deepseek_v3")
    assert config.moe is not None
    config = tiny_config("deepseek_v3", moe=config.moe.model_dump() | changes)
    mlp = MoE(config, ParallelAxes(), balance_loss=0.0, z_loss=0.0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
        assert mlp.router.score_bias is not None
        mlp.router.score_bias.copy_(torch.randn(8, generator=generator) * 0.2)
    return mlp


def their_router(mlp: MoE) -> Any:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    moe = mlp.moe
    router = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=32,
            n_routed_experts=moe.experts,
            num_experts_per_tok=moe.top_k,
            n_group=moe.groups,
            topk_group=moe.top_groups,
            norm_topk_prob=moe.normalize_top_k,
            routed_scaling_factor=moe.scale,
        )
    )
    router.weight.data.copy_(mlp.router.weight)
    router.e_score_correction_bias.copy_(mlp.router.score_bias)
    return router


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"groups": 1, "top_groups": 1},
        {"groups": 2, "top_groups": 1, "normalize_top_k": False},
        {"top_k": 4, "scale": 1.0},
    ],
)
def test_a_token_visits_the_experts_that_transformers_chooses_with_their_weights(changes: dict[str, Any]) -> None:
    mlp = router_block(**changes)
    x = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(1))
    logits, weights, expert_ids = their_router(mlp)(x)
    our_weights, our_ids = mlp._choose(logits.sigmoid())
    order, our_order = expert_ids.argsort(-1), our_ids.argsort(-1)
    assert torch.equal(our_ids.gather(1, our_order), expert_ids.gather(1, order))
    torch.testing.assert_close(our_weights.gather(1, our_order), weights.gather(1, order), rtol=0, atol=1e-6)
    assert mlp.router.score_bias is not None
    mlp.router.score_bias.zero_()
    _, unbiased = mlp._choose(logits.sigmoid())
    assert not torch.equal(unbiased.sort(-1).values, our_ids.sort(-1).values), "the bias chooses nothing"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_the_bias_moves_as_in_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    # A single rank has nothing to sum.
    monkeypatch.setattr(parallel_state, "get_tensor_and_data_parallel_group", lambda **_: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    bias = torch.randn(8, generator=torch.Generator().manual_seed(2))
    load = torch.tensor([4.0, 9.0, 0.0, 7.0, 7.0, 12.0, 3.0, 14.0])  # two of them have the mean
    expected = get_updated_expert_bias(load.clone(), bias.clone(), 0.001)
    update_score_bias(bias, load.double(), 0.001)
    torch.testing.assert_close(bias, expected, rtol=0, atol=1e-7)


def test_the_figures_count_every_choice_of_every_token() -> None:
    mlp = router_block()
    x = torch.randn(10, 3, 32, generator=torch.Generator().manual_seed(3))
    _, figures = mlp(x, None)
    load = figures[len(ROUTER_LOSS_TERMS) :]
    assert load.sum() == 10 * 3 * mlp.moe.top_k
    assert torch.equal(load, load.round())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_load_is_counted_once_with_recompute_and_summed_over_micro_batches(recompute: str) -> None:
    config = tiny_config("deepseek_v3")
    model = one_process_model(config, length=12, recompute=recompute, regularization=Regularization())
    (stage,) = model.stages
    assert stage.expert_load is not None
    tokens = token_rows(config, 4, 12)
    for part in tokens.split(2):
        stage(part, part)[0].backward()
    assert config.moe is not None
    per_layer = 4 * 12 * config.moe.top_k
    assert stage.expert_load.sum(1).tolist() == [0, per_layer, per_layer]


def test_the_bias_stays_in_float32_where_weights_are_bf16() -> None:
    mlp = router_block()
    before = mlp.router.score_bias
    assert before is not None
    mlp = mlp.to(torch.bfloat16)
    assert mlp.router.weight.dtype == torch.bfloat16
    assert mlp.router.score_bias is not None
    assert torch.equal(mlp.router.score_bias, before)


def test_experts_of_equal_load_keep_their_bias() -> None:
    bias = torch.tensor([0.1, -0.2])
    update_score_bias(bias, torch.tensor([5.0, 5.0], dtype=torch.float64), 0.001)
    assert bias.tolist() == torch.tensor([0.1, -0.2]).tolist()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"groups": 3}, "3 does not divide the 8 experts"),
        ({"groups": 8, "top_groups": 4}, "has only one"),
        ({"groups": 4, "top_groups": 1}, "3 is more than the 2 experts of 1 groups"),
        ({"top_groups": 9}, "9 is more than the 4 groups"),
        ({"scores": "softmax"}, "is for scores that are independent"),
        ({"dense_first": 3}, "3 leaves none of 3 layers"),
    ],
)
def test_routing_that_cannot_be_is_refused(changes: dict[str, Any], problem: str) -> None:
    config = tiny_config("deepseek_v3")
    assert config.moe is not None
    with pytest.raises(ValueError, match=problem):
        ModelConfig.model_validate(config.model_dump() | {"moe": config.moe.model_dump() | changes})
