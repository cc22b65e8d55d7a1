"""Checkpoints of LoRA runs with random adapters, as the engine's own writer saves them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from trainshed.checkpoints.lora.checkpoint_spec import AdapterSpec
from trainshed.checkpoints.native.shards import TensorShard
from trainshed.checkpoints.native.writer import CheckpointWriter
from trainshed.recipe import Lora, ModelConfig
from trainshed.storage import LocalStore
from trainshed.storage.attempts import take_attempt


def adapter_shapes(config: ModelConfig, lora: Lora) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a run's adapters."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    up = "gate_up" if config.gated else "up"
    projections: list[tuple[str, str, tuple[int, ...], int, int]] = [
        ("attention.qkv", "q_proj", (), config.hidden, queries),
        ("attention.qkv", "k_proj", (), config.hidden, keys),
        ("attention.qkv", "v_proj", (), config.hidden, keys),
        ("attention.out", "o_proj", (), queries, config.hidden),
    ]
    gates = ("gate_proj", "up_proj") if config.gated else ("up_proj",)
    if config.moe is None:
        assert config.ffn is not None
        projections += [(f"mlp.{up}", gate, (), config.hidden, config.ffn) for gate in gates]
        projections.append(("mlp.down", "down_proj", (), config.ffn, config.hidden))
    else:
        stacked, ffn = (config.moe.experts,), config.moe.ffn
        projections += [("mlp.experts", gate, stacked, config.hidden, ffn) for gate in gates]
        projections.append(("mlp.experts", "down_proj", stacked, ffn, config.hidden))
        if shared := config.moe.shared_ffn:
            projections += [(f"mlp.shared.{up}", gate, (), config.hidden, shared) for gate in gates]
            projections.append(("mlp.shared.down", "down_proj", (), shared, config.hidden))
    for layer in range(config.layers):
        for module, projection, stacked, inputs, outputs in projections:
            if ("experts" if stacked else projection) not in lora.projections:
                continue
            prefix = f"layers.{layer}.{module}.lora.{projection}"
            yield f"{prefix}.a", (*stacked, lora.rank, inputs)
            yield f"{prefix}.b", (*stacked, outputs, lora.rank)
            if lora.dora:
                yield f"{prefix}.magnitude", (*stacked, outputs)


def random_adapters(config: ModelConfig, lora: Lora, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make adapters that change what a tiny model says."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in adapter_shapes(config, lora):
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
) -> Path:
    """Save adapters and an optimizer state as step 10 of a run, and return the run's folder."""
    adapters = random_adapters(config, lora, seed) if tensors is None else tensors
    state = {f"model.{name}": tensor for name, tensor in adapters.items()}
    state |= {f"optimizer.exp_avg.{name}": torch.zeros_like(tensor) for name, tensor in adapters.items()}
    address = str(base) if "://" in str(base) else os.path.abspath(base)
    spec = {
        "run": f"{run.parent.name}/{run.name}",
        "model": config.model_dump(mode="json", by_alias=True, exclude_none=True),
        **AdapterSpec(lora, address, sha256).to_plain(),
    }
    run.mkdir(parents=True, exist_ok=True)
    with CheckpointWriter(take_attempt(LocalStore(run), ""), spec=spec) as writer:
        shards = {name: TensorShard(tuple(each.shape), (0,) * each.dim(), each) for name, each in state.items()}
        writer.save(10, shards, {"consumed_samples": 80}, blocking=True)
    return run
