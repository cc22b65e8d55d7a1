"""The process groups of a layout, and FSDP over them: two meshes of the same ranks, as `plan/layout.py` orders them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from trainshed.engines.torch.process_groups import ProcessGroups
from trainshed.errors import InputError
from trainshed.models.collectives import SINGLE_RANK, AxisGroup, ParallelAxes
from trainshed.models.decoder import DecoderStage
from trainshed.models.embedding import Embedding
from trainshed.models.moe import MoE
from trainshed.plan.layout import MeshCoordinates, RankLayout
from trainshed.recipe import ModelConfig


@dataclass(frozen=True)
class ParallelMesh:
    """This rank's coordinates and process groups.

    `fsdp_mesh` and `expert_fsdp_mesh` are the meshes over which FSDP shards dense and expert tensors: (replicate,
    shard), or (shard) where there is one copy; None if every such mesh is a single rank. `tied_embedding` joins the
    first and the last pipeline stage of a model that has the embedding on both; elsewhere it is a single rank.
    """

    layout: RankLayout
    coordinates: MeshCoordinates
    device: torch.device
    axes: ParallelAxes
    pp: AxisGroup
    fsdp_mesh: DeviceMesh | None
    expert_fsdp_mesh: DeviceMesh | None
    tied_embedding: AxisGroup
    group_count: int = 0
    """How many process groups this rank is in."""

    @property
    def world(self) -> AxisGroup:
        """All ranks."""
        if self.layout.world_size == 1:
            return SINGLE_RANK
        return AxisGroup(self.layout.world_size, dist.get_rank(), dist.group.WORLD)

    @property
    def reads_tokens(self) -> bool:
        """Whether this rank's stages need token ids: the first and the last do."""
        return self.coordinates.pp in (0, self.layout.pp - 1)


def single_rank_mesh(layout: RankLayout, device: torch.device) -> ParallelMesh:
    """The mesh of a single process, without any process group."""
    return ParallelMesh(layout, layout.coordinates(0), device, ParallelAxes(), SINGLE_RANK, None, None, SINGLE_RANK)


def build_mesh(layout: RankLayout, device: torch.device, config: ModelConfig) -> ParallelMesh:
    """Make the process groups that a model needs; every rank of the world calls this together."""
    if layout.world_size == 1:
        return single_rank_mesh(layout, device)
    groups = ProcessGroups(device)
    ranks = torch.arange(layout.world_size)
    dense, expert = ranks.view(layout.dense_shape), ranks.view(layout.expert_shape)
    axes = ParallelAxes(
        tp=groups.axis(_along(dense, 4)),
        cp=groups.axis(_along(dense, 3)),
        ep=groups.axis(_along(expert, 2)),
        etp=groups.axis(_along(expert, 3)),
        sequence=groups.axis(dense.reshape(-1, layout.cp * layout.tp)),
    )
    if layout.overlap == "tp":
        _share_memory(axes.tp, device)
    fsdp_mesh = expert_fsdp_mesh = None
    if max(layout.dp * layout.cp, layout.edp if layout.ep * layout.etp < layout.stage_ranks else 1) > 1:
        dense_ranks, expert_ranks = _fsdp_ranks(layout, ranks)
        fsdp_mesh = _fsdp_mesh(groups, dense_ranks)
        expert_fsdp_mesh = fsdp_mesh if config.moe is None else _fsdp_mesh(groups, expert_ranks)
    pp, tied_embedding = groups.axis(_along(dense, 0)), SINGLE_RANK
    if config.embedding_at_both_ends and layout.pp > 1:
        # Pairs of ranks on the first and last stage that hold the same part of the embedding.
        tied_embedding = groups.axis(dense[[0, -1]].flatten(1).t())
    return ParallelMesh(
        layout,
        layout.coordinates(dist.get_rank()),
        device,
        axes,
        pp,
        fsdp_mesh,
        expert_fsdp_mesh,
        tied_embedding,
        groups.count,
    )


def _share_memory(tp: AxisGroup, device: torch.device) -> None:
    """Let the GPUs of a tensor-parallel group read each other's memory; they meet here, before any product does."""
    if device.type != "cuda":
        return
    from torch.distributed import _symmetric_memory

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # some versions of PyTorch no longer need the call
            _symmetric_memory.enable_symm_mem_for_group(tp.ranks.group_name)
        _symmetric_memory.get_symm_mem_workspace(tp.ranks.group_name, min_size=1)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"the {tp.size} GPUs of a tensor-parallel group cannot read each other's memory: {reason}",
            where="layout.overlap",
            hint="delete it, or keep tp within a node whose GPUs are joined by NVLink",
        ) from error


def _along(ranks: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the groups along one axis of an arrangement of the ranks: [groups, length of the axis]."""
    return ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis])


def _fsdp_ranks(layout: RankLayout, ranks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return who holds copies of dense and of expert tensors and who shards one copy: [meshes, copies, shard]."""
    pp, copies, shard, cp, tp = layout.dense_shape
    dense = ranks.view(layout.dense_shape).permute(0, 4, 1, 2, 3).reshape(pp * tp, copies, shard * cp)
    expert_copies = copies if layout.shard != "none" else 1
    expert = ranks.view(pp, expert_copies, layout.edp // expert_copies, layout.ep * layout.etp)
    expert = expert.permute(0, 3, 1, 2).reshape(-1, expert_copies, layout.edp // expert_copies)
    if layout.shard == "none":
        dense, expert = dense.reshape(len(dense), -1, 1), expert.reshape(len(expert), -1, 1)
    return dense, expert


def _fsdp_mesh(groups: ProcessGroups, ranks: torch.Tensor) -> DeviceMesh:
    """Return the mesh of FSDP; without copies it is a plain `shard` axis, and no gradient is summed over one rank."""
    if ranks.shape[1] == 1:
        return groups.mesh(ranks[:, 0], ("shard",))
    return groups.mesh(ranks, ("replicate", "shard"))


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

    All sharding modes are FSDP2 over the mesh of `_fsdp_mesh`. They differ in how long weights and gradients stay
    unsharded, which `set_gradient_sync` sets for each micro-batch.

    Embedding and head are groups of their own, gathered for the time of their use. Where the embedding is used at both
    ends of the model, they stay gathered with the few tensors that belong to no layer.
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
    both_ends = stage.config.embedding_at_both_ends
    if stage.spec.first and not both_ends:
        modules.append(shard(stage.embedding, mesh=mesh.fsdp_mesh))
    for block in stage.layers.values():
        if isinstance(block.mlp, MoE):
            placement = _expert_placement(shard_axis(mesh.expert_fsdp_mesh).size())
            modules.append(shard(block.mlp.experts, mesh=mesh.expert_fsdp_mesh, shard_placement_fn=placement))
        modules.append(shard(block, mesh=mesh.fsdp_mesh))
    if stage.spec.last and not both_ends:
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


def shard_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axis of an FSDP mesh along which one copy is sharded."""
    return mesh if mesh.ndim == 1 else mesh["shard"]


def _expert_placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Shard stacked experts by expert if that comes out even, otherwise within each expert."""

    def placement(parameter: nn.Parameter) -> Shard | None:
        if parameter.shape[0] % ranks == 0 or parameter.shape[1] % ranks:
            return None
        return Shard(1)

    return placement
