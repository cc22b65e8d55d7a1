"""Checkpoints of LoRA runs with random adapters, as the engine's own writer saves them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from trainshed.checkpoints.lora.checkpoint_spec import AdapterSpec
from trainshed.checkpoints.native.shards import TensorShard
from trainshed.checkpoints.native.writer import CheckpointWriter
from trainshed.models.parameters import AddedRows, lora_parameters
from trainshed.recipe import Lora, ModelConfig
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt


def random_adapters(
    config: ModelConfig, lora: Lora, seed: int = 0, added: AddedRows | None = None
) -> dict[str, torch.Tensor]:
    """Make adapters that change what a tiny model says, with the rows of added tokens."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for parameter in lora_parameters(config, lora, added):
        name, shape = parameter.name, parameter.shape
        noise = torch.randn(shape, generator=random)
        if name.endswith(".magnitude"):
            tensors[name] = 1.0 + 0.2 * noise
        else:
            tensors[name] = noise * (shape[-1] ** -0.5 if name.endswith(".a") else 0.2)
    return tensors


def save_lora_checkpoint(
    run: Path,
    config: ModelConfig,
    lora: Lora,
    base: str | Path,
    *,
    seed: int = 0,
    sha256: str | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    added: AddedRows | None = None,
) -> Path:
    """Save adapters and an optimizer state as step 10 of a run, and return the run's folder.

    `config` is the architecture of the base; with `added` tokens that of the run may have more rows.
    """
    config = config if added is None else added.grown(config)
    adapters = random_adapters(config, lora, seed, added) if tensors is None else tensors
    state = {f"model.{name}": tensor for name, tensor in adapters.items()}
    state |= {f"optimizer.exp_avg.{name}": torch.zeros_like(tensor) for name, tensor in adapters.items()}
    address = str(base) if "://" in str(base) else os.path.abspath(base)
    spec = {
        "run": f"{run.parent.name}/{run.name}",
        "model": config.model_dump(mode="json", by_alias=True, exclude_none=True),
        **AdapterSpec(lora, address, sha256, added).to_plain(),
    }
    run.mkdir(parents=True, exist_ok=True)
    with CheckpointWriter(take_attempt(LocalStore(run), ""), spec=spec) as writer:
        shards = {name: TensorShard(tuple(each.shape), (0,) * each.dim(), each) for name, each in state.items()}
        writer.save(10, shards, {"consumed_samples": 80}, blocking=True)
    return run
