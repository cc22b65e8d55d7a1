"""What a rank is given: the job, its environment variables and device, the rendezvous, and where its events go."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainshed.checkpoints.base import BaseWeights
from trainshed.data.order import DataOrder
from trainshed.engines.torch import rank_health
from trainshed.errors import InputError
from trainshed.observe.events import EventWriter
from trainshed.plan.layout import RankLayout
from trainshed.recipe import ModelConfig, Recipe
from trainshed.storage import Store


@dataclass(frozen=True)
class TrainJob:
    """A run whose data stands ready, on one layout.

    `store` and `folder` are where the run is kept; `base` are the weights it starts from, None for fresh ones.
    """

    recipe: Recipe
    config: ModelConfig
    layout: RankLayout
    name: str
    steps: int
    order: DataOrder
    validation: DataOrder | None
    store: Store
    folder: str
    base: BaseWeights | None = None
    checkpoint_home: tuple[Store, str] | None = None
    """Store and folder that hold this run's checkpoints where they are kept apart from the run."""


class EventEmitter:
    """Where a rank's events go: into the run's store, and to whoever listens in this process."""

    def __init__(self, writer: EventWriter, *listeners: Callable[[dict[str, Any]], None]) -> None:
        self.writer, self.listeners = writer, list(listeners)

    def __call__(self, kind: str, step: int | None = None, **values: Any) -> None:
        """Emit one event."""
        self.writer.emit(kind, step, **values)
        for listener in self.listeners:
            listener({"kind": kind, "step": step, **values})


RENDEZVOUS_SECONDS = 600
"""How long the first ranks wait for the slowest to start."""


@dataclass(frozen=True)
class RankEnv:
    """This process among the ranks, from the environment that torchrun, our launcher or anyone else sets."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> RankEnv:
        """Read RANK, LOCAL_RANK and WORLD_SIZE; without them this is the only rank."""
        found = [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
        if found[0] is None and found[2] is None:
            return cls(0, 0, 1)
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise InputError(
                f"{', '.join(missing)} is not set, but others of a rank's variables are",
                where="the environment",
                hint="start with `trainshed train`, with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*",
            )
        rank, world_size = int(found[0] or 0), int(found[2] or 1)
        return cls(rank, int(found[1] or 0) if found[1] is not None else rank, world_size)


def gpu_count() -> int:
    """Return how many GPUs ranks on this machine would find."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_device_name() -> str:
    """Return what the driver calls this machine's GPUs; mixed kinds are an error, for no layout suits both."""
    names = {torch.cuda.get_device_name(index) for index in range(gpu_count())}
    if len(names) > 1:
        raise InputError(
            f"this machine has GPUs of {len(names)} kinds: {', '.join(sorted(names))}",
            where="layout",
            hint="name those of one kind in CUDA_VISIBLE_DEVICES, or write a layout",
        )
    return names.pop()


def rank_device(place: RankEnv, job: TrainJob) -> torch.device:
    """Return the GPU of this rank, or the CPU where there is none."""
    if gpus := gpu_count():
        if place.local_rank >= gpus:
            raise InputError(
                f"rank {place.rank} is the {place.local_rank + 1}th of its node, which has {gpus} GPUs",
                where="layout",
                hint="write a smaller layout, or start fewer ranks per node",
            )
        torch.cuda.set_device(place.local_rank)
        return torch.device("cuda", place.local_rank)
    if job.recipe.train.precision == "fp8":
        raise InputError(
            "fp8 products need a GPU (Hopper or later, MI300 or later); there is none here",
            where=job.recipe.where("train.precision"),
            hint="write `precision: bf16`, or fp32 on a CPU",
        )
    return torch.device("cpu")


def rendezvous_store(place: RankEnv, job: TrainJob) -> dist.Store | None:
    """Return the store through which the ranks of this start find each other; None for a single rank."""
    if place.world_size != job.layout.world_size:
        raise InputError(
            f"the layout {job.layout} is {job.layout.world_size} ranks, and {place.world_size} were started",
            where=job.recipe.where("layout"),
            hint=f"start {job.layout.world_size}",
        )
    if place.world_size == 1:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun's agent may already listen on this port; its store serves as well.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        address,
        port,
        place.world_size,
        is_master=place.rank == 0 and not agent,
        timeout=timedelta(seconds=RENDEZVOUS_SECONDS),
        wait_for_workers=False,
    )
    # torchrun restarts ranks against the same store: what the last start said there is not meant for this one.
    return dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def init_process_groups(place: RankEnv, device: torch.device, store: dist.Store | None, health: Path) -> None:
    """Start PyTorch's process groups, with the flight recorder on."""
    if store is None:
        return
    rank_health.enable_flight_recorder(health)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=RENDEZVOUS_SECONDS),
        device_id=device if device.type == "cuda" else None,
    )
