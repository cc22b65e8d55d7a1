"""Build a rank's part of the model: lay it out on no device, shard it, give it memory, fill it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from trainshed.engines.torch.mesh import Mesh
from trainshed.engines.torch.weights import Weight, collect_weights
from trainshed.errors import InputError, MissingExtra
from trainshed.models.decoder import Chunk, ChunkSpec, Losses, StepScale
from trainshed.models.experts import ExpertMlp
from trainshed.models.init import fill_fresh
from trainshed.models.layers import Matrix
from trainshed.recipe import ModelConfig

COMPUTE_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""What activations and matrix products are in; the weights of record are fp32, with fp64 fp64."""


@dataclass(frozen=True)
class RankModel:
    """This rank's chunks, first to last, and their tensors."""

    config: ModelConfig
    mesh: Mesh
    chunks: list[Chunk]
    weights: list[Weight]
    scale: StepScale
    sequence_length: int
    dtype: torch.dtype

    @property
    def sharded(self) -> bool:
        """Whether FSDP holds the tensors."""
        return isinstance(self.chunks[0], FSDPModule)


def build_model(
    config: ModelConfig,
    mesh: Mesh,
    *,
    sequence_length: int,
    precision: str,
    losses: Losses,
    compile_blocks: bool = False,
) -> RankModel:
    """Build this rank's chunks with memory but without values."""
    layout, device = mesh.layout, mesh.device
    _check_sharding(mesh)
    dtype = COMPUTE_DTYPES[precision]
    kept = torch.float64 if precision == "fp64" else torch.float32
    scale = StepScale(torch.ones((), dtype=kept, device=device), torch.ones((), dtype=kept, device=device))
    numbers = layout.chunks(mesh.at.pp)
    chunks: list[Chunk] = []
    for number in numbers:
        spec = ChunkSpec(
            layers=layout.chunk_layers(number),
            first=number == 0,
            last=number == layout.pp * layout.vp - 1,
            sequence_length=sequence_length,
            dtype=dtype,
            device=device,
            recompute=layout.recompute,
        )
        with torch.device("meta"):
            chunk = Chunk(config, mesh.axes, spec, losses, scale).to(kept)
        if precision == "fp8":
            _to_float8(chunk)
        if compile_blocks:
            for block in chunk.layers.values():
                block.compile(fullgraph=config.moe is None)
        _shard(chunk, mesh, dtype, kept)
        chunk.to_empty(device=device)
        chunks.append(chunk)
    weights = collect_weights(list(chunks), config, mesh)
    return RankModel(config, mesh, chunks, weights, scale, sequence_length, dtype)


def fill_model(model: RankModel, seed: int) -> None:
    """Give every tensor its fresh values."""
    for weight in model.weights:
        fill_fresh(weight.local, weight.parameter, weight.offset, model.config, seed)


def _check_sharding(mesh: Mesh) -> None:
    """Refuse what PyTorch's pipeline schedules do not do.

    They keep gradients whole until a stage's last micro-batch, and weights whole from its first backward on.
    """
    layout = mesh.layout
    if layout.pp > 1 and layout.shard in ("zero2", "full") and mesh.weights is not None:
        raise InputError(
            f"shard: {layout.shard} with pp: {layout.pp}: with a pipeline our engine shards optimizer states only",
            where="layout.shard",
            hint="write shard: zero1, or pp: 1",
        )


def _shard(chunk: Chunk, mesh: Mesh, dtype: torch.dtype, kept: torch.dtype) -> None:
    """Spread a chunk's tensors over the data-parallel ranks with FSDP2, layer by layer.

    All sharding modes are FSDP2 over a (replicate, shard) mesh; they differ in how long weights and gradients stay
    whole, which `step.py` says for each micro-batch.
    """
    if mesh.weights is None or mesh.experts is None:
        return
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == kept else dtype, reduce_dtype=kept)
    free = mesh.layout.shard == "full"
    for block in chunk.layers.values():
        if isinstance(block.mlp, ExpertMlp):
            fully_shard(
                block.mlp.experts,
                mesh=mesh.experts,
                mp_policy=policy,
                reshard_after_forward=free,
                shard_placement_fn=_expert_placement(mesh.experts.size(1)),
            )
        fully_shard(block, mesh=mesh.weights, mp_policy=policy, reshard_after_forward=free)
    fully_shard(chunk, mesh=mesh.weights, mp_policy=policy, reshard_after_forward=False)
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global batch: gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _expert_placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Cut stacked experts by expert where that comes out even, else within each expert."""

    def place(parameter: nn.Parameter) -> Shard | None:
        if parameter.shape[0] % ranks == 0 or parameter.shape[1] % ranks:
            return None
        return Shard(1)

    return place


def _to_float8(chunk: Chunk) -> None:
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


def _projections(chunk: Chunk) -> list[Matrix]:
    return [module for name, module in chunk.named_modules() if isinstance(module, Matrix) and "router" not in name]


def outside_float8(model: RankModel) -> str | None:
    """Say how many projections of an fp8 model multiply in bf16 all the same; None where none does."""
    found = [module for chunk in model.chunks for module in _projections(chunk)]
    outside = sum(module.product is F.linear for module in found)
    if not outside:
        return None
    return f"{outside} of {len(found)} projections stay in bf16: fp8 products take sizes in multiples of 16"
