"""The losses that `train.loss` can name, and the base class of one that a plugin brings.

This module does not import torch, so that a plugin can register a loss on a machine that only plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from trainshed.plugins import Registry
from trainshed.recipe.train import TrainingLoss

if TYPE_CHECKING:
    import torch

    from trainshed.models.registered_loss import VocabularyLogits


class TokenLoss(ABC):
    """A loss that is a sum over tokens, each computed from the logits and the label of that token.

    The engine does the rest on every layout: it computes the logits a slice of tokens at a time, leaves out tokens
    without a label, divides by the number of labelled tokens in the global batch, and carries the gradient on. Options
    of `train.loss` are the keyword arguments of the class.

    With tensor parallelism a rank has a part of the vocabulary. `VocabularyLogits` sums over all of it; a class that
    uses only its methods gives the same loss on every layout. One that must see whole rows of logits says so in
    `vocabulary_parallel`, and is refused where tp is above 1.
    """

    vocabulary_parallel: ClassVar[bool] = True

    @abstractmethod
    def loss(self, logits: VocabularyLogits, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token [C]: what the run reports as its loss, in training and validation."""

    def extra(self, logits: VocabularyLogits, labels: torch.Tensor) -> torch.Tensor | None:
        """Return a further term of each token [C] that training adds; it is reported apart, as `z_loss`."""
        return None


LOSSES: Registry[Any] = Registry("loss", {"cross_entropy": "trainshed.models.loss:linear_cross_entropy"})
"""By name: a `TokenLoss`. Our own cross entropy has a kernel of its own, with `train.z_loss` in it."""


def build_loss(section: TrainingLoss | None) -> TokenLoss | None:
    """Make the loss that a recipe names; None where it is our own cross entropy."""
    if section is None or LOSSES.owner(section.name) is None:
        return None
    return LOSSES.find(section.name)(**(section.options or {}))
