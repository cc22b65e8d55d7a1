"""How many weights adapters have, against peft."""

from __future__ import annotations

import pytest

from trainshed.models.parameters import lora_parameter_count, parameter_count, trained_fraction
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


def test_every_expert_has_adapters_of_its_own() -> None:
    moe = {"experts": 4, "top_k": 2, "ffn": 32}
    experts = ModelConfig.model_validate(CONFIG.model_dump(exclude={"ffn"}) | {"family": "mixtral", "moe": moe})
    lora = Lora.model_validate({"rank": 2, "alpha": 4, "targets": ["up_proj"]})
    assert lora_parameter_count(experts, lora) == 2 * 2 * 4 * (64 + 32)
