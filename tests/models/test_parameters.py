"""The table of tensors: names, shapes and splits that checkpoints rely on, and that the decoder really has."""

from __future__ import annotations

from collections import Counter

import pytest

from support.models.one_process import one_process_model
from support.models.tiny_models import FAMILIES, VARIANTS, tiny_config
from support.recipes.golden_files import check_golden
from trainshed.catalog import model_entry, preset_names
from trainshed.models.parameters import Parameter, layer_parameters, parameter_count, parameters

SHARED = {"experts": 4, "top_k": 2, "ffn": 24, "shared_ffn": 8}


def line(parameter: Parameter) -> str:
    words = [parameter.name, str(list(parameter.shape)), f"split={parameter.tp_dim}", parameter.init]
    return " ".join([*words, *(kind for kind in ("expert", "buffer", "decays") if getattr(parameter, kind))])


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_a_family_are_called_and_cut_as_they_always_were(family: str) -> None:
    check_golden(f"parameters/{family}.txt", "\n".join(map(line, parameters(tiny_config(family)))) + "\n")


def test_a_shared_expert_adds_tensors_of_its_own() -> None:
    plain, shared = tiny_config("qwen3_moe"), tiny_config("qwen3_moe", moe=SHARED)
    added = [line(each) for each in layer_parameters(shared, 1) if each not in list(layer_parameters(plain, 1))]
    assert added == [
        "layers.1.mlp.shared.gate_up.weight [16, 32] split=0 normal decays",
        "layers.1.mlp.shared.down.weight [32, 8] split=1 output decays",
    ]


@pytest.mark.parametrize("variant", [*VARIANTS, "shared expert"])
def test_the_decoder_has_exactly_the_tensors_of_the_table(variant: str) -> None:
    config = tiny_config("qwen3_moe", moe=SHARED) if variant == "shared expert" else tiny_config(variant)
    (stage,) = one_process_model(config, length=8).stages
    held = {name: tuple(weight.shape) for name, weight in stage.named_parameters()}
    assert held == {parameter.name: parameter.shape for parameter in parameters(config) if not parameter.buffer}
    buffers = {name: tuple(buffer.shape) for name, buffer in stage.named_buffers()}
    assert buffers == {parameter.name: parameter.shape for parameter in parameters(config) if parameter.buffer}


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_has_as_many_weights_as_its_publisher_says(preset: str) -> None:
    entry = model_entry(preset)
    assert parameter_count(entry.config) == entry.parameters


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_has_one_name_and_can_be_cut_where_it_says(variant: str) -> None:
    config = tiny_config(variant)
    table = list(parameters(config))
    assert max(Counter(parameter.name for parameter in table).values()) == 1
    for parameter in table:
        assert (parameter.layer is not None) == parameter.name.startswith("layers.")
        if parameter.tp_dim is not None:
            assert parameter.shape[parameter.tp_dim] % config.kv_heads == 0
