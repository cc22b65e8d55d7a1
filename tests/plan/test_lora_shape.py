"""Adapters as the planner counts them: the weights of a recipe's, how ranks divide them, and joint ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainshed.catalog import model_preset
from trainshed.models.parameters import AddedRows, lora_parameter_count
from trainshed.models.quantization import QuantizedWeight
from trainshed.plan.flops import adapter_flops
from trainshed.plan.lora_shape import DOUBLE_QUANTIZED_NF4_BYTES, QUANTIZED_BYTES, LoraShape, layer_adapters, lora_shape
from trainshed.plan.model_shape import ExpertShape, model_shape
from trainshed.recipe import Lora

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
MODEL = model_shape(model_preset("llama3-8b"))


@pytest.mark.parametrize("targets", [("q_proj",), ATTENTION, EVERY])
@pytest.mark.parametrize("preset", ["llama3-8b", "llama3-70b", "qwen2.5-7b"])
def test_a_recipe_and_the_planner_count_the_same_weights_and_flops(preset: str, targets: tuple[str, ...]) -> None:
    config, lora = model_preset(preset), Lora(rank=16, alpha=32.0, targets=targets)
    model = model_shape(config)
    assert lora_shape(lora).weights(model) == lora_parameter_count(config, lora)
    assert lora_shape(lora).token_flops(model) == adapter_flops(config, lora)


@pytest.mark.parametrize("preset", ["llama3-8b", "llama3.2-1b"])
def test_the_rows_of_added_tokens_are_counted_in_each_table_that_a_model_has(preset: str) -> None:
    config, lora = model_preset(preset), Lora(rank=16, alpha=32.0, targets=("q_proj",))
    added = AddedRows(config.vocab_size, 3, config.vocab_size)
    shape, model = lora_shape(lora, 3), model_shape(config)
    assert shape.weights(model) == lora_parameter_count(config, lora, added)
    assert shape.weights(model) - lora_shape(lora).weights(model) == 3 * config.hidden * (2 - config.tied_embeddings)


def test_tensor_parallel_divides_the_factor_that_its_projection_is_cut_along() -> None:
    adapters = {adapter.matrix.name: adapter for adapter in layer_adapters(MODEL, LoraShape(16, EVERY), experts=False)}
    assert adapters["q_proj"].weights(tp=4) == 16 * (4096 + 4096 / 4)
    assert adapters["k_proj"].weights(tp=4) == 16 * (4096 + 1024 / 4)
    assert adapters["o_proj"].weights(tp=4) == 16 * (4096 / 4 + 4096)
    assert adapters["down_proj"].weights(tp=2, dora=True) == 16 * (14336 / 2 + 4096) + 4096


def test_joint_adapters_are_for_all_that_read_one_input() -> None:
    joint = layer_adapters(MODEL, LoraShape(16, EVERY, joint=True), experts=False)
    assert [adapter.matrix.name for adapter in joint] == [
        "q_proj+k_proj+v_proj",
        "o_proj",
        "gate_proj+up_proj",
        "down_proj",
    ]
    assert joint[0].weights() == 16 * (4096 + 4096 + 2 * 1024)
    # Without `o_proj` between them, attention and the MLP are still apart.
    split = LoraShape(16, ("q_proj", "up_proj"), joint=True)
    assert [adapter.matrix.name for adapter in layer_adapters(MODEL, split, experts=False)] == ["q_proj", "up_proj"]


def test_every_expert_has_adapters_of_its_own_and_a_token_passes_through_those_it_is_routed_to() -> None:
    model = replace(MODEL, ffn=0, experts=ExpertShape(count=8, top_k=2, ffn=1024))
    experts = LoraShape(4, ("experts",))
    one = 4 * ((4096 + 1024) * 3)
    assert experts.weights(model) == 32 * 8 * one
    assert experts.token_flops(model) == 2 * 32 * 2 * one
    assert experts.layer_weights(model, experts=True, ep=4) == (0.0, 2 * one)
    # Names of dense projections are those of shared experts, which this model has none of.
    assert LoraShape(4, ("gate_proj",)).weights(model) == 0


def test_frozen_weights_of_4_bits_take_a_little_more_than_half_a_byte() -> None:
    assert pytest.approx(0.516, abs=1e-3) == DOUBLE_QUANTIZED_NF4_BYTES
    # What our own engine holds: codes and scales.
    for kind in ("int8", "nf4"):
        held = QuantizedWeight(kind, 4096, 4096)
        size = sum(buffer.numel() * buffer.element_size() for buffer in held.buffers())
        assert size / 4096**2 == pytest.approx(QUANTIZED_BYTES[kind], rel=2e-3)
    assert lora_shape(Lora(rank=4, alpha=8.0, quantize="nf4")).quantized
    assert not lora_shape(Lora(rank=4, alpha=8.0)).quantized
