"""What a layout is held against besides the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainshed.plan.layout import RankLayout
from trainshed.plan.performance.anatomy import Anatomy
from trainshed.recipe.section import Problem


@dataclass(frozen=True)
class Asked:
    """A run's sizes; `batch_sizes` are all its global batches, smallest first."""

    sequence_length: int
    batch_sizes: tuple[int, ...]
    lora: bool = False
    stages_written: bool = False
    """Whether somebody wrote `stages`: engines that want equal chunks take uneven ones when told so."""


Rule = Callable[[RankLayout, Anatomy, Asked], Iterator[Problem]]
"""Yields what one rule has against a layout."""
