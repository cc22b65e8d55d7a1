"""Which weights adapters have and how they begin, against peft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainshed.models.init import init_parameter
from trainshed.models.parameters import (
    Parameter,
    lora_parameter_count,
    lora_parameters,
    parameter_count,
    trained_fraction,
)
from trainshed.recipe import Lora, ModelConfig

CONFIG = ModelConfig.model_validate(
    {
        "family": "llama",
        "hidden": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn": 96,
        "vocab_size": 128,
        "max_positions": 64,
        "rope": {"base": 10000.0},
    }
)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("o_proj", "gate_proj", "up_proj", "down_proj", "k_proj")])
def test_adapters_have_as_many_weights_as_peft_gives_them(targets: tuple[str, ...]) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=96,
            vocab_size=128,
        )
    )
    model = get_peft_model(theirs, LoraConfig(r=8, target_modules=list(targets)))
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    lora = Lora.model_validate({"rank": 8, "alpha": 16, "targets": list(targets)})
    assert lora_parameter_count(CONFIG, lora) == trained
    assert trained_fraction(CONFIG, lora) == trained / (trained + parameter_count(CONFIG))


def test_without_adapters_every_weight_is_trained() -> None:
    assert trained_fraction(CONFIG, None) == 1


def with_experts(**moe: int) -> ModelConfig:
    experts = {"experts": 4, "top_k": 2, "ffn": 32, **moe}
    return ModelConfig.model_validate(CONFIG.model_dump(exclude={"ffn"}) | {"family": "mixtral", "moe": experts})


def adapters(targets: list[str], **options: Any) -> Lora:
    return Lora.model_validate({"rank": 2, "alpha": 4, "targets": targets, **options})


def test_every_expert_has_adapters_of_its_own() -> None:
    assert lora_parameter_count(with_experts(), adapters(["experts"])) == 2 * 2 * 4 * 3 * (64 + 32)
    assert lora_parameter_count(with_experts(), adapters(["up_proj"])) == 0, "a name of dense and shared experts"
    assert lora_parameter_count(with_experts(shared_ffn=16), adapters(["up_proj"])) == 2 * 2 * (64 + 16)


def test_groups_name_what_a_model_has() -> None:
    whole = adapters(["all-linear"])
    assert lora_parameter_count(CONFIG, whole) == lora_parameter_count(CONFIG, adapters(["attn", "mlp"]))
    parts = lora_parameter_count(with_experts(), adapters(["attn"])) + lora_parameter_count(
        with_experts(), adapters(["experts"])
    )
    assert lora_parameter_count(with_experts(), whole) == parts


def test_the_table_of_adapters_says_how_ranks_cut_them() -> None:
    config = with_experts(shared_ffn=16).model_copy(update={"layers": 1})
    lora = adapters(["q_proj", "o_proj", "down_proj", "experts"])
    table = {tensor.name: tensor for tensor in lora_parameters(config, lora)}
    assert {name: (tensor.shape, tensor.tp_dim, tensor.expert) for name, tensor in table.items()} == {
        "layers.0.attention.qkv.lora.q_proj.a": ((2, 64), None, False),
        "layers.0.attention.qkv.lora.q_proj.b": ((64, 2), 0, False),
        "layers.0.attention.out.lora.o_proj.a": ((2, 64), 1, False),
        "layers.0.attention.out.lora.o_proj.b": ((64, 2), None, False),
        "layers.0.mlp.experts.lora.gate_proj.a": ((4, 2, 64), None, True),
        "layers.0.mlp.experts.lora.gate_proj.b": ((4, 32, 2), 1, True),
        "layers.0.mlp.experts.lora.up_proj.a": ((4, 2, 64), None, True),
        "layers.0.mlp.experts.lora.up_proj.b": ((4, 32, 2), 1, True),
        "layers.0.mlp.experts.lora.down_proj.a": ((4, 2, 32), 2, True),
        "layers.0.mlp.experts.lora.down_proj.b": ((4, 64, 2), None, True),
        "layers.0.mlp.shared.down.lora.down_proj.a": ((2, 16), 1, False),
        "layers.0.mlp.shared.down.lora.down_proj.b": ((64, 2), None, False),
    }
    dora = {tensor.name: tensor for tensor in lora_parameters(CONFIG, adapters(["v_proj", "o_proj"], dora=True))}
    values = dora["layers.1.attention.qkv.lora.v_proj.magnitude"]
    assert (values.shape, values.tp_dim) == ((32,), 0)
    assert dora["layers.1.attention.out.lora.o_proj.magnitude"].tp_dim is None
    assert not dora["layers.1.attention.out.lora.o_proj.magnitude"].decays


def test_fresh_factors_are_as_wide_as_those_of_peft() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    holder = nn.ModuleDict({"proj": nn.Linear(256, 64, bias=False)})
    inject_adapter_in_model(LoraConfig(r=64, target_modules=["proj"]), holder)
    theirs = holder["proj"].lora_A["default"].weight.detach()
    parameter = Parameter("layers.0.attention.out.lora.o_proj.a", (64, 256), 1, "kaiming_uniform", 0)
    ours = torch.empty(64, 256)
    init_parameter(ours, parameter, (0, 0), CONFIG, seed=1)
    assert float(ours.abs().max()) <= 1 / 16
    for quantile in (0.01, 0.25, 0.5, 0.75, 0.99):
        assert abs(float(ours.quantile(quantile) - theirs.quantile(quantile))) < 0.003
    part = torch.empty(3, 100)
    init_parameter(part, parameter, (5, 31), CONFIG, seed=1)
    assert torch.equal(part, ours[5:8, 31:131]), "any part is made alone"
