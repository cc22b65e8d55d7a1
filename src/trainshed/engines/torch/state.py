"""A rank's training state: what a checkpoint holds, and what a run starts from.

A run starts from its last checkpoint (on this layout or another), from base weights, or from fresh ones; where none of
them is asked for, that is an error. The loss of base weights is compared with the one stored beside them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainshed.checkpoints.base import BaseWeights
from trainshed.checkpoints.native.folder import CompleteCheckpoint, checkpoints_folder, latest_complete, open_checkpoint
from trainshed.checkpoints.native.reader import load_checkpoint
from trainshed.checkpoints.native.shards import TensorShard
from trainshed.checkpoints.prove.probe import PROBE_ROWS, PROBE_TOKENS, check_probe, probe_batch, read_probe
from trainshed.data.order import DataOrder
from trainshed.data.sampling.schedule import SkipList
from trainshed.engines.torch.batch_loader import BatchLoader, HashedBatch, LocalBatch
from trainshed.engines.torch.learning_rate import DecaySpan, check_resumed_decay
from trainshed.engines.torch.model import RankModel, init_model
from trainshed.engines.torch.optimizer_registry import RankOptimizer
from trainshed.engines.torch.rank_env import EventEmitter, TrainJob
from trainshed.engines.torch.step import StepRunner
from trainshed.errors import InputError
from trainshed.models.loss import IGNORE_INDEX
from trainshed.reporting import SILENT, ProgressTask
from trainshed.storage import Store, join
from trainshed.storage.attempts import Attempt


def state_pieces(model: RankModel, optimizer: RankOptimizer) -> dict[str, TensorShard]:
    """Every tensor of the state under its global name; loading fills the same tensors in place."""
    pieces = {
        f"model.{weight.name}": TensorShard(weight.parameter.shape, weight.offset, weight.local, weight.owner)
        for weight in model.weights
    }
    at = model.mesh.at
    speaks = not any((at.pp, at.dp, at.cp, at.tp))
    return pieces | dict(optimizer.pieces()) | {"optimizer.updates": TensorShard((), (), optimizer.updates, speaks)}


def state_facts(order: DataOrder, step: int, skipped: int, decay: DecaySpan | None) -> dict[str, Any]:
    """What besides tensors a resumed run must know; `step` is the next one, `decay` where the learning rate decays."""
    return {
        "step": step,
        "consumed_samples": order.consumed(step),
        "skipped_steps": skipped,
        "data_skip": [list(each) for each in order.skip.ranges],
        "sequence_length": order.sequence_length,
        "lr_decay": decay,
    }


def check_state_facts(facts: Mapping[str, Any], order: DataOrder) -> None:
    """Refuse to go on where the data behind the checkpoint is no longer what the recipe says."""
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
    before = SkipList([(start, stop) for start, stop in facts["data_skip"]])
    end = before.stream_end(consumed)
    if _skipped_before(before, end) != _skipped_before(order.skip, end):
        raise InputError(
            f"`data.skip` says something else about the first {end} samples, which this run has already passed",
            where="data.skip",
            hint=f"skip samples from {end} on, or start another run with --id",
        )


def _skipped_before(skip: SkipList, end: int) -> list[tuple[int, int]]:
    """The skipped ranges below a sample of the stream."""
    return [(start, min(stop, end)) for start, stop in skip.ranges if start < end]


# Against a probe measured in fp32 on one process: rounding of the products is what may differ.
PROBE_BOUNDS = {"fp64": 1e-3, "fp32": 1e-3, "bf16": 0.05, "fp8": 0.2}


@dataclass(frozen=True)
class StartPoint:
    """The first step of an attempt, and how many steps were skipped before it."""

    step: int = 0
    skipped: int = 0


def find_resume_point(
    job: TrainJob, attempt: Attempt, rank: int, store: dist.Store | None, voice: EventEmitter
) -> CompleteCheckpoint | None:
    """Return the checkpoint to go on from; rank 0 looks and settles it, the others are told."""
    found = None
    if rank == 0:
        folder = checkpoints_folder(attempt.run_folder)
        found = latest_complete(attempt.store, folder, attempt=attempt, reporter=_EventReporter(voice))
        _check_resume_policy(job, found)
        if found is not None and (said := check_resumed_decay(job.recipe, job.steps, found)):
            voice("warning", text=said)
        if store is not None:
            store.set("resume", "" if found is None else found.path)
    elif store is not None and (path := store.get("resume").decode()):
        found = open_checkpoint(attempt.store, path)
    return found


def _check_resume_policy(job: TrainJob, found: CompleteCheckpoint | None) -> None:
    resume = job.recipe.checkpoint.resume
    if found is not None and resume == "fresh":
        raise InputError(
            f"`resume: fresh`, and there is a checkpoint of step {found.step}",
            where=job.recipe.where("checkpoint.resume"),
            hint="write `resume: auto` to go on from it, or start another run with --id",
        )
    if found is None and resume == "must":
        raise InputError(
            "`resume: must`, and this run has no complete checkpoint",
            where=job.recipe.where("checkpoint.resume"),
            hint="write `resume: auto` to start, or look where its checkpoints are: `trainshed checkpoints RUN`",
        )


def load_start_state(
    job: TrainJob, stepper: StepRunner, voice: EventEmitter, store: Store, found: CompleteCheckpoint | None
) -> StartPoint:
    """Fill the model and the optimiser from a checkpoint found in `store`, from base weights, or fresh."""
    if found is not None:
        began = time.monotonic()
        check_state_facts(found.facts, job.order)
        facts = load_checkpoint(store, found, state_pieces(stepper.model, stepper.optimizer))
        voice(
            "resume",
            facts["step"],
            from_attempt=found.attempt,
            checkpoint=join(store.url, found.path),
            seconds=time.monotonic() - began,
        )
        return StartPoint(int(facts["step"]), int(facts["skipped_steps"]))
    if job.base is not None:
        load_base_weights(stepper.model, job.base)
        _check_base_loss(job, stepper, job.base, voice)
    elif job.recipe.model.init == "random":
        init_model(stepper.model, job.recipe.seed)
    else:
        raise InputError(
            "there are no weights to start from: `model.from` is not resolved",
            where=job.recipe.where("model"),
            hint="run `trainshed run RECIPE`, which fetches them, or write `init: random` under `model`",
        )
    return StartPoint()


@torch.no_grad()
def load_base_weights(model: RankModel, base: BaseWeights) -> None:
    """Read this rank's boxes from base weights."""
    with base.open(model.config) as weights:
        for weight in model.weights:
            local = weight.local
            if local.numel():
                local.copy_(weights.read(weight.parameter, weight.offset, tuple(local.shape), local.dtype))


def measure_probe_loss(stepper: StepRunner, sequence_length: int, global_batch: int) -> float:
    """The loss on the probe batch as the model lies on this layout.

    The probe's rows take the first places of a batch; everything else in it carries no loss.
    """
    mesh = stepper.model.mesh
    probe = probe_batch(stepper.model.config.vocab_size, PROBE_TOKENS)
    tokens = np.zeros((global_batch, sequence_length + 1), np.int64)
    labelled = np.full((global_batch, sequence_length), IGNORE_INDEX, np.int64)
    tokens[:PROBE_ROWS, : PROBE_TOKENS + 1] = probe
    labelled[:PROBE_ROWS, :PROBE_TOKENS] = probe[:, 1:]
    mine = mesh.layout.rows(global_batch, mesh.at.dp)
    padding = ((0, mesh.layout.padding(global_batch, mesh.at.dp)), (0, 0))
    count = len(mine) + padding[0][1]
    batch = LocalBatch(count, None, None, None)
    if mesh.reads_tokens:
        inputs = np.pad(tokens[mine.start : mine.stop, :-1], padding)
        labels = np.pad(labelled[mine.start : mine.stop], padding, constant_values=IGNORE_INDEX)
        batch = LocalBatch(count, BatchLoader.placed(inputs, mesh), BatchLoader.placed(labels, mesh), None)
    return stepper.evaluate(HashedBatch(batch, (0, 0)), global_batch, labelled=PROBE_ROWS * PROBE_TOKENS)


@contextmanager
def cross_entropy_alone(model: RankModel) -> Iterator[None]:
    """Let a model with a registered loss measure the cross-entropy, which the probe's loss is."""
    kept = [stage.losses for stage in model.chunks]
    for stage in model.chunks:
        stage.losses = replace(stage.losses, token_loss=None)
    try:
        yield
    finally:
        for stage, losses in zip(model.chunks, kept, strict=True):
            stage.losses = losses


def _check_base_loss(job: TrainJob, stepper: StepRunner, base: BaseWeights, voice: EventEmitter) -> None:
    """Compare the loss of the base weights on this layout with the one stored beside them."""
    length = job.order.sequence_length
    if length < PROBE_TOKENS or job.order.batch_size(0) < PROBE_ROWS:
        text = f"the probe of the base weights needs {PROBE_ROWS} rows of {PROBE_TOKENS} tokens; it was not compared"
        voice("warning", text=text)
        return
    with cross_entropy_alone(stepper.model):
        loss = measure_probe_loss(stepper, length, job.order.batch_size(0))
    probe = read_probe(base.folder)
    if probe is None:
        text = f"the base weights' loss on the probe batch is {loss:.6f} here, and nobody has measured it before"
        voice("warning", text=text)
        return
    bound = PROBE_BOUNDS[job.recipe.train.precision]
    voice("probe", loss=loss if loss - loss == 0 else None, expected=probe.loss, bound=bound)
    check_probe(loss, probe, bound)


class _EventReporter:
    """A reporter whose notes and warnings become events."""

    def __init__(self, voice: EventEmitter) -> None:
        self._voice = voice

    def note(self, text: str) -> None:
        self._voice("note", text=text)

    def warn(self, text: str) -> None:
        self._voice("warning", text=text)

    def task(self, label: str, *, total: float | None, unit: str) -> AbstractContextManager[ProgressTask]:
        return SILENT.task(label, total=total, unit=unit)
