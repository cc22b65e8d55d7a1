"""Small runs on the rank pool, and what they leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from support.recipes.small_recipes import ALONE, world_size
from support.runs.rank_pool import RankPool
from support.runs.small_ranks import train_small
from trainshed.checkpoints.native.folder import CompleteCheckpoint, checkpoints_folder, complete_checkpoints
from trainshed.checkpoints.native.index import read_index
from trainshed.checkpoints.native.reader import load_checkpoint
from trainshed.checkpoints.native.shards import DTYPES, TensorShard
from trainshed.observe.event_log import read_events, read_steps
from trainshed.storage import LocalStore


class SmallRuns:
    """Runs small recipes and remembers what one process gave."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self._made = 0
        self._alone: dict[tuple[str, tuple[str, ...]], list[dict[str, Any]]] = {}

    def new_folder(self) -> Path:
        """A folder for another run."""
        self._made += 1
        made = self.folder / f"run-{self._made}"
        made.mkdir()
        return made

    def train(self, folder: Path, model: str, layout: str, *overrides: str) -> list[dict[str, Any]]:
        """Train a run, or train on; returns the step events of the whole run so far."""
        codes = self.pool.run(train_small, folder, model, layout, overrides, ranks=world_size(layout))
        assert set(codes) == {0}
        return read_steps(LocalStore(folder), "")

    def fresh(self, model: str, layout: str, *overrides: str) -> list[dict[str, Any]]:
        """Train a new run; returns its step events."""
        return self.train(self.new_folder(), model, layout, *overrides)

    def alone(self, model: str, *overrides: str) -> list[dict[str, Any]]:
        """The step events of one process, trained once."""
        key = (model, overrides)
        if key not in self._alone:
            self._alone[key] = self.fresh(model, ALONE, *overrides)
        return self._alone[key]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind that all attempts of a run have written."""
    return [event for event in read_events(LocalStore(folder), "") if event["kind"] == kind]


def checkpoint(folder: Path, step: int) -> CompleteCheckpoint:
    """The complete checkpoint of a step."""
    return next(
        found for found in complete_checkpoints(LocalStore(folder), checkpoints_folder("")) if found.step == step
    )


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, put together."""
    store, found = LocalStore(folder), checkpoint(folder, step)
    stored = read_index(store, found)
    whole = {name: torch.empty(each.shape, dtype=DTYPES[each.dtype]) for name, each in stored.items()}
    load_checkpoint(
        store, found, {name: TensorShard(each.shape, (0,) * each.dim(), each) for name, each in whole.items()}
    )
    return whole


def difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], figure: str) -> float:
    """The largest relative difference of a figure between the steps of two runs."""
    pairs = [(a[figure], b[figure]) for a, b in zip(one, other, strict=True)]
    return max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)


def figures(steps: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What each step gave, without its times."""
    names = ("step", "loss", "grad_norm", "lr", "batch_hash", "tokens", "skipped", "moe_balance", "moe_z", "z_loss")
    return [tuple(event.get(name) for name in names) for event in steps]
