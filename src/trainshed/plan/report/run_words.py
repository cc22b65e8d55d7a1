"""What a run takes, in words: hours, money, checkpoints, failures, the host's memory, the data."""

from __future__ import annotations

from collections.abc import Iterator

from trainshed.plan.budget.budget import Budget
from trainshed.plan.budget.checkpoint_cost import spoken_seconds
from trainshed.plan.budget.run_cost import RunCost
from trainshed.plan.report.explain import seconds


def run_words(found: Budget) -> list[tuple[str, str]]:
    """Return a label and a line for each thing that is known."""
    return [*_length(found.run), *_saving(found), *_around(found)]


def _length(run: RunCost | None) -> Iterator[tuple[str, str]]:
    if run is None:
        return
    yield "length", f"{hours(run.hours)} for {run.steps:,} steps: {_few(run.gpu_hours)} GPU hours{_slower(run)}"
    if run.cost is not None and run.price_per_gpu_hour is not None:
        yield "cost", f"${_few(run.cost)} at ${run.price_per_gpu_hour:.2f} per GPU and hour ({run.price_source})"
    if run.energy_kwh is not None:
        yield "energy", f"{_few(run.energy_kwh)} kWh at most: the machines' rated power, without cooling"


def _slower(run: RunCost) -> str:
    more = run.hours - run.training_hours
    return f", {hours(more)} of it saves, failures and restarts" if more > 0.005 * run.hours else ""


def _saving(found: Budget) -> Iterator[tuple[str, str]]:
    cost, expected = found.checkpoint, found.goodput
    words = f"{_size(cost.bytes)}, copied to the hosts in {seconds(cost.stage_seconds)}"
    if cost.write_seconds is not None:
        words += f", written in {spoken_seconds(cost.write_seconds)} to {cost.storage}"
    yield "checkpoint", words
    best = f"saved every {expected.best_interval_steps:,} steps, {expected.best_goodput:.1%} of the time trains"
    failing = f"a failure every {spoken_seconds(3600 * expected.mtbf_hours)} ({expected.mtbf_source})"
    if expected.goodput is not None and expected.interval_steps is not None:
        best = (
            f"saved every {expected.interval_steps:,} steps, {expected.goodput:.1%} of the time trains; "
            f"every {expected.best_interval_steps:,} would be best ({expected.best_goodput:.1%})"
        )
    yield "goodput", f"{best}; {failing}"


def _around(found: Budget) -> Iterator[tuple[str, str]]:
    memory, data = found.host_memory, found.data
    has = f" of {memory.capacity_gib:,.0f}" if memory.capacity_gib is not None else ""
    yield "host memory", f"{memory.total_gib:,.0f}{has} GiB a node"
    given = f" of {data.given_gb_per_s:.3g}" if data.given_gb_per_s is not None else ""
    yield (
        "data",
        f"{data.needed_gb_per_s:.2g}{given} GB/s to read" + (": the step waits for it" if data.limits_the_step else ""),
    )


def hours(amount: float) -> str:
    """Write hours, or days of them."""
    if amount >= 72:
        return f"{amount / 24:,.1f} days"
    return f"{amount:,.1f} hours" if amount >= 1.5 else spoken_seconds(3600 * amount)


def _few(amount: float) -> str:
    """Write a large number whole, a small one with its figures."""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def _size(amount: int) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB")):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount / 1e6:.3g} MB"
