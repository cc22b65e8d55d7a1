"""The planner on Muon and on averaged weights: the bytes of their states, and what their update costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.models.tiny_models import tiny_config
from trainshed.catalog.models import model_preset
from trainshed.models.parameter_groups import is_layer_matrix, matrix_shapes
from trainshed.models.parameters import layer_parameters
from trainshed.plan import resolve_layout
from trainshed.plan.flops import newton_schulz_flops
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import EngineOptions, engine_constants
from trainshed.plan.performance.muon_time import layer_tensors
from trainshed.plan.performance.prediction import LayoutPrediction, predict
from trainshed.plan.training_shape import TrainingShape, hardware_of_gpu
from trainshed.recipe import Layout

GIB = 2**30
CONFIG = model_preset("llama3-8b")


def predicted(options: EngineOptions, **layout: object) -> LayoutPrediction:
    placed = resolve_layout(Layout.model_validate({"micro_batch": 1, **layout}), CONFIG)
    training = TrainingShape(
        model=model_shape(CONFIG),
        sequence_length=4096,
        global_batch=64,
        precision="bf16",
        hardware=hardware_of_gpu("h200"),
        gpus=placed.world_size,
        constants=engine_constants("torch"),
        options=options,
    )
    return predict(training, placed)


def layer_elements() -> int:
    return CONFIG.layers * sum(one.size for one in layer_parameters(CONFIG, 0) if is_layer_matrix(one))


def test_muon_keeps_one_average_of_a_matrix_and_two_of_everything_else() -> None:
    usual, muon = (predicted(EngineOptions(muon_steps=steps), shard="none", dp=8) for steps in (0, 5))
    assert (usual.memory.optimizer - muon.memory.optimizer) * GIB == pytest.approx(4 * layer_elements())


def test_averaged_weights_are_4_bytes_a_weight_and_one_more_pass_over_them() -> None:
    usual, averaged = (predicted(EngineOptions(averaged=kept), shard="none", dp=8) for kept in (False, True))
    weights = model_shape(CONFIG).weights
    assert (averaged.memory.optimizer - usual.memory.optimizer) * GIB == pytest.approx(4 * weights)
    assert usual.times.optimizer < averaged.times.optimizer < 2 * usual.times.optimizer


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_the_planner_counts_the_matrices_that_the_engine_makes_orthogonal(family: str) -> None:
    config = tiny_config(family)
    engine: list[tuple[int, int]] = []
    for parameter in layer_parameters(config, 0):
        if is_layer_matrix(parameter):
            engine += matrix_shapes(config, parameter) * (parameter.shape[0] if parameter.expert else 1)
    planner = [
        shape for tensor in layer_tensors(model_shape(config), experts=config.moe is not None) for shape in tensor
    ]
    assert sorted(planner) == sorted(engine)


def test_an_iteration_costs_what_its_three_products_do() -> None:
    # X·Xᵀ, its square, and with X again: [4, 6] x [6, 4], [4, 4] x [4, 4], [4, 4] x [4, 6], 2 FLOPs an element.
    assert newton_schulz_flops(6, 4, steps=3) == 3 * 2 * (4 * 4 * 6 + 4 * 4 * 4 + 4 * 4 * 6)


def test_more_ranks_share_the_work_until_each_has_one_matrix() -> None:
    options = EngineOptions(muon_steps=5)
    alone, eight = (predicted(options, dp=ranks, shard="zero1").times.optimizer for ranks in (1, 8))
    assert eight < alone / 4
    twice = predicted(replace(options, muon_steps=10), dp=1, shard="zero1").times.optimizer
    assert alone < twice < 2 * alone
