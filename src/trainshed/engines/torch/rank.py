"""What one rank runs: rendezvous, build, load, train, and a clear account of whatever ends it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainshed
from trainshed.checkpoints.native.writer import CheckpointWriter
from trainshed.engines.torch import flight
from trainshed.engines.torch.build import RankModel, build_model
from trainshed.engines.torch.job import TrainJob, Voice
from trainshed.engines.torch.mesh import Mesh, build_mesh
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.profiling import StepProfiler
from trainshed.engines.torch.signals import StopRequests
from trainshed.engines.torch.starting import find_resume_point, start_weights
from trainshed.engines.torch.step import Stepper
from trainshed.engines.torch.trainer import Trainer
from trainshed.engines.torch.watchdog import BUDGET_SECONDS, Watchdog
from trainshed.errors import InputError, TrainshedError
from trainshed.models.decoder import Losses
from trainshed.models.parameters import parameter_count
from trainshed.observe.events import EventWriter
from trainshed.observe.rank_error import write_error
from trainshed.recipe.train import MoeLosses
from trainshed.storage.attempts import Attempt, take_attempt

# Collectives of a step; the first of all waits for slow starters.
RENDEZVOUS_SECONDS, COLLECTIVE_SECONDS = 600, 300


@dataclass(frozen=True)
class Place:
    """This process among the ranks, from the environment that torchrun, our launcher or anyone else sets."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Place:
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


def train_rank(
    job: TrainJob,
    *,
    run_folder: Path,
    attempt: int | None = None,
    listener: Callable[[dict[str, Any]], None] | None = None,
    collective_seconds: float = COLLECTIVE_SECONDS,
    budget_seconds: Mapping[str, float] = BUDGET_SECONDS,
) -> int:
    """Train as one rank of `job.layout`; returns the exit code: 0, or 128 + signal after a requested stop.

    `attempt` is the number that whoever started the ranks has taken; without it rank 0 takes the next one. A rank that
    waits for others longer than `collective_seconds`, or shows no sign of life for longer than the phase it is in may
    take, ends with an account of where it stood.
    """
    place = Place.from_environment()
    device = _device(place, job)
    with ExitStack() as stack:
        store = _rendezvous(place, job)
        number = _attempt_number(job, place, store, attempt)
        health = run_folder / "health" / f"attempt-{number:04d}"
        writer = stack.enter_context(EventWriter(job.store, job.folder, attempt=number, rank=place.rank))
        voice = Voice(writer, listener if place.rank == 0 else None)
        watchdog = stack.enter_context(
            Watchdog(health, place.rank, budget_seconds=budget_seconds, on_stall=lambda _: writer.dump(10))
        )
        requests = stack.enter_context(StopRequests())
        try:
            code = _train(job, place, device, store, number, voice, watchdog, requests, health, collective_seconds)
        except BaseException as error:
            if isinstance(error, TrainshedError):
                write_error(health, place.rank, error)
            watchdog.beat(None, "rendezvous")
            flight.record(health, place.rank, reason="failed", error=error)
            exit_code = getattr(error, "exit_code", 1)
            voice("end", reason="failed", exit_code=exit_code)
            writer.dump(10)
            raise
        voice("end", reason="signal" if code else "finished", exit_code=code)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def _train(
    job: TrainJob,
    place: Place,
    device: torch.device,
    store: dist.Store | None,
    number: int,
    voice: Voice,
    watchdog: Watchdog,
    requests: StopRequests,
    health: Path,
    collective_seconds: float,
) -> int:
    began = time.monotonic()
    watchdog.beat(None, "rendezvous")
    _describe(job, device, voice)
    _init_groups(place, device, store, health)
    mesh = build_mesh(job.layout, device)
    if place.world_size > 1:
        flight.limit_waits(collective_seconds)
    voice("phase", name="rendezvous", seconds=time.monotonic() - began)
    began = time.monotonic()
    watchdog.beat(None, "load")
    model = _model(job, mesh)
    optimizer = AdamW(model.weights, job.recipe.train.optimizer, device)
    stepper = Stepper(model, optimizer)
    attempt = _checkpoint_attempt(job, place, store, number)
    found = find_resume_point(job, attempt, place.rank, store, voice)
    start = start_weights(job, stepper, voice, attempt.store, found)
    voice("phase", name="load", seconds=time.monotonic() - began)
    with CheckpointWriter(
        attempt,
        spec=_spec(job),
        rank=place.rank,
        world_size=place.world_size,
        coordination=None if store is None else dist.PrefixStore("checkpoints", store),
        keep=job.recipe.checkpoint.keep,
        resumed_step=start.step or None,
        on_event=voice,
    ) as checkpoints:
        traces = health.parents[1] / "profile" / health.name
        profiler = StepProfiler(job.recipe.observe.profile, place.rank, start.step, traces)
        ending = Trainer(job, stepper, checkpoints, voice, watchdog, requests, profiler, start).run()
    if ending.signal is None:
        return 0
    voice("signal", ending.step, name=signal.Signals(ending.signal).name)
    return 128 + ending.signal


def _model(job: TrainJob, mesh: Mesh) -> RankModel:
    train = job.recipe.train
    # Models with experts have the router's losses as the schema defaults them, written or not.
    moe = None if job.config.moe is None else train.moe or MoeLosses()
    losses = Losses(
        z_loss=train.z_loss,
        moe_balance=moe.balance_loss if moe else 0.0,
        moe_z=moe.z_loss if moe else 0.0,
        dropout=train.dropout,
        seed=job.recipe.seed,
    )
    if train.deterministic:
        torch.use_deterministic_algorithms(True)
    return build_model(
        job.config,
        mesh,
        sequence_length=job.order.sequence_length,
        precision=train.precision,
        losses=losses,
        compile_blocks=mesh.device.type == "cuda",
    )


def _device(place: Place, job: TrainJob) -> torch.device:
    if torch.cuda.is_available():
        if place.local_rank >= torch.cuda.device_count():
            raise InputError(
                f"rank {place.rank} is the {place.local_rank + 1}th of its node, which has "
                f"{torch.cuda.device_count()} GPUs",
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


def _rendezvous(place: Place, job: TrainJob) -> dist.Store | None:
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
    return dist.TCPStore(
        address,
        port,
        place.world_size,
        is_master=place.rank == 0 and not agent,
        timeout=timedelta(seconds=RENDEZVOUS_SECONDS),
        wait_for_workers=False,
    )


def _attempt_number(job: TrainJob, place: Place, store: dist.Store | None, given: int | None) -> int:
    if given is not None:
        return given
    if store is None:
        return take_attempt(job.store, job.folder).number
    # torchrun restarts ranks against the same store: each of its restarts is an attempt of ours.
    key = f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if place.rank == 0:
        store.set(key, str(take_attempt(job.store, job.folder).number))
    return int(store.get(key))


def _checkpoint_attempt(job: TrainJob, place: Place, store: dist.Store | None, number: int) -> Attempt:
    """The attempt that fences checkpoints: the run's own, or one taken where they are kept apart from it."""
    if job.checkpoint_home is None:
        return Attempt(job.store, job.folder, number)
    home, folder = job.checkpoint_home
    if store is None:
        return take_attempt(home, folder)
    if place.rank == 0:
        store.set("checkpoint-attempt", str(take_attempt(home, folder).number))
    return Attempt(home, folder, int(store.get("checkpoint-attempt")))


def _init_groups(place: Place, device: torch.device, store: dist.Store | None, health: Path) -> None:
    if store is None:
        return
    flight.switch_on(health)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=RENDEZVOUS_SECONDS),
        device_id=device if device.type == "cuda" else None,
    )


def _describe(job: TrainJob, device: torch.device, voice: Voice) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    voice(
        "start",
        run=f"{job.recipe.name}/{job.name}",
        layout=str(job.layout),
        world_size=job.layout.world_size,
        versions={"trainshed": trainshed.__version__, "torch": torch.__version__},
        device=name,
        parameters=parameter_count(job.config),
    )


def _spec(job: TrainJob) -> dict[str, Any]:
    return {
        "run": f"{job.recipe.name}/{job.name}",
        "model": job.config.model_dump(mode="json", by_alias=True, exclude_none=True),
        "precision": job.recipe.train.precision,
        "seed": job.recipe.seed,
    }
