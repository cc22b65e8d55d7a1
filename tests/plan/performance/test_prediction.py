"""One layout predicted: parts that add up, and that move the way the hardware would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainshed.catalog.models import model_preset
from trainshed.observe.mfu import measure_mfu
from trainshed.plan import resolve_layout
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import EngineOptions, engine_constant_names, engine_constants
from trainshed.plan.performance.gpu_efficiency import gpu_efficiency
from trainshed.plan.performance.layer_time import collective_group
from trainshed.plan.performance.prediction import LayoutPrediction, predict, predict_memory, predict_seconds
from trainshed.plan.training_shape import TrainingShape, hardware_of_gpu
from trainshed.recipe import Layout

CONFIG = model_preset("llama3-8b")


def training_of(**changes: object) -> TrainingShape:
    training = TrainingShape(
        model_shape(CONFIG), 8192, 128, "bf16", hardware_of_gpu("h100"), 64, engine_constants("megatron")
    )
    return replace(training, **changes)


def predicted(training: TrainingShape, **keys: object) -> LayoutPrediction:
    return predict(training, resolve_layout(Layout.model_validate(keys), CONFIG, world_size=training.gpus))


@pytest.mark.parametrize("name", engine_constant_names())
def test_the_parts_of_a_step_add_up(name: str) -> None:
    found = predicted(training_of(constants=engine_constants(name)), tp=2, pp=2)
    assert found.times.total == pytest.approx(found.step_seconds)
    assert min(vars(found.times).values()) >= 0
    assert 0 < found.mfu < 1
    memory = found.memory
    assert memory.total == pytest.approx(memory.allocated + memory.reserve)
    assert len(found.stages) == 2


def test_seconds_and_memory_alone_are_those_of_the_whole_prediction() -> None:
    training = training_of()
    layout = resolve_layout(Layout(tp=2, pp=4, vp=2), CONFIG, world_size=64)
    found = predict(training, layout)
    assert predict_seconds(training, layout) == pytest.approx(found.step_seconds)
    assert [stage.memory for stage in found.stages] == list(predict_memory(training, layout))


def test_tensor_parallel_across_nodes_costs_more_than_inside() -> None:
    near, far = predicted(training_of(), tp=8), predicted(replace(training_of(), hardware=_one_gpu_nodes()), tp=8)
    assert far.times.tp > 2 * near.times.tp


def _one_gpu_nodes():
    return replace(hardware_of_gpu("h100"), gpus_per_node=1, link_domain=1)


def test_megatron_hides_tensor_parallel_only_where_it_is_asked_to() -> None:
    plain = predicted(training_of(), tp=4)
    hidden = predicted(training_of(options=EngineOptions(tp_overlap=True)), tp=4)
    assert hidden.times.tp < plain.times.tp


def test_a_fused_dispatcher_crosses_the_network_once_per_node_and_token() -> None:
    config = model_preset("qwen3-30b-a3b")
    training = replace(training_of(), model=model_shape(config), hardware=hardware_of_gpu("h100"))

    def seconds(ep: int, *, fused: bool) -> float:
        layout = resolve_layout(Layout(ep=ep), config, world_size=64)
        return predict(replace(training, options=EngineOptions(fused_dispatch=fused)), layout).times.ep

    inside = seconds(8, fused=True) / seconds(8, fused=False)
    across = seconds(32, fused=True) / seconds(32, fused=False)
    assert across < inside < 1


def test_recomputation_trades_time_for_memory() -> None:
    training = training_of()
    none, full = predicted(training, micro_batch=2), predicted(training, micro_batch=2, recompute="full")
    assert full.memory.activations < none.memory.activations / 4
    assert 1.15 < full.times.compute / none.times.compute < 1.4


def test_sharding_shares_out_what_it_says() -> None:
    training = training_of()
    states = {shard: predicted(training, shard=shard).memory for shard in ("none", "zero1", "zero2", "full")}
    assert states["zero1"].optimizer == pytest.approx(states["none"].optimizer / 64)
    assert states["zero2"].gradients == pytest.approx(states["none"].gradients / 64)
    assert states["full"].weights == pytest.approx(states["none"].weights / 64)
    assert states["zero1"].weights == states["none"].weights


@pytest.mark.parametrize("pp", [1, 4])
def test_gradients_that_stay_in_shards_are_reduced_in_every_backward_pass(pp: int) -> None:
    training = training_of(constants=engine_constants("torch"), options=EngineOptions(overlap=False))
    spent = {shard: predicted(training, pp=pp, shard=shard).times.dp_exposed for shard in ("zero1", "zero2", "full")}
    gathered = predicted(replace(training, constants=replace(training.constants, reduce_bytes=0.0)), pp=pp)
    micro_batches = 128 // (64 // pp)
    reduction = spent["zero1"] - gathered.times.dp_exposed
    assert reduction > 0
    assert spent["zero2"] - spent["zero1"] == pytest.approx((micro_batches - 1) * reduction, rel=0.01)
    whole, parts = (predicted(training, pp=pp, shard=shard).memory for shard in ("zero1", "zero2"))
    assert parts.gradients < whole.gradients / 8


def test_experts_beside_fp8_take_the_time_and_the_peak_that_the_engine_gives_them() -> None:
    config = model_preset("mixtral-8x7b")
    layout = resolve_layout(Layout(ep=8, shard="full"), config, world_size=64)

    def of(engine: str, precision: str) -> LayoutPrediction:
        constants = engine_constants(engine)
        return predict(training_of(model=model_shape(config), constants=constants, precision=precision), layout)

    ours, theirs = of("torch", "fp8"), of("megatron", "fp8")
    assert theirs.peak_tflops == hardware_of_gpu("h100").gpu.dense_tflops.fp8
    measured = measure_mfu(
        ours.tokens_per_second_per_gpu, config, 8192, precision="fp8", gpu=hardware_of_gpu("h100").gpu, engine="torch"
    )
    assert ours.peak_tflops == pytest.approx(measured.peak_tflops)
    assert ours.mfu == pytest.approx(measured.mfu)
    gain, gain_of_all = (of(name, "bf16").step_seconds / of(name, "fp8").step_seconds for name in ("torch", "megatron"))
    assert 1.0 < gain < gain_of_all


def test_the_first_stages_of_a_pipeline_hold_the_most_micro_batches() -> None:
    held = [memory.activations for memory in predict_memory(*_pipeline())]
    assert held == sorted(held, reverse=True)
    assert held[0] > 3 * held[-1]


def _pipeline():
    return training_of(), resolve_layout(Layout(pp=4), CONFIG, world_size=64)


def test_a_ring_through_a_node_uses_all_its_network_shares() -> None:
    training = training_of(constants=replace(engine_constants("torch"), rails=1.0))
    across, alone = collective_group(64, 1, training), collective_group(8, 8, training)
    assert across.in_node == 8
    link = training.hardware.link_gb_per_s * training.constants.link
    assert across.gb_per_s == pytest.approx(min(8 * alone.gb_per_s, link))


def test_a_fit_can_try_another_efficiency_of_the_gpu() -> None:
    training = training_of()
    slower = replace(training, gpu_efficiency=replace(training.efficiency, forward=training.efficiency.forward / 2))
    assert predicted(slower).times.compute > predicted(training).times.compute
    assert training.efficiency == gpu_efficiency("h100-sxm")


def test_a_calibration_scales_the_step() -> None:
    plain, scaled = predicted(training_of()), predicted(training_of(calibration=1.2, memory_calibration=0.9))
    assert scaled.step_seconds == pytest.approx(1.2 * plain.step_seconds)
    assert scaled.memory.allocated == pytest.approx(0.9 * plain.memory.allocated)


def test_a_nearly_full_card_is_slow() -> None:
    roomy = training_of(constants=replace(engine_constants("torch"), full_memory_slowdown=2.0))
    small = roomy.hardware.gpu.model_copy(update={"memory_gib": 1.0})
    full = replace(roomy, hardware=replace(roomy.hardware, gpu=small))
    assert predicted(full, tp=8).step_seconds == pytest.approx(3 * predicted(roomy, tp=8).step_seconds)


def test_the_published_step_of_the_gke_recipe_is_predicted() -> None:
    """Llama-3-70B on 128 H100 (A3 Mega), FP8: 45.81 s in the recipe's own log, a row of no table that was fitted to."""
    config = model_preset("llama3-70b")
    layout = resolve_layout(Layout(tp=4, pp=4, vp=5, cp=2), config, world_size=128)
    training = TrainingShape(
        model_shape(config), 8192, 1024, "fp8", hardware_of_gpu("h100"), 128, engine_constants("megatron")
    )
    assert predict_seconds(training, layout) == pytest.approx(45.81, rel=0.08)
