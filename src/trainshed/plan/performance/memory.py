"""Peak memory of every pipeline rank: model states, which stay allocated, and what the fullest moment of a step adds.

That moment is either in backward, with the activations of all micro-batches in flight, or in the optimizer step.
Activations are counted tensor by tensor as the kernels keep them (attention keeps no scores), without those that are
recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from trainshed.plan.layout import RankLayout
from trainshed.plan.lora_shape import layer_adapters
from trainshed.plan.model_shape import ModelShape
from trainshed.plan.performance.layer_time import LOW_PRECISIONS
from trainshed.plan.performance.stalls import pending_gathered_bytes
from trainshed.plan.training_shape import TrainingShape


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU at the peak of a step, in GiB."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    """Logits, and the temporaries of the loss."""
    buffers: float
    """Gathered weights, communication buffers, workspaces."""
    reserve: float
    """Cached memory of the allocator, and memory of the driver and NCCL."""
    capacity: float
    frozen: float = 0.0
    """The part of `weights` that is not trained: the base of adapters, or the copy that DPO refers to."""

    @property
    def trained(self) -> float:
        """Weights that are trained, their gradients and their optimizer states."""
        return self.weights - self.frozen + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """Memory that tensors fill: `torch.cuda.max_memory_allocated`."""
        return self.total - self.reserve

    @property
    def total(self) -> float:
        """Memory that the GPU must have."""
        return sum(getattr(self, part.name) for part in fields(self) if part.name not in ("capacity", "frozen"))

    @property
    def fits(self) -> bool:
        """Whether the GPU has that much."""
        return self.total <= self.capacity


_GIB = 2.0**30
_FULL = 0.85
"""Share of the GPU's memory that tensors fill when the allocator begins to reclaim pending blocks."""


class _RankBytes(NamedTuple):
    """Bytes of a rank: its states, and what it allocates at the moments that can be the fullest."""

    weights: float
    frozen: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    working: float
    gathered: float
    pending: float
    """Gathered inputs that another stream has not freed yet."""
    at_step: float
    """Temporaries of the optimizer step."""

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def in_backward(self) -> float:
        """Allocated in backward, without pending blocks."""
        return self.activations + max(self.logits, self.working) + self.gathered


def rank_memory(training: TrainingShape, layout: RankLayout, rank: int) -> GpuMemory:
    """Predict the peak of one pipeline rank."""
    constants, needed = training.constants, _rank_bytes(training, layout, rank)
    scale = training.memory_calibration / _GIB
    activations, logits = needed.activations, needed.logits
    buffers = needed.gathered + max(0.0, needed.working - logits)
    if needed.pending:
        # Before it runs out of memory the allocator reclaims pending blocks.
        full = (_FULL * training.hardware.memory_gib - constants.buffer_gib) / scale
        activations += min(needed.pending, max(0.0, full - needed.states - needed.in_backward))
    if needed.at_step > activations + logits + buffers:
        activations, logits, buffers = 0.0, 0.0, needed.at_step
    allocated = needed.states + activations + logits + buffers
    return GpuMemory(
        weights=needed.weights * scale,
        gradients=needed.gradients * scale,
        optimizer=needed.optimizer * scale,
        activations=activations * scale,
        logits=logits * scale,
        buffers=buffers * scale + constants.buffer_gib * training.memory_calibration,
        reserve=constants.reserve * allocated * scale + constants.context_gib,
        capacity=training.hardware.memory_gib,
        frozen=needed.frozen * scale,
    )


def backward_share(training: TrainingShape, layout: RankLayout, rank: int, *, pending: bool) -> float:
    """Return the share of its GPU's memory that a rank allocates in backward, with or without pending blocks.

    With them the share may be above 1: the allocator then waits for the GPU, frees cached blocks and allocates again.
    """
    constants, needed = training.constants, _rank_bytes(training, layout, rank)
    allocated = (
        needed.states + needed.in_backward + (needed.pending if pending else 0.0)
    ) / _GIB + constants.buffer_gib
    return (
        (1 + constants.reserve) * allocated * training.memory_calibration + constants.context_gib
    ) / training.hardware.memory_gib


def _rank_bytes(training: TrainingShape, layout: RankLayout, rank: int) -> _RankBytes:
    constants = training.constants
    trained = sum(trained_rank_weights(training, layout, rank))
    weights, frozen, gradients, optimizer, gathered = _state_bytes(training, layout, rank)
    activations, working = _activation_bytes(training, layout, rank)
    logits = _logits_bytes(training, layout) if rank == head_rank(training, layout) else 0.0
    if constants.gradients_freed and layout.micro_batches(training.global_batch) == 1:
        # Backward allocates gradients as it frees activations.
        gradients = max(0.0, gradients - activations - max(logits, working))
    pending = pending_gathered_bytes(training, layout, rank)
    at_step = constants.step_bytes * trained
    return _RankBytes(weights, frozen, gradients, optimizer, activations, logits, working, gathered, pending, at_step)


def head_rank(training: TrainingShape, layout: RankLayout) -> int:
    """Return the pipeline rank that computes the logits."""
    return head_chunk(training, layout) % layout.pp


def head_chunk(training: TrainingShape, layout: RankLayout) -> int:
    """Return the chunk that holds the head."""
    return layout.pp * layout.vp - 1 if training.options.head_chunk is None else training.options.head_chunk


def rank_weights(training: TrainingShape, layout: RankLayout, rank: int) -> tuple[float, float, float]:
    """Return how many weights a rank computes with: dense, of experts, and of its largest FSDP unit."""
    model = training.model
    dense = expert = 0.0
    unit = 0.0
    for experts, count in rank_layers(training, layout, rank):
        one_dense, one_expert = layer_weights(model, layout, experts=experts)
        dense, expert = dense + count * one_dense, expert + count * one_expert
        unit = max(unit, one_dense + one_expert)
    ends = model.head_weights / layout.tp
    first, last = rank == 0, rank == head_rank(training, layout)
    if first:
        dense += ends + model.learned_positions * model.hidden
    if last:
        dense += model.norm_vectors * model.hidden
        if not (model.tied and first):
            dense += ends
        for _ in range(model.mtp_layers):
            one_dense, one_expert = layer_weights(model, layout, experts=model.mtp_experts)
            dense, expert = dense + one_dense + 2 * model.hidden**2, expert + one_expert
    return dense, expert, max(unit, ends if first or last else 0.0)


def rank_layers(training: TrainingShape, layout: RankLayout, rank: int) -> list[tuple[bool, int]]:
    """Return how many layers a rank has without experts, and with."""
    with_experts = without = 0
    for chunk in layout.chunks(rank):
        layers = layout.chunk_layers(chunk)
        count = training.model.expert_layers_in(layers)
        with_experts, without = with_experts + count, without + len(layers) - count
    return [(experts, count) for experts, count in ((False, without), (True, with_experts)) if count]


def layer_weights(model: ModelShape, layout: RankLayout, *, experts: bool) -> tuple[float, float]:
    """Return how many dense and expert weights of a layer one rank computes with."""
    sizes = model.layer_sizes
    dense = sizes.attention_split / layout.tp + sizes.attention_replicated + model.layer_vectors
    if not experts:
        return dense + sizes.mlp / layout.tp, 0.0
    assert model.experts is not None, "a layer with experts"
    dense += sizes.router + sizes.shared / layout.tp
    return dense, sizes.experts / (layout.ep * layout.etp)


def trained_rank_weights(training: TrainingShape, layout: RankLayout, rank: int) -> tuple[float, float]:
    """Return how many of its weights a rank trains: dense, and of experts; all, or those of adapters."""
    if training.lora is None:
        return rank_weights(training, layout, rank)[:2]
    dense = expert = 0.0
    for experts, count in rank_layers(training, layout, rank):
        one_dense, one_expert = training.lora.layer_weights(
            training.model, experts=experts, tp=layout.tp, etp=layout.etp, ep=layout.ep
        )
        dense, expert = dense + count * one_dense, expert + count * one_expert
    first, last = rank == 0, rank == head_rank(training, layout)
    tables = int(first) + int(last and not (training.model.tied and first))
    return dense + tables * training.lora.table_weights(training.model), expert


def matrix_rank_weights(training: TrainingShape, layout: RankLayout, rank: int) -> tuple[float, float]:
    """Return how many of its weights a rank has in matrices of layers: dense, and of experts."""
    dense = expert = 0.0
    for experts, count in rank_layers(training, layout, rank):
        one_dense, one_expert = layer_weights(training.model, layout, experts=experts)
        dense, expert = dense + count * (one_dense - training.model.layer_vectors), expert + count * one_expert
    return dense, expert


class _StateBytes(NamedTuple):
    weights: float
    frozen: float
    """The part of `weights` that is not trained."""
    gradients: float
    optimizer: float
    gathered: float
    """Weights that are gathered for use."""


def _state_bytes(training: TrainingShape, layout: RankLayout, rank: int) -> _StateBytes:
    """Bytes of weights, gradients and optimizer states."""
    shard = layout.shard
    dense, expert, largest = rank_weights(training, layout, rank)
    bytes_of = trained_bytes(training)
    in_shards, whole = _divided(layout, *trained_rank_weights(training, layout, rank))
    weights = bytes_of.weight * (in_shards if shard == "full" else whole)
    gradients = bytes_of.gradient * (in_shards if shard in ("full", "zero2") else whole)
    optimizer = bytes_of.optimizer * (whole if shard == "none" else in_shards)
    if training.options.muon_steps and not training.options.bf16_states:
        matrices, whole_matrices = _divided(layout, *matrix_rank_weights(training, layout, rank))
        optimizer += 4.0 * (whole - whole_matrices if shard == "none" else in_shards - matrices)
    frozen = 0.0
    if training.lora is not None or training.preference:
        base_shards, base = _divided(layout, dense, expert)
        share = base_shards / base if shard == "full" else 1.0
        frozen = share * _base_bytes(training, layout, rank, base)
    # Two FSDP units at a time, the one in use and the prefetched one; backward also has the gradients of one. Where
    # weights stay whole, gradients in shards begin as those of one unit too, and as the copy of them that is reduced.
    gathered = 0.0
    if shard == "full" and layout.dense_shards > 1:
        gathered = 2 * 2 * largest + (2 * largest if training.lora is None else 0.0)
    elif shard == "zero2" and layout.dense_shards > 1 and training.lora is None:
        gathered = (2 + training.constants.reduce_bytes) * largest
    return _StateBytes(weights + frozen, frozen, gradients, optimizer, gathered)


def _divided(layout: RankLayout, dense: float, expert: float) -> tuple[float, float]:
    """Weights of a rank in shards, and whole."""
    return dense / layout.dense_shards + expert / layout.expert_shards, dense + expert


class TrainedBytes(NamedTuple):
    """Bytes of a weight that is trained."""

    weight: float
    gradient: float
    optimizer: float


def trained_bytes(training: TrainingShape) -> TrainedBytes:
    """Return the bytes of each trained weight, before they are shared out.

    Adapters have no copy in 16 bits where optimizer states are fp32: they are fp32 themselves. With Muon they are the
    bytes of a matrix, which has one average in place of two.
    """
    constants = training.constants
    weight, gradient, optimizer = constants.weight_bytes, constants.gradient_bytes, constants.optimizer_bytes
    if training.options.bf16_gradients:
        gradient = 2.0
    if training.lora is not None and optimizer >= _FP32_STATES:
        weight, gradient, optimizer = 4.0, max(gradient, 4.0), optimizer - 4.0
    one_average = training.options.bf16_states or training.options.muon_steps > 0
    if one_average and constants.optimizer_bytes >= _FP32_STATES:
        optimizer -= 4.0
    if training.options.averaged:
        optimizer += 4.0
    return TrainedBytes(weight, gradient, optimizer)


_FP32_STATES = 12.0
"""Bytes of a master weight and two moments in fp32."""


def _base_bytes(training: TrainingShape, layout: RankLayout, rank: int, whole: float) -> float:
    """Bytes of all the weights of a rank that are not trained; those of layers may be held in fewer."""
    usual = training.constants.weight_bytes
    if training.lora is None or training.lora.base_bytes is None:
        return usual * whole
    layers = sum(
        count * sum(layer_weights(training.model, layout, experts=experts))
        for experts, count in rank_layers(training, layout, rank)
    )
    return training.lora.base_bytes * layers + usual * (whole - layers)


def micro_batches_in_flight(layout: RankLayout, rank: int, micro_batches: int) -> float:
    """Return how many micro-batches' activations a rank holds at once, in passes through all its chunks."""
    if layout.pp == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(micro_batches)
    if layout.vp == 1:
        return float(min(micro_batches, layout.pp - rank))
    passes = micro_batches * layout.vp
    warm = passes if micro_batches == layout.pp else (layout.pp - rank - 1) * 2 + (layout.vp - 1) * layout.pp
    return min(passes, warm + 1) / layout.vp


def offloaded_bytes(training: TrainingShape, layout: RankLayout, rank: int) -> float:
    """Return the bytes of a rank's activations that wait in the host's memory with `layout.offload`."""
    here, _ = _activation_bytes(training, layout, rank)
    everywhere, _ = _activation_bytes(training, replace(layout, offload=None), rank)
    return everywhere - here


OFFLOADED_LAYERS = 2
"""Layers whose activations are on the GPU at once where they wait in the host's memory: of the layer that is computed,
and of the one that is on its way."""


def _activation_bytes(training: TrainingShape, layout: RankLayout, rank: int) -> tuple[float, float]:
    """Bytes kept by all micro-batches in flight, and the temporaries of backward through one layer."""
    flying = micro_batches_in_flight(layout, rank, max(1, layout.micro_batches(training.global_batch)))
    kept = working = largest = 0.0
    for experts, count in rank_layers(training, layout, rank):
        one, peak = layer_activation_bytes(training, layout, experts=experts)
        kept, working, largest = kept + count * one, max(working, peak), max(largest, one)
    if rank == 0:
        kept += 2 * training.rank_tokens(layout) * training.model.hidden / training.stream_shards(layout)
    kept *= flying
    if layout.offload is not None:
        kept = min(kept, OFFLOADED_LAYERS * largest)
    return kept, working


def layer_activation_bytes(training: TrainingShape, layout: RankLayout, *, experts: bool) -> tuple[float, float]:
    """Return the bytes a layer keeps for backward, and the temporaries of backward through it."""
    constants, model = training.constants, training.model
    tokens = training.rank_tokens(layout)
    shared = training.stream_shards(layout)
    heads = model.heads * (model.head_dim + model.value_dim) + model.kv_heads * (model.head_dim + model.value_dim)
    if model.latent is not None:
        heads += 2 * (model.latent.query_rank + model.latent.value_rank) * layout.tp
    attention = constants.head_bytes * heads / 2 / layout.tp
    gate = 1.0 if model.gated else 2 / 3
    kept = _kept_shares(training)
    wide_inner = 0.0  # what experts keep that multiply in 16 bits beside fp8 matmuls
    if experts and model.experts is not None:
        routed = model.experts.top_k * layout.etp / layout.tp
        inner = constants.inner_bytes * gate * kept.inner * model.experts.shared_ffn / layout.tp
        # The last are tokens as they were sent to the experts, and as they came back.
        routed_inner = (
            constants.inner_bytes * gate * kept.expert_inner * routed * model.experts.ffn / layout.etp
            + 4 * kept.expert_input * routed * model.hidden
        )
        if training.wide_experts:
            wide_inner = routed_inner
        else:
            inner += routed_inner
        width = routed * (model.experts.ffn / layout.etp + model.hidden)
    else:
        inner = constants.inner_bytes * gate * kept.inner * model.ffn / layout.tp
        width = model.ffn / layout.tp
    hidden = constants.hidden_bytes * kept.hidden * model.hidden / shared
    # A norm after a block keeps, in bf16, what the block gave it; one before a block is in the constant.
    hidden += 2 * (model.norms_per_layer - 2) * model.hidden / shared
    if layout.tp > 1:
        hidden += constants.scattered_bytes * model.hidden / shared
    if training.precision in LOW_PRECISIONS:
        share = constants.fp8_kept
        if training.lora is not None and constants.fp8_kept_beside_adapters is not None:
            share = constants.fp8_kept_beside_adapters
        hidden, attention, inner = (part * share for part in (hidden, attention, inner))
    inner += wide_inner
    everything = tokens * (hidden + attention + inner + _adapter_activation_bytes(training, layout, experts=experts))
    working = tokens * constants.backward_work_bytes * width
    if layout.recompute == "full":
        return tokens * 2 * model.hidden / shared, everything + working
    if layout.recompute == "selective" and not training.options.selective_recompute:
        return everything * constants.selective_kept, working
    if layout.recompute == "selective":
        return max(
            tokens * 2 * model.hidden / shared, everything - _recomputed_bytes(training, layout, tokens, shared, inner)
        ), working
    return everything, working


class _KeptShares(NamedTuple):
    """Which share of a layer's activations is kept, by what they belong to."""

    hidden: float = 1.0
    inner: float = 1.0
    expert_inner: float = 1.0
    expert_input: float = 1.0


def _kept_shares(training: TrainingShape) -> _KeptShares:
    """All of it; beside adapters, what no weight gradient reads is not kept.

    `hidden_bytes` are the inputs and outputs of two norms, a quarter each: an output is read by weight gradients only.
    So is the last of an MLP's inner activations, one of three with a gate and one of two without, and what is sent to
    experts; what comes back from them is weighted, which has a gradient of its own.
    """
    lora = training.lora
    if lora is None:
        return _KeptShares()
    without_last = 2 / 3 if training.model.gated else 1 / 2
    return _KeptShares(
        hidden=1 - (not lora.adapts_attention_input) / 4 - (not lora.adapts_mlp_input) / 4,
        inner=1.0 if lora.adapts_inner else without_last,
        expert_inner=1.0 if lora.adapts_experts else without_last,
        expert_input=1.0 if lora.adapts_experts else 1 / 2,
    )


def _adapter_activation_bytes(training: TrainingShape, layout: RankLayout, *, experts: bool) -> float:
    """Bytes per token that adapters keep: the product with `a`, and with dropout its input again and a mask."""
    lora, kept = training.lora, 0.0
    for adapter in () if lora is None else layer_adapters(training.model, lora, experts=experts):
        tp = layout.etp if adapter.routed else layout.tp
        inputs = adapter.matrix.inputs / (tp if adapter.matrix.tp_split == "in" else 1)
        routed = 1.0
        if adapter.routed and training.model.experts is not None:
            routed = training.model.experts.top_k * layout.etp / layout.tp
        kept += routed * (2 * adapter.rank + (3 * inputs if lora is not None and lora.dropout else 0.0))
    return kept


def _recomputed_bytes(training: TrainingShape, layout: RankLayout, tokens: float, shared: int, inner: float) -> float:
    modules, model = training.options.selective_recompute, training.model
    dropped = 0.0
    if "layernorm" in modules:
        dropped += tokens * training.constants.hidden_bytes / 2 * model.hidden / shared
    if "op-sac" in modules:
        dropped += tokens * (training.constants.hidden_bytes / 2 * model.hidden / shared + inner / 3)
    if "every-2nd" in modules or "ac layers" in modules:
        dropped += tokens * (training.constants.hidden_bytes * model.hidden / shared + inner) / 2
    if "moe" in modules.replace("moe_act", "").replace("moe activation", ""):
        dropped += tokens * inner
    elif "act" in modules:
        dropped += tokens * inner / 3
    if "mla_up" in modules:
        dropped += tokens * training.constants.head_bytes * model.heads * model.head_dim / layout.tp
    return dropped


def _logits_bytes(training: TrainingShape, layout: RankLayout) -> float:
    logits = min(training.rank_tokens(layout) * training.model.vocab_size, training.constants.logit_slice)
    return logits / layout.tp * training.constants.logit_bytes
