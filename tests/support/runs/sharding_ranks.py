"""Ranks that watch what FSDP holds and sends while they train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from support.runs.small_ranks import train_small
from trainshed.engines.torch import rank
from trainshed.engines.torch.model import RankModel, build_model
from trainshed.engines.torch.pipeline_stage import SyncedPipelineStage
from trainshed.models.decoder import DecoderStage


@dataclass
class ShardObservations:
    """What a rank saw in its steps, in order."""

    in_layers: list[list[str]] = field(default_factory=list)
    """The parts of a stage that were gathered each time a layer ran forward."""
    after_backward: list[tuple[float, float]] = field(default_factory=list)
    """Weights and gradients that the rank held after each backward of a pipeline: shares of those of its stage."""
    given_dtypes: set[torch.dtype] = field(default_factory=set)
    """Those of the rotary table and of the scale of the router's losses, as layers get them."""
    all_reduces: int = 0
    """Sums over the copies of a hybrid layout."""


def train_watching_shards(folder: Path, model: str, layout: str, overrides: Sequence[str]) -> ShardObservations:
    """Train as one rank; returns what it saw."""
    seen = ShardObservations()
    built: list[RankModel] = []
    backward, all_reduce = SyncedPipelineStage.backward_one_chunk, dist.all_reduce

    def build(*arguments: Any, **options: Any) -> RankModel:
        built.append(build_model(*arguments, **options))
        for stage in built[0].stages:
            for layer in stage.layers.values():
                layer.register_forward_pre_hook(partial(watch_layer, stage))
        return built[0]

    def watch_layer(stage: DecoderStage, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen.in_layers.append(gathered_parts(stage))
        _, rotary, sequence_scale, *_ = arguments
        seen.given_dtypes |= {table.dtype for table in rotary or ()} | {sequence_scale.dtype}

    def watch_backward(stage: SyncedPipelineStage, *arguments: Any, **options: Any) -> Any:
        result = backward(stage, *arguments, **options)
        seen.after_backward.append(held_shares(built[0]))
        return result

    def count_all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        seen.all_reduces += options.get("group") is not None  # the step's own figures are summed over the world
        return all_reduce(tensor, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "build_model", build)
        patch.setattr(SyncedPipelineStage, "backward_one_chunk", watch_backward)
        patch.setattr(dist, "all_reduce", count_all_reduce)
        assert train_small(folder, model, layout, overrides) == 0
    return seen


def is_gathered(module: nn.Module) -> bool:
    """Whether the weights of an FSDP module are whole."""
    return not isinstance(next(module.parameters()), DTensor)


def gathered_parts(stage: DecoderStage) -> list[str]:
    """The parts of a stage that are gathered: layers by their number, embedding and head."""
    ends = {name: module for name in ("embedding", "head") if (module := getattr(stage, name, None)) is not None}
    parts: dict[str, nn.Module] = {**ends, **stage.layers}
    return [name for name, module in parts.items() if is_gathered(module)]


def held_shares(model: RankModel) -> tuple[float, float]:
    """The shares of the weights and of the gradients of this rank's stages that it holds."""
    whole = sum(shard.tensor.numel() for shard in model.shards)
    present = [parameter for stage in model.stages for parameter in stage.parameters()]
    weights = sum(each.to_local().numel() if isinstance(each, DTensor) else each.numel() for each in present)
    unsharded = sum(each.grad.numel() for each in present if not isinstance(each, DTensor) and each.grad is not None)
    sharded = sum(gradient.numel() for shard in model.shards if (gradient := shard.gradient) is not None)
    return weights / whole, (unsharded + sharded) / whole
