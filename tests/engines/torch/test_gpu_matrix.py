"""Pairs of features that failed together on a GPU once: run by hand with `pytest -m gpu`; CI has no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.runs.device_ranks import DeviceRun
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.model import build_model, describe_float8_exclusions
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.step import StepMetrics, StepRunner
from trainshed.engines.torch.weights import init_model
from trainshed.launch.attempt import machine_environment
from trainshed.models.decoder import Regularization
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.train import Optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
_SIZES: dict[str, Any] = {
    "layers": 3,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "vocab_size": 1024,
    "max_positions": 512,
    "rope": {"base": 10000.0},
}
DENSE = ModelConfig.model_validate({"family": "llama", "ffn": 512, **_SIZES})
WINDOWED = ModelConfig.model_validate({"family": "mistral", "ffn": 512, "sliding_window": 48, **_SIZES})
EXPERTS = ModelConfig.model_validate(
    {"family": "qwen3_moe", "moe": {"experts": 8, "top_k": 2, "ffn": 128, "shared_ffn": 128}, **_SIZES}
)
LENGTH, ROWS = 256, 4
NEEDS_TWO = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs: gloo cannot do the collectives of layers on one"
)


def train(
    config: ModelConfig, device: str, precision: str, steps: int = 4, *, recompute: str = "none", dropout: float = 0.0
) -> tuple[list[StepMetrics], Callable[[], StepMetrics]]:
    """The metrics of some steps on random tokens, and a function that runs one more."""
    layout = resolve_layout(Layout.model_validate({"micro_batch": 2, "recompute": recompute}), config)
    place = torch.device(device)
    model = build_model(
        config,
        single_rank_mesh(layout, place),
        sequence_length=LENGTH,
        precision=precision,
        regularization=Regularization(z_loss=1e-4, moe_balance=0.01, moe_z=1e-3, dropout=dropout, seed=7),
        compile_blocks=place.type == "cuda",
    )
    init_model(model, seed=1)
    runner = StepRunner(model, AdamW(model.shards, Optimizer(lr=1e-3), place))
    generator = torch.Generator().manual_seed(0)

    def step() -> StepMetrics:
        rows = torch.randint(0, config.vocab_size, (ROWS, LENGTH + 1), generator=generator)
        samples = torch.arange(ROWS, device=place) if dropout else None
        inputs, labels = rows[:, :-1].contiguous().to(place), rows[:, 1:].contiguous().to(place)
        return runner.step(LocalBatch(ROWS, inputs, labels, samples), ROWS, 1e-3).read()

    return [step() for _ in range(steps)], step


def count_calls(step: Callable[[], object], *operations: str) -> int:
    """How often a step calls these operations, forward and backward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(event.count for event in profile.key_averages() if event.key in operations)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("config", [DENSE, EXPERTS, WINDOWED], ids=["dense", "experts", "window"])
def test_dropout_runs_in_compiled_blocks_of_every_kind(config: ModelConfig, recompute: str, precision: str) -> None:
    there, _ = train(config, "cuda", precision, dropout=0.2, recompute=recompute)
    here, _ = train(config, "cpu", "fp32", dropout=0.2)
    without, _ = train(config, "cpu", "fp32", 1)
    torch.compiler.reset()
    for gpu, cpu in zip(there, here, strict=True):
        assert gpu.loss == pytest.approx(cpu.loss, rel=3e-2)
        assert gpu.grad_norm == pytest.approx(cpu.grad_norm, rel=0.2)
    assert abs(here[0].grad_norm - without[0].grad_norm) > 2e-2 * without[0].grad_norm


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_recompute_beside_fp8_repeats_products_only_where_it_says_so(config: ModelConfig) -> None:
    losses, products = {}, {}
    for recompute in ("none", "selective", "full"):
        metrics, step = train(config, "cuda", "fp8", recompute=recompute)
        losses[recompute] = [each.loss for each in metrics]
        products[recompute] = count_calls(step, "aten::_scaled_mm")
        torch.compiler.reset()
    for recompute in ("selective", "full"):
        assert losses[recompute] == pytest.approx(losses["none"], rel=5e-3)
    assert products["none"] > 0, "the products were not in fp8"
    assert products["selective"] == products["none"] < products["full"]


def test_recompute_repeats_windowed_attention_only_where_it_says_so() -> None:
    counts = {}
    for recompute in ("none", "selective", "full"):
        _, step = train(WINDOWED, "cuda", "bf16", 2, recompute=recompute)
        counts[recompute] = count_calls(step, "aten::_flash_attention_forward")
        torch.compiler.reset()
    layers_and_micro_batches = 3 * 2
    assert counts["none"] == counts["selective"] == layers_and_micro_batches
    assert counts["full"] == 2 * layers_and_micro_batches


def test_experts_of_an_fp8_run_are_said_to_be_in_bf16() -> None:
    layout = resolve_layout(Layout.model_validate({"micro_batch": 2}), EXPERTS)
    mesh = single_rank_mesh(layout, torch.device("cuda"))
    model = build_model(EXPERTS, mesh, sequence_length=LENGTH, precision="fp8", regularization=Regularization())
    assert "experts multiply in bf16" in (describe_float8_exclusions(model) or "")


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,micro_batch=2",
        "dp=2,shard=full,micro_batch=1",
        "dp=2,shard=zero2,micro_batch=1",
        *(
            pytest.param(layout, marks=NEEDS_TWO)
            for layout in (
                "cp=2,micro_batch=2",
                "cp=2,recompute=selective,micro_batch=2",
                "tp=2,micro_batch=2",
                "tp=2,overlap=tp,micro_batch=2",
                "tp=2,overlap=tp,recompute=full,micro_batch=2",
            )
        ),
    ],
)
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_two_ranks_train_in_bf16_as_one_process_does(config: ModelConfig, layout: str) -> None:
    alone = DeviceRun(config, "micro_batch=2", "cuda", "bf16").losses()
    spread = DeviceRun(config, layout, "cuda", "bf16").losses()
    for (loss, norm), (other_loss, other_norm) in zip(alone, spread, strict=True):
        assert other_loss == pytest.approx(loss, rel=2e-3)
        assert other_norm == pytest.approx(norm, rel=5e-2)


def test_experts_of_two_ranks_give_the_loss_of_one() -> None:
    alone = DeviceRun(EXPERTS, "micro_batch=2", "cuda", "bf16").losses()
    spread = DeviceRun(EXPERTS, "dp=2,ep=2,micro_batch=2", "cuda", "bf16").losses()
    for (loss, norm), (other_loss, other_norm) in zip(alone, spread, strict=True):
        assert other_loss == pytest.approx(loss, rel=2e-3)
        assert other_norm == pytest.approx(norm, rel=5e-2)


@NEEDS_TWO
def test_an_uneven_vocabulary_on_two_ranks_gives_the_loss_of_one() -> None:
    """65,537 rows and 4,096 tokens: by its own rows one rank would cut the loss into two slices, the other into one."""
    config = DENSE.model_copy(update={"vocab_size": 65537, "layers": 1, "max_positions": 1024})
    runs = (
        DeviceRun(config, layout, "cuda", "bf16", steps=2, rows=4, length=1024)
        for layout in ("micro_batch=4", "tp=2,micro_batch=4")
    )
    alone, spread = (run.losses() for run in runs)
    for (loss, norm), (other_loss, other_norm) in zip(alone, spread, strict=True):
        assert other_loss == pytest.approx(loss, rel=2e-3)
        assert other_norm == pytest.approx(norm, rel=5e-2)


def test_memory_of_ranks_grows_in_segments_that_expand() -> None:
    program = (
        "import torch; x = torch.empty(1 << 26, device='cuda'); "
        "print(all(segment['is_expandable'] for segment in torch.cuda.memory_snapshot()))"
    )
    unset = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    environment = {**unset, **machine_environment("bf16")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
