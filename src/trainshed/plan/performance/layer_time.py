"""Seconds of one layer for one micro-batch on one rank: matmuls, attention, bytes moved, and collectives.

A collective takes a latency per step of its ring, and its bytes at what the slowest link of the group gives. Ranks
are placed with tensor parallel closest, then context, expert and data parallel, the pipeline outermost, so the stride
of a group in the mesh decides how many of its members share a node. Each GPU brings its own share of the node's
network: a ring that has g members on a node enters and leaves it through g of those shares, up to the speed of the
links inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainshed.plan.layout import RankLayout
from trainshed.plan.model_shape import LayerKind, WeightMatrix
from trainshed.plan.performance.engine_constants import EngineConstants
from trainshed.plan.performance.gpu_efficiency import GpuEfficiency, gpu_efficiency
from trainshed.plan.training_shape import Hardware, TrainingShape

_IN_NODE_HOP_DIVISOR = 8.0
"""A hop inside a node takes an eighth of one between nodes: about 3 us of NVLink against 20 to 30 of a network."""


@dataclass(frozen=True)
class CollectiveGroup:
    """Ranks that communicate, as far as speed goes."""

    size: int
    near: int
    """Members that the links of one node or rack join."""
    gb_per_s: float
    """What a ring over all members moves, per member and direction."""
    hops_us: float
    """Latency of one turn around the ring."""

    def ring_seconds(self, volume: float) -> float:
        """All-gather or reduce-scatter of `volume` bytes in all (the gathered side); an all-reduce is two of them."""
        if self.size == 1:
            return 0.0
        return volume * (self.size - 1) / self.size / (self.gb_per_s * 1e9) + self.hops_us * 1e-6


def collective_group(size: int, stride: int, hardware: Hardware, stack: EngineConstants) -> CollectiveGroup:
    """Return a group of ranks that stand `stride` apart."""
    near = min(size, max(1, hardware.link_domain // stride))
    link = hardware.link_gb_per_s * stack.link * gpu_efficiency(hardware.gpu_name).link
    if near == size:
        return CollectiveGroup(size, near, link, (size - 1) * stack.hop_us / _IN_NODE_HOP_DIVISOR)
    nodes = -(-size // near)
    network = hardware.network_gb_per_s * stack.network
    # Inside a domain wider than a node (a rack of NVLink) members still bring their own network share.
    hops = (nodes - 1) * stack.hop_us + (near - 1) * stack.hop_us / _IN_NODE_HOP_DIVISOR
    return CollectiveGroup(size, near, min(link, (1 + (near - 1) * stack.rails) * network), hops)


def tensor_parallel_group(size: int, hardware: Hardware, stack: EngineConstants) -> CollectiveGroup:
    """Return a tensor-parallel group: neighbours, and where it leaves the node, with latencies and rails of its own."""
    group = collective_group(size, 1, hardware, stack)
    if group.near == size:
        return group
    nodes = -(-size // group.near)
    speed = min(group.gb_per_s, group.near * hardware.network_gb_per_s * stack.network * stack.far_rails)
    return CollectiveGroup(size, group.near, speed, (nodes - 1) * stack.far_tp_us)


def all_to_all_seconds(
    volume: float, group: CollectiveGroup, hardware: Hardware, stack: EngineConstants, *, copies: float = 1.0
) -> float:
    """Every member sends `volume` bytes, spread evenly over all members.

    `copies` is how many of a token's experts lie on one node, on average: a dispatcher that crosses the network once
    per node and token sends that many times less.
    """
    if group.size == 1:
        return 0.0
    far = 1 - group.near / group.size
    near = (group.near - 1) / group.size
    seconds = near * volume / (hardware.link_gb_per_s * stack.ep_link * 1e9)
    if far:
        across = far * volume / copies / (hardware.network_gb_per_s * stack.ep_network * 1e9)
        seconds = max(seconds, across)
    return seconds + stack.hop_us * 1e-6 * (1 if far else 0.5)


LOW_PRECISIONS = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
"""Precisions whose products are narrower than 16 bits, and the peak they run at."""


_DEPTH_TILE, _WIDTH_TILE = 64, 128
"""What kernels round K and N up to: the tiles of cuBLAS on Ampere and later."""


def _whole_tiles(length: float, tile: int) -> float:
    return -(-length // tile) * tile


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a forward or a backward pass, by what they are spent on; communication as far as it is not hidden."""

    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.tp + self.cp + self.ep

    def __add__(self, other: PassTimes) -> PassTimes:
        return PassTimes(self.compute + other.compute, self.tp + other.tp, self.cp + other.cp, self.ep + other.ep)

    def times(self, factor: float) -> PassTimes:
        """Return it several times over."""
        return PassTimes(self.compute * factor, self.tp * factor, self.cp * factor, self.ep * factor)


@dataclass(frozen=True)
class LayerTimes:
    """One layer, one micro-batch."""

    forward: PassTimes
    backward: PassTimes
    host: float
    """What the host needs to launch both passes."""


class KernelTimes:
    """Kernel times of a job on its GPU."""

    def __init__(self, job: TrainingShape) -> None:
        """Look up the peaks once."""
        self.job = job
        self.reach: GpuEfficiency = gpu_efficiency(job.hardware.gpu_name)
        peaks, precision = job.hardware.gpu.dense_tflops, job.precision
        self.half_peak = (peaks.peak(precision) if precision in ("fp32", "fp16") else None) or peaks.half
        self.low_peak = peaks.peak(LOW_PRECISIONS.get(precision, precision)) if precision in LOW_PRECISIONS else None
        if precision in LOW_PRECISIONS and self.low_peak is None:
            self.low_peak = peaks.peak("fp8") or self.half_peak
        self.half_peak *= 1e12 * job.habits.power
        self.bytes_per_second = job.hardware.gpu.memory_gb_per_s * 1e9 * self.reach.memory
        self.start = self.reach.start_us * 1e-6

    def product(
        self, tokens: float, product: WeightMatrix, tp: int, *, low: bool = True, groups: int = 1
    ) -> tuple[float, float]:
        """Return forward and backward seconds of a product; `groups` experts share the tokens evenly."""
        inputs = product.inputs / tp if product.cut == "in" else product.inputs
        outputs = product.outputs / tp if product.cut == "out" else product.outputs
        reach, stack = self.reach, self.job.stack
        # Odd widths are computed as the next whole tile.
        flops = 2 * tokens * _whole_tiles(inputs, _DEPTH_TILE) * _whole_tiles(outputs, _WIDTH_TILE)
        cast = 0.0
        if low and self.low_peak is not None:
            cast = self.moved(stack.cast_bytes * tokens * inputs)
            share = reach.low * (reach.fp4 if self.job.precision == "nvfp4" else 1.0)
            peak = self.low_peak * 1e12 * self.job.habits.power * share * stack.gemm_fp8
        else:
            peak = self.half_peak * stack.gemm
        narrow = 1 + reach.narrow * groups / tokens if groups > 1 else 1.0
        ideal = flops / peak * narrow
        moved = 2 * (tokens * (inputs + outputs) + groups * inputs * outputs) / self.bytes_per_second
        forward = max(ideal / reach.forward * (1 + reach.depth / inputs), moved)
        input_gradient = max(ideal / reach.input_gradient * (1 + reach.depth / outputs), moved)
        weight_gradient = max(ideal / reach.weight_gradient * (1 + reach.depth * groups / tokens), moved)
        return forward + cast + self.start, input_gradient + weight_gradient + cast + 2 * self.start

    def attention(self, batch: float, queries: float, mean_keys: float, heads: float) -> tuple[float, float]:
        """Return forward and backward seconds of attention proper; backward has 2.5 times the products."""
        model, reach = self.job.model, self.reach
        if self.job.stack.score_passes:
            return self._written_attention(batch, queries, heads)
        flops = 2 * batch * queries * mean_keys * heads * (model.head_dim + model.value_dim)
        width = min(1.0, (model.head_dim + model.value_dim) / 256) ** reach.attention_width
        share = min(reach.attention * self.job.stack.attention, reach.attention_most)
        speed = self.half_peak * share * width
        forward = flops / speed * (1 + reach.attention_length / mean_keys)
        return forward + self.start, 2.5 * forward / reach.attention_backward + self.start

    def _written_attention(self, batch: float, queries: float, heads: float) -> tuple[float, float]:
        """Attention before FlashAttention: two products over the whole square, and softmax through memory."""
        scores = batch * heads * queries * self.job.sequence_length
        flops = 2 * scores * (self.job.model.head_dim + self.job.model.value_dim)
        # One of the two products has the width of a head as its depth.
        depth = 1 + self.reach.depth / self.job.model.head_dim / 2
        products = flops / (self.half_peak * self.job.stack.gemm * self.reach.forward) * depth
        softmax = self.moved(2 * scores * self.job.stack.score_passes)
        return products + softmax, 2 * products + softmax

    def moved(self, volume: float) -> float:
        """Return the seconds of reading and writing this many bytes."""
        return volume / self.bytes_per_second


def layer_times(job: TrainingShape, layout: RankLayout, kernels: KernelTimes, kind: LayerKind) -> LayerTimes:
    """Predict one layer."""
    stack, model = job.stack, job.model
    experts, windowed = kind
    tokens = job.rank_tokens(layout)
    forward, backward = _attention_block(job, layout, kernels, tokens, windowed=windowed)
    tp_forward, tp_backward = _tensor_parallel(job, layout, tokens, experts=experts)
    cp_forward, cp_backward = _context_parallel(job, layout, tokens)
    ep_each, host = 0.0, stack.host_layer_us
    if experts:
        block = _expert_block(job, layout, kernels, tokens)
        ep_each = _expert_parallel(job, layout, tokens)
        host += stack.host_expert_us * (0.3 if job.habits.fixed_routing else 1.0)
    else:
        block = _dense_block(job, layout, kernels, tokens, model.ffn)
    forward, backward = forward + block[0], backward + block[1]
    again = _recompute_seconds(job, layout, kernels, forward, block[0], tokens, windowed=windowed)
    backward += again
    if layout.recompute == "full":
        tp_backward += tp_forward
        cp_backward += cp_forward
    if layout.tp > 1:
        host += stack.host_collective_us
    if layout.recompute == "full":
        host *= 4 / 3
    seen = 1 - stack.tp_hidden if job.habits.tp_overlap else 1.0
    hidden = stack.ep_overlapped if job.habits.ep_overlap else 1 - stack.ep_hidden
    ep_backward = ep_each * (2 if layout.recompute == "full" else 1)
    return LayerTimes(
        PassTimes(forward, tp_forward * seen, cp_forward * (1 - stack.cp_hidden), ep_each * hidden),
        PassTimes(backward, tp_backward * seen, cp_backward * (1 - stack.cp_hidden), ep_backward * hidden),
        host * 1e-6 * (1 - job.habits.graphs),
    )


def _attention_block(
    job: TrainingShape, layout: RankLayout, kernels: KernelTimes, tokens: float, *, windowed: bool
) -> tuple[float, float]:
    model = job.model
    forward = backward = 0.0
    for product in model.attention_products:
        times = kernels.product(tokens, product, layout.tp)
        forward, backward = forward + times[0], backward + times[1]
    core = _core_attention(job, layout, kernels, windowed=windowed)
    # Norm and residual: both in and out, on the tokens of this rank; queries and keys are turned in place.
    shared = job.stream_shards(layout)
    width = (model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim) / layout.tp
    moved = kernels.moved(2 * tokens * (4 * model.hidden / shared + 3 * width)) * job.stack.elementwise
    return forward + core[0] + moved, backward + core[1] + 2 * moved


def _core_attention(
    job: TrainingShape, layout: RankLayout, kernels: KernelTimes, *, windowed: bool
) -> tuple[float, float]:
    model, length = job.model, job.sequence_length
    keys = model.mean_keys(length, windowed=windowed)
    forward, backward = kernels.attention(layout.micro_batch, length / layout.cp, keys, model.heads / layout.tp)
    if not windowed or model.window is None or model.window >= length:
        return forward, backward
    return forward / job.stack.windowed, backward / job.stack.windowed


def _dense_block(
    job: TrainingShape, layout: RankLayout, kernels: KernelTimes, tokens: float, ffn: int
) -> tuple[float, float]:
    forward = backward = 0.0
    for product in job.model.feed_forward(ffn):
        times = kernels.product(tokens, product, layout.tp)
        forward, backward = forward + times[0], backward + times[1]
    shared = job.stream_shards(layout)
    inner = (3 if job.model.gated else 2) * ffn / layout.tp
    moved = kernels.moved(2 * tokens * (4 * job.model.hidden / shared + inner)) * job.stack.elementwise
    return forward + moved, backward + 2 * moved


def _expert_block(job: TrainingShape, layout: RankLayout, kernels: KernelTimes, tokens: float) -> tuple[float, float]:
    experts = job.model.experts
    assert experts is not None, "asked for layers with experts only"
    # With sequence parallel each rank routes its own tokens; with etp a group routes them together.
    routed = tokens / layout.tp * layout.etp * experts.top_k
    local = max(1, experts.count // layout.ep)
    forward = backward = 0.0
    for product in job.model.expert_products:
        times = kernels.product(routed, product, layout.etp, groups=local)
        forward, backward = forward + times[0], backward + times[1]
    shared = _dense_block(job, layout, kernels, tokens, experts.shared_ffn) if experts.shared_ffn else (0.0, 0.0)
    router = kernels.product(
        tokens / layout.tp, WeightMatrix("router", job.model.hidden, experts.count, "none"), 1, low=False
    )
    inner = (3 if job.model.gated else 2) * experts.ffn / layout.etp
    if job.model.mlp_bias:
        # Grouped products take no bias: it is added by a pass of its own over what they made.
        inner += 2 * ((2 if job.model.gated else 1) * experts.ffn / layout.etp + job.model.hidden)
        if job.model.gated:
            # The one family of experts with biases (GPT-OSS) clamps both halves of the gate and joins them again before
            # the fused activation: Megatron's fused_bias_geglu.py, weighted_bias_quick_geglu_impl.
            inner += 8 * experts.ffn / layout.etp
    # Permuted out and back, each a read and a write, besides the inner activation.
    moved = kernels.moved(2 * routed * (6 * job.model.hidden + inner)) * job.stack.expert_elementwise
    return forward + shared[0] + router[0] + moved, backward + shared[1] + router[1] + 2 * moved


def _recompute_seconds(
    job: TrainingShape,
    layout: RankLayout,
    kernels: KernelTimes,
    forward: float,
    block: float,
    tokens: float,
    *,
    windowed: bool,
) -> float:
    if layout.recompute == "none":
        return 0.0
    if layout.recompute == "full":
        return forward
    what, model = job.habits.selective, job.model
    again = 0.0
    if not what or "attn" in what or "op-sac" in what:
        again += _core_attention(job, layout, kernels, windowed=windowed)[0]
    if "every-2nd" in what or "ac layers" in what:
        again += forward / 2
    if "moe" in what.replace("moe_act", "").replace("moe activation", ""):
        again += block
    if "layernorm" in what:
        again += kernels.moved(2 * tokens / layout.tp * 4 * model.hidden)
    if "act" in what and model.experts is not None:
        again += kernels.moved(2 * tokens / layout.tp * model.experts.top_k * 3 * model.experts.ffn)
    if "mla_up" in what:
        ups = [product for product in model.attention_products if product.name.endswith("_up")]
        again += sum(kernels.product(tokens, product, layout.tp)[0] for product in ups)
    return again


def _tensor_parallel(job: TrainingShape, layout: RankLayout, tokens: float, *, experts: bool) -> tuple[float, float]:
    """Seconds forward and backward: gather and scatter around each block, or an all-reduce after it."""
    if layout.tp == 1:
        return 0.0, 0.0
    group = tensor_parallel_group(layout.tp, job.hardware, job.stack)
    ring = group.ring_seconds(2 * tokens * job.model.hidden)
    # Experts take the tokens each rank has: no gather and no scatter around their block, unless they are cut too.
    blocks = 1 if experts and layout.etp == 1 else 2
    forward = blocks * 2 * ring
    # Gathered inputs are not kept: backward gathers them once more for the gradients of weights.
    again = blocks * ring if job.habits.sequence_parallel else 0.0
    return forward, forward + again


def _context_parallel(job: TrainingShape, layout: RankLayout, tokens: float) -> tuple[float, float]:
    if layout.cp == 1:
        return 0.0, 0.0
    group = collective_group(layout.cp, layout.tp, job.hardware, job.stack)
    kept = job.model.kv_heads * (job.model.head_dim + job.model.value_dim) / min(layout.tp, job.model.kv_heads)
    ring = group.ring_seconds(2 * tokens * layout.cp * kept)
    return ring, 2 * ring


def _expert_parallel(job: TrainingShape, layout: RankLayout, tokens: float) -> float:
    """Seconds of dispatch and combine, for one pass."""
    experts = job.model.experts
    assert experts is not None, "asked for layers with experts only"
    if layout.ep == 1 and layout.etp == 1:
        return 0.0
    group = collective_group(layout.ep, layout.etp, job.hardware, job.stack)
    volume = 2 * tokens / layout.tp * experts.top_k * job.model.hidden
    nodes = group.size / group.near
    copies, fused = 1.0, job.habits.fused_dispatch
    if fused and nodes > 1:
        # Of a token's top_k experts, how many lie on each node it goes to.
        copies = experts.top_k / (nodes * (1 - (1 - 1 / nodes) ** experts.top_k))
    seconds = 2 * all_to_all_seconds(volume, group, job.hardware, job.stack, copies=copies)
    if fused:
        seconds *= job.stack.fused_exchange
    if layout.etp > 1:
        gather = collective_group(layout.etp, 1, job.hardware, job.stack)
        seconds += 2 * gather.ring_seconds(volume * layout.etp)
    return seconds
