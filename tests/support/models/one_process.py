"""A model of the torch engine on one process: on the CPU, with fresh weights or those of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.engines.torch.model import ParameterShard, RankModel, build_model
from trainshed.engines.torch.parallel import single_rank_mesh
from trainshed.engines.torch.weights import init_model
from trainshed.models.decoder import Regularization
from trainshed.models.parameters import AddedRows
from trainshed.plan.layout import resolve_layout
from trainshed.recipe import Layout, Lora, ModelConfig
from trainshed.recipe.optimizer import ParameterGroup

CPU = torch.device("cpu")
NO_LOSSES = Regularization()


def one_process_model(
    config: ModelConfig,
    *,
    length: int,
    precision: str = "fp32",
    regularization: Regularization = NO_LOSSES,
    recompute: str = "none",
    micro_batch: int = 1,
    seed: int = 0,
    lora: Lora | None = None,
    offload: str | None = None,
    added: AddedRows | None = None,
    groups: Sequence[ParameterGroup] = (),
) -> RankModel:
    """Build a whole model with fresh weights."""
    keys = {"recompute": recompute, "micro_batch": micro_batch, "offload": offload}
    layout = resolve_layout(Layout.model_validate(keys), config)
    mesh = single_rank_mesh(layout, CPU)
    model = build_model(
        config,
        mesh,
        sequence_length=length,
        precision=precision,
        regularization=regularization,
        lora=lora,
        added=added,
        groups=groups,
    )
    init_model(model, seed)
    return model


def fill_from_hf(model: RankModel, folder: Path) -> None:
    """Give a model the weights that transformers saved."""
    with HfWeights(folder) as saved:
        for weight in (*model.shards, *model.frozen_shards):
            box = weight.local_tensor
            box.copy_(saved.read(weight.parameter, weight.offset, box.shape, box.dtype))


def by_name(model: RankModel) -> dict[str, ParameterShard]:
    """The tensors of a model by their global names."""
    return {weight.name: weight for weight in model.shards}


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return the gradient that backward has given a tensor."""
    assert tensor.grad is not None
    return tensor.grad


def gradients(model: RankModel) -> dict[str, torch.Tensor]:
    """Take the gradients out of a model."""
    found = {weight.name: gradient.clone() for weight in model.shards if (gradient := weight.gradient) is not None}
    for weight in model.shards:
        weight.tensor.grad = None
    return found


def token_rows(config: ModelConfig, rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [rows, length]."""
    return torch.randint(config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
