"""The planner's description of a model: the same weights and FLOPs as the engine's table of tensors."""

from __future__ import annotations

import pytest

from support.models.tiny_models import tiny_config
from trainshed.catalog.models import model_preset, preset_names
from trainshed.models.parameters import parameter_count
from trainshed.plan.flops import token_flops
from trainshed.plan.model_shape import ExpertShape, LayerKind, ModelShape, model_shape


@pytest.mark.parametrize("name", preset_names())
def test_weights_and_flops_are_those_of_the_table_of_tensors(name: str) -> None:
    config = model_preset(name)
    model = model_shape(config, name)
    assert model.weights == parameter_count(config)
    for causal in (True, False):
        counted = token_flops(config, 4096, causal=causal).forward
        assert model.token_flops(4096, causal=causal) == pytest.approx(counted, rel=1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt2"])
def test_every_family_of_the_engine_is_described(family: str) -> None:
    config = tiny_config(family)
    assert model_shape(config).weights == parameter_count(config)


def test_layers_are_told_apart_by_experts_and_window() -> None:
    model = ModelShape(
        "x", 8, 64, 4, 4, 16, 16, 256, 512, experts=ExpertShape(4, 2, 128), dense_first=2, window=8,
        window_pattern=(True, False),
    )  # fmt: skip
    assert model.layer_kinds(range(8)) == {
        LayerKind(False, True): 1,
        LayerKind(False, False): 1,
        LayerKind(True, True): 3,
        LayerKind(True, False): 3,
    }
    assert model.expert_layers == 6


def test_a_window_shortens_what_is_looked_at() -> None:
    model = ModelShape("x", 1, 64, 4, 4, 16, 16, 256, 512, window=4)
    assert model.mean_keys(8, windowed=False) == 4.5
    assert model.mean_keys(8, windowed=True) == (1 + 2 + 3 + 4 * 5) / 8
