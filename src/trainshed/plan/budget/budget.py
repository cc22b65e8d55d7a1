"""What a plan says beyond its layout: saving, failing, reading, the host's memory, hours and money."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from trainshed.catalog.machines import Machine
from trainshed.plan.budget.checkpoint_cost import CheckpointCost, checkpoint_cost, checkpoint_warning
from trainshed.plan.budget.goodput import Goodput, goodput, node_mtbf_hours
from trainshed.plan.budget.host_memory import HostMemory, host_memory, host_memory_warning
from trainshed.plan.budget.planned_storage import PlannedStorage
from trainshed.plan.budget.run_cost import RunCost, run_cost
from trainshed.plan.budget.token_supply import Stage, TokenSupply, supply_warning, token_supply
from trainshed.plan.performance.prediction import Job, Prediction


@dataclass(frozen=True)
class Terms:
    """What bears on a run beside its job and layout; None where nobody said."""

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
    stage: Stage = "direct"
    corpus_tokens: int | None = None


@dataclass(frozen=True)
class Budget:
    """Everything beyond the layout, and what a person should know of it."""

    checkpoint: CheckpointCost
    goodput: Goodput
    data: TokenSupply
    host_memory: HostMemory
    run: RunCost | None
    """None where nobody said how many steps."""
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
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }


def budget(job: Job, prediction: Prediction, terms: Terms) -> Budget:
    """Return what a predicted layout costs to save, to feed and to run."""
    layout, hardware, step = prediction.layout, job.hardware, prediction.step_seconds
    kept = {"storage": terms.storage, "machine": terms.machine, "engine": terms.engine}
    saved = ceil(job.model.weights * job.habits.trained_share)
    checkpoint = checkpoint_cost(saved, layout, hardware, **kept)
    mtbf, mtbf_source = node_mtbf_hours(hardware.gpus_per_node, terms.mtbf_hours)
    expected = goodput(
        checkpoint,
        step_seconds=step,
        nodes=ceil(job.gpus / hardware.gpus_per_node),
        mtbf_hours=mtbf,
        mtbf_source=mtbf_source,
        interval_steps=terms.checkpoint_every,
        asynchronous=terms.asynchronous,
    )
    supply = token_supply(job, layout, step, **kept, stage=terms.stage, corpus_tokens=terms.corpus_tokens)
    memory = host_memory(min(job.gpus, hardware.gpus_per_node), checkpoint, supply, terms.machine)
    run = None
    if terms.steps is not None:
        run = run_cost(
            terms.steps,
            step,
            job.gpus,
            hardware.gpus_per_node,
            goodput=expected,
            machine=terms.machine,
            price=terms.price_per_gpu_hour,
            storage=terms.storage,
            checkpoint=checkpoint,
            keep=terms.keep,
        )
    saving = None
    if terms.checkpoint_every is not None:
        saving = checkpoint_warning(checkpoint, terms.checkpoint_every * step, asynchronous=terms.asynchronous)
    warnings = (saving, supply_warning(supply, step), host_memory_warning(memory))
    found = Budget(checkpoint, expected, supply, memory, run, tuple(each for each in warnings if each is not None))
    return replace(found, notes=tuple(_notes(found, terms)))


def _notes(found: Budget, terms: Terms) -> list[str]:
    notes = []
    if terms.storage is None:
        notes.append(
            "no storage is named, so the time to write a checkpoint and to read tokens is not known: write "
            "`storage: {tier: …}` into the cluster file"
        )
    if found.run is not None and found.run.cost is None:
        notes.append(found.run.price_source)
    expected = found.goodput
    gain = expected.best_goodput - expected.goodput if expected.goodput is not None else 0.0
    # Below half a percent the advice would be worth less than reading it.
    if gain > 0.005:
        notes.append(
            f"saving every {expected.best_interval_steps:,} steps instead of {expected.interval_steps:,} would raise "
            f"the expected goodput from {expected.goodput:.1%} to {expected.best_goodput:.1%}"
        )
    return notes
