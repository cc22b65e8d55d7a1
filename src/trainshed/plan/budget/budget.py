"""What a run takes besides its layout: checkpoints, failures, data, host memory, hours, energy and money."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from trainshed.catalog.machines import NO_PRICE_HINT, Machine, price_of
from trainshed.plan.budget.checkpoint_cost import (
    CheckpointCost,
    Goodput,
    checkpoint_cost,
    checkpoint_warning,
    goodput,
    node_mtbf_hours,
)
from trainshed.plan.budget.storage import PlannedStorage, TokenStaging, TokenSupply, supply_warning, token_supply
from trainshed.plan.budget.volume import VolumeTerms, VolumeUse, check_volume, volume_use
from trainshed.plan.performance.prediction import LayoutPrediction
from trainshed.plan.training_shape import TrainingShape

# A rank's interpreter, libraries, CUDA context and NCCL: an estimate, not measured.
_RANK_GIB = 6.0
# The page cache, the node agent and the system need the rest.
_MOST_FILLED = 0.85


@dataclass(frozen=True)
class HostMemory:
    """Host memory of the fullest node, in GiB."""

    processes_gib: float
    staged_checkpoint_gib: float
    """Page-locked: the copy that is written while training continues."""
    tokens_gib: float
    """Tokens in shared memory, with `data.stage: shm`."""
    capacity_gib: float | None
    """None if the machine is unknown."""

    @property
    def total_gib(self) -> float:
        """All of it."""
        return self.processes_gib + self.staged_checkpoint_gib + self.tokens_gib

    @property
    def fits(self) -> bool | None:
        """Whether the node has that much and some to spare; None if its memory is unknown."""
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
    """Say that a node's memory is too small; None if it is not."""
    if memory.fits is not False:
        return None
    return (
        f"a node needs {memory.total_gib:,.0f} GiB of its own {memory.capacity_gib:,.0f}: "
        f"{memory.staged_checkpoint_gib:,.0f} for the copy of the checkpoint, {memory.processes_gib:,.0f} for ranks, "
        f"{memory.tokens_gib:,.0f} for tokens; share the state among more nodes (layout.shard, fewer copies)"
    )


_HOURS_PER_MONTH = 730.0


@dataclass(frozen=True)
class RunCost:
    """What a number of steps costs on a number of GPUs; None for what is unknown."""

    steps: int
    training_hours: float
    """Steps alone, without failures."""
    hours: float
    """With saves and failures, at the expected goodput."""
    gpu_hours: float
    energy_kwh: float | None
    """At the machines' rated power, without cooling: an upper bound."""
    price_per_gpu_hour: float | None
    price_source: str
    cost: float | None
    """US dollars for the machines."""
    storage_cost: float | None
    """US dollars for the storage over those hours."""

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return asdict(self)


def price_per_gpu_hour(machine: Machine | None, given: float | None = None) -> tuple[float | None, str]:
    """Return the price of a GPU per hour in US dollars, and its source or why there is none."""
    if given is not None:
        return given, "as given"
    if machine is None:
        return None, NO_PRICE_HINT
    price = price_of(machine)
    if price is None:
        return None, f"{NO_PRICE_HINT} ({machine.name} is not rented out by the hour)"
    if price.usd_per_hour is None:
        return None, f"{NO_PRICE_HINT} ({machine.name}: {price.unknown_because})"
    listed = f"list price of {machine.name} on demand, {price.region}, {price.as_of}: {price.source}"
    return price.usd_per_hour / machine.gpus, listed


def run_cost(
    steps: int,
    step_seconds: float,
    gpus: int,
    gpus_per_node: int,
    *,
    goodput: Goodput | None = None,
    machine: Machine | None = None,
    price: float | None = None,
    storage: PlannedStorage | None = None,
    checkpoint: CheckpointCost | None = None,
    keep: int | None = 3,
) -> RunCost:
    """Return what `steps` cost; `price` is dollars per GPU and hour and wins over the list price."""
    training = steps * step_seconds / 3600
    share = goodput.goodput if goodput is not None else 1.0
    # Without saves there is no goodput, as a failure loses everything: the hours are then those without failures.
    hours = training / share if share else training
    nodes = ceil(gpus / gpus_per_node)
    per_hour, source = price_per_gpu_hour(machine, price)
    # Whole machines are rented, however many of their GPUs are used.
    paid_gpus = nodes * gpus_per_node if machine is not None else gpus
    monthly = storage.usd_per_month(checkpoint.bytes * (keep or 1) if checkpoint else 0.0) if storage else None
    return RunCost(
        steps=steps,
        training_hours=training,
        hours=hours,
        gpu_hours=hours * gpus,
        energy_kwh=hours * nodes * machine.watts / 1e3 if machine is not None and machine.watts is not None else None,
        price_per_gpu_hour=per_hour,
        price_source=source,
        cost=hours * paid_gpus * per_hour if per_hour is not None else None,
        storage_cost=monthly * hours / _HOURS_PER_MONTH if monthly is not None else None,
    )


@dataclass(frozen=True)
class RunTerms:
    """What a run depends on besides its training and layout; None for what was not given."""

    engine: str = "torch"
    machine: Machine | None = None
    storage: PlannedStorage | None = None
    steps: int | None = None
    checkpoint_every: int | None = None
    """Steps; None: at the end only."""
    keep: int | None = 3
    asynchronous: bool = True
    mtbf_hours: float | None = None
    """Of one node; None: the published figure."""
    price_per_gpu_hour: float | None = None
    stage: TokenStaging = "direct"
    corpus_tokens: int | None = None
    volume: VolumeTerms | None = None
    """None: the size of its volume is not known."""


@dataclass(frozen=True)
class RunBudget:
    """What a run takes besides its layout, with warnings and notes."""

    checkpoint: CheckpointCost
    goodput: Goodput
    data: TokenSupply
    host_memory: HostMemory
    run: RunCost | None
    """None if the number of steps was not given."""
    volume: VolumeUse | None = None
    """What it leaves on its volume; None if the size of that, or of the run, is not known."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """The values, for JSON."""
        return {
            "checkpoint": self.checkpoint.to_plain(),
            "goodput": self.goodput.to_plain(),
            "data": self.data.to_plain(),
            "host_memory": self.host_memory.to_plain(),
            "run": self.run.to_plain() if self.run is not None else None,
            "volume": self.volume.to_plain() if self.volume is not None else None,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }


def run_budget(
    training: TrainingShape, prediction: LayoutPrediction, terms: RunTerms, *, step_seconds: float | None = None
) -> RunBudget:
    """Return what a predicted layout costs to save, to feed and to run; raise where its volume is too small.

    `step_seconds` is the mean over the phases of a run that has some.
    """
    layout, hardware, step = prediction.layout, training.hardware, step_seconds or prediction.step_seconds
    where = {"storage": terms.storage, "machine": terms.machine, "engine": terms.engine}
    averaged = training.options.averaged
    checkpoint = checkpoint_cost(training.trained_weights, layout, hardware, **where, averaged=averaged)
    mtbf, mtbf_source = node_mtbf_hours(hardware.gpus_per_node, terms.mtbf_hours)
    run_goodput = goodput(
        checkpoint,
        step_seconds=step,
        nodes=ceil(training.gpus / hardware.gpus_per_node),
        mtbf_hours=mtbf,
        mtbf_source=mtbf_source,
        interval_steps=terms.checkpoint_every,
        asynchronous=terms.asynchronous,
    )
    supply = token_supply(training, layout, step, **where, stage=terms.stage, corpus_tokens=terms.corpus_tokens)
    memory = host_memory(min(training.gpus, hardware.gpus_per_node), checkpoint, supply, terms.machine)
    run = None
    if terms.steps is not None:
        run = run_cost(
            terms.steps,
            step,
            training.gpus,
            hardware.gpus_per_node,
            goodput=run_goodput,
            machine=terms.machine,
            price=terms.price_per_gpu_hour,
            storage=terms.storage,
            checkpoint=checkpoint,
            keep=terms.keep,
        )
    saving = None
    if terms.checkpoint_every is not None:
        saving = checkpoint_warning(checkpoint, terms.checkpoint_every * step, asynchronous=terms.asynchronous)
    warnings = (saving, supply_warning(supply, step, terms.engine), host_memory_warning(memory))
    budget = RunBudget(
        checkpoint,
        run_goodput,
        supply,
        memory,
        run,
        _checked_volume(training, checkpoint, terms),
        tuple(text for text in warnings if text is not None),
    )
    return replace(budget, notes=tuple(_budget_notes(budget, terms)))


def _checked_volume(training: TrainingShape, checkpoint: CheckpointCost, terms: RunTerms) -> VolumeUse | None:
    if terms.volume is None:
        return None
    use = volume_use(
        terms.volume,
        checkpoint_bytes=checkpoint.bytes,
        weights=training.model.weights,
        exported_weights=training.trained_weights,
        steps=terms.steps,
        tokens_per_step=training.tokens_per_step,
        vocab_size=training.model.vocab_size,
    )
    if use is not None:
        check_volume(use, terms.volume)
    return use


def _budget_notes(budget: RunBudget, terms: RunTerms) -> list[str]:
    notes = []
    if terms.storage is None:
        notes.append(
            "no storage is named, so the time to write a checkpoint and to read tokens is not known: write "
            "`storage: {tier: …}` into the cluster file"
        )
    use = budget.volume
    if use is not None and use.read_once_bytes and use.total_bytes + use.read_once_bytes > use.capacity_bytes:
        notes.append(f"the volume is full before the end if the prepared tokens are not much smaller: {use}")
    if budget.run is not None and budget.run.cost is None:
        notes.append(budget.run.price_source)
    run_goodput = budget.goodput
    gain = run_goodput.best_goodput - run_goodput.goodput if run_goodput.goodput is not None else 0.0
    # Below half a percent the advice would be worth less than reading it.
    if gain > 0.005:
        notes.append(
            f"saving every {run_goodput.best_interval_steps:,} steps instead of {run_goodput.interval_steps:,} would "
            f"raise the expected goodput from {run_goodput.goodput:.1%} to {run_goodput.best_goodput:.1%}"
        )
    return notes
