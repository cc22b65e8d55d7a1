"""Where a run's weights come from: a checkpoint to go on from, base weights, or fresh ones. Never from nowhere."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from trainshed.checkpoints.base import BaseWeights
from trainshed.checkpoints.native.folder import Found, checkpoints_folder, open_checkpoint
from trainshed.checkpoints.native.loading import load
from trainshed.checkpoints.native.resuming import latest_complete
from trainshed.checkpoints.proving.probe import ROWS as PROBE_ROWS
from trainshed.checkpoints.proving.probe import TOKENS as PROBE_TOKENS
from trainshed.checkpoints.proving.probe import check_probe, probe_batch, read_probe
from trainshed.engines.torch.build import RankModel, fill_model
from trainshed.engines.torch.feed import FedBatch, Feed
from trainshed.engines.torch.job import TrainJob, Voice
from trainshed.engines.torch.learning_rate import check_resumed_decay
from trainshed.engines.torch.passes import LocalBatch
from trainshed.engines.torch.state import check_facts, state_pieces
from trainshed.engines.torch.step import Stepper
from trainshed.errors import InputError
from trainshed.models.loss import IGNORED
from trainshed.reporting import SILENT, Task
from trainshed.storage import Store, join
from trainshed.storage.attempts import Attempt

# Against a probe measured in fp32 on one process: rounding of the products is what may differ.
PROBE_BOUNDS = {"fp64": 1e-3, "fp32": 1e-3, "bf16": 0.05, "fp8": 0.2}


@dataclass(frozen=True)
class Start:
    """The first step of an attempt, and how many steps were skipped before it."""

    step: int = 0
    skipped: int = 0


def find_resume_point(
    job: TrainJob, attempt: Attempt, rank: int, store: dist.Store | None, voice: Voice
) -> Found | None:
    """Return the checkpoint to go on from; rank 0 looks and settles it, the others are told."""
    found = None
    if rank == 0:
        folder = checkpoints_folder(attempt.run_folder)
        found = latest_complete(attempt.store, folder, attempt=attempt, reporter=_Telling(voice))
        _check_wish(job, found)
        if found is not None and (said := check_resumed_decay(job.recipe, job.steps, found)):
            voice("warning", text=said)
        if store is not None:
            store.set("resume", "" if found is None else found.path)
    elif store is not None and (path := store.get("resume").decode()):
        found = open_checkpoint(attempt.store, path)
    return found


def _check_wish(job: TrainJob, found: Found | None) -> None:
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


def start_weights(job: TrainJob, stepper: Stepper, voice: Voice, store: Store, found: Found | None) -> Start:
    """Fill the model and the optimiser from a checkpoint found in `store`, from base weights, or fresh."""
    if found is not None:
        began = time.monotonic()
        check_facts(found.facts, job.order)
        facts = load(store, found, state_pieces(stepper.model, stepper.optimizer))
        voice(
            "resume",
            facts["step"],
            from_attempt=found.attempt,
            checkpoint=join(store.url, found.path),
            seconds=time.monotonic() - began,
        )
        return Start(int(facts["step"]), int(facts["skipped_steps"]))
    if job.base is not None:
        load_base(stepper.model, job.base)
        _probe(job, stepper, job.base, voice)
    elif job.recipe.model.init == "random":
        fill_model(stepper.model, job.recipe.seed)
    else:
        raise InputError(
            "there are no weights to start from: `model.from` is not resolved",
            where=job.recipe.where("model"),
            hint="run `trainshed run RECIPE`, which fetches them, or write `init: random` under `model`",
        )
    return Start()


@torch.no_grad()
def load_base(model: RankModel, base: BaseWeights) -> None:
    """Read this rank's boxes from base weights."""
    with base.open(model.config) as weights:
        for weight in model.weights:
            local = weight.local
            if local.numel():
                local.copy_(weights.read(weight.parameter, weight.offset, tuple(local.shape), local.dtype))


def measure_probe(stepper: Stepper, sequence_length: int, global_batch: int) -> float:
    """The loss on the probe batch as the model lies on this layout.

    The probe's rows take the first places of a batch; everything else in it carries no loss.
    """
    mesh = stepper.model.mesh
    probe = probe_batch(stepper.model.config.vocab_size, PROBE_TOKENS)
    tokens = np.zeros((global_batch, sequence_length + 1), np.int64)
    labelled = np.full((global_batch, sequence_length), IGNORED, np.int64)
    tokens[:PROBE_ROWS, : PROBE_TOKENS + 1] = probe
    labelled[:PROBE_ROWS, :PROBE_TOKENS] = probe[:, 1:]
    mine = mesh.layout.rows(global_batch, mesh.at.dp)
    padding = ((0, mesh.layout.padding(global_batch, mesh.at.dp)), (0, 0))
    count = len(mine) + padding[0][1]
    batch = LocalBatch(count, None, None, None)
    if mesh.reads_tokens:
        inputs = np.pad(tokens[mine.start : mine.stop, :-1], padding)
        labels = np.pad(labelled[mine.start : mine.stop], padding, constant_values=IGNORED)
        batch = LocalBatch(count, Feed.placed(inputs, mesh), Feed.placed(labels, mesh), None)
    return stepper.evaluate(FedBatch(batch, (0, 0)), global_batch, labelled=PROBE_ROWS * PROBE_TOKENS)


def _probe(job: TrainJob, stepper: Stepper, base: BaseWeights, voice: Voice) -> None:
    """Compare the loss of the base weights on this layout with the one stored beside them."""
    length = job.order.sequence_length
    if length < PROBE_TOKENS or job.order.batch_size(0) < PROBE_ROWS:
        text = f"the probe of the base weights needs {PROBE_ROWS} rows of {PROBE_TOKENS} tokens; it was not compared"
        voice("warning", text=text)
        return
    loss = measure_probe(stepper, length, job.order.batch_size(0))
    probe = read_probe(base.folder)
    if probe is None:
        text = f"the base weights' loss on the probe batch is {loss:.6f} here, and nobody has measured it before"
        voice("warning", text=text)
        return
    bound = PROBE_BOUNDS[job.recipe.train.precision]
    voice("probe", loss=loss if loss - loss == 0 else None, expected=probe.loss, bound=bound)
    check_probe(loss, probe, bound)


class _Telling:
    """A reporter whose notes and warnings become events."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice

    def note(self, text: str) -> None:
        self._voice("note", text=text)

    def warn(self, text: str) -> None:
        self._voice("warning", text=text)

    def task(self, label: str, *, total: float | None, unit: str) -> AbstractContextManager[Task]:
        return SILENT.task(label, total=total, unit=unit)
