"""The tensors a rank holds: which box of which global tensor, and who speaks for it.

Layouts differ only in these boxes, so fresh weights, base weights and checkpoints are all filled box by box.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from trainshed.engines.torch.mesh import Mesh
from trainshed.models.parameters import Parameter, parameters
from trainshed.recipe import ModelConfig

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) within the global tensor."""


@dataclass(frozen=True)
class Weight:
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
        return _local(self.held)

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient of this rank's box."""
        return None if self.held.grad is None else _local(self.held.grad)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def model_box(parameter: Parameter, mesh: Mesh) -> Box:
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


def collect_weights(chunks: list[nn.Module], config: ModelConfig, mesh: Mesh) -> list[Weight]:
    """List the tensors of this rank's chunks, in the order of the model."""
    table = {parameter.name: parameter for parameter in parameters(config)}
    layout, at = mesh.layout, mesh.at
    weights: list[Weight] = []
    for chunk in chunks:
        for name, held in chunk.named_parameters():
            parameter = table[name]
            offset, shape = model_box(parameter, mesh)
            first_copy = True
            if isinstance(held, DTensor):
                offset = _sharded_offset(held, offset, shape)
                first_copy = held.device_mesh.get_local_rank("replicate") == 0
            tied = config.tied_embeddings and layout.pp > 1 and name == "embedding.weight"
            whole_on_tp = parameter.split is None and not parameter.expert
            owner = first_copy and not (tied and at.pp != 0) and not (whole_on_tp and at.tp != 0)
            weights.append(Weight(parameter, held, offset, owner, whole_on_tp and layout.tp > 1, tied))
    return weights


def _sharded_offset(held: DTensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
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
