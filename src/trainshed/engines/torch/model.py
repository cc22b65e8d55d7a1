"""A rank's part of the model: built on the meta device, sharded, given memory, filled.

A `ParameterShard` is the box of a global tensor that a rank holds. Layouts differ only in these boxes, so fresh
weights, base weights and checkpoints are all filled box by box.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from trainshed.engines.torch.parallel import ParallelMesh, apply_fsdp, check_sharding
from trainshed.errors import MissingExtra
from trainshed.models.decoder import DecoderStage, DecoderStageSpec, LossNormalization, Regularization
from trainshed.models.init import init_parameter
from trainshed.models.layers import Linear
from trainshed.models.loss import LOSS_TERMS
from trainshed.models.moe import ROUTER_LOSS_TERMS
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig

TensorBox = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) within the global tensor."""


@dataclass(frozen=True)
class ParameterShard:
    """One tensor of this rank.

    `owner` is true on exactly one of the ranks that hold the same box: that rank writes it and counts it in the norm.
    `partial_over_tp` marks tensors that every tensor-parallel rank holds whole. Each of these ranks sees only some
    tokens, so their gradients are parts of a sum. `tied` marks the embedding that the first and last stage share.
    """

    parameter: Parameter
    tensor: nn.Parameter
    offset: tuple[int, ...]
    owner: bool
    partial_over_tp: bool
    tied: bool

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


def collect_parameter_shards(stages: list[nn.Module], config: ModelConfig, mesh: ParallelMesh) -> list[ParameterShard]:
    """List the tensors of this rank's stages, in the order of the model."""
    table = {parameter.name: parameter for parameter in parameters(config)}
    layout, coordinates = mesh.layout, mesh.coordinates
    shards: list[ParameterShard] = []
    for stage in stages:
        for name, tensor in stage.named_parameters():
            parameter = table[name]
            offset, shape = model_parallel_box(parameter, mesh)
            first_copy = True
            if isinstance(tensor, DTensor):
                offset = _fsdp_offset(tensor, offset, shape)
                first_copy = tensor.device_mesh.get_local_rank("replicate") == 0
            tied = config.tied_embeddings and layout.pp > 1 and name == "embedding.weight"
            whole_on_tp = parameter.tp_dim is None and not parameter.expert
            owner = first_copy and not (tied and coordinates.pp != 0) and not (whole_on_tp and coordinates.tp != 0)
            shards.append(ParameterShard(parameter, tensor, offset, owner, whole_on_tp and layout.tp > 1, tied))
    return shards


def _fsdp_offset(tensor: DTensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return where FSDP's shard begins. It cuts one dim into ceil(length / ranks) each; the last are short or empty."""
    placement = next((placement for placement in tensor.placements if isinstance(placement, Shard)), None)
    if placement is None:
        return offset
    ranks, rank = tensor.device_mesh.size(1), tensor.device_mesh.get_local_rank("shard")
    length = shape[placement.dim]
    start = min(rank * -(-length // ranks), length)
    shard_offset = list(offset)
    shard_offset[placement.dim] += start
    return tuple(shard_offset)


COMPUTE_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""The dtype of activations and matrix products. Master weights are fp32; with fp64 they are fp64."""


@dataclass(frozen=True)
class RankModel:
    """This rank's stages, first to last, and their tensors."""

    config: ModelConfig
    mesh: ParallelMesh
    stages: list[DecoderStage]
    shards: list[ParameterShard]
    normalization: LossNormalization
    sequence_length: int
    dtype: torch.dtype

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
        of_loss = LOSS_TERMS[1:] if regularization.z_loss or regularization.token_loss is not None else ()
        return of_loss if self.config.moe is None else (*of_loss, *ROUTER_LOSS_TERMS)


def build_model(
    config: ModelConfig,
    mesh: ParallelMesh,
    *,
    sequence_length: int,
    precision: str,
    regularization: Regularization,
    compile_blocks: bool = False,
    frozen: bool = False,
) -> RankModel:
    """Build this rank's stages with memory but without values.

    A `frozen` model is never trained: its weights have no gradients, and only the precision of the products.
    """
    layout, device = mesh.layout, mesh.device
    check_sharding(mesh)
    dtype = COMPUTE_DTYPES[precision]
    master_dtype = dtype if frozen else torch.promote_types(dtype, torch.float32)
    one = torch.ones((), dtype=torch.promote_types(dtype, torch.float32), device=device)
    normalization = LossNormalization(one, one.clone(), one.clone())
    stages: list[DecoderStage] = []
    for number in layout.chunks(mesh.coordinates.pp):
        spec = DecoderStageSpec(
            layers=layout.chunk_layers(number),
            first=number == 0,
            last=number == layout.pp * layout.vp - 1,
            sequence_length=sequence_length,
            dtype=dtype,
            device=device,
            recompute=layout.recompute,
        )
        with torch.device("meta"):
            stage = DecoderStage(config, mesh.axes, spec, regularization, normalization).to(master_dtype)
        stage.requires_grad_(not frozen)
        if precision == "fp8":
            _convert_to_float8(stage)
        if compile_blocks:
            for block in stage.layers.values():
                block.compile(fullgraph=config.moe is None)
        apply_fsdp(stage, mesh, dtype, master_dtype)
        stage.to_empty(device=device)
        stages.append(stage)
    shards = collect_parameter_shards(list(stages), config, mesh)
    return RankModel(config, mesh, stages, shards, normalization, sequence_length, dtype)


def init_model(model: RankModel, seed: int) -> None:
    """Fill every tensor with fresh values."""
    for shard in model.shards:
        init_parameter(shard.local_tensor, shard.parameter, shard.offset, model.config, seed)


def _convert_to_float8(stage: DecoderStage) -> None:
    """Make projections multiply in float8 with dynamic scales (torchao); the router and the head stay as they are."""
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
    except ImportError:
        raise MissingExtra.named("fp8", "`precision: fp8`") from None
    config = Float8LinearConfig()
    fast, exact = ScaledMMConfig(use_fast_accum=True), ScaledMMConfig(use_fast_accum=False)
    matmul_config = LinearMMConfig(output=fast, grad_input=exact, grad_weight=exact)

    def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.t(), matmul_config, config)

    for module in _projections(stage):
        # The kernels need sizes in multiples of 16.
        if not any(size % 16 for size in module.weight.shape):
            module.matmul = matmul


def _projections(stage: DecoderStage) -> list[Linear]:
    return [module for name, module in stage.named_modules() if isinstance(module, Linear) and "router" not in name]


def describe_float8_exclusions(model: RankModel) -> str | None:
    """Say how many projections of an fp8 model still multiply in bf16; None if none does."""
    projections = [module for stage in model.stages for module in _projections(stage)]
    excluded = sum(module.matmul is F.linear for module in projections)
    if not excluded:
        return None
    return f"{excluded} of {len(projections)} projections stay in bf16: fp8 products take sizes in multiples of 16"
