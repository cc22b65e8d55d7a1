"""The collectives that layers call, each with its gradient; a group of one rank returns its input.

Activations are S-first (`[S, B, H]`), so all_gather and reduce_scatter of the sequence are on dim 0 and need no copy.
PyTorch's functional collectives carry the gradients (all_gather and reduce_scatter are each other's) and trace under
torch.compile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

# Renamed in PyTorch 2.13, where the old names warn.
_all_gather_autograd = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
_reduce_scatter_autograd = (
    getattr(funcol, "reduce_scatter_single_autograd", None) or funcol.reduce_scatter_tensor_autograd
)


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along one axis of the mesh, and this rank's index among them."""

    size: int = 1
    rank: int = 0
    process_group: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The process group; only for axes of more than one rank."""
        assert self.process_group is not None, "a group of several ranks has a process group"
        return self.process_group

    @property
    def name(self) -> str:
        """The name by which PyTorch's operations find the process group."""
        return self.ranks.group_name

    def shard_bounds(self, length: int) -> tuple[int, int]:
        """Return this rank's share [start, stop) of a length; if it is uneven, the first ranks take one more."""
        share, extra = divmod(length, self.size)
        start = self.rank * share + min(self.rank, extra)
        return start, start + share + (self.rank < extra)


SINGLE_RANK = AxisGroup()


@dataclass(frozen=True)
class ParallelAxes:
    """The groups within which a model's layers communicate."""

    tp: AxisGroup = SINGLE_RANK
    cp: AxisGroup = SINGLE_RANK
    ep: AxisGroup = SINGLE_RANK
    etp: AxisGroup = SINGLE_RANK
    sequence: AxisGroup = SINGLE_RANK
    """All ranks that hold parts of one sequence: cp · tp."""


def all_gather(x: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Concatenate the parts of all ranks on dim 0; the gradient of each part is summed over the ranks."""
    if group.size == 1:
        return x
    return _wait(_all_gather_autograd(x.contiguous(), 0, group.ranks))


def reduce_scatter(x: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Sum over the ranks and keep this rank's part of dim 0."""
    if group.size == 1:
        return x
    return _wait(_reduce_scatter_autograd(x.contiguous(), "sum", 0, group.ranks))


def all_to_all(x: torch.Tensor, receive: list[int], send: list[int], group: AxisGroup) -> torch.Tensor:
    """Send `send[i]` rows to rank i and receive `receive[i]` rows from it."""
    if group.size == 1:
        return x
    return _wait(funcol.all_to_all_single_autograd(x.contiguous(), receive, send, group.ranks))


def all_reduce(x: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Sum over the ranks; for numbers that carry no gradient."""
    if group.size == 1:
        return x
    return _wait(funcol.all_reduce(x.detach(), "sum", group.ranks))


def all_reduce_max(x: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    """Take the maximum over the ranks; for numbers that carry no gradient."""
    if group.size == 1:
        return x
    return _wait(funcol.all_reduce(x.detach(), "max", group.ranks))


def may_be_in_flight(x: torch.Tensor) -> bool:
    """Whether a collective of such tensors may run while this process computes.

    Not on a CPU, which gains nothing by it: with collectives in flight, a thread of gloo's ended a rank in malloc once
    in some hundred runs (torch 2.13).
    """
    return x.is_cuda


def _wait(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, funcol.AsyncCollectiveTensor) else x
