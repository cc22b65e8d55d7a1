"""Forward and backward over the micro-batches of a step: a plain loop, or PyTorch's pipeline schedules.

Shapes: R rows of the global batch on this rank, S tokens of a row on this context-parallel rank, B rows of a
micro-batch, s = S / tp, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from trainshed.engines.torch.build import RankModel


@dataclass(frozen=True)
class LocalBatch:
    """This rank's rows of a step.

    `tokens` and `labels` are int64 [R, S], None on ranks whose chunks need none; `samples` are the run's sample numbers
    [R], there only where dropout needs them.
    """

    rows: int
    tokens: torch.Tensor | None
    labels: torch.Tensor | None
    samples: torch.Tensor | None


class Passes:
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
