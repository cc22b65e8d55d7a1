"""What a run takes of a node's own memory, against what the machine has."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainshed.catalog.machines import Machine
from trainshed.plan.budget.checkpoint_cost import CheckpointCost
from trainshed.plan.budget.token_supply import TokenSupply

# A rank's interpreter, libraries, CUDA context and NCCL: an estimate, not measured.
_RANK_GIB = 6.0
# The page cache, the node agent and the system want some as well.
_MOST_FILLED = 0.85


@dataclass(frozen=True)
class HostMemory:
    """Host memory of the fullest node, in GiB."""

    processes_gib: float
    staged_checkpoint_gib: float
    """Page-locked: the copy that is written while training goes on."""
    tokens_gib: float
    """Tokens in shared memory, with `data.stage: shm`."""
    capacity_gib: float | None
    """None where the machine is not known."""

    @property
    def total_gib(self) -> float:
        """All of it."""
        return self.processes_gib + self.staged_checkpoint_gib + self.tokens_gib

    @property
    def fits(self) -> bool | None:
        """Whether the node has it with room to breathe; None where nobody knows what it has."""
        return None if self.capacity_gib is None else self.total_gib <= _MOST_FILLED * self.capacity_gib

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return asdict(self) | {"total_gib": self.total_gib, "fits": self.fits}


def host_memory(
    ranks_per_node: int, cost: CheckpointCost, supply: TokenSupply, machine: Machine | None = None
) -> HostMemory:
    """Return what the fullest node needs."""
    in_memory = supply.stage == "shm" and supply.staged_gib_per_node is not None
    return HostMemory(
        processes_gib=_RANK_GIB * ranks_per_node,
        staged_checkpoint_gib=cost.staged_gib_per_node,
        tokens_gib=(supply.staged_gib_per_node or 0.0) if in_memory else 0.0,
        capacity_gib=machine.memory_gib if machine is not None else None,
    )


def host_memory_warning(memory: HostMemory) -> str | None:
    """Say that a node's memory is too small, None where it is not."""
    if memory.fits is not False:
        return None
    return (
        f"a node needs {memory.total_gib:,.0f} GiB of its own {memory.capacity_gib:,.0f}: "
        f"{memory.staged_checkpoint_gib:,.0f} for the copy of the checkpoint, {memory.processes_gib:,.0f} for ranks, "
        f"{memory.tokens_gib:,.0f} for tokens; share the state among more nodes (layout.shard, fewer copies)"
    )
