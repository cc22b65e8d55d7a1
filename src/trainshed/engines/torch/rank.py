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
from trainshed.engines.torch import rank_health
from trainshed.engines.torch.model import RankModel, build_model, describe_float8_exclusions
from trainshed.engines.torch.optimizer_registry import optimizer_class
from trainshed.engines.torch.parallel import ParallelMesh, build_mesh
from trainshed.engines.torch.rank_env import (
    EventEmitter,
    RankEnv,
    TrainJob,
    init_process_groups,
    rank_device,
    rendezvous_store,
)
from trainshed.engines.torch.rank_health import BUDGET_SECONDS, COLLECTIVE_SECONDS, StopSignals, Watchdog
from trainshed.engines.torch.state import find_resume_point, load_start_state
from trainshed.engines.torch.step import StepRunner
from trainshed.engines.torch.trainer import StepProfiler, Trainer
from trainshed.errors import TrainshedError
from trainshed.models.decoder import Regularization
from trainshed.models.parameters import parameter_count
from trainshed.models.token_loss import build_loss
from trainshed.observe.events import EventWriter
from trainshed.observe.exporters import open_exporters
from trainshed.observe.health import health_folder, write_rank_error
from trainshed.recipe.train import MoeLosses
from trainshed.storage.attempts import Attempt, take_attempt


@dataclass(frozen=True)
class RankSession:
    """What a rank has at hand besides its job, for one attempt."""

    place: RankEnv
    device: torch.device
    store: dist.Store | None
    attempt: int
    health: Path
    voice: EventEmitter
    watchdog: Watchdog
    requests: StopSignals
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
    place = RankEnv.from_environment()
    began = time.monotonic()
    try:
        device = rank_device(place, job)
        store = rendezvous_store(place, job)
    except TrainshedError as error:
        if attempt is not None:
            write_rank_error(health_folder(run_folder, attempt), place.rank, error)
        raise
    with ExitStack() as stack:
        number = _attempt_number(job, place, store, attempt)
        health = health_folder(run_folder, number)
        writer = stack.enter_context(EventWriter(job.store, job.folder, attempt=number, rank=place.rank))
        voice = EventEmitter(writer)
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
        requests = stack.enter_context(StopSignals())
        met_seconds = time.monotonic() - began
        session = RankSession(place, device, store, number, health, voice, watchdog, requests, met_seconds)
        try:
            code = _train_session(job, session)
        except BaseException as error:
            if isinstance(error, TrainshedError):
                write_rank_error(health, place.rank, error)
            watchdog.beat(None, "rendezvous")
            rank_health.write_flight_record(health, place.rank, reason="failed", error=error)
            exit_code = getattr(error, "exit_code", 1)
            voice("end", reason="failed", exit_code=exit_code)
            writer.dump(10)
            raise
        voice("end", reason="signal" if code else "finished", exit_code=code)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def _add_listeners(
    voice: EventEmitter,
    listener: Callable[[dict[str, Any]], None] | None,
    job: TrainJob,
    run_folder: Path,
    stack: ExitStack,
) -> None:
    """Let whoever started rank 0, and the files that `observe` asks for, follow the events."""
    if listener is not None:
        voice.listeners.append(listener)
    length = job.order.sequence_length
    for exporter in open_exporters(
        job.recipe.observe, run_folder, sequence_length=length, warn=lambda text: voice("warning", text=text)
    ):
        voice.listeners.append(stack.enter_context(exporter))


def _train_session(job: TrainJob, session: RankSession) -> int:
    place, voice, watchdog = session.place, session.voice, session.watchdog
    began = time.monotonic()
    watchdog.beat(None, "rendezvous")
    _emit_start(job, session.device, voice)
    voice("phase", name="rendezvous", seconds=session.met_seconds)
    init_process_groups(place, session.device, session.store, session.health)
    mesh = build_mesh(job.layout, session.device)
    voice("phase", name="process_groups", seconds=time.monotonic() - began)
    began = time.monotonic()
    watchdog.beat(None, "load")
    model = _build_model(job, mesh)
    if job.recipe.train.precision == "fp8" and (outside := describe_float8_exclusions(model)) is not None:
        voice("warning", text=outside)
    options = job.recipe.train.optimizer
    stepper = StepRunner(model, optimizer_class(options)(model.weights, options, session.device))
    attempt = _checkpoint_attempt(job, session)
    found = find_resume_point(job, attempt, place.rank, session.store, voice)
    start = load_start_state(job, stepper, voice, attempt.store, found)
    voice("phase", name="load", seconds=time.monotonic() - began)
    traces = session.health.parents[1] / "profile" / session.health.name
    profiler = StepProfiler(job.recipe.observe.profile, place.rank, start.step, traces)
    with CheckpointWriter(
        attempt,
        spec=_checkpoint_spec(job),
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


def _build_model(job: TrainJob, mesh: ParallelMesh) -> RankModel:
    train = job.recipe.train
    # Models with experts have the router's losses as the schema defaults them, written or not.
    moe = None if job.config.moe is None else train.moe or MoeLosses()
    losses = Regularization(
        z_loss=train.z_loss,
        moe_balance=moe.balance_loss if moe else 0.0,
        moe_z=moe.z_loss if moe else 0.0,
        dropout=train.dropout,
        seed=job.recipe.seed,
        token_loss=build_loss(train.loss),
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


def _attempt_number(job: TrainJob, place: RankEnv, store: dist.Store | None, given: int | None) -> int:
    if given is not None:
        return given
    if store is None:
        return take_attempt(job.store, job.folder).number
    if place.rank == 0:
        store.set("attempt", str(take_attempt(job.store, job.folder).number))
    return int(store.get("attempt"))


def _checkpoint_attempt(job: TrainJob, session: RankSession) -> Attempt:
    """The attempt that fences checkpoints: the run's own, or one taken where they are kept apart from it."""
    if job.checkpoint_home is None:
        return Attempt(job.store, job.folder, session.attempt)
    home, folder = job.checkpoint_home
    if session.store is None:
        return take_attempt(home, folder)
    if session.place.rank == 0:
        session.store.set("checkpoint-attempt", str(take_attempt(home, folder).number))
    return Attempt(home, folder, int(session.store.get("checkpoint-attempt")))


def _emit_start(job: TrainJob, device: torch.device, voice: EventEmitter) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    voice(
        "start",
        run=f"{job.recipe.name}/{job.name}",
        layout=str(job.layout),
        world_size=job.layout.world_size,
        versions={"trainshed": trainshed.__version__, "torch": torch.__version__},
        device=name,
        parameters=parameter_count(job.config),
        plugins={plugin.name: plugin.sha256 for plugin in job.recipe.plugin_sources} or None,
    )


def _checkpoint_spec(job: TrainJob) -> dict[str, Any]:
    return {
        "run": f"{job.recipe.name}/{job.name}",
        "model": job.config.model_dump(mode="json", by_alias=True, exclude_none=True),
        "precision": job.recipe.train.precision,
        "seed": job.recipe.seed,
    }
