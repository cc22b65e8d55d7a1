"""What a checkpoint costs, and the share of time that trains despite failures, saves and restarts (goodput).

A checkpoint has a size, ranks that write it, a time in which training stops and a time to write it. Young's interval
between saves is sqrt(2 · save · MTBF) (CACM 17(9), 1974); Daly's is its higher-order form. `expected_goodput` divides
by his expected run time under exponential failures (FGCS 22(3), 2006, equations 20 and 37):

    wall time per interval = M · e^(R/M) · (e^((interval + save)/M) - 1)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from math import ceil, exp, expm1, sqrt
from typing import Any

from trainshed.catalog.machines import Machine
from trainshed.plan.budget.storage import PlannedStorage
from trainshed.plan.layout import RankLayout
from trainshed.plan.training_shape import Hardware

_GIB = 2**30

BYTES_PER_WEIGHT = {
    # Weights and Adam's two moments, all fp32 (`engines/torch/state.py`); bf16 weights are cast from them.
    "torch": 12,
    # bf16 weights besides fp32 ones and two moments (torch_dist, distributed optimizer): AKS's 2.3 TiB for 175B.
    "megatron": 14,
    "nemo": 14,
    # Everything in bf16: weights, and in `recipe_state` two moments of the same type.
    "torchtune": 6,
}
"""Bytes of a checkpoint per weight, by engine."""

# Share of PCIe's rate when all GPUs of a node copy to page-locked host memory at once: an estimate.
_COPY_EFFICIENCY = 0.7
# Above these shares of the time between two saves the plan warns.
MAX_WRITE_SHARE = 0.5
_MAX_STALL_SHARE = 0.05


@dataclass(frozen=True)
class CheckpointCost:
    """One checkpoint of one layout on one storage; seconds are None where no storage is named."""

    bytes: int
    writers: int
    """Ranks that write a part."""
    writing_nodes: int
    staged_gib_per_node: float
    """Page-locked host memory on the fullest node: a copy of everything its ranks write."""
    stage_seconds: float
    """Training stops while the state is copied to host memory."""
    write_seconds: float | None = None
    read_seconds: float | None = None
    """To load it on all nodes."""
    write_gb_per_s: float | None = None
    storage: str | None = None

    def stall_seconds(self, interval_seconds: float, *, asynchronous: bool = True) -> float:
        """Return how long one save stops training: a save waits for the previous one."""
        write = self.write_seconds or 0.0
        return self.stage_seconds + (max(0.0, write - interval_seconds) if asynchronous else write)

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return asdict(self)


def checkpoint_bytes(weights: int, engine: str = "torch", *, averaged: bool = False) -> int:
    """Return the size of a checkpoint; names, headers and checksums are below a thousandth of it.

    `averaged` weights are saved too, in fp32. Narrow states and Muon's single average are not counted off.
    """
    return weights * (BYTES_PER_WEIGHT[engine] + (4 if averaged else 0))


def writers_by_node(layout: RankLayout, gpus_per_node: int, engine: str = "torch") -> dict[int, int]:
    """Return how many ranks of each node write; nodes are filled in the order of ranks.

    Our engine writes the first replica of each pipeline rank's state; Megatron's parallel save uses all ranks.
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
    averaged: bool = False,
) -> CheckpointCost:
    """Return what a checkpoint of a model with `weights` weights costs; state is assumed to be evenly divided."""
    size = checkpoint_bytes(weights, engine, averaged=averaged)
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
        stage_seconds=size / writers / (hardware.gpu.host_gb_per_s * 1e9 * _COPY_EFFICIENCY),
        write_seconds=size / (write_rate * 1e9) if write_rate is not None else None,
        read_seconds=size / (read_rate * 1e9) if read_rate is not None else None,
        write_gb_per_s=write_rate,
        storage=str(storage) if storage is not None else None,
    )


def checkpoint_warning(cost: CheckpointCost, interval_seconds: float, *, asynchronous: bool = True) -> str | None:
    """Say that saves come too often; None if they do not."""
    if cost.write_seconds is None:
        return None
    busy = cost.write_seconds if asynchronous else cost.stall_seconds(interval_seconds, asynchronous=False)
    most = MAX_WRITE_SHARE if asynchronous else _MAX_STALL_SHARE
    if busy <= most * interval_seconds:
        return None
    effect = "training waits for it" if not asynchronous or busy > interval_seconds else "little more and it would wait"
    return (
        f"a checkpoint of {cost.bytes / 2**40:.2f} TiB takes {format_duration(busy)} to write at "
        f"{cost.write_gb_per_s:.3g} GB/s ({cost.storage}), {busy / interval_seconds:.0%} of the "
        f"{format_duration(interval_seconds)} between two saves: {effect}; save every {format_duration(busy / most)} "
        f"or less often, or write at {cost.bytes / 1e9 / (most * interval_seconds):.3g} GB/s"
    )


def format_duration(seconds: float) -> str:
    """Write a duration in days, hours, minutes or seconds."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} seconds"


LLAMA3_GPU_HOURS_PER_FAILURE = 54 * 24 * 16384 / 419
"""Meta's Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (The Llama 3 Herd of Models, 3.3.4)."""
MTBF_SOURCE = "The Llama 3 Herd of Models, 419 unexpected interruptions in 54 days on 16,384 H100"
START_SECONDS = 300.0
"""From a failure to the first step without loading: noticing it, another node, starting, compiling. An estimate."""
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Goodput:
    """The share of time that trains, with the interval of the recipe and with the best one."""

    mtbf_hours: float
    """Of the whole run: a failure of any node stops it."""
    mtbf_source: str
    restart_seconds: float
    interval_steps: int | None
    """As in the recipe; None: it saves only at the end."""
    stall_seconds: float
    """How long one save stops training, at that interval."""
    goodput: float | None
    """None if it saves only at the end: a failure loses everything."""
    best_interval_steps: int
    best_goodput: float

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return asdict(self)


def node_mtbf_hours(gpus_per_node: int, stated: float | None = None) -> tuple[float, str]:
    """Return the mean time between failures of one node, and its source."""
    if stated is not None:
        return stated, "as given"
    return LLAMA3_GPU_HOURS_PER_FAILURE / gpus_per_node, MTBF_SOURCE


def best_interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Return Daly's interval between the end of one save and the start of the next."""
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    return sqrt(2 * save_seconds * mtbf_seconds) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_seconds


def expected_goodput(
    interval_seconds: float, save_seconds: float, restart_seconds: float, mtbf_seconds: float
) -> float:
    """Return the share of time that trains, with a save after every interval."""
    waiting, trying = restart_seconds / mtbf_seconds, (interval_seconds + save_seconds) / mtbf_seconds
    if waiting + trying > _LARGEST_EXPONENT:
        return 0.0
    return interval_seconds / (mtbf_seconds * exp(waiting) * expm1(trying))


def goodput(
    cost: CheckpointCost,
    *,
    step_seconds: float,
    nodes: int,
    mtbf_hours: float,
    mtbf_source: str = "as given",
    interval_steps: int | None,
    asynchronous: bool = True,
    start_seconds: float = START_SECONDS,
) -> Goodput:
    """Return the expected goodput of a run; `mtbf_hours` is one node's.

    An asynchronous save contains the state of its snapshot but can be used only once it is written, so each failure
    also loses the time of one write.
    """
    mtbf_seconds = mtbf_hours * 3600 / nodes
    write = cost.write_seconds or 0.0
    restart = start_seconds + (cost.read_seconds or 0.0)
    lost = restart + (write if asynchronous else 0.0)

    def share(steps: int) -> float:
        interval = steps * step_seconds
        stall = cost.stall_seconds(interval, asynchronous=asynchronous)
        return expected_goodput(interval, stall, lost, mtbf_seconds)

    # Shorter than this, `checkpoint_warning` says that saves come too often.
    shortest = max(1, ceil(write / MAX_WRITE_SHARE / step_seconds)) if asynchronous else 1
    save = cost.stall_seconds(shortest * step_seconds, asynchronous=asynchronous)
    best = max(shortest, round(best_interval_seconds(save, mtbf_seconds) / step_seconds))
    given = interval_steps * step_seconds if interval_steps is not None else 0.0
    return Goodput(
        mtbf_hours=mtbf_seconds / 3600,
        mtbf_source=mtbf_source,
        restart_seconds=restart,
        interval_steps=interval_steps,
        stall_seconds=cost.stall_seconds(given, asynchronous=asynchronous) if interval_steps is not None else 0.0,
        goodput=share(interval_steps) if interval_steps is not None else None,
        best_interval_steps=best,
        best_goodput=share(best),
    )
