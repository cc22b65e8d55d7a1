"""One training step, from batch to updated weights, without the host waiting for the device.

`StepRunner.step` runs forward and backward over the micro-batches (`ForwardBackward`: a plain loop, or PyTorch's
pipeline schedules), sums the gradients that backward left in parts, and updates the weights. Everything that ranks
must agree on is a named figure in one vector, which is summed over the world once per step: gradient norm, losses, the
batch's hash, votes to stop. The update reads the norm from it on the device. The host reads the vector when it has
arrived, which on a GPU is a step later.

Shapes: R rows of the global batch on this rank, S tokens of a row on this context-parallel rank, B rows of a
micro-batch, s = S / tp, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from trainshed.engines.torch.batch_loader import LocalBatch
from trainshed.engines.torch.model import ParameterShard, RankModel
from trainshed.engines.torch.optimizer_registry import RankOptimizer
from trainshed.engines.torch.parallel import ParallelMesh
from trainshed.engines.torch.rank_health import NO_STOP_VOTES, agreed_signal
from trainshed.models.collectives import AxisGroup
from trainshed.models.loss import LOSS_TERMS
from trainshed.models.moe import ROUTER_LOSS_TERMS


class StepFigures:
    """The figures of a step by name, in one float64 vector on the device that a single all_reduce sums.

    A new figure is one more `add`, and is then read by its name. Every rank adds the same names in the same order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._names: list[str] = []
        self._vector = torch.empty(0, dtype=torch.float64, device=device)
        self._parts: list[torch.Tensor] = []

    def add(self, names: Sequence[str], values: torch.Tensor) -> None:
        """Add this rank's part of some figures; `values` is a vector on the device with one value for each name."""
        assert len(values) == len(names), f"{len(values)} values for {names}"
        self._names += names
        self._parts.append(values.double())

    def add_from_host(self, figures: Mapping[str, float]) -> None:
        """Add this rank's part of figures that the host knows, with one copy that nobody waits for."""
        values = torch.tensor(list(figures.values()), dtype=torch.float64)
        if self.device.type == "cuda":
            values = values.pin_memory().to(self.device, non_blocking=True)
        self.add(list(figures), values)

    def all_reduce(self, world_size: int) -> None:
        """Sum the figures over all ranks; from then on they can be read."""
        self._vector = torch.cat(self._parts)
        if world_size > 1:
            dist.all_reduce(self._vector)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one summed figure as a scalar on the device."""
        return self._vector[self._names.index(name)]

    def copy_to_host(self) -> torch.Tensor:
        """Start to copy the vector to the host."""
        if not self._vector.is_cuda:
            return self._vector
        host = torch.empty(self._vector.shape, dtype=self._vector.dtype, pin_memory=True)
        return host.copy_(self._vector, non_blocking=True)

    def named(self, host: torch.Tensor) -> dict[str, float]:
        """Return the figures of a copy that has arrived, by their names."""
        return dict(zip(self._names, host.tolist(), strict=True))


@dataclass(frozen=True)
class StepMetrics:
    """The result of a step, the same on all ranks."""

    loss: float
    grad_norm: float
    loss_terms: Mapping[str, float]
    """The other terms that were trained on, by name: those of `RankModel.loss_terms`."""
    batch_hash: str
    non_finite: bool
    """Loss or gradient was not a number: nothing was updated."""
    stop_signal: int | None
    """A signal that some rank has received."""


class PendingMetrics:
    """The metrics of a step on their way to the host."""

    def __init__(self, figures: StepFigures, loss_terms: Sequence[str]) -> None:
        self._figures, self._loss_terms = figures, loss_terms
        self._host = figures.copy_to_host()
        self.finished_at = DeviceTimestamp(figures.device)

    def read(self) -> StepMetrics:
        """Wait for the figures and return what they mean."""
        self.finished_at.wait()
        figures = self._figures.named(self._host)
        squared_norm = figures["squared_grad_norm"]
        norm = squared_norm**0.5 if squared_norm >= 0 else float("nan")
        finite = all(value - value == 0 for value in (norm, figures["loss"]))
        # `loss` is what was differentiated; what is reported is the cross-entropy in it.
        loss = figures["loss"] - sum(figures[term] for term in LOSS_TERMS[1:])
        return StepMetrics(
            loss=loss,
            grad_norm=norm,
            loss_terms={term: figures[term] for term in self._loss_terms},
            batch_hash=format_batch_hash(int(figures["hash_low"]), int(figures["hash_high"])),
            non_finite=not finite,
            stop_signal=agreed_signal(figures),
        )


class StepRunner:
    """Runs steps of one rank's model."""

    def __init__(self, model: RankModel, optimizer: RankOptimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.forward_backward = ForwardBackward(model)
        # The loss is the same on all tensor-parallel ranks: one of them counts.
        self._counts_loss = float(model.mesh.coordinates.tp == 0)

    def step(
        self, batch: LocalBatch, global_batch: int, lr: float, stop_votes: Mapping[str, float] = NO_STOP_VOTES
    ) -> PendingMetrics:
        """Forward, backward, sum, update."""
        losses = self._forward_backward(batch, global_batch, backward=True)
        reduce_gradients(self.model.shards, self.model.mesh)
        squared_norm = squared_grad_norm(self.model.shards).to(self.model.mesh.device)
        figures = self._all_reduce_figures(squared_norm, losses, batch.hashes, stop_votes)
        norm = figures["squared_grad_norm"].sqrt()
        skip = 1.0 - (torch.isfinite(norm) & torch.isfinite(figures["loss"])).double()
        self.optimizer.step(lr, norm, skip)
        for shard in self.model.shards:
            shard.tensor.grad = None
        return PendingMetrics(figures, self.model.loss_terms)

    def evaluate(self, batch: LocalBatch, global_batch: int, labelled: int | None = None) -> float:
        """Return the cross-entropy of a batch, summed over its labelled tokens and divided by their count."""
        losses = self._forward_backward(batch, global_batch, backward=False, labelled=labelled)
        no_gradient = torch.zeros((), dtype=torch.float64, device=self.model.mesh.device)
        figures = self._all_reduce_figures(no_gradient, losses, (0, 0), NO_STOP_VOTES)
        return PendingMetrics(figures, ()).read().loss

    def _forward_backward(
        self, batch: LocalBatch, global_batch: int, *, backward: bool, labelled: int | None = None
    ) -> torch.Tensor:
        normalization = self.model.normalization
        normalization.tokens.fill_(1.0 / (labelled or global_batch * self.model.sequence_length))
        normalization.sequences.fill_(1.0 / global_batch)
        for stage in self.model.stages:
            stage.router_losses.zero_()
        return self.forward_backward.train(batch) if backward else self.forward_backward.evaluate(batch)

    def _all_reduce_figures(
        self,
        squared_norm: torch.Tensor,
        losses: torch.Tensor,
        hashes: tuple[int, int],
        stop_votes: Mapping[str, float],
    ) -> StepFigures:
        """Sum everything that ranks must agree on: every figure of a step is added here."""
        router_losses = torch.stack([stage.router_losses for stage in self.model.stages]).sum(0)
        figures = StepFigures(self.model.mesh.device)
        figures.add(("squared_grad_norm",), squared_norm[None])
        figures.add(LOSS_TERMS, losses.double() * self._counts_loss)
        figures.add(ROUTER_LOSS_TERMS, router_losses)
        figures.add_from_host({"hash_low": float(hashes[0]), "hash_high": float(hashes[1]), **stop_votes})
        figures.all_reduce(self.model.mesh.layout.world_size)
        return figures


class ForwardBackward:
    """Runs a rank's model over its rows: returns the sum of the losses, leaves the gradients with the weights."""

    def __init__(self, model: RankModel) -> None:
        self.model = model
        self._schedule_cache: tuple[int, Any, list[torch.Tensor]] | None = None

    def train(self, batch: LocalBatch) -> torch.Tensor:
        """Run forward and backward; returns this rank's part of the `LOSS_TERMS`."""
        return self._run(batch, backward=True)

    def evaluate(self, batch: LocalBatch) -> torch.Tensor:
        """Run forward alone."""
        with torch.no_grad():
            return self._run(batch, backward=False)

    def _run(self, batch: LocalBatch, *, backward: bool) -> torch.Tensor:
        micro_batches = batch.rows // self.model.mesh.layout.micro_batch
        if self.model.mesh.layout.pp == 1:
            return self._loop(batch, micro_batches, backward=backward)
        return self._pipeline(batch, micro_batches, backward=backward)

    def _loop(self, batch: LocalBatch, micro_batches: int, *, backward: bool) -> torch.Tensor:
        (stage,) = self.model.stages
        assert batch.tokens is not None
        assert batch.labels is not None
        samples = [None] * micro_batches if batch.samples is None else batch.samples.chunk(micro_batches)
        total = self._zero_losses.clone()
        for number, (tokens, labels, sample_ids) in enumerate(
            zip(batch.tokens.chunk(micro_batches), batch.labels.chunk(micro_batches), samples, strict=True)
        ):
            if backward:
                self._set_fsdp_sync(stage, last=number == micro_batches - 1)
            losses = stage(tokens, labels, sample_ids)
            if backward:
                losses[0].backward()
            total += losses.detach()
        return total

    def _set_fsdp_sync(self, stage: torch.nn.Module, *, last: bool) -> None:
        """Set how long FSDP keeps weights and gradients unsharded between micro-batches.

        none, zero1: gradients accumulate unsharded and are reduced after the last micro-batch. zero2: they are
        reduce_scattered after each. In all three, weights stay unsharded until the last. full: nothing stays unsharded.
        """
        if not isinstance(stage, FSDPModule):
            return
        mode = self.model.mesh.layout.shard
        stage.set_is_last_backward(last)
        stage.set_requires_gradient_sync(last or mode in ("zero2", "full"))
        stage.set_reshard_after_backward(last or mode == "full")

    def _pipeline(self, batch: LocalBatch, micro_batches: int, *, backward: bool) -> torch.Tensor:
        schedule, losses = self._schedule(micro_batches)
        losses.clear()
        mesh = self.model.mesh
        last = mesh.coordinates.pp == mesh.layout.pp - 1
        arguments = (batch.tokens,) if mesh.coordinates.pp == 0 else ()
        keywords: dict[str, torch.Tensor] = {}
        if batch.samples is not None:
            keywords["samples"] = batch.samples
        if last:
            assert batch.labels is not None
            keywords["labels"] = batch.labels
        run: Callable[..., Any] = schedule.step if backward else schedule.eval
        options: dict[str, Any] = {"return_outputs": False} if backward else {}
        # The last stage computes the loss itself; the schedule asks for it only where there is a `target`.
        run(*arguments, target=batch.labels if last else None, **options, **keywords)
        return torch.stack(losses).sum(0) if losses else self._zero_losses.clone()

    def _schedule(self, micro_batches: int) -> tuple[Any, list[torch.Tensor]]:
        """Return the pipeline schedule for this many micro-batches, and the list that it fills with their losses.

        A schedule holds buffers for all its micro-batches, so only one is kept: a batch that grows, or a validation
        with another batch, replaces it.
        """
        if self._schedule_cache is None or self._schedule_cache[0] != micro_batches:
            self._schedule_cache = None
            losses: list[torch.Tensor] = []

            def keep_losses(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                losses.append(out.detach())
                return out[0].clone()  # not a view: zero-bubble schedules detach it in place

            stages: list[Any] = [self._pipeline_stage(number) for number in range(len(self.model.stages))]
            kind = self.model.mesh.layout.schedule
            multi_stage = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}
            if kind in multi_stage:
                schedule: Any = multi_stage[kind](stages, micro_batches, loss_fn=keep_losses, scale_grads=False)
            else:
                single_stage = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
                schedule = single_stage(stages[0], micro_batches, loss_fn=keep_losses, scale_grads=False)
            self._schedule_cache = (micro_batches, schedule, losses)
        return self._schedule_cache[1:]

    def _pipeline_stage(self, number: int) -> PipelineStage:
        model, mesh = self.model, self.model.mesh
        layout, stage = mesh.layout, self.model.stages[number]
        rows, length = layout.micro_batch, model.sequence_length // layout.cp
        # With tensors on the meta device, stages need not ask each other for shapes.
        stream = torch.empty(length // layout.tp, rows, model.config.hidden, dtype=model.dtype, device="meta")
        tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
        losses = self._zero_losses.to("meta")
        return PipelineStage(
            stage,
            layout.chunks(mesh.coordinates.pp)[number],
            layout.pp * layout.vp,
            mesh.device,
            input_args=(tokens if stage.spec.first else stream.requires_grad_(),),
            output_args=(losses.requires_grad_() if stage.spec.last else stream.requires_grad_(),),
            group=mesh.pp.process_group,
        )

    @cached_property
    def _zero_losses(self) -> torch.Tensor:
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        return torch.zeros(len(LOSS_TERMS), dtype=dtype, device=self.model.mesh.device)


def reduce_gradients(shards: Iterable[ParameterShard], mesh: ParallelMesh) -> None:
    """Sum the gradients that are still in parts: over tp, etp, and the two ends of a pipeline with tied embeddings.

    FSDP has already summed over the data-parallel ranks. Sums commute, so one sum per step over what is left on each
    rank gives the same result as one for every micro-batch.
    """
    shards = list(shards)
    _all_reduce_gradients(_gradients(shard for shard in shards if shard.tied), mesh.tied_embedding)
    _all_reduce_gradients(_gradients(shard for shard in shards if shard.partial_over_tp), mesh.axes.tp)
    _all_reduce_gradients(_gradients(shard for shard in shards if shard.partial_over_etp), mesh.axes.etp)


def _gradients(shards: Iterable[ParameterShard]) -> list[torch.Tensor]:
    """Return the gradients of these shards, zeros where a rank has none, so that all ranks sum the same tensors."""
    gradients = []
    for shard in shards:
        if shard.tensor.grad is None:
            shard.tensor.grad = torch.zeros_like(shard.tensor)
        gradient = shard.gradient
        assert gradient is not None
        gradients.append(gradient)
    return gradients


def _all_reduce_gradients(gradients: list[torch.Tensor], group: AxisGroup) -> None:
    if group.size == 1 or not gradients:
        return
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat, group=group.process_group)
    for gradient, summed in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(summed)


def squared_grad_norm(shards: Iterable[ParameterShard]) -> torch.Tensor:
    """Sum the squares of the gradients this rank owns: float64 scalar, to be summed over all ranks."""
    owned = [g for shard in shards if shard.owner and (g := shard.gradient) is not None and g.numel()]
    if not owned:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(owned)
    return torch.stack([norm.double() for norm in norms]).square().sum()


class DeviceTimestamp:
    """A point in the device's queue of work, recorded when it is made; on a CPU it is the current time."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.monotonic()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has reached it."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceTimestamp) -> float:
        """Return the seconds between two timestamps that the device has reached."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1000
        return self._time - earlier._time
