"""The optimizers that `train.optimizer.name` can name, and the base class of one that a plugin brings.

This module does not import torch, so that a plugin can register an optimizer on a machine that only plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from trainshed.plugins import Registry
from trainshed.recipe.train import Optimizer

if TYPE_CHECKING:
    import torch

    from trainshed.checkpoints.native.shards import TensorShard
    from trainshed.engines.torch.model import ParameterShard


class RankOptimizer(Protocol):
    """What the engine asks of an optimizer: to update this rank's shards, and to name its state for a checkpoint."""

    updates: torch.Tensor
    """Updates made so far, a float32 scalar on the device; a skipped step is none."""

    def __init__(self, shards: list[ParameterShard], options: Optimizer, device: torch.device) -> None: ...

    def step(self, lr: float, norm: torch.Tensor, skip: torch.Tensor) -> None:
        """Update with the gradients at hand; `norm` is their global norm, `skip` is 1.0 if the step is skipped."""
        ...

    def state_tensors(self) -> Mapping[str, TensorShard]:
        """The state for a checkpoint, under the names of the weights."""
        ...


class ElementwiseOptimizer(ABC):
    """An optimizer whose update of an element depends on that element alone: its weight, gradient and state.

    A subclass names its state and updates one tensor. The engine does the rest on every layout: it sums and clips the
    gradients (`clip`), shrinks matrices by `lr · weight_decay`, skips steps that are not finite, and saves and loads
    the state. A rank calls `update` with its shard of a tensor, which may be any box of it. What `update` does must not
    depend on the shape, and must not read a value on the host.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    """One tensor of zeros for each name, in the shape of every weight."""
    reads: ClassVar[tuple[str, ...]] = ()
    """The keys of `train.optimizer` that it reads besides `lr`, `weight_decay`, `clip` and `options`: betas, eps."""

    def __init__(self, settings: Optimizer) -> None:
        """Take the keys of `train.optimizer`; a subclass adds its `options` as keyword arguments."""
        self.settings = settings

    @abstractmethod
    def update(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        lr: float,
        updates: torch.Tensor,
    ) -> None:
        """Change weight and state in place; `updates` counts from 1 and is on the device."""


class ElementwiseRankOptimizer:
    """Runs an `ElementwiseOptimizer` over a rank's shards."""

    def __init__(self, shards: list[ParameterShard], options: Optimizer, device: torch.device) -> None:
        import torch

        self.shards, self.options = shards, options
        self.rule = build_optimizer(options)
        self.state = [
            {name: torch.zeros_like(shard.local_tensor) for name in self.rule.state_names} for shard in self.shards
        ]
        self.updates = torch.zeros((), dtype=torch.float32, device=device)

    def step(self, lr: float, norm: torch.Tensor, skip: torch.Tensor) -> None:
        """Update with the gradients at hand; `norm` is their global norm, `skip` is 1.0 if the step is skipped."""
        import torch

        with torch.no_grad():
            clip, skipped = self.options.clip, skip > 0
            scale = (norm / clip).clamp(min=1.0) if clip is not None else torch.ones_like(norm)
            self.updates += 1.0 - skip.to(torch.float32)
            for shard, state in zip(self.shards, self.state, strict=True):
                gradient = shard.gradient
                if gradient is None or not gradient.numel():
                    continue
                changed = [shard.local_tensor, *state.values()]
                before = [tensor.clone() for tensor in changed]
                if shard.parameter.decays:
                    shard.local_tensor.mul_(1.0 - lr * self.options.weight_decay)
                self.rule.update(shard.local_tensor, gradient / scale.to(gradient.dtype), state, lr, self.updates)
                for tensor, kept in zip(changed, before, strict=True):
                    tensor.copy_(torch.where(skipped, kept, tensor))

    def state_tensors(self) -> Mapping[str, TensorShard]:
        """The state for a checkpoint, under the names of the weights."""
        from trainshed.checkpoints.native.shards import TensorShard

        return {
            f"optimizer.{name}.{shard.name}": TensorShard(shard.parameter.shape, shard.offset, tensor, shard.owner)
            for shard, state in zip(self.shards, self.state, strict=True)
            for name, tensor in state.items()
        }


OPTIMIZERS: Registry[Any] = Registry("optimizer", {"adamw": "trainshed.engines.torch.optimizer:AdamW"})
"""By name: a `RankOptimizer`, or an `ElementwiseOptimizer`, which is run by `ElementwiseRankOptimizer`."""


def optimizer_class(options: Optimizer) -> type[RankOptimizer]:
    """Return what updates the shards of a rank."""
    chosen = OPTIMIZERS.find(options.name)
    return ElementwiseRankOptimizer if issubclass(chosen, ElementwiseOptimizer) else chosen


def build_optimizer(options: Optimizer) -> ElementwiseOptimizer:
    """Make the registered optimizer with its own options."""
    return OPTIMIZERS.find(options.name)(options, **(options.options or {}))
