"""What a rank is asked to train, and what it says while it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainshed.checkpoints.base import BaseWeights
from trainshed.data.order import DataOrder
from trainshed.observe.events import EventWriter
from trainshed.plan.layout import RankLayout
from trainshed.recipe import ModelConfig, Recipe
from trainshed.storage import Store


@dataclass(frozen=True)
class TrainJob:
    """A run whose data stands ready, on one layout.

    `store` and `folder` are where the run is kept; `base` are the weights it starts from, None for fresh ones.
    """

    recipe: Recipe
    config: ModelConfig
    layout: RankLayout
    name: str
    steps: int
    order: DataOrder
    validation: DataOrder | None
    store: Store
    folder: str
    base: BaseWeights | None = None
    checkpoint_home: tuple[Store, str] | None = None
    """Store and folder that hold this run's checkpoints where they are kept apart from the run."""


class Voice:
    """Where a rank's events go: into the run's store, and to whoever listens in this process."""

    def __init__(self, writer: EventWriter, *listeners: Callable[[dict[str, Any]], None]) -> None:
        self.writer, self.listeners = writer, list(listeners)

    def __call__(self, kind: str, step: int | None = None, **values: Any) -> None:
        """Emit one event."""
        self.writer.emit(kind, step, **values)
        for listener in self.listeners:
            listener({"kind": kind, "step": step, **values})
