"""A rank's part of the model: built on the meta device, sharded, given memory, filled.

`ParameterShard` says which box of which global tensor a rank holds, and which rank writes it. Layouts differ only in
these boxes, so fresh weights, base weights and checkpoints are all filled box by box.
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
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig

TensorBox = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) within the global tensor."""


@dataclass(frozen=True)
class ParameterShard:
    """One tensor of this rank.

    `owner` is true on exactly one of the ranks that hold the same box: that one writes it and counts it in the norm.
    `summed_over_tp` marks tensors every tensor-parallel rank holds whole while it sees only some tokens, so that their
    gradients are parts of a sum; `tied` the embedding that the first and last stage share.
    """

    parameter: Parameter
    held: nn.Parameter
    offset: tuple[int, ...]
    owner: bool
    summed_over_tp: bool
    tied: bool

    @property
    def name(self) -> str:
        """The global name."""
        return self.parameter.name

    @property
    def local(self) -> torch.Tensor:
        """This rank's box."""
        return _local_tensor(self.held)

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient of this rank's box."""
        return None if self.held.grad is None else _local_tensor(self.held.grad)


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def model_parallel_box(parameter: Parameter, mesh: ParallelMesh) -> TensorBox:
    """The part of a tensor that model parallelism leaves to this rank, before FSDP shares it out."""
    offset, shape = [0] * len(parameter.shape), list(parameter.shape)
    axes = mesh.axes
    if parameter.expert:
        start, stop = axes.ep.bounds(shape[0])
        offset[0], shape[0] = start, stop - start
    if parameter.split is not None:
        group = axes.etp if parameter.expert else axes.tp
        start, stop = group.bounds(shape[parameter.split])
        offset[parameter.split], shape[parameter.split] = start, stop - start
    return tuple(offset), tuple(shape)


def collect_parameter_shards(chunks: list[nn.Module], config: ModelConfig, mesh: ParallelMesh) -> list[ParameterShard]:
    """List the tensors of this rank's chunks, in the order of the model."""
    table = {parameter.name: parameter for parameter in parameters(config)}
    layout, at = mesh.layout, mesh.at
    weights: list[ParameterShard] = []
    for chunk in chunks:
        for name, held in chunk.named_parameters():
            parameter = table[name]
            offset, shape = model_parallel_box(parameter, mesh)
            first_copy = True
            if isinstance(held, DTensor):
                offset = _fsdp_offset(held, offset, shape)
                first_copy = held.device_mesh.get_local_rank("replicate") == 0
            tied = config.tied_embeddings and layout.pp > 1 and name == "embedding.weight"
            whole_on_tp = parameter.split is None and not parameter.expert
            owner = first_copy and not (tied and at.pp != 0) and not (whole_on_tp and at.tp != 0)
            weights.append(ParameterShard(parameter, held, offset, owner, whole_on_tp and layout.tp > 1, tied))
    return weights


def _fsdp_offset(held: DTensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Where FSDP's part begins: it cuts one dim into pieces of ceil(length / ranks), the last ones short or empty."""
    placement = next((each for each in held.placements if isinstance(each, Shard)), None)
    if placement is None:
        return offset
    ranks, rank = held.device_mesh.size(1), held.device_mesh.get_local_rank("shard")
    length = shape[placement.dim]
    start = min(rank * -(-length // ranks), length)
    moved = list(offset)
    moved[placement.dim] += start
    return tuple(moved)


COMPUTE_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""What activations and matrix products are in; the weights of record are fp32, with fp64 fp64."""


@dataclass(frozen=True)
class RankModel:
    """This rank's chunks, first to last, and their tensors."""

    config: ModelConfig
    mesh: ParallelMesh
    chunks: list[DecoderStage]
    weights: list[ParameterShard]
    scale: LossNormalization
    sequence_length: int
    dtype: torch.dtype

    @property
    def sharded(self) -> bool:
        """Whether FSDP holds the tensors."""
        return isinstance(self.chunks[0], FSDPModule)


def build_model(
    config: ModelConfig,
    mesh: ParallelMesh,
    *,
    sequence_length: int,
    precision: str,
    losses: Regularization,
    compile_blocks: bool = False,
) -> RankModel:
    """Build this rank's chunks with memory but without values."""
    layout, device = mesh.layout, mesh.device
    check_sharding(mesh)
    dtype = COMPUTE_DTYPES[precision]
    kept = torch.float64 if precision == "fp64" else torch.float32
    scale = LossNormalization(torch.ones((), dtype=kept, device=device), torch.ones((), dtype=kept, device=device))
    numbers = layout.chunks(mesh.at.pp)
    chunks: list[DecoderStage] = []
    for number in numbers:
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
            chunk = DecoderStage(config, mesh.axes, spec, losses, scale).to(kept)
        if precision == "fp8":
            _convert_to_float8(chunk)
        if compile_blocks:
            for block in chunk.layers.values():
                block.compile(fullgraph=config.moe is None)
        apply_fsdp(chunk, mesh, dtype, kept)
        chunk.to_empty(device=device)
        chunks.append(chunk)
    weights = collect_parameter_shards(list(chunks), config, mesh)
    return RankModel(config, mesh, chunks, weights, scale, sequence_length, dtype)


def init_model(model: RankModel, seed: int) -> None:
    """Give every tensor its fresh values."""
    for weight in model.weights:
        init_parameter(weight.local, weight.parameter, weight.offset, model.config, seed)


def _convert_to_float8(chunk: DecoderStage) -> None:
    """Let projections multiply in float8 with dynamic scales (torchao); the router and the head do not."""
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
    except ImportError:
        raise MissingExtra.named("fp8", "`precision: fp8`") from None
    config = Float8LinearConfig()
    fast, exact = ScaledMMConfig(use_fast_accum=True), ScaledMMConfig(use_fast_accum=False)
    products = LinearMMConfig(output=fast, grad_input=exact, grad_weight=exact)

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.t(), products, config)

    for module in _projections(chunk):
        # The kernels need sizes in steps of 16.
        if not any(size % 16 for size in module.weight.shape):
            module.product = product


def _projections(chunk: DecoderStage) -> list[Linear]:
    return [module for name, module in chunk.named_modules() if isinstance(module, Linear) and "router" not in name]


def describe_float8_exclusions(model: RankModel) -> str | None:
    """Say how many projections of an fp8 model multiply in bf16 all the same; None where none does."""
    found = [module for chunk in model.chunks for module in _projections(chunk)]
    outside = sum(module.product is F.linear for module in found)
    if not outside:
        return None
    return f"{outside} of {len(found)} projections stay in bf16: fp8 products take sizes in multiples of 16"
