"""What a checkpoint costs: its bytes, who writes them, how long training stands still and how long it is written."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from trainshed.catalog.machines import Machine
from trainshed.plan.budget.planned_storage import PlannedStorage
from trainshed.plan.layout import RankLayout
from trainshed.plan.performance.hardware import Hardware

_GIB = 2**30

BYTES_PER_WEIGHT = {
    # Weights and Adam's two moments, all fp32 (`engines/torch/state.py`); a bf16 copy is made again from them.
    "torch": 12,
    # bf16 weights besides fp32 ones and two moments (torch_dist, distributed optimizer): AKS's 2.3 TiB for 175B.
    "megatron": 14,
    "nemo": 14,
    # Everything in bf16: weights, and in `recipe_state` two moments of the same type.
    "torchtune": 6,
}
"""Bytes of a checkpoint per weight, by engine."""

# What device-to-host copies keep of PCIe's rate when all GPUs of a node copy at once into page-locked memory: estimate.
_COPY_REACHED = 0.7
# Beyond these parts of the time between two saves the plan warns.
MOST_WRITING = 0.5
_MOST_STANDING = 0.05


@dataclass(frozen=True)
class CheckpointCost:
    """One checkpoint of one layout on one storage; seconds are None where no storage is named."""

    bytes: int
    writers: int
    """Ranks that hold a part nobody else writes."""
    writing_nodes: int
    staged_gib_per_node: float
    """Page-locked host memory on the fullest node: a copy of all that its ranks write."""
    stage_seconds: float
    """Training stands still while the state is copied to the host's memory."""
    write_seconds: float | None = None
    read_seconds: float | None = None
    """To load it again, on all nodes."""
    write_gb_per_s: float | None = None
    storage: str | None = None

    def stall_seconds(self, interval_seconds: float, *, asynchronous: bool = True) -> float:
        """Return how long one save holds training up: a save waits for the one before it."""
        write = self.write_seconds or 0.0
        return self.stage_seconds + (max(0.0, write - interval_seconds) if asynchronous else write)

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return asdict(self)


def checkpoint_bytes(weights: int, engine: str = "torch") -> int:
    """Return the size of a checkpoint; names, headers and checksums are below a thousandth of it."""
    return weights * BYTES_PER_WEIGHT[engine]


def writers_by_node(layout: RankLayout, gpus_per_node: int, engine: str = "torch") -> dict[int, int]:
    """Return how many ranks of each node write; nodes are filled in the order of ranks.

    Our engine writes the first copy of each pipeline rank's state; Megatron's parallel save shares it among all ranks.
    """
    block = layout.stage_ranks
    if engine == "torch":
        block = layout.tp if layout.shard == "none" else layout.dp_shard * layout.cp * layout.tp
    counts: Counter[int] = Counter()
    for pp_rank in range(layout.pp):
        start = pp_rank * layout.stage_ranks
        for node in range(start // gpus_per_node, (start + block - 1) // gpus_per_node + 1):
            first, last = max(start, node * gpus_per_node), min(start + block, (node + 1) * gpus_per_node)
            counts[node] += last - first
    return dict(counts)


def checkpoint_cost(
    weights: int,
    layout: RankLayout,
    hardware: Hardware,
    *,
    storage: PlannedStorage | None = None,
    machine: Machine | None = None,
    engine: str = "torch",
) -> CheckpointCost:
    """Return what a checkpoint of a model with so many weights costs; state is taken as evenly shared out."""
    size = checkpoint_bytes(weights, engine)
    counts = writers_by_node(layout, hardware.gpus_per_node, engine)
    writers = sum(counts.values())
    nodes = ceil(layout.world_size / hardware.gpus_per_node)
    write_rate = storage.write_gb_per_s(len(counts), machine) if storage is not None else None
    read_rate = storage.read_gb_per_s(nodes, machine) if storage is not None else None
    return CheckpointCost(
        bytes=size,
        writers=writers,
        writing_nodes=len(counts),
        staged_gib_per_node=size * max(counts.values()) / writers / _GIB,
        stage_seconds=size / writers / (hardware.gpu.host_gb_per_s * 1e9 * _COPY_REACHED),
        write_seconds=size / (write_rate * 1e9) if write_rate is not None else None,
        read_seconds=size / (read_rate * 1e9) if read_rate is not None else None,
        write_gb_per_s=write_rate,
        storage=str(storage) if storage is not None else None,
    )


def checkpoint_warning(cost: CheckpointCost, interval_seconds: float, *, asynchronous: bool = True) -> str | None:
    """Say what is wrong with saving this often, None where nothing is."""
    if cost.write_seconds is None:
        return None
    busy = cost.write_seconds if asynchronous else cost.stall_seconds(interval_seconds, asynchronous=False)
    most = MOST_WRITING if asynchronous else _MOST_STANDING
    if busy <= most * interval_seconds:
        return None
    effect = "training waits for it" if not asynchronous or busy > interval_seconds else "little more and it would wait"
    return (
        f"a checkpoint of {cost.bytes / 2**40:.2f} TiB takes {spoken_seconds(busy)} to write at "
        f"{cost.write_gb_per_s:.3g} GB/s ({cost.storage}), {busy / interval_seconds:.0%} of the "
        f"{spoken_seconds(interval_seconds)} between two saves: {effect}; save every {spoken_seconds(busy / most)} or "
        f"less often, or write at {cost.bytes / 1e9 / (most * interval_seconds):.3g} GB/s"
    )


def spoken_seconds(seconds: float) -> str:
    """A duration as people say it."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} seconds"
