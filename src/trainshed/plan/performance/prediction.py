"""The prediction of one layout (`predict`): the memory of every pipeline rank, and the seconds of a step.

A step is the pipeline of micro-batches, simulated chunk by chunk, then the data-parallel communication that is not
hidden, then the optimizer. The time of one layer is in `layer_time.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

from trainshed.plan.flops import mixed_peak
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
from trainshed.plan.performance.memory import (
    GpuMemory,
    backward_share,
    head_chunk,
    layer_activation_bytes,
    matrix_rank_weights,
    rank_memory,
    rank_weights,
    trained_rank_weights,
)
from trainshed.plan.performance.muon_time import muon_seconds
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
    """The seconds of a step on the slowest pipeline rank by part; they add up to the step."""

    compute: float
    tp: float
    cp: float
    ep: float
    pp_bubble: float
    """Waiting for other stages, and sending to them."""
    dp_exposed: float
    """Reducing gradients and gathering weights, as far as it is not hidden."""
    optimizer: float
    """The update, and the accumulation of gradients where that is a kernel of its own."""
    other: float
    """Kernel launches that the GPU waits for, and the fixed time of a step."""

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
    """Relative to the dense peak of the matmuls' dtype."""
    peak_tflops: float
    risk_seconds: float = 0.0
    """What stalls add on average; it is not part of `step_seconds`, but layouts are ranked with it."""
    stall_likelihood: float = 0.0
    """How likely a run of this layout stalls."""
    stall_seconds: float = 0.0
    """How much longer a step then takes."""

    @property
    def ranking_seconds(self) -> float:
        """Seconds that layouts are ranked by."""
        return self.step_seconds + self.risk_seconds

    @property
    def memory(self) -> GpuMemory:
        """The fullest stage."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        """Whether every stage fits its GPU."""
        return self.memory.fits


NEARLY_FULL = 0.94
"""Share of the GPU's memory above which a layout may not fit if the prediction is a little off."""
_ALMOST_FULL, _OVERFULL = 0.96, 1.02
"""Share of the GPU's memory that backward allocates where the allocator begins to free cached blocks, and where it
always does: of 30 runs of the ultra-scale sweep above 0.97 all but seven took 1.6 to 8 times as long."""
_MEMORY_OFF_BY = 0.045
"""The median error of the sweep's memory."""


@dataclass(frozen=True)
class _Chunk:
    """Times of one chunk of the model for one micro-batch."""

    forward: PassTimes
    backward: PassTimes
    host: float
    """Host time to launch its kernels."""
    send: float
    """Seconds that the rank loses in each pass to send to the next stage."""

    @cached_property
    def waiting(self) -> float:
        """Seconds that the GPU waits for the host."""
        return max(0.0, self.host - self.forward.total - self.backward.total)

    @cached_property
    def forward_seconds(self) -> float:
        """Forward, with its share of the waiting."""
        return self.forward.total + self.waiting / 3 + self.send

    @cached_property
    def backward_seconds(self) -> float:
        """Backward, with its share of the waiting."""
        return self.backward.total + self.waiting * 2 / 3 + self.send


def predict(training: TrainingShape, layout: RankLayout) -> LayoutPrediction:
    """Predict a legal layout."""
    chunks = _chunks(training, layout)
    times = _times(training, layout, chunks)
    stages = tuple(_stage(training, layout, chunks, rank) for rank in range(layout.pp))
    peak = peak_tflops(training)
    tflops = training.flops_per_token * training.tokens_per_step / times.total / training.gpus / 1e12
    return LayoutPrediction(
        layout=layout,
        step_seconds=times.total,
        times=times,
        stages=stages,
        tokens_per_second_per_gpu=training.tokens_per_step / times.total / training.gpus,
        tflops_per_gpu=tflops,
        mfu=tflops / peak,
        peak_tflops=peak,
        risk_seconds=_risk_seconds(training, layout, times.total),
        stall_likelihood=stall_likelihood(training, layout),
        stall_seconds=stalled_step_seconds(training, layout) * training.calibration,
    )


def predict_seconds(training: TrainingShape, layout: RankLayout) -> float:
    """Predict the seconds of a step only, which is faster."""
    return _times(training, layout, _chunks(training, layout)).total


def predict_memory(training: TrainingShape, layout: RankLayout) -> tuple[GpuMemory, ...]:
    """Predict the peak memory of every pipeline rank, first to last."""
    return tuple(rank_memory(training, layout, rank) for rank in range(layout.pp))


def _times(training: TrainingShape, layout: RankLayout, chunks: list[_Chunk]) -> StepTimes:
    micro = max(1, layout.micro_batches(training.global_batch))
    hop = _hop_seconds(training, layout)
    forward = [chunk.forward_seconds * training.constants.imbalance for chunk in chunks]
    backward = [chunk.backward_seconds * training.constants.imbalance for chunk in chunks]
    passes = pipeline_seconds(PipelinePasses.of(forward, backward, layout.pp, hop=hop, schedule=layout.schedule), micro)
    times = _step_times(training, layout, chunks, micro, passes)
    times = replace(times, other=times.other + times.total * _memory_pressure(training, layout, pending=False))
    return times.scaled(training.calibration)


def _nodes(training: TrainingShape) -> int:
    return -(-training.gpus // training.hardware.gpus_per_node)


def _memory_pressure(training: TrainingShape, layout: RankLayout, *, pending: bool, off_by: float = 0.0) -> float:
    """How much longer a step takes because backward needs more memory than the fullest rank has."""
    if not training.constants.full_memory_slowdown:
        return 0.0
    share = max(backward_share(training, layout, rank, pending=pending) for rank in range(layout.pp)) * (1 + off_by)
    return training.constants.full_memory_slowdown * min(
        1.0, max(0.0, (share - _ALMOST_FULL) / (_OVERFULL - _ALMOST_FULL))
    )


def _risk_seconds(training: TrainingShape, layout: RankLayout, step_seconds: float) -> float:
    """Seconds that a step loses on average to stalls and to an allocator that has to free cached blocks."""
    risk = stall_risk_seconds(training, layout, step_seconds / training.calibration) * training.calibration
    if training.constants.pending_bytes:
        cases = (-_MEMORY_OFF_BY, 0.0, _MEMORY_OFF_BY)
        longer = sum(1 + _memory_pressure(training, layout, pending=True, off_by=case) for case in cases) / len(cases)
        risk += step_seconds * max(0.0, longer / (1 + _memory_pressure(training, layout, pending=False)) - 1)
    return risk


def peak_tflops(training: TrainingShape) -> float:
    """Return the dense peak that MFU is measured against: that of the matmuls' dtype; of two where experts differ."""
    peaks = training.hardware.gpu.dense_tflops
    peak = peaks.peak(LOW_PRECISIONS.get(training.precision, training.precision)) or peaks.half
    if training.precision in LOW_PRECISIONS and training.wide_experts:
        return mixed_peak(peak, peaks.half, training.expert_share)
    return peak


def _chunks(training: TrainingShape, layout: RankLayout) -> list[_Chunk]:
    """All chunks; equal chunks between the first and the head are computed once."""
    kernels = KernelTimes(training)
    kinds = _layers(training, layout, kernels)
    head, last = head_chunk(training, layout), layout.pp * layout.vp - 1
    known: dict[tuple[tuple[LayerKind, int], ...], _Chunk] = {}
    chunks = []
    for index in range(last + 1):
        layers = training.model.layer_kinds(layout.chunk_layers(index))
        if index in (0, head, last):
            chunks.append(_chunk(training, layout, kernels, kinds, index, layers))
            continue
        key = tuple(layers.items())
        if key not in known:
            known[key] = _chunk(training, layout, kernels, kinds, index, layers)
        chunks.append(known[key])
    return chunks


def _layers(training: TrainingShape, layout: RankLayout, kernels: KernelTimes) -> dict[LayerKind, LayerTimes]:
    """The times of each kind of layer that the model has, with those of multi-token prediction."""
    model = training.model
    kinds = {*model.layer_kinds(range(model.layers)), *([_mtp_kind(model)] if model.mtp_layers else [])}
    times = {kind: layer_times(training, layout, kernels, kind) for kind in kinds}
    if layout.offload is None:
        return times
    return {kind: _with_offload(training, layout, layer, kind) for kind, layer in times.items()}


_HOST_LINK_SHARE = 0.8
"""Share of the link to the host that copies from and to pinned memory reach."""


def _with_offload(training: TrainingShape, layout: RankLayout, layer: LayerTimes, kind: LayerKind) -> LayerTimes:
    """Let a layer wait where its activations take longer to the host, or back, than it computes."""
    kept, _ = layer_activation_bytes(training, layout, experts=kind.experts)
    copy = kept / (training.hardware.gpu.host_gb_per_s * 1e9 * _HOST_LINK_SHARE)
    computing = (layer.forward.total, layer.backward.total)
    waiting = sum(max(0.0, copy - seconds) for seconds in computing)
    return replace(layer, host=max(layer.host, sum(computing) + waiting)) if waiting else layer


def _mtp_kind(model: ModelShape) -> LayerKind:
    return LayerKind(model.mtp_experts, False)


def _chunk(
    training: TrainingShape,
    layout: RankLayout,
    kernels: KernelTimes,
    kinds: Mapping[LayerKind, LayerTimes],
    index: int,
    layers: Mapping[LayerKind, int],
) -> _Chunk:
    model, constants = training.model, training.constants
    crossing = layout.tp > 1 and layout.pp > 1 and training.gpus > training.hardware.gpus_per_node
    send = transfer_stall_seconds(training, layout, index)
    if layout.pp > 1:
        send = _transfer_seconds(training, layout) * constants.pp_blocking + constants.pp_send_us * 1e-6 + send
    slow = (constants.pipeline_layer_us + constants.pipeline_hop_us * (layout.tp - 1)) * 1e-6 if crossing else 0.0
    forward, backward, host = PassTimes(), PassTimes(), constants.launch_micro_batch_us * 1e-6 / layout.vp
    for kind, count in layers.items():
        layer = kinds[kind]
        forward = forward + (layer.forward + layer.reference).times(count)
        backward = backward + layer.backward.times(count)
        host += count * (layer.host + slow)
    if index == 0 and training.lora is None:
        backward += PassTimes(_embedding_seconds(training, layout, kernels))
    if index == head_chunk(training, layout):
        head = _head(training, layout, kernels)
        forward, backward = forward + head[0].times(2 if training.preference else 1), backward + head[1]
        for _ in range(model.mtp_layers):
            layer = kinds[_mtp_kind(model)]
            forward, backward = forward + layer.forward + head[0], backward + layer.backward + head[1]
    return _Chunk(forward, backward, host, send)


def _embedding_seconds(training: TrainingShape, layout: RankLayout, kernels: KernelTimes) -> float:
    return kernels.memory_seconds(6 * training.rank_tokens(layout) * training.model.hidden)


def _head(training: TrainingShape, layout: RankLayout, kernels: KernelTimes) -> tuple[PassTimes, PassTimes]:
    model = training.model
    tokens = training.rank_tokens(layout)
    matrix = WeightMatrix("head", model.hidden, model.vocab_size, "out")
    times = kernels.matmul(tokens, matrix, layout.tp, allow_fp8=False)
    backward = times.backward if training.lora is None else times.input_gradient
    loss = kernels.memory_seconds(4 * tokens * model.vocab_size / layout.tp * training.constants.loss_passes)
    return PassTimes(times.forward + loss / 2), PassTimes(backward + loss / 2)


def _hop_seconds(training: TrainingShape, layout: RankLayout) -> float:
    """How much later the next stage can start."""
    if layout.pp == 1:
        return 0.0
    return _transfer_seconds(training, layout) * (1 - training.constants.pp_hidden) + training.constants.hop_us * 1e-6


def _transfer_seconds(training: TrainingShape, layout: RankLayout) -> float:
    """Time to send the activations of a micro-batch to the next stage."""
    hardware, constants = training.hardware, training.constants
    volume = 2 * training.rank_tokens(layout) * training.model.hidden / training.stream_shards(layout)
    if layout.stage_ranks >= hardware.link_domain:
        speed = hardware.network_gb_per_s * constants.network
    else:
        speed = hardware.link_gb_per_s * constants.link
    return volume / (speed * 1e9)


def _step_times(
    training: TrainingShape, layout: RankLayout, chunks: list[_Chunk], micro: int, passes: float
) -> StepTimes:
    """Divide the step into its parts, on the rank with the most work."""
    busy = [[chunks[index] for index in layout.chunks(rank)] for rank in range(layout.pp)]
    work = [sum(chunk.forward_seconds + chunk.backward_seconds for chunk in own) for own in busy]
    worst = max(range(layout.pp), key=lambda rank: work[rank])
    own, factor = busy[worst], micro * training.constants.imbalance
    spent = PassTimes()
    for chunk in own:
        spent = spent + chunk.forward + chunk.backward
    waiting = sum(chunk.waiting for chunk in own) * factor
    bubble = max(0.0, passes - work[worst] * factor) + 2 * sum(chunk.send for chunk in own) * factor
    exposed = _data_parallel_seconds(training, layout, worst, own, micro)
    dense, expert = trained_rank_weights(training, layout, worst)
    return StepTimes(
        compute=spent.compute * factor,
        tp=spent.tp * factor,
        cp=spent.cp * factor,
        ep=spent.ep * factor,
        pp_bubble=bubble,
        dp_exposed=exposed,
        optimizer=_optimizer_seconds(training, layout, worst)
        + _accumulation_seconds(training, layout, dense, expert, micro),
        other=waiting + _fixed_seconds(training),
    )


def _fixed_seconds(training: TrainingShape) -> float:
    """Seconds of a step besides its passes, communication and update."""
    constants = training.constants
    step_ms = constants.step_ms * (1.0 if training.lora is None else constants.adapter_step)
    return (step_ms + constants.node_ms * (_nodes(training) - 1)) * 1e-3


def _data_parallel_seconds(
    training: TrainingShape, layout: RankLayout, rank: int, own: list[_Chunk], micro: int
) -> float:
    """Seconds of gradient reduction and weight gathering that are not hidden."""
    dense, expert = trained_rank_weights(training, layout, rank)
    constants = training.constants
    dense_group = collective_group(layout.dp * layout.cp, layout.tp, training)
    expert_group = collective_group(layout.edp, layout.ep * layout.etp, training)
    one_forward = sum(chunk.forward_seconds for chunk in own)
    one_backward = sum(chunk.backward_seconds for chunk in own)
    if layout.shard == "full":
        return _fully_sharded_seconds(training, layout, rank, one_forward, one_backward, micro)
    # Hybrid: states are sharded among some ranks, and all replicas still all-reduce their gradients.
    rings = 2 if layout.replicas > 1 or constants.reduces_whole else 1
    gradient_bytes = 2.0 if training.options.bf16_gradients else constants.reduce_bytes
    shard_group = collective_group(layout.dense_shards, layout.tp, training)
    reduce = rings * (
        dense_group.all_gather_seconds(gradient_bytes * dense)
        + expert_group.all_gather_seconds(gradient_bytes * expert)
    )
    gather = 0.0
    if layout.shard != "none":
        gather = shard_group.all_gather_seconds(2 * dense) + expert_group.all_gather_seconds(2 * expert)
        layers = sum(layout.stages[index] for index in layout.chunks(rank))
        gather += 2 * layers * constants.shard_messages * shard_group.latency_us * 1e-6
    # Gradients that stay sharded are reduce-scattered in every backward pass, others in the last alone.
    reductions = micro if layout.shard == "zero2" else 1
    if not training.options.overlap:
        return reductions * reduce + gather
    exposed = max(0.0, reduce - constants.dp_hidden * one_backward)
    return reductions * exposed + max(0.0, gather - constants.gather_hidden * one_forward)


def _fully_sharded_seconds(
    training: TrainingShape,
    layout: RankLayout,
    rank: int,
    forward: float,
    backward: float,
    micro: int,
) -> float:
    constants = training.constants
    dense, expert, _ = rank_weights(training, layout, rank)
    trained = sum(trained_rank_weights(training, layout, rank))
    shard = layout.dense_shards
    group = collective_group(shard, layout.tp, training)
    replicas = collective_group(layout.replicas, layout.tp * shard, training)
    gather = group.all_gather_seconds(2 * (dense + expert))
    scatter = group.all_gather_seconds(constants.reduce_bytes * trained)
    # Weights are gathered for every pass, that of a reference too; gradients are reduce-scattered after every backward.
    gathers = gather * (2 if training.preference else 1)
    per_micro_batch = _exposed_seconds(gathers, forward, constants.fsdp_slowdown) + _exposed_seconds(
        gather + scatter, backward, constants.fsdp_slowdown
    )
    # Replicas all-reduce their gradients layer by layer during the last backward pass.
    last = 2 * replicas.all_gather_seconds(constants.reduce_bytes * trained / shard)
    return micro * per_micro_batch + max(0.0, last - constants.dp_hidden * backward)


def _exposed_seconds(communication: float, compute: float, slowdown: float) -> float:
    """What communication adds to the compute that it overlaps with: the longer part, and slower kernels."""
    return max(communication - compute, 0.0) + slowdown * min(communication, compute)


def _optimizer_seconds(training: TrainingShape, layout: RankLayout, rank: int) -> float:
    """Read and write the states once: 16 bytes per trained weight, with gradients and weights 30.

    An average of the weights is read and written too, and the weights are read for it: 12. Muon has another way.
    """
    kernels, options = KernelTimes(training), training.options

    def in_shards(dense: float, expert: float) -> float:
        return dense / layout.dense_shards + expert / layout.expert_shards

    mine = in_shards(*trained_rank_weights(training, layout, rank))
    norm = kernels.memory_seconds(training.constants.gradient_bytes * mine)
    by_adamw, by_muon = mine, 0.0
    if options.muon_steps:
        by_adamw -= in_shards(*matrix_rank_weights(training, layout, rank))
        by_muon = muon_seconds(training, layout, rank)
    moved = (22 if options.bf16_states else 30) * by_adamw + (12 * mine if options.averaged else 0.0)
    return kernels.memory_seconds(moved) * training.constants.optimizer + by_muon + norm


def _accumulation_seconds(
    training: TrainingShape, layout: RankLayout, dense: float, expert: float, micro: int
) -> float:
    """Accumulate the gradients of every micro-batch but the first."""
    if layout.shard in ("full", "zero2"):
        dense, expert = dense / layout.dense_shards, expert / layout.expert_shards
    volume = training.constants.accumulate_bytes * (dense + expert)
    return (micro - 1) * KernelTimes(training).memory_seconds(volume)


def _stage(training: TrainingShape, layout: RankLayout, chunks: list[_Chunk], rank: int) -> StagePrediction:
    own = [chunks[index] for index in layout.chunks(rank)]
    return StagePrediction(
        stage=rank,
        layers=sum(layout.stages[index] for index in layout.chunks(rank)),
        forward_seconds=sum(chunk.forward_seconds for chunk in own),
        backward_seconds=sum(chunk.backward_seconds for chunk in own),
        memory=rank_memory(training, layout, rank),
    )
