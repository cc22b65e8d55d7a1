"""The prediction of one layout: memory of every pipeline rank, then the seconds of a step.

A step is the pipeline of micro-batches, simulated chunk by chunk, then data-parallel communication as far as nothing
hides it, then the optimizer. Everything a layer costs is in `layer_time.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

from trainshed.plan.flops import TRAINING_PER_FORWARD
from trainshed.plan.layout import RankLayout
from trainshed.plan.model_shape import LayerKind, ModelShape, WeightMatrix
from trainshed.plan.performance.layer_time import (
    LOW_PRECISIONS,
    KernelTimes,
    LayerTimes,
    PassTimes,
    collective_group,
    layer_times,
)
from trainshed.plan.performance.memory import GpuMemory, backward_share, head_chunk, rank_memory, rank_weights
from trainshed.plan.performance.pipeline import PipelinePasses, pipeline_seconds
from trainshed.plan.performance.stalls import (
    stall_likelihood,
    stall_risk_seconds,
    stalled_step_seconds,
    transfer_stall_seconds,
)
from trainshed.plan.training_shape import TrainingShape


@dataclass(frozen=True)
class StepTimes:
    """Where the seconds of a step go on the slowest pipeline rank; they add up to the step."""

    compute: float
    tp: float
    cp: float
    ep: float
    pp_bubble: float
    """Waiting for other stages, and handing over to them."""
    dp_exposed: float
    """Reducing gradients and gathering weights, as far as nothing hides it."""
    optimizer: float
    """The update, and adding up the gradients of micro-batches where that is a pass of its own."""
    other: float
    """Launches the GPU waits for, and what every step costs whatever its size."""

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(getattr(self, part.name) for part in fields(self))

    def scaled(self, factor: float) -> StepTimes:
        """Return every part times a factor."""
        return replace(self, **{part.name: factor * getattr(self, part.name) for part in fields(self)})


@dataclass(frozen=True)
class StagePrediction:
    """One pipeline rank."""

    stage: int
    layers: int
    forward_seconds: float
    """One micro-batch through all chunks of the rank, without waiting."""
    backward_seconds: float
    memory: GpuMemory


@dataclass(frozen=True)
class LayoutPrediction:
    """What one layout would do."""

    layout: RankLayout
    step_seconds: float
    times: StepTimes
    stages: tuple[StagePrediction, ...]
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    """Model FLOPs with causal attention, as `plan/flops.py` counts them; recomputation is not counted."""
    mfu: float
    """Against the dense peak of the dtype of the products."""
    peak_tflops: float
    risk_seconds: float = 0.0
    """What stalls that come and go add on average; not in the step, and what choices are made with."""
    stall_likelihood: float = 0.0
    """How likely a run of its kind is held up."""
    stall_seconds: float = 0.0
    """What a step of it then takes besides."""

    @property
    def ranking_seconds(self) -> float:
        """What layouts are chosen by."""
        return self.step_seconds + self.risk_seconds

    @property
    def memory(self) -> GpuMemory:
        """The fullest stage."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        """Whether every stage fits its card."""
        return self.memory.fits


NEARLY_FULL = 0.94
"""Of the card, from where a prediction that is a little off would mean that a layout does not fit."""
_SQUEEZED, _OVERFULL = 0.96, 1.02
"""Of the card, what a rank asks for in backward where the allocator begins to give back and ask again, and where it
surely does: of 30 runs of the ultra-scale sweep beyond 0.97 all but seven took 1.6 to 8 times as long."""
_MEMORY_OFF_BY = 0.045
"""The median error of the sweep's memory."""


@dataclass(frozen=True)
class _Chunk:
    """One chunk of the model for one micro-batch, on the GPU and on the host that feeds it."""

    forward: PassTimes
    backward: PassTimes
    host: float
    handover: float
    """What handing over costs the rank in each pass."""

    @cached_property
    def waiting(self) -> float:
        """What the GPU waits for the host."""
        return max(0.0, self.host - self.forward.total - self.backward.total)

    @cached_property
    def forward_seconds(self) -> float:
        """Forward, its share of the waiting included."""
        return self.forward.total + self.waiting / 3 + self.handover

    @cached_property
    def backward_seconds(self) -> float:
        """Backward, its share of the waiting included."""
        return self.backward.total + self.waiting * 2 / 3 + self.handover


def predict(job: TrainingShape, layout: RankLayout) -> LayoutPrediction:
    """Predict what a layout would do; the layout must be legal."""
    chunks = _chunks(job, layout)
    times = _times(job, layout, chunks)
    stages = tuple(_stage(job, layout, chunks, rank) for rank in range(layout.pp))
    peak = peak_tflops(job)
    # Weights that are not trained have no gradient: their backward pass is one product instead of two.
    passes = TRAINING_PER_FORWARD - (1 - job.habits.trained_share)
    flops = passes * job.model.token_flops(job.sequence_length) * job.tokens_per_step
    tflops = flops / times.total / job.gpus / 1e12
    return LayoutPrediction(
        layout=layout,
        step_seconds=times.total,
        times=times,
        stages=stages,
        tokens_per_second_per_gpu=job.tokens_per_step / times.total / job.gpus,
        tflops_per_gpu=tflops,
        mfu=tflops / peak,
        peak_tflops=peak,
        risk_seconds=_risk_seconds(job, layout, times.total),
        stall_likelihood=stall_likelihood(job, layout),
        stall_seconds=stalled_step_seconds(job, layout) * job.calibration,
    )


def predict_seconds(job: TrainingShape, layout: RankLayout) -> float:
    """Predict the seconds of a step alone."""
    return _times(job, layout, _chunks(job, layout)).total


def predict_memory(job: TrainingShape, layout: RankLayout) -> tuple[GpuMemory, ...]:
    """Predict the peak memory of every pipeline rank, first to last."""
    return tuple(rank_memory(job, layout, rank) for rank in range(layout.pp))


def _times(job: TrainingShape, layout: RankLayout, chunks: list[_Chunk]) -> StepTimes:
    micro = max(1, layout.micro_batches(job.global_batch))
    hop = _hop_seconds(job, layout)
    forward = [chunk.forward_seconds * job.stack.imbalance for chunk in chunks]
    backward = [chunk.backward_seconds * job.stack.imbalance for chunk in chunks]
    passes = pipeline_seconds(PipelinePasses.of(forward, backward, layout.pp, hop=hop, schedule=layout.schedule), micro)
    times = _step_times(job, layout, chunks, micro, passes)
    times = replace(times, other=times.other + times.total * _memory_pressure(job, layout, pending=False))
    return times.scaled(job.calibration)


def _nodes(job: TrainingShape) -> int:
    return -(-job.gpus // job.hardware.gpus_per_node)


def _memory_pressure(job: TrainingShape, layout: RankLayout, *, pending: bool, off_by: float = 0.0) -> float:
    """How much longer a step takes because backward asks the fullest rank for more than its card has."""
    if not job.stack.squeeze:
        return 0.0
    asked = max(backward_share(job, layout, rank, pending=pending) for rank in range(layout.pp)) * (1 + off_by)
    return job.stack.squeeze * min(1.0, max(0.0, (asked - _SQUEEZED) / (_OVERFULL - _SQUEEZED)))


def _risk_seconds(job: TrainingShape, layout: RankLayout, step_seconds: float) -> float:
    """What a step loses on average to what comes and goes: stalls, and an allocator that has to take back."""
    risk = stall_risk_seconds(job, layout, step_seconds / job.calibration) * job.calibration
    if job.stack.pending_bytes:
        cases = (-_MEMORY_OFF_BY, 0.0, _MEMORY_OFF_BY)
        longer = sum(1 + _memory_pressure(job, layout, pending=True, off_by=case) for case in cases) / len(cases)
        risk += step_seconds * max(0.0, longer / (1 + _memory_pressure(job, layout, pending=False)) - 1)
    return risk


def peak_tflops(job: TrainingShape) -> float:
    """Return the dense peak that MFU is measured against: that of the dtype of the products."""
    peaks = job.hardware.gpu.dense_tflops
    return peaks.peak(LOW_PRECISIONS.get(job.precision, job.precision)) or peaks.half


def _chunks(job: TrainingShape, layout: RankLayout) -> list[_Chunk]:
    """All chunks; those between the first and the head that have the same layers are one and the same."""
    kernels = KernelTimes(job)
    kinds = _layers(job, layout, kernels)
    head, last = head_chunk(job, layout), layout.pp * layout.vp - 1
    alike: dict[tuple[tuple[LayerKind, int], ...], _Chunk] = {}
    chunks = []
    for index in range(last + 1):
        layers = job.model.kinds(layout.chunk_layers(index))
        if index in (0, head, last):
            chunks.append(_chunk(job, layout, kernels, kinds, index, layers))
            continue
        key = tuple(layers.items())
        if key not in alike:
            alike[key] = _chunk(job, layout, kernels, kinds, index, layers)
        chunks.append(alike[key])
    return chunks


def _layers(job: TrainingShape, layout: RankLayout, kernels: KernelTimes) -> dict[LayerKind, LayerTimes]:
    """The times of each kind of layer that the model has, and of those that predict further tokens."""
    kinds = {*job.model.kinds(range(job.model.layers)), *([_extra_kind(job.model)] if job.model.extra_heads else [])}
    return {kind: layer_times(job, layout, kernels, kind) for kind in kinds}


def _extra_kind(model: ModelShape) -> LayerKind:
    return LayerKind(model.has_experts(model.layers - 1), False)


def _chunk(
    job: TrainingShape,
    layout: RankLayout,
    kernels: KernelTimes,
    kinds: Mapping[LayerKind, LayerTimes],
    index: int,
    layers: Mapping[LayerKind, int],
) -> _Chunk:
    model, stack = job.model, job.stack
    crossing = layout.tp > 1 and layout.pp > 1 and job.gpus > job.hardware.gpus_per_node
    handover = _transfer_seconds(job, layout) * stack.pp_busy + stack.handover_us * 1e-6 if layout.pp > 1 else 0.0
    slow = (stack.pipeline_layer_us + stack.pipeline_hop_us * (layout.tp - 1)) * 1e-6 if crossing else 0.0
    forward, backward, host = PassTimes(), PassTimes(), stack.host_micro_batch_us * 1e-6 / layout.vp
    for kind, count in layers.items():
        one = kinds[kind]
        forward, backward = forward + one.forward.times(count), backward + one.backward.times(count)
        host += count * (one.host + slow)
    if index == 0:
        backward += PassTimes(_embedding_seconds(job, layout, kernels))
    if index == head_chunk(job, layout):
        extra = _head(job, layout, kernels)
        forward, backward = forward + extra[0], backward + extra[1]
        for _ in range(model.extra_heads):
            one = kinds[_extra_kind(model)]
            forward, backward = forward + one.forward + extra[0], backward + one.backward + extra[1]
    trained = job.habits.trained_share
    if trained < 1:
        backward = backward.times((1 + trained) / 2)
    return _Chunk(forward, backward, host, handover + transfer_stall_seconds(job, layout, index))


def _embedding_seconds(job: TrainingShape, layout: RankLayout, kernels: KernelTimes) -> float:
    return kernels.moved(6 * job.rank_tokens(layout) * job.model.hidden)


def _head(job: TrainingShape, layout: RankLayout, kernels: KernelTimes) -> tuple[PassTimes, PassTimes]:
    model = job.model
    tokens = job.rank_tokens(layout)
    product = WeightMatrix("head", model.hidden, model.vocab_size, "out")
    forward, backward = kernels.product(tokens, product, layout.tp, low=False)
    loss = kernels.moved(4 * tokens * model.vocab_size / layout.tp * job.stack.loss_passes)
    return PassTimes(forward + loss / 2), PassTimes(backward + loss / 2)


def _hop_seconds(job: TrainingShape, layout: RankLayout) -> float:
    """How much later the next stage can begin."""
    if layout.pp == 1:
        return 0.0
    return _transfer_seconds(job, layout) * (1 - job.stack.pp_hidden) + job.stack.hop_us * 1e-6


def _transfer_seconds(job: TrainingShape, layout: RankLayout) -> float:
    """What handing the activations of a micro-batch to the next stage takes."""
    volume = 2 * job.rank_tokens(layout) * job.model.hidden / job.stream_shards(layout)
    far = layout.stage_ranks >= job.hardware.link_domain
    speed = job.hardware.network_gb_per_s * job.stack.network if far else job.hardware.link_gb_per_s * job.stack.link
    return volume / (speed * 1e9)


def _step_times(job: TrainingShape, layout: RankLayout, chunks: list[_Chunk], micro: int, passes: float) -> StepTimes:
    """Share the step out over its parts, seen from the rank with the most work."""
    busy = [[chunks[index] for index in layout.chunks(rank)] for rank in range(layout.pp)]
    work = [sum(chunk.forward_seconds + chunk.backward_seconds for chunk in own) for own in busy]
    worst = max(range(layout.pp), key=lambda rank: work[rank])
    own, factor = busy[worst], micro * job.stack.imbalance
    spent = PassTimes()
    for chunk in own:
        spent = spent + chunk.forward + chunk.backward
    waiting = sum(chunk.waiting for chunk in own) * factor
    bubble = max(0.0, passes - work[worst] * factor) + 2 * sum(chunk.handover for chunk in own) * factor
    exposed = _data_parallel_seconds(job, layout, worst, own, micro)
    dense, expert, _ = rank_weights(job, layout, worst)
    return StepTimes(
        compute=spent.compute * factor,
        tp=spent.tp * factor,
        cp=spent.cp * factor,
        ep=spent.ep * factor,
        pp_bubble=bubble,
        dp_exposed=exposed,
        optimizer=_optimizer_seconds(job, layout, dense, expert)
        + _accumulation_seconds(job, layout, dense, expert, micro),
        other=waiting + (job.stack.step_ms + job.stack.node_ms * (_nodes(job) - 1)) * 1e-3,
    )


def _data_parallel_seconds(job: TrainingShape, layout: RankLayout, rank: int, own: list[_Chunk], micro: int) -> float:
    """Seconds of gradient reduction and weight gathering that nothing hides."""
    dense, expert, _ = rank_weights(job, layout, rank)
    stack, trained = job.stack, job.habits.trained_share
    group = collective_group(layout.dp * layout.cp, layout.tp, job.hardware, stack)
    among = collective_group(layout.edp, layout.ep * layout.etp, job.hardware, stack)
    one_forward = sum(chunk.forward_seconds for chunk in own)
    one_backward = sum(chunk.backward_seconds for chunk in own)
    if layout.shard == "full":
        return _fully_sharded_seconds(job, layout, dense, expert, one_forward, one_backward, micro)
    # Hybrid: states are sharded among some ranks, and all copies still add up their gradients.
    rings = 2 if layout.copies > 1 or stack.reduces_whole else 1
    wire = 2.0 if job.habits.half_gradients else stack.reduce_bytes
    among_shards = collective_group(layout.dense_shards, layout.tp, job.hardware, stack)
    reduce = rings * (group.ring_seconds(wire * dense) + among.ring_seconds(wire * expert))
    gather = 0.0
    if layout.shard != "none":
        gather = among_shards.ring_seconds(2 * dense) + among.ring_seconds(2 * expert)
        layers = sum(layout.stages[index] for index in layout.chunks(rank))
        gather += 2 * layers * stack.shard_messages * among_shards.hops_us * 1e-6
    reduce, gather = reduce * trained, gather * trained
    if not job.habits.overlap:
        return reduce + gather
    return max(0.0, reduce - stack.dp_hidden * one_backward) + max(0.0, gather - stack.gather_hidden * one_forward)


def _fully_sharded_seconds(
    job: TrainingShape, layout: RankLayout, dense: float, expert: float, forward: float, backward: float, micro: int
) -> float:
    stack = job.stack
    shard = layout.dense_shards
    group = collective_group(shard, layout.tp, job.hardware, stack)
    copies = collective_group(layout.copies, layout.tp * shard, job.hardware, stack)
    gather = group.ring_seconds(2 * (dense + expert))
    scatter = group.ring_seconds(stack.reduce_bytes * (dense + expert)) * job.habits.trained_share
    # Weights are gathered for every pass, gradients scattered after every backward.
    each = _exposed_seconds(gather, forward, stack.fsdp_slowdown) + _exposed_seconds(
        gather + scatter, backward, stack.fsdp_slowdown
    )
    # Copies add up their gradients layer by layer, under what is left of the last backward pass.
    last = 2 * copies.ring_seconds(stack.reduce_bytes * (dense + expert) / shard)
    return micro * each + max(0.0, last - stack.dp_hidden * backward)


def _exposed_seconds(communication: float, compute: float, slowdown: float) -> float:
    """What communication adds to the compute it runs under: what sticks out, and kernels slowed by sharing the GPU."""
    return max(communication - compute, 0.0) + slowdown * min(communication, compute)


def _optimizer_seconds(job: TrainingShape, layout: RankLayout, dense: float, expert: float) -> float:
    """Read and write the states once: 16 bytes of them, gradients and weights besides."""
    kernels = KernelTimes(job)
    mine = (dense / layout.dense_shards + expert / layout.expert_shards) * job.habits.trained_share
    norm = kernels.moved(job.stack.gradient_bytes * mine)
    return kernels.moved(30 * mine) * job.stack.optimizer + norm


def _accumulation_seconds(job: TrainingShape, layout: RankLayout, dense: float, expert: float, micro: int) -> float:
    """Add the gradients of every micro-batch but the first to those before it."""
    if layout.shard in ("full", "zero2"):
        dense, expert = dense / layout.dense_shards, expert / layout.expert_shards
    each = KernelTimes(job).moved(job.stack.added_bytes * (dense + expert) * job.habits.trained_share)
    return (micro - 1) * each


def _stage(job: TrainingShape, layout: RankLayout, chunks: list[_Chunk], rank: int) -> StagePrediction:
    own = [chunks[index] for index in layout.chunks(rank)]
    return StagePrediction(
        stage=rank,
        layers=sum(layout.stages[index] for index in layout.chunks(rank)),
        forward_seconds=sum(chunk.forward_seconds for chunk in own),
        backward_seconds=sum(chunk.backward_seconds for chunk in own),
        memory=rank_memory(job, layout, rank),
    )
