"""AdamW over a rank's shards, with clipping and skipping inside the update so that the host never waits.

The update is one pass over memory, which reads the clip and the decision to skip on the device. On a CPU it is
PyTorch's fused kernel. (It takes the scale in float32, so in float64, which is for proofs, gradients are scaled before
it.) On a GPU each large tensor has a compiled kernel, which reaches the memory's bandwidth where the fused one does
not. All small tensors share the fused kernel, because launching a kernel takes longer than updating one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch

from trainshed.checkpoints.native.shards import TensorShard
from trainshed.engines.torch.model import ParameterShard
from trainshed.recipe.train import Optimizer

FUSED_MAX_ELEMENTS = 1 << 22
"""Tensors up to this size are updated together on a GPU: about as much as is updated while one kernel is launched."""


_Gradients = list[tuple[int, torch.Tensor]]
"""Gradients with the index of their shard."""


class AdamW:
    """Decoupled weight decay on matrices, none on norms and biases."""

    def __init__(self, shards: list[ParameterShard], options: Optimizer, device: torch.device) -> None:
        self.shards, self.options = shards, options
        self.exp_avg = [torch.zeros_like(shard.local_tensor) for shard in shards]
        self.exp_avg_sq = [torch.zeros_like(shard.local_tensor) for shard in shards]
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        """Updates made so far; a skipped step does not count."""

    @torch.no_grad()
    def step(self, lr: float, norm: torch.Tensor, skip: torch.Tensor) -> None:
        """Update with the shards' gradients; `norm` is their global norm, `skip` is 1.0 if the step is skipped."""
        clip = self.options.clip
        # max(1, norm / clip): gradients are divided by it.
        scale = (norm / clip).clamp(min=1.0) if clip is not None else torch.ones_like(norm)
        scale = torch.where(skip > 0, torch.ones_like(scale), scale)
        skip = skip.to(torch.float32)
        self.updates += 1.0 - skip
        for decays in (True, False):
            numbers = [i for i, shard in enumerate(self.shards) if shard.parameter.decays == decays]
            self._update(numbers, lr, decays, scale, skip)

    def _update(self, numbers: list[int], lr: float, decays: bool, scale: torch.Tensor, skip: torch.Tensor) -> None:
        gradients = [(i, gradient) for i in numbers if (gradient := self.shards[i].gradient) is not None]
        gradients = [(i, gradient) for i, gradient in gradients if gradient.numel()]
        if not gradients:
            return
        if gradients[0][1].is_cuda and gradients[0][1].dtype == torch.float32:
            if large := [(i, gradient) for i, gradient in gradients if gradient.numel() > FUSED_MAX_ELEMENTS]:
                self._update_compiled(large, lr, decays, scale, skip)
            gradients = [(i, gradient) for i, gradient in gradients if gradient.numel() <= FUSED_MAX_ELEMENTS]
        if gradients:
            self._update_fused(gradients, lr, decays, scale, skip)

    def _update_fused(
        self, gradients: _Gradients, lr: float, decays: bool, scale: torch.Tensor, skip: torch.Tensor
    ) -> None:
        numbers, values = [i for i, _ in gradients], [gradient for _, gradient in gradients]
        is_float64 = values[0].dtype == torch.float64
        if is_float64:
            values = list(torch._foreach_div(values, scale.to(torch.float64)))
        torch._fused_adamw_(
            [self.shards[i].local_tensor for i in numbers],
            values,
            [self.exp_avg[i] for i in numbers],
            [self.exp_avg_sq[i] for i in numbers],
            [],
            [self.updates] * len(numbers),
            lr=lr,
            beta1=self.options.betas[0],
            beta2=self.options.betas[1],
            weight_decay=self.options.weight_decay if decays else 0.0,
            eps=self.options.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if is_float64 else scale.to(torch.float32),
            found_inf=skip,
        )

    def _update_compiled(
        self, gradients: _Gradients, lr: float, decays: bool, scale: torch.Tensor, skip: torch.Tensor
    ) -> None:
        beta1, beta2 = self.options.betas
        # What changes from step to step is a tensor, so that nothing is compiled again.
        corrections = torch.stack([1 - beta1**self.updates, (1 - beta2**self.updates).sqrt(), scale.float(), skip])
        rate = torch.tensor(lr)
        update = _compiled_update()
        for i, gradient in gradients:
            parts = [self.shards[i].local_tensor, gradient, self.exp_avg[i], self.exp_avg_sq[i]]
            update(
                *(part.view(-1) for part in parts),
                corrections,
                rate,
                beta1,
                beta2,
                self.options.eps,
                self.options.weight_decay if decays else 0.0,
            )

    def state_tensors(self) -> Mapping[str, TensorShard]:
        """Return the state for a checkpoint, under the names of the weights."""
        tensors = {}
        for shard, exp_avg, exp_avg_sq in zip(self.shards, self.exp_avg, self.exp_avg_sq, strict=True):
            for kind, tensor in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
                name = f"optimizer.{kind}.{shard.name}"
                tensors[name] = TensorShard(shard.parameter.shape, shard.offset, tensor, shard.owner)
        return tensors


def _update_one(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    corrections: torch.Tensor,
    rate: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW on one flat tensor; `corrections` are [1 - beta1^t, sqrt(1 - beta2^t), gradient scale, skip]."""
    first, second, scale, skip_flag = corrections.unbind()
    skip = skip_flag > 0
    gradient = gradient / scale
    new_exp_avg = exp_avg + (1 - beta1) * (gradient - exp_avg)
    new_exp_avg_sq = exp_avg_sq * beta2 + (1 - beta2) * gradient * gradient
    updated = weight * (1 - rate * weight_decay) - rate / first * new_exp_avg / (new_exp_avg_sq.sqrt() / second + eps)
    weight.copy_(torch.where(skip, weight, updated))
    exp_avg.copy_(torch.where(skip, exp_avg, new_exp_avg))
    exp_avg_sq.copy_(torch.where(skip, exp_avg_sq, new_exp_avg_sq))


@cache
def _compiled_update() -> Callable[..., None]:
    """Compile on first use: loading the compiler takes seconds, and a CPU never needs it."""
    return torch.compile(_update_one, dynamic=True)
