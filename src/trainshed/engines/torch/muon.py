"""Muon: momentum, made orthogonal by Newton-Schulz iterations, as the update of a matrix.

An iteration maps every singular value s of a matrix to a·s + b·s³ + c·s⁵ and leaves the singular vectors alone. With
the coefficients of Keller Jordan ("Muon: An optimizer for hidden layers in neural networks", 2024), which PyTorch's
`torch.optim.Muon` has too, five of them bring all but the smallest singular values to about 1.

The products are in the dtype of the model's products: bf16 on a GPU, as in PyTorch's; float64 in proofs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from trainshed.engines.torch.optimizer_registry import MatrixOptimizer
from trainshed.recipe.optimizer import MuonOptions, Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
"""A matrix of zeros is divided by this in place of its norm."""
_RMS_OF_ADAMW = 0.2
"""The usual root mean square of AdamW's updates, before the learning rate ("Muon is Scalable for LLM Training")."""


class Muon(MatrixOptimizer):
    """Momentum and Newton-Schulz for the matrices of layers; the keys are those of `train.optimizer.muon`."""

    state_names = ("momentum",)

    def __init__(self, settings: Optimizer) -> None:
        super().__init__(settings)
        self.keys = settings.muon or MuonOptions()

    def prepare(self, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], updates: torch.Tensor) -> torch.Tensor:
        """Average the gradient, and with `nesterov` mix it into its average once more."""
        average, momentum = state["momentum"], self.keys.momentum
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum) if self.keys.nesterov else average

    def direction(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return the nearly orthogonal matrices with the same singular vectors."""
        return newton_schulz(matrices, self.keys.ns_steps)

    def lr_scale(self, rows: int, columns: int) -> float:
        """Return the factor of the learning rate that makes steps of all shapes comparable."""
        if self.keys.adjust_lr == "original":
            return math.sqrt(max(1.0, rows / columns))
        return _RMS_OF_ADAMW * math.sqrt(max(rows, columns))


def newton_schulz(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Bring the singular values of matrices [count, rows, columns] near to 1."""
    a, b, c = COEFFICIENTS
    # The products are of the smaller side: X·Xᵀ and Xᵀ·X have the same singular values.
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # The norm bounds the largest singular value, above which the iteration would diverge.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x
