"""An exponential moving average of the weights (EMA), in shards as the weights are.

After every update a weight's average moves to the weight by 1 - decay. It begins as the weight itself. A skipped step
changes nothing. The average is saved with a checkpoint under the names of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule

from trainshed.checkpoints.native.shards import TensorShard
from trainshed.checkpoints.native.weights import EMA_PREFIX
from trainshed.engines.torch.model import RankModel
from trainshed.recipe.optimizer import Ema


class WeightAverage:
    """The average of a rank's shards."""

    def __init__(self, model: RankModel, options: Ema) -> None:
        self.model, self.options = model, options
        self.averages = [torch.zeros_like(shard.local_tensor) for shard in model.shards]

    @torch.no_grad()
    def start(self) -> None:
        """Begin with the weights as they are."""
        for average, shard in zip(self.averages, self.model.shards, strict=True):
            average.copy_(shard.local_tensor)

    @torch.no_grad()
    def update(self, skip: torch.Tensor) -> None:
        """Move to the weights after an update; `skip` is 1.0 if there was none."""
        if not self.averages:
            return
        weights = [shard.local_tensor for shard in self.model.shards]
        share = ((1.0 - self.options.decay) * (1.0 - skip)).to(weights[0].dtype)
        torch._foreach_lerp_(self.averages, weights, [share] * len(weights))

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Let the model compute with the averages."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, shard in zip(self.averages, self.model.shards, strict=True):
            weight = shard.local_tensor.clone()
            shard.local_tensor.copy_(average)
            average.copy_(weight)
        for stage in self.model.stages:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # what was gathered before is not what the shards hold now

    def state_tensors(self) -> Mapping[str, TensorShard]:
        """Return the averages for a checkpoint, under the names of the weights."""
        return {
            f"{EMA_PREFIX}{shard.name}": TensorShard(shard.parameter.shape, shard.offset, average, shard.owner)
            for shard, average in zip(self.model.shards, self.averages, strict=True)
        }
