"""One training step, from batch to updated weights, without the host waiting for the device.

`StepRunner.step` runs forward and backward over the micro-batches (`ForwardBackward`: a plain loop, or PyTorch's
pipeline schedules), sums the gradients that backward left in parts, and updates. Everything that ranks must agree on
travels in one vector that is summed over the world once per step: gradient norm, losses, the batch's hash, requests to
stop. The update reads the norm from it on the device; the host reads it when it has arrived, a step later on a GPU.

Shapes: R rows of the global batch on this rank, S tokens of a row on this context-parallel rank, B rows of a
micro-batch, s = S / tp, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from trainshed.data.order import format_batch_hash
from trainshed.engines.torch.batch_loader import HashedBatch, LocalBatch
from trainshed.engines.torch.model import ParameterShard, RankModel
from trainshed.engines.torch.optimizer_registry import RankOptimizer
from trainshed.engines.torch.parallel import ParallelMesh
from trainshed.engines.torch.rank_health import STOP_SIGNALS, agreed_signal
from trainshed.models.collectives import AxisGroup

_METRIC_NAMES = ("squared_norm", "loss", "z_loss", "moe_balance", "moe_z", "hash_low", "hash_high")


@dataclass(frozen=True)
class StepMetrics:
    """What all ranks agree a step gave."""

    loss: float
    grad_norm: float
    z_loss: float
    moe_balance: float
    moe_z: float
    batch_hash: str
    bad: bool
    """Loss or gradient was no number: nothing was updated."""
    stop: int | None
    """A signal that some rank has received."""


class PendingMetrics:
    """A step's figures on their way to the host."""

    def __init__(self, summed: torch.Tensor) -> None:
        self._host = summed
        if summed.is_cuda:
            self._host = torch.empty(summed.shape, dtype=summed.dtype, pin_memory=True)
            self._host.copy_(summed, non_blocking=True)
        self.mark = DeviceTimestamp(summed.device)

    def read(self) -> StepMetrics:
        """Wait for the figures and return them."""
        self.mark.wait()
        values = self._host.tolist()
        figures = dict(zip(_METRIC_NAMES, values, strict=False))
        norm = figures["squared_norm"] ** 0.5 if figures["squared_norm"] >= 0 else float("nan")
        finite = all(value - value == 0 for value in (norm, figures["loss"]))
        return StepMetrics(
            loss=figures["loss"] - figures["z_loss"],
            grad_norm=norm,
            z_loss=figures["z_loss"],
            moe_balance=figures["moe_balance"],
            moe_z=figures["moe_z"],
            batch_hash=format_batch_hash(int(figures["hash_low"]), int(figures["hash_high"])),
            bad=not finite,
            stop=agreed_signal(values[len(_METRIC_NAMES) :]),
        )


class StepRunner:
    """Runs steps of one rank's model."""

    def __init__(self, model: RankModel, optimizer: RankOptimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.passes = ForwardBackward(model)
        mesh = model.mesh
        # The loss is the same on all tensor-parallel ranks: one of them speaks.
        self._speaks = float(mesh.at.tp == 0)

    def step(self, fed: HashedBatch, global_batch: int, lr: float, votes: list[float]) -> PendingMetrics:
        """Forward, backward, sum, update."""
        losses = self._with_scale(fed, global_batch, backward=True)
        reduce_gradients(self.model.weights, self.model.mesh)
        squared = squared_grad_norm(self.model.weights).to(self.model.mesh.device)
        summed = self._sum_over_world(squared, losses, fed.hashes, votes)
        norm = summed[0].sqrt()
        bad = 1.0 - (torch.isfinite(norm) & torch.isfinite(summed[1])).double()
        self.optimizer.step(lr, norm, bad)
        for weight in self.model.weights:
            weight.held.grad = None
        return PendingMetrics(summed)

    def evaluate(self, fed: HashedBatch, global_batch: int, labelled: int | None = None) -> float:
        """The cross-entropy of a batch, summed over its labelled tokens and divided by their count."""
        losses = self._with_scale(fed, global_batch, backward=False, labelled=labelled)
        nothing = torch.zeros((), dtype=torch.float64, device=self.model.mesh.device)
        return PendingMetrics(self._sum_over_world(nothing, losses, (0, 0), [0.0] * len(STOP_SIGNALS))).read().loss

    def _with_scale(
        self, fed: HashedBatch, global_batch: int, *, backward: bool, labelled: int | None = None
    ) -> torch.Tensor:
        scale = self.model.scale
        scale.tokens.fill_(1.0 / (labelled or global_batch * self.model.sequence_length))
        scale.sequences.fill_(1.0 / global_batch)
        for chunk in self.model.chunks:
            chunk.router_losses.zero_()
        return self.passes.train(fed.batch) if backward else self.passes.evaluate(fed.batch)

    def _sum_over_world(
        self, squared: torch.Tensor, losses: torch.Tensor, hashes: tuple[int, int], votes: list[float]
    ) -> torch.Tensor:
        device = self.model.mesh.device
        router = torch.stack([chunk.router_losses for chunk in self.model.chunks]).sum(0)
        told = torch.tensor([*map(float, hashes), *votes], dtype=torch.float64)
        if device.type == "cuda":
            told = told.pin_memory().to(device, non_blocking=True)
        summed = torch.cat([squared.double()[None], losses.double() * self._speaks, router.double(), told])
        if self.model.mesh.layout.world_size > 1:
            dist.all_reduce(summed)
        return summed


class ForwardBackward:
    """Runs a rank's model over its rows; the sum of losses comes back, gradients stay with the weights."""

    def __init__(self, model: RankModel) -> None:
        self.model = model
        self._schedule_now: tuple[int, Any, list[torch.Tensor]] | None = None

    def train(self, batch: LocalBatch) -> torch.Tensor:
        """Forward and backward; returns this rank's part of [loss, z-loss part]."""
        return self._run(batch, backward=True)

    def evaluate(self, batch: LocalBatch) -> torch.Tensor:
        """Forward alone."""
        with torch.no_grad():
            return self._run(batch, backward=False)

    def _run(self, batch: LocalBatch, *, backward: bool) -> torch.Tensor:
        count = batch.rows // self.model.mesh.layout.micro_batch
        if self.model.mesh.layout.pp == 1:
            return self._loop(batch, count, backward=backward)
        return self._pipeline(batch, count, backward=backward)

    def _loop(self, batch: LocalBatch, count: int, *, backward: bool) -> torch.Tensor:
        (chunk,) = self.model.chunks
        assert batch.tokens is not None
        assert batch.labels is not None
        samples = [None] * count if batch.samples is None else batch.samples.chunk(count)
        total = self._nothing.clone()
        for number, (tokens, labels, rows) in enumerate(
            zip(batch.tokens.chunk(count), batch.labels.chunk(count), samples, strict=True)
        ):
            if backward:
                self._stay_whole(chunk, last=number == count - 1)
            loss = chunk(tokens, labels, rows)
            if backward:
                loss[0].backward()
            total += loss.detach()
        return total

    def _stay_whole(self, chunk: torch.nn.Module, *, last: bool) -> None:
        """Say how long FSDP keeps weights and gradients whole between micro-batches.

        none, zero1: gradients add up whole and are summed over ranks after the last; zero2: they are summed and cut
        after each; in both, weights stay whole until the last. full: nothing stays whole.
        """
        if not isinstance(chunk, FSDPModule):
            return
        mode = self.model.mesh.layout.shard
        chunk.set_is_last_backward(last)
        chunk.set_requires_gradient_sync(last or mode in ("zero2", "full"))
        chunk.set_reshard_after_backward(last or mode == "full")

    def _pipeline(self, batch: LocalBatch, count: int, *, backward: bool) -> torch.Tensor:
        schedule, outcomes = self._schedule(count)
        outcomes.clear()
        mesh = self.model.mesh
        last = mesh.at.pp == mesh.layout.pp - 1
        arguments = (batch.tokens,) if mesh.at.pp == 0 else ()
        keywords: dict[str, torch.Tensor] = {}
        if batch.samples is not None:
            keywords["samples"] = batch.samples
        if last:
            assert batch.labels is not None
            keywords["labels"] = batch.labels
        run: Callable[..., Any] = schedule.step if backward else schedule.eval
        options: dict[str, Any] = {"return_outputs": False} if backward else {}
        # The loss comes out of the last chunk itself; `target` is what makes the schedule ask for it.
        run(*arguments, target=batch.labels if last else None, **options, **keywords)
        return torch.stack(outcomes).sum(0) if outcomes else self._nothing.clone()

    def _schedule(self, count: int) -> tuple[Any, list[torch.Tensor]]:
        """The pipeline schedule for this many micro-batches.

        A schedule holds buffers for all its micro-batches, so only one is kept: a batch that grows, or a validation
        with another batch, makes a new one in its place.
        """
        if self._schedule_now is None or self._schedule_now[0] != count:
            self._schedule_now = None
            outcomes: list[torch.Tensor] = []

            def keep(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                outcomes.append(out.detach())
                return out[0].clone()  # not a view: zero-bubble schedules detach it in place

            stages: list[Any] = [self._stage(number) for number in range(len(self.model.chunks))]
            kind = self.model.mesh.layout.schedule
            several = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}
            if kind in several:
                schedule: Any = several[kind](stages, count, loss_fn=keep, scale_grads=False)
            else:
                single = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
                schedule = single(stages[0], count, loss_fn=keep, scale_grads=False)
            self._schedule_now = (count, schedule, outcomes)
        return self._schedule_now[1:]

    def _stage(self, number: int) -> PipelineStage:
        model, mesh = self.model, self.model.mesh
        layout, chunk = mesh.layout, self.model.chunks[number]
        rows, length = layout.micro_batch, model.sequence_length // layout.cp
        # Metadata stands for tensors, so that stages need not ask each other for shapes.
        stream = torch.empty(length // layout.tp, rows, model.config.hidden, dtype=model.dtype, device="meta")
        tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
        return PipelineStage(
            chunk,
            layout.chunks(mesh.at.pp)[number],
            layout.pp * layout.vp,
            mesh.device,
            input_args=(tokens if chunk.spec.first else stream.requires_grad_(),),
            output_args=(self._nothing.to("meta").requires_grad_() if chunk.spec.last else stream.requires_grad_(),),
            group=mesh.pp.process_group,
        )

    @cached_property
    def _nothing(self) -> torch.Tensor:
        wide = torch.promote_types(self.model.dtype, torch.float32)
        return torch.zeros(2, dtype=wide, device=self.model.mesh.device)


def reduce_gradients(weights: Iterable[ParameterShard], mesh: ParallelMesh) -> None:
    """Sum the gradients that are still in parts: over tp, and over the two ends of a pipeline with tied embeddings.

    FSDP has summed over the data-parallel ranks already; sums commute, so doing these once per step on what is left on
    each rank gives the same as doing them for every micro-batch.
    """
    weights = list(weights)
    _all_reduce_gradients(_gradients(weight for weight in weights if weight.tied), mesh.tied)
    _all_reduce_gradients(_gradients(weight for weight in weights if weight.summed_over_tp), mesh.axes.tp)


def _gradients(weights: Iterable[ParameterShard]) -> list[torch.Tensor]:
    """Gradients of these weights, zeros where a rank saw nothing of one, so that all ranks sum the same."""
    found = []
    for weight in weights:
        if weight.held.grad is None:
            weight.held.grad = torch.zeros_like(weight.held)
        gradient = weight.gradient
        assert gradient is not None
        found.append(gradient)
    return found


def _all_reduce_gradients(gradients: list[torch.Tensor], group: AxisGroup) -> None:
    if group.size == 1 or not gradients:
        return
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat, group=group.process_group)
    for gradient, summed in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(summed)


def squared_grad_norm(weights: Iterable[ParameterShard]) -> torch.Tensor:
    """Sum the squares of the gradients this rank owns: float64 scalar, to be summed over all ranks."""
    owned = [g for weight in weights if weight.owner and (g := weight.gradient) is not None and g.numel()]
    if not owned:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(owned)
    return torch.stack([norm.double() for norm in norms]).square().sum()


class DeviceTimestamp:
    """A point in the device's work, made when it is queued; on a CPU simply now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.monotonic()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has passed it."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceTimestamp) -> float:
        """Seconds between two marks that have been passed."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1000
        return self._time - earlier._time
