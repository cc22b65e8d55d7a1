"""Process groups by the ranks in them: every way to divide the world into groups is made once, and only if it is used.

Axes of different meshes often have the same ranks: a layout without context parallelism has one group for `tp` and for
`sequence`, one without experts has one for `edp` and for FSDP. Each NCCL communicator costs a split of the whole world
and some hundred MB of GPU memory, so such axes share one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainshed.models.collectives import SINGLE_RANK, AxisGroup


class ProcessGroups:
    """Makes the groups of one world; every rank asks for the same divisions in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}

    @property
    def count(self) -> int:
        """How many groups this rank has, with that of the whole world."""
        return len({id(dist.group.WORLD), *(id(group) for group in self._groups.values() if group is not None)})

    def axis(self, ranks: torch.Tensor) -> AxisGroup:
        """Return this rank's group of a division: ranks [groups, ranks of a group]. Those of one rank need no group."""
        if ranks.shape[1] == 1:
            return SINGLE_RANK
        group = self._group(ranks)
        return SINGLE_RANK if group is None else AxisGroup(group.size(), group.rank(), group)

    def mesh(self, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
        """Return this rank's mesh of a division: ranks [meshes, *lengths of the axes].

        A mesh needs a group for every axis, also for one of a single rank.
        """
        own = ranks[(ranks.flatten(1) == dist.get_rank()).any(1)][0]
        groups: list[dist.ProcessGroup] = []
        for axis in range(1, ranks.ndim):
            group = self._group(ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]))
            assert group is not None, "every rank is in one of the meshes"
            groups.append(group)
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self._device.type, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, self._device.type, mesh=own, mesh_dim_names=names)

    def _group(self, ranks: torch.Tensor) -> dist.ProcessGroup | None:
        division = tuple(sorted(map(tuple, ranks.tolist())))
        if division not in self._groups:
            self._groups[division] = self._make_group(division)
        return self._groups[division]

    def _make_group(self, division: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        world, rank = dist.group.WORLD, dist.get_rank()
        assert world is not None, "the process groups are started"
        if division == (tuple(range(world.size())),):
            return world
        if self._device.type == "cuda" and world.bound_device_id is not None:
            # One split of the world's communicator makes all groups of the division.
            return dist.split_group(split_ranks=[list(group) for group in division])
        own = next((group for group in division if rank in group), None)
        # Only the ranks of a group wait for each other.
        group = None if own is None else dist.new_group(list(own), use_local_synchronization=True)
        return group if isinstance(group, dist.ProcessGroup) else None
