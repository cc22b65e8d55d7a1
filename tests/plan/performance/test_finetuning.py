"""Adapters, narrow weights, documents and DPO: what each changes of a step, and of the memory, and by how much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainshed.catalog.models import model_preset
from trainshed.plan import resolve_layout
from trainshed.plan.flops import training_flops_per_token
from trainshed.plan.lora_shape import QUANTIZED_BYTES, LoraShape, lora_shape
from trainshed.plan.model_shape import model_shape
from trainshed.plan.performance.engine_constants import EngineOptions, engine_constants
from trainshed.plan.performance.layer_time import KernelTimes
from trainshed.plan.performance.memory import layer_activation_bytes, trained_bytes
from trainshed.plan.performance.prediction import LayoutPrediction, predict
from trainshed.plan.training_shape import TrainingShape, hardware_of_gpu
from trainshed.recipe import Layout, Lora

CONFIG = model_preset("llama3-8b")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
LORA = LoraShape(16, ATTENTION)
GIB = 2**30
FULL = TrainingShape(model_shape(CONFIG), 4096, 32, "bf16", hardware_of_gpu("h200"), 8, engine_constants("torch"))
ADAPTERS = replace(FULL, lora=LORA)


def predicted(training: TrainingShape, **keys: object) -> LayoutPrediction:
    return predict(training, resolve_layout(Layout.model_validate(keys), CONFIG, world_size=training.gpus))


def test_a_frozen_matmul_has_no_weight_gradient() -> None:
    matrix = FULL.model.attention_matrices[0]
    trained, frozen = (KernelTimes(training) for training in (FULL, ADAPTERS))
    times = trained.matmul(4096, matrix, 1)
    assert trained.projection(4096, matrix, 1) == (times.forward, times.input_gradient + times.weight_gradient)
    assert frozen.projection(4096, matrix, 1) == (times.forward, times.input_gradient)


def test_adapters_take_two_thirds_of_the_matmuls_and_a_little_of_their_own() -> None:
    full, adapters = predicted(FULL), predicted(ADAPTERS)
    assert 0.68 < adapters.times.compute / full.times.compute < 0.85
    more = predicted(replace(FULL, lora=LoraShape(16, EVERY)))
    assert adapters.times.compute < more.times.compute < full.times.compute


def test_only_adapters_are_reduced_accumulated_and_updated() -> None:
    full, adapters = predicted(FULL, shard="zero1"), predicted(ADAPTERS, shard="zero1")
    assert adapters.times.dp_exposed < full.times.dp_exposed / 50
    assert adapters.times.optimizer < full.times.optimizer / 50


def test_the_states_of_adapters_are_fp32_and_the_base_is_not_trained() -> None:
    memory = predicted(ADAPTERS, shard="none").memory
    adapters = LORA.weights(FULL.model)
    assert memory.frozen * GIB == pytest.approx(2 * FULL.model.weights)
    assert memory.weights * GIB == pytest.approx(2 * FULL.model.weights + 4 * adapters)
    assert memory.optimizer * GIB == pytest.approx(8 * adapters)
    assert memory.trained * GIB <= 16 * adapters
    assert memory.total == pytest.approx(memory.allocated + memory.reserve)
    assert predicted(FULL).memory.frozen == 0


def test_sharding_shares_out_the_base_only_where_it_is_full() -> None:
    whole, shared = (predicted(ADAPTERS, shard=shard).memory for shard in ("zero1", "full"))
    assert shared.frozen == pytest.approx(whole.frozen / 8)
    assert whole.optimizer == pytest.approx(shared.optimizer)


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_narrow_weights_are_smaller_and_unpacked_in_every_pass(quantize: str) -> None:
    lora = lora_shape(Lora(rank=16, alpha=32.0, quantize=quantize))
    plain, narrow = predicted(ADAPTERS), predicted(replace(ADAPTERS, lora=lora))
    ends = 2 * FULL.model.head_weights + FULL.model.hidden
    layers = FULL.model.weights - ends
    assert narrow.memory.frozen * GIB == pytest.approx(QUANTIZED_BYTES[quantize] * layers + 2 * ends)
    assert 1 < narrow.times.compute / plain.times.compute < 1.15


def test_what_no_weight_gradient_reads_is_not_kept() -> None:
    layout = resolve_layout(Layout(), CONFIG, world_size=8)

    def kept(lora: LoraShape | None) -> float:
        return layer_activation_bytes(replace(FULL, lora=lora), layout, experts=False)[0]

    constants, tokens = FULL.constants, 4096
    queries, everything, none = kept(LoraShape(16, ("q_proj",))), kept(LoraShape(16, EVERY)), kept(None)
    inner, hidden = constants.inner_bytes * CONFIG.ffn / 3, constants.hidden_bytes * CONFIG.hidden / 4
    # The MLP's input and its last inner activation are those of matmuls without an adapter.
    assert queries == pytest.approx(none - tokens * (inner + hidden) + tokens * 2 * 16)
    # All inputs are read by adapters: nothing is saved.
    assert everything == pytest.approx(none + tokens * 2 * 16 * 7)
    # With dropout each adapter has its own input, and a mask.
    dropped = kept(LoraShape(16, ("q_proj",), dropout=True))
    assert dropped == pytest.approx(queries + tokens * 3 * CONFIG.hidden)


def test_documents_that_are_kept_apart_make_attention_cheaper_and_nothing_else() -> None:
    apart, whole = predicted(replace(FULL, document_length=256.0)), predicted(FULL)
    assert apart.step_seconds < whole.step_seconds
    assert apart.memory == whole.memory
    assert predicted(replace(FULL, document_length=1e6)).step_seconds == whole.step_seconds


def test_a_reference_is_a_forward_pass_and_for_full_training_a_copy() -> None:
    full, dpo = predicted(FULL), predicted(replace(FULL, preference=True))
    assert 1.28 < dpo.times.compute / full.times.compute < 1.4
    assert dpo.memory.frozen * GIB == pytest.approx(2 * FULL.model.weights)
    assert dpo.memory.total > full.memory.total + dpo.memory.frozen
    adapters, preference = predicted(ADAPTERS), predicted(replace(ADAPTERS, preference=True))
    assert preference.memory.frozen == adapters.memory.frozen
    assert preference.times.compute > 1.3 * adapters.times.compute


def test_optimizer_states_in_16_bits_save_4_bytes_a_weight() -> None:
    usual, narrow = FULL, replace(FULL, options=EngineOptions(bf16_states=True))
    assert trained_bytes(usual).optimizer - trained_bytes(narrow).optimizer == 4
    saved = predicted(usual, shard="none").memory.optimizer - predicted(narrow, shard="none").memory.optimizer
    assert saved * GIB == pytest.approx(4 * FULL.model.weights)
    assert predicted(narrow).times.optimizer < predicted(usual).times.optimizer


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("lora", [None, Lora(rank=16, alpha=32.0)])
def test_a_plan_counts_the_flops_that_the_meter_counts(lora: Lora | None, reference: bool) -> None:
    training = replace(
        FULL, lora=None if lora is None else lora_shape(lora), document_length=512.0, preference=reference
    )
    counted = training_flops_per_token(CONFIG, 4096, document_length=512.0, lora=lora, reference=reference)
    assert training.flops_per_token == pytest.approx(counted)
    prediction = predicted(training)
    assert prediction.tflops_per_gpu == pytest.approx(counted * prediction.tokens_per_second_per_gpu / 1e12)


def test_tensor_parallel_gathers_inputs_again_only_for_adapters_that_read_them() -> None:
    full = predicted(FULL, tp=2).times.tp
    nothing, attention = (
        predicted(replace(FULL, lora=LoraShape(16, projections)), tp=2).times.tp
        for projections in (("o_proj", "down_proj"), ("q_proj",))
    )
    # Four collectives around two blocks in each pass, and two more in backward for the inputs of both.
    assert nothing == pytest.approx(full * 8 / 10)
    assert attention == pytest.approx(full * 9 / 10)
