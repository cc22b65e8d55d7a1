"""Runs that stall: every transfer between pipeline stages then takes 0.27 s, whatever its size.

The ultra-scale sweep (nanotron) has runs that stall and runs that do not, often of the same layout. A run that does not
stall has its host ahead of the GPU: collectives of many layers are queued, and what they gather stays allocated until
the GPU has used it. In a run that stalls nothing is allocated ahead (in 48 of 49 runs that report memory). No column
says why. Where every run of a kind of layout stalls, the prediction counts it. Where only some do, it is a risk: it is
not part of the predicted step, but layouts are ranked with it.
"""

from __future__ import annotations

from trainshed.plan.layout import RankLayout
from trainshed.plan.training_shape import TrainingShape

_STALLING_NODES = 64
"""All 146 pipelines of the sweep on 64 nodes stalled."""
_RISKY_NODES, _RISK = 32, 0.5
"""On 32 nodes 65 of 126 pipelines stalled; on fewer, one in six at most."""
_SMALL_TP_RISK, _TP_RISK, _FAR_TP_RISK = 0.5, 0.75, 0.25
"""Without a pipeline, on 64 nodes, these runs stalled in each layer: 3 of 6 whose tensor-parallel group is smaller
than a node, 13 of 17 whose group fills one or two nodes, 6 of 25 whose group fills four."""
_LAYER_STALL_SECONDS, _COUNTED_SHARE = 0.045, 0.45
"""What such a layer loses (the median of 16 runs), and which share of the likelihood counts where layouts are ranked,
as a mean of logarithms. It is below a half, since a layout that is never tried cannot turn out to be the fastest."""
_STALLING_TP_NODES = 4
"""All 100 pipelines whose tensor-parallel group has this many nodes or more stalled, on any number of nodes."""
_LAYERS_AHEAD = 32
"""Layers that a host is ahead of its GPU at most: about what fits into CUDA's queue of 1,024 launches."""
_PASSES_AHEAD, _PIPELINED_LAYERS_AHEAD = 3, 20
"""Forward passes that a stage must start in a row, and layers in them, for its host to get ahead at all."""
_PIPELINE_SHARE = 0.7
"""Pending bytes of a pipeline stage, relative to those without a pipeline."""


def transfer_stall_seconds(training: TrainingShape, layout: RankLayout, chunk: int) -> float:
    """Return the seconds that a pass through a chunk loses at its transfers where every such run stalls."""
    return _transfer_stall(training, layout, chunk) if _always_stalls(training, layout) else 0.0


def stall_likelihood(training: TrainingShape, layout: RankLayout) -> float:
    """Return how likely a run stalls; 0 also where every such run stalls, as the prediction counts that."""
    per_node = training.hardware.gpus_per_node
    if not training.constants.stall_ms:
        return 0.0
    if layout.pp > 1:
        return _RISK if training.gpus >= _RISKY_NODES * per_node and not _always_stalls(training, layout) else 0.0
    if layout.tp == 1 or training.gpus < _STALLING_NODES * per_node:
        return 0.0
    if layout.tp >= _STALLING_TP_NODES * per_node:
        return _FAR_TP_RISK
    return _SMALL_TP_RISK if layout.tp < per_node else _TP_RISK


def stalled_step_seconds(training: TrainingShape, layout: RankLayout) -> float:
    """Return how many seconds longer a step takes if the run stalls."""
    micro_batches = layout.micro_batches(training.global_batch)
    if layout.pp == 1:
        return _LAYER_STALL_SECONDS * training.model.layers * micro_batches
    worst = max(_transfer_stall(training, layout, chunk) for chunk in range(layout.pp))
    return 2 * worst * layout.vp * micro_batches


def stall_risk_seconds(training: TrainingShape, layout: RankLayout, step_seconds: float) -> float:
    """Return the seconds that a step loses on average where some runs stall."""
    likelihood = stall_likelihood(training, layout)
    if not likelihood:
        return 0.0
    lost = stalled_step_seconds(training, layout)
    if layout.pp > 1:
        return likelihood * lost
    return step_seconds * ((1 + lost / step_seconds) ** (_COUNTED_SHARE * likelihood) - 1)


def _transfer_stall(training: TrainingShape, layout: RankLayout, chunk: int) -> float:
    """Seconds of the transfers of one pass: one transfer at the ends of the pipeline, two between."""
    if layout.pp == 1:
        return 0.0
    at_end = chunk in (0, layout.pp * layout.vp - 1)
    return training.constants.stall_ms * 1e-3 * (1 if at_end else 2)


def pending_gathered_bytes(training: TrainingShape, layout: RankLayout, rank: int) -> float:
    """Return the bytes of gathered tensor-parallel inputs that other streams have not freed yet."""
    if layout.tp == 1 or not training.constants.pending_bytes or _always_stalls(training, layout):
        return 0.0
    whole = training.constants.pending_bytes * training.rank_tokens(layout) * training.model.hidden
    if layout.pp == 1:
        return whole * min(1.0, layout.micro_batches(training.global_batch) * training.model.layers / _LAYERS_AHEAD)
    passes = layout.pp - rank - 1
    layers = sum(layout.stages[chunk] for chunk in layout.chunks(rank))
    ahead = passes >= _PASSES_AHEAD and passes * layers >= _PIPELINED_LAYERS_AHEAD
    return whole * _PIPELINE_SHARE if ahead else 0.0


def _always_stalls(training: TrainingShape, layout: RankLayout) -> bool:
    per_node = training.hardware.gpus_per_node
    far = layout.tp >= _STALLING_TP_NODES * per_node
    if layout.pp == 1 and far:
        return False
    return far or training.gpus >= _STALLING_NODES * per_node
