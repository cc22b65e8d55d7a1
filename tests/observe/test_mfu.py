"""MFU is a fraction of a named dense peak, unknown where the peak is, and refused where it cannot be."""

from __future__ import annotations

import pytest

from trainshed.catalog import gpu, model_preset
from trainshed.errors import TrainshedError
from trainshed.models.parameters import lora_parameter_count
from trainshed.observe.mfu import FORMULA, measure_mfu
from trainshed.plan.flops import adapter_flops, token_flops, training_flops_per_token
from trainshed.recipe import Lora
from trainshed.recipe.optimizer import ParameterGroup

CONFIG = model_preset("llama3-8b")
H200 = gpu("h200")
LENGTH = 8192


def tokens_per_second(tflops: float) -> float:
    return tflops * 1e12 / training_flops_per_token(CONFIG, LENGTH)


def test_half_the_peak_is_an_mfu_of_one_half() -> None:
    found = measure_mfu(tokens_per_second(989.4 / 2), CONFIG, LENGTH, precision="bf16", gpu=H200)
    assert found.mfu == pytest.approx(0.5)
    assert found.model_tflops == pytest.approx(989.4 / 2)
    assert (found.peak_tflops, found.peak_dtype) == (989.4, "bf16")
    assert (found.formula, found.source, found.unknown) == (FORMULA, H200.source, None)
    assert found.mfu_of_bf16_peak is None


def test_full_attention_counts_every_key() -> None:
    found = measure_mfu(tokens_per_second(400), CONFIG, LENGTH, precision="bf16", gpu=H200)
    full = training_flops_per_token(CONFIG, LENGTH, causal=False)
    assert found.mfu_full_attention == pytest.approx(tokens_per_second(400) * full / 989.4e12)
    assert found.mfu is not None
    assert found.mfu_full_attention > found.mfu


@pytest.mark.parametrize(("precision", "peak"), [("fp8", 1978.9), ("tf32", 494.7), ("fp32", 66.9), ("fp64", 66.9)])
def test_each_precision_is_held_against_its_own_peak(precision: str, peak: float) -> None:
    found = measure_mfu(tokens_per_second(20), CONFIG, LENGTH, precision=precision, gpu=H200)
    assert (found.peak_dtype, found.peak_tflops) == (precision, peak)
    assert found.mfu == pytest.approx(20 / peak)


def test_an_fp8_run_shows_the_bf16_figure_too_even_above_one() -> None:
    found = measure_mfu(tokens_per_second(1200), CONFIG, LENGTH, precision="fp8", gpu=H200)
    assert found.mfu == pytest.approx(1200 / 1978.9)
    assert found.mfu_of_bf16_peak == pytest.approx(1200 / 989.4)


def test_experts_that_multiply_in_bf16_are_held_against_the_bf16_peak() -> None:
    config = model_preset("mixtral-8x7b")
    flops = token_flops(config, LENGTH)
    experts = 3 * 2 * config.layers * 2 * 3 * config.hidden * config.moe.ffn  # type: ignore[union-attr]
    assert 3 * flops.experts == experts
    share = experts / training_flops_per_token(config, LENGTH)
    # At this speed both parts run at their peaks.
    seconds = 3 * flops.forward * ((1 - share) / 1978.9e12 + share / 989.4e12)
    found = measure_mfu(1 / seconds, config, LENGTH, precision="fp8", gpu=H200, engine="torch")
    assert found.mfu == pytest.approx(1.0)
    assert found.peak_dtype == f"fp8, experts ({share:.0%} of the FLOPs) bf16"
    assert 0.7 < share < 0.9
    half = measure_mfu(0.5 / seconds, config, LENGTH, precision="fp8", gpu=H200, engine="megatron")
    assert (half.peak_dtype, half.peak_tflops) == ("fp8", 1978.9), "its experts are in fp8"
    wide = measure_mfu(0.5 / seconds, config, LENGTH, precision="bf16", gpu=H200, engine="torch")
    assert (wide.peak_dtype, wide.peak_tflops) == ("bf16", 989.4)


def test_experts_that_a_group_freezes_are_a_smaller_share_of_the_flops() -> None:
    config = model_preset("mixtral-8x7b")
    groups = [ParameterGroup.model_validate({"match": "*.mlp.experts.*", "freeze": True})]
    flops = token_flops(config, LENGTH, groups=groups)
    assert flops.frozen == flops.frozen_experts == flops.experts
    share = 2 * flops.experts / training_flops_per_token(config, LENGTH, groups=groups)
    assert flops.expert_share() == pytest.approx(share)
    found = measure_mfu(1000.0, config, LENGTH, precision="fp8", gpu=H200, engine="torch", groups=groups)
    assert found.peak_dtype == f"fp8, experts ({share:.0%} of the FLOPs) bf16"
    assert found.peak_tflops == pytest.approx(1 / ((1 - share) / 1978.9 + share / 989.4))


def test_an_unknown_gpu_has_no_mfu_and_says_why() -> None:
    found = measure_mfu(1000.0, CONFIG, LENGTH, precision="bf16", gpu=None, device_name="NVIDIA H900")
    assert (found.mfu, found.mfu_full_attention, found.peak_tflops, found.source) == (None, None, None, None)
    assert found.unknown == "the catalog knows no peak of NVIDIA H900"
    assert found.model_tflops == pytest.approx(1000.0 * training_flops_per_token(CONFIG, LENGTH) / 1e12)
    nameless = measure_mfu(1000.0, CONFIG, LENGTH, precision="bf16", gpu=None)
    assert nameless.unknown == "the catalog knows no peak of this device"


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_dtype_without_a_published_peak_has_no_mfu(precision: str) -> None:
    found = measure_mfu(10.0, CONFIG, LENGTH, precision=precision, gpu=gpu("a100-80gb"))
    assert found.mfu is None
    assert found.unknown == f"no {precision} peak is published for NVIDIA A100-SXM4-80GB"


def test_more_than_the_peak_is_an_error_that_shows_every_figure() -> None:
    with pytest.raises(TrainshedError) as caught:
        measure_mfu(tokens_per_second(1500), CONFIG, LENGTH, precision="bf16", gpu=H200, device_name="NVIDIA H200")
    assert caught.value.what == "an MFU of 152% is not possible: 1500.0 TFLOP/s of a bf16 peak of 989.4"
    assert caught.value.where == "NVIDIA H200"
    hint = caught.value.hint or ""
    assert "tokens/s/GPU" in hint
    assert "sequence length 8192" in hint
    assert H200.source in hint


def test_frozen_weights_cost_two_forwards_and_adapters_three() -> None:
    lora = Lora.model_validate({"rank": 16, "alpha": 32, "targets": ["all-linear"]})
    adapters = 2 * lora_parameter_count(CONFIG, lora)
    whole = token_flops(CONFIG, LENGTH)
    expected = 2 * whole.matmul + 3 * whole.attention + 3 * adapters
    assert training_flops_per_token(CONFIG, LENGTH, lora=lora) == expected
    frozen = measure_mfu(1000.0, CONFIG, LENGTH, precision="bf16", gpu=H200, lora=lora)
    assert frozen.model_tflops == pytest.approx(1000.0 * expected / 1e12)


def test_a_token_meets_the_adapters_of_its_own_experts() -> None:
    mixtral = model_preset("mixtral-8x7b")
    lora = Lora.model_validate({"rank": 16, "alpha": 32, "targets": ["experts"]})
    assert adapter_flops(mixtral, lora) == 2 * lora_parameter_count(mixtral, lora) // 4
