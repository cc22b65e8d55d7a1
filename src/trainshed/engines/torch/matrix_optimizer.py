"""Runs a `MatrixOptimizer` over a rank's shards: whole matrices by its rule, everything else by AdamW.

A round of matrices at a time (`matrix_exchange.py`): every rank prepares its boxes, each matrix is put together on one
rank, taken apart into the projections it holds, computed and shared out. Nothing is read on the host: a skipped step
goes through the same kernels and collectives, and keeps what there was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

from trainshed.checkpoints.native.shards import TensorShard
from trainshed.engines.torch.matrix_exchange import MatrixBox, MatrixExchange, WholeMatrix, stage_group
from trainshed.engines.torch.model import ParameterShard, RankModel
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.optimizer_registry import MatrixOptimizer
from trainshed.models.parameter_groups import (
    MatrixRows,
    fused_matrices,
    is_layer_matrix,
    matrix_shapes,
    parameter_options,
)
from trainshed.plan.flops import newton_schulz_flops
from trainshed.recipe.optimizer import Optimizer


class MatrixRankOptimizer:
    """Updates the matrices of layers by a rule that needs them whole, and all other tensors by AdamW."""

    def __init__(
        self, model: RankModel, shards: list[ParameterShard], options: Optimizer, rule: MatrixOptimizer
    ) -> None:
        self.shards, self.options, self.rule = shards, options, rule
        self.matrices = [shard for shard in shards if is_layer_matrix(shard.parameter)]
        device = model.mesh.device
        self.adamw = AdamW([shard for shard in shards if not is_layer_matrix(shard.parameter)], options, device)
        self.updates = self.adamw.updates
        """Updates made so far, counted in place; a skipped step does not count."""
        self.state = [
            {name: torch.zeros_like(shard.local_tensor) for name in rule.state_names} for shard in self.matrices
        ]
        config = model.config
        self._parts = [fused_matrices(config, shard.parameter) for shard in self.matrices]
        self._shapes = [matrix_shapes(config, shard.parameter) for shard in self.matrices]
        self._options = [parameter_options(shard.parameter, options) for shard in self.matrices]
        self._row_scales = [self._row_scale(number) for number in range(len(self.matrices))]
        self.exchange = MatrixExchange(self.matrices, stage_group(model.mesh), device, model.dtype, self._cost)

    @torch.no_grad()
    def step(self, lr: float, norm: torch.Tensor, skip: torch.Tensor) -> None:
        """Update with the gradients at hand; `norm` is their global norm, `skip` is 1.0 if the step is skipped."""
        self.adamw.step(lr, norm, skip)
        clip, skipped = self.options.clip, skip > 0
        scale = (norm / clip).clamp(min=1.0) if clip is not None else torch.ones_like(norm)
        for plan in self.exchange.rounds:
            prepared = {matrix: self._prepare(matrix, scale, skipped) for matrix, _ in plan.held}
            whole = self.exchange.gather(plan, prepared)
            del prepared
            directions = self.exchange.share_out(plan, self._directions(whole))
            for matrix, box in plan.held:
                self._apply(matrix, box, directions[matrix], lr, skipped)

    def _prepare(self, matrix: WholeMatrix, scale: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        """Change the state of this rank's box of a matrix and return what is sent of it."""
        shard = self.matrices[matrix.number]
        # Without a gradient there is still the momentum; all ranks of the stage take part in the exchange.
        gradient = torch.zeros_like(shard.local_tensor) if shard.gradient is None else shard.gradient
        box = self._box(matrix, gradient)
        state = {name: self._box(matrix, tensor) for name, tensor in self.state[matrix.number].items()}
        prepare = _compiled(_prepare_box) if box.is_cuda else _prepare_box
        return prepare(self.rule, box, state, self.updates, scale.to(box.dtype), skipped, self.exchange.dtype)

    def _apply(
        self, matrix: WholeMatrix, box: MatrixBox, direction: torch.Tensor, lr: float, skipped: torch.Tensor
    ) -> None:
        """Update this rank's box of a matrix."""
        weight = self._box(matrix, self.matrices[matrix.number].local_tensor)
        options, row_scale = self._options[matrix.number], self._row_scales[matrix.number]
        scale = row_scale[box.row : box.row + box.rows] if row_scale.dim() else row_scale
        # As a tensor, so that nothing is compiled again when the learning rate changes.
        rate = torch.tensor(lr * options.lr_scale, dtype=weight.dtype)
        apply = _compiled(_apply_direction) if weight.is_cuda else _apply_direction
        apply(weight, direction, rate, scale, options.weight_decay, skipped)

    def _directions(self, whole: Mapping[WholeMatrix, torch.Tensor]) -> dict[WholeMatrix, torch.Tensor]:
        """Compute whole matrices, those of one shape together."""
        directions = {matrix: torch.empty_like(tensor) for matrix, tensor in whole.items()}
        by_shape: dict[tuple[int, int], list[tuple[WholeMatrix, MatrixRows]]] = {}
        for matrix in whole:
            for part, shape in zip(self._parts[matrix.number], self._shapes[matrix.number], strict=True):
                by_shape.setdefault(shape, []).append((matrix, part))
        for (rows, columns), parts in by_shape.items():
            stacked = torch.stack([_rows_of(whole[matrix], part).reshape(rows, columns) for matrix, part in parts])
            for (matrix, part), direction in zip(parts, self.rule.direction(stacked), strict=True):
                target = _rows_of(directions[matrix], part)
                target.copy_(direction.view(target.shape))
        return directions

    def _box(self, matrix: WholeMatrix, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's box of a matrix, of a tensor in the shape of its shard."""
        shard = self.matrices[matrix.number]
        return tensor[matrix.expert - shard.offset[0]] if shard.parameter.expert else tensor

    def _row_scale(self, number: int) -> torch.Tensor:
        """Return the factor of a matrix's learning rate: a scalar, or [rows, 1] where the matrices in it differ."""
        shard, shapes = self.matrices[number], self._shapes[number]
        factors = [self.rule.lr_scale(*shape) for shape in shapes]
        if len(set(factors)) == 1:
            return torch.tensor(factors[0], dtype=shard.local_tensor.dtype)
        scale = shard.local_tensor.new_empty(shard.parameter.shape[-2], 1)
        for part, factor in zip(self._parts[number], factors, strict=True):
            _rows_of(scale, part).fill_(factor)
        return scale

    def _cost(self, matrix: WholeMatrix) -> float:
        """The work of a matrix relative to others: that of Newton-Schulz, which is cubic as other rules are."""
        return float(sum(newton_schulz_flops(*shape, steps=1) for shape in self._shapes[matrix.number]))

    def state_tensors(self) -> Mapping[str, TensorShard]:
        """Return the state for a checkpoint, under the names of the weights."""
        return {**self.adamw.state_tensors(), **dict(self._matrix_states())}

    def _matrix_states(self) -> Iterator[tuple[str, TensorShard]]:
        for shard, state in zip(self.matrices, self.state, strict=True):
            for name, tensor in state.items():
                yield (
                    f"optimizer.{name}.{shard.name}",
                    TensorShard(shard.parameter.shape, shard.offset, tensor, shard.owner),
                )


def _prepare_box(
    rule: MatrixOptimizer,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    updates: torch.Tensor,
    scale: torch.Tensor,
    skipped: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Prepare one box; its state stays as it is if the step is skipped."""
    new_state = {name: tensor.clone() for name, tensor in state.items()}
    prepared = rule.prepare(gradient / scale, new_state, updates).to(dtype, copy=True)
    for name, tensor in state.items():
        tensor.copy_(torch.where(skipped, tensor, new_state[name]))
    return prepared


def _apply_direction(
    weight: torch.Tensor,
    direction: torch.Tensor,
    rate: torch.Tensor,
    scale: torch.Tensor,
    weight_decay: float,
    skipped: torch.Tensor,
) -> None:
    updated = weight * (1 - rate * weight_decay) - rate * scale * direction.to(weight.dtype)
    weight.copy_(torch.where(skipped, weight, updated))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use, for a GPU: one pass over memory in place of ten."""
    return torch.compile(function, dynamic=True)


def _rows_of(matrix: torch.Tensor, part: MatrixRows) -> torch.Tensor:
    """Return a view of the rows of one matrix: [groups of rows, rows of a group, columns]."""
    return matrix.view(-1, part.period, matrix.shape[-1])[:, part.start : part.stop]
