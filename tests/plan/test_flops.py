"""FLOPs from shapes, held against torch's own counter over transformers' models."""

from __future__ import annotations

import pytest

from support.models.tiny_models import FAMILIES, tiny_config, transformers_config
from trainshed.catalog import model_preset
from trainshed.plan.flops import attention_flops, matmul_flops, mean_keys, token_flops, training_flops_per_token

BATCH, LENGTH = 2, 16


def counted(family: str, *, backward: bool) -> int:
    """What torch counts in a transformers model; the table of rotary frequencies, made with a product, is left out."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    config = transformers_config(tiny_config(family))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    tokens = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens, use_cache=False).logits
        if backward:
            logits.sum().backward()
    rotary = [
        sum(counts.values()) for name, counts in counter.get_flop_counts().items() if name.endswith(".rotary_emb")
    ]
    return counter.get_total_flops() - sum(rotary)


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_counts_the_same_forward_pass_of_every_family(family: str) -> None:
    flops = token_flops(tiny_config(family), LENGTH, causal=False)
    assert counted(family, backward=False) == BATCH * LENGTH * flops.forward


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_torch_counts_the_same_training_step(family: str) -> None:
    config = tiny_config(family)
    assert counted(family, backward=True) == BATCH * LENGTH * training_flops_per_token(config, LENGTH, causal=False)


def test_the_parts_of_a_token_add_up() -> None:
    config = tiny_config("mixtral")
    flops = token_flops(config, LENGTH)
    assert flops.matmul == matmul_flops(config)
    assert flops.forward == flops.matmul + attention_flops(config, LENGTH, causal=True)
    assert training_flops_per_token(config, LENGTH) == flops.training == 3 * flops.forward
    assert min(flops.projections, flops.attention, flops.feed_forward, flops.router, flops.head) > 0


def test_a_token_pays_for_the_experts_it_visits_and_for_the_shared_one() -> None:
    plain = tiny_config("mixtral")
    moe = {"experts": 4, "top_k": 2, "ffn": 24}
    more = tiny_config("mixtral", moe=moe | {"experts": 8})
    shared = tiny_config("mixtral", moe=moe | {"shared_ffn": 10})
    assert token_flops(more, 8).feed_forward == token_flops(plain, 8).feed_forward
    assert token_flops(more, 8).router == 2 * token_flops(plain, 8).router
    extra = plain.layers * 2 * 3 * plain.hidden * 10
    assert token_flops(shared, 8).feed_forward == token_flops(plain, 8).feed_forward + extra


@pytest.mark.parametrize("window", [None, 1, 3, 7, 8, 100])
def test_causal_attention_counts_exactly_the_keys_a_token_may_see(window: int | None) -> None:
    config = tiny_config("mistral", sliding_window=window)
    seen = [min(token + 1, window or 8) for token in range(8)]
    assert mean_keys(config, 8) * 8 == sum(seen)
    assert attention_flops(config, 8, causal=True) * 8 == sum(seen) * config.layers * 4 * config.heads * config.head_dim
    assert attention_flops(config, 8, causal=False) == 8 * config.layers * 4 * config.heads * config.head_dim


def test_a_tied_head_costs_what_an_untied_one_costs() -> None:
    tied = tiny_config("llama", tied_embeddings=True)
    assert token_flops(tied, 8) == token_flops(tiny_config("llama"), 8)


def test_llama_3_8b_costs_six_flops_a_weight_besides_its_embedding_and_attention() -> None:
    config = model_preset("llama3-8b")
    weights = 8030261248 - config.vocab_size * config.hidden - (2 * config.layers + 1) * config.hidden
    assert 3 * matmul_flops(config) == 6 * weights
