"""Two ways a run can go that no arithmetic tells apart: the host ahead of its GPU, or held up at every message.

The ultra-scale sweep (nanotron) has both, often for the same layout measured twice. Ahead, the host has queued the
collectives of many layers, and what they gathered stays allocated until the GPU is through with it. Held up, every
transfer between stages takes 0.27 s whatever its size, and nothing is allocated ahead (in 48 of 49 runs whose memory
tells). No column says why. What a layout can tell is here; what it cannot is a risk, which is not in the predicted step
but counts where layouts are chosen, and says what to try if the chosen one is held up.
"""

from __future__ import annotations

from trainshed.plan.layout import RankLayout
from trainshed.plan.training_shape import TrainingShape

_STALLING_NODES = 64
"""All 146 pipelines of the sweep on so many nodes were held up."""
_RISKY_NODES, _RISK = 32, 0.5
"""On 32 nodes 65 of 126 pipelines were held up; on fewer, one in six at most."""
_SMALL_TP_RISK, _TP_RISK, _FAR_TP_RISK = 0.5, 0.75, 0.25
"""Without a pipeline, on as many nodes as hold up every pipeline, these were held up, in each layer: 3 of
6 runs whose tensor-parallel group is smaller than a node, 13 of 17 whose group fills one or two, 6 of 25 of four."""
_LAYER_STALL_SECONDS, _TAKEN = 0.045, 0.45
"""What such a layer loses (the middle of 16 runs), and how much of the likelihood counts in a choice: as the mean of
logarithms, and less than half of it, since a layout that is never tried cannot turn out the fastest."""
_STALLING_TP_NODES = 4
"""Nodes of a tensor-parallel group from which pipelines were held up on any number of nodes: all 100 of them."""
_LAYERS_AHEAD = 32
"""Layers that a host is ahead of its GPU at most: about what fits into the queue of 1,024 launches."""
_PASSES_AHEAD, _PIPELINED_LAYERS_AHEAD = 3, 20
"""Forward passes that a stage must start in a row, and layers in them, for its host to get ahead at all."""
_PIPELINE_SHARE = 0.7
"""Of what is pending without a pipeline, what the passes of one stage add up to."""


def transfer_stall_seconds(job: TrainingShape, layout: RankLayout, chunk: int) -> float:
    """Return what a pass through a chunk loses at its transfers where pipelines stall."""
    return _transfer_stall(job, layout, chunk) if _always_stalls(job, layout) else 0.0


def stall_likelihood(job: TrainingShape, layout: RankLayout) -> float:
    """Return how likely a run is held up where some are and others are not; 0 also where all of them are."""
    per_node = job.hardware.gpus_per_node
    if not job.stack.stall_ms:
        return 0.0
    if layout.pp > 1:
        return _RISK if job.gpus >= _RISKY_NODES * per_node and not _always_stalls(job, layout) else 0.0
    if layout.tp == 1 or job.gpus < _STALLING_NODES * per_node:
        return 0.0
    if layout.tp >= _STALLING_TP_NODES * per_node:
        return _FAR_TP_RISK
    return _SMALL_TP_RISK if layout.tp < per_node else _TP_RISK


def stalled_step_seconds(job: TrainingShape, layout: RankLayout) -> float:
    """Return what a step takes besides if it is held up."""
    micro_batches = layout.micro_batches(job.global_batch)
    if layout.pp == 1:
        return _LAYER_STALL_SECONDS * job.model.layers * micro_batches
    worst = max(_transfer_stall(job, layout, chunk) for chunk in range(layout.pp))
    return 2 * worst * layout.vp * micro_batches


def stall_risk_seconds(job: TrainingShape, layout: RankLayout, step_seconds: float) -> float:
    """Return what a step loses on average where some runs are held up and others are not."""
    likely = stall_likelihood(job, layout)
    if not likely:
        return 0.0
    lost = stalled_step_seconds(job, layout)
    if layout.pp > 1:
        return likely * lost
    return step_seconds * ((1 + lost / step_seconds) ** (_TAKEN * likely) - 1)


def _transfer_stall(job: TrainingShape, layout: RankLayout, chunk: int) -> float:
    """Seconds of the transfers of one pass: one at the ends of the pipeline, two between."""
    if layout.pp == 1:
        return 0.0
    at_end = chunk in (0, layout.pp * layout.vp - 1)
    return job.stack.stall_ms * 1e-3 * (1 if at_end else 2)


def pending_gathered_bytes(job: TrainingShape, layout: RankLayout, rank: int) -> float:
    """Return what tensor-parallel ranks gathered and other streams have not let go of yet."""
    if layout.tp == 1 or not job.stack.pending_bytes or _always_stalls(job, layout):
        return 0.0
    whole = job.stack.pending_bytes * job.rank_tokens(layout) * job.model.hidden
    if layout.pp == 1:
        return whole * min(1.0, layout.micro_batches(job.global_batch) * job.model.layers / _LAYERS_AHEAD)
    passes = layout.pp - rank - 1
    layers = sum(layout.stages[chunk] for chunk in layout.chunks(rank))
    ahead = passes >= _PASSES_AHEAD and passes * layers >= _PIPELINED_LAYERS_AHEAD
    return whole * _PIPELINE_SHARE if ahead else 0.0


def _always_stalls(job: TrainingShape, layout: RankLayout) -> bool:
    per_node = job.hardware.gpus_per_node
    far = layout.tp >= _STALLING_TP_NODES * per_node
    if layout.pp == 1 and far:
        return False
    return far or job.gpus >= _STALLING_NODES * per_node
