"""Seconds of Muon's update: Newton-Schulz on whole matrices, and their way between the ranks of a stage.

Each matrix is computed once, by one rank of its pipeline stage (`engines/torch/matrix_exchange.py`): a step takes as
long as an even share of the work, or as the largest matrix. Ranks send their boxes of a matrix in bf16 and receive the
result in the same way; experts that one rank holds whole stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainshed.plan.flops import newton_schulz_flops
from trainshed.plan.layout import RankLayout
from trainshed.plan.model_shape import ModelShape, WeightMatrix
from trainshed.plan.performance.layer_time import KernelTimes, all_to_all_seconds, collective_group
from trainshed.plan.performance.memory import matrix_rank_weights, rank_layers
from trainshed.plan.training_shape import TrainingShape

MATRIX_BYTES = 40
"""Bytes that are moved per weight: gradient and momentum read and written, boxes packed and unpacked both ways."""


def muon_seconds(training: TrainingShape, layout: RankLayout, rank: int) -> float:
    """Return the seconds in which a pipeline rank updates the matrices of its layers."""
    kernels, steps = KernelTimes(training), training.options.muon_steps
    dense, expert = matrix_rank_weights(training, layout, rank)
    moved = kernels.memory_seconds(
        MATRIX_BYTES * (dense / layout.dense_shards + expert / layout.expert_shards) * training.constants.optimizer
    )
    total = largest = 0.0
    for experts, count in rank_layers(training, layout, rank):
        flops = [
            sum(newton_schulz_flops(*shape, steps=steps) for shape in tensor)
            for tensor in layer_tensors(training.model, experts=experts)
        ]
        total, largest = total + count * sum(flops), max(largest, *flops)
    peak = kernels.half_peak * training.constants.gemm * training.efficiency.forward
    return moved + max(total / layout.stage_ranks, largest) / peak + _exchange_seconds(training, layout, dense, expert)


def _exchange_seconds(training: TrainingShape, layout: RankLayout, dense: float, expert: float) -> float:
    """Seconds of the all_to_alls; `dense` and `expert` are the weights of one model-parallel rank."""
    experts = training.model.experts
    stays = experts is None or (layout.etp == 1 and experts.count // layout.ep % layout.expert_shards == 0)
    spread = dense + (0.0 if stays else expert)
    group = collective_group(layout.stage_ranks, 1, training)
    gathered = 2 * spread * layout.tp / layout.stage_ranks if layout.tp * layout.dense_shards > 1 else 0.0
    shared_out = 2 * spread / layout.dense_shards
    return sum(all_to_all_seconds(volume, group, training) for volume in (gathered, shared_out) if volume)


def layer_tensors(model: ModelShape, *, experts: bool) -> Iterator[list[tuple[int, int]]]:
    """Yield, for every tensor of a layer that one rank computes at a time, rows and columns of its matrices."""
    for matrix in model.attention_matrices:
        if matrix.name == "qkv":
            keys, values = model.kv_heads * model.head_dim, model.kv_heads * model.value_dim
            yield [(rows, matrix.inputs) for rows in (model.heads * model.head_dim, keys, values)]
        else:
            yield [(matrix.outputs, matrix.inputs)]
    if not experts:
        yield from _mlp_tensors(model, model.mlp_matrices(model.ffn))
        return
    assert model.experts is not None, "a layer with experts"
    yield [(model.experts.count, model.hidden)]
    yield from _mlp_tensors(model, model.mlp_matrices(model.experts.shared_ffn))
    for _ in range(model.experts.count):
        yield from _mlp_tensors(model, model.expert_matrices)


def _mlp_tensors(model: ModelShape, matrices: tuple[WeightMatrix, ...]) -> Iterator[list[tuple[int, int]]]:
    for matrix in matrices:
        if matrix.name == "up" and model.gated:
            yield [(matrix.outputs // 2, matrix.inputs)] * 2
        else:
            yield [(matrix.outputs, matrix.inputs)]
