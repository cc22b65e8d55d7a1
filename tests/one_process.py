"""A model of the torch engine on one process: on the CPU, with fresh weights or those of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.engines.torch.build import RankModel, build_model, fill_model
from trainshed.engines.torch.mesh import alone
from trainshed.engines.torch.weights import Weight
from trainshed.models.decoder import Losses
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, ModelConfig

CPU = torch.device("cpu")
NO_LOSSES = Losses()


def one_process_model(
    config: ModelConfig,
    *,
    length: int,
    precision: str = "fp32",
    losses: Losses = NO_LOSSES,
    recompute: str = "none",
    micro_batch: int = 1,
    seed: int = 0,
) -> RankModel:
    """Build a whole model with fresh weights."""
    layout = resolve_layout(Layout.model_validate({"recompute": recompute, "micro_batch": micro_batch}), config)
    mesh = alone(layout, CPU)
    model = build_model(config, mesh, sequence_length=length, precision=precision, losses=losses)
    fill_model(model, seed)
    return model


def fill_from_hf(model: RankModel, folder: Path) -> None:
    """Give a model the weights that transformers saved."""
    with HfWeights(folder) as saved:
        for weight in model.weights:
            box = weight.local
            box.copy_(saved.read(weight.parameter, weight.offset, box.shape, box.dtype))


def by_name(model: RankModel) -> dict[str, Weight]:
    """The tensors of a model by their global names."""
    return {weight.name: weight for weight in model.weights}


def gradients(model: RankModel) -> dict[str, torch.Tensor]:
    """Take the gradients out of a model."""
    found = {weight.name: gradient.clone() for weight in model.weights if (gradient := weight.gradient) is not None}
    for weight in model.weights:
        weight.held.grad = None
    return found


def token_rows(config: ModelConfig, rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [rows, length]."""
    return torch.randint(config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
