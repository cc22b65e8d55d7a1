"""What happens to gradients between backward and the update: sums that backward left open, the norm, the clip."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from trainshed.engines.torch.mesh import Mesh
from trainshed.engines.torch.weights import Weight
from trainshed.models.collectives import Group


def finish_sums(weights: Iterable[Weight], mesh: Mesh) -> None:
    """Sum the gradients that are still in parts: over tp, and over the two ends of a pipeline with tied embeddings.

    FSDP has summed over the data-parallel ranks already; sums commute, so doing these once per step on what is left on
    each rank gives the same as doing them for every micro-batch.
    """
    weights = list(weights)
    _sum(_gradients(weight for weight in weights if weight.tied), mesh.tied)
    _sum(_gradients(weight for weight in weights if weight.summed_over_tp), mesh.axes.tp)


def _gradients(weights: Iterable[Weight]) -> list[torch.Tensor]:
    """Gradients of these weights, zeros where a rank saw nothing of one, so that all ranks sum the same."""
    found = []
    for weight in weights:
        if weight.held.grad is None:
            weight.held.grad = torch.zeros_like(weight.held)
        gradient = weight.gradient
        assert gradient is not None
        found.append(gradient)
    return found


def _sum(gradients: list[torch.Tensor], group: Group) -> None:
    if group.size == 1 or not gradients:
        return
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat, group=group.process_group)
    for gradient, summed in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(summed)


def squared_norm(weights: Iterable[Weight]) -> torch.Tensor:
    """Sum the squares of the gradients this rank owns: float64 scalar, to be summed over all ranks."""
    owned = [g for weight in weights if weight.owner and (g := weight.gradient) is not None and g.numel()]
    if not owned:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(owned)
    return torch.stack([norm.double() for norm in norms]).square().sum()
