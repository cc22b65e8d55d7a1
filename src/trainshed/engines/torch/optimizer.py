"""AdamW over a rank's boxes, with clipping and skipping inside the update so that the host never waits.

The clip and the decision to skip are read on the device within the one pass over memory that updates. On a CPU that is
PyTorch's fused kernel (in float64, which is for proofs, the scale is applied apart, as the kernel takes it in float32);
on a GPU a compiled one for each large tensor, which reaches the memory's bandwidth where the fused one does not, and
the fused one for all small ones together, since launching each takes longer than updating it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch

from trainshed.checkpoints.native.shards import TensorShard
from trainshed.engines.torch.model import ParameterShard
from trainshed.recipe.train import Optimizer

SMALL = 1 << 22
"""Elements up to which tensors are updated together on a GPU: about what is updated while one kernel is launched."""


class AdamW:
    """Decoupled weight decay on matrices, none on norms and biases."""

    def __init__(self, weights: list[ParameterShard], options: Optimizer, device: torch.device) -> None:
        self.weights, self.options = weights, options
        self.average = [torch.zeros_like(weight.local) for weight in weights]
        self.square = [torch.zeros_like(weight.local) for weight in weights]
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        """Updates made so far; a skipped step is none."""

    @torch.no_grad()
    def step(self, lr: float, norm: torch.Tensor, bad: torch.Tensor) -> None:
        """Update with the gradients at hand; `norm` is their global norm, `bad` 1.0 where the step is skipped."""
        clip = self.options.clip
        # max(1, norm / clip): gradients are divided by it.
        scale = (norm / clip).clamp(min=1.0) if clip is not None else torch.ones_like(norm)
        scale = torch.where(bad > 0, torch.ones_like(scale), scale)
        bad32 = bad.to(torch.float32)
        self.updates += 1.0 - bad32
        for decays in (True, False):
            numbers = [i for i, weight in enumerate(self.weights) if weight.parameter.decays == decays]
            self._update(numbers, lr, decays, scale, bad32)

    def _update(self, numbers: list[int], lr: float, decays: bool, scale: torch.Tensor, bad: torch.Tensor) -> None:
        pairs = [(i, gradient) for i in numbers if (gradient := self.weights[i].gradient) is not None]
        pairs = [(i, gradient) for i, gradient in pairs if gradient.numel()]
        if not pairs:
            return
        if pairs[0][1].is_cuda and pairs[0][1].dtype == torch.float32:
            if large := [(i, gradient) for i, gradient in pairs if gradient.numel() > SMALL]:
                self._update_compiled(large, lr, decays, scale, bad)
            pairs = [(i, gradient) for i, gradient in pairs if gradient.numel() <= SMALL]
        if pairs:
            self._update_fused(pairs, lr, decays, scale, bad)

    def _update_fused(
        self, pairs: list[tuple[int, torch.Tensor]], lr: float, decays: bool, scale: torch.Tensor, bad: torch.Tensor
    ) -> None:
        numbers, gradients = [i for i, _ in pairs], [gradient for _, gradient in pairs]
        apart = gradients[0].dtype == torch.float64
        if apart:
            gradients = list(torch._foreach_div(gradients, scale.to(torch.float64)))
        torch._fused_adamw_(
            [self.weights[i].local for i in numbers],
            gradients,
            [self.average[i] for i in numbers],
            [self.square[i] for i in numbers],
            [],
            [self.updates] * len(numbers),
            lr=lr,
            beta1=self.options.betas[0],
            beta2=self.options.betas[1],
            weight_decay=self.options.weight_decay if decays else 0.0,
            eps=self.options.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if apart else scale.to(torch.float32),
            found_inf=bad,
        )

    def _update_compiled(
        self, pairs: list[tuple[int, torch.Tensor]], lr: float, decays: bool, scale: torch.Tensor, bad: torch.Tensor
    ) -> None:
        beta1, beta2 = self.options.betas
        # What changes from step to step comes as tensors, so that nothing is compiled again.
        corrections = torch.stack([1 - beta1**self.updates, (1 - beta2**self.updates).sqrt(), scale.float(), bad])
        rate = torch.tensor(lr)
        update = _compiled_update()
        for i, gradient in pairs:
            parts = [self.weights[i].local, gradient, self.average[i], self.square[i]]
            update(
                *(part.view(-1) for part in parts),
                corrections,
                rate,
                beta1,
                beta2,
                self.options.eps,
                self.options.weight_decay if decays else 0.0,
            )

    def pieces(self) -> Mapping[str, TensorShard]:
        """The state for a checkpoint, under the names of the weights."""
        pieces = {}
        for weight, average, square in zip(self.weights, self.average, self.square, strict=True):
            for kind, tensor in (("exp_avg", average), ("exp_avg_sq", square)):
                name = f"optimizer.{kind}.{weight.name}"
                pieces[name] = TensorShard(weight.parameter.shape, weight.offset, tensor, weight.owner)
        return pieces


def _update_one(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    average: torch.Tensor,
    square: torch.Tensor,
    corrections: torch.Tensor,
    rate: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW on one flat tensor; `corrections` are [1 - beta1^t, sqrt(1 - beta2^t), gradient scale, skip]."""
    first, second, scale, bad = corrections.unbind()
    skip = bad > 0
    gradient = gradient / scale
    moved = average + (1 - beta1) * (gradient - average)
    squared = square * beta2 + (1 - beta2) * gradient * gradient
    updated = weight * (1 - rate * weight_decay) - rate / first * moved / (squared.sqrt() / second + eps)
    weight.copy_(torch.where(skip, weight, updated))
    average.copy_(torch.where(skip, average, moved))
    square.copy_(torch.where(skip, square, squared))


@cache
def _compiled_update() -> Callable[..., None]:
    """Compiled where it is first used: loading the compiler costs seconds, and a CPU never asks for it."""
    return torch.compile(_update_one, dynamic=True)
