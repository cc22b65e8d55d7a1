"""What a rank is given: the job, its environment variables and device, the rendezvous, and where its events go."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainshed.checkpoints.base import BaseWeights
from trainshed.data.order import DataOrder
from trainshed.data.prompts import ValidationPrompts
from trainshed.engines.torch import rank_health
from trainshed.engines.torch.learning_rate import learning_rate
from trainshed.errors import InputError, TrainshedError
from trainshed.models.parameters import AddedRows
from trainshed.observe.budgets import PhaseBudgets
from trainshed.observe.events import EventWriter
from trainshed.plan.layout import RankLayout
from trainshed.recipe import ModelConfig, Recipe
from trainshed.recipe.phase_spans import PhaseSpan
from trainshed.storage import Store


@dataclass(frozen=True)
class TrainJob:
    """A run whose data is prepared, on one layout.

    `store` and `folder` are where the run is kept; `base` are the weights it starts from, None for fresh ones.
    """

    recipe: Recipe
    config: ModelConfig
    layout: RankLayout
    name: str
    steps: int
    order: DataOrder
    validations: Mapping[str, DataOrder]
    """The samples of each validation set, the one that decides first."""
    store: Store
    folder: str
    base: BaseWeights | None = None
    checkpoint_home: tuple[Store, str] | None = None
    """Store and folder of this run's checkpoints if they are not in the run's own folder."""
    prompts: ValidationPrompts | None = None
    """What the model is asked at every validation."""
    added: AddedRows | None = None
    """The rows of the tokens that the run adds; `config` counts them."""
    phases: tuple[PhaseJob, ...] = ()
    """The parts of `train.phases`; none: the run is one."""
    phase: PhaseJob | None = None
    """The part that the other fields are of; None where there is one, or where they are of the run as a whole."""

    def at(self, step: int) -> TrainJob:
        """Return the job as the phase of a step (from 0) has it; the job itself where there are no phases."""
        if not self.phases:
            return self
        phase = next((phase for phase in self.phases if step < phase.span.end), self.phases[-1])
        return replace(
            self,
            recipe=phase.span.recipe,
            config=phase.config,
            layout=phase.layout,
            order=phase.order,
            validations=phase.validations,
            phase=phase,
        )

    @property
    def last_step(self) -> int:
        """The step before which this job ends: of its phase, or of the run."""
        return self.steps if self.phase is None else self.phase.span.end

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step (from 0)."""
        if self.phase is not None:
            return self.phase.span.learning_rate(step)
        train = self.recipe.train
        return learning_rate(step, self.steps, train.optimizer.lr, train.schedule)

    def continues_model(self, other: TrainJob) -> bool:
        """Whether another phase trains the same model in the same layout, so that nothing has to be built again."""
        same_shape = self.order.sequence_length == other.order.sequence_length
        return same_shape and self.layout == other.layout and self.config == other.config

    @property
    def is_like_phase_before(self) -> bool:
        """Whether losses and gradient norms of this phase may be held against those of the phase before it."""
        if self.phase is None or not self.phase.span.number:
            return True
        span, before = self.phase.span, self.phases[self.phase.span.number - 1].span
        same_batch = span.recipe.train.global_batch == before.recipe.train.global_batch
        return same_batch and (span.recipe.data, span.rope_base) == (before.recipe.data, before.rope_base)

    def validates(self, validation_set: str, step: int) -> bool:
        """Whether the loss on a validation set is measured after step number `step`, counted from 1."""
        every = self.recipe.data.validations[validation_set].every
        return step % every == 0 or step == self.steps

    @property
    def source_slots(self) -> int:
        """How many sources a step may tell apart in any phase; 0 where there is only one."""
        orders = [phase.order for phase in self.phases] or [self.order]
        most = max(len(order.sources) for order in orders)
        return most if most > 1 else 0


@dataclass(frozen=True)
class PhaseJob:
    """One part of `train.phases`: its steps, its samples, and the model and layout that it is trained with."""

    span: PhaseSpan
    order: DataOrder
    validations: Mapping[str, DataOrder]
    config: ModelConfig
    layout: RankLayout


class EventEmitter:
    """Writes a rank's events into the run's store and passes them to the listeners in this process."""

    def __init__(self, writer: EventWriter, *listeners: Callable[[dict[str, Any]], None]) -> None:
        self.writer, self.listeners = writer, list(listeners)

    def __call__(self, kind: str, step: int | None = None, **values: Any) -> None:
        """Emit one event."""
        self.writer.emit(kind, step, **values)
        for listener in self.listeners:
            listener({"kind": kind, "step": step, **values})


@dataclass(frozen=True)
class RankEnv:
    """The rank of this process, from the environment variables that torchrun or our launcher sets."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> RankEnv:
        """Read RANK, LOCAL_RANK and WORLD_SIZE; without them this is the only rank."""
        rank, local_rank, world_size = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        if rank is None and world_size is None:
            return cls(0, 0, 1)
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise InputError(
                f"{', '.join(missing)} is not set, but others of a rank's variables are",
                where="the environment",
                hint="start with `trainshed train`, with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*",
            )
        number = int(rank or 0)
        return cls(number, int(local_rank or 0) if local_rank is not None else number, int(world_size or 1))


def gpu_count() -> int:
    """Return how many GPUs this machine has for ranks."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_device_name() -> str:
    """Return what the driver calls this machine's GPUs; mixed kinds are an error, because no layout suits both."""
    names = {torch.cuda.get_device_name(index) for index in range(gpu_count())}
    if len(names) > 1:
        raise InputError(
            f"this machine has GPUs of {len(names)} kinds: {', '.join(sorted(names))}",
            where="layout",
            hint="name those of one kind in CUDA_VISIBLE_DEVICES, or write a layout",
        )
    return names.pop()


def rank_device(env: RankEnv, job: TrainJob) -> torch.device:
    """Return the GPU of this rank, or the CPU if the machine has none."""
    if gpus := gpu_count():
        if env.local_rank >= gpus:
            raise InputError(
                f"rank {env.rank} is the {env.local_rank + 1}th of its node, which has {gpus} GPUs",
                where="layout",
                hint="write a smaller layout, or start fewer ranks per node",
            )
        torch.cuda.set_device(env.local_rank)
        return torch.device("cuda", env.local_rank)
    if job.recipe.train.precision == "fp8":
        raise InputError(
            "fp8 products need a GPU (Hopper or later, MI300 or later); there is none here",
            where=job.recipe.where("train.precision"),
            hint="write `precision: bf16`, or fp32 on a CPU",
        )
    return torch.device("cpu")


def rendezvous_store(env: RankEnv, job: TrainJob, budgets: PhaseBudgets) -> dist.Store | None:
    """Return the store for the rendezvous of the ranks; None for a single rank.

    Ranks may start at different times: the first ones wait for as long as the rendezvous may take.
    """
    if env.world_size != job.layout.world_size:
        raise InputError(
            f"the layout {job.layout} is {job.layout.world_size} ranks, and {env.world_size} were started",
            where=job.recipe.where("layout"),
            hint=f"start {job.layout.world_size}",
        )
    if env.world_size == 1:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun's agent may already listen on this port; then its store is used.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    seconds = budgets.seconds("rendezvous")
    try:
        store = dist.TCPStore(
            address,
            port,
            env.world_size,
            is_master=env.rank == 0 and not agent,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        first_line = str(error).split("\n", 1)[0]
        if env.rank == 0 and "EADDRINUSE" in first_line:
            raise TrainshedError(
                f"rank 0 cannot listen at {address}:{port}: another process on this machine has that port",
                hint="start again, with another MASTER_PORT where you set it yourself",
            ) from error
        raise TrainshedError(
            f"rank {env.rank} did not reach rank 0 at {address}:{port} within {seconds:g} seconds: {first_line}",
            hint=budgets.advice("rendezvous"),
        ) from error
    # torchrun restarts ranks against the same store; keys of the last start are not for this one.
    return dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def init_process_groups(
    env: RankEnv, device: torch.device, store: dist.Store | None, health: Path, budgets: PhaseBudgets
) -> None:
    """Start PyTorch's process groups, with the flight recorder on."""
    if store is None:
        return
    rank_health.enable_flight_recorder(health)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=budgets.seconds("rendezvous")),
        device_id=device if device.type == "cuda" else None,
    )
