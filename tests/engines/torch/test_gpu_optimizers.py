"""Muon, spikes and averaged weights on a GPU: the compiled kernels give what a CPU does."""

from __future__ import annotations

import pytest
import torch

from support.models.tiny_models import tiny_config
from trainshed.engines.torch.model import RankModel, build_model
from trainshed.engines.torch.optimizer_registry import build_rank_optimizer
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.spikes import SpikeDetector
from trainshed.engines.torch.weight_average import WeightAverage
from trainshed.engines.torch.weights import init_model
from trainshed.models.decoder import Regularization
from trainshed.plan import resolve_layout
from trainshed.recipe import Layout
from trainshed.recipe.optimizer import Ema, Optimizer, Spikes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def model_on(device: str, family: str, precision: str) -> RankModel:
    config = tiny_config(family, layers=2)
    mesh = single_rank_mesh(resolve_layout(Layout(), config), torch.device(device))
    model = build_model(config, mesh, sequence_length=16, precision=precision, regularization=Regularization())
    init_model(model, seed=1)
    return model


def put_gradients(model: RankModel, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for shard in model.shards:
        gradient = torch.randn(shard.tensor.shape, generator=generator) * 0.1
        shard.tensor.grad = gradient.to(shard.tensor.device)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 2e-4), ("bf16", 2e-2)])
def test_muon_updates_as_on_a_cpu_and_a_skipped_step_is_none(family: str, precision: str, bound: float) -> None:
    groups = [{"match": "*norm.weight", "weight_decay": 0.2}, {"match": "layers.1.*", "lr_scale": 0.5}]
    options = Optimizer.model_validate({"name": "muon", "lr": 1e-2, "groups": groups})
    models = [model_on(device, family, precision) for device in ("cpu", "cuda")]
    optimizers = [build_rank_optimizer(model, options) for model in models]
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            put_gradients(model, step)
            skip = torch.tensor(float(step == 3), dtype=torch.float64, device=model.mesh.device)
            # Another rate in every step: nothing may be compiled for it.
            optimizer.step(1e-2 / (step + 1), torch.ones_like(skip) * 2, skip)
    for here, there in zip(models[0].shards, models[1].shards, strict=True):
        weight = here.local_tensor
        assert float((there.local_tensor.cpu() - weight).norm() / weight.norm()) < bound, here.name
    assert [float(optimizer.updates) for optimizer in optimizers] == [5.0, 5.0]
    torch.compiler.reset()


def test_an_update_with_spikes_and_averages_never_waits_for_the_device() -> None:
    model = model_on("cuda", "llama", "bf16")
    optimizer = build_rank_optimizer(model, Optimizer.model_validate({"name": "muon", "lr": 1e-2}))
    spikes, average = SpikeDetector(Spikes(window=2), model.mesh), WeightAverage(model, Ema(decay=0.9))
    average.start()
    zero = torch.zeros((), dtype=torch.float64, device="cuda")
    for step in range(5):
        put_gradients(model, step)
        if step == 4:  # compiled by now
            torch.cuda.set_sync_debug_mode("error")
        try:
            skip = spikes.skip(zero + step, zero + 1.0, zero)
            optimizer.step(1e-2, zero + 1.0, skip)
            average.update(skip)
            spikes.figures()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.compiler.reset()
