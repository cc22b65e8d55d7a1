"""The process groups of a layout, and FSDP over them: two meshes of the same ranks, as `plan/layout.py` orders them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from trainshed.errors import InputError
from trainshed.models.collectives import SINGLE_RANK, AxisGroup, ParallelAxes
from trainshed.models.decoder import DecoderStage, Embedding
from trainshed.models.moe import MoE
from trainshed.plan.layout import MeshCoordinates, RankLayout


@dataclass(frozen=True)
class ParallelMesh:
    """This rank's coordinates and process groups.

    `fsdp_mesh` and `expert_fsdp_mesh` are the (replicate, shard) meshes over which FSDP shards dense and expert
    tensors; None if every such mesh is a single rank. `tied_embedding` joins the first and the last pipeline stage; on
    other stages it is a single rank.
    """

    layout: RankLayout
    coordinates: MeshCoordinates
    device: torch.device
    axes: ParallelAxes
    pp: AxisGroup
    fsdp_mesh: DeviceMesh | None
    expert_fsdp_mesh: DeviceMesh | None
    tied_embedding: AxisGroup

    @property
    def reads_tokens(self) -> bool:
        """Whether this rank's stages need token ids: the first and the last do."""
        return self.coordinates.pp in (0, self.layout.pp - 1)


def single_rank_mesh(layout: RankLayout, device: torch.device) -> ParallelMesh:
    """The mesh of a single process, without any process group."""
    return ParallelMesh(layout, layout.coordinates(0), device, ParallelAxes(), SINGLE_RANK, None, None, SINGLE_RANK)


def build_mesh(layout: RankLayout, device: torch.device) -> ParallelMesh:
    """Make the process groups; every rank of the world calls this together."""
    if layout.world_size == 1:
        return single_rank_mesh(layout, device)
    rank = dist.get_rank()
    ranks = torch.arange(layout.world_size).view(layout.dense_shape)
    pp, copies, shard, cp, tp = layout.dense_shape
    dense = _AxisGroups(device, ranks, ("pp", "replicate", "shard", "cp", "tp"))
    sequence = _AxisGroups(device, ranks.reshape(pp, copies, shard, cp * tp), ("pp", "replicate", "shard", "sequence"))
    expert = _AxisGroups(device, ranks.view(layout.expert_shape), ("pp", "edp", "ep", "etp"))
    axes = ParallelAxes(
        tp=dense.group("tp"),
        cp=dense.group("cp"),
        ep=expert.group("ep"),
        etp=expert.group("etp"),
        sequence=sequence.group("sequence"),
    )
    fsdp_mesh = expert_fsdp_mesh = None
    if max(layout.dp * layout.cp, layout.edp if layout.ep * layout.etp < layout.stage_ranks else 1) > 1:
        fsdp_mesh, expert_fsdp_mesh = _fsdp_meshes(layout, device, ranks)
    return ParallelMesh(
        layout,
        layout.coordinates(rank),
        device,
        axes,
        dense.group("pp"),
        fsdp_mesh,
        expert_fsdp_mesh,
        _tied_embedding_group(layout, ranks, rank),
    )


class _AxisGroups:
    """Groups along the axes of one arrangement of the ranks; axes of length 1 get none."""

    def __init__(self, device: torch.device, ranks: torch.Tensor, names: tuple[str, ...]) -> None:
        long_axes = [axis for axis, length in enumerate(ranks.shape) if length > 1]
        self._names = [names[axis] for axis in long_axes]
        self._mesh = DeviceMesh(
            device.type, ranks.reshape([ranks.shape[axis] for axis in long_axes]), mesh_dim_names=tuple(self._names)
        )

    def group(self, name: str) -> AxisGroup:
        if name not in self._names:
            return SINGLE_RANK
        group = self._mesh.get_group(name)
        return AxisGroup(group.size(), group.rank(), group)


def _fsdp_meshes(layout: RankLayout, device: torch.device, ranks: torch.Tensor) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the (replicate, shard) meshes of dense and of expert tensors: who holds copies, who shards one copy."""
    pp, copies, shard, cp, tp = layout.dense_shape
    dense = ranks.permute(0, 4, 1, 2, 3).reshape(pp * tp, copies, shard * cp)
    expert_copies = copies if layout.shard != "none" else 1
    expert = ranks.view(pp, expert_copies, layout.edp // expert_copies, layout.ep * layout.etp)
    expert = expert.permute(0, 3, 1, 2).reshape(-1, expert_copies, layout.edp // expert_copies)
    if layout.shard == "none":
        dense, expert = dense.reshape(len(dense), -1, 1), expert.reshape(len(expert), -1, 1)
    names = ("others", "replicate", "shard")
    meshes = [DeviceMesh(device.type, mesh.contiguous(), mesh_dim_names=names) for mesh in (dense, expert)]
    return meshes[0]["replicate", "shard"], meshes[1]["replicate", "shard"]


def _tied_embedding_group(layout: RankLayout, ranks: torch.Tensor, rank: int) -> AxisGroup:
    """Return the pair of ranks on the first and last stage that hold the same part of a tied embedding."""
    if layout.pp == 1:
        return SINGLE_RANK
    group_of_rank = SINGLE_RANK
    for pair in ranks[[0, -1]].flatten(1).t().tolist():
        group = dist.new_group(pair)
        if rank in pair and isinstance(group, dist.ProcessGroup):
            group_of_rank = AxisGroup(2, pair.index(rank), group)
    return group_of_rank


def check_sharding(mesh: ParallelMesh) -> None:
    """Refuse sharding that a pipeline schedule does not allow."""
    layout = mesh.layout
    if layout.schedule == "zero_bubble" and layout.shard in ("zero2", "full") and mesh.fsdp_mesh is not None:
        raise InputError(
            f"shard: {layout.shard} with schedule: zero_bubble: the gradients of a stage's weights come all at once, "
            "after those of its inputs, so they are whole on every rank",
            where="layout.shard",
            hint="write schedule: 1f1b, or shard: zero1",
        )


def apply_fsdp(stage: DecoderStage, mesh: ParallelMesh, dtype: torch.dtype, master_dtype: torch.dtype) -> None:
    """Shard a stage's tensors over the data-parallel ranks with FSDP2, layer by layer.

    All sharding modes are FSDP2 over a (replicate, shard) mesh. They differ in how long weights and gradients stay
    unsharded, which `set_gradient_sync` sets for each micro-batch.

    Embedding and head are groups of their own, gathered for the time of their use. A tied embedding is used at both
    ends of the model, so it stays gathered with the few tensors that belong to no layer.
    """
    if mesh.fsdp_mesh is None or mesh.expert_fsdp_mesh is None:
        return
    # Activations have the right dtype already. What else a stage is given (rotary tables, the reference's
    # log-probabilities) must not be rounded, as it is not on a single rank.
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == master_dtype else dtype, reduce_dtype=master_dtype, cast_forward_inputs=False
    )
    reshard = mesh.layout.shard == "full"
    shard = partial(fully_shard, mp_policy=policy, reshard_after_forward=reshard)
    modules: list[FSDPModule] = []  # in the order in which their forward passes end
    if stage.spec.first and not stage.config.tied_embeddings:
        modules.append(shard(stage.embedding, mesh=mesh.fsdp_mesh))
    for block in stage.layers.values():
        if isinstance(block.mlp, MoE):
            placement = _expert_placement(mesh.expert_fsdp_mesh.size(1))
            modules.append(shard(block.mlp.experts, mesh=mesh.expert_fsdp_mesh, shard_placement_fn=placement))
        modules.append(shard(block, mesh=mesh.fsdp_mesh))
    if stage.spec.last and not stage.config.tied_embeddings:
        modules.append(shard(stage.head, mesh=mesh.fsdp_mesh))
        register_fsdp_forward_method(stage.head, "with_rows")
    fully_shard(stage, mesh=mesh.fsdp_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global batch: gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if isinstance(module, Embedding) and isinstance(module, FSDPModule):
            # A look-up needs no rows in backward, and the loss computes its gradients in the forward pass.
            module.set_unshard_in_backward(False)
    if reshard and mesh.layout.pp > 1:
        _set_backward_prefetch(stage, modules)


def _set_backward_prefetch(stage: nn.Module, modules: list[FSDPModule]) -> None:
    """Say what backward gathers ahead, where several forward passes come before one backward.

    By itself FSDP goes back through all forward passes. At the first module of a stage it would gather the last one of
    another micro-batch, which then stays gathered.
    """
    assert isinstance(stage, FSDPModule)
    for before, module in zip([stage, *modules], [*modules, stage], strict=True):
        module.set_modules_to_backward_prefetch([before])


def set_gradient_sync(stage: nn.Module, layout: RankLayout, *, last: bool) -> None:
    """Set, before a backward pass, how long FSDP keeps weights and gradients unsharded between micro-batches.

    none, zero1: gradients accumulate unsharded and are reduced in the last backward pass. zero2: they are
    reduce_scattered in each. In all three, weights stay unsharded until the last. full: nothing stays unsharded.
    Copies of the model (`replicate`) sum their shards in the last pass.
    """
    if not isinstance(stage, FSDPModule):
        return
    stage.set_is_last_backward(last)
    stage.set_requires_gradient_sync(last or layout.shard in ("zero2", "full"))
    stage.set_requires_all_reduce(last or layout.replicas == 1)
    stage.set_reshard_after_backward(last or layout.shard == "full")


def _expert_placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Shard stacked experts by expert if that comes out even, otherwise within each expert."""

    def placement(parameter: nn.Parameter) -> Shard | None:
        if parameter.shape[0] % ranks == 0 or parameter.shape[1] % ranks:
            return None
        return Shard(1)

    return placement
