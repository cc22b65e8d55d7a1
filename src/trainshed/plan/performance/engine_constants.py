"""What the planner knows of an engine: the options of a run, and constants fitted to measurements of the engine.

The constants are in `engine_constants.yaml`, which names the measurements. `benchmarks/fit_planner.py` writes it.
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
    """Options of one run; the defaults are what its engine usually does."""

    sequence_parallel: bool = True
    head_chunk: int | None = None
    """The chunk that holds the head where it is not the last."""
    selective_recompute: str = ""
    """What `recompute: selective` computes again, joined by +; empty: the engine's own choice."""
    overlap: bool = True
    """Whether gradients are reduced and weights gathered while the GPU computes."""
    tp_overlap: bool = False
    """Whether tensor-parallel communication overlaps with matmuls: Megatron's --tp-comm-overlap, off by default."""
    ep_overlap: bool = False
    """Expert all-to-alls overlap with the other half of a split micro-batch."""
    fused_dispatch: bool = False
    """One kernel permutes tokens and sends them (DeepEP, HybridEP): Megatron's `flex` dispatcher."""
    fixed_routing: bool = False
    """Tokens over capacity are dropped, so the host does not wait for the router's counts."""
    cuda_graph_share: float = 0.0
    """Share of the kernel launches that CUDA graphs save."""
    bf16_gradients: bool = False
    """Gradients are kept and reduced in 16 bits."""
    bf16_states: bool = False
    """Adam's two averages are kept in 16 bits."""
    muon_steps: int = 0
    """Newton-Schulz iterations of Muon, which updates the matrices of layers; 0: AdamW updates everything."""
    averaged: bool = False
    """An average of the weights is kept and updated (EMA)."""
    clock_share: float = 1.0
    """The GPU's clock under a lower power limit, as a share of the usual one."""


@dataclass(frozen=True)
class EngineConstants:
    """Fitted constants of one engine. Times are those of one GPU; the defaults are those of a good PyTorch engine."""

    name: str
    source: str = ""
    # Kernels.
    gemm: float = 1.0
    """Speed of matmuls, relative to the same matmuls alone on the GPU: power limits and other kernels slow them."""
    gemm_fp8: float = 1.0
    """The same for fp8 and fp4, with casts and scales."""
    attention: float = 0.55
    """Share of the dense peak that attention reaches on long sequences with heads of 128."""
    windowed: float = 1.0
    """Speed of sliding-window attention, relative to full causal attention."""
    score_passes: float = 0.0
    """How many times attention scores are read or written in 16 bits; 0 with FlashAttention, which writes none."""
    elementwise: float = 1.0
    """Bytes moved by norms, activations, rotary embeddings and residuals, relative to fused kernels."""
    expert_elementwise: float = 1.0
    """The same for routing, permuting and activating the tokens of experts."""
    cast_bytes: float = 4.0
    """Bytes moved per element to cast the input of an fp8 or fp4 matmul."""
    loss_passes: float = 4.0
    """How many times the loss reads or writes the logits, in fp32."""
    # Launches.
    launch_layer_us: float = 300.0
    """Host time to launch the kernels of a layer, forward and backward; a faster GPU waits for it."""
    launch_collective_us: float = 0.0
    """Added per layer with tensor parallel: collectives are waited for on other streams."""
    launch_expert_us: float = 300.0
    """Added where a layer has experts: the host reads the router's counts."""
    launch_adapter_us: float = 100.0
    """Added for each adapter of a layer: some 12 small kernels, forward and backward."""
    launch_micro_batch_us: float = 500.0
    """Host time of a micro-batch besides its layers."""
    accumulate_bytes: float = 0.0
    """Bytes moved per weight to accumulate a micro-batch's gradients; 0 where the matmul accumulates them."""
    step_ms: float = 10.0
    """Fixed time of a step: data, clipping, logging."""
    adapter_step: float = 1.0
    """Share of that time that is left with LoRA, where few gradients are cleared, scanned and clipped."""
    # Tensor, context, expert, pipeline communication.
    tp_hidden: float = 0.0
    """Share of tensor-parallel communication that is hidden where `tp_overlap` is on."""
    cp_hidden: float = 0.5
    """Share of context-parallel communication that is hidden."""
    ep_hidden: float = 0.0
    """Share of the expert all-to-alls that is hidden where `ep_overlap` is off."""
    ep_overlapped: float = 0.15
    """Share of them that is not hidden where `ep_overlap` is on."""
    ep_link: float = 0.5
    """Share of the bandwidth inside a node or rack that an all-to-all reaches."""
    ep_network: float = 0.8
    """The same between nodes."""
    fused_dispatch_share: float = 0.6
    """Time of a fused dispatcher, relative to an all-to-all."""
    rails: float = 1.0
    """Share of the NICs of a group's further members on a node that its rings use."""
    pp_hidden: float = 0.0
    """Share of a pipeline send that is hidden."""
    pp_blocking: float = 0.0
    """Share of a pipeline send that blocks the stage."""
    pp_send_us: float = 0.0
    """Fixed time that a stage loses with each pipeline send."""
    cross_node_tp_rails: float = 1.0
    """Share of the NICs of a node that a tensor-parallel group across nodes uses."""
    cross_node_tp_us: float = 20.0
    """Latency that each further node adds to a tensor-parallel collective."""
    pipeline_hop_us: float = 0.0
    """Host time that each further tensor-parallel rank adds to a layer where a pipeline crosses nodes."""
    pipeline_layer_us: float = 0.0
    """Host time added to a layer where tensor parallel is combined with a pipeline that crosses nodes."""
    stall_ms: float = 0.0
    """Added to each transfer between stages where pipelines stall (`stalls.py`)."""
    node_ms: float = 0.0
    """Time that each further node adds to a step, which ends when the slowest node does."""
    # Data parallel.
    dp_hidden: float = 0.8
    """Share of the last backward pass that can hide the reduction of gradients."""
    shard_messages: float = 1.0
    """Collectives per layer to reduce and gather sharded states: few with buckets, one per tensor without."""
    gather_hidden: float = 0.0
    """Share of the first forward pass that can hide the all-gather of weights."""
    network: float = 0.8
    """Share of the line rate between nodes that large collectives reach."""
    link: float = 0.75
    """Share of the bandwidth inside a node that large collectives reach."""
    hop_us: float = 20.0
    """Latency of one step of a ring between nodes; inside a node it is an eighth."""
    reduces_whole: bool = False
    """Gradients are all-reduced even where optimizer states are sharded."""
    reduce_bytes: float = 4.0
    """Bytes of a gradient in a collective."""
    optimizer: float = 1.0
    """Time of the optimizer step, relative to its bytes at the memory bandwidth."""
    fsdp_slowdown: float = 0.0
    """Share of the hidden all-gathers that slows down the kernels they overlap with."""
    full_memory_slowdown: float = 0.0
    """How much longer a step takes on a full GPU: the allocator frees cached blocks and allocates again."""
    imbalance: float = 1.0
    """Time of the slowest rank of a micro-batch, relative to the mean: jitter, routing."""
    # Memory.
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    """Bytes of a stored gradient, per weight."""
    gradients_freed: bool = False
    """Gradients are freed after every step: with one micro-batch they never coexist with all activations."""
    optimizer_bytes: float = 12.0
    """Master weights and moments."""
    hidden_bytes: float = 8.0
    """Kept for backward in a layer, per token and element of the residual stream: inputs and outputs of two norms."""
    head_bytes: float = 4.0
    """Kept per token and element of queries, keys and values."""
    inner_bytes: float = 6.0
    """Kept per token and element of a gated MLP's inner width; two thirds of it without a gate."""
    scattered_bytes: float = 0.0
    """Added with tensor parallel, per token and element of the residual stream: scattered outputs."""
    pending_bytes: float = 0.0
    """Bytes of gathered tensor-parallel inputs, per token and element, that another stream has not freed yet. The host
    is only so many layers ahead of the GPU, so they do not grow with the model's depth."""
    selective_kept: float = 1.0
    """Share of a layer's bytes that the engine's own `recompute: selective` keeps. Megatron's drops attention scores,
    which FlashAttention never writes."""
    fp8_kept: float = 0.8
    """Share of those bytes that is kept with fp8 and fp4 matmuls, which keep their inputs as they were cast."""
    fp8_kept_beside_adapters: float | None = None
    """The same where adapters read those inputs, in bf16; None: as without adapters."""
    logit_bytes: float = 10.0
    """Bytes per logit of a micro-batch at the peak of the loss."""
    logit_slice: float = inf
    """Logits that exist at once, on all tensor-parallel ranks together, where the loss is computed in slices."""
    backward_work_bytes: float = 8.0
    """Temporary bytes of backward through one layer, per token and element of the inner width."""
    step_bytes: float = 0.0
    """Temporary bytes of the optimizer step, per weight of the rank."""
    buffer_gib: float = 0.3
    """Workspaces and communication buffers inside the allocator."""
    context_gib: float = 1.5
    """Memory of the driver and the communication library, outside the allocator."""
    reserve: float = 0.04
    """Cached memory of the allocator, as a share of what is allocated."""


@cache
def _document() -> dict[str, dict[str, Any]]:
    return dict(parse_yaml(_FILE.read_text(encoding="utf-8"), _FILE.name).value)


def engine_constant_names() -> list[str]:
    """Return the names of all engines that have constants."""
    return list(_document())


@cache
def engine_constants(name: str) -> EngineConstants:
    """Return the constants of an engine."""
    known = _document()
    if name not in known:
        raise InputError(f"the engine `{name}` has no constants in the planner", hint=f"known: {', '.join(known)}")
    names = {field.name for field in fields(EngineConstants)}
    values = {key: value for key, value in known[name].items() if key in names}
    return EngineConstants(name=name, **values)
