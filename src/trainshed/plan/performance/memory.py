"""Peak memory of every pipeline rank: what stays all the time, and what each moment of a step adds.

Two moments can be the fullest: inside backward, with the activations of all micro-batches in flight, and at the
optimizer's step. Activations are counted tensor by tensor as the kernels keep them (attention keeps no scores); what
recomputation drops is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from trainshed.plan.layout import RankLayout
from trainshed.plan.model_shape import ModelShape
from trainshed.plan.performance.layer_time import LOW_PRECISIONS
from trainshed.plan.performance.stalls import pending_gathered_bytes
from trainshed.plan.training_shape import TrainingShape


@dataclass(frozen=True)
class GpuMemory:
    """What fills one GPU at the peak of a step, in GiB."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    """Logits and what the loss makes of them."""
    buffers: float
    """Gathered weights, communication buffers, workspaces."""
    reserve: float
    """What the allocator holds and does not use, and the driver's own share."""
    capacity: float

    @property
    def allocated(self) -> float:
        """What tensors fill: `torch.cuda.max_memory_allocated`."""
        return self.total - self.reserve

    @property
    def total(self) -> float:
        """What the card must have."""
        return sum(getattr(self, part.name) for part in fields(self) if part.name != "capacity")

    @property
    def fits(self) -> bool:
        """Whether the card has it."""
        return self.total <= self.capacity


_GIB = 2.0**30
_FULL = 0.85
"""Of the card, what tensors fill when the allocator begins to take back what is only pending."""


class _Demand(NamedTuple):
    """Bytes that a rank has all along, and those that it asks for at the moments that can be the fullest."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    working: float
    gathered: float
    pending: float
    at_step: float

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def in_backward(self) -> float:
        """Without what is only pending."""
        return self.activations + max(self.logits, self.working) + self.gathered


def rank_memory(job: TrainingShape, layout: RankLayout, rank: int) -> GpuMemory:
    """Predict the peak of one pipeline rank."""
    stack, asked = job.stack, _demand(job, layout, rank)
    scale = job.memory_calibration / _GIB
    activations, logits = asked.activations, asked.logits
    buffers = asked.gathered + max(0.0, asked.working - logits)
    if asked.pending:
        # Before it runs out the allocator takes back what is only pending.
        full = (_FULL * job.hardware.memory_gib - stack.buffer_gib) / scale
        activations += min(asked.pending, max(0.0, full - asked.states - asked.in_backward))
    if asked.at_step > activations + logits + buffers:
        activations, logits, buffers = 0.0, 0.0, asked.at_step
    allocated = asked.states + activations + logits + buffers
    return GpuMemory(
        weights=asked.weights * scale,
        gradients=asked.gradients * scale,
        optimizer=asked.optimizer * scale,
        activations=activations * scale,
        logits=logits * scale,
        buffers=buffers * scale + stack.buffer_gib * job.memory_calibration,
        reserve=stack.reserve * allocated * scale + stack.context_gib,
        capacity=job.hardware.memory_gib,
    )


def backward_share(job: TrainingShape, layout: RankLayout, rank: int, *, pending: bool) -> float:
    """Return the share of its card that a rank asks for in backward, with or without what is only pending.

    With it the share may be more than there is: the allocator then waits for the GPU, gives back and asks again.
    """
    stack, asked = job.stack, _demand(job, layout, rank)
    allocated = (asked.states + asked.in_backward + (asked.pending if pending else 0.0)) / _GIB + stack.buffer_gib
    return ((1 + stack.reserve) * allocated * job.memory_calibration + stack.context_gib) / job.hardware.memory_gib


def _demand(job: TrainingShape, layout: RankLayout, rank: int) -> _Demand:
    stack = job.stack
    dense, expert, largest = rank_weights(job, layout, rank)
    weights, gradients, optimizer, gathered = _state_bytes(job, layout, dense, expert, largest)
    activations, working = _activation_bytes(job, layout, rank)
    logits = _logits_bytes(job, layout) if rank == head_rank(job, layout) else 0.0
    if stack.gradients_freed and layout.micro_batches(job.global_batch) == 1:
        # Backward makes gradients as it lets go of activations.
        gradients = max(0.0, gradients - activations - max(logits, working))
    pending = pending_gathered_bytes(job, layout, rank)
    at_step = stack.step_bytes * (dense + expert)
    return _Demand(weights, gradients, optimizer, activations, logits, working, gathered, pending, at_step)


def head_rank(job: TrainingShape, layout: RankLayout) -> int:
    """Return the pipeline rank that computes the logits."""
    return head_chunk(job, layout) % layout.pp


def head_chunk(job: TrainingShape, layout: RankLayout) -> int:
    """Return the chunk that holds the head."""
    return layout.pp * layout.vp - 1 if job.habits.head_chunk is None else job.habits.head_chunk


def rank_weights(job: TrainingShape, layout: RankLayout, rank: int) -> tuple[float, float, float]:
    """Return how many weights a rank computes with: dense ones, expert ones, and those of its largest unit."""
    model = job.model
    dense = expert = 0.0
    unit = 0.0
    for experts, count in _rank_layers(job, layout, rank):
        one_dense, one_expert = layer_weights(model, layout, experts=experts)
        dense, expert = dense + count * one_dense, expert + count * one_expert
        unit = max(unit, one_dense + one_expert)
    ends = model.head_weights / layout.tp
    first, last = rank == 0, rank == head_rank(job, layout)
    if first:
        dense += ends + model.positions * model.hidden
    if last:
        dense += model.norm_vectors * model.hidden
        if not (model.tied and first):
            dense += ends
        for _ in range(model.extra_heads):
            one_dense, one_expert = layer_weights(model, layout, experts=model.has_experts(model.layers - 1))
            dense, expert = dense + one_dense + 2 * model.hidden**2, expert + one_expert
    return dense, expert, max(unit, ends if first or last else 0.0)


def _rank_layers(job: TrainingShape, layout: RankLayout, rank: int) -> list[tuple[bool, int]]:
    """How many layers a rank has with experts, and without."""
    with_experts = without = 0
    for chunk in layout.chunks(rank):
        layers = layout.chunk_layers(chunk)
        found = job.model.expert_layers_in(layers)
        with_experts, without = with_experts + found, without + len(layers) - found
    return [(experts, count) for experts, count in ((False, without), (True, with_experts)) if count]


def layer_weights(model: ModelShape, layout: RankLayout, *, experts: bool) -> tuple[float, float]:
    """Return how many dense and expert weights of a layer one rank computes with."""
    sizes = model.layer_sizes
    dense = sizes.attention_cut / layout.tp + sizes.attention_whole + model.layer_vectors
    if not experts:
        return dense + sizes.feed_forward / layout.tp, 0.0
    assert model.experts is not None, "a layer with experts"
    dense += sizes.router + sizes.shared / layout.tp
    return dense, sizes.experts / (layout.ep * layout.etp)


def _state_bytes(
    job: TrainingShape, layout: RankLayout, dense: float, expert: float, largest: float
) -> tuple[float, float, float, float]:
    """Bytes of weights, gradients and optimiser states, and of weights gathered for use."""
    stack, trained = job.stack, job.habits.trained_share
    in_shards = dense / layout.dense_shards + expert / layout.expert_shards
    whole = dense + expert
    shard = layout.shard
    weights = stack.weight_bytes * (in_shards if shard == "full" else whole)
    each = 2.0 if job.habits.half_gradients else stack.gradient_bytes
    gradients = each * (in_shards if shard in ("full", "zero2") else whole) * trained
    optimizer = stack.optimizer_bytes * (whole if shard == "none" else in_shards) * trained
    # Two units at a time: the one in use and the one fetched ahead; backward holds the gradients of one besides.
    gathered = 2 * 2 * largest + 2 * largest * trained if shard == "full" and layout.dense_shards > 1 else 0.0
    return weights, gradients, optimizer, gathered


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


def _activation_bytes(job: TrainingShape, layout: RankLayout, rank: int) -> tuple[float, float]:
    """Bytes kept by all micro-batches in flight, and what backward through one layer makes besides."""
    flying = micro_batches_in_flight(layout, rank, max(1, layout.micro_batches(job.global_batch)))
    kept = working = 0.0
    for experts, count in _rank_layers(job, layout, rank):
        one, peak = layer_activation_bytes(job, layout, experts=experts)
        kept, working = kept + count * one, max(working, peak)
    if rank == 0:
        kept += 2 * job.rank_tokens(layout) * job.model.hidden / job.stream_shards(layout)
    return kept * flying, working


def layer_activation_bytes(job: TrainingShape, layout: RankLayout, *, experts: bool) -> tuple[float, float]:
    """Return the bytes a layer keeps for backward, and those that backward through it makes besides."""
    stack, model = job.stack, job.model
    tokens = job.rank_tokens(layout)
    shared = job.stream_shards(layout)
    heads = model.heads * (model.head_dim + model.value_dim) + model.kv_heads * (model.head_dim + model.value_dim)
    if model.latent is not None:
        heads += 2 * (model.latent.query_rank + model.latent.value_rank) * layout.tp
    attention = stack.head_bytes * heads / 2 / layout.tp
    gate = 1.0 if model.gated else 2 / 3
    if experts and model.experts is not None:
        routed = model.experts.top_k * layout.etp / layout.tp
        inner = (
            stack.inner_bytes * gate * (routed * model.experts.ffn / layout.etp + model.experts.shared_ffn / layout.tp)
        )
        # Tokens as they went to the experts, and as they came back.
        inner += 4 * routed * model.hidden
        width = routed * (model.experts.ffn / layout.etp + model.hidden)
    else:
        inner = stack.inner_bytes * gate * model.ffn / layout.tp
        width = model.ffn / layout.tp
    hidden = stack.hidden_bytes * model.hidden / shared
    if layout.tp > 1:
        hidden += stack.scattered_bytes * model.hidden / shared
    if job.precision in LOW_PRECISIONS:
        hidden, attention, inner = (kept * stack.low_kept for kept in (hidden, attention, inner))
    every = tokens * (hidden + attention + inner)
    working = tokens * stack.work_bytes * width
    if layout.recompute == "full":
        return tokens * 2 * model.hidden / shared, every + working
    if layout.recompute == "selective" and not job.habits.selective:
        return every * stack.selective_kept, working
    if layout.recompute == "selective":
        return max(
            tokens * 2 * model.hidden / shared, every - _recomputed_bytes(job, layout, tokens, shared, inner)
        ), working
    return every, working


def _recomputed_bytes(job: TrainingShape, layout: RankLayout, tokens: float, shared: int, inner: float) -> float:
    what, model = job.habits.selective, job.model
    dropped = 0.0
    if "layernorm" in what:
        dropped += tokens * job.stack.hidden_bytes / 2 * model.hidden / shared
    if "op-sac" in what:
        dropped += tokens * (job.stack.hidden_bytes / 2 * model.hidden / shared + inner / 3)
    if "every-2nd" in what or "ac layers" in what:
        dropped += tokens * (job.stack.hidden_bytes * model.hidden / shared + inner) / 2
    if "moe" in what.replace("moe_act", "").replace("moe activation", ""):
        dropped += tokens * inner
    elif "act" in what:
        dropped += tokens * inner / 3
    if "mla_up" in what:
        dropped += tokens * job.stack.head_bytes * model.heads * model.head_dim / layout.tp
    return dropped


def _logits_bytes(job: TrainingShape, layout: RankLayout) -> float:
    logits = min(job.rank_tokens(layout) * job.model.vocab_size, job.stack.logit_slice)
    return logits / layout.tp * job.stack.logit_bytes
