"""The process groups of a layout: two meshes over the same ranks, as `plan/layout.py` lays them out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainshed.models.collectives import ALONE, Axes, Group
from trainshed.plan.layout import Coordinates, RankLayout


@dataclass(frozen=True)
class Mesh:
    """This rank's groups.

    `weights` and `experts` are the (replicate, shard) meshes that FSDP spreads dense and expert tensors over, None
    where every such mesh is a single rank. `tied` joins the first and last pipeline stage (None elsewhere).
    """

    layout: RankLayout
    at: Coordinates
    device: torch.device
    axes: Axes
    pp: Group
    weights: DeviceMesh | None
    experts: DeviceMesh | None
    tied: Group

    @property
    def reads_tokens(self) -> bool:
        """Whether this rank's chunks need token ids: the first and the last stage do."""
        return self.at.pp in (0, self.layout.pp - 1)


def alone(layout: RankLayout, device: torch.device) -> Mesh:
    """The mesh of a single process, without any process group."""
    return Mesh(layout, layout.coordinates(0), device, Axes(), ALONE, None, None, ALONE)


def build_mesh(layout: RankLayout, device: torch.device) -> Mesh:
    """Make the process groups; every rank of the world calls this together."""
    if layout.world_size == 1:
        return alone(layout, device)
    rank = dist.get_rank()
    ranks = torch.arange(layout.world_size).view(layout.dense_shape)
    pp, copies, shard, cp, tp = layout.dense_shape
    dense = _GroupsAlong(device, ranks, ("pp", "replicate", "shard", "cp", "tp"))
    sequence = _GroupsAlong(device, ranks.reshape(pp, copies, shard, cp * tp), ("pp", "replicate", "shard", "sequence"))
    expert = _GroupsAlong(device, ranks.view(layout.expert_shape), ("pp", "edp", "ep", "etp"))
    axes = Axes(
        tp=dense.group("tp"),
        cp=dense.group("cp"),
        ep=expert.group("ep"),
        etp=expert.group("etp"),
        sequence=sequence.group("sequence"),
    )
    weights = experts = None
    if max(layout.dp * layout.cp, layout.edp if layout.ep * layout.etp < layout.stage_ranks else 1) > 1:
        weights, experts = _state_meshes(layout, device, ranks)
    return Mesh(
        layout, layout.coordinates(rank), device, axes, dense.group("pp"), weights, experts, _tied(layout, ranks, rank)
    )


class _GroupsAlong:
    """Groups along the axes of one arrangement of the ranks; axes of length 1 get none."""

    def __init__(self, device: torch.device, ranks: torch.Tensor, names: tuple[str, ...]) -> None:
        kept = [axis for axis, length in enumerate(ranks.shape) if length > 1]
        self._names = [names[axis] for axis in kept]
        self._mesh = DeviceMesh(
            device.type, ranks.reshape([ranks.shape[axis] for axis in kept]), mesh_dim_names=tuple(self._names)
        )

    def group(self, name: str) -> Group:
        if name not in self._names:
            return ALONE
        group = self._mesh.get_group(name)
        return Group(group.size(), group.rank(), group)


def _state_meshes(layout: RankLayout, device: torch.device, ranks: torch.Tensor) -> tuple[DeviceMesh, DeviceMesh]:
    """(replicate, shard) for dense and for expert tensors: who holds copies, who shares out one copy."""
    pp, copies, shard, cp, tp = layout.dense_shape
    dense = ranks.permute(0, 4, 1, 2, 3).reshape(pp * tp, copies, shard * cp)
    expert_copies = copies if layout.shard != "none" else 1
    expert = ranks.view(pp, expert_copies, layout.edp // expert_copies, layout.ep * layout.etp)
    expert = expert.permute(0, 3, 1, 2).reshape(-1, expert_copies, layout.edp // expert_copies)
    if layout.shard == "none":
        dense, expert = (each.reshape(each.shape[0], -1, 1) for each in (dense, expert))
    names = ("others", "replicate", "shard")
    meshes = [DeviceMesh(device.type, each.contiguous(), mesh_dim_names=names) for each in (dense, expert)]
    return meshes[0]["replicate", "shard"], meshes[1]["replicate", "shard"]


def _tied(layout: RankLayout, ranks: torch.Tensor, rank: int) -> Group:
    """The pair of ranks on the first and last stage that hold the same part of a tied embedding."""
    if layout.pp == 1:
        return ALONE
    mine = ALONE
    for pair in ranks[[0, -1]].flatten(1).t().tolist():
        group = dist.new_group(pair)
        if rank in pair and isinstance(group, dist.ProcessGroup):
            mine = Group(2, pair.index(rank), group)
    return mine
