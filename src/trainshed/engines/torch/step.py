"""One training step, from batch to updated weights, without the host waiting for the device.

Everything ranks must agree on travels in one vector that is summed over the world once per step: the gradient norm,
the losses, the batch's hash, requests to stop. The update reads the norm from it on the device; the host reads it when
it has arrived, a step later on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainshed.data.order import hash_text
from trainshed.engines.torch.build import RankModel
from trainshed.engines.torch.clock import Mark
from trainshed.engines.torch.feed import FedBatch
from trainshed.engines.torch.gradients import finish_sums, squared_norm
from trainshed.engines.torch.optimizer import AdamW
from trainshed.engines.torch.passes import Passes
from trainshed.engines.torch.signals import WATCHED, agreed

_FIGURES = ("squared_norm", "loss", "z_loss", "moe_balance", "moe_z", "hash_low", "hash_high")


@dataclass(frozen=True)
class StepOutcome:
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


class Arriving:
    """A step's figures on their way to the host."""

    def __init__(self, summed: torch.Tensor) -> None:
        self._host = summed
        if summed.is_cuda:
            self._host = torch.empty(summed.shape, dtype=summed.dtype, pin_memory=True)
            self._host.copy_(summed, non_blocking=True)
        self.mark = Mark(summed.device)

    def read(self) -> StepOutcome:
        """Wait for the figures and return them."""
        self.mark.wait()
        values = self._host.tolist()
        figures = dict(zip(_FIGURES, values, strict=False))
        norm = figures["squared_norm"] ** 0.5 if figures["squared_norm"] >= 0 else float("nan")
        finite = all(value - value == 0 for value in (norm, figures["loss"]))
        return StepOutcome(
            loss=figures["loss"] - figures["z_loss"],
            grad_norm=norm,
            z_loss=figures["z_loss"],
            moe_balance=figures["moe_balance"],
            moe_z=figures["moe_z"],
            batch_hash=hash_text(int(figures["hash_low"]), int(figures["hash_high"])),
            bad=not finite,
            stop=agreed(values[len(_FIGURES) :]),
        )


class Stepper:
    """Runs steps of one rank's model."""

    def __init__(self, model: RankModel, optimizer: AdamW) -> None:
        self.model, self.optimizer = model, optimizer
        self.passes = Passes(model)
        mesh = model.mesh
        # The loss is the same on all tensor-parallel ranks: one of them speaks.
        self._speaks = float(mesh.at.tp == 0)

    def step(self, fed: FedBatch, global_batch: int, lr: float, votes: list[float]) -> Arriving:
        """Forward, backward, sum, update."""
        losses = self._with_scale(fed, global_batch, backward=True)
        finish_sums(self.model.weights, self.model.mesh)
        squared = squared_norm(self.model.weights).to(self.model.mesh.device)
        summed = self._sum_over_world(squared, losses, fed.hashes, votes)
        norm = summed[0].sqrt()
        bad = 1.0 - (torch.isfinite(norm) & torch.isfinite(summed[1])).double()
        self.optimizer.step(lr, norm, bad)
        for weight in self.model.weights:
            weight.held.grad = None
        return Arriving(summed)

    def evaluate(self, fed: FedBatch, global_batch: int, labelled: int | None = None) -> float:
        """The cross-entropy of a batch, summed over its labelled tokens and divided by their count."""
        losses = self._with_scale(fed, global_batch, backward=False, labelled=labelled)
        nothing = torch.zeros((), dtype=torch.float64, device=self.model.mesh.device)
        return Arriving(self._sum_over_world(nothing, losses, (0, 0), [0.0] * len(WATCHED))).read().loss

    def _with_scale(
        self, fed: FedBatch, global_batch: int, *, backward: bool, labelled: int | None = None
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
