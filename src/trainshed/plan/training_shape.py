"""What the planner predicts: a training (model, batch, precision, engine) on equal GPUs in equal nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cached_property

from trainshed.catalog.fabrics import fabric
from trainshed.catalog.gpus import Gpu, find_gpu
from trainshed.catalog.machines import Machine, machine_of_gpu
from trainshed.plan.flops import WIDE_EXPERT_ENGINES, attended_length, expert_share, training_flops
from trainshed.plan.layout import RankLayout
from trainshed.plan.lora_shape import LoraShape
from trainshed.plan.model_shape import ModelShape
from trainshed.plan.performance.engine_constants import EngineConstants, EngineOptions
from trainshed.plan.performance.gpu_efficiency import GpuEfficiency, gpu_efficiency


@dataclass(frozen=True)
class Hardware:
    """Equal GPUs in equal nodes.

    Bandwidths are 10^9 bytes a second, per GPU and direction, as the vendor states them. What collectives reach of them
    is in `EngineConstants` and `GpuEfficiency`.
    """

    gpu_name: str
    gpu: Gpu
    gpus_per_node: int
    link_domain: int
    """How many GPUs NVLink or xGMI connects: a node, or a rack of 72."""
    link_gb_per_s: float
    """Inside that domain."""
    network_gb_per_s: float
    """Between nodes: the node's network divided by its GPUs."""
    fabric: str
    """Name of the network between nodes, from the catalog."""
    machine: str | None = None
    """Name of the machine in the catalog; None where only a GPU was named."""

    @property
    def memory_gib(self) -> float:
        """Memory of one GPU, as the driver reports it."""
        return self.gpu.memory_gib


def hardware_of(machine: Machine) -> Hardware:
    """Describe a machine to the planner."""
    return _hardware(machine, find_gpu(machine.gpu))


def hardware_of_gpu(name_or_path: str | os.PathLike[str]) -> Hardware:
    """Describe a GPU to the planner, in the machine that its entry names."""
    gpu = find_gpu(name_or_path)
    return replace(_hardware(machine_of_gpu(gpu), gpu), machine=None)


def _hardware(machine: Machine, gpu: Gpu) -> Hardware:
    return Hardware(
        gpu_name=gpu.name,
        gpu=gpu,
        gpus_per_node=machine.gpus,
        link_domain=machine.link_domain or machine.gpus,
        # The catalog has both directions together, as vendors print them; PCIe carries what has no other link.
        link_gb_per_s=gpu.link_gb_per_s / 2 if gpu.link_gb_per_s is not None else gpu.host_gb_per_s,
        network_gb_per_s=machine.network_gbps / 8 / machine.gpus,
        fabric=fabric(machine.fabric).name,
        machine=machine.name,
    )


@dataclass(frozen=True)
class TrainingShape:
    """One training, before a layout is chosen for it."""

    model: ModelShape
    sequence_length: int
    global_batch: int
    """Sequences per step."""
    precision: str
    """The dtype of matmuls: fp32, fp16, bf16, fp8, mxfp8 or nvfp4."""
    hardware: Hardware
    gpus: int
    constants: EngineConstants
    """Fitted constants of the engine that steps the model."""
    options: EngineOptions = field(default_factory=EngineOptions)
    """Options of this run."""
    lora: LoraShape | None = None
    """The adapters; None: all weights are trained."""
    document_length: float | None = None
    """Length of the document that an average token is in, where documents are kept apart; None: they are not."""
    preference: bool = False
    """DPO: a reference model runs forward too. It is a second copy of the weights, or the base without its adapters."""
    calibration: float = 1.0
    """Measured step seconds divided by predicted ones, from runs like this one."""
    memory_calibration: float = 1.0
    """The same for memory that tensors fill."""
    gpu_efficiency: GpuEfficiency | None = None
    """None: the one that is stored for this GPU; a fit tries others."""

    @cached_property
    def efficiency(self) -> GpuEfficiency:
        """Which share of its datasheet the GPU reaches; a search asks very often."""
        return self.gpu_efficiency or gpu_efficiency(self.hardware.gpu_name)

    @cached_property
    def trained_weights(self) -> int:
        """Number of weights that are trained."""
        return self.model.weights if self.lora is None else self.lora.weights(self.model)

    @property
    def quantized(self) -> bool:
        """Whether frozen weights are held in fewer bytes than the matmuls' dtype has."""
        return self.lora is not None and self.lora.quantized

    @property
    def attended_length(self) -> float:
        """Length of what attention sees as one sequence: a document, or all of it."""
        return attended_length(self.sequence_length, self.document_length)

    @cached_property
    def flops_per_token(self) -> float:
        """Model FLOPs of a token, as `plan/flops.py` counts them."""
        matmul, attention = self.model.matmul_flops, self.model.attention_flops(self.attended_length)
        adapters = None if self.lora is None else self.lora.token_flops(self.model)
        return training_flops(matmul, attention, adapters) + (matmul + attention if self.preference else 0.0)

    @property
    def wide_experts(self) -> bool:
        """Whether experts multiply in 16 bits whatever the precision is."""
        return self.constants.name in WIDE_EXPERT_ENGINES

    @cached_property
    def expert_share(self) -> float:
        """The share of `flops_per_token` in experts that tokens are routed to."""
        matmul, attention = self.model.matmul_flops, self.model.attention_flops(self.attended_length)
        adapters = None if self.lora is None else self.lora.token_flops(self.model)
        return expert_share(self.model.expert_flops, matmul, attention, adapters, reference=self.preference)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.global_batch * self.sequence_length

    def rank_tokens(self, layout: RankLayout) -> float:
        """Return the tokens of a micro-batch on one rank: a context-parallel rank has a part of each sequence."""
        return layout.micro_batch * self.sequence_length / layout.cp

    def stream_shards(self, layout: RankLayout) -> int:
        """Return among how many ranks the residual stream of those tokens is divided."""
        return layout.tp if self.options.sequence_parallel else 1
