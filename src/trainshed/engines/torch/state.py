"""A rank's training state: what a checkpoint holds, and what a run starts from.

A run starts from its last checkpoint (on this layout or another), from base weights, or from fresh ones; where none of
them is asked for, that is an error. The loss of base weights is compared with the one stored beside them. Adapters are
saved without the weights that they sit on, so a run with adapters always reads its base as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import orjson
import torch.distributed as dist

from trainshed.checkpoints.base import BaseWeights
from trainshed.checkpoints.native.best import ValidationRecord, settle_best
from trainshed.checkpoints.native.folder import (
    BestPointer,
    CompleteCheckpoint,
    checkpoints_folder,
    latest_complete,
    list_checkpoints,
    open_checkpoint,
    step_folder,
)
from trainshed.checkpoints.native.reader import load_checkpoint
from trainshed.checkpoints.native.shards import TensorShard
from trainshed.checkpoints.prove.probe import PROBE_ROWS, PROBE_TOKENS, check_probe, probe_batch, read_probe
from trainshed.data.order import DataOrder
from trainshed.data.sampling.schedule import SkipList
from trainshed.engines.torch.batch_loader import LocalBatch, to_local_batch
from trainshed.engines.torch.learning_rate import DecaySpan, check_resumed_decay
from trainshed.engines.torch.model import ParameterShard, RankModel
from trainshed.engines.torch.optimizer_registry import RankOptimizer
from trainshed.engines.torch.rank_env import EventEmitter, PhaseJob, TrainJob
from trainshed.engines.torch.step import StepRunner
from trainshed.engines.torch.weights import init_base_adapters, init_model, load_base_weights
from trainshed.errors import InputError
from trainshed.models.loss import IGNORE_INDEX
from trainshed.reporting import SILENT, ProgressTask
from trainshed.storage import FileEntry, Manifest, Store, join
from trainshed.storage.attempts import Attempt


def state_tensors(model: RankModel, optimizer: RankOptimizer) -> dict[str, TensorShard]:
    """Return every tensor of the state under its global name; loading fills these tensors in place."""
    shards = {shard.name: shard for shard in (*model.shards, *model.score_biases)}
    tensors = {
        f"model.{name}": TensorShard(
            shard.parameter.shape, shard.offset, shard.local_tensor, shard.owner, shard.replicas
        )
        for name, shard in shards.items()
    }
    for name, state in optimizer.state_tensors().items():
        tensors[name] = _with_replicas(state, shards.get(name.split(".", 2)[-1]))
    world, owner = model.mesh.world, model.mesh.coordinates.is_first
    replicas = () if world.size == 1 else (world,)
    return tensors | {"optimizer.updates": TensorShard((), (), optimizer.updates, owner, replicas)}


def _with_replicas(state: TensorShard, shard: ParameterShard | None) -> TensorShard:
    """Return a state of a weight that is sharded like the weight with the weight's replicas."""
    if shard is None or (state.global_shape, state.global_offset) != (shard.parameter.shape, shard.offset):
        return state
    same_box = state.local.shape == shard.local_tensor.shape
    return replace(state, replicas=shard.replicas) if same_box else state


def runner_state(runner: StepRunner) -> dict[str, TensorShard]:
    """Return the state of a run: model and optimizer, and what its steps remember besides."""
    tensors = state_tensors(runner.model, runner.optimizer)
    for part in (runner.average, runner.spikes):
        tensors |= {} if part is None else dict(part.state_tensors())
    return tensors


def state_facts(
    order: DataOrder,
    step: int,
    skipped: int,
    decay: DecaySpan | None,
    validation: ValidationRecord | None = None,
    phases: Sequence[PhaseJob] = (),
) -> dict[str, Any]:
    """Return what a resumed run must know besides tensors; `step` is the next one."""
    return {
        "step": step,
        "consumed_samples": order.run_samples(step),
        "skipped_steps": skipped,
        "data_skip": [list(skipped_range) for skipped_range in order.skip.ranges],
        "sequence_length": order.sequence_length,
        "lr_decay": decay,
        **({} if validation is None else validation.to_facts()),
        **({"phases": phase_facts(phases, step)} if phases else {}),
    }


def phase_facts(phases: Sequence[PhaseJob], step: int) -> list[dict[str, Any]]:
    """Return what the phases were that have begun before a step, each as far as it had come."""
    return [
        {
            "start": phase.span.start,
            "steps": min(phase.span.end, step) - phase.span.start,
            "sequence_length": phase.order.sequence_length,
            "global_batch": phase.order.schedule.global_batch,
            "rope_base": None if phase.config.rope is None else phase.config.rope.base,
            "first_sample": phase.span.first_sample,
            "data_skip": [list(skipped_range) for skipped_range in phase.order.skip.ranges],
            "lr": [phase.span.rate.begin, phase.span.rate.end, phase.span.rate.shape],
            "length": phase.span.steps if phase.span.rate.varies else None,
        }
        for phase in phases
        if phase.span.start < step
    ]


_PHASE_KEYS = {
    "start": "steps",
    "steps": "steps",
    "sequence_length": "sequence_length",
    "global_batch": "global_batch",
    "rope_base": "rope_base",
    "first_sample": "data",
    "lr": "lr",
    "length": "steps",
}
"""What a phase was, and the key of the recipe that says it."""


def check_phase_facts(facts: Mapping[str, Any], job: TrainJob) -> None:
    """Refuse to resume if a phase that has begun is not what it was: extending the last one is all that may change."""
    then, now = facts.get("phases", []), phase_facts(job.phases, facts["step"])
    if not then and not now:
        return
    again = "write the phases as they were, or start another run with --id"
    if len(then) != len(now):
        raise InputError(
            f"the checkpoint of step {facts['step']:,} was trained in {len(then) or 'no'} phases, by the recipe it "
            f"would be {len(now) or 'none'}",
            where=job.recipe.where("train.phases" if job.phases else "train"),
            hint=again,
        )
    for number, (before, here) in enumerate(zip(then, now, strict=True)):
        where = job.recipe.where(f"train.phases.{number}")
        # A checkpoint of an older version says nothing of the base.
        for fact, key in _PHASE_KEYS.items():
            if fact in before and before[fact] != here[fact]:
                raise InputError(
                    f"phase {number + 1} has begun, and its `{key}` is not what it was: {fact} was {before[fact]} and "
                    f"would be {here[fact]}",
                    where=where,
                    hint=f"{again}; another phase after it may do what is wanted",
                )
        end = here["first_sample"] + here["steps"] * here["global_batch"]
        _check_passed_skips(before["data_skip"], job.phases[number].order.skip, end, where)


def check_state_facts(facts: Mapping[str, Any], job: TrainJob) -> None:
    """Refuse to resume if the data that the checkpoint was trained on is not what the recipe says."""
    order = job.order
    if job.phases or "phases" in facts:
        check_phase_facts(facts, job)
        return
    step, consumed = facts["step"], facts["consumed_samples"]
    if order.sequence_length != facts["sequence_length"]:
        raise InputError(
            f"the checkpoint was trained on sequences of {facts['sequence_length']} tokens, "
            f"the recipe says {order.sequence_length}",
            where="data.sequence_length",
            hint="write what it was, or start another run with --id",
        )
    if order.consumed(step) != consumed:
        raise InputError(
            f"the checkpoint of step {step} has consumed {consumed} samples, the recipe says {order.consumed(step)}",
            where="train.global_batch",
            hint="write the batch it was trained with, or start another run with --id",
        )
    _check_passed_skips(facts["data_skip"], order.skip, consumed, "data.skip")


def _check_passed_skips(then: Sequence[Sequence[int]], now: SkipList, consumed: int, where: str) -> None:
    before = SkipList([(start, stop) for start, stop in then])
    end = before.stream_end(consumed)
    if _skipped_before(before, end) != _skipped_before(now, end):
        raise InputError(
            f"`data.skip` says something else about the first {end} samples, which this run has already passed",
            where=where,
            hint=f"skip samples from {end} on, or start another run with --id",
        )


def _skipped_before(skip: SkipList, end: int) -> list[tuple[int, int]]:
    """Return the skipped ranges before a sample of the stream."""
    return [(start, min(stop, end)) for start, stop in skip.ranges if start < end]


# The probe was measured in fp32 on one process; only the rounding of matrix products may differ.
PROBE_BOUNDS = {"fp64": 1e-3, "fp32": 1e-3, "bf16": 0.05, "fp8": 0.2}


@dataclass(frozen=True)
class StartPoint:
    """The first step of an attempt, how many steps were skipped before it, and the validation losses so far.

    `validation` is None where the checkpoint does not hold them: nothing was measured, or an older version wrote it.
    """

    step: int = 0
    skipped: int = 0
    validation: ValidationRecord | None = None


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from, and the best one of the run so far; None where there is none."""

    checkpoint: CompleteCheckpoint | None = None
    best: BestPointer | None = None
    at_boundary: bool = False
    """Whether this attempt has just trained up to it, to the end of a phase."""
    validation: ValidationRecord | None = None
    """What this attempt has measured up to it; None where the checkpoint says it."""

    def with_best(self, start: StartPoint) -> StartPoint:
        """Return a start for which the best checkpoint is the one that is kept."""
        if start.validation is None:
            return start
        step, loss = (None, None) if self.best is None else (self.best.step, self.best.loss)
        return replace(start, validation=replace(start.validation, best_step=step, best_loss=loss))


def find_resume_point(
    job: TrainJob, attempt: Attempt, rank: int, store: dist.Store | None, emit: EventEmitter
) -> ResumePoint:
    """Return where to resume; rank 0 chooses the checkpoint, settles which is the best, and tells the others."""
    if rank == 0:
        folder, reporter = checkpoints_folder(attempt.run_folder), _EventReporter(emit)
        checkpoint = latest_complete(attempt.store, folder, attempt=attempt, reporter=reporter)
        _check_resume_policy(job, checkpoint)
        decays = checkpoint is not None and not job.phases
        if decays and (warning := check_resumed_decay(job.recipe, job.steps, checkpoint)):
            emit("warning", text=warning)
        best = settle_best(attempt, checkpoint, wanted=job.recipe.checkpoint.best is not None, reporter=reporter)
        return _tell(ResumePoint(checkpoint, best), store, "resume")
    assert store is not None
    return _hear(store, "resume")


def first_part(job: TrainJob, resume: ResumePoint) -> TrainJob:
    """Return the phase that goes on from a checkpoint: the one of the next step.

    Where the run was stopped before the validation at the end of a phase, that phase still has to measure it.
    """
    checkpoint = resume.checkpoint
    if checkpoint is None:
        return job.at(0)
    step, ended = checkpoint.step, job.at(checkpoint.step - 1)
    record = resume.validation or ValidationRecord.from_facts(checkpoint.facts)
    is_due = any(ended.validates(name, step) for name in ended.validations)
    return ended if is_due and record is not None and record.step != step else job.at(step)


def _tell(point: ResumePoint, store: dist.Store | None, key: str) -> ResumePoint:
    """Tell the other ranks where to go on."""
    if store is not None:
        plain = None if point.checkpoint is None else _checkpoint_to_plain(point.checkpoint)
        best = None if point.best is None else asdict(point.best)
        store.set(key, orjson.dumps({"checkpoint": plain, "best": best}).decode())
    return point


def _hear(store: dist.Store, key: str) -> ResumePoint:
    """Return what rank 0 tells."""
    message = orjson.loads(store.get(key))
    checkpoint = None if message["checkpoint"] is None else _checkpoint_from_plain(message["checkpoint"])
    return ResumePoint(checkpoint, None if message["best"] is None else BestPointer(**message["best"]))


def _checkpoint_to_plain(checkpoint: CompleteCheckpoint) -> dict[str, Any]:
    """Return what the other ranks need of a checkpoint: without the list of all ranks' files and of all tensors.

    Every rank reading the whole manifest is gigabytes from one object at 4,096 ranks.
    """
    manifest, index = checkpoint.manifest, checkpoint.facts["pieces"]
    return {
        "step": checkpoint.step,
        "path": checkpoint.path,
        "attempt": checkpoint.attempt,
        "kind": manifest.kind,
        "spec": manifest.spec,
        "facts": {name: value for name, value in manifest.facts.items() if name != "tensors"},
        "files": [asdict(entry) for entry in manifest.files if entry.path == index],
    }


def _checkpoint_from_plain(plain: Mapping[str, Any]) -> CompleteCheckpoint:
    manifest = Manifest(
        plain["kind"], plain["spec"], tuple(FileEntry(**entry) for entry in plain["files"]), plain["facts"]
    )
    return CompleteCheckpoint(plain["step"], plain["path"], plain["attempt"], manifest)


def reached_boundary(
    attempt: Attempt, step: int, rank: int, store: dist.Store | None, *, wants_best: bool
) -> ResumePoint:
    """Return the checkpoint at the end of a phase that this attempt has reached; rank 0 reads it for all."""
    key = f"boundary {step}"
    if rank == 0:
        folder = checkpoints_folder(attempt.run_folder)
        checkpoint = open_checkpoint(attempt.store, step_folder(folder, step))
        best = list_checkpoints(attempt.store, folder).best if wants_best else None
        return replace(_tell(ResumePoint(checkpoint, best), store, key), at_boundary=True)
    assert store is not None
    return replace(_hear(store, key), at_boundary=True)


def _check_resume_policy(job: TrainJob, checkpoint: CompleteCheckpoint | None) -> None:
    resume = job.recipe.checkpoint.resume
    if checkpoint is not None and resume == "fresh":
        raise InputError(
            f"`resume: fresh`, and there is a checkpoint of step {checkpoint.step}",
            where=job.recipe.where("checkpoint.resume"),
            hint="write `resume: auto` to go on from it, or start another run with --id",
        )
    if checkpoint is None and resume == "must":
        raise InputError(
            "`resume: must`, and this run has no complete checkpoint",
            where=job.recipe.where("checkpoint.resume"),
            hint="write `resume: auto` to start, or look where its checkpoints are: `trainshed checkpoints RUN`",
        )


def load_start_state(
    job: TrainJob, runner: StepRunner, emit: EventEmitter, store: Store, resume: ResumePoint
) -> StartPoint:
    """Fill the model and the optimizer from a checkpoint in `store`, from base weights, or with fresh values."""
    model, checkpoint = runner.model, resume.checkpoint
    if checkpoint is not None:
        began = time.monotonic()
        check_state_facts(checkpoint.facts, job)
        if model.lora is not None:
            _check_same_base(job, checkpoint)
            _load_weights(job, model, emit)
        facts = load_checkpoint(store, checkpoint, runner_state(runner))
        if not resume.at_boundary:
            emit(
                "resume",
                facts["step"],
                from_attempt=checkpoint.attempt,
                checkpoint=join(store.url, checkpoint.path),
                seconds=time.monotonic() - began,
            )
        validation = resume.validation or ValidationRecord.from_facts(facts)
        return StartPoint(int(facts["step"]), int(facts["skipped_steps"]), validation)
    _load_weights(job, model, emit)
    if job.base is not None:
        if model.lora is not None:
            init_base_adapters(model, job.base, job.recipe.seed)
        _check_base_loss(job, runner, job.base, emit)
    if runner.average is not None:
        runner.average.start()
    return StartPoint()


def _load_weights(job: TrainJob, model: RankModel, emit: EventEmitter) -> None:
    """Fill the model's own weights from base weights or with fresh values, and with these its adapters."""
    if job.base is not None:
        error = load_base_weights(model, job.base, job.recipe.seed)
        if error is not None:
            assert model.lora is not None
            text = f"the base weights are held as {model.lora.quantize}: relative error {error:.4f}"
            emit("note", text=f"{text} (root of the summed squares, quantised projections only)")
    elif job.recipe.model.init == "random":
        init_model(model, job.recipe.seed)
    else:
        raise InputError(
            "there are no weights to start from: `model.from` is not resolved",
            where=job.recipe.where("model"),
            hint="run `trainshed run RECIPE`, which fetches them, or write `init: random` under `model`",
        )


def base_spec(job: TrainJob) -> dict[str, Any] | None:
    """Return which base weights a run starts from, as its checkpoints name them; None for fresh ones."""
    if job.base is None:
        return None
    return {"from": job.recipe.model.from_, "sha256": job.base.sha256}


def _check_same_base(job: TrainJob, checkpoint: CompleteCheckpoint) -> None:
    """Refuse to put adapters onto other weights than those they were trained on."""
    trained_on, here = checkpoint.manifest.spec.get("base"), base_spec(job)
    if trained_on is not None and (here is None or here["sha256"] != trained_on["sha256"]):
        raise InputError(
            f"the adapters of step {checkpoint.step} were trained on {trained_on['from']} "
            f"({trained_on['sha256'][:12]}), and the base weights here are other ones",
            where=job.recipe.where("model.from"),
            hint="put the old weights back, or start another run with --id",
        )


def measure_probe_loss(runner: StepRunner, sequence_length: int, global_batch: int) -> float:
    """Return the model's loss on the probe batch, computed on this layout.

    The probe's rows are the first of a batch; all other tokens of the batch carry no loss.
    """
    mesh = runner.model.mesh
    probe = probe_batch(runner.model.config.vocab_size, PROBE_TOKENS)
    tokens = np.zeros((global_batch, sequence_length + 1), np.int64)
    labelled = np.full((global_batch, sequence_length), IGNORE_INDEX, np.int64)
    tokens[:PROBE_ROWS, : PROBE_TOKENS + 1] = probe
    labelled[:PROBE_ROWS, :PROBE_TOKENS] = probe[:, 1:]
    local_rows = mesh.layout.sample_range(global_batch, mesh.coordinates.dp)
    padding = mesh.layout.padding(global_batch, mesh.coordinates.dp)
    batch = LocalBatch(len(local_rows) + padding, None, None)
    if mesh.reads_tokens:
        rows = slice(local_rows.start, local_rows.stop)
        batch = to_local_batch(tokens[rows, :-1], labelled[rows], mesh, padding=padding)
    return runner.evaluate(batch, global_batch, labelled=PROBE_ROWS * PROBE_TOKENS).loss


@contextmanager
def cross_entropy_alone(model: RankModel) -> Iterator[None]:
    """Let a model with another loss measure the cross-entropy, which the probe's loss is."""
    kept = [stage.regularization for stage in model.stages]
    for stage in model.stages:
        stage.regularization = replace(stage.regularization, token_loss=None, preference=None)
    try:
        yield
    finally:
        for stage, regularization in zip(model.stages, kept, strict=True):
            stage.regularization = regularization


def _check_base_loss(job: TrainJob, runner: StepRunner, base: BaseWeights, emit: EventEmitter) -> None:
    """Compare the loss of the base weights on this layout with the one stored beside them."""
    length = job.order.sequence_length
    if length < PROBE_TOKENS or job.order.batch_size(0) < PROBE_ROWS:
        text = f"the probe of the base weights needs {PROBE_ROWS} rows of {PROBE_TOKENS} tokens; it was not compared"
        emit("warning", text=text)
        return
    with cross_entropy_alone(runner.model):
        loss = measure_probe_loss(runner, length, job.order.batch_size(0))
    probe = read_probe(base.folder, job.added)
    if probe is None:
        text = f"the base weights' loss on the probe batch is {loss:.6f} here, and nobody has measured it before"
        emit("warning", text=text)
        return
    bound = PROBE_BOUNDS[job.recipe.train.precision]
    emit("probe", loss=loss if loss - loss == 0 else None, expected=probe.loss, bound=bound)
    check_probe(loss, probe, bound)


class _EventReporter:
    """A reporter whose notes and warnings become events."""

    def __init__(self, emit: EventEmitter) -> None:
        self._emit = emit

    def note(self, text: str) -> None:
        self._emit("note", text=text)

    def warn(self, text: str) -> None:
        self._emit("warning", text=text)

    def task(self, label: str, *, total: float | None, unit: str) -> AbstractContextManager[ProgressTask]:
        return SILENT.task(label, total=total, unit=unit)
