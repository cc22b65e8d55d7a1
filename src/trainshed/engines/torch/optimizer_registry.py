"""The optimizers that `train.optimizer.name` can name, and the base classes of those that a plugin brings.

An optimizer names its state and says how a tensor is updated: element by element (`ElementwiseOptimizer`), or from
whole matrices (`MatrixOptimizer`), which the engine puts together from the shards of all ranks. AdamW updates whole
lists of tensors with kernels of its own and so is a `RankOptimizer` itself.

This module does not import torch, so that a plugin can register an optimizer on a machine that only plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from trainshed.models.parameter_groups import parameter_options
from trainshed.plugins import Registry
from trainshed.recipe.optimizer import Optimizer

if TYPE_CHECKING:
    import torch

    from trainshed.checkpoints.native.shards import TensorShard
    from trainshed.engines.torch.model import ParameterShard, RankModel


class RankOptimizer(Protocol):
    """What the engine asks of an optimizer: to update this rank's shards, and to name its state for a checkpoint."""

    shards: list[ParameterShard]
    """What it updates; it knows no frozen tensor."""
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
    gradients (`clip`), shrinks matrices by `lr · weight_decay`, treats tensors apart (`groups`), skips steps that are
    not finite, and saves and loads the state. A rank calls `update` with its shard of a tensor, which may be any box of
    it. What `update` does must not depend on the shape, and must not read a value on the host.
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


class MatrixOptimizer(ABC):
    """An optimizer whose update needs the whole matrix: of every matrix of a layer, and of each expert's.

    A rank has a shard of a matrix. The engine calls `prepare` on it, puts what that returns together to whole matrices,
    each on one rank, calls `direction` there and hands every rank its part. A weight changes by
    -lr · `lr_scale` · direction, and shrinks by `lr · weight_decay`. Tensors that hold several projections are taken
    apart first (`models/parameter_groups.py`). AdamW updates everything that is not a matrix of a layer. Clipping,
    skipped steps, `groups` and the saving of the state are the engine's, as for an `ElementwiseOptimizer`.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    """One tensor of zeros for each name, in the shape of every matrix."""
    reads: ClassVar[tuple[str, ...]] = ("betas", "eps")
    """The keys of `train.optimizer` that it or AdamW reads."""

    def __init__(self, settings: Optimizer) -> None:
        """Take the keys of `train.optimizer`; a subclass adds its `options` as keyword arguments."""
        self.settings = settings

    @abstractmethod
    def prepare(self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], updates: torch.Tensor) -> torch.Tensor:
        """Change the state of a shard in place and return what `direction` takes, in the shard's shape.

        It must work element by element, and must not read a value on the host. `updates` counts from 1.
        """

    @abstractmethod
    def direction(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return the direction of the update of whole matrices [count, rows, columns], in the same shape.

        They are in the dtype of the model's products, and do not know of each other.
        """

    def lr_scale(self, rows: int, columns: int) -> float:
        """Return the factor of the learning rate for a matrix of this shape."""
        return 1.0


class ElementwiseRankOptimizer:
    """Runs an `ElementwiseOptimizer` over a rank's shards."""

    def __init__(self, shards: list[ParameterShard], options: Optimizer, device: torch.device) -> None:
        import torch

        self.shards, self.options = shards, options
        self.rule = build_optimizer(options)
        self.state = [
            {name: torch.zeros_like(shard.local_tensor) for name in self.rule.state_names} for shard in self.shards
        ]
        self._options = [parameter_options(shard.parameter, options) for shard in shards]
        self.updates = torch.zeros((), dtype=torch.float32, device=device)

    def step(self, lr: float, norm: torch.Tensor, skip: torch.Tensor) -> None:
        """Update with the gradients at hand; `norm` is their global norm, `skip` is 1.0 if the step is skipped."""
        import torch

        with torch.no_grad():
            clip, skipped = self.options.clip, skip > 0
            scale = (norm / clip).clamp(min=1.0) if clip is not None else torch.ones_like(norm)
            self.updates += 1.0 - skip.to(torch.float32)
            for shard, state, chosen in zip(self.shards, self.state, self._options, strict=True):
                gradient, rate = shard.gradient, lr * chosen.lr_scale
                if gradient is None or not gradient.numel():
                    continue
                changed = [shard.local_tensor, *state.values()]
                before = [tensor.clone() for tensor in changed]
                if chosen.weight_decay:
                    shard.local_tensor.mul_(1.0 - rate * chosen.weight_decay)
                self.rule.update(shard.local_tensor, gradient / scale.to(gradient.dtype), state, rate, self.updates)
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


OPTIMIZERS: Registry[Any] = Registry(
    "optimizer",
    {"adamw": "trainshed.engines.torch.optimizer:AdamW", "muon": "trainshed.engines.torch.muon:Muon"},
)
"""By name: a `RankOptimizer`, or an `ElementwiseOptimizer` or `MatrixOptimizer`, which the engine runs."""


def build_rank_optimizer(model: RankModel, options: Optimizer) -> RankOptimizer:
    """Return what updates the tensors of a rank that are not frozen; every rank of the world calls this together."""
    chosen, device = OPTIMIZERS.find(options.name), model.mesh.device
    shards = [shard for shard in model.shards if not parameter_options(shard.parameter, options).frozen]
    if issubclass(chosen, MatrixOptimizer):
        from trainshed.engines.torch.matrix_optimizer import MatrixRankOptimizer

        return MatrixRankOptimizer(model, shards, options, build_optimizer(options))
    return (ElementwiseRankOptimizer if issubclass(chosen, ElementwiseOptimizer) else chosen)(shards, options, device)


def build_optimizer(options: Optimizer) -> Any:
    """Make the registered optimizer with its own options."""
    return OPTIMIZERS.find(options.name)(options, **(options.options or {}))
