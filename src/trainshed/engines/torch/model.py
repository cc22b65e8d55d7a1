"""A rank's part of the model: built on the meta device, sharded, given memory, filled.

A `ParameterShard` is the box of a global tensor that a rank holds. Layouts differ only in these boxes, so fresh
weights, base weights and checkpoints are all filled box by box.

With adapters (LoRA) the model's own weights are frozen: they are stored in the dtype of the products, and only the
adapters are trained. Frozen weights are never saved, so gate and up rows are stored in the order of use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from trainshed.engines.torch.float8 import convert_to_float8
from trainshed.engines.torch.parallel import ParallelMesh, apply_fsdp, check_sharding, shard_axis
from trainshed.models.collectives import SINGLE_RANK, AxisGroup
from trainshed.models.compute_weights import ComputeWeight
from trainshed.models.decoder import DecoderStage, DecoderStageSpec, LossNormalization, Regularization
from trainshed.models.layers import Linear
from trainshed.models.lora import add_adapters
from trainshed.models.loss import LOSS_TERMS
from trainshed.models.moe import ROUTER_LOSS_TERMS, GroupedExperts
from trainshed.models.offload import ActivationOffload
from trainshed.models.parameter_groups import is_frozen_by_group
from trainshed.models.parameters import AddedRows, Parameter, lora_parameters, parameters
from trainshed.models.products import linear
from trainshed.models.quantization import QuantizedWeight
from trainshed.recipe import Lora, ModelConfig
from trainshed.recipe.optimizer import ParameterGroup

TensorBox = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) within the global tensor."""


@dataclass(frozen=True)
class ParameterShard:
    """One tensor of this rank.

    `owner` is true on exactly one of the ranks that hold the same box: that rank writes it and counts it in the norm.
    `partial_over_tp` marks tensors that every tensor-parallel rank holds whole. Each of these ranks sees only some
    tokens, or computes only some columns, so their gradients are parts of a sum. `partial_over_etp` marks those that
    every expert-tensor-parallel rank holds whole. `tied` marks the embedding that the first and last stage share.
    `gates_first` is the dim along which a frozen tensor has all gates before all ups, within the box that model
    parallelism gives this rank; None: it is stored as the table has it. `replicas` are the axes along which ranks hold
    the same box; its owner is the first of each. `compute_weight` is its copy for the products, where one is kept.
    """

    parameter: Parameter
    tensor: torch.Tensor
    offset: tuple[int, ...]
    owner: bool
    partial_over_tp: bool
    partial_over_etp: bool
    tied: bool
    gates_first: int | None = None
    replicas: tuple[AxisGroup, ...] = ()
    compute_weight: ComputeWeight | None = None

    @property
    def name(self) -> str:
        """The global name."""
        return self.parameter.name

    @property
    def local_tensor(self) -> torch.Tensor:
        """This rank's box."""
        return _local_tensor(self.tensor)

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient of this rank's box."""
        return None if self.tensor.grad is None else _local_tensor(self.tensor.grad)


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def model_parallel_box(parameter: Parameter, mesh: ParallelMesh) -> TensorBox:
    """Return the box of a tensor that model parallelism gives this rank, before FSDP shards it."""
    offset, shape = [0] * len(parameter.shape), list(parameter.shape)
    axes = mesh.axes
    if parameter.expert:
        start, stop = axes.ep.shard_bounds(shape[0])
        offset[0], shape[0] = start, stop - start
    if parameter.tp_dim is not None:
        group = axes.etp if parameter.expert else axes.tp
        start, stop = group.shard_bounds(shape[parameter.tp_dim])
        offset[parameter.tp_dim], shape[parameter.tp_dim] = start, stop - start
    return tuple(offset), tuple(shape)


def collect_parameter_shards(
    stages: list[DecoderStage],
    config: ModelConfig,
    mesh: ParallelMesh,
    lora: Lora | None,
    added: AddedRows | None = None,
) -> list[ParameterShard]:
    """List the tensors of this rank's stages, in the order of the model."""
    table = {parameter.name: parameter for parameter in parameters(config)}
    if lora is not None:
        table |= {parameter.name: parameter for parameter in lora_parameters(config, lora, added)}
    layout, coordinates = mesh.layout, mesh.coordinates
    shards: list[ParameterShard] = []
    for stage in stages:
        # Quantised weights are buffers too, and are listed by themselves.
        buffers = ((name, tensor) for name, tensor in stage.named_buffers() if name in table)
        for name, tensor in (*stage.named_parameters(), *buffers):
            parameter = table[name]
            offset, shape = model_parallel_box(parameter, mesh)
            # Every rank of a pipeline stage has the whole of a buffer.
            first_copy = not parameter.buffer or not (coordinates.dp or coordinates.cp)
            if isinstance(tensor, DTensor):
                offset = _fsdp_offset(tensor, offset, shape)
            tied = config.embedding_at_both_ends and layout.pp > 1 and name.startswith("embedding.")
            whole_on_tp = parameter.tp_dim is None and not parameter.expert
            whole_on_etp = parameter.tp_dim is None and parameter.expert
            replicas = (
                mesh.tied_embedding if tied else SINGLE_RANK,
                mesh.axes.tp if whole_on_tp else SINGLE_RANK,
                mesh.axes.etp if whole_on_etp else SINGLE_RANK,
                _fsdp_copies(tensor),
            )
            shards.append(
                ParameterShard(
                    parameter,
                    tensor,
                    offset,
                    first_copy and all(axis.rank == 0 for axis in replicas),
                    whole_on_tp and layout.tp > 1 and not parameter.buffer,
                    whole_on_etp and layout.etp > 1,
                    tied,
                    _gates_first_dim(stage, parameter),
                    tuple(axis for axis in replicas if axis.size > 1),
                    stage.compute_weights.get(name),
                )
            )
    return shards


def _gates_first_dim(stage: DecoderStage, parameter: Parameter) -> int | None:
    """Return the dim of a tensor along which its module stores all gates before all ups; None if they alternate."""
    owner = parameter.name.rpartition(".")[0]
    if "gate_up" not in parameter.name or ".lora." in parameter.name:
        return None
    module = stage.get_submodule(owner)
    assert isinstance(module, Linear | GroupedExperts)
    return None if module.gate_up_interleaved else int(parameter.expert)


def _fsdp_copies(tensor: torch.Tensor) -> AxisGroup:
    """Return the ranks that hold copies of FSDP's shard."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim == 1:
        return SINGLE_RANK
    group = tensor.device_mesh.get_group("replicate")
    return AxisGroup(group.size(), group.rank(), group)


def _fsdp_offset(tensor: DTensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return where FSDP's shard begins. It cuts one dim into ceil(length / ranks) each; the last are short or empty."""
    placement = next((placement for placement in tensor.placements if isinstance(placement, Shard)), None)
    if placement is None:
        return offset
    axis = shard_axis(tensor.device_mesh)
    ranks, rank = axis.size(), axis.get_local_rank()
    length = shape[placement.dim]
    start = min(rank * -(-length // ranks), length)
    shard_offset = list(offset)
    shard_offset[placement.dim] += start
    return tuple(shard_offset)


@dataclass(frozen=True)
class QuantizedShard:
    """A frozen projection that this rank holds in fewer bits: its box of the weight, gates first where it has gates."""

    parameter: Parameter
    weight: QuantizedWeight
    offset: tuple[int, ...]
    gates_first: bool


COMPUTE_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""The dtype of activations, matrix products and frozen weights. Master weights are fp32; with fp64 they are fp64."""


@dataclass(frozen=True)
class RankModel:
    """This rank's stages, first to last, and their tensors.

    `shards` are those that a run trains and saves, with those that a group of `train.optimizer.groups` freezes, which
    have no gradient. With adapters the model's own are in `frozen_shards`, or `quantized` if they are held in fewer
    bits.
    """

    config: ModelConfig
    mesh: ParallelMesh
    stages: list[DecoderStage]
    shards: list[ParameterShard]
    normalization: LossNormalization
    sequence_length: int
    dtype: torch.dtype
    lora: Lora | None = None
    frozen_shards: list[ParameterShard] = field(default_factory=list)
    quantized: list[QuantizedShard] = field(default_factory=list)
    added: AddedRows | None = None
    """The rows of the tokens that the run adds to those of its base."""
    groups: Sequence[ParameterGroup] = ()
    """The groups of `train.optimizer.groups`."""

    @property
    def score_biases(self) -> list[ParameterShard]:
        """The biases of routers that a run saves; none beside adapters, whose base stays as it is."""
        return [shard for shard in self.frozen_shards if shard.parameter.buffer and self.lora is None]

    @property
    def moved_biases(self) -> list[ParameterShard]:
        """Those that it moves towards even load: no group freezes them."""
        return [shard for shard in self.score_biases if not is_frozen_by_group(shard.name, self.groups)]

    @property
    def compute_weights(self) -> list[ComputeWeight]:
        """The copies of weights that are kept for the products."""
        return [weight for stage in self.stages for weight in stage.compute_weights.values()]

    @property
    def sharded(self) -> bool:
        """Whether FSDP holds the tensors."""
        return isinstance(self.stages[0], FSDPModule)

    @property
    def regularization(self) -> Regularization:
        """What the stages are trained on."""
        return self.stages[0].regularization

    @property
    def loss_terms(self) -> tuple[str, ...]:
        """The terms that this model is trained on besides the cross-entropy; they are reported by themselves."""
        regularization = self.regularization
        # The second term is the z-loss, or the extra part of a registered loss.
        of_loss = LOSS_TERMS[1:2] if regularization.z_loss or regularization.token_loss is not None else ()
        of_loss = (*of_loss, *LOSS_TERMS[2:]) if self.config.mtp_layers else of_loss
        return of_loss if self.config.moe is None else (*of_loss, *ROUTER_LOSS_TERMS)


def build_model(
    config: ModelConfig,
    mesh: ParallelMesh,
    *,
    sequence_length: int,
    precision: str,
    regularization: Regularization,
    compile_blocks: bool = False,
    lora: Lora | None = None,
    added: AddedRows | None = None,
    frozen: bool = False,
    groups: Sequence[ParameterGroup] = (),
) -> RankModel:
    """Build this rank's stages with memory but without values; with `lora` they are frozen and have adapters.

    `added` are the rows of added tokens, which `config` counts. A `frozen` model is never trained: its weights have no
    gradients, and only the precision of the products. Tensors that a group freezes have no gradients either.
    """
    layout, device = mesh.layout, mesh.device
    check_sharding(mesh)
    dtype = COMPUTE_DTYPES[precision]
    master_dtype = dtype if frozen else torch.promote_types(dtype, torch.float32)
    one = torch.ones((), dtype=torch.promote_types(dtype, torch.float32), device=device)
    normalization = LossNormalization(one, one.clone(), one.clone())
    offload = ActivationOffload(device) if layout.offload == "activations" and not frozen else None
    stages: list[DecoderStage] = []
    frozen_by_group: set[str] = set()
    for number in layout.chunks(mesh.coordinates.pp):
        spec = DecoderStageSpec(
            layers=layout.chunk_layers(number),
            first=number == 0,
            last=number == layout.pp * layout.vp - 1,
            sequence_length=sequence_length,
            dtype=dtype,
            device=device,
            recompute=layout.recompute,
            offload=offload,
        )
        with torch.device("meta"):
            stage = DecoderStage(config, mesh.axes, spec, regularization, normalization)
            stage = stage.to(master_dtype if lora is None else dtype)
            if lora is not None:
                add_adapters(stage, lora, dtype=master_dtype, added=added)
        if frozen:
            stage.requires_grad_(False)
        frozen_by_group |= _freeze_groups(stage, groups, starts_pipeline=spec.first and not spec.last)
        if precision == "fp8":
            convert_to_float8(projections(stage))
        if compile_blocks and can_compile_blocks(config, mesh, dtype):
            for block in stage.layers.values():
                block.compile(fullgraph=config.moe is None)
        apply_fsdp(stage, mesh, dtype, master_dtype)
        stage.to_empty(device=device)
        if layout.overlap == "tp":
            for module in projections(stage):
                module.overlaps = True
        if _keeps_compute_weights(stage, dtype):
            _add_compute_weights(stage, dtype)
        stages.append(stage)
    shards = collect_parameter_shards(stages, config, mesh, lora, added)
    saved = {shard.name for shard in shards if shard.tensor.requires_grad} | frozen_by_group
    return RankModel(
        config,
        mesh,
        stages,
        [shard for shard in shards if shard.name in saved],
        normalization,
        sequence_length,
        dtype,
        lora,
        [shard for shard in shards if shard.name not in saved],
        collect_quantized_shards(stages, config, mesh),
        added,
        groups,
    )


def _freeze_groups(stage: DecoderStage, groups: Sequence[ParameterGroup], *, starts_pipeline: bool) -> set[str]:
    """Take the gradients from the tensors of a stage that a group freezes; returns their names.

    A pipeline sends its first stage a gradient, so there must be something that it is a gradient of: where all of that
    stage is frozen, its smallest tensor keeps one, which nobody reads.
    """
    trained = {name: parameter for name, parameter in stage.named_parameters() if parameter.requires_grad}
    frozen = {name for name in trained if is_frozen_by_group(name, groups)}
    for name in frozen:
        trained[name].requires_grad_(False)
    if starts_pipeline and frozen and len(frozen) == len(trained):
        min(trained.values(), key=torch.Tensor.numel).requires_grad_(True)
    return frozen


def can_compile_blocks(config: ModelConfig, mesh: ParallelMesh, dtype: torch.dtype) -> bool:
    """Whether PyTorch compiles the blocks of a layout.

    Experts break the graph where the host reads how many rows they have: with expert parallelism, and in all dtypes but
    bf16, whose products are a loop over the experts. Within a selective checkpoint PyTorch 2.13 cannot compile such a
    block: it compares the numbers of graphs that have none.
    """
    breaks = config.moe is not None and (dtype != torch.bfloat16 or mesh.layout.ep > 1)
    return not (breaks and mesh.layout.recompute == "selective")


def _keeps_compute_weights(stage: DecoderStage, dtype: torch.dtype) -> bool:
    """Whether a stage keeps copies of its weights for the products.

    Not under FSDP, which casts what it gathers, nor with LoRA, whose frozen weights have the dtype of the products. Not
    with recompute or offload either: there a cast weight lives for one layer, and copies of all would take memory.
    """
    if isinstance(stage, FSDPModule) or stage.spec.recompute != "none" or stage.spec.offload is not None:
        return False
    return all(module.quantized is None and module.weight.dtype != dtype for module in projections(stage))


def _add_compute_weights(stage: DecoderStage, dtype: torch.dtype) -> None:
    for module_name, module in named_projections(stage):
        copy = stage.compute_weights[f"{module_name}.weight"] = ComputeWeight(module.weight, dtype)
        module.compute_weight = copy.tensor
    for module_name, module in stage.named_modules():
        if isinstance(module, GroupedExperts):
            for name in ("gate_up" if stage.config.gated else "up", "down"):
                copy = stage.compute_weights[f"{module_name}.{name}"] = ComputeWeight(getattr(module, name), dtype)
                module.compute_weights[name] = copy.tensor


def collect_quantized_shards(
    stages: list[DecoderStage], config: ModelConfig, mesh: ParallelMesh
) -> list[QuantizedShard]:
    """List the projections of this rank that are held in fewer bits, in the order of the model."""
    table = {parameter.name: parameter for parameter in parameters(config)}
    shards = []
    for stage in stages:
        for name, module in stage.named_modules():
            if isinstance(module, Linear) and module.quantized is not None:
                parameter = table[f"{name}.weight"]
                offset, _ = model_parallel_box(parameter, mesh)
                shards.append(QuantizedShard(parameter, module.quantized, offset, name.endswith("gate_up")))
    return shards


def named_projections(stage: DecoderStage) -> Iterator[tuple[str, Linear]]:
    """Yield the projections of a stage's layers with their names; the router is none."""
    for name, module in stage.named_modules():
        if isinstance(module, Linear) and "router" not in name:
            yield name, module


def projections(stage: DecoderStage) -> list[Linear]:
    """Return the projections of a stage's layers."""
    return [module for _, module in named_projections(stage)]


def describe_float8_exclusions(model: RankModel) -> str | None:
    """Say which products of an fp8 model still multiply in bf16; None if none does."""
    modules = [module for stage in model.stages for module in projections(stage)]
    excluded = sum(module.matmul is linear for module in modules)
    reasons = []
    if excluded:
        reasons.append(
            f"{excluded} of {len(modules)} projections stay in bf16: fp8 products take sizes in multiples of 16"
        )
    if model.config.moe is not None:
        reasons.append("experts multiply in bf16, and MFU is held against the peak of both")
    return "; ".join(reasons) or None
