"""Whole matrices from the shards of ranks, and back: which rank computes which matrix, and who sends what to whom.

All ranks of a pipeline stage hold shards of the same tensors. Each matrix (each expert of stacked ones) is computed
once, by one of these ranks: by one that holds all of it where there is one, otherwise by the one with the least work so
far. A box that several ranks hold is sent by one of them, and its result goes to all. So copies of a model divide the
work as shards of one copy do.

Every rank makes the same plan from the same table of boxes, so nothing is negotiated during a step. Matrices are
exchanged in rounds, which bounds the memory of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainshed.engines.torch.model import ParameterShard
from trainshed.engines.torch.parallel import ParallelMesh
from trainshed.models.collectives import SINGLE_RANK, AxisGroup

ROUND_ELEMENTS = 1 << 26
"""Elements that a rank computes in one round, or one matrix if it is larger: 128 MiB in bf16."""


class MatrixBox(NamedTuple):
    """A box of a matrix: its first row and column, and how many of each."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


@dataclass(frozen=True)
class WholeMatrix:
    """One matrix of a layer: tensor `number` of the list, and of stacked experts the one with this index."""

    number: int
    expert: int
    rows: int
    columns: int


@dataclass(frozen=True)
class BoxTransfer:
    """One box of a matrix on its way from one rank of the stage to another."""

    matrix: WholeMatrix
    box: MatrixBox
    source: int
    destination: int


@dataclass(frozen=True)
class ExchangeRound:
    """Some matrices: those that this rank computes, those of which it holds a box, and its transfers both ways.

    `is_local` says that no rank of the stage sends anything to another.
    """

    computed: tuple[WholeMatrix, ...]
    held: tuple[tuple[WholeMatrix, MatrixBox], ...]
    gathered: tuple[BoxTransfer, ...]
    shared_out: tuple[BoxTransfer, ...]
    is_local: bool


def stage_group(mesh: ParallelMesh) -> AxisGroup:
    """Return the ranks of this pipeline stage; every rank of the world calls this together."""
    layout = mesh.layout
    if layout.stage_ranks == 1:
        return SINGLE_RANK
    ranks = torch.arange(layout.world_size).view(layout.pp, layout.stage_ranks)
    if layout.pp == 1:
        group = DeviceMesh(mesh.device.type, ranks[0], mesh_dim_names=("stage",)).get_group("stage")
    else:
        group = DeviceMesh(mesh.device.type, ranks, mesh_dim_names=("pp", "stage")).get_group("stage")
    return AxisGroup(group.size(), group.rank(), group)


class MatrixExchange:
    """The plan of a rank, and the collectives that carry it out; boxes travel in `dtype`."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        group: AxisGroup,
        device: torch.device,
        dtype: torch.dtype,
        cost: Callable[[WholeMatrix], float],
    ) -> None:
        self.group, self.device, self.dtype = group, device, dtype
        holders = matrix_holders(shards, box_table(shards, group, device))
        computing = assign_matrices(holders, group.size, cost)
        self.rounds = [_exchange_round(group.rank, holders, matrices) for matrices in plan_rounds(computing)]

    def gather(self, plan: ExchangeRound, boxes: Mapping[WholeMatrix, torch.Tensor]) -> dict[WholeMatrix, torch.Tensor]:
        """Send the boxes that this rank holds to where they are computed; return the whole matrices of this rank."""
        whole = {
            matrix: torch.empty(matrix.rows, matrix.columns, dtype=self.dtype, device=self.device)
            for matrix in plan.computed
        }
        for transfer, box in self._exchange(plan, plan.gathered, lambda transfer: boxes[transfer.matrix]):
            _view_of_box(whole[transfer.matrix], transfer.box).copy_(box)
        return whole

    def share_out(
        self, plan: ExchangeRound, whole: Mapping[WholeMatrix, torch.Tensor]
    ) -> dict[WholeMatrix, torch.Tensor]:
        """Send every rank its boxes of the matrices that this rank has computed; return the boxes of this rank."""

        def computed_box(transfer: BoxTransfer) -> torch.Tensor:
            return _view_of_box(whole[transfer.matrix], transfer.box)

        return {transfer.matrix: box for transfer, box in self._exchange(plan, plan.shared_out, computed_box)}

    def _exchange(
        self, plan: ExchangeRound, transfers: Iterable[BoxTransfer], box_of: Callable[[BoxTransfer], torch.Tensor]
    ) -> Iterator[tuple[BoxTransfer, torch.Tensor]]:
        """Carry out transfers; yield those that reach this rank, each with its box."""
        rank, size = self.group.rank, self.group.size
        sent = [transfer for transfer in transfers if transfer.source == rank]
        if plan.is_local:
            yield from ((transfer, box_of(transfer)) for transfer in sent)
            return
        # Sorting is stable: both sides have the boxes of one pair of ranks in the order of the plan.
        sent.sort(key=lambda transfer: transfer.destination)
        received = sorted((t for t in transfers if t.destination == rank), key=lambda transfer: transfer.source)
        send_sizes, receive_sizes = [0] * size, [0] * size
        for transfer in sent:
            send_sizes[transfer.destination] += transfer.box.size
        for transfer in received:
            receive_sizes[transfer.source] += transfer.box.size
        outgoing = torch.empty(sum(send_sizes), dtype=self.dtype, device=self.device)
        for transfer, part in zip(sent, outgoing.split([t.box.size for t in sent]), strict=True):
            part.view(transfer.box.rows, transfer.box.columns).copy_(box_of(transfer))
        incoming = torch.empty(sum(receive_sizes), dtype=self.dtype, device=self.device)
        dist.all_to_all_single(incoming, outgoing, receive_sizes, send_sizes, group=self.group.ranks)
        for transfer, part in zip(received, incoming.split([t.box.size for t in received]), strict=True):
            yield transfer, part.view(transfer.box.rows, transfer.box.columns)


def box_table(shards: Sequence[ParameterShard], group: AxisGroup, device: torch.device) -> list[list[list[int]]]:
    """Return the box of every tensor on every rank of the stage: [rank][tensor] offset and shape in three dims.

    All these ranks have the same tensors in the same order. A matrix without experts is a stack of one.
    """
    rows = []
    for shard in shards:
        offset, shape = tuple(shard.offset), tuple(shard.local_tensor.shape)
        rows.append([*offset, *shape] if shard.parameter.expert else [0, *offset, 1, *shape])
    table = torch.tensor(rows, dtype=torch.int64).view(len(rows), 6)
    if group.size == 1:
        return [table.tolist()]
    # A sum with zeros everywhere else: all_gather of a tensor has another name in every second version of PyTorch.
    gathered = torch.zeros(group.size, *table.shape, dtype=torch.int64, device=device)
    gathered[group.rank] = table.to(device)
    dist.all_reduce(gathered, group=group.ranks)
    return gathered.tolist()


Holders = dict[WholeMatrix, dict[MatrixBox, list[int]]]
"""For each matrix its boxes, and which ranks of the stage hold each."""


def matrix_holders(shards: Sequence[ParameterShard], table: Sequence[Sequence[Sequence[int]]]) -> Holders:
    """Return who holds which boxes of which matrices, in the order of the tensors."""
    holders: Holders = {}
    for number, shard in enumerate(shards):
        shape = shard.parameter.shape if shard.parameter.expert else (1, *shard.parameter.shape)
        matrices = [WholeMatrix(number, expert, shape[1], shape[2]) for expert in range(shape[0])]
        holders |= {matrix: {} for matrix in matrices}
        for rank, boxes in enumerate(table):
            first, row, column, experts, rows, columns = boxes[number]
            if experts * rows * columns == 0:  # more ranks than rows
                continue
            for matrix in matrices[first : first + experts]:
                holders[matrix].setdefault(MatrixBox(row, column, rows, columns), []).append(rank)
        for matrix in matrices:
            held = sum(box.size for box in holders[matrix])
            assert held == matrix.rows * matrix.columns, f"{shard.name}: the boxes of the ranks are not one matrix"
    return holders


def assign_matrices(holders: Holders, ranks: int, cost: Callable[[WholeMatrix], float]) -> dict[WholeMatrix, int]:
    """Return which rank computes each matrix, the most expensive ones first."""
    work = [0.0] * ranks
    computing: dict[WholeMatrix, int] = {}
    for matrix in sorted(holders, key=cost, reverse=True):
        whole = MatrixBox(0, 0, matrix.rows, matrix.columns)
        chosen = min(holders[matrix].get(whole) or range(ranks), key=lambda rank: work[rank])
        computing[matrix] = chosen
        work[chosen] += cost(matrix)
    return computing


def plan_rounds(computing: Mapping[WholeMatrix, int]) -> Iterator[dict[WholeMatrix, int]]:
    """Yield what is computed in each round: of every rank the next matrices, up to `ROUND_ELEMENTS` of them."""
    waiting: dict[int, deque[WholeMatrix]] = {}
    for matrix, rank in computing.items():
        waiting.setdefault(rank, deque()).append(matrix)
    while any(waiting.values()):
        matrices: dict[WholeMatrix, int] = {}
        for rank, queue in sorted(waiting.items()):
            room = ROUND_ELEMENTS
            while queue and (room == ROUND_ELEMENTS or queue[0].rows * queue[0].columns <= room):
                matrix = queue.popleft()
                matrices[matrix] = rank
                room -= matrix.rows * matrix.columns
        yield matrices


def _exchange_round(rank: int, holders: Holders, matrices: Mapping[WholeMatrix, int]) -> ExchangeRound:
    """Return the part of one round that concerns a rank."""
    held: list[tuple[WholeMatrix, MatrixBox]] = []
    gathered: list[BoxTransfer] = []
    shared_out: list[BoxTransfer] = []
    is_local = True
    for matrix, computing in matrices.items():
        for box, ranks in holders[matrix].items():
            # By the number of the computing rank, so that not always the same copy of the model sends.
            source = computing if computing in ranks else ranks[computing % len(ranks)]
            is_local = is_local and ranks == [computing]
            if rank in ranks:
                held.append((matrix, box))
            if rank in (source, computing):
                gathered.append(BoxTransfer(matrix, box, source, computing))
            shared_out += [
                BoxTransfer(matrix, box, computing, holder) for holder in ranks if rank in (computing, holder)
            ]
    computed = tuple(matrix for matrix, computing in matrices.items() if computing == rank)
    return ExchangeRound(computed, tuple(held), tuple(gathered), tuple(shared_out), is_local)


def _view_of_box(matrix: torch.Tensor, box: MatrixBox) -> torch.Tensor:
    return matrix[box.row : box.row + box.rows, box.column : box.column + box.columns]
