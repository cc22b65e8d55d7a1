"""Latent attention on a GPU: run by hand with `pytest -m gpu tests/engines/torch/test_gpu_latent.py`; CI has none."""

from __future__ import annotations

import pytest
import torch

from support.models.one_process import gradient
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.model import build_model
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.step import StepMetrics, StepRunner
from trainshed.engines.torch.weights import init_model
from trainshed.models.attention import AttentionRule, causal_attention
from trainshed.models.decoder import Regularization
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, ModelConfig
from trainshed.recipe.train import Optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LATENT = ModelConfig.model_validate(
    {
        "family": "deepseek_v3",
        "layers": 3,
        "hidden": 256,
        "heads": 4,
        "ffn": 512,
        "vocab_size": 1024,
        "max_positions": 512,
        "rope": {"base": 10000.0, "scaling": {"kind": "yarn", "factor": 4.0, "original_positions": 128}},
        "mla": {"query_rank": 96, "kv_rank": 64, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
        "moe": {
            "experts": 8,
            "top_k": 2,
            "ffn": 128,
            "shared_ffn": 128,
            "scores": "sigmoid",
            "score_bias": True,
            "groups": 4,
            "top_groups": 2,
            "scale": 2.5,
            "dense_first": 1,
        },
    }
)
LENGTH, BATCH, RATE = 256, 4, 0.001


def outcomes(
    device: str, precision: str, recompute: str = "none", steps: int = 5
) -> tuple[list[StepMetrics], list[torch.Tensor]]:
    """What some steps give, and the biases of the routers after them."""
    place = torch.device(device)
    layout = resolve_layout(Layout.model_validate({"micro_batch": 2, "recompute": recompute}), LATENT)
    model = build_model(
        LATENT,
        single_rank_mesh(layout, place),
        sequence_length=LENGTH,
        precision=precision,
        regularization=Regularization(moe_balance=0.01, moe_bias_update=RATE, seed=7),
        compile_blocks=place.type == "cuda",
    )
    init_model(model, seed=1)
    runner = StepRunner(model, AdamW(model.shards, Optimizer.model_validate({"lr": 1e-3}), place))
    generator = torch.Generator().manual_seed(0)
    metrics = []
    for _ in range(steps):
        rows = torch.randint(0, LATENT.vocab_size, (BATCH, LENGTH + 1), generator=generator)
        inputs, labels = rows[:, :-1].contiguous().to(place), rows[:, 1:].contiguous().to(place)
        metrics.append(runner.step(LocalBatch(BATCH, inputs, labels, None), BATCH, 1e-3).read())
    torch.compiler.reset()
    return metrics, [shard.local_tensor.cpu() for shard in model.score_biases]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 2e-3), ("bf16", 3e-2)])
def test_a_gpu_computes_what_a_cpu_computes(precision: str, bound: float, recompute: str) -> None:
    (there, biases), (here, _) = outcomes("cuda", precision, recompute), outcomes("cpu", "fp32")
    for gpu, cpu in zip(there, here, strict=True):
        assert gpu.loss == pytest.approx(cpu.loss, rel=bound)
        assert gpu.grad_norm == pytest.approx(cpu.grad_norm, rel=5 * bound)
    for bias in biases:
        assert bias.dtype == torch.float32
        assert 0 < bias.abs().max() <= 5.001 * RATE, "each step moves it once, also with recompute"


@pytest.mark.parametrize("queries", [512, 128])
def test_values_narrower_than_keys_attend_as_on_a_cpu(queries: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(queries, 2, 4, 192), (512, 2, 4, 192), (512, 2, 4, 128)]
    q, k, v = here = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    expected = causal_attention(q, k, v, AttentionRule())
    q, k, v = there = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in here]
    got = causal_attention(q, k, v, AttentionRule())
    expected.square().sum().backward()
    got.float().square().sum().backward()
    torch.testing.assert_close(got.float().cpu(), expected, rtol=3e-2, atol=3e-2)
    for x, y in zip(there, here, strict=True):
        scale = gradient(y).abs().max().item()
        torch.testing.assert_close(gradient(x).float().cpu(), y.grad, rtol=5e-2, atol=2e-2 * scale)
