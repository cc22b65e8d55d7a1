"""What is known of the software that steps the model: its options, and constants fitted to its measurements.

The constants are in `engine_constants.yaml`, each with the measurements behind it; `benchmarks/fit_planner.py` fits
them again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from trainshed.errors import InputError
from trainshed.recipe.yaml_io import parse_yaml

_FILE = Path(__file__).with_name("engine_constants.yaml")


@dataclass(frozen=True)
class EngineOptions:
    """What one run does otherwise than the usual of its engine."""

    sequence_parallel: bool = True
    head_chunk: int | None = None
    """The chunk that holds the head where it is not the last."""
    selective: str = ""
    """What `recompute: selective` computes again, joined by +; empty: what the engine's own choice is."""
    overlap: bool = True
    """Whether gradients are reduced and weights gathered under other work."""
    tp_overlap: bool = False
    """Whether tensor-parallel communication runs under products: Megatron's --tp-comm-overlap, off unless asked for."""
    ep_overlap: bool = False
    """Expert all-to-alls run under the other half of a split micro-batch."""
    fused_dispatch: bool = False
    """Tokens are permuted inside the exchange itself (DeepEP, HybridEP): Megatron's `flex` dispatcher."""
    fixed_routing: bool = False
    """Tokens over capacity are dropped, so that no count is read back by the host."""
    graphs: float = 0.0
    """Share of the launches that CUDA graphs save."""
    trained_share: float = 1.0
    """Share of the weights that are trained: next to nothing with adapters."""
    half_gradients: bool = False
    """Gradients are kept and reduced in 16 bits."""
    power: float = 1.0
    """Clock under a lower power limit, as a share of the usual one."""

    @property
    def adapters(self) -> bool:
        """Whether only adapters are trained."""
        return self.trained_share < 1


@dataclass(frozen=True)
class EngineConstants:
    """One engine as the planner sees it. Times are of one GPU; the defaults are those of a tidy PyTorch engine."""

    name: str
    source: str = ""
    # Products and kernels.
    gemm: float = 1.0
    """Speed of matrix products against the GPU's reach alone on the card: power limits and neighbours take some."""
    gemm_fp8: float = 1.0
    """The same for fp8 and fp4, casts and scales included."""
    attention: float = 0.55
    """Share of the dense peak that attention reaches on long sequences with heads of 128."""
    windowed: float = 1.0
    """Speed of attention through a window, against attention over all that is before."""
    score_passes: float = 0.0
    """Times the scores of attention are read or written in 16 bits; 0 with kernels that never write them."""
    elementwise: float = 1.0
    """Bytes moved by norms, activations, rotary turns and residuals, against fused kernels."""
    expert_elementwise: float = 1.0
    """The same for permuting, routing and activating tokens of experts."""
    cast_bytes: float = 4.0
    """Bytes moved per element to cast the input of an fp8 or fp4 product."""
    loss_passes: float = 4.0
    """Times the logits are read or written by the loss, in fp32."""
    # Launches.
    host_layer_us: float = 300.0
    """What the host needs to launch a layer forward and backward; the GPU waits where it is quicker."""
    host_collective_us: float = 0.0
    """More of it with tensor parallel: collectives are waited for on other streams."""
    host_expert_us: float = 300.0
    """More of it where a layer has experts: routing is read back by the host."""
    host_micro_batch_us: float = 500.0
    """What every micro-batch costs the host besides its layers."""
    added_bytes: float = 0.0
    """Bytes moved per weight to add a micro-batch's gradients to those before; 0 where the products add them."""
    step_ms: float = 10.0
    """What every step costs whatever its size: data, clipping, logging."""
    # Tensor, context, expert, pipeline communication.
    tp_hidden: float = 0.0
    """Share of the tensor-parallel communication that runs under products where that is asked for."""
    cp_hidden: float = 0.5
    ep_hidden: float = 0.0
    """Share of the all-to-alls of experts that runs under other work anyway."""
    ep_overlapped: float = 0.15
    """Share that is left where they run under the other half of a split micro-batch."""
    ep_link: float = 0.5
    """Of the speed inside a node or rack, what an all-to-all reaches."""
    ep_network: float = 0.8
    """Of the speed between nodes, the same."""
    fused_exchange: float = 0.6
    """Of the seconds of an all-to-all, what a fused dispatcher takes."""
    rails: float = 1.0
    """Of the network shares that a group's further members on a node bring, what its rings use."""
    pp_hidden: float = 0.0
    """Share of a hand-over to the next stage that runs under other work."""
    pp_busy: float = 0.0
    """Share of a hand-over during which the stage can do nothing else: blocking sends."""
    handover_us: float = 0.0
    """What the stage loses besides at each hand-over."""
    far_rails: float = 1.0
    """Of the network shares of a tensor-parallel group's members on a node, what its collectives use together."""
    far_tp_us: float = 20.0
    """Latency of a tensor-parallel collective per further node."""
    pipeline_hop_us: float = 0.0
    """What each tensor-parallel neighbour adds to a layer once a pipeline crosses nodes."""
    pipeline_layer_us: float = 0.0
    """What a layer costs besides, once tensor parallel meets a pipeline that crosses nodes."""
    stall_ms: float = 0.0
    """What each transfer between stages takes besides where pipelines stall (`stalling.py`)."""
    node_ms: float = 0.0
    """What every node adds to a step: its end waits for the slowest."""
    # Data parallel.
    dp_hidden: float = 0.8
    """Share of the last backward pass under which gradients may be reduced."""
    shard_messages: float = 1.0
    """Collectives per layer for reducing and gathering sharded states: few with buckets, one per tensor without."""
    gather_hidden: float = 0.0
    """Share of the first forward pass under which weights may be gathered."""
    network: float = 0.8
    """Of the line rate between nodes, what large collectives reach."""
    link: float = 0.75
    """Of the rate inside a node, what large collectives reach."""
    hop_us: float = 20.0
    """Latency of one step of a ring between nodes; inside one it is an eighth."""
    reduces_whole: bool = False
    """Gradients are all-reduced also where their optimiser states are sharded."""
    reduce_bytes: float = 4.0
    """Bytes of a gradient on the wire."""
    optimizer: float = 1.0
    """Time of the optimiser against its bytes at the speed of memory."""
    fsdp_slowdown: float = 0.0
    """Share of hidden weight gathering that slows the kernels above it."""
    squeeze: float = 0.0
    """How much longer a step takes on a card that is full: the allocator gives back and asks again."""
    imbalance: float = 1.0
    """How much longer the slowest rank of a micro-batch takes than the mean: jitter, routing."""
    # Memory.
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    """Bytes of a kept gradient, per weight."""
    gradients_freed: bool = False
    """Gradients are freed after every step, so that with one micro-batch they never meet all activations."""
    optimizer_bytes: float = 12.0
    """Master weights and moments."""
    hidden_bytes: float = 8.0
    """Kept for backward per token and unit of the residual stream's width in a layer: two norms in and out."""
    head_bytes: float = 4.0
    """Kept per token and unit of the width of queries, keys and values."""
    inner_bytes: float = 6.0
    """Kept per token and unit of a gated block's inner width; two thirds of it where there is no gate."""
    scattered_bytes: float = 0.0
    """Kept besides, per token and unit of width, of what tensor-parallel ranks scattered."""
    pending_bytes: float = 0.0
    """Held per token and unit of width of what tensor-parallel ranks gathered, until another stream has let go of it:
    as many layers as the host is ahead of the GPU, so it does not grow with the model's depth."""
    selective_kept: float = 1.0
    """Share of a layer's bytes that the engine's own `recompute: selective` keeps: Megatron's drops the scores of
    attention, which kernels of today never write."""
    low_kept: float = 0.8
    """With fp8 and fp4 products, the share of those bytes that is still kept: inputs are kept as they were cast."""
    logit_bytes: float = 10.0
    """Per logit of a micro-batch at the peak of the loss."""
    logit_slice: float = inf
    """Logits that exist at once, on all tensor-parallel ranks together, where the loss goes through a micro-batch slice
    by slice."""
    work_bytes: float = 8.0
    """Of backward through one layer, per token and unit of the inner width."""
    step_bytes: float = 0.0
    """What the optimiser's step makes besides, per weight of the rank."""
    buffer_gib: float = 0.3
    """Workspaces and communication buffers inside the allocator."""
    context_gib: float = 1.5
    """What the driver and the communication library hold outside it."""
    reserve: float = 0.04
    """What the allocator holds beyond what is allocated."""


@cache
def _document() -> dict[str, dict[str, Any]]:
    return dict(parse_yaml(_FILE.read_text(encoding="utf-8"), _FILE.name).value)


def engine_constant_names() -> list[str]:
    """Return the names of all stacks."""
    return list(_document())


@cache
def engine_constants(name: str) -> EngineConstants:
    """Return a stack by name."""
    known = _document()
    if name not in known:
        raise InputError(f"the engine `{name}` has no constants in the planner", hint=f"known: {', '.join(known)}")
    names = {field.name for field in fields(EngineConstants)}
    values = {key: value for key, value in known[name].items() if key in names}
    return EngineConstants(name=name, **values)
