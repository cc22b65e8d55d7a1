"""What one rank runs: rendezvous, build, load, train. A rank that fails leaves a record of the reason."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainshed
from trainshed.checkpoints.lora.checkpoint_spec import ADDED, BASE, LORA
from trainshed.checkpoints.native.hold import hold_checkpoint, must_be_held
from trainshed.checkpoints.native.writer import CheckpointWriter
from trainshed.engines.torch import rank_health
from trainshed.engines.torch.model import RankModel, build_model, can_compile_blocks, describe_float8_exclusions
from trainshed.engines.torch.optimizer_registry import build_rank_optimizer
from trainshed.engines.torch.parallel import ParallelMesh, build_mesh
from trainshed.engines.torch.profiler import StepProfiler
from trainshed.engines.torch.rank_env import (
    EventEmitter,
    RankEnv,
    TrainJob,
    init_process_groups,
    rank_device,
    rendezvous_store,
)
from trainshed.engines.torch.rank_health import Watchdog
from trainshed.engines.torch.sample_answers import AnswerLog, SampleAnswers
from trainshed.engines.torch.spikes import SpikeDetector
from trainshed.engines.torch.stack_dump import write_stacks_when_asked
from trainshed.engines.torch.state import (
    ResumePoint,
    base_spec,
    find_resume_point,
    first_part,
    load_start_state,
    reached_boundary,
)
from trainshed.engines.torch.step import ReferenceModel, StepRunner
from trainshed.engines.torch.trainer import Trainer, TrainingEnd
from trainshed.engines.torch.weight_average import WeightAverage
from trainshed.engines.torch.weights import load_base_weights
from trainshed.errors import InputError, TrainshedError
from trainshed.models.decoder import Regularization
from trainshed.models.lora import adapters_disabled
from trainshed.models.parameters import lora_parameter_count, parameter_count, trained_fraction
from trainshed.models.preference_loss import PreferenceRule
from trainshed.models.token_loss import build_loss
from trainshed.observe.alarms import AlarmWatcher
from trainshed.observe.budgets import PhaseBudgets
from trainshed.observe.events import EventWriter
from trainshed.observe.exporters import ExportedRun, open_exporters
from trainshed.observe.health import health_folder, read_hosts, write_rank_error
from trainshed.recipe import to_plain
from trainshed.recipe.train import Dpo, MoeLosses, score_bias_update
from trainshed.signals import StopSignals
from trainshed.storage.attempts import Attempt, take_attempt


@dataclass(frozen=True)
class RankSession:
    """What a rank has besides its job, for one attempt."""

    env: RankEnv
    device: torch.device
    store: dist.Store | None
    attempt: int
    health: Path
    emit: EventEmitter
    watchdog: Watchdog
    stop_signals: StopSignals
    rendezvous_seconds: float
    """How long the rendezvous with the other ranks took."""


def train_rank(
    job: TrainJob,
    *,
    run_folder: Path,
    attempt: int | None = None,
    listener: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Train as one rank of `job.layout`; returns the exit code: 0, or 128 + signal after a requested stop.

    `attempt` is the number that the launcher has taken; without it rank 0 takes the next one. A rank ends with a flight
    record if it waits for others, or sends no heartbeat, for longer than its phase may take (`budgets`).
    """
    write_stacks_when_asked()
    env, budgets = RankEnv.from_environment(), PhaseBudgets.of(job.recipe)
    began = time.monotonic()
    try:
        device = rank_device(env, job)
        store = rendezvous_store(env, job, budgets)
    except TrainshedError as error:
        if attempt is not None:
            write_rank_error(health_folder(run_folder, attempt), env.rank, error)
        raise
    with ExitStack() as stack:
        number = _attempt_number(job, env, store, attempt)
        health = health_folder(run_folder, number)
        writer = stack.enter_context(EventWriter(job.store, job.folder, attempt=number, rank=env.rank))
        emit = EventEmitter(writer)
        if env.rank == 0:
            _add_listeners(emit, listener, job, run_folder, number, stack)
        watchdog = stack.enter_context(Watchdog(health, env.rank, budgets=budgets, on_stall=lambda _: writer.dump(10)))
        stop_signals = stack.enter_context(StopSignals())
        rendezvous_seconds = time.monotonic() - began
        session = RankSession(env, device, store, number, health, emit, watchdog, stop_signals, rendezvous_seconds)
        try:
            code = _train_session(job, session)
        except BaseException as error:
            if isinstance(error, TrainshedError):
                write_rank_error(health, env.rank, error)
            advice = watchdog.advice
            watchdog.heartbeat(None, "rendezvous")
            rank_health.write_flight_record(health, env.rank, reason="failed", error=error, advice=advice)
            exit_code = getattr(error, "exit_code", 1)
            emit("end", reason="failed", exit_code=exit_code)
            writer.dump(10)
            raise
        emit("end", reason="signal" if code else "finished", exit_code=code)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def _add_listeners(
    emit: EventEmitter,
    listener: Callable[[dict[str, Any]], None] | None,
    job: TrainJob,
    run_folder: Path,
    attempt: int,
    stack: ExitStack,
) -> None:
    """Send the events to the launcher of rank 0, to the alarms and to the exporters that `observe` asks for."""
    if listener is not None:
        emit.listeners.append(listener)
    watcher = AlarmWatcher(stage_ranks=job.layout.stage_ranks, ranks_per_node=_ranks_per_node(job))

    def emit_alarms(event: dict[str, Any]) -> None:
        if event["kind"] == "train_phase":
            part = job.at(event["step"])
            begins = event["step"] == event["first_step"]
            like_before = not begins or part.is_like_phase_before
            watcher.begin_phase(stage_ranks=part.layout.stage_ranks, keeps_losses=like_before)
        for alarm in watcher.alarms(event):
            emit("alarm", alarm.step, name=alarm.name, what=alarm.what, ranks=alarm.ranks, hosts=alarm.hosts)

    emit.listeners.append(emit_alarms)
    run = ExportedRun(
        job.recipe.name,
        job.name,
        run_folder,
        sequence_length=job.order.sequence_length,
        attempt=attempt,
        steps=job.steps,
        config=to_plain(job.recipe, defaults=False),
    )
    for exporter in open_exporters(job.recipe.observe, run, warn=lambda text: emit("warning", text=text)):
        emit.listeners.append(stack.enter_context(exporter))


def _train_session(job: TrainJob, session: RankSession) -> int:
    env, emit, watchdog = session.env, session.emit, session.watchdog
    began = time.monotonic()
    watchdog.heartbeat(None, "rendezvous")
    _emit_start(job, session.device, session.health, emit)
    emit("phase", name="rendezvous", seconds=session.rendezvous_seconds)
    init_process_groups(env, session.device, session.store, session.health, watchdog.budgets)
    mesh = build_mesh(job.layout, session.device, job.config)
    emit("phase", name="process_groups", seconds=time.monotonic() - began)
    watchdog.heartbeat(None, "load")
    if session.store is not None:
        session.store.set_timeout(timedelta(seconds=watchdog.budgets.seconds("load")))
    attempt = _checkpoint_attempt(job, session)
    resume = find_resume_point(job, attempt, env.rank, session.store, emit)
    while True:
        part = first_part(job, resume)
        if part.layout != mesh.layout:
            mesh = build_mesh(part.layout, session.device, part.config)
        end = _train_part(part, session, mesh, attempt, resume)
        if not end.at_boundary:
            break
        # The next phase has another shape or layout. It begins as a resumed run does, so that the two are the same.
        _free_device_memory(session.device)
        wants_best = job.recipe.checkpoint.best is not None
        resume = reached_boundary(attempt, end.step, env.rank, session.store, wants_best=wants_best)
        resume = replace(resume, validation=end.validation)
    if end.signal is None:
        return 0
    emit("signal", end.step, name=signal.Signals(end.signal).name)
    return 128 + end.signal


def _free_device_memory(device: torch.device) -> None:
    """Free the model of the last phase before the next one is built."""
    gc.collect()
    if device.type == "cuda":
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def _train_part(
    job: TrainJob, session: RankSession, mesh: ParallelMesh, attempt: Attempt, resume: ResumePoint
) -> TrainingEnd:
    """Build the model of a phase and of those that share its shape, load its state, and train them."""
    env, emit, watchdog = session.env, session.emit, session.watchdog
    began = time.monotonic()
    watchdog.heartbeat(None if resume.checkpoint is None else resume.checkpoint.step, "load")
    model = _build_model(job, mesh)
    if job.recipe.train.precision == "fp8" and (exclusions := describe_float8_exclusions(model)) is not None:
        emit("warning", text=exclusions)
    if mesh.device.type == "cuda" and not can_compile_blocks(model.config, mesh, model.dtype):
        emit("warning", text="blocks are not compiled: PyTorch cannot compile these experts with recompute: selective")
    runner = _build_runner(job, model)
    start = load_start_state(job, runner, emit, attempt.store, resume)
    if job.recipe.checkpoint.best is not None:
        start = resume.with_best(start)
    if session.store is not None:
        # The first step begins for all ranks at once, so that its budget does not count the loading of others.
        dist.barrier()
    emit("phase", name="load", seconds=time.monotonic() - began)
    observe, run = job.recipe.observe, session.health.parents[1]
    with_tensorboard = observe.tensorboard is not False
    profiler = StepProfiler(observe.profile, env.rank, start.step, run, session.attempt, tensorboard=with_tensorboard)
    with CheckpointWriter(
        attempt,
        spec=_checkpoint_spec(job),
        rank=env.rank,
        world_size=env.world_size,
        store=None if session.store is None else dist.PrefixStore(_checkpoint_keys(start.step, resume), session.store),
        keep=job.recipe.checkpoint.keep,
        resumed_step=start.step or None,
        on_event=_holding_due(job, run, emit) if env.rank == 0 else emit,
        # Before the watchdog: this one says which rank has written nothing.
        timeout_seconds=0.8 * watchdog.budgets.seconds("checkpoint"),
    ) as checkpoints:
        answers = _sample_answers(job, model, session)
        return Trainer(job, runner, checkpoints, emit, watchdog, session.stop_signals, profiler, start, answers).run()


def _holding_due(job: TrainJob, run: Path, emit: EventEmitter) -> Callable[..., None]:
    """Hold checkpoints that are to be evaluated when they are committed: what follows is the removal of older ones."""

    def emit_and_hold(kind: str, step: int | None = None, **values: Any) -> None:
        committed = kind == "checkpoint" and values["phase"] == "committed"
        if committed and step is not None and must_be_held(job.recipe, step):
            try:
                hold_checkpoint(run, step)
            except OSError as error:
                emit("warning", text=f"the checkpoint of step {step} cannot be held until it is evaluated: {error}")
        emit(kind, step, **values)

    return emit_and_hold


def _checkpoint_keys(step: int, resume: ResumePoint) -> str:
    """Return what the writer's keys in the store begin with; one that was closed leaves its keys behind."""
    return f"checkpoints-{step}" if resume.at_boundary else "checkpoints"


def _build_runner(job: TrainJob, model: RankModel) -> StepRunner:
    train = job.recipe.train
    return StepRunner(
        model,
        build_rank_optimizer(model, train.optimizer),
        _build_reference(job, model),
        None if train.spikes is None else SpikeDetector(train.spikes, model.mesh),
        None if train.ema is None else WeightAverage(model, train.ema),
    )


def _build_reference(job: TrainJob, model: RankModel) -> ReferenceModel | None:
    """Return what a preference run compares itself with: its base weights, frozen, also where it is resumed."""
    if (rule := model.regularization.preference) is None:
        return None
    if model.lora is not None:
        return ReferenceModel(model, partial(adapters_disabled, model.stages))
    if job.base is None:
        raise InputError(
            "`mode: dpo` compares with the base weights, and this run has none",
            where=job.recipe.where("model.from"),
            hint="run `trainshed run RECIPE`, which fetches them",
        )
    reference = build_model(
        job.config,
        model.mesh,
        sequence_length=job.order.sequence_length,
        precision=job.recipe.train.precision,
        regularization=Regularization(preference=rule),
        compile_blocks=model.mesh.device.type == "cuda",
        added=job.added,
        frozen=True,
    )
    load_base_weights(reference, job.base, job.recipe.seed)
    return ReferenceModel(reference)


def _preference_rule(job: TrainJob) -> PreferenceRule | None:
    train = job.recipe.train
    if train.mode != "dpo":
        return None
    options = train.dpo or Dpo()
    return PreferenceRule(options.beta, options.label_smoothing, options.length_normalized)


def _sample_answers(job: TrainJob, model: RankModel, session: RankSession) -> SampleAnswers | None:
    if job.prompts is None:
        return None
    log = None
    if session.env.rank == 0:
        log = AnswerLog(job.prompts, Attempt(job.store, job.folder, session.attempt), session.emit)
    return SampleAnswers(job.prompts, model, packed=job.recipe.document_mask, log=log)


def _build_model(job: TrainJob, mesh: ParallelMesh) -> RankModel:
    train = job.recipe.train
    # Models with experts have the router's losses even if the recipe leaves them out: by the schema's defaults.
    moe = None if job.config.moe is None else train.moe or MoeLosses()
    regularization = Regularization(
        z_loss=train.z_loss,
        moe_balance=moe.balance_loss if moe else 0.0,
        moe_z=moe.z_loss if moe else 0.0,
        moe_bias_update=score_bias_update(None if moe is None else moe.bias_update, job.config),
        mtp=0.0 if train.mtp is None else train.mtp.weight,
        dropout=train.dropout,
        seed=job.recipe.seed,
        token_loss=build_loss(train.loss),
        preference=_preference_rule(job),
        source_slots=0 if train.mode == "dpo" else job.source_slots,
    )
    if train.deterministic:
        torch.use_deterministic_algorithms(True)
    return build_model(
        job.config,
        mesh,
        sequence_length=job.order.sequence_length,
        precision=train.precision,
        regularization=regularization,
        compile_blocks=mesh.device.type == "cuda",
        lora=train.lora,
        added=job.added,
        groups=train.optimizer.groups or (),
    )


def _attempt_number(job: TrainJob, env: RankEnv, store: dist.Store | None, given: int | None) -> int:
    if given is not None:
        return given
    if store is None:
        return take_attempt(job.store, job.folder).number
    if env.rank == 0:
        store.set("attempt", str(take_attempt(job.store, job.folder).number))
    return int(store.get("attempt"))


def _checkpoint_attempt(job: TrainJob, session: RankSession) -> Attempt:
    """Return the attempt that fences checkpoints: the run's, or one of the folder in which they are kept apart."""
    if job.checkpoint_home is None:
        return Attempt(job.store, job.folder, session.attempt)
    home, folder = job.checkpoint_home
    if session.store is None:
        return take_attempt(home, folder)
    if session.env.rank == 0:
        session.store.set("checkpoint-attempt", str(take_attempt(home, folder).number))
    return Attempt(home, folder, int(session.store.get("checkpoint-attempt")))


def _ranks_per_node(job: TrainJob) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", job.layout.world_size))


def _emit_start(job: TrainJob, device: torch.device, health: Path, emit: EventEmitter) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    emit(
        "start",
        run=f"{job.recipe.name}/{job.name}",
        layout=str(job.layout),
        world_size=job.layout.world_size,
        versions={"trainshed": trainshed.__version__, "torch": torch.__version__},
        device=name,
        parameters=parameter_count(job.config),
        plugins={plugin.name: plugin.sha256 for plugin in job.recipe.plugin_sources} or None,
        hosts=read_hosts(health) or ([socket.gethostname()] if _ranks_per_node(job) == job.layout.world_size else None),
    )
    if (lora := job.recipe.train.lora) is not None:
        model = (job.config, lora, job.added)
        trained, share = lora_parameter_count(*model), trained_fraction(*model)
        emit("note", text=f"adapters are trained: {trained:,} weights, {share:.2%} of all; the others are frozen")
    if job.added is not None:
        emit("note", text=f"{job.added.count} added tokens begin as the mean of the {job.added.start:,} before them")


def _checkpoint_spec(job: TrainJob) -> dict[str, Any]:
    spec = {
        "run": f"{job.recipe.name}/{job.name}",
        "model": job.config.model_dump(mode="json", by_alias=True, exclude_none=True),
        "precision": job.recipe.train.precision,
        "seed": job.recipe.seed,
    }
    lora = job.recipe.train.lora
    if lora is None:
        return spec
    spec |= {LORA: lora.model_dump(mode="json", exclude_none=True), BASE: base_spec(job)}
    return spec if job.added is None else spec | {ADDED: asdict(job.added)}
