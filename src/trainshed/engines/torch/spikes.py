"""Steps that leave the usual: skipped if their loss or gradient norm is far above those of the last learned steps.

A figure is a spike if it is above mean + sigma · standard deviation of its window: the last `window` steps that were
learned. Nothing is a spike before the window is full, and a low figure never is one. A skipped step does not enter the
window. It begins anew with a phase of other data, another batch or other lengths: all of its steps may be above what
was usual before.

The window is on the device, because the host reads a step's figures when the next step is already running. All ranks
have the same summed figures, so they decide alike. The window is saved with a checkpoint, so that a resumed run decides
as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainshed.checkpoints.native.shards import TensorShard
from trainshed.engines.torch.parallel import ParallelMesh
from trainshed.recipe.optimizer import Spikes

SPIKE_FIGURES = ("spikes_in_a_row", "loss_limit", "grad_norm_limit")
"""What a step tells of its decision: skipped steps in a row, this one included, and what was still allowed."""


class SpikeDetector:
    """Decides about each step from the figures of the last learned ones."""

    def __init__(self, options: Spikes, mesh: ParallelMesh) -> None:
        self.options, self.owner = options, mesh.coordinates.is_first
        self.window = torch.zeros(options.window, 2, dtype=torch.float64, device=mesh.device)
        """Loss and gradient norm of learned steps; the oldest is overwritten by the next."""
        self.counts = torch.zeros(2, dtype=torch.int64, device=mesh.device)
        """Steps that were learned, and steps that were skipped in a row."""

    @torch.no_grad()
    def skip(self, loss: torch.Tensor, norm: torch.Tensor, non_finite: torch.Tensor) -> torch.Tensor:
        """Return 1.0 if the step is skipped, as a spike or as one that is not finite; remember it if it is not."""
        figures, options = torch.stack([loss.double(), norm.double()]), self.options
        learned, in_a_row = self.counts.unbind()
        limits = self.window.mean(0) + options.sigma * self.window.std(0)
        self.limits = torch.where(learned >= options.window, limits, torch.inf)
        spike = (figures > self.limits).any() & (non_finite == 0)
        skip = torch.maximum(spike.double(), non_finite)
        place = (learned % options.window)[None]
        oldest = self.window.index_select(0, place)  # by a tensor: an index would be read on the host
        self.window.index_copy_(0, place, torch.where(skip > 0, oldest, figures[None]))
        learned += (skip == 0).to(torch.int64)
        # A step that is not finite neither continues a row of spikes nor ends it.
        in_a_row.copy_(torch.where(spike, in_a_row + 1, torch.where(non_finite > 0, in_a_row, 0)))
        self.spike = spike
        return skip

    def restart(self) -> None:
        """Forget the learned steps: nothing is a spike before the window is full again."""
        self.counts.zero_()

    def figures(self) -> torch.Tensor:
        """Return the `SPIKE_FIGURES` of the last decision: 0 in a row if it was not a spike."""
        in_a_row = torch.where(self.spike, self.counts[1], 0).double()
        return torch.stack([in_a_row, *self.limits.unbind()])

    def state_tensors(self) -> Mapping[str, TensorShard]:
        """Return the state for a checkpoint; every rank has all of it."""
        return {
            f"spikes.{name}": TensorShard(tuple(tensor.shape), (0,) * tensor.dim(), tensor, self.owner)
            for name, tensor in (("window", self.window), ("counts", self.counts))
        }
