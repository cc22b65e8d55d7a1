"""What a whole run takes: hours, GPU hours, energy and money."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from trainshed.catalog.machines import Machine
from trainshed.catalog.prices import HOW_TO_SAY, price_of
from trainshed.plan.budget.checkpoint_cost import CheckpointCost
from trainshed.plan.budget.goodput import Goodput
from trainshed.plan.budget.planned_storage import PlannedStorage

_HOURS_PER_MONTH = 730.0


@dataclass(frozen=True)
class RunCost:
    """A number of steps on a number of GPUs; what is not known is None."""

    steps: int
    training_hours: float
    """Steps alone, with nothing going wrong."""
    hours: float
    """With saves and failures, at the expected goodput."""
    gpu_hours: float
    energy_kwh: float | None
    """At the machines' rated maximum, without the building's cooling: a bound."""
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
    """Return the price of a GPU by the hour in US dollars, and where it comes from or why there is none."""
    if given is not None:
        return given, "as given"
    if machine is None:
        return None, HOW_TO_SAY
    price = price_of(machine)
    if price is None:
        return None, f"{HOW_TO_SAY} ({machine.name} is not rented out by the hour)"
    if price.usd_per_hour is None:
        return None, f"{HOW_TO_SAY} ({machine.name}: {price.unknown_because})"
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
    """Return what `steps` cost; `price` is dollars per GPU and hour and wins over the list's."""
    training = steps * step_seconds / 3600
    share = goodput.goodput if goodput is not None else 1.0
    # Without a save on the way no share can be told: a failure loses all. The hours are then those without failures.
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
