"""AdamW over a rank's shards, with clipping and skipping inside the update so that the host never waits.

The update is one pass over memory, which reads the clip and the decision to skip on the device. On a CPU it is
PyTorch's fused kernel. (It takes the scale in float32, so in float64, which is for proofs, gradients are scaled before
it.) On a GPU each large tensor has a compiled kernel, which reaches the memory's bandwidth where the fused one does
not. All small tensors share the fused kernel, because launching a kernel takes longer than updating one of them.

With `states: bf16` the two averages are stored in bf16 and rounded stochastically: up with the probability that makes
the mean exact. Rounded to nearest they would stop moving: an average with beta2 = 0.999 changes by less than a
thousandth in a step, and bf16 knows no step smaller than a 256th. The weight is updated with the averages before they
are rounded. The bits come from counters (weight, element, update), so they are the same on every layout and after a
restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from trainshed.checkpoints.native.shards import TensorShard
from trainshed.engines.torch.model import ParameterShard
from trainshed.models.init import ROUNDING_STREAM, box_indices, random_bits_compiled, rng_key, rng_key_tensor
from trainshed.models.parameter_groups import ParameterOptions, parameter_options
from trainshed.recipe.optimizer import Optimizer

FUSED_MAX_ELEMENTS = 1 << 22
"""Tensors up to this size are updated together on a GPU: about as much as is updated while one kernel is launched."""
_CPU_ELEMENTS = 1 << 22
"""Elements with bf16 states that a CPU updates at a time."""

_Gradients = list[tuple[int, torch.Tensor]]
"""Gradients with the index of their shard."""


class AdamW:
    """Decoupled weight decay on matrices, none on norms and biases; groups of tensors may have rates of their own."""

    def __init__(self, shards: list[ParameterShard], options: Optimizer, device: torch.device) -> None:
        self.shards, self.options = shards, options
        self.rounded = options.states == "bf16"
        dtype = torch.bfloat16 if self.rounded else None
        self.exp_avg = [torch.zeros_like(shard.local_tensor, dtype=dtype) for shard in shards]
        self.exp_avg_sq = [torch.zeros_like(shard.local_tensor, dtype=dtype) for shard in shards]
        keys = [rng_key("optimizer state", shard.name) for shard in shards] if self.rounded else []
        self._keys = [rng_key_tensor(key, device) for key in keys]
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        """Updates made so far; a skipped step does not count."""
        self._groups: dict[ParameterOptions, list[int]] = {}
        """The numbers of the shards that are updated alike."""
        for number, shard in enumerate(shards):
            self._groups.setdefault(parameter_options(shard.parameter, options), []).append(number)

    @torch.no_grad()
    def step(self, lr: float, norm: torch.Tensor, skip: torch.Tensor) -> None:
        """Update with the shards' gradients; `norm` is their global norm, `skip` is 1.0 if the step is skipped."""
        clip = self.options.clip
        # max(1, norm / clip): gradients are divided by it.
        scale = (norm / clip).clamp(min=1.0) if clip is not None else torch.ones_like(norm)
        scale = torch.where(skip > 0, torch.ones_like(scale), scale)
        skip = skip.to(torch.float32)
        self.updates += 1.0 - skip
        for group, numbers in self._groups.items():
            self._update(numbers, lr * group.lr_scale, group.weight_decay, scale, skip)

    def _update(self, numbers: list[int], lr: float, decay: float, scale: torch.Tensor, skip: torch.Tensor) -> None:
        gradients = [(i, gradient) for i in numbers if (gradient := self.shards[i].gradient) is not None]
        gradients = [(i, gradient) for i, gradient in gradients if gradient.numel()]
        if not gradients:
            return
        if self.rounded:
            self._update_rounded(gradients, lr, decay, scale, skip)
            return
        if gradients[0][1].is_cuda and gradients[0][1].dtype == torch.float32:
            if large := [(i, gradient) for i, gradient in gradients if gradient.numel() > FUSED_MAX_ELEMENTS]:
                self._update_compiled(large, lr, decay, scale, skip)
            gradients = [(i, gradient) for i, gradient in gradients if gradient.numel() <= FUSED_MAX_ELEMENTS]
        if gradients:
            self._update_fused(gradients, lr, decay, scale, skip)

    def _update_fused(
        self, gradients: _Gradients, lr: float, decay: float, scale: torch.Tensor, skip: torch.Tensor
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
            weight_decay=decay,
            eps=self.options.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if is_float64 else scale.to(torch.float32),
            found_inf=skip,
        )

    def _update_compiled(
        self, gradients: _Gradients, lr: float, decay: float, scale: torch.Tensor, skip: torch.Tensor
    ) -> None:
        corrections, rate, update = self._corrections(scale, skip), torch.tensor(lr), _compiled_update()
        for i, gradient in gradients:
            shard = self.shards[i]
            parts = [shard.local_tensor, gradient, self.exp_avg[i], self.exp_avg_sq[i]]
            copy = None if shard.compute_weight is None else shard.compute_weight.tensor.view(-1)
            update(*(part.view(-1) for part in parts), copy, corrections, rate, *self._constants(decay))
            if shard.compute_weight is not None:
                shard.compute_weight.mark_written()

    def _update_rounded(
        self, gradients: _Gradients, lr: float, decay: float, scale: torch.Tensor, skip: torch.Tensor
    ) -> None:
        corrections, rate = self._corrections(scale, skip), torch.tensor(lr)
        update_number = self.updates.to(torch.int64)
        for i, gradient in gradients:
            shard = self.shards[i]
            parts = [shard.local_tensor, gradient, self.exp_avg[i], self.exp_avg_sq[i]]
            update: Callable[..., None] = _compiled_rounded_update() if gradient.is_cuda else _update_one_rounded
            # On a CPU nothing is fused: a part at a time bounds the memory of the counters.
            rows = len(gradient) if gradient.is_cuda else max(1, _CPU_ELEMENTS // gradient[0].numel())
            for first in range(0, len(gradient), rows):
                update(
                    *(part[first : first + rows] for part in parts),
                    corrections,
                    rate,
                    *self._constants(decay),
                    self._keys[i],
                    update_number,
                    shard.parameter.shape,
                    (shard.offset[0] + first, *shard.offset[1:]),
                )

    def _corrections(self, scale: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        """What changes from step to step, as a tensor, so that nothing is compiled again."""
        beta1, beta2 = self.options.betas
        return torch.stack([1 - beta1**self.updates, (1 - beta2**self.updates).sqrt(), scale.float(), skip])

    def _constants(self, decay: float) -> tuple[float, float, float, float]:
        return (*self.options.betas, self.options.eps, decay)

    def state_tensors(self) -> Mapping[str, TensorShard]:
        """Return the state for a checkpoint, under the names of the weights."""
        tensors = {}
        for shard, exp_avg, exp_avg_sq in zip(self.shards, self.exp_avg, self.exp_avg_sq, strict=True):
            for kind, tensor in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
                name = f"optimizer.{kind}.{shard.name}"
                tensors[name] = TensorShard(shard.parameter.shape, shard.offset, tensor, shard.owner)
        return tensors


def _new_values(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """AdamW: the new weight and averages; `corrections` are [1 - beta1^t, sqrt(1 - beta2^t), gradient scale, skip]."""
    first, second, scale, _ = corrections.unbind()
    gradient = gradient / scale
    new_exp_avg = exp_avg + (1 - beta1) * (gradient - exp_avg)
    new_exp_avg_sq = exp_avg_sq * beta2 + (1 - beta2) * gradient * gradient
    updated = weight * (1 - rate * weight_decay) - rate / first * new_exp_avg / (new_exp_avg_sq.sqrt() / second + eps)
    return updated, new_exp_avg, new_exp_avg_sq


def _update_one(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    copy: torch.Tensor | None,
    corrections: torch.Tensor,
    *options: Any,
) -> None:
    """Update one flat tensor, and its copy for the products; the rest is as `_new_values` takes it."""
    new_values = _new_values(weight, gradient, exp_avg, exp_avg_sq, corrections, *options)
    skip = corrections[3] > 0
    chosen = [torch.where(skip, *pair) for pair in zip((weight, exp_avg, exp_avg_sq), new_values, strict=True)]
    if copy is not None:
        copy.copy_(chosen[0])
    for tensor, new in zip((weight, exp_avg, exp_avg_sq), chosen, strict=True):
        tensor.copy_(new)


def _update_one_rounded(
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
    key: torch.Tensor,
    update_number: torch.Tensor,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
) -> None:
    """Update the box at `offset` of a tensor of `shape`; its averages are bf16."""
    averages = exp_avg.to(weight.dtype), exp_avg_sq.to(weight.dtype)
    updated, *new_averages = _new_values(
        weight, gradient, *averages, corrections, rate, beta1, beta2, eps, weight_decay
    )
    # One counter per update and element: at most 2^23 updates and 2^40 elements.
    index = box_indices(shape, offset, weight.shape, weight.device) + (update_number << 40)
    bits = random_bits_compiled(index, key, ROUNDING_STREAM).to(torch.int64)
    skip = corrections[3] > 0
    weight.copy_(torch.where(skip, weight, updated))
    # 16 bits for each of the two averages.
    for tensor, new, part in zip((exp_avg, exp_avg_sq), new_averages, (bits & 0xFFFF, bits >> 16), strict=True):
        tensor.copy_(torch.where(skip, tensor, round_to_bf16(new, part)))


def round_to_bf16(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round to one of the two nearest bf16 numbers: up if the 16 random bits and the 16 that are lost exceed 2^16."""
    whole = value.float().view(torch.int32) + bits.to(torch.int32)
    return (whole & -0x10000).view(torch.float32).to(torch.bfloat16)


@cache
def _compiled_update() -> Callable[..., None]:
    """Compile on first use: loading the compiler takes seconds, and a CPU never needs it."""
    return torch.compile(_update_one, dynamic=True)


@cache
def _compiled_rounded_update() -> Callable[..., None]:
    return torch.compile(_update_one_rounded, dynamic=True)
