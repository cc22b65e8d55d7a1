"""Seconds of one layer for one micro-batch on one rank: matmuls, attention, bytes moved, and collectives.

A collective takes a latency per step of its ring, and the time of its bytes over the slowest link of the group.
Tensor-parallel ranks are neighbours, then come context, expert and data parallel, the pipeline outermost. So the stride
of a group in the mesh decides how many of its members are on one node. Each GPU has its own share of the node's
network: a ring with g members on a node uses g of those shares, up to the speed of the links inside the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from trainshed.plan.layout import RankLayout
from trainshed.plan.lora_shape import Adapter, layer_adapters
from trainshed.plan.model_shape import LayerKind, WeightMatrix
from trainshed.plan.training_shape import TrainingShape

_IN_NODE_HOP_DIVISOR = 8.0
"""A hop inside a node takes an eighth of one between nodes: about 3 us of NVLink against 20 to 30 of a network."""


@dataclass(frozen=True)
class CollectiveGroup:
    """How fast a group of ranks communicates."""

    size: int
    in_node: int
    """Members that the links of one node or rack connect."""
    gb_per_s: float
    """What a ring over all members moves, per member and direction."""
    latency_us: float
    """Latency of one turn around the ring."""

    def all_gather_seconds(self, volume: float) -> float:
        """Return the time to gather `volume` bytes in all; a reduce-scatter takes as long, an all-reduce twice."""
        if self.size == 1:
            return 0.0
        return volume * (self.size - 1) / self.size / (self.gb_per_s * 1e9) + self.latency_us * 1e-6


def collective_group(size: int, stride: int, training: TrainingShape) -> CollectiveGroup:
    """Return a group of ranks that are `stride` apart."""
    hardware, constants = training.hardware, training.constants
    in_node = min(size, max(1, hardware.link_domain // stride))
    link = hardware.link_gb_per_s * constants.link * training.efficiency.link
    if in_node == size:
        return CollectiveGroup(size, in_node, link, (size - 1) * constants.hop_us / _IN_NODE_HOP_DIVISOR)
    nodes = -(-size // in_node)
    network = hardware.network_gb_per_s * constants.network
    # In a domain wider than a node (a rack of NVLink) every member still has its own share of the network.
    latency = (nodes - 1) * constants.hop_us + (in_node - 1) * constants.hop_us / _IN_NODE_HOP_DIVISOR
    return CollectiveGroup(size, in_node, min(link, (1 + (in_node - 1) * constants.rails) * network), latency)


def tensor_parallel_group(size: int, training: TrainingShape) -> CollectiveGroup:
    """Return a tensor-parallel group: neighbours; one that crosses nodes has a latency and bandwidth of its own."""
    hardware, constants = training.hardware, training.constants
    group = collective_group(size, 1, training)
    if group.in_node == size:
        return group
    nodes = -(-size // group.in_node)
    network = group.in_node * hardware.network_gb_per_s * constants.network * constants.cross_node_tp_rails
    return CollectiveGroup(size, group.in_node, min(group.gb_per_s, network), (nodes - 1) * constants.cross_node_tp_us)


def all_to_all_seconds(
    volume: float, group: CollectiveGroup, training: TrainingShape, *, experts_per_node: float = 1.0
) -> float:
    """Return the time in which every member sends `volume` bytes, spread evenly over all members.

    `experts_per_node` is how many of a token's experts are on one node, on average: a dispatcher that crosses the
    network once per node and token sends that many times less.
    """
    if group.size == 1:
        return 0.0
    hardware, constants = training.hardware, training.constants
    across = 1 - group.in_node / group.size
    inside = (group.in_node - 1) / group.size
    seconds = inside * volume / (hardware.link_gb_per_s * constants.ep_link * 1e9)
    if across:
        network = across * volume / experts_per_node / (hardware.network_gb_per_s * constants.ep_network * 1e9)
        seconds = max(seconds, network)
    return seconds + constants.hop_us * 1e-6 * (1 if across else 0.5)


LOW_PRECISIONS = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
"""Precisions whose matmuls are narrower than 16 bits, and the peak they run at."""


_DEPTH_TILE, _WIDTH_TILE = 64, 128
"""Kernels round K and N up to these: the tiles of cuBLAS on Ampere and later."""


def _whole_tiles(length: float, tile: int) -> float:
    return -(-length // tile) * tile


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a forward or a backward pass by part; of communication, those that are not hidden."""

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
        """Return every part times a factor."""
        return PassTimes(self.compute * factor, self.tp * factor, self.cp * factor, self.ep * factor)


@dataclass(frozen=True)
class LayerTimes:
    """One layer, one micro-batch."""

    forward: PassTimes
    backward: PassTimes
    host: float
    """Host time to launch the kernels of all passes."""
    reference: PassTimes = PassTimes()
    """The forward pass of DPO's reference; 0 without one."""


class MatmulTimes(NamedTuple):
    """Seconds of tokens times a weight."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def backward(self) -> float:
        """Both gradients."""
        return self.input_gradient + self.weight_gradient


class KernelTimes:
    """Seconds of kernels on the GPU of a training."""

    def __init__(self, training: TrainingShape) -> None:
        """Look up the peaks once."""
        self.training = training
        self.efficiency = training.efficiency
        peaks, precision = training.hardware.gpu.dense_tflops, training.precision
        self.half_peak = (peaks.peak(precision) if precision in ("fp32", "fp16") else None) or peaks.half
        self.fp8_peak = peaks.peak(LOW_PRECISIONS.get(precision, precision)) if precision in LOW_PRECISIONS else None
        if precision in LOW_PRECISIONS and self.fp8_peak is None:
            self.fp8_peak = peaks.peak("fp8") or self.half_peak
        self.half_peak *= 1e12 * training.options.clock_share
        self.bytes_per_second = training.hardware.gpu.memory_gb_per_s * 1e9 * self.efficiency.memory
        self.start = self.efficiency.start_us * 1e-6

    def matmul(
        self, tokens: float, matrix: WeightMatrix, tp: int, *, allow_fp8: bool = True, groups: int = 1
    ) -> MatmulTimes:
        """Return the seconds of tokens times a weight; `groups` experts share the tokens evenly."""
        inputs = matrix.inputs / tp if matrix.tp_split == "in" else matrix.inputs
        outputs = matrix.outputs / tp if matrix.tp_split == "out" else matrix.outputs
        efficiency, constants = self.efficiency, self.training.constants
        # Odd widths are computed as the next whole tile.
        flops = 2 * tokens * _whole_tiles(inputs, _DEPTH_TILE) * _whole_tiles(outputs, _WIDTH_TILE)
        cast = 0.0
        if allow_fp8 and self.fp8_peak is not None:
            # Without a weight gradient no input is also cast for it, transposed: a quarter of the bytes.
            cast_bytes = constants.cast_bytes * (1.0 if self.training.lora is None else 0.75)
            cast = self.memory_seconds(cast_bytes * tokens * inputs)
            share = efficiency.fp8 * (efficiency.fp4 if self.training.precision == "nvfp4" else 1.0)
            peak = self.fp8_peak * 1e12 * self.training.options.clock_share * share * constants.gemm_fp8
        else:
            peak = self.half_peak * constants.gemm
        grouped = 1 + efficiency.grouped_half_tokens * groups / tokens if groups > 1 else 1.0
        ideal = flops / peak * grouped
        moved = 2 * (tokens * (inputs + outputs) + groups * inputs * outputs) / self.bytes_per_second
        forward = max(ideal / efficiency.forward * (1 + efficiency.half_depth / inputs), moved)
        input_gradient = max(ideal / efficiency.input_gradient * (1 + efficiency.half_depth / outputs), moved)
        depth = efficiency.half_depth * groups / tokens
        weight_gradient = max(ideal / efficiency.weight_gradient * (1 + depth), moved)
        return MatmulTimes(
            forward + cast + self.start, input_gradient + cast + self.start, weight_gradient + self.start
        )

    def projection(
        self, tokens: float, matrix: WeightMatrix, tp: int, *, allow_fp8: bool = True, groups: int = 1
    ) -> tuple[float, float]:
        """Return forward and backward seconds of a projection of the model, which is frozen beside adapters."""
        times, lora = self.matmul(tokens, matrix, tp, allow_fp8=allow_fp8, groups=groups), self.training.lora
        if lora is None:
            return times.forward, times.backward
        unpacked = 0.0
        if lora.base_bytes is not None and self.fp8_peak is None:
            # Each pass reads the narrow weights and writes them as the matmul takes them.
            unpacked = self.memory_seconds((lora.base_bytes + 2) * groups * matrix.weights / tp)
        return times.forward + unpacked, times.input_gradient + unpacked

    def adapter(self, tokens: float, adapter: Adapter, tp: int, *, groups: int = 1) -> tuple[float, float]:
        """Return forward and backward seconds of an adapter: both factors, and adding to the projection's output."""
        a = self.matmul(tokens, adapter.a, tp, allow_fp8=False, groups=groups)
        b = self.matmul(tokens, adapter.b, tp, allow_fp8=False, groups=groups)
        inputs = adapter.matrix.inputs / (tp if adapter.matrix.tp_split == "in" else 1)
        outputs = adapter.matrix.outputs / (tp if adapter.matrix.tp_split == "out" else 1)
        lora, elementwise = self.training.lora, self.training.constants.elementwise
        # Two reads and a write for each sum; dropout reads and writes the input, and keeps a mask of a byte.
        dropout = self.memory_seconds(5 * tokens * inputs) if lora is not None and lora.dropout else 0.0
        forward = self.memory_seconds(6 * tokens * outputs) + dropout
        backward = self.memory_seconds(6 * tokens * inputs) + dropout
        if lora is not None and lora.dora:
            # Every output is scaled by its magnitude, whose gradient reads outputs and their gradients.
            forward += self.memory_seconds(4 * tokens * outputs)
            backward += self.memory_seconds(6 * tokens * outputs)
        return a.forward + b.forward + forward * elementwise, a.backward + b.backward + backward * elementwise

    def attention(self, batch: float, queries: float, mean_keys: float, heads: float) -> tuple[float, float]:
        """Return forward and backward seconds of attention itself; backward has 2.5 times the FLOPs."""
        model, efficiency = self.training.model, self.efficiency
        if self.training.constants.score_passes:
            return self._written_attention(batch, queries, heads)
        flops = 2 * batch * queries * mean_keys * heads * (model.head_dim + model.value_dim)
        width = min(1.0, (model.head_dim + model.value_dim) / 256) ** efficiency.attention_width
        share = min(efficiency.attention * self.training.constants.attention, efficiency.attention_max)
        speed = self.half_peak * share * width
        forward = flops / speed * (1 + efficiency.attention_length / mean_keys)
        return forward + self.start, 2.5 * forward / efficiency.attention_backward + self.start

    def _written_attention(self, batch: float, queries: float, heads: float) -> tuple[float, float]:
        """Attention without FlashAttention: two matmuls over the whole square, and a softmax through memory."""
        scores = batch * heads * queries * self.training.sequence_length
        flops = 2 * scores * (self.training.model.head_dim + self.training.model.value_dim)
        # K of one of the two matmuls is the width of a head.
        depth = 1 + self.efficiency.half_depth / self.training.model.head_dim / 2
        matmuls = flops / (self.half_peak * self.training.constants.gemm * self.efficiency.forward) * depth
        softmax = self.memory_seconds(2 * scores * self.training.constants.score_passes)
        return matmuls + softmax, 2 * matmuls + softmax

    def memory_seconds(self, volume: float) -> float:
        """Return the time to read and write this many bytes."""
        return volume / self.bytes_per_second


def layer_times(training: TrainingShape, layout: RankLayout, kernels: KernelTimes, kind: LayerKind) -> LayerTimes:
    """Predict one layer."""
    constants, model = training.constants, training.model
    experts, windowed = kind
    tokens = training.rank_tokens(layout)
    forward, backward = _attention_block(training, layout, kernels, tokens, windowed=windowed)
    tp_forward, tp_backward = _tensor_parallel(training, layout, tokens, experts=experts)
    cp_forward, cp_backward = _context_parallel(training, layout, tokens)
    ep_pass, host = 0.0, constants.launch_layer_us
    if experts:
        block = _expert_block(training, layout, kernels, tokens)
        ep_pass = _expert_parallel(training, layout, tokens)
        host += constants.launch_expert_us * (0.3 if training.options.fixed_routing else 1.0)
    else:
        block = _dense_block(training, layout, kernels, tokens, model.ffn)
    forward, backward = forward + block[0], backward + block[1]
    base_forward = forward
    for adapter in () if training.lora is None else layer_adapters(model, training.lora, experts=experts):
        times = _adapter_times(layout, kernels, tokens, adapter)
        forward, backward = forward + times[0], backward + times[1]
        host += constants.launch_adapter_us
    backward += _recompute_seconds(training, layout, kernels, forward, block[0], tokens, windowed=windowed)
    if layout.recompute == "full":
        tp_backward += tp_forward
        cp_backward += cp_forward
    if layout.tp > 1:
        host += constants.launch_collective_us
    # A further forward pass launches a third of what forward and backward do.
    host *= 1 + ((layout.recompute == "full") + training.preference) / 3
    tp_exposed = 1 - constants.tp_hidden if training.options.tp_overlap else 1.0
    ep_exposed = constants.ep_overlapped if training.options.ep_overlap else 1 - constants.ep_hidden
    ep_backward = ep_pass * (2 if layout.recompute == "full" else 1)
    around = PassTimes(0.0, tp_forward * tp_exposed, cp_forward * (1 - constants.cp_hidden), ep_pass * ep_exposed)
    return LayerTimes(
        PassTimes(forward) + around,
        PassTimes(
            backward, tp_backward * tp_exposed, cp_backward * (1 - constants.cp_hidden), ep_backward * ep_exposed
        ),
        host * 1e-6 * (1 - training.options.cuda_graph_share),
        PassTimes(base_forward) + around if training.preference else PassTimes(),
    )


def _adapter_times(layout: RankLayout, kernels: KernelTimes, tokens: float, adapter: Adapter) -> tuple[float, float]:
    experts = kernels.training.model.experts
    if not adapter.routed:
        return kernels.adapter(tokens, adapter, layout.tp)
    assert experts is not None, "only experts have routed adapters"
    routed = tokens / layout.tp * layout.etp * experts.top_k
    return kernels.adapter(routed, adapter, layout.etp, groups=max(1, experts.count // layout.ep))


def _attention_block(
    training: TrainingShape, layout: RankLayout, kernels: KernelTimes, tokens: float, *, windowed: bool
) -> tuple[float, float]:
    model = training.model
    forward = backward = 0.0
    for matrix in model.attention_matrices:
        times = kernels.projection(tokens, matrix, layout.tp)
        forward, backward = forward + times[0], backward + times[1]
    core = _core_attention(training, layout, kernels, windowed=windowed)
    # Norm and residual, each read and written, on the tokens of this rank; rotary embeddings work in place.
    shared = training.stream_shards(layout)
    width = (model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim) / layout.tp
    moved = (
        kernels.memory_seconds(2 * tokens * (4 * model.hidden / shared + 3 * width)) * training.constants.elementwise
    )
    return forward + core[0] + moved, backward + core[1] + 2 * moved


def _core_attention(
    training: TrainingShape, layout: RankLayout, kernels: KernelTimes, *, windowed: bool
) -> tuple[float, float]:
    model, length = training.model, training.attended_length
    keys, queries = model.mean_keys(length, windowed=windowed), training.sequence_length / layout.cp
    forward, backward = kernels.attention(layout.micro_batch, queries, keys, model.heads / layout.tp)
    # Chunks are attended to one by one, by kernels without a window.
    if not windowed or model.window is None or model.window >= length:
        return forward, backward
    return forward / training.constants.windowed, backward / training.constants.windowed


def _dense_block(
    training: TrainingShape, layout: RankLayout, kernels: KernelTimes, tokens: float, ffn: int
) -> tuple[float, float]:
    forward = backward = 0.0
    for matrix in training.model.mlp_matrices(ffn):
        times = kernels.projection(tokens, matrix, layout.tp)
        forward, backward = forward + times[0], backward + times[1]
    shared = training.stream_shards(layout)
    inner = (3 if training.model.gated else 2) * ffn / layout.tp
    moved = (
        kernels.memory_seconds(2 * tokens * (4 * training.model.hidden / shared + inner))
        * training.constants.elementwise
    )
    return forward + moved, backward + 2 * moved


def _expert_block(
    training: TrainingShape, layout: RankLayout, kernels: KernelTimes, tokens: float
) -> tuple[float, float]:
    experts = training.model.experts
    assert experts is not None, "asked for layers with experts only"
    # With sequence parallel each rank routes its own tokens; with etp a group routes them together.
    routed = tokens / layout.tp * layout.etp * experts.top_k
    local = max(1, experts.count // layout.ep)
    forward = backward = 0.0
    for matrix in training.model.expert_matrices:
        times = kernels.projection(routed, matrix, layout.etp, allow_fp8=not training.wide_experts, groups=local)
        forward, backward = forward + times[0], backward + times[1]
    shared = _dense_block(training, layout, kernels, tokens, experts.shared_ffn) if experts.shared_ffn else (0.0, 0.0)
    router_weight = WeightMatrix("router", training.model.hidden, experts.count, "none")
    router = kernels.matmul(tokens / layout.tp, router_weight, 1, allow_fp8=False)
    router_backward = router.backward if training.lora is None else router.input_gradient
    inner = (3 if training.model.gated else 2) * experts.ffn / layout.etp
    if training.model.mlp_bias:
        # Grouped matmuls take no bias: a kernel of its own adds it to their outputs.
        inner += 2 * ((2 if training.model.gated else 1) * experts.ffn / layout.etp + training.model.hidden)
        if training.model.gated:
            # The one family of experts with biases (GPT-OSS) clamps both halves of the gate and concatenates them
            # before the fused activation: Megatron's fused_bias_geglu.py, weighted_bias_quick_geglu_impl.
            inner += 8 * experts.ffn / layout.etp
    # Tokens are permuted to the experts and back, each a read and a write, besides the inner activation.
    moved = (
        kernels.memory_seconds(2 * routed * (6 * training.model.hidden + inner)) * training.constants.expert_elementwise
    )
    return forward + shared[0] + router.forward + moved, backward + shared[1] + router_backward + 2 * moved


def _recompute_seconds(
    training: TrainingShape,
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
    modules, model = training.options.selective_recompute, training.model
    again = 0.0
    if not modules or "attn" in modules or "op-sac" in modules:
        again += _core_attention(training, layout, kernels, windowed=windowed)[0]
    if "every-2nd" in modules or "ac layers" in modules:
        again += forward / 2
    if "moe" in modules.replace("moe_act", "").replace("moe activation", ""):
        again += block
    if "layernorm" in modules:
        again += kernels.memory_seconds(2 * tokens / layout.tp * 4 * model.hidden)
    if "act" in modules and model.experts is not None:
        again += kernels.memory_seconds(2 * tokens / layout.tp * model.experts.top_k * 3 * model.experts.ffn)
    if "mla_up" in modules:
        ups = [matrix for matrix in model.attention_matrices if matrix.name.endswith("_up")]
        again += sum(kernels.matmul(tokens, matrix, layout.tp).forward for matrix in ups)
    return again


def _tensor_parallel(
    training: TrainingShape, layout: RankLayout, tokens: float, *, experts: bool
) -> tuple[float, float]:
    """Seconds forward and backward: all-gather and reduce-scatter around each block, or an all-reduce after it."""
    if layout.tp == 1:
        return 0.0, 0.0
    group = tensor_parallel_group(layout.tp, training)
    gather = group.all_gather_seconds(2 * tokens * training.model.hidden)
    # Experts take the tokens each rank has: nothing is gathered around their block, unless etp splits them too.
    blocks = 1 if experts and layout.etp == 1 else 2
    forward = blocks * 2 * gather
    if not training.options.sequence_parallel:
        return forward, forward
    # Gathered inputs are not kept: backward gathers them once more for the gradients of weights, or of adapters.
    lora = training.lora
    again = blocks if lora is None else lora.adapts_attention_input + (blocks == 2 and lora.adapts_mlp_input)
    return forward, forward + again * gather


def _context_parallel(training: TrainingShape, layout: RankLayout, tokens: float) -> tuple[float, float]:
    if layout.cp == 1:
        return 0.0, 0.0
    group = collective_group(layout.cp, layout.tp, training)
    kept = (
        training.model.kv_heads
        * (training.model.head_dim + training.model.value_dim)
        / min(layout.tp, training.model.kv_heads)
    )
    gather = group.all_gather_seconds(2 * tokens * layout.cp * kept)
    return gather, 2 * gather


def _expert_parallel(training: TrainingShape, layout: RankLayout, tokens: float) -> float:
    """Seconds of dispatch and combine, for one pass."""
    experts = training.model.experts
    assert experts is not None, "asked for layers with experts only"
    if layout.ep == 1 and layout.etp == 1:
        return 0.0
    group = collective_group(layout.ep, layout.etp, training)
    volume = 2 * tokens / layout.tp * experts.top_k * training.model.hidden
    nodes = group.size / group.in_node
    per_node, fused = 1.0, training.options.fused_dispatch
    if fused and nodes > 1:
        # How many of a token's top_k experts are on each node that it goes to.
        per_node = experts.top_k / (nodes * (1 - (1 - 1 / nodes) ** experts.top_k))
    seconds = 2 * all_to_all_seconds(volume, group, training, experts_per_node=per_node)
    if fused:
        seconds *= training.constants.fused_dispatch_share
    if layout.etp > 1:
        gather = collective_group(layout.etp, 1, training)
        seconds += 2 * gather.all_gather_seconds(volume * layout.etp)
    return seconds
