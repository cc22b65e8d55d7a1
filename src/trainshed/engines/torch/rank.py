"""What one rank runs: rendezvous, build, load, train, and a clear account of whatever ends it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainshed
from trainshed.checkpoints.native.writer import CheckpointWriter
from trainshed.engines.torch import flight
from trainshed.engines.torch.build import RankModel, build_model, outside_float8
from trainshed.engines.torch.job import TrainJob, Voice
from trainshed.engines.torch.mesh import Mesh, build_mesh
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.place import Place, device_of, init_groups, meet
from trainshed.engines.torch.profiling import StepProfiler
from trainshed.engines.torch.signals import StopRequests
from trainshed.engines.torch.starting import find_resume_point, start_weights
from trainshed.engines.torch.step import Stepper
from trainshed.engines.torch.trainer import Trainer
from trainshed.engines.torch.watchdog import BUDGET_SECONDS, COLLECTIVE_SECONDS, Watchdog
from trainshed.errors import TrainshedError
from trainshed.models.decoder import Losses
from trainshed.models.parameters import parameter_count
from trainshed.observe.events import EventWriter
from trainshed.observe.exporters import EXPORTERS
from trainshed.observe.rank_error import health_folder, write_error
from trainshed.recipe.train import MoeLosses
from trainshed.storage.attempts import Attempt, take_attempt


@dataclass(frozen=True)
class Session:
    """What a rank has at hand besides its job, for one attempt."""

    place: Place
    device: torch.device
    store: dist.Store | None
    attempt: int
    health: Path
    voice: Voice
    watchdog: Watchdog
    requests: StopRequests
    met_seconds: float
    """How long it took to meet the other ranks."""


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

    `attempt` is the number that whoever started the ranks has taken; without it rank 0 takes the next one. A rank ends
    with an account of where it stood when it waits for others in a step longer than `collective_seconds`, or shows no
    sign of life for longer than its phase may take.
    """
    place = Place.from_environment()
    began = time.monotonic()
    try:
        device = device_of(place, job)
        store = meet(place, job)
    except TrainshedError as error:
        if attempt is not None:
            write_error(health_folder(run_folder, attempt), place.rank, error)
        raise
    with ExitStack() as stack:
        number = _attempt_number(job, place, store, attempt)
        health = health_folder(run_folder, number)
        writer = stack.enter_context(EventWriter(job.store, job.folder, attempt=number, rank=place.rank))
        voice = Voice(writer)
        if place.rank == 0:
            _add_listeners(voice, listener, job, run_folder, stack)
        watchdog = stack.enter_context(
            Watchdog(
                health,
                place.rank,
                budget_seconds=budget_seconds,
                collective_seconds=collective_seconds,
                on_stall=lambda _: writer.dump(10),
            )
        )
        requests = stack.enter_context(StopRequests())
        met_seconds = time.monotonic() - began
        session = Session(place, device, store, number, health, voice, watchdog, requests, met_seconds)
        try:
            code = _train(job, session)
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


def _add_listeners(
    voice: Voice, listener: Callable[[dict[str, Any]], None] | None, job: TrainJob, run_folder: Path, stack: ExitStack
) -> None:
    """Let whoever started rank 0, and the files that `observe` asks for, follow the events."""
    if listener is not None:
        voice.listeners.append(listener)
    for exporter in EXPORTERS:
        if getattr(job.recipe.observe, exporter.name) is not False:
            length = job.order.sequence_length
            made = exporter(run_folder, sequence_length=length, warn=lambda text: voice("warning", text=text))
            voice.listeners.append(stack.enter_context(made))


def _train(job: TrainJob, session: Session) -> int:
    place, voice, watchdog = session.place, session.voice, session.watchdog
    began = time.monotonic()
    watchdog.beat(None, "rendezvous")
    _describe(job, session.device, voice)
    voice("phase", name="rendezvous", seconds=session.met_seconds)
    init_groups(place, session.device, session.store, session.health)
    mesh = build_mesh(job.layout, session.device)
    voice("phase", name="process_groups", seconds=time.monotonic() - began)
    began = time.monotonic()
    watchdog.beat(None, "load")
    model = _model(job, mesh)
    if job.recipe.train.precision == "fp8" and (outside := outside_float8(model)) is not None:
        voice("warning", text=outside)
    stepper = Stepper(model, AdamW(model.weights, job.recipe.train.optimizer, session.device))
    attempt = _checkpoint_attempt(job, session)
    found = find_resume_point(job, attempt, place.rank, session.store, voice)
    start = start_weights(job, stepper, voice, attempt.store, found)
    voice("phase", name="load", seconds=time.monotonic() - began)
    traces = session.health.parents[1] / "profile" / session.health.name
    profiler = StepProfiler(job.recipe.observe.profile, place.rank, start.step, traces)
    with CheckpointWriter(
        attempt,
        spec=_spec(job),
        rank=place.rank,
        world_size=place.world_size,
        coordination=None if session.store is None else dist.PrefixStore("checkpoints", session.store),
        keep=job.recipe.checkpoint.keep,
        resumed_step=start.step or None,
        on_event=voice,
    ) as checkpoints:
        ending = Trainer(job, stepper, checkpoints, voice, watchdog, session.requests, profiler, start).run()
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


def _attempt_number(job: TrainJob, place: Place, store: dist.Store | None, given: int | None) -> int:
    if given is not None:
        return given
    if store is None:
        return take_attempt(job.store, job.folder).number
    if place.rank == 0:
        store.set("attempt", str(take_attempt(job.store, job.folder).number))
    return int(store.get("attempt"))


def _checkpoint_attempt(job: TrainJob, session: Session) -> Attempt:
    """The attempt that fences checkpoints: the run's own, or one taken where they are kept apart from it."""
    if job.checkpoint_home is None:
        return Attempt(job.store, job.folder, session.attempt)
    home, folder = job.checkpoint_home
    if session.store is None:
        return take_attempt(home, folder)
    if session.place.rank == 0:
        session.store.set("checkpoint-attempt", str(take_attempt(home, folder).number))
    return Attempt(home, folder, int(session.store.get("checkpoint-attempt")))


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
