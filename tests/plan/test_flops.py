"""FLOPs from shapes, held against torch's own counter over transformers' models."""

from __future__ import annotations

import pytest

from support.models.tiny_models import FAMILIES, tiny_config, transformers_config
from trainshed.catalog import model_preset
from trainshed.models.families import HF_FAMILIES
from trainshed.plan.flops import (
    attended_length,
    attention_flops,
    matmul_flops,
    mean_keys,
    token_flops,
    training_flops_per_token,
)
from trainshed.recipe import Lora
from trainshed.recipe.optimizer import ParameterGroup

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


def needless_flops(family: str) -> float:
    """What transformers computes forward for each token and need not: Llama 4 sends it, times 0, to all experts."""
    config = tiny_config(family)
    if config.moe is None or not config.moe.scale_inputs:
        return 0.0
    return token_flops(config, LENGTH).experts * (config.moe.experts / config.moe.top_k - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_counts_the_same_forward_pass_of_every_family(family: str) -> None:
    flops = token_flops(tiny_config(family), LENGTH, causal=False)
    assert counted(family, backward=False) == BATCH * LENGTH * (flops.forward + needless_flops(family))


def test_every_family_is_counted() -> None:
    assert set(FAMILIES) == set(HF_FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_counts_the_same_training_step_of_every_family(family: str) -> None:
    config = tiny_config(family)
    per_token = training_flops_per_token(config, LENGTH, causal=False) + 3 * needless_flops(family)
    assert counted(family, backward=True) == BATCH * LENGTH * per_token


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")])
def test_torch_counts_the_same_training_step_of_adapters(targets: tuple[str, ...]) -> None:
    """Adapters of `peft` on a model of `transformers`; inputs have gradients, so that the first layer's are counted."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    config = tiny_config("llama")
    base = AutoModelForCausalLM.from_config(transformers_config(config), attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=list(targets)))
    model.enable_input_require_grads()
    tokens = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)
    with FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False).logits.sum().backward()
    counts = counter.get_flop_counts().items()
    rotary = sum(sum(parts.values()) for name, parts in counts if name.endswith(".rotary_emb"))
    lora = Lora(rank=4, alpha=8.0, targets=targets)
    expected = BATCH * LENGTH * training_flops_per_token(config, LENGTH, causal=False, lora=lora)
    assert counter.get_total_flops() - rotary == expected


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3", "gpt_oss"])
def test_torch_counts_the_same_training_step_of_our_own_model_with_frozen_groups(family: str) -> None:
    """None is below all that is trained: inputs of every layer have gradients."""
    from torch.utils.flop_counter import FlopCounterMode

    from support.models.one_process import one_process_model, token_rows

    config = tiny_config(family)
    names = ("layers.1.attention.*", "*.mlp.experts.down", "*.mlp.up.weight", "head.weight", "layers.0.mlp.down.weight")
    groups = [ParameterGroup.model_validate({"match": name, "freeze": True}) for name in names]
    counted = []
    for chosen in ([], groups):
        model = one_process_model(config, length=LENGTH, micro_batch=BATCH, groups=chosen)
        rows = token_rows(config, BATCH, LENGTH + 1)
        with FlopCounterMode(display=False) as counter:
            model.stages[0](rows[:, :-1], rows[:, 1:])[0].backward()
        counted.append(counter.get_total_flops())
    expected = [training_flops_per_token(config, LENGTH, groups=chosen) for chosen in ([], groups)]
    assert expected[1] < expected[0]
    assert counted[0] - counted[1] == BATCH * LENGTH * (expected[0] - expected[1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mtp_layers", [0, 1])
def test_where_all_is_frozen_every_matmul_is(family: str, mtp_layers: int) -> None:
    config = tiny_config(family).with_mtp_layers(mtp_layers if family == "deepseek_v3" else 0)
    flops = token_flops(config, LENGTH, groups=[ParameterGroup.model_validate({"match": "*", "freeze": True})])
    assert (flops.frozen, flops.frozen_experts) == (flops.matmul, flops.experts)


def test_frozen_weights_cost_two_thirds_and_a_reference_one_more_forward_pass() -> None:
    config = model_preset("llama3-8b")
    lora = Lora(rank=16, alpha=32.0)
    full, adapted = (token_flops(config, 8192, lora=which) for which in (None, lora))
    assert adapted.adapters is not None
    assert adapted.training == pytest.approx(full.training - full.matmul + 3 * adapted.adapters)
    assert adapted.adapters == 2 * 16 * 32 * (4 * 4096 + 4096 + 2 * 1024 + 4096)
    dpo = training_flops_per_token(config, 8192, lora=lora, reference=True)
    assert dpo == pytest.approx(adapted.training + full.forward)


def test_documents_that_are_kept_apart_attend_to_themselves() -> None:
    config = model_preset("llama3-8b")
    lengths = [100, 300, 624]
    # What an average token sees: a document of n tokens has n · (n + 1) / 2 pairs.
    seen = sum(length * (length + 1) / 2 for length in lengths) / sum(lengths)
    document = sum(length**2 for length in lengths) / sum(lengths)
    assert mean_keys(config, attended_length(1024, document)) == pytest.approx(seen)
    assert token_flops(config, 1024, document_length=document).attention < token_flops(config, 1024).attention
    assert token_flops(config, 1024, document_length=5000.0) == token_flops(config, 1024)


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
