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

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
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
from trainshed.engines.torch.device_clock import DeviceTimestamp
from trainshed.engines.torch.garbage_collection import collect_frozen
from trainshed.engines.torch.model import ParameterShard, RankModel
from trainshed.engines.torch.optimizer_registry import RankOptimizer
from trainshed.engines.torch.parallel import ParallelMesh, set_gradient_sync
from trainshed.engines.torch.pipeline_stage import SyncedPipelineStage
from trainshed.engines.torch.rank_health import NO_STOP_VOTES, agreed_signal
from trainshed.engines.torch.rank_timing import WINDOW_VOTE
from trainshed.engines.torch.spikes import SPIKE_FIGURES, SpikeDetector
from trainshed.engines.torch.weight_average import WeightAverage
from trainshed.models.collectives import AxisGroup
from trainshed.models.loss import IGNORE_INDEX, LOSS_TERMS, source_terms
from trainshed.models.moe import ROUTER_LOSS_TERMS, update_score_bias
from trainshed.models.preference_loss import PREFERENCE_FIGURES, count_pairs, document_slots, packed_documents

SOURCE_TOKENS = "source_tokens_"
"""What the names of the figures begin with that count the labels of each source."""
BATCH_COUNTS = ("learned_tokens", "pairs", "positions")
"""What is counted in a batch before its forward pass: labels, pairs of documents that are compared, and the sum of the
positions of all tokens within their documents."""

_EXPERT_LOAD = "expert_load"
"""How many tokens of the global batch chose each expert of each layer [layers, E]."""


class StepFigures:
    """The figures of a step by name, in one float64 vector on the device that a single all_reduce sums.

    A new figure is one more `add`, and is then read by its name. Every rank adds the same names in the same order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._names: list[str] = []
        self._tables: dict[str, torch.Tensor] = {}
        self._vector = torch.empty(0, dtype=torch.float64, device=device)
        self._parts: list[torch.Tensor] = []

    def add(self, names: Sequence[str], values: torch.Tensor) -> None:
        """Add this rank's part of some figures; `values` is a vector on the device with one value for each name."""
        assert len(values) == len(names), f"{len(values)} values for {names}"
        self._names += names
        self._parts.append(values.double())

    def add_table(self, name: str, values: torch.Tensor) -> None:
        """Add this rank's part of a whole tensor, which is summed with the figures and read on the device alone."""
        self._tables[name] = values

    def add_from_host(self, figures: Mapping[str, float]) -> None:
        """Add this rank's part of figures that the host knows, with one copy that nobody waits for."""
        values = torch.tensor(list(figures.values()), dtype=torch.float64)
        if self.device.type == "cuda":
            values = values.pin_memory().to(self.device, non_blocking=True)
        self.add(list(figures), values)

    def all_reduce(self, world_size: int) -> None:
        """Sum the figures over all ranks; from then on they can be read."""
        tables = [table.double().flatten() for table in self._tables.values()]
        summed = torch.cat([*self._parts, *tables])
        if world_size > 1:
            dist.all_reduce(summed)
        self._vector, *parts = summed.split([len(self._names), *(len(table) for table in tables)])
        shaped = zip(self._tables.items(), parts, strict=True)
        self._tables = {name: part.view_as(table) for (name, table), part in shaped}

    def add_summed(self, names: Sequence[str], values: torch.Tensor) -> None:
        """Add figures that follow from the summed ones, so that every rank has the same."""
        self._names += names
        self._vector = torch.cat([self._vector, values.double()])

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one summed figure as a scalar on the device."""
        return self._vector[self._names.index(name)]

    def table(self, name: str) -> torch.Tensor:
        """Return a summed tensor."""
        return self._tables[name]

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
    learned_tokens: int | None
    """Tokens of the batch that carried a label; None where all of them do."""
    position_sum: float | None
    """The sum of the positions of all tokens within their documents, where documents are kept apart."""
    pairs: int | None
    """Pairs that the batch compares; None where it compares none."""
    rewards: Mapping[str, float]
    """Means over these pairs: the `PREFERENCE_FIGURES` and `reward_margin`."""
    source_losses: Sequence[float | None] | None
    """The mean loss of each source's labelled tokens, None for one that the batch has none of; None: not told apart."""
    non_finite: bool
    """Loss or gradient was not a number: nothing was updated."""
    stop_signal: int | None
    """A signal that some rank has received."""
    window_is_over: bool = False
    """Rank 0 asks for the timings of all ranks."""
    spikes_in_a_row: int = 0
    """How many steps in a row were skipped as spikes, this one included; 0: this step was learned."""
    loss_limit: float | None = None
    grad_norm_limit: float | None = None
    """What a spike is above; None where none is looked for, or too few steps are known."""


@dataclass(frozen=True)
class EvaluationResult:
    """The loss of a batch without an update, on all ranks: the mean over its labels (tokens or pairs)."""

    loss: float
    labelled: int
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Those of `StepMetrics`, where pairs are compared."""
    stop_signal: int | None = None
    """The signal that some rank has received."""

    @classmethod
    def mean(cls, results: Sequence[EvaluationResult]) -> EvaluationResult:
        """Return the result of several batches together; NaN where nothing has a label.

        A batch weighs as many times the first one as it has labels. Where all have the same number, this is the plain
        mean of their losses, without any rounding of its own.
        """
        weights = [result.labelled / (results[0].labelled or 1) for result in results]

        def mean(values: Sequence[float]) -> float:
            weighted = (weight * value for weight, value in zip(weights, values, strict=True) if weight)
            return sum(weighted) / sum(weights) if sum(weights) else float("nan")

        return cls(
            mean([result.loss for result in results]),
            sum(result.labelled for result in results),
            {name: mean([result.rewards[name] for result in results]) for name in results[0].rewards},
            results[-1].stop_signal,
        )


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
        pairs = int(figures.get("pairs", 0))
        rewards = {name: figures[name] / max(1, pairs) for name in PREFERENCE_FIGURES if name in figures}
        if rewards:
            rewards["reward_margin"] = rewards["reward_chosen"] - rewards["reward_rejected"]
        return StepMetrics(
            loss=loss,
            grad_norm=norm,
            loss_terms={term: figures[term] for term in self._loss_terms},
            batch_hash=format_batch_hash(int(figures["hash_low"]), int(figures["hash_high"])),
            learned_tokens=round(figures["learned_tokens"]) if "learned_tokens" in figures else None,
            position_sum=figures.get("positions"),
            pairs=pairs if rewards else None,
            rewards=rewards,
            source_losses=_source_losses(figures),
            non_finite=not finite,
            stop_signal=agreed_signal(figures),
            window_is_over=figures.get(WINDOW_VOTE, 0.0) > 0,
            spikes_in_a_row=int(figures.get("spikes_in_a_row", 0)),
            **{name: value for name in SPIKE_FIGURES[1:] if math.isfinite(value := figures.get(name, math.inf))},
        )


def _source_losses(figures: Mapping[str, float]) -> list[float | None] | None:
    """Return the mean loss of each source, from its part of the batch's mean and the labels that it has."""
    counts = [count for name, count in figures.items() if name.startswith(SOURCE_TOKENS)]
    if not counts:
        return None
    parts = [figures[name] for name in source_terms(len(counts))]
    # Every part is divided by the labels of the whole batch.
    return [part * sum(counts) / count if count else None for part, count in zip(parts, counts, strict=True)]


class ReferenceModel:
    """The model that a preference run compares itself with; it is never updated.

    It is a frozen model of its own, or the one that is trained with its adapters switched off: then
    `adapters_disabled` makes the context in which they are.
    """

    def __init__(
        self, model: RankModel, adapters_disabled: Callable[[], AbstractContextManager[None]] | None = None
    ) -> None:
        self.model, self._adapters_disabled = model, adapters_disabled
        self._forward_backward = ForwardBackward(model)

    def document_logps(self, batch: LocalBatch) -> torch.Tensor | None:
        """Return the log-probability of each document of a batch [R, D]; None on ranks without the last stage."""
        if self._adapters_disabled is not None:
            with self._adapters_disabled():
                return self._forward_backward.document_logps(batch)
        logps = self._forward_backward.document_logps(batch)
        for stage in self.model.stages:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # no backward pass follows that would
        return logps


class StepRunner:
    """Runs steps of one rank's model. A model that compares pairs of documents needs a reference.

    `spikes` decides which steps are skipped besides those that are not finite; `average` follows the weights.
    """

    def __init__(
        self,
        model: RankModel,
        optimizer: RankOptimizer,
        reference: ReferenceModel | None = None,
        spikes: SpikeDetector | None = None,
        average: WeightAverage | None = None,
    ) -> None:
        self.model, self.optimizer, self.reference = model, optimizer, reference
        self.spikes, self.average = spikes, average
        self.forward_backward = ForwardBackward(model)
        # The loss is the same on all tensor-parallel ranks: one of them counts.
        self._counts_loss = float(model.mesh.coordinates.tp == 0)

    def step(
        self, batch: LocalBatch, global_batch: int, lr: float, votes: Mapping[str, float] = NO_STOP_VOTES
    ) -> PendingMetrics:
        """Forward, backward, sum, update; `votes` are those of `stop_votes`, and others that ranks sum with them."""
        counts = self._count_batch(batch)
        losses = self._forward_backward(batch, global_batch, counts, backward=True)
        reduce_gradients(self.optimizer.shards, self.model.mesh)
        squared_norm = squared_grad_norm(self.optimizer.shards).to(self.model.mesh.device)
        figures = self._all_reduce_figures(squared_norm, losses, batch, votes, counts)
        norm = figures["squared_grad_norm"].sqrt()
        skip = 1.0 - (torch.isfinite(norm) & torch.isfinite(figures["loss"])).double()
        if self.spikes is not None:
            cross_entropy = figures["loss"] - sum(figures[term] for term in LOSS_TERMS[1:])
            skip = self.spikes.skip(cross_entropy, norm, skip)
            figures.add_summed(SPIKE_FIGURES, self.spikes.figures())
        for weight in self.model.compute_weights:
            if weight.master.requires_grad:
                weight.mark_stale()
        self.optimizer.step(lr, norm, skip)
        if self.average is not None:
            self.average.update(skip)
        self._update_score_biases(figures, skip)
        for shard in self.model.shards:
            shard.tensor.grad = None
        return PendingMetrics(figures, self.model.loss_terms)

    def _update_score_biases(self, figures: StepFigures, skip: torch.Tensor) -> None:
        """Move the routers' biases by the load of the global batch; a skipped step moves nothing."""
        rate = self.model.regularization.moe_bias_update
        if not rate:
            return
        for shard in self.model.moved_biases:
            assert shard.parameter.layer is not None, "routers are in layers"
            load = figures.table(_EXPERT_LOAD)[shard.parameter.layer]
            # On every rank from the same sums: copies stay equal bit by bit.
            update_score_bias(shard.local_tensor, load, (1.0 - skip) * rate)

    def evaluate(
        self,
        batch: LocalBatch,
        global_batch: int,
        labelled: int | None = None,
        votes: Mapping[str, float] = NO_STOP_VOTES,
    ) -> EvaluationResult:
        """Return the loss of a batch: of its labelled tokens, or of its pairs.

        `labelled` says how many labels a batch has that does not keep documents apart, where not every token has one.
        `votes` are those of `stop_votes`.
        """
        counts = self._count_batch(batch)
        everything = labelled or global_batch * self.model.sequence_length
        losses = self._forward_backward(batch, global_batch, counts, backward=False, labelled=everything)
        no_gradient = torch.zeros((), dtype=torch.float64, device=self.model.mesh.device)
        unhashed = replace(batch, hashes=(0, 0), sources=None)
        figures = self._all_reduce_figures(no_gradient, losses, unhashed, votes, counts)
        metrics = PendingMetrics(figures, ()).read()
        counted = metrics.learned_tokens if metrics.pairs is None else metrics.pairs
        labels = everything if counted is None else counted
        return EvaluationResult(metrics.loss, labels, metrics.rewards, metrics.stop_signal)

    def _count_batch(self, batch: LocalBatch) -> torch.Tensor | None:
        """Count the `BATCH_COUNTS` of the global batch, on the device: float64 [3]; None where every token has a label.

        The sums of the step are divided by them, so they are summed over the ranks before the forward pass.
        """
        if batch.document_starts is None:
            return None
        mesh = self.model.mesh
        counts = torch.zeros(len(BATCH_COUNTS), dtype=torch.float64, device=mesh.device)
        if mesh.coordinates.pp == mesh.layout.pp - 1 and mesh.coordinates.tp == 0:
            assert batch.labels is not None
            counts[0] = (batch.labels != IGNORE_INDEX).sum()
            if mesh.coordinates.cp == 0:  # every rank has the document starts of whole rows
                columns = torch.arange(batch.document_starts.shape[1], device=mesh.device)
                counts[2] = (columns - batch.document_starts).sum()
            if self.model.regularization.preference is not None:
                documents = packed_documents(batch.document_starts, self.model.stages[-1].columns, mesh.axes.cp)
                pairs = count_pairs(batch.labels.t().flatten(), documents)
                counts[1] = pairs * (mesh.coordinates.cp == 0)  # the same on all ranks that hold parts of these rows
        if mesh.layout.world_size > 1:
            dist.all_reduce(counts)
        return counts

    def _forward_backward(
        self,
        batch: LocalBatch,
        global_batch: int,
        counts: torch.Tensor | None,
        *,
        backward: bool,
        labelled: int | None = None,
    ) -> torch.Tensor:
        if self.model.regularization.preference is not None:
            assert self.reference is not None, "a model that compares pairs has a reference"
            batch = replace(batch, reference_logps=self.reference.document_logps(batch))
        normalization = self.model.normalization
        if counts is not None:
            tokens, pairs, _ = counts.clamp(min=1.0).reciprocal().unbind()
            normalization.tokens.copy_(tokens)
            normalization.pairs.copy_(pairs)
        else:
            normalization.tokens.fill_(1.0 / (labelled or global_batch * self.model.sequence_length))
        normalization.sequences.fill_(1.0 / global_batch)
        for stage in self.model.stages:
            stage.router_losses.zero_()
            if stage.expert_load is not None:
                stage.expert_load.zero_()
        return self.forward_backward.train(batch) if backward else self.forward_backward.evaluate(batch)

    def _all_reduce_figures(
        self,
        squared_norm: torch.Tensor,
        losses: torch.Tensor,
        batch: LocalBatch,
        votes: Mapping[str, float],
        counts: torch.Tensor | None,
    ) -> StepFigures:
        """Sum everything that ranks must agree on: every figure of a step is added here."""
        router_losses = torch.stack([stage.router_losses for stage in self.model.stages]).sum(0)
        figures = StepFigures(self.model.mesh.device)
        figures.add(("squared_grad_norm",), squared_norm[None])
        figures.add(self.model.regularization.output_terms, losses.double() * self._counts_loss)
        figures.add(ROUTER_LOSS_TERMS, router_losses)
        loads = [stage.expert_load for stage in self.model.stages if stage.expert_load is not None]
        if loads:
            figures.add_table(_EXPERT_LOAD, torch.stack(loads).sum(0))
        if counts is not None:
            # Already summed over the ranks.
            figures.add(BATCH_COUNTS, counts / self.model.mesh.layout.world_size)
        if slots := self.model.regularization.source_slots:
            figures.add([f"{SOURCE_TOKENS}{number}" for number in range(slots)], self._count_sources(batch, slots))
        figures.add_from_host({"hash_low": float(batch.hashes[0]), "hash_high": float(batch.hashes[1]), **votes})
        figures.all_reduce(self.model.mesh.layout.world_size)
        return figures

    def _count_sources(self, batch: LocalBatch, slots: int) -> torch.Tensor:
        """Count this rank's labels of each source; the ranks that count the loss count them."""
        if batch.sources is None or not self._counts_loss:
            return torch.zeros(slots, dtype=torch.float64, device=self.model.mesh.device)
        assert batch.labels is not None
        labels = (batch.labels != IGNORE_INDEX).sum(1)
        numbers = torch.arange(slots, device=labels.device)
        return torch.where(batch.sources == numbers[:, None], labels, 0).sum(1).double()


class ForwardBackward:
    """Runs a rank's model over its rows: returns the sum of the losses, leaves the gradients with the weights."""

    def __init__(self, model: RankModel) -> None:
        self.model = model
        self._schedule_cache: tuple[tuple[int, ...], Any, list[torch.Tensor]] | None = None

    def train(self, batch: LocalBatch) -> torch.Tensor:
        """Run forward and backward; returns this rank's part of the `output_terms`."""
        return sum(self._run(batch, self._zero_losses, backward=True), self._zero_losses)

    def evaluate(self, batch: LocalBatch) -> torch.Tensor:
        """Run forward alone."""
        with torch.no_grad():
            return sum(self._run(batch, self._zero_losses, backward=False), self._zero_losses)

    def document_logps(self, batch: LocalBatch) -> torch.Tensor | None:
        """Return the log-probability of each document [R, D], without dropout; None on ranks without the last stage."""
        rows, slots = self.model.mesh.layout.micro_batch, document_slots(self.model.sequence_length)
        output = torch.empty(rows, slots, dtype=torch.float64, device="meta")
        with torch.no_grad():
            logps = self._run(replace(batch, samples=None, reference_logps=None), output, backward=False)
        return torch.cat(logps) if logps else None

    def _run(self, batch: LocalBatch, output: torch.Tensor, *, backward: bool) -> list[torch.Tensor]:
        """Return what the last stage gives for each micro-batch, each like `output`; nothing on ranks without it."""
        micro_batches = batch.rows // self.model.mesh.layout.micro_batch
        if self.model.mesh.layout.pp == 1:
            return self._loop(batch, micro_batches, backward=backward)
        return self._pipeline(batch, micro_batches, output, backward=backward)

    def _loop(self, batch: LocalBatch, micro_batches: int, *, backward: bool) -> list[torch.Tensor]:
        (stage,) = self.model.stages
        assert batch.tokens is not None
        assert batch.labels is not None
        parts = (
            batch.tokens,
            batch.labels,
            batch.samples,
            batch.document_starts,
            batch.reference_logps,
            batch.sources,
        )
        outputs: list[torch.Tensor] = []
        for number, inputs in enumerate(
            zip(*([None] * micro_batches if part is None else part.chunk(micro_batches) for part in parts), strict=True)
        ):
            if backward:
                set_gradient_sync(stage, self.model.mesh.layout, last=number == micro_batches - 1)
            output = stage(*inputs)
            if backward:
                output[0].backward()
            outputs.append(output.detach())
        return outputs

    def _pipeline(
        self, batch: LocalBatch, micro_batches: int, output: torch.Tensor, *, backward: bool
    ) -> list[torch.Tensor]:
        schedule, outputs = self._schedule(micro_batches, output)
        outputs.clear()
        mesh = self.model.mesh
        last = mesh.coordinates.pp == mesh.layout.pp - 1
        arguments = (batch.tokens,) if mesh.coordinates.pp == 0 else ()
        keywords: dict[str, torch.Tensor] = {}
        if batch.samples is not None:
            keywords["samples"] = batch.samples
        if batch.document_starts is not None:
            keywords["document_starts"] = batch.document_starts
        if last:
            assert batch.labels is not None
            keywords["labels"] = batch.labels
            if batch.reference_logps is not None:
                keywords["reference_logps"] = batch.reference_logps
            if batch.sources is not None:
                keywords["sources"] = batch.sources
        run: Callable[..., Any] = schedule.step if backward else schedule.eval
        options: dict[str, Any] = {"return_outputs": False} if backward else {}
        # The last stage computes the loss itself; the schedule asks for it only where there is a `target`.
        run(*arguments, target=batch.labels if last else None, **options, **keywords)
        return list(outputs)

    def _schedule(self, micro_batches: int, output: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """Return the pipeline schedule for this many micro-batches, and the list that it fills with their outputs.

        A schedule holds buffers for all its micro-batches, so only one is kept: a batch that grows, or a validation
        with another batch, replaces it.
        """
        key = (micro_batches, *output.shape)
        if self._schedule_cache is None or self._schedule_cache[0] != key:
            if self._schedule_cache is not None:
                self._schedule_cache = None
                collect_frozen()  # stages refer to themselves: without it their buffers would stay
            outputs: list[torch.Tensor] = []

            def keep_output(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                outputs.append(out.detach())
                return out[0].clone()  # not a view: zero-bubble schedules detach it in place

            stages: list[Any] = [self._pipeline_stage(number, output) for number in range(len(self.model.stages))]
            kind = self.model.mesh.layout.schedule
            multi_stage = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}
            if kind in multi_stage:
                schedule: Any = multi_stage[kind](stages, micro_batches, loss_fn=keep_output, scale_grads=False)
            else:
                single_stage = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
                schedule = single_stage(stages[0], micro_batches, loss_fn=keep_output, scale_grads=False)
            self._schedule_cache = (key, schedule, outputs)
        return self._schedule_cache[1:]

    def _pipeline_stage(self, number: int, output: torch.Tensor) -> PipelineStage:
        model, mesh = self.model, self.model.mesh
        layout, stage = mesh.layout, self.model.stages[number]
        rows, length = layout.micro_batch, model.sequence_length // layout.cp
        # With tensors on the meta device, stages need not ask each other for shapes.
        stream = torch.empty(length // layout.tp, rows, model.config.hidden, dtype=model.dtype, device="meta")
        tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
        place = (layout.chunks(mesh.coordinates.pp)[number], layout.pp * layout.vp, mesh.device)
        options: dict[str, Any] = {
            "input_args": (tokens if stage.spec.first else stream.requires_grad_(),),
            "output_args": (output.to("meta").requires_grad_() if stage.spec.last else stream.requires_grad_(),),
            "group": mesh.pp.process_group,
        }
        if layout.schedule == "zero_bubble":
            # It computes the gradients of weights on their own, and PyTorch reduces them after the last.
            return PipelineStage(stage, *place, **options)
        return SyncedPipelineStage(stage, layout, *place, **options)

    @property
    def _zero_losses(self) -> torch.Tensor:
        terms, dtype = self.model.regularization.output_terms, torch.promote_types(self.model.dtype, torch.float32)
        return torch.zeros(len(terms), dtype=dtype, device=self.model.mesh.device)


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
