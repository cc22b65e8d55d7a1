"""What layers say to other ranks, each with its gradient, and nothing at all where the group is one rank.

Activations are S-first (`[S, B, H]`), so gathering and cutting the sequence is on dim 0 and needs no copy. PyTorch's
functional collectives carry the gradients (gather and reduce-scatter are each other's) and trace under compile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

# Renamed in PyTorch 2.13, where the old names warn.
_all_gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
_reduce_scatter = getattr(funcol, "reduce_scatter_single_autograd", None) or funcol.reduce_scatter_tensor_autograd


@dataclass(frozen=True)
class Group:
    """The ranks along one axis of the mesh, and this rank's place among them."""

    size: int = 1
    rank: int = 0
    process_group: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The process group; only asked for where there is more than one rank."""
        assert self.process_group is not None, "a group of several ranks has a process group"
        return self.process_group

    def bounds(self, length: int) -> tuple[int, int]:
        """Return this rank's share [start, stop) of a length; the first ranks take one more where it is uneven."""
        each, extra = divmod(length, self.size)
        start = self.rank * each + min(self.rank, extra)
        return start, start + each + (self.rank < extra)


ALONE = Group()


@dataclass(frozen=True)
class Axes:
    """The groups that a model's layers talk within."""

    tp: Group = ALONE
    cp: Group = ALONE
    ep: Group = ALONE
    etp: Group = ALONE
    sequence: Group = ALONE
    """All ranks that hold parts of one sequence: cp · tp."""


def gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Put the parts of all ranks together on dim 0; the gradient of each part is summed over the ranks."""
    if group.size == 1:
        return x
    return _wait(_all_gather(x.contiguous(), 0, group.ranks))


def sum_and_cut(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the ranks and keep this rank's part of dim 0."""
    if group.size == 1:
        return x
    return _wait(_reduce_scatter(x.contiguous(), "sum", 0, group.ranks))


def exchange(x: torch.Tensor, receive: list[int], send: list[int], group: Group) -> torch.Tensor:
    """Send `send[i]` rows to rank i and receive `receive[i]` rows from it."""
    if group.size == 1:
        return x
    return _wait(funcol.all_to_all_single_autograd(x.contiguous(), receive, send, group.ranks))


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the ranks; for numbers that carry no gradient."""
    if group.size == 1:
        return x
    return _wait(funcol.all_reduce(x.detach(), "sum", group.ranks))


def largest(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Take the maximum over the ranks; for numbers that carry no gradient."""
    if group.size == 1:
        return x
    return _wait(funcol.all_reduce(x.detach(), "max", group.ranks))


def _wait(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, funcol.AsyncCollectiveTensor) else x
